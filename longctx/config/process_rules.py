"""Rules on settings and the number of processes."""

from collections.abc import Iterator

from longctx.config.problems import Problem
from longctx.config.run import Config
from longctx.planning.layout import longest_document

MOST_PROCESSES = 1 << 20


def mesh_rules(config: Config, world_size: int) -> list[Problem]:
    """Checks that the tensor and pipeline parallel sizes divide the number of processes."""
    tensor, pipeline = config.parallel.tensor_parallel_size, config.parallel.pipeline_parallel_size
    part = tensor * pipeline
    if world_size > MOST_PROCESSES:
        fix = "start fewer processes; for --dry-run, give a smaller --ranks"
        return [Problem("the number of processes", world_size, f"must be at most {MOST_PROCESSES:,}", fix)]
    if world_size % part == 0:
        return []
    rule = f"tensor_parallel_size × pipeline_parallel_size must divide the number of processes, {world_size}"
    below = world_size // part * part
    fix = f"start {below} or {below + part} processes" if below else f"start {part} processes"
    fix += ", or change the sizes"
    others = ("parallel.tensor_parallel_size", "parallel.pipeline_parallel_size")
    return [Problem("parallel", f"{tensor} × {pipeline}", rule, fix, others)]


def domain_rules(config: Config, world_size: int) -> Iterator[Problem]:
    """Yields the settings that the domain of a run on `world_size` processes cannot satisfy."""
    context, budget, domain = config.context, config.batch.tokens_per_rank, config.domain(world_size)
    wanted, longest = config.data.max_length, config.capacity(world_size)
    bins = context.bins or {} if context.mode == "bins" else {}
    shards = config.parallel.shard_ranks
    if shards is not None and domain % shards:
        nearest = max(size for size in range(1, min(shards, domain) + 1) if domain % size == 0)
        rule = f"must divide the number of ranks in the domain, {domain}"
        yield Problem("parallel.shard_ranks", shards, rule, f"set it to {nearest}, or omit it to use {domain}")
    rule = f"a degree must be at most the number of ranks in the domain, {domain}"
    fix = f"set it to {domain} or less, or start more processes"
    if context.mode == "static" and (context.degree or 1) > domain:
        yield Problem("context.degree", context.degree, rule, fix)
    if max(bins.values(), default=1) > domain:
        yield Problem("context.bins", bins, rule, fix)
    for length, degree in bins.items():
        holds = longest_document(degree, budget)
        if min(length, wanted or length) > holds:
            rule = f"degree {degree} holds {holds} tokens at batch.tokens_per_rank {budget}, but its bin extends to {length}"
            fix = "raise the bin's degree or batch.tokens_per_rank, or lower the bin's length"
            yield Problem("context.bins", bins, rule, fix, ("batch.tokens_per_rank",))
    if wanted is not None and wanted > longest:
        rule = f"in context.mode {context.mode}, {world_size} processes hold documents of at most {longest} tokens"
        fix = f"set it to {longest} or less, raise batch.tokens_per_rank, the degree or the last bin, or start more processes"
        others = ("batch.tokens_per_rank", "context.degree", "context.bins")
        yield Problem("data.max_length", wanted, rule, fix, others)


def expert_mesh_rules(config: Config, world_size: int) -> Iterator[Problem]:
    """Checks that the expert parallel size divides the ranks that share a copy of the weights."""
    expert, domain = config.parallel.expert_parallel_size, config.domain(world_size)
    shards = config.parallel.shard_ranks or domain
    if shards % expert:
        what = "parallel.shard_ranks" if config.parallel.shard_ranks else "the number of ranks in the domain"
        more = f"set parallel.shard_ranks to a multiple of {expert}" if config.parallel.shard_ranks else "start more processes"
        fix = f"set it to a divisor of {shards} that divides the experts, or {more}"
        yield Problem("parallel.expert_parallel_size", expert, f"must divide {what}, {shards}", fix)
