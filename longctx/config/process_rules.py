"""Rules on settings and the number of processes."""

from collections.abc import Iterator

from longctx.config.problems import Problem
from longctx.config.run import Config
from longctx.planning.layout import longest_document

MOST_PROCESSES = 1 << 20


def process_rules(config: Config, world_size: int) -> Iterator[Problem]:
    """Yields the settings that a run on `world_size` processes cannot satisfy."""
    part = config.parallel.tensor_parallel_size * config.parallel.pipeline_parallel_size
    if world_size > MOST_PROCESSES:
        fix = "start fewer processes; for --dry-run, give a smaller --gpus"
        yield Problem(
            "the number of processes", world_size, f"must be at most {MOST_PROCESSES:,}", fix
        )
    elif world_size % part:
        rule = (
            "tensor_parallel_size × pipeline_parallel_size must divide the number of "
            f"processes, {world_size}"
        )
        below = world_size // part * part
        fix = f"start {below} or {below + part} processes" if below else f"start {part} processes"
        sizes = f"{config.parallel.tensor_parallel_size} × {config.parallel.pipeline_parallel_size}"
        others = ("parallel.tensor_parallel_size", "parallel.pipeline_parallel_size")
        yield Problem(
            "parallel", sizes, rule=rule, fix=f"{fix}, or change the sizes", others=others
        )
    else:
        yield from _shards(config, config.domain(world_size))
        yield from _lengths(config, world_size)


def _shards(config: Config, domain: int) -> Iterator[Problem]:
    """Checks that shards divide the domain, and the experts' ranks divide those that share a copy
    of the weights."""
    shards = config.parallel.shard_ranks
    expert = config.parallel.expert_parallel_size
    if shards is not None and domain % shards:
        nearest = max(size for size in range(1, min(shards, domain) + 1) if domain % size == 0)
        rule = f"must divide the number of ranks in the domain, {domain}"
        yield Problem(
            "parallel.shard_ranks", shards, rule, f"set it to {nearest}, or omit it to use {domain}"
        )
    copy = shards or domain
    if copy % expert:
        what = "parallel.shard_ranks" if shards else "the number of ranks in the domain"
        if shards:
            more = f"set parallel.shard_ranks to a multiple of {expert}"
        else:
            more = "start more processes"
        fix = f"set it to a divisor of {copy} that divides the experts, or {more}"
        yield Problem("parallel.expert_parallel_size", expert, f"must divide {what}, {copy}", fix)


def _lengths(config: Config, world_size: int) -> Iterator[Problem]:
    """Checks that degrees exist in the domain, and that documents fit."""
    context = config.context
    budget = config.batch.tokens_per_rank
    domain = config.domain(world_size)
    max_length = config.data.max_length
    longest = config.capacity(world_size)
    bins = context.bins or {} if context.mode == "bins" else {}
    rule = f"a degree must be at most the number of ranks in the domain, {domain}"
    fix = f"set it to {domain} or less, or start more processes"
    if context.mode == "static" and (context.degree or 1) > domain:
        yield Problem("context.degree", context.degree, rule, fix)
    if max(bins.values(), default=1) > domain:
        yield Problem("context.bins", bins, rule, fix)
    for length, degree in bins.items():
        holds = longest_document(degree, budget)
        if min(length, max_length or length) > holds:
            rule = (
                f"degree {degree} holds {holds} tokens at batch.tokens_per_rank {budget}, but "
                f"its bin extends to {length}"
            )
            fix = "raise the bin's degree or batch.tokens_per_rank, or lower the bin's length"
            yield Problem(
                "context.bins", bins, rule=rule, fix=fix, others=("batch.tokens_per_rank",)
            )
    if max_length is not None and max_length > longest:
        few = f"{world_size} process{'es' * (world_size > 1)}"
        rule = (
            f"in context.mode {context.mode}, a document over {few} has at most {longest:,} tokens"
        )
        fix = (
            f"set it to {longest} or less, raise batch.tokens_per_rank, the degree or the last "
            "bin, or start more processes"
        )
        others = ("batch.tokens_per_rank", "context.degree", "context.bins")
        yield Problem("data.max_length", max_length, rule=rule, fix=fix, others=others)
