"""Rules across settings, one generator of problems per subject. `process_rules` has the rules on the number of processes."""

import importlib.util
import itertools
import math
from collections.abc import Iterator

from longctx.config.expert_rules import expert_mesh_rules, expert_rules
from longctx.config.problems import ConfigError, Problem
from longctx.config.process_rules import domain_rules, mesh_rules
from longctx.config.run import Config
from longctx.config.speed_rules import float8_rules, fused_rules
from longctx.errors import UserError, install, shell
from longctx.model.context_extension import ROPE_SETTINGS, RopeError
from longctx.model.options import ALL_LINEAR, LoraError
from longctx.model.spec import ModelSpec
from longctx.planning.check import MOST_RANKS, MOST_TOKENS
from longctx.planning.cost.hardware_profile import HardwareProfile, ProfileError


def check(config: Config, *, world_size: int) -> None:
    """Raises ConfigError with all problems of the settings on `world_size` processes."""
    problems = broken_rules(config, world_size)
    if problems:
        raise ConfigError.of(problems, f"the configuration for {world_size} processes")


def broken_rules(config: Config, world_size: int | None) -> list[Problem]:
    """Returns all problems; with `world_size` None only those that do not depend on the number of processes."""
    rules = (
        _model,
        _predictions,
        _lora,
        _dpo,
        _masked,
        _stores,
        _files,
        _context,
        _bins,
        _pipeline,
        _tensor,
        _experts,
        _train,
        float8_rules,
        fused_rules,
        _eval,
        _checkpoint,
        _memory,
    )
    problems = [problem for rule in rules for problem in rule(config)]
    if world_size is not None:
        problems += mesh_rules(config, world_size) or [
            *domain_rules(config, world_size),
            *expert_mesh_rules(config, world_size),
        ]
    return problems


def _model(config: Config) -> Iterator[Problem]:
    model, found = config.model, _sizes(config)
    if isinstance(found, ConfigError):
        yield from found.problems
    elif isinstance(found, RopeError):
        fix = "correct the RoPE settings, or omit them to keep the checkpoint's RoPE"
        yield Problem(
            f"model.{model.changed_rope[0][0]}", model.changed_rope[0][1], str(found), fix, ("model.from_pretrained",)
        )
    elif isinstance(found, UserError) and not isinstance(found, LoraError):  # `_lora` reports LoraError
        yield Problem("model.from_pretrained", model.from_pretrained, str(found), _without(config), ("model.implementation",))
    elif config.train.compile and isinstance(found, ModelSpec) and any(layer.state_size for layer in found.layers):
        rule = "blocks with linear attention cannot be compiled: their chunks and messages differ between micro-batches"
        yield Problem("train.compile", True, rule, "set it to false", ("model.from_pretrained",))
    if model.from_pretrained is None:
        if model.implementation != "auto":
            rule = "only applies to a checkpoint, but model.from_pretrained is null"
            yield Problem("model.implementation", model.implementation, rule, "omit it, or set model.from_pretrained")
        return
    free = {"preset", "from_pretrained", "implementation", *ROPE_SETTINGS}
    own = {name for name in model.model_fields_set - free if getattr(model, name) is not None}
    for name in sorted(own):
        rule = f"sizes are taken from the checkpoint {model.from_pretrained}"
        yield Problem(f"model.{name}", getattr(model, name), rule, "omit it", ("model.from_pretrained",))


def _predictions(config: Config) -> Iterator[Problem]:
    """Checks that multi-token prediction is supported with the other settings."""
    key, found = "model.num_nextn_predict_layers", _sizes(config)
    count = found.predictions if isinstance(found, ModelSpec) else 0
    if not count:
        if config.train.mtp_loss != type(config.train).model_fields["mtp_loss"].default and isinstance(found, ModelSpec):
            rule = f"only applies to multi-token prediction, and {key} is 0"
            yield Problem("train.mtp_loss", config.train.mtp_loss, rule, f"omit it, or set {key}", (key,))
        return
    if config.dpo.beta is not None:
        rule = "not supported with DPO, whose loss is not one of single tokens"
        yield Problem(key, count, rule, "set it to 0, or omit dpo.beta", ("dpo.beta",))
    if config.parallel.pipeline_parallel_size > 1:
        rule = "not supported with pipelines: the last stage would need the embedding of the first"
        fix = "set it to 0, or parallel.pipeline_parallel_size to 1"
        yield Problem(key, count, rule, fix, ("parallel.pipeline_parallel_size",))


def _without(config: Config) -> str:
    """Returns the fix for an initial checkpoint that is missing or unusable."""
    run = config.train.run_dir
    if not (run / "checkpoints").is_dir():
        return "repair or replace that checkpoint, or choose another"
    if config.lora.rank is not None:
        return f"restore it: the checkpoints of {run} contain only the adapters, not the base weights"
    return (
        f"restore it, or use the weights in the checkpoints of {run}: longctx export {shell(run)} OUT, then "
        "--model.from_pretrained OUT without RoPE settings"
    )


def _lora(config: Config) -> Iterator[Problem]:
    """Checks that LoRA is supported with the other settings."""
    lora, model, parallel = config.lora, config.model, config.parallel
    if lora.dropout:
        rule = "LoRA dropout is not supported: its random numbers, and so the loss, would depend on how documents are split"
        yield Problem("lora.dropout", lora.dropout, rule, "omit it")
    if lora.rank is None:
        for name in ("alpha", "target_modules"):
            if getattr(lora, name) != type(lora).model_fields[name].default:
                rule = "has no effect without LoRA: lora.rank is null"
                yield Problem(f"lora.{name}", getattr(lora, name), rule, "set lora.rank, or omit it", ("lora.rank",))
        return
    if model.from_pretrained is None:
        rule = "LoRA needs a checkpoint, but model.from_pretrained is null"
        fix = "set model.from_pretrained, or omit lora.rank"
        yield Problem("lora.rank", lora.rank, rule, fix, ("model.from_pretrained",))
        return
    if importlib.util.find_spec("peft") is None:
        yield Problem("lora.rank", lora.rank, "LoRA needs peft, which is not installed", install("huggingface"))
        return
    if model.implementation == "native":
        rule = "LoRA is not supported by the native decoder"
        fix = "set it to transformers, or omit lora.rank"
        yield Problem("model.implementation", model.implementation, rule, fix, ("lora.rank",))
    for key, size in (
        ("tensor_parallel_size", parallel.tensor_parallel_size),
        ("pipeline_parallel_size", parallel.pipeline_parallel_size),
    ):
        if size > 1:
            rule = "LoRA is not supported with tensor or pipeline parallelism"
            fix = "set it to 1 (frozen weights are sharded over all ranks and have no gradients), or omit lora.rank"
            yield Problem(f"parallel.{key}", size, rule, fix, ("lora.rank",))
    found = _sizes(config)
    if isinstance(found, LoraError):
        fix = f"name some of these layers, or omit it for {ALL_LINEAR}"
        yield Problem("lora.target_modules", lora.target_modules, str(found), fix, ("lora.rank", "model.from_pretrained"))


def _sizes(config: Config) -> ModelSpec | UserError:
    """Returns the model's sizes, from the model built without values, or the error if it cannot be built."""
    try:
        return config.model_source().spec
    except UserError as error:
        return error


def _dpo(config: Config) -> Iterator[Problem]:
    if config.dpo.beta is None and config.dpo.label_smoothing:
        rule = "has no effect without DPO: dpo.beta is null"
        fix = "set dpo.beta, or omit it"
        yield Problem("dpo.label_smoothing", config.dpo.label_smoothing, rule, fix, ("dpo.beta",))


def _masked(config: Config) -> Iterator[Problem]:
    """Checks that masked tokens are predicted by an encoder of transformers, run by its own code, on plain documents."""
    masked, others = config.masked, ("masked.share",)
    if masked.share is None:
        for name in ("random", "kept", "token"):
            if getattr(masked, name) != type(masked).model_fields[name].default:
                rule = "has no effect on a causal model: masked.share is null"
                yield Problem(f"masked.{name}", getattr(masked, name), rule, "set masked.share, or omit it", others)
        return
    if masked.random + masked.kept > 1:
        rule = f"masked.random and masked.kept, which is {masked.kept:g}, must be at most 1 together"
        yield Problem("masked.random", masked.random, rule, "lower one of the two", ("masked.kept",))
    if config.dpo.beta is not None:
        rule = "DPO needs a causal model, but masked.share trains an encoder"
        yield Problem("dpo.beta", config.dpo.beta, rule, "omit one of the two", others)
    if config.model.from_pretrained is None:
        rule = "masked tokens are predicted by an encoder's checkpoint, but model.from_pretrained is null: presets are causal"
        fix = (
            "set model.from_pretrained (for new weights: save_pretrained of a model with random weights), or omit masked.share"
        )
        yield Problem("masked.share", masked.share, rule, fix, ("model.from_pretrained",))
        return
    parallel = config.parallel
    if config.model.implementation == "native":
        rule = "the native decoder is causal, but masked.share trains an encoder"
        yield Problem("model.implementation", "native", rule, "set it to transformers, or omit masked.share", others)
    for key in ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size"):
        if (size := getattr(parallel, key)) > 1:
            rule = "encoders are run by transformers' own code, which cannot split a model over ranks"
            fix = "set it to 1 (degrees and sharding use all ranks), or omit masked.share"
            yield Problem(f"parallel.{key}", size, rule, fix, others)


def _spec(config: Config) -> ModelSpec | None:
    """Returns the model's sizes, None if they are invalid (`_model` and `_lora` report that)."""
    found = _sizes(config)
    return found if isinstance(found, ModelSpec) else None


def _stores(config: Config) -> Iterator[Problem]:
    """Checks that the data are one store, several stores by weight, or several by epochs."""
    store, stores = config.data.store, config.data.stores
    if store is None and stores is None:
        rule = "data.store and data.stores cannot both be null"
        yield Problem("data.store", None, rule, "set data.store to a folder written by `longctx prepare`, or set data.stores")
    if stores is None:
        return
    given = [each.model_dump(exclude_none=True) for each in stores]
    if store is not None:
        rule = f"cannot be combined with data.store, which is {store}"
        yield Problem("data.stores", given, rule, "omit one of the two settings, or set it to null", ("data.store",))
    if not stores:
        yield Problem("data.stores", given, "must not be empty", "write [{path: FOLDER, weight: 1}], or use data.store")
    if any((each.weight is None) == (each.epochs is None) for each in stores):
        fix = "write {path: FOLDER, weight: SHARE}, or {path: FOLDER, epochs: PASSES}"
        yield Problem("data.stores", given, "each store needs either weight or epochs", fix)
    elif len({each.weight is None for each in stores}) > 1:
        rule = "stores with weight and stores with epochs cannot be mixed"
        yield Problem("data.stores", given, rule, "use weight for all stores, or epochs for all stores")
    if len({each.path.resolve() for each in stores}) < len(stores):
        yield Problem(
            "data.stores", given, "a store must not be listed twice", "list it once, with the sum of its weights or epochs"
        )


def _files(config: Config) -> Iterator[Problem]:
    tokenizer = config.data.tokenizer
    if tokenizer is not None and not tokenizer.is_file():
        yield Problem("data.tokenizer", str(tokenizer), "file not found", "check the path, or omit it")
    try:
        if config.context.profile is not None:
            HardwareProfile.load(config.context.profile)
    except (ProfileError, OSError) as error:
        yield Problem("context.profile", config.context.profile, str(error), "correct the file, or name a shipped profile")


def _context(config: Config) -> Iterator[Problem]:
    context, mode = config.context, ("context.mode",)
    if context.degree is not None and context.mode != "static":
        rule = f"only applies to context.mode static, but context.mode is {context.mode}"
        yield Problem("context.degree", context.degree, rule, "set context.mode to static, or omit the degree", mode)
    if context.bins is not None and context.mode != "bins":
        rule = f"only applies to context.mode bins, but context.mode is {context.mode}"
        yield Problem("context.bins", context.bins, rule, "set context.mode to bins, or omit the table", mode)
    device = config.train.device
    if (context.kernel, device) in (("cpu", "cuda"), ("flash", "cpu")):
        rule = f"this kernel does not run on train.device {device}"
        yield Problem("context.kernel", context.kernel, rule, "use kernel auto", ("train.device",))


def _bins(config: Config) -> Iterator[Problem]:
    bins = config.context.bins
    if bins is None:
        return
    lengths, degrees = list(bins), list(bins.values())
    if not bins:
        yield Problem("context.bins", bins, "the table must not be empty", "write {8192: 1, 32768: 4}, or omit it")
    elif max(lengths) > MOST_TOKENS or max(degrees) > MOST_RANKS:
        rule = f"lengths must be at most {MOST_TOKENS:,} and degrees at most {MOST_RANKS:,}"
        yield Problem("context.bins", bins, rule, "write {8192: 1, 32768: 4}, for example")
    elif min(lengths) < 1 or min(degrees) < 1:
        yield Problem("context.bins", bins, "lengths and degrees must be at least 1", "write {8192: 1, 32768: 4}, for example")
    elif any(a >= b for a, b in itertools.pairwise(lengths)):
        yield Problem("context.bins", bins, "lengths must be ascending", "sort the rows by length")
    elif any(a > b for a, b in itertools.pairwise(degrees)):
        yield Problem("context.bins", bins, "degrees must not decrease with length", "raise the later degrees")


def _pipeline(config: Config) -> Iterator[Problem]:
    """Checks the pipeline stages against the schedule, the model and other settings."""
    parallel = config.parallel
    ranks, chunks, schedule = parallel.pipeline_parallel_size, parallel.pipeline_chunks, parallel.pipeline_schedule
    others = ("parallel.pipeline_schedule", "parallel.pipeline_parallel_size")
    if problem := config.pipeline.problem:
        yield Problem("parallel.pipeline_chunks", chunks, *problem, others)
    if ranks > 1 and parallel.reduce_after == "micro_batch":
        rule = "a pipeline reduces gradients once per step"
        yield Problem("parallel.reduce_after", parallel.reduce_after, rule, "set it to step", others[1:])
    if ranks > 1 and schedule == "zero-bubble":
        if parallel.reshard_after == "block":
            rule = "schedule zero-bubble computes weight gradients after the block's backward, when its weights are resharded"
            yield Problem("parallel.reshard_after", "block", rule, "set it to step, or use schedule 1f1b", others)
        if config.train.recompute != "none":
            rule = "schedule zero-bubble runs the backward of a block in two parts, and would recompute the block in each"
            yield Problem("train.recompute", config.train.recompute, rule, "set it to none, or use schedule 1f1b", others)
        if config.train.mlp_tile_tokens is not None:
            rule = "schedule zero-bubble runs the backward of a block in two parts, and would recompute every tile in each"
            yield Problem("train.mlp_tile_tokens", config.train.mlp_tile_tokens, rule, "omit it, or use schedule 1f1b", others)
        if config.train.compile:
            rule = "schedule zero-bubble runs the backward of a block in two parts, which compiled blocks do not support"
            yield Problem("train.compile", True, rule, "set it to false, or use schedule 1f1b", others)
    spec = _spec(config)
    if spec is None:
        return
    layers = len(spec.layers)
    if ranks * chunks > layers:
        most = layers // ranks
        if most == 0:
            fix = f"set it to {max(1, layers // chunks)} or less, or use a model with more layers"
        else:
            alone = most == 1 and schedule == "interleaved"
            fix = f"set parallel.pipeline_chunks to {most}" + (", with schedule 1f1b" if alone else "")
        rule = f"{ranks} ranks with {chunks} stages each need at least {ranks * chunks} layers, but the model has {layers}"
        others = ("parallel.pipeline_chunks", "model.num_hidden_layers")
        yield Problem("parallel.pipeline_parallel_size", ranks, rule, fix, others)


def _tensor(config: Config) -> Iterator[Problem]:
    """Checks that tensor parallelism and Ulysses can divide heads, MLP columns and tokens per rank."""
    size, batch = config.parallel.tensor_parallel_size, config.batch
    spec = _spec(config)
    if spec is None:
        return
    shape = spec.largest_layer
    if shape.num_key_value_heads % size:  # they divide the query heads
        most = max(ranks for ranks in range(1, size) if shape.num_key_value_heads % ranks == 0)
        rule = (
            f"must divide the KV heads, but the model has {shape.num_attention_heads} query heads and "
            f"{shape.num_key_value_heads} KV heads"
        )
        fix = f"set it to {most}, or use a multiple of {size} KV heads"
        yield Problem("parallel.tensor_parallel_size", size, rule, fix, ("model.num_key_value_heads",))
    else:
        yield from _ulysses_degree(config, shape.num_key_value_heads // size)
    for key, width in _split_widths(spec).items():
        if leaves_rank_empty(width, size):
            share = -(-width // size)
            below, above = (share - 1) * size, share * (size - 1) + 1
            rule = (
                f"each of {size} tensor parallel ranks takes {share} columns of the MLP, which leaves none for the last ranks"
            )
            fix = f"set it to {below} or {above}" if below else f"set it to {above}"
            yield Problem(key, width, rule, fix, ("parallel.tensor_parallel_size",))
    if size > 1 and config.train.compile:
        rule = "torch.compile cannot trace tensor parallelism with a varying number of tokens"
        fix = "set it to false, or set parallel.tensor_parallel_size to 1"
        yield Problem("train.compile", True, rule, fix, ("parallel.tensor_parallel_size",))
    multiple = math.lcm(size, batch.pad_to_multiple_of)
    if batch.tokens_per_rank % multiple and batch.tokens_per_rank % batch.pad_to_multiple_of == 0:
        below = batch.tokens_per_rank // multiple * multiple
        rule = f"must be a multiple of {multiple}, to which parallel.tensor_parallel_size {size} pads the tokens of each rank"
        fix = f"set it to {below} or {below + multiple}" if below else f"set it to {multiple}"
        others = ("parallel.tensor_parallel_size", "batch.pad_to_multiple_of")
        yield Problem("batch.tokens_per_rank", batch.tokens_per_rank, rule, fix, others)


def _split_widths(spec: ModelSpec) -> dict[str, int]:
    """Returns the widths of the MLPs that tensor parallelism splits by columns, by setting."""
    found = {}
    for layer in spec.layers:
        if not layer.experts:
            found["model.intermediate_size"] = layer.intermediate_size
        elif width := layer.intermediate_size - layer.routed_size:
            found["model.shared_expert_intermediate_size"] = width
    return found


def _experts(config: Config) -> Iterator[Problem]:
    spec = _spec(config)
    if spec is not None:
        yield from expert_rules(config, spec)


def leaves_rank_empty(size: int, ranks: int) -> bool:
    """Returns True if shares of `size` / `ranks`, rounded up, leave nothing for the last rank, which FSDP cannot shard."""
    return -(-size // ranks) * (ranks - 1) >= size


def _ulysses_degree(config: Config, kv_heads: int) -> Iterator[Problem]:
    """Checks that `context.ulysses_degree` divides the `kv_heads` of each rank."""
    wanted = config.context.ulysses_degree
    if wanted != "auto" and (wanted < 1 or kv_heads % wanted):
        divisors = ", ".join(str(ranks) for ranks in range(1, kv_heads + 1) if kv_heads % ranks == 0)
        others = ("model.num_key_value_heads", "parallel.tensor_parallel_size")
        rule = f"must divide the KV heads per rank, {kv_heads}"
        yield Problem("context.ulysses_degree", wanted, rule, f"set it to {divisors}, or auto", others)


def _train(config: Config) -> Iterator[Problem]:
    batch, optimizer = config.batch, config.optimizer
    if batch.tokens_per_rank % batch.pad_to_multiple_of:
        fix = f"set batch.tokens_per_rank to a multiple of {batch.pad_to_multiple_of}"
        rule = f"must divide batch.tokens_per_rank, which is {batch.tokens_per_rank}"
        yield Problem("batch.pad_to_multiple_of", batch.pad_to_multiple_of, rule, fix, ("batch.tokens_per_rank",))
    if not all(0 <= beta < 1 for beta in optimizer.betas):
        yield Problem("optimizer.betas", list(optimizer.betas), "each must be in [0, 1)", "the default is [0.9, 0.95]")


def _checkpoint(config: Config) -> Iterator[Problem]:
    settings = config.checkpoint
    if settings.export is not None and settings.every is None:
        rule = "the last checkpoint is exported, but checkpoint.every is null"
        fix = "set checkpoint.every to a number, or omit the export"
        yield Problem("checkpoint.export", str(settings.export), rule, fix, ("checkpoint.every",))


def _eval(config: Config) -> Iterator[Problem]:
    """Checks that validation has documents, and that held-out documents are validated on."""
    wanted, held_out = config.eval, config.data.held_out
    if wanted.every is not None and wanted.store is None and not held_out:
        fix = "set data.held_out to a share such as 0.01, or eval.store to another store"
        yield Problem("eval.every", wanted.every, "there are no documents to validate on", fix, ("eval.store", "data.held_out"))
    if wanted.store is not None and held_out:
        rule = f"validation uses eval.store {wanted.store}, so that held-out documents would never be used"
        yield Problem("data.held_out", held_out, rule, "omit one of the two settings", ("eval.store",))


def _memory(config: Config) -> Iterator[Problem]:
    """Checks that the settings that save memory can be combined."""
    train = config.train
    if train.offload_activations and train.recompute == "none":
        rule = "only inputs of recomputed blocks are offloaded, but train.recompute is none"
        fix = "set train.recompute to another mode, or omit it"
        yield Problem("train.offload_activations", True, rule, fix, ("train.recompute",))
    if train.mlp_tile_tokens is not None and config.parallel.tensor_parallel_size > 1:
        rule = "not supported with tensor parallelism, which scatters the output of the whole MLP over its ranks"
        others = ("parallel.tensor_parallel_size",)
        fix = "omit it, or set parallel.tensor_parallel_size to 1"
        yield Problem("train.mlp_tile_tokens", train.mlp_tile_tokens, rule, fix, others)
