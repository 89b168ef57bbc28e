"""Rules that span settings and the number of processes."""

from collections.abc import Iterator

from longctx.config.problems import Problem
from longctx.config.run import Config
from longctx.planning.layout import longest_document


def mesh_rules(config: Config, world_size: int) -> list[Problem]:
    """What so many processes cannot be divided into."""
    tensor, pipeline = config.parallel.tensor_parallel_size, config.parallel.pipeline_parallel_size
    part = tensor * pipeline
    if world_size % part == 0:
        return []
    rule = f"tensor_parallel_size × pipeline_parallel_size must divide the {world_size} processes of the run"
    below = world_size // part * part
    fix = f"start {below} or {below + part} processes" if below else f"start {part} processes"
    fix += ", or change the sizes"
    others = ("parallel.tensor_parallel_size", "parallel.pipeline_parallel_size")
    return [Problem("parallel", f"{tensor} × {pipeline}", rule, fix, others)]


def domain_rules(config: Config, world_size: int) -> Iterator[Problem]:
    """What the domain of so many processes cannot do."""
    context, budget, domain = config.context, config.batch.tokens_per_rank, config.domain(world_size)
    wanted, longest = config.data.max_length, config.capacity(world_size)
    bins = context.bins or {} if context.mode == "bins" else {}
    shards = config.parallel.shard_ranks
    if shards is not None and domain % shards:
        nearest = max(size for size in range(1, min(shards, domain) + 1) if domain % size == 0)
        rule = f"copies of the weights fill the domain, so this divides its size, which is {domain}"
        yield Problem("parallel.shard_ranks", shards, rule, f"give {nearest}, or leave it out for {domain}")
    rule = f"a degree is at most the size of the domain, which is {domain}"
    fix = f"give {domain} or less, or start more processes"
    if context.mode == "static" and (context.degree or 1) > domain:
        yield Problem("context.degree", context.degree, rule, fix)
    if max(bins.values(), default=1) > domain:
        yield Problem("context.bins", bins, rule, fix)
    for length, degree in bins.items():
        holds = longest_document(degree, budget)
        if min(length, wanted or length) > holds:
            rule = f"degree {degree} holds {holds} tokens with batch.tokens_per_rank {budget}, and its bin goes to {length}"
            fix = "raise its degree or batch.tokens_per_rank, or end the bin earlier"
            yield Problem("context.bins", bins, rule, fix, ("batch.tokens_per_rank",))
    if wanted is not None and wanted > longest:
        rule = f"in context.mode {context.mode}, {world_size} processes hold documents of up to {longest} tokens"
        fix = f"give {longest} or less, raise batch.tokens_per_rank, the degree or the last bin, or start more processes"
        others = ("batch.tokens_per_rank", "context.degree", "context.bins")
        yield Problem("data.max_length", wanted, rule, fix, others)
