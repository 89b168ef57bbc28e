"""Where a run's model comes from: a shape with new weights, or a checkpoint of transformers."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from longctx.model.presets import ModelShape
from longctx.model.spec import ModelSpec

if TYPE_CHECKING:
    from longctx.model.checkpoint_files import CheckpointFiles
    from longctx.model.protocol import Model


class ModelSource(Protocol):
    """A model that can be built."""

    @property
    def spec(self) -> ModelSpec:
        """Its sizes."""

    @property
    def said(self) -> str:
        """Whose code it is and why, for the log; empty where there is no choice."""

    @property
    def files(self) -> "CheckpointFiles | None":
        """The checkpoint; None for new weights."""

    def check_length(self, longest: int) -> None:
        """Raises UserError if the model cannot take documents of so many tokens."""

    def build(self, layers: Collection[int] | None = None) -> "Model":
        """The model, or these layers of it, on torch's default device; its values come later (`Model.initial_value`)."""


@dataclass(frozen=True)
class NewDecoder:
    """The native decoder, with first values."""

    shape: ModelShape
    said: str = ""
    files: None = None

    @property
    def spec(self) -> ModelSpec:
        return self.shape.spec

    def check_length(self, longest: int) -> None:
        """Any length will do."""

    def build(self, layers: Collection[int] | None = None) -> "Model":
        from longctx.model.decoder import Decoder

        return Decoder(self.shape, layers)


@cache
def pretrained(source: str, implementation: str, split: bool, rope: tuple[tuple[str, Any], ...] = ()) -> ModelSource:
    """The checkpoint in a folder or on the hub, run by one of two implementations; `split`: matrices or layers over ranks.

    With `rope` its RoPE is changed: see `context_extension`.

    Raises PretrainedError if it cannot be used.
    """
    from longctx.model.checkpoint_files import CheckpointFiles, PretrainedError
    from longctx.model.huggingface import TransformersSource

    files = replace(CheckpointFiles.open(source), rope=rope)
    if implementation == "native" or (implementation == "auto" and split):
        raise PretrainedError("the native decoder does not load checkpoints yet")
    return TransformersSource(files, "transformers' own code")
