"""What everything else may know of a model: trainer, sharding, recomputation, offload, pipelines, compilation, memory estimate
and checkpoints take any `Model`. A base class and not a `typing.Protocol`, as torch's functions take an `nn.Module`.
"""

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import nn

from longctx.attention import HybridAttention, RingAttention, by_layer
from longctx.errors import UserError
from longctx.model.spec import ModelSpec


class Attention(Protocol):
    """Attention of every document to itself: q [tokens, heads, dim], k and v [tokens, kv_heads, dim] → [tokens, heads, dim]."""

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor: ...


@runtime_checkable
class AttentionByLayer(Protocol):
    """Attention that is another one in some layers, such as those with a window."""

    def of_layer(self, layer: int) -> Attention: ...


Projection = torch.Tensor | Callable[[torch.Tensor], torch.Tensor]
"""The output weight [vocab, hidden]; or, where logits are more than a product, from hidden states to logits [tokens, vocab]."""
Head = Callable[[torch.Tensor, Any], torch.Tensor]
"""From hidden states [tokens, hidden] and a `Projection` to whatever the caller wants: logits, or a loss."""
MakeAttention = Callable[[float | None, float, int | None], RingAttention | HybridAttention]
"""From scale, softcap and window to the attention of a micro-batch."""


def generator_of(name: str, seed: int, device: torch.device) -> torch.Generator:
    """What draws the first values of a parameter, whichever others are drawn, by seed and name alone."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))


class Model(nn.Module, ABC):
    """A causal language model, or a pipeline rank's part of one, over packed tokens, [tokens, ..] without a batch axis.

    Parameters have the same names in a part as in the whole model.

    Attributes:
        spec: the sizes of the whole model.
        layers: the blocks that are held, in order, each under its number in the whole model.
    """

    spec: ModelSpec
    layers: nn.ModuleList

    @abstractmethod
    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, attention: Attention | AttentionByLayer, head: Head
    ) -> torch.Tensor:
        """tokens and positions [tokens] → what `head` makes of hidden states and output weight."""

    def attention(self, make: MakeAttention) -> Any:
        """What `forward` is given as attention in a micro-batch."""
        spec = self.spec
        windows = [layer.window for layer in spec.layers]
        return by_layer(windows, lambda window: make(spec.attention_scale, spec.attention_softcap, window))

    def finish(self, device: torch.device, dtype: torch.dtype) -> None:
        """Comes after all parameters have their values, on every rank; `dtype` is that of the computation."""

    @abstractmethod
    def initial_value(self, name: str, parameter: torch.Tensor, seed: int) -> torch.Tensor:
        """The first value of a parameter, whole and on its device, drawn from `seed` and its name alone."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What a checkpoint says of the model, as plain JSON data."""

    @abstractmethod
    def differences(self, described: Mapping[str, Any]) -> list[str]:
        """Sentences on what makes this model another one than a checkpoint's `described` one."""

    @property
    def architecture(self) -> str:
        """The class of transformers that this model is. Raises UserError if it has none."""
        raise UserError(f"{type(self).__name__} has no form in transformers: it cannot be exported")

    def groups(self) -> list[list[str]]:
        """Names of parameters and saved buffers, together those that `to_checkpoint` must have together; a tied one once."""
        found: dict[str, list[str]] = {}
        for name, _ in self.named_parameters():
            block = re.match(r"layers\.\d+\.", name)
            found.setdefault(block[0] if block else name, []).append(name)
        return list(found.values())

    def to_checkpoint(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """One or more whole groups → the tensors of a checkpoint of transformers, by its names; on meta as well.

        Raises UserError if transformers has no such model.
        """
        raise NotImplementedError

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Gives every parameter its `initial_value`."""
        for name, parameter in self.named_parameters():
            parameter.copy_(self.initial_value(name, parameter, seed))


class StagedModel(Model):
    """A model whose parts can be run one by one, in the stages of a pipeline, and by ranks that share every matrix.

    Attributes:
        embed_tokens: the embedding; where it is tied, beside the head as well.
        norm, lm_head: what follows the last block, where that is held. `lm_head.weight` is what `Head` is given.
        tensor_plan: how ranks that share every matrix share the modules of a block, by name: see `longctx.parallel.tensor`.
    """

    embed_tokens: nn.Embedding
    norm: nn.Module
    lm_head: nn.Linear
    tensor_plan: ClassVar[Mapping[str, str]]

    @abstractmethod
    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token ids [tokens] → hidden states [tokens, hidden]."""

    @abstractmethod
    def run(
        self,
        blocks: Iterable[nn.Module],
        x: torch.Tensor,
        positions: torch.Tensor,
        attention: Attention | AttentionByLayer,
        head: Head | None,
    ) -> torch.Tensor:
        """Hidden states [tokens, hidden] through some blocks; final norm and `head` follow unless it is None."""

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, attention: Attention | AttentionByLayer, head: Head
    ) -> torch.Tensor:
        return self.run(self.layers, self.embed(tokens), positions, attention, head)
