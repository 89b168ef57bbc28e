"""Checks of a run across settings, stores, model, device and checkpoint, before its processes
join."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from longctx.config import Config
from longctx.config.problems import plain, yaml_text
from longctx.config.removed import of_today
from longctx.config.rules import leaves_rank_empty
from longctx.data.records.pretrained import Pretrained
from longctx.data.records.tokenizer import TokenizerError, added_tokens, same_tokens, without_added
from longctx.data.store.manifest import TOKENIZER
from longctx.data.store.store import Lengths, Store
from longctx.errors import UserError, shell
from longctx.hf.source import ModelSource
from longctx.parallel.float8 import check_float8
from longctx.planning.cost.spec import ModelSpec
from longctx.safe_yaml import parse, read_text
from longctx.training.data import RunData
from longctx.training.kernels import prepare_run_kernels
from longctx.training.metrics import check_wandb
from longctx.training.optimizer import group_of
from longctx.training.run import Run
from longctx.training.saved.export import check_base, check_place


def check_vocabulary(config: Config, spec: ModelSpec) -> None:
    """Raises UserError if tensor parallelism leaves a rank without entries of the vocabulary."""
    assert spec.vocab_size is not None
    ranks = config.parallel.tensor_parallel_size
    entries = spec.vocab_size
    if leaves_rank_empty(entries, ranks):
        share = -(-entries // ranks)
        divisors = (
            n for n in range(ranks, 0, -1) if spec.largest_layer.num_key_value_heads % n == 0
        )
        fewer = (n for n in divisors if not leaves_rank_empty(entries, n))
        raise UserError(
            f"parallel.tensor_parallel_size is {ranks}, but with {share} of {entries} vocabulary "
            f"entries per rank the last rank has none: set it to {next(fewer)}, or "
            f"model.vocab_size to {ranks * share}"
        )


def checks_before_joining(run: Run) -> list[Callable[[], object]]:
    """Returns the checks of a run on this rank that need no checkpoint, for `raise_together`."""
    config = run.config
    files = run.source.files
    return [
        partial(check_wandb, config.log.wandb),
        *([] if files is None else [files.require_weights]),
        *([] if config.train.float8 is None else [partial(check_float8, run.device)]),
        partial(prepare_run_kernels, config, run.source.spec, run.launch, run.device),
        *checks_of(config, run.data, run.source, run.launch.world_size),
    ]


def checks_of(
    config: Config, data: RunData, source: ModelSource, ranks: int
) -> list[Callable[[], object]]:
    """Returns the checks of a run that need neither its device nor its folder, for
    `raise_together`."""
    return [
        partial(check_vocabulary, config, source.spec),
        partial(check_model, config, data, source, ranks),
        partial(check_groups, config, source),
        partial(check_exportable, config),
    ]


def check_weights(config: Config, data: RunData) -> None:
    """Raises UserError if tokens of a store have weights, and documents are merged, which might
    differ in them, or get noise, which has weights of its own."""
    for key, store in (("data.store", data.store), ("eval.store", data.validation)):
        if store is None or not store.weighted:
            continue
        if config.data.merge_prefixes:
            raise UserError(
                f"data.merge_prefixes is true, but {key} {store.description} has weights of "
                "tokens, which may differ where documents are alike: set data.merge_prefixes to "
                "false"
            )
        if config.objective.is_diffusion:
            raise UserError(
                f"objective.name is block_diffusion, but {key} {store.description} has weights of "
                "tokens, in place of which noise has its own: prepare it without weights"
            )


def check_model(config: Config, data: RunData, source: ModelSource, ranks: int) -> None:
    """Raises UserError if the model does not fit the stores.

    Documents are too long; or a checkpoint has another tokenizer. `Lengths` in place of a store
    have no tokens to check.
    """
    if config.model.from_pretrained is not None and not isinstance(data.store, Lengths):
        _check_tokenizer(config, data.store, source, config.model.from_pretrained)
    check_weights(config, data)
    source.check_length(min(config.max_length(ranks), data.longest))


def check_groups(config: Config, source: ModelSource) -> None:
    """Raises UserError if a group of the optimizer matches no trained parameter that an earlier one
    leaves."""
    if not config.optimizer.groups:
        return
    with torch.device("meta"):
        model = source.build()
    groups = [
        group_of(name, config.optimizer)
        for name, weight in model.named_parameters()
        if weight.requires_grad
    ]
    for group in config.optimizer.groups:
        if not any(group is other for other in groups):
            names = ", ".join(name for name, _ in list(model.named_parameters())[:3])
            raise UserError(
                f"optimizer.groups has match {group.match}, which no trained parameter has that "
                f"is in no earlier group: omit it, or correct it for names such as {names}"
            )


def _check_tokenizer(config: Config, store: Store, source: ModelSource, name: str) -> None:
    entries = store.tokenizer.vocab_size
    embedded = source.spec.vocab_size
    theirs = _own_tokenizer(source.files.folder) if source.files is not None else None
    ours = store.tokenizer.text
    new = config.model.new_tokens or []
    if lacking := [token for token in new if token not in added_tokens(ours)]:
        raise UserError(
            f"model.new_tokens has {', '.join(lacking)}, which the tokenizer of "
            f"{config.data.description} lacks: prepare it with a tokenizer to which they were "
            "added (transformers: add_tokens, save_pretrained), or use longctx finetune"
        )
    if theirs is not None and not same_tokens(without_added(theirs, new), without_added(ours, new)):
        others = [
            token for token in added_tokens(ours) if token not in {*added_tokens(theirs), *new}
        ]
        if others and same_tokens(
            without_added(theirs, [*new, *others]), without_added(ours, [*new, *others])
        ):
            raise UserError(
                f"the tokenizer of {config.data.description} adds {', '.join(others)} to that of "
                f"{name}: set model.new_tokens to {yaml_text([*new, *others])}, or prepare it "
                "with the tokenizer of the checkpoint"
            )
        raise UserError(
            f"{config.data.description} was prepared with another tokenizer than {name}: prepare "
            f"it with the tokenizer of the checkpoint (longctx prepare --tokenizer {shell(name)})"
        )
    if embedded is not None and entries > embedded:
        entries = store.largest_token + 1
    if embedded is not None and entries > embedded:
        beyond = [
            token
            for token, number in added_tokens(store.tokenizer.text).items()
            if number >= embedded
        ]
        raise UserError(
            f"token {entries - 1} of {config.data.description} "
            f"({store.tokenizer.decode([entries - 1])!r}) is beyond the embedding of {name}, "
            f"which has {embedded:,} entries: remove text with it, add entries by "
            f"model.new_tokens {yaml_text(beyond)}, or use the tokenizer that the model was "
            "trained with"
        )


def _own_tokenizer(folder: Path) -> str | None:
    """Returns the tokenizer.json of a checkpoint as transformers builds it, which may differ from
    the file."""
    try:
        return Pretrained.load(str(folder)).tokenizer.text
    except TokenizerError:  # it has no end of documents, or is not one for transformers
        if (folder / TOKENIZER).is_file():
            return (folder / TOKENIZER).read_text("utf-8")
        return None


def check_beginning(run: Run) -> list[str]:
    """Returns notes on settings that a run has changed since its checkpoint.

    Raises UserError if the checkpoint cannot be continued, or if the export at the end of the run
    would find no place.
    """
    config = run.config
    saved = run.checkpoint
    out = run.config.checkpoint.export
    changes = [] if saved is None else changes_of_optimizer(config, saved.run, resumes=run.resumes)
    done = run.resumes and saved is not None and saved.step >= config.train.steps
    if out is not None and not done:
        check_base(config.model.from_pretrained, out)
        # Of this run, before.
        check_place(out, overwrite=run.resumes and out.is_relative_to(config.train.run_dir))
    return changes


def notes_on(config: Config, device: torch.device) -> list[str]:
    """Returns notes on settings that have no effect or are changed."""
    notes = []
    on_gpu = device.type == "cuda"
    if not on_gpu and (config.train.offload_activations or config.train.offload_optimizer):
        notes.append("offloading has no effect: on a CPU everything is in host memory already")
    if on_gpu and config.dtype == "float32":
        notes.append(
            "train.dtype is float32: on GPUs, matrix products and attention take many times as "
            "long as in bfloat16"
        )
    if config.optimizer.warmup_steps > config.schedule_steps:
        limit = "train.steps" if config.optimizer.decay_steps is None else "optimizer.decay_steps"
        notes.append(
            f"optimizer.warmup_steps {config.optimizer.warmup_steps} is shortened to {limit} "
            f"{config.schedule_steps}"
        )
    return notes


def check_exportable(config: Config) -> None:
    """Raises UserError if `checkpoint.export` is set, and no export can hold what is trained."""
    if config.checkpoint.export is None:
        return
    if config.lora.rank is not None and config.model.changed_rope:
        raise UserError(
            "checkpoint.export is set, and adapters cannot carry the changed RoPE (model.rope_*): "
            "give checkpoint.export null, and merge them later (longctx export "
            f"{shell(config.train.run_dir)} OUT --merge)"
        )
    check_family(config)


def check_family(config: Config) -> None:
    """Raises NoNativeModel if the model is new and no family of transformers has models of its
    shape."""
    from longctx.model.families import expressed  # needs transformers

    if config.model.from_pretrained is None:
        sizes = config.model.sizes()
        # No family depends on it.
        expressed(sizes.model_copy(update={"vocab_size": sizes.vocab_size or 256}), longest=1)


def changes_of_optimizer(config: Config, run: Path, *, resumes: bool) -> list[str]:
    """Returns a note if a run that `resumes` has another optimizer section or number of steps than
    before.

    Raises UserError if the checkpoints of `run` have the moments of another optimizer.
    """
    path = run / "config.yaml"
    before = of_today(parse(read_text(path)) or {}) if path.is_file() else {}
    name = before.get("optimizer", {}).get("name", "adamw")
    if path.is_file() and name != config.optimizer.name:
        raise UserError(
            f"optimizer.name is {config.optimizer.name}, but checkpoints of {run} have the "
            f"moments of {name}: set it to {name}, or start a new run from an export of that one"
        )
    changes = []
    for setting in (
        "train.steps",
        *(f"optimizer.{key}" for key in type(config.optimizer).model_fields),
    ):
        section, key = setting.split(".")
        value = plain(getattr(getattr(config, section), key))
        former = before.get(section, {}).get(key, value)
        if former != value:
            changes.append(f"{setting} is {yaml_text(value)}, was {yaml_text(former)}")
    if changes and resumes:
        return [f"resumed with other settings: {'; '.join(changes)}"]
    return []
