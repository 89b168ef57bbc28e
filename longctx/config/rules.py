"""Rules that span several settings; a function for each subject yields problems. `process_rules` has those on processes."""

import importlib.util
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from longctx.config.problems import ConfigError, Problem
from longctx.config.process_rules import domain_rules, mesh_rules
from longctx.config.run import Config
from longctx.errors import UserError
from longctx.model.adapters import ALL_LINEAR, LoraError
from longctx.model.context_extension import ROPE_SETTINGS
from longctx.model.spec import ModelSpec
from longctx.planning.cost.hardware_profile import HardwareProfile, ProfileError


def check(config: Config, *, world_size: int) -> None:
    """Raises ConfigError with every rule that the settings break on `world_size` processes."""
    problems = broken_rules(config, world_size)
    if problems:
        raise ConfigError.of(problems, f"the configuration for {world_size} processes")


def broken_rules(config: Config, world_size: int | None) -> list[Problem]:
    """All problems; with `world_size` None only those that any number of processes would have.

    Those of a stage have keys such as stages.2.batch.tokens_per_rank, unless all stages have them.
    """
    if config.stages:
        return list(_of_stages(config, world_size))
    rules = (_model, _lora, _dpo, _stores, _files, _context, _bins, _pipeline, _tensor, _train, _eval, _checkpoint, _memory)
    problems = [problem for rule in rules for problem in rule(config)]
    if world_size is not None:
        problems += mesh_rules(config, world_size) or list(domain_rules(config, world_size))
    return problems


def _of_stages(config: Config, world_size: int | None) -> Iterator[Problem]:
    found = [broken_rules(config.at_stage(number), world_size) for number in range(len(config.stages))]
    for number, problems in enumerate(found, start=1):
        for problem in problems:
            if not all(problem in others for others in found):
                yield replace(problem, key=f"stages.{number}.{problem.key}")
            elif number == 1:
                yield problem
    steps = config.stage_ends[-1]
    if config.train.steps != steps:
        rule = f"the stages have {steps} steps together"
        yield Problem("train.steps", config.train.steps, rule, "leave it out, or change the steps of a stage")
    if config.dpo.beta is not None:
        rule = "the reference of dpo.beta is of the pairs of a whole run, which stages would cut in other ways"
        yield Problem("dpo.beta", config.dpo.beta, rule, "leave one of the two out, and make two runs", ("stages",))
    if config.checkpoint.every is None:
        rule = "a stage begins from the checkpoint of the one before"
        yield Problem("checkpoint.every", None, rule, "give a number; one that is greater than train.steps writes no others")


def _model(config: Config) -> Iterator[Problem]:
    model, found = config.model, _sizes(config)
    if isinstance(found, ConfigError):
        yield from found.problems
    elif isinstance(found, UserError) and not isinstance(found, LoraError):  # which is told with the settings of LoRA
        yield Problem("model.from_pretrained", model.from_pretrained, str(found), _without(config), ("model.implementation",))
    if model.from_pretrained is None:
        if model.implementation != "auto":
            rule = "it says whose code runs a checkpoint, and model.from_pretrained names none"
            yield Problem("model.implementation", model.implementation, rule, "leave it out, or give model.from_pretrained")
        return
    free = {"preset", "from_pretrained", "implementation", *ROPE_SETTINGS}
    own = {name for name in model.model_fields_set - free if getattr(model, name) is not None}
    for name in sorted(own):
        rule = f"the sizes are those of the checkpoint {model.from_pretrained}"
        yield Problem(f"model.{name}", getattr(model, name), rule, "leave it out", ("model.from_pretrained",))


def _without(config: Config) -> str:
    """What to do without the checkpoint that a run began with, or is to begin with."""
    run = config.train.run_dir
    if not (run / "checkpoints").is_dir():
        return "mend or replace that checkpoint, or give another"
    if config.lora.rank is not None:
        return f"put it back where it was: the checkpoints of {run} have the adapters alone, and not the weights beside them"
    return (
        f"put it back where it was; or, as the checkpoints of {run} have all weights: longctx export {run} OUT, and give "
        "--model.from_pretrained OUT, without settings of RoPE"
    )


def _lora(config: Config) -> Iterator[Problem]:
    """What adapters cannot be put beside, and what they would make of the loss."""
    lora, model, parallel = config.lora, config.model, config.parallel
    if lora.dropout:
        rule = "it would draw other numbers where a document is split over other ranks, so that the loss depended on the plan"
        yield Problem("lora.dropout", lora.dropout, rule, "leave it out")
    if lora.rank is None:
        for name in ("alpha", "target_modules"):
            if getattr(lora, name) != type(lora).model_fields[name].default:
                rule = "lora.rank is null, so that there are no adapters"
                yield Problem(f"lora.{name}", getattr(lora, name), rule, "give lora.rank, or leave it out", ("lora.rank",))
        return
    if model.from_pretrained is None:
        rule = "adapters stand beside the weights of a checkpoint, and model.from_pretrained names none"
        fix = "give model.from_pretrained, or leave lora.rank out"
        yield Problem("lora.rank", lora.rank, rule, fix, ("model.from_pretrained",))
        return
    if importlib.util.find_spec("peft") is None:
        yield Problem("lora.rank", lora.rank, "adapters need peft, which is not there", "pip install 'longctx[huggingface]'")
        return
    if model.implementation == "native":
        rule = "adapters are put into transformers' own code, and not into the native decoder"
        fix = "choose transformers, or leave lora.rank out"
        yield Problem("model.implementation", model.implementation, rule, fix, ("lora.rank",))
    for key, size in (
        ("tensor_parallel_size", parallel.tensor_parallel_size),
        ("pipeline_parallel_size", parallel.pipeline_parallel_size),
    ):
        if size > 1:
            rule = "adapters are put into transformers' own code, which runs with whole matrices and all layers on a rank"
            fix = "give 1 (frozen weights are sharded over all ranks, and have no gradients), or leave lora.rank out"
            yield Problem(f"parallel.{key}", size, rule, fix, ("lora.rank",))
    found = _sizes(config)
    if isinstance(found, LoraError):
        fix = f"name some of these, or leave it out for {ALL_LINEAR}"
        yield Problem("lora.target_modules", lora.target_modules, str(found), fix, ("lora.rank", "model.from_pretrained"))


def _sizes(config: Config) -> ModelSpec | UserError:
    """The model's sizes, by building it without values; or why it cannot be built."""
    try:
        return config.model_source().spec
    except UserError as error:
        return error


def _dpo(config: Config) -> Iterator[Problem]:
    if config.dpo.beta is None and config.dpo.label_smoothing:
        rule = "dpo.beta is null, so that there is no preference tuning"
        fix = "give dpo.beta, or leave it out"
        yield Problem("dpo.label_smoothing", config.dpo.label_smoothing, rule, fix, ("dpo.beta",))


def _spec(config: Config) -> ModelSpec | None:
    """The model's sizes; None where there is something wrong with them, which the rules on model and LoRA tell."""
    found = _sizes(config)
    return found if isinstance(found, ModelSpec) else None


def _stores(config: Config) -> Iterator[Problem]:
    """One store, or several by weights, or several by epochs."""
    store, stores = config.data.store, config.data.stores
    if store is None and stores is None:
        yield Problem("data.store", None, "a run reads something", "give a folder that `longctx prepare` wrote, or data.stores")
    if stores is None:
        return
    given = [one.model_dump(exclude_none=True) for one in stores]
    if store is not None:
        rule = f"one store or several are read, and data.store is {store}"
        yield Problem("data.stores", given, rule, "leave one of the two out, or give null for it", ("data.store",))
    if not stores:
        yield Problem("data.stores", given, "there is at least one", "give [{path: FOLDER, weight: 1}], or data.store")
    if any((one.weight is None) == (one.epochs is None) for one in stores):
        fix = "write {path: FOLDER, weight: SHARE}, or {path: FOLDER, epochs: PASSES}"
        yield Problem("data.stores", given, "each has a weight or epochs, and not both", fix)
    elif len({one.weight is None for one in stores}) > 1:
        rule = "shares by weight and shares by epochs cannot be compared, and some have one and some the other"
        yield Problem("data.stores", given, rule, "give all of them weights, or all of them epochs")
    if len({one.path.resolve() for one in stores}) < len(stores):
        yield Problem("data.stores", given, "a store is there once", "add up what stands beside the same path")


def _files(config: Config) -> Iterator[Problem]:
    tokenizer = config.data.tokenizer
    if tokenizer is not None and not tokenizer.is_file():
        yield Problem("data.tokenizer", str(tokenizer), "there is no such file", "check the path, or leave it out")
    try:
        if config.context.profile is not None:
            HardwareProfile.load(config.context.profile)
    except (ProfileError, OSError) as error:
        yield Problem("context.profile", config.context.profile, str(error), "mend the file, or name a shipped profile")


def _context(config: Config) -> Iterator[Problem]:
    context, mode = config.context, ("context.mode",)
    if context.degree is not None and context.mode != "static":
        rule = f"only mode static has one degree for all, and context.mode is {context.mode}"
        yield Problem("context.degree", context.degree, rule, "set context.mode to static, or leave the degree out", mode)
    if context.bins is not None and context.mode != "bins":
        rule = f"only mode bins reads a table, and context.mode is {context.mode}"
        yield Problem("context.bins", context.bins, rule, "set context.mode to bins, or leave the table out", mode)
    device = config.train.device
    if (context.kernel, device) in (("cpu", "cuda"), ("flash", "cpu")):
        rule = f"this kernel cannot run on train.device {device}"
        yield Problem("context.kernel", context.kernel, rule, "use kernel auto", ("train.device",))


def _bins(config: Config) -> Iterator[Problem]:
    bins = config.context.bins
    if bins is None:
        return
    lengths, degrees = list(bins), list(bins.values())
    if not bins:
        yield Problem("context.bins", bins, "a table has at least one row", "write {8192: 1, 32768: 4}, or leave it out")
    elif min(lengths) < 1 or min(degrees) < 1:
        yield Problem("context.bins", bins, "lengths and degrees are at least 1", "mend the row, as in {8192: 1, 32768: 4}")
    elif any(a >= b for a, b in itertools.pairwise(lengths)):
        yield Problem("context.bins", bins, "lengths ascend", "sort the rows by length")
    elif any(a > b for a, b in itertools.pairwise(degrees)):
        yield Problem("context.bins", bins, "a longer document never has a smaller degree", "raise the later degrees")


def _pipeline(config: Config) -> Iterator[Problem]:
    """Stages that the model or the schedule cannot have."""
    parallel = config.parallel
    ranks, chunks, schedule = parallel.pipeline_parallel_size, parallel.pipeline_chunks, parallel.pipeline_schedule
    others = ("parallel.pipeline_schedule", "parallel.pipeline_parallel_size")
    if problem := config.pipeline.problem:
        yield Problem("parallel.pipeline_chunks", chunks, *problem, others)
    if ranks > 1 and parallel.reduce_after == "micro_batch":
        rule = "a pipeline reduces gradients once a step"
        yield Problem("parallel.reduce_after", parallel.reduce_after, rule, "choose step", others[1:])
    if ranks > 1 and schedule == "zero-bubble":
        if parallel.reshard_after == "block":
            rule = "schedule zero-bubble computes gradients of weights when the block's own backward is long over"
            yield Problem("parallel.reshard_after", "block", rule, "choose step, or schedule 1f1b", others)
        if config.train.recompute != "none":
            rule = "schedule zero-bubble goes through a block's backward twice, and would compute the block anew each time"
            yield Problem("train.recompute", config.train.recompute, rule, "choose none, or schedule 1f1b", others)
        if config.train.mlp_tile_tokens is not None:
            rule = "schedule zero-bubble goes through a block's backward twice, and would compute each tile anew both times"
            yield Problem("train.mlp_tile_tokens", config.train.mlp_tile_tokens, rule, "leave it out, or choose 1f1b", others)
        if config.train.compile:
            rule = "schedule zero-bubble goes through a block's backward twice, which compiled blocks allow once"
            yield Problem("train.compile", True, rule, "choose false, or schedule 1f1b", others)
    spec = _spec(config)
    if spec is None:
        return
    layers = len(spec.layers)
    if ranks * chunks > layers:
        most = layers // ranks
        if most == 0:
            fix = f"give {max(1, layers // chunks)} or fewer, or a model of more layers"
        else:
            alone = most == 1 and schedule == "interleaved"
            fix = f"give parallel.pipeline_chunks {most}" + (", with schedule 1f1b" if alone else "")
        rule = f"{ranks} ranks of {chunks} stages need {ranks * chunks} layers at least, and the model has {layers}"
        others = ("parallel.pipeline_chunks", "model.num_hidden_layers")
        yield Problem("parallel.pipeline_parallel_size", ranks, rule, fix, others)


def _tensor(config: Config) -> Iterator[Problem]:
    """What tensor parallelism cannot share out evenly: heads, which Ulysses shares further, and the tokens of a rank."""
    size, batch = config.parallel.tensor_parallel_size, config.batch
    spec = _spec(config)
    if spec is None:
        return
    shape = spec.largest_layer
    if shape.num_key_value_heads % size:  # they divide the query heads
        most = max(ranks for ranks in range(1, size) if shape.num_key_value_heads % ranks == 0)
        rule = (
            f"every rank takes whole heads, and the model has {shape.num_attention_heads} query heads and "
            f"{shape.num_key_value_heads} kv heads"
        )
        fix = f"give {most}, or a multiple of {size} kv heads"
        yield Problem("parallel.tensor_parallel_size", size, rule, fix, ("model.num_key_value_heads",))
    else:
        yield from _ulysses_degree(config, shape.num_key_value_heads // size)
    if leaves_one_without(shape.intermediate_size, size):
        share = -(-shape.intermediate_size // size)
        below, above = (share - 1) * size, share * (size - 1) + 1
        rule = f"each of {size} tensor ranks takes {share} columns of the MLP, and the last ones would have none"
        fix = f"give {below} or {above}" if below else f"give {above}"
        yield Problem("model.intermediate_size", shape.intermediate_size, rule, fix, ("parallel.tensor_parallel_size",))
    if size > 1 and config.train.compile:
        rule = "torch.compile cannot trace tensor parallelism over a number of tokens that changes"
        fix = "leave it out, or give tensor_parallel_size 1"
        yield Problem("train.compile", True, rule, fix, ("parallel.tensor_parallel_size",))
    multiple = math.lcm(size, batch.pad_to_multiple_of)
    if batch.tokens_per_rank % multiple and batch.tokens_per_rank % batch.pad_to_multiple_of == 0:
        below = batch.tokens_per_rank // multiple * multiple
        rule = f"with parallel.tensor_parallel_size {size} tokens are padded to a multiple of {multiple}, which would exceed it"
        fix = f"give {below} or {below + multiple}" if below else f"give {multiple}"
        others = ("parallel.tensor_parallel_size", "batch.pad_to_multiple_of")
        yield Problem("batch.tokens_per_rank", batch.tokens_per_rank, rule, fix, others)


def leaves_one_without(size: int, ranks: int) -> bool:
    """Whether equal shares of `size`, rounded up, leave nothing for the last of so many ranks. FSDP cannot shard that."""
    return -(-size // ranks) * (ranks - 1) >= size


def _ulysses_degree(config: Config, kv_heads: int) -> Iterator[Problem]:
    """Heads of a rank that cannot be shared out as `context.ulysses_degree` says."""
    wanted = config.context.ulysses_degree
    if wanted != "auto" and (wanted < 1 or kv_heads % wanted):
        divisors = ", ".join(str(ranks) for ranks in range(1, kv_heads + 1) if kv_heads % ranks == 0)
        others = ("model.num_key_value_heads", "parallel.tensor_parallel_size")
        rule = f"must divide the {kv_heads} kv heads of a rank"
        yield Problem("context.ulysses_degree", wanted, rule, f"give {divisors}, or auto", others)


def _train(config: Config) -> Iterator[Problem]:
    batch, optimizer = config.batch, config.optimizer
    if batch.tokens_per_rank % batch.pad_to_multiple_of:
        fix = f"give batch.tokens_per_rank a multiple of {batch.pad_to_multiple_of}"
        rule = f"padding to a multiple of it would exceed batch.tokens_per_rank {batch.tokens_per_rank}"
        yield Problem("batch.pad_to_multiple_of", batch.pad_to_multiple_of, rule, fix, ("batch.tokens_per_rank",))
    if not all(0 <= beta < 1 for beta in optimizer.betas):
        yield Problem("optimizer.betas", list(optimizer.betas), "each lies in [0, 1)", "the default is [0.9, 0.95]")


def _checkpoint(config: Config) -> Iterator[Problem]:
    settings = config.checkpoint
    if settings.export is not None and settings.every is None:
        rule = "what is exported is the last checkpoint, and checkpoint.every is null"
        fix = "give checkpoint.every a number, or leave the export out"
        yield Problem("checkpoint.export", str(settings.export), rule, fix, ("checkpoint.every",))


def _eval(config: Config) -> Iterator[Problem]:
    """Validation needs documents, and documents that are set apart need somebody to look at them."""
    wanted, held_out = config.eval, config.data.held_out
    if wanted.every is not None and wanted.store is None and not held_out:
        fix = "set data.held_out to a share such as 0.01, or eval.store to another store"
        yield Problem("eval.every", wanted.every, "there are no documents to validate on", fix, ("eval.store", "data.held_out"))
    if wanted.store is not None and held_out:
        rule = f"validation takes the documents of eval.store {wanted.store}, and nobody would look at these"
        yield Problem("data.held_out", held_out, rule, "leave one of the two out", ("eval.store",))


def _memory(config: Config) -> Iterator[Problem]:
    """Ways to save memory that go with others, or not."""
    train = config.train
    if train.offload_activations and train.recompute == "none":
        rule = "what is offloaded are the inputs of blocks that recompute, and train.recompute is none"
        fix = "set train.recompute to selective or full, or leave it out"
        yield Problem("train.offload_activations", True, rule, fix, ("train.recompute",))
    if train.mlp_tile_tokens is not None and config.parallel.tensor_parallel_size > 1:
        rule = "tensor parallelism scatters the output of the whole MLP over its ranks"
        others = ("parallel.tensor_parallel_size",)
        yield Problem("train.mlp_tile_tokens", train.mlp_tile_tokens, rule, "leave it out, or split no matrices", others)
