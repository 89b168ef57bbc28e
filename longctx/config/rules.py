"""Rules that compute, on packages, files, numbers and the model. `combinations` has the settings
that do not go together."""

import importlib.util
import re
from collections.abc import Iterable, Iterator

from longctx.config.combinations import ROWS
from longctx.config.problems import ConfigError, Problem
from longctx.config.process_rules import process_rules
from longctx.config.run import FLOAT8_ROWS, Config
from longctx.errors import UserError, install, shell
from longctx.hf.lora_options import ALL_LINEAR, LoraError, QuantizationError
from longctx.model.context_extension import RopeError
from longctx.planning.cost.eight_bit import BLOCK, cuts_blocks, in_8_bits
from longctx.planning.cost.spec import ModelSpec
from longctx.planning.cost.ulysses import ulysses_degrees
from longctx.planning.hardware_profile import HardwareProfile, ProfileError
from longctx.planning.layout import divisors
from longctx.planning.planners.bins import table_problem


def check(config: Config, *, world_size: int) -> None:
    """Raises ConfigError with all problems of the settings on `world_size` processes."""
    problems = broken_rules(config, world_size)
    if problems:
        raise ConfigError.of(
            problems, f"the configuration for {world_size} process{'es' * (world_size > 1)}"
        )


def broken_rules(config: Config, world_size: int | None) -> list[Problem]:
    """Returns all problems; with `world_size` None only those that do not depend on the number of
    processes."""
    spec: ModelSpec | None = None
    problems: list[Problem] = []
    try:
        spec = config.model_source().spec
    except UserError as error:
        problems += _model(config, error)
    problems += [problem for row in ROWS if (problem := row.problem(config, spec)) is not None]
    for rule in (_missing, _stores, _files, _bins, _shares, _groups):
        problems += rule(config)
    if spec is not None:
        for rule_on_model in (_layers, _tensor, _experts, _indexed):
            problems += rule_on_model(config, spec)
    if world_size is not None:
        problems += process_rules(config, world_size)
    return problems


def _model(config: Config, error: UserError) -> Iterator[Problem]:
    """Yields the problems of a model whose sizes cannot be told because of `error`."""
    model = config.model
    lora = config.lora
    if isinstance(error, ConfigError):
        yield from error.problems
    elif isinstance(error, RopeError):
        fix = "correct the RoPE settings, or omit them to keep the checkpoint's RoPE"
        key = "model.rope_scaling" if model.rope_scaling.written() else "model.rope_theta"
        value = config.value_of(key)
        others = ("model.from_pretrained",)
        yield Problem(key, value, rule=str(error), fix=fix, others=others)
    elif isinstance(error, QuantizationError):
        yield Problem(
            "lora.base",
            lora.base,
            rule=str(error),
            fix="omit it",
            others=("model.from_pretrained",),
        )
    elif not isinstance(error, LoraError):
        yield Problem(
            "model.from_pretrained",
            model.from_pretrained,
            rule=str(error),
            fix=_without(config),
            others=("model.implementation",),
        )
    elif _installed("peft"):  # `_missing` says that it is not
        fix = f"name some of these layers, or omit it for {ALL_LINEAR}"
        yield Problem(
            "lora.target_modules",
            lora.target_modules,
            rule=str(error),
            fix=fix,
            others=("lora.rank", "model.from_pretrained"),
        )


def _without(config: Config) -> str:
    """Returns the fix for an initial checkpoint that is missing or unusable."""
    run = config.train.run_dir
    if not (run / "checkpoints").is_dir():
        return "name another checkpoint"
    if config.lora.rank is not None:
        return (
            f"restore it: the checkpoints of {run} contain only the adapters, not the base weights"
        )
    return (
        f"restore it, or use the weights in the checkpoints of {run}: longctx export {shell(run)} "
        "OUT, then --model.from_pretrained OUT without RoPE settings"
    )


def _missing(config: Config) -> Iterator[Problem]:
    """Yields the settings whose packages are not installed."""
    for key, value, package, extra in (
        ("lora.rank", config.lora.rank, "peft", "huggingface"),
        ("lora.base", config.lora.base, "torchao", "gpu"),
        ("train.float8", config.train.float8, "torchao", "gpu"),
        (
            "optimizer.name",
            "adamw-8bit" if config.optimizer.name == "adamw-8bit" else None,
            "torchao",
            "gpu",
        ),
    ):
        if value is not None and not _installed(package):
            rule = f"this setting needs {package}, which is not installed"
            yield Problem(key, value, rule, f"{install(extra)}, or omit it")


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _stores(config: Config) -> Iterator[Problem]:
    """Checks that several stores are all by weight, or all by epochs, without epochs of the run."""
    stores = config.data.mix
    if stores is None:
        return
    if not stores:
        fix = "write a path, or [{path: FOLDER, weight: 1}]"
        yield Problem("data.store", stores, "must not be empty", fix)
    if any((each.weight is None) == (each.epochs is None) for each in stores):
        fix = "write {path: FOLDER, weight: SHARE}, or {path: FOLDER, epochs: PASSES}"
        yield Problem("data.store", stores, "each store needs either weight or epochs", fix)
    elif len({each.weight is None for each in stores}) > 1:
        rule = "stores with weight and stores with epochs cannot be mixed"
        yield Problem(
            "data.store", stores, rule, "use weight for all stores, or epochs for all stores"
        )
    if len({each.path.resolve() for each in stores}) < len(stores):
        fix = "list it once, with the sum of its weights or epochs"
        yield Problem("data.store", stores, "a store must not be listed twice", fix)
    epochs = config.train.epochs
    if epochs is not None:
        rule = "stores of a mix have epochs of their own, so that steps must be set"
        fix = "omit it, or set data.store to one path"
        yield Problem("train.epochs", epochs, rule=rule, fix=fix, others=("data.store",))


def _files(config: Config) -> Iterator[Problem]:
    try:
        if config.context.profile is not None:
            HardwareProfile.load(config.context.profile)
    except (ProfileError, OSError) as error:
        yield Problem(
            "context.profile",
            config.context.profile,
            str(error),
            "correct the file, or name a shipped profile",
        )


def _bins(config: Config) -> Iterator[Problem]:
    bins = config.context.bins
    if bins is not None and (problem := table_problem(bins)):
        yield Problem("context.bins", bins, *problem)


def _shares(config: Config) -> Iterator[Problem]:
    """Checks numbers against each other."""
    batch = config.batch
    pipeline = config.pipeline
    if problem := pipeline.problem:
        yield Problem(
            "parallel.pipeline_chunks",
            pipeline.chunks,
            *problem,
            ("parallel.pipeline_parallel_size",),
        )
    if config.train.float8 is not None:
        tiles = config.train.mlp_tile_tokens or 0
        for key, tokens in (
            ("batch.tokens_per_rank", batch.tokens_per_rank),
            ("train.mlp_tile_tokens", tiles),
        ):
            if tokens % FLOAT8_ROWS:
                rule = (
                    f"float8 products need a multiple of {FLOAT8_ROWS} tokens, to which the "
                    "tokens of each rank are padded"
                )
                fix = f"set it to {tokens + -tokens % FLOAT8_ROWS}, or omit train.float8"
                yield Problem(key, tokens, rule=rule, fix=fix, others=("train.float8",))


def _groups(config: Config) -> Iterator[Problem]:
    """Checks the regular expressions of parameter groups."""
    for group in config.optimizer.groups:
        try:
            re.compile(group.match)
        except re.error as error:
            rule = f"not a regular expression: {error}"
            yield Problem(
                "optimizer.groups",
                group.match,
                rule,
                "correct it, or escape special characters with \\",
            )


def _indexed(config: Config, spec: ModelSpec) -> Iterator[Problem]:
    """Checks what attention to keys that an indexer selects cannot do."""
    if not spec.selects_keys:
        return
    reasons = {}
    if config.data.merge_prefixes:
        reasons["data.merge_prefixes"] = (
            "indexers of this model select keys by their place in one sequence"
        )
    if config.train.compile:
        reasons["train.compile"] = (
            "indexers select other keys in every micro-batch, which no compiled program holds"
        )
    if config.objective.is_diffusion:
        reasons["objective.name"] = "indexers of this model do not select keys of noisy blocks"
    for name, rule in reasons.items():
        value = config.value_of(name)
        yield Problem(name, value, rule=rule, fix="omit it", others=("model.from_pretrained",))


def _layers(config: Config, spec: ModelSpec) -> Iterator[Problem]:
    """Checks that every stage of the pipeline has a layer."""
    pipeline = config.pipeline
    ranks = pipeline.ranks
    chunks = pipeline.chunks
    layers = len(spec.layers)
    if ranks * chunks > layers:
        most = layers // ranks
        if most == 0:
            fix = f"set it to {max(1, layers // chunks)} or less, or use a model with more layers"
        else:
            fix = f"set parallel.pipeline_chunks to {most}"
        rule = (
            f"{ranks} ranks with {chunks} stages each need at least {ranks * chunks} layers, "
            f"but the model has {layers}"
        )
        others = ("parallel.pipeline_chunks", "model.overrides.num_hidden_layers")
        yield Problem("parallel.pipeline_parallel_size", ranks, rule=rule, fix=fix, others=others)


def _tensor(config: Config, spec: ModelSpec) -> Iterator[Problem]:
    """Checks that tensor parallelism and Ulysses can divide heads, MLP columns and tokens per
    rank."""
    size = config.parallel.tensor_parallel_size
    batch = config.batch
    shape = spec.largest_layer
    if shape.num_key_value_heads % size:  # they divide the query heads
        most = max(ranks for ranks in range(1, size) if shape.num_key_value_heads % ranks == 0)
        rule = (
            f"must divide the KV heads, but the model has {shape.num_attention_heads} query heads "
            f"and {shape.num_key_value_heads} KV heads"
        )
        fix = f"set it to {most}, or use a multiple of {size} KV heads"
        yield Problem(
            "parallel.tensor_parallel_size",
            size,
            rule=rule,
            fix=fix,
            others=("model.overrides.num_key_value_heads",),
        )
    else:
        yield from _ulysses_degree(
            config, shape.num_attention_heads // size, shape.num_key_value_heads // size
        )
    if config.context.ulysses_degree > 1 and spec.sends_latents:
        rule = (
            "split documents of this model send latents, and heads that are swapped would "
            "travel expanded"
        )
        yield Problem(
            "context.ulysses_degree",
            config.context.ulysses_degree,
            rule=rule,
            fix="set it to 1",
            others=(),
        )
    for key, width in _split_widths(spec).items():
        if leaves_rank_empty(width, size):
            share = -(-width // size)
            below = (share - 1) * size
            above = share * (size - 1) + 1
            rule = (
                f"each of {size} tensor parallel ranks takes {share} columns of the MLP, which "
                "leaves none for the last ranks"
            )
            fix = f"set it to {below} or {above}" if below else f"set it to {above}"
            yield Problem(key, width, rule=rule, fix=fix, others=("parallel.tensor_parallel_size",))
    if config.optimizer.name == "adamw-8bit":
        yield from _cut_blocks(config, spec)
    if batch.tokens_per_rank % size:
        below = batch.tokens_per_rank // size * size
        rule = (
            f"must be a multiple of {size}, to which parallel.tensor_parallel_size pads the tokens "
            "of each rank"
        )
        fix = f"set it to {below} or {below + size}" if below else f"set it to {size}"
        others = ("parallel.tensor_parallel_size",)
        yield Problem(
            "batch.tokens_per_rank", batch.tokens_per_rank, rule=rule, fix=fix, others=others
        )


def _cut_blocks(config: Config, spec: ModelSpec) -> Iterator[Problem]:
    """Checks that tensor ranks have whole blocks of 8-bit moments, of the matrices that are split
    by columns."""
    size = config.parallel.tensor_parallel_size
    shape = spec.largest_layer
    widths = {
        "model.overrides.num_attention_heads": shape.num_attention_heads * shape.head_dim,
        **_split_widths(spec),
    }
    possible = [
        ranks
        for ranks in divisors(shape.num_key_value_heads)
        if not _cut(spec, widths.values(), ranks)
    ]
    for key, width in widths.items():
        if _cut(spec, [width], size):
            rule = (
                f"a tensor parallel rank has {-(-width // size)} of {width} columns of a "
                f"parameter, no multiple of {BLOCK}, which have a common scale in 8 bits"
            )
            fix = (
                "set it to adamw, or parallel.tensor_parallel_size to "
                f"{' or '.join(map(str, possible))}"
            )
            yield Problem(
                "optimizer.name",
                "adamw-8bit",
                rule=rule,
                fix=fix,
                others=("parallel.tensor_parallel_size", key),
            )


def _cut(spec: ModelSpec, widths: Iterable[int], ranks: int) -> bool:
    """Returns whether shares of a matrix with one of these numbers of columns are no whole blocks
    of 8-bit moments."""
    return any(
        in_8_bits((spec.hidden_size, width)) and cuts_blocks(width, ranks) for width in widths
    )


def _split_widths(spec: ModelSpec) -> dict[str, int]:
    """Returns the widths of the MLPs that tensor parallelism splits by columns, by setting."""
    widths = {}
    for layer in spec.layers:
        if not layer.experts:
            widths["model.overrides.intermediate_size"] = layer.intermediate_size
        elif width := layer.intermediate_size - layer.routed_size:
            widths["model.overrides.shared_expert_intermediate_size"] = width
    return widths


def leaves_rank_empty(size: int, ranks: int) -> bool:
    """Returns True if shares of `size` / `ranks`, rounded up, leave nothing for the last rank,
    which FSDP cannot shard."""
    return -(-size // ranks) * (ranks - 1) >= size


def _ulysses_degree(config: Config, query_heads: int, kv_heads: int) -> Iterator[Problem]:
    """Checks that `context.ulysses_degree` shares out the heads of each rank evenly."""
    degree = config.context.ulysses_degree
    if degree not in (possible := ulysses_degrees(query_heads, kv_heads)):
        others = ("model.overrides.num_key_value_heads", "parallel.tensor_parallel_size")
        rule = (
            f"must divide the KV heads per rank, {kv_heads}, or be a multiple that divides the "
            f"query heads, {query_heads}"
        )
        yield Problem(
            "context.ulysses_degree",
            degree,
            rule=rule,
            fix=f"set it to {', '.join(map(str, possible))}",
            others=others,
        )


def _experts(config: Config, spec: ModelSpec) -> Iterator[Problem]:
    """Checks that the experts can be split evenly over ranks."""
    parallel = config.parallel
    experts = spec.experts
    expert = parallel.expert_parallel_size
    tensor = parallel.tensor_parallel_size
    if experts % (expert * tensor) == 0:
        return
    if experts % tensor:
        key = "tensor_parallel_size"
        size = tensor
        possible = divisors(experts)
    else:
        key = "expert_parallel_size"
        size = expert
        possible = divisors(experts // tensor)
    rule = (
        f"{experts} experts cannot be split evenly over {expert} × {tensor} expert and tensor "
        "parallel ranks"
    )
    others = (
        "model.overrides.num_experts",
        "parallel.tensor_parallel_size",
        "parallel.expert_parallel_size",
    )
    yield Problem(
        f"parallel.{key}",
        size,
        rule=rule,
        fix=f"set it to {', '.join(map(str, possible))}",
        others=others,
    )
