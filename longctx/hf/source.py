"""Sources of a run's model: a shape with new weights, or a checkpoint of transformers."""

import importlib.util
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from longctx.errors import install
from longctx.hf.lora_options import Lora, LoraError
from longctx.model.presets import ModelShape, NoNativeModel
from longctx.model.published import is_config_alone
from longctx.planning.cost.spec import ModelSpec

if TYPE_CHECKING:
    from longctx.model.checkpoint_files import CheckpointFiles
    from longctx.model.protocol import Model


class ModelSource(Protocol):
    """A model that can be built."""

    @property
    def spec(self) -> ModelSpec:
        """Sizes of the model."""

    @property
    def description(self) -> str:
        """Which code runs the model and why, for the log; empty if there is no choice."""

    @property
    def files(self) -> "CheckpointFiles | None":
        """Files of the checkpoint; None for new weights."""

    @property
    def unused(self) -> Sequence[str]:
        """Names of the checkpoint's tensors that the model does not use."""

    def check_length(self, longest: int) -> None:
        """Raises UserError if the model does not support documents of `longest` tokens."""

    def build(self, layers: Collection[int] | None = None) -> "Model":
        """Builds the model, or only `layers` of it, on torch's default device; values are set later
        (`Model.initial_value`)."""


def lines_on(source: ModelSource, name: str | None, longest: int) -> list[str]:
    """Returns the log lines on a run's model, requested as `name` (None: new weights), and its
    longest document."""
    if isinstance(source, NewDecoder):
        return [*_few_entries(source.spec), *_no_export(source.shape)]
    lines = [f"{name}: {source.description}"] if source.description else []
    if source.files is not None and source.files.added:
        lines.append(
            f"{name}: {source.files.added:,} entries are added to the embedding and an untied "
            "head, each the mean of the others"
        )
    if source.files is not None and source.files.remark:
        lines.append(f"{name}: {source.files.remark}")
    if unused := source.unused:
        tensors = f"{len(unused):,} tensors" if len(unused) > 1 else "1 tensor"
        named = ", ".join(unused[:3]) + ", .." * (len(unused) > 3)
        lines.append(
            f"{name}: the model does not use {tensors} of this checkpoint, and exports will lack "
            f"them: {named}"
        )
    if source.files is None:
        limit = None
    else:
        limit = getattr(source.files.config.get_text_config(), "max_position_embeddings", None)
    if limit and longest > limit and source.files is not None and not source.files.rope:
        lines.append(
            f"{name}: documents have up to {longest:,} tokens, and the checkpoint is made for "
            f"{limit:,} (max_position_embeddings): extend it by model.rope_scaling, or by "
            "model.rope_theta, or set data.max_length"
        )
    return lines


def _few_entries(spec: ModelSpec) -> list[str]:
    """Returns a warning if a large new model has few entries."""
    entries = spec.vocab_size
    if entries is None or entries >= FEW_ENTRIES or spec.parameters <= MANY_PARAMETERS:
        return []
    return [
        f"warning: the tokenizer of the store has {entries:,} entries, few for "
        f"{spec.parameters / 1e9:.1f}B parameters: prepare the data by that of such a model "
        "(longctx prepare --tokenizer)"
    ]


def _no_export(shape: ModelShape) -> list[str]:
    """Returns a warning if a new model cannot be exported, as no family of transformers has its
    shape."""
    if importlib.util.find_spec("transformers") is None:
        return []
    from longctx.model.families import expressed

    try:
        expressed(shape, longest=1)
    except NoNativeModel as error:
        return [f"warning: longctx export will not write this model: {error}"]
    return []


@dataclass(frozen=True)
class NewDecoder:
    """The native decoder with new weights."""

    shape: ModelShape
    description: str = ""
    files: None = None
    unused: Sequence[str] = ()

    @property
    def spec(self) -> ModelSpec:
        return self.shape.spec

    def check_length(self, longest: int) -> None:
        """RoPE supports any length."""

    def build(self, layers: Collection[int] | None = None) -> "Model":
        from longctx.model.decoder import Decoder

        return Decoder(self.shape, layers)


Rope = tuple[tuple[str, Any], ...]
"""RoPE settings that replace those of a checkpoint, see `context_extension`."""


FEW_ENTRIES, MANY_PARAMETERS = 16_384, 500_000_000
"""Entries of a vocabulary that are few for a new model of so many parameters."""
UNSPLIT = (
    "set parallel.tensor_parallel_size, parallel.pipeline_parallel_size and "
    "parallel.expert_parallel_size to 1"
)


FolderState = tuple[tuple[str | int, ...], ...]
"""Name, file, size and time of the last change of every file of a folder."""


def state_of(source: str) -> FolderState:
    """Returns what changes with the files of a checkpoint's folder; of a name on the hub, whether
    its config is asked for alone.

    A source that is read once is kept as long as its files stay as they are: settings ask for it
    again and again.
    """
    folder = Path(source)
    if not folder.is_dir():
        alone = int(is_config_alone())
        return (("config alone", alone),)
    files = sorted(file for file in folder.iterdir() if file.is_file())
    states = [(file.name, file.stat()) for file in files]
    return tuple((name, state.st_ino, state.st_size, state.st_mtime_ns) for name, state in states)


def pretrained(
    source: str, rope: Rope, implementation: str, split: bool, entries: int = 0
) -> ModelSource:
    """Returns the checkpoint in a folder or on the hub, run by transformers' own code or the native
    decoder.

    `split`: whether matrices or layers are split over ranks; `entries`: entries up to which its
    vocabulary is extended. Raises PretrainedError if the checkpoint cannot be used.
    """
    return _pretrained(
        source,
        state_of(source),
        rope=rope,
        implementation=implementation,
        split=split,
        entries=entries,
    )


@lru_cache(maxsize=64)
def _pretrained(
    source: str, state: FolderState, rope: Rope, implementation: str, split: bool, entries: int
) -> ModelSource:
    from longctx.hf.model import open_checkpoint, with_entries
    from longctx.model.checkpoint_files import PretrainedError
    from longctx.model.pretrained_decoder import NativeSource

    files = with_entries(open_checkpoint(source, rope), entries)
    why = "as model.implementation says"
    if implementation == "auto":
        if split:
            why = "as matrices, layers or experts are split"
        else:
            why = "as matrices, layers and experts are not split"
        why += " over ranks"
    if implementation == "transformers" and split:
        raise PretrainedError(
            f"transformers' own code cannot split a model over ranks: {UNSPLIT}, or choose "
            "model.implementation native"
        )
    if implementation == "transformers" or (implementation == "auto" and not split):
        return transformers_source(files, f"transformers' own code runs it, {why}")
    try:
        return NativeSource(files, f"the native decoder runs it, {why}")
    except NoNativeModel as error:
        ways = " and ".join(
            ["choose model.implementation transformers"] * (implementation == "native")
            + [UNSPLIT] * split
        )
        raise PretrainedError(f"the native decoder cannot run {source}: {error}; {ways}") from error


def transformers_source(files: "CheckpointFiles", description: str = "") -> ModelSource:
    """Returns a checkpoint that transformers' own code runs."""
    from longctx.hf.model import TransformersSource

    return TransformersSource(files, description)


def adapted(source: str, rope: Rope, lora: Lora, dtype: str) -> ModelSource:
    """Returns a checkpoint with adapters, run by transformers' own code; frozen weights are kept in
    `dtype`.

    Raises PretrainedError if the checkpoint cannot be used, LoraError if peft is not installed.
    """
    return _adapted(source, state_of(source), rope=rope, lora=lora, dtype=dtype)


@lru_cache(maxsize=64)
def _adapted(source: str, state: FolderState, rope: Rope, lora: Lora, dtype: str) -> ModelSource:
    if importlib.util.find_spec("peft") is None:
        raise LoraError(f"adapters need peft, which is not installed: {install('huggingface')}")
    from longctx.hf.model import open_checkpoint

    return adapted_source(open_checkpoint(source, rope), lora, dtype)


def adapted_source(files: "CheckpointFiles", lora: Lora, dtype: str) -> ModelSource:
    """Returns a checkpoint with adapters, that transformers' own code runs."""
    import torch

    from longctx.hf.lora import AdaptedSource

    return AdaptedSource(
        files,
        "transformers' own code runs it, as LoRA requires",
        lora=lora,
        dtype=getattr(torch, dtype),
    )
