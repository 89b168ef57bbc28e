"""Where a run's model comes from: a shape with new weights, or a checkpoint of transformers."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol

from longctx.model.adapters import Lora
from longctx.model.presets import ModelShape
from longctx.model.spec import ModelSpec

if TYPE_CHECKING:
    from longctx.model.protocol import Model


class ModelSource(Protocol):
    """A model that can be built."""

    @property
    def spec(self) -> ModelSpec:
        """Its sizes."""

    @property
    def said(self) -> str:
        """Whose code it is and why, for the log; empty where there is no choice."""

    def build(self, layers: Collection[int] | None = None) -> "Model":
        """The model, or these layers of it, on torch's default device; its values come later (`Model.initial_value`)."""


@dataclass(frozen=True)
class NewDecoder:
    """The native decoder, with first values."""

    shape: ModelShape
    said: str = ""

    @property
    def spec(self) -> ModelSpec:
        return self.shape.spec

    def build(self, layers: Collection[int] | None = None) -> "Model":
        from longctx.model.decoder import Decoder

        return Decoder(self.shape, layers)


@cache
def pretrained(source: str, implementation: str, split: bool) -> ModelSource:
    """The checkpoint in a folder or on the hub, run by one of two implementations; `split`: matrices or layers over ranks.

    Raises PretrainedError if it cannot be used.
    """
    from longctx.model.checkpoint_files import CheckpointFiles, PretrainedError
    from longctx.model.huggingface import TransformersSource

    files = CheckpointFiles.open(source)
    if implementation == "native" or (implementation == "auto" and split):
        raise PretrainedError("the native decoder does not load checkpoints yet")
    return TransformersSource(files, "transformers' own code")


@cache
def adapted(source: str, lora: Lora, dtype: str) -> ModelSource:
    """The same with adapters, run by transformers' own code; frozen weights are held in `dtype`.

    Raises PretrainedError if it cannot be used.
    """
    import torch

    from longctx.model.checkpoint_files import CheckpointFiles
    from longctx.model.huggingface import TransformersSource
    from longctx.model.lora import AdaptedSource

    return AdaptedSource(TransformersSource(CheckpointFiles.open(source)), lora, getattr(torch, dtype))
