"""Interface of models: trainer, sharding, recomputation, offload, pipelines, compilation, memory
estimate and checkpoints accept any `Model`. It is a base class, not a `typing.Protocol`, since
torch's functions need an `nn.Module`.
"""

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import nn

from longctx.attention import HybridAttention, RingAttention, by_layer
from longctx.attention.inputs import Queries
from longctx.errors import UserError
from longctx.model.balance import RouterWatch, RowDocuments
from longctx.model.checkpoint_files import CheckpointFiles
from longctx.planning.cost.spec import ModelSpec


class Attention(Protocol):
    """Attention within each document: q [tokens, heads, dim], k and v [tokens, kv_heads, dim] →
    [tokens, heads, dim].

    `q` is a function that returns the queries (see `longctx.attention.inputs.Queries`), called once
    K and V are on their way.
    """

    def __call__(
        self, q: Queries, k: torch.Tensor, v: torch.Tensor, layer: int
    ) -> torch.Tensor: ...


@runtime_checkable
class AttentionByLayer(Protocol):
    """Attention that differs between layers, such as layers with and without a window."""

    def of_layer(self, layer: int) -> Attention: ...


Projection = torch.Tensor | Callable[[torch.Tensor], torch.Tensor]
"""Output weight [vocab, hidden]; or, if logits are not just a product, a function of hidden states
→ logits [tokens, vocab]."""
Head = Callable[[torch.Tensor, Any], torch.Tensor]
"""Function of hidden states [tokens, hidden] and a `Projection` that returns logits, a loss, or
anything else."""


MakeAttention = Callable[[float | None, float, int | None], RingAttention | HybridAttention]
"""Function of scale, softcap and window that returns the attention of a micro-batch."""


def generator_of(name: str, seed: int, device: torch.device) -> torch.Generator:
    """Returns the random generator for the initial value of a parameter, which depends only on its
    name and the seed."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))


class Model(nn.Module, ABC):
    """A causal language model, or the part of one on a pipeline rank, over packed tokens [tokens,
    ..] without a batch axis.

    Parameters have the same names in a part as in the whole model.

    Attributes:
        layers: blocks of this part, in order, each named by its index in the whole model.
        files: checkpoint of transformers that the initial values come from; None for new weights.
    """

    spec: ModelSpec
    layers: nn.ModuleList
    tower: Sequence[nn.Module] = ()
    files: CheckpointFiles | None = None

    @abstractmethod
    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attention: Attention | AttentionByLayer,
        head: Head,
        documents: RowDocuments | None = None,
    ) -> torch.Tensor:
        """Returns `head` of the hidden states and the output weight; `tokens` and `positions` are
        [tokens].

        `documents` tells a mixture of experts which rows belong together; None: no tokens are
        counted.
        """

    def attention(self, make: MakeAttention) -> Any:
        """Returns the argument `attention` of `forward` for a micro-batch; `make` is called once
        per kind of layer."""
        spec = self.spec
        windows = [layer.window for layer in spec.layers]
        return by_layer(windows, lambda window: make(None, 0.0, window))

    def routers(self) -> list[RouterWatch]:
        """Returns the watches of the routers of this part, in order; none without experts, or if
        they cannot be watched."""
        return []

    def finish(self, device: torch.device, dtype: torch.dtype) -> None:
        """Called on every rank once all parameters have their values; `dtype` is the compute
        dtype."""

    @abstractmethod
    def initial_value(self, name: str, parameter: torch.Tensor, seed: int) -> torch.Tensor:
        """Returns the initial value of a whole parameter, on its device; depends only on `seed` and
        `name`."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Returns the description of the model for checkpoints, as plain JSON data."""

    @abstractmethod
    def differences(self, described: Mapping[str, Any]) -> list[str]:
        """Returns sentences on the differences between this model and the one `described` in a
        checkpoint."""

    @property
    def architecture(self) -> str:
        """Class of this model in transformers. Raises UserError if there is none."""
        raise UserError(
            f"{type(self).__name__} has no equivalent in transformers: it cannot be exported"
        )

    def groups(self) -> list[list[str]]:
        """Returns names of parameters and saved buffers, grouped as `to_checkpoint` needs them;
        tied ones appear once."""
        names_by_group: dict[str, list[str]] = {}
        for name, _ in self.named_parameters():
            block = re.match(r"layers\.\d+\.", name)
            names_by_group.setdefault(block[0] if block else name, []).append(name)
        return list(names_by_group.values())

    def to_checkpoint(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Converts one or more whole groups to tensors of a checkpoint of transformers, with its
        names; also on meta.

        Raises UserError if transformers has no equivalent of this model.
        """
        raise NotImplementedError

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        for name, parameter in self.named_parameters():
            parameter.copy_(self.initial_value(name, parameter, seed))


class StagedModel(Model):
    """A model that supports pipeline and tensor parallelism: its parts can be run separately, and
    its matrices split.

    Attributes:
        embed_tokens: embedding, present with the first block; if it is tied, also with the last.
        norm, lm_head: final norm and head, present with the last block. `Head` is called with
            `lm_head.weight`.
        tensor_plan: tensor-parallel style of each module of a block, by name: see
            `longctx.parallel.tensor`.
    """

    embed_tokens: nn.Embedding
    norm: nn.Module
    lm_head: nn.Linear
    tensor_plan: ClassVar[Mapping[str, str]]

    @abstractmethod
    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the hidden states [tokens, hidden] of token ids [tokens]."""

    @abstractmethod
    def run(
        self,
        blocks: Iterable[nn.Module],
        x: torch.Tensor,
        positions: torch.Tensor,
        attention: Attention | AttentionByLayer,
        head: Head | None,
        documents: RowDocuments | None = None,
    ) -> torch.Tensor:
        """Runs hidden states [tokens, hidden] through `blocks`, then through the final norm and
        `head` unless it is None."""

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attention: Attention | AttentionByLayer,
        head: Head,
        documents: RowDocuments | None = None,
    ) -> torch.Tensor:
        return self.run(
            self.layers,
            self.embed(tokens),
            positions=positions,
            attention=attention,
            head=head,
            documents=documents,
        )


def differences_but_rope(differences: Sequence[str]) -> list[str]:
    """Returns the sentences of `Model.differences` that are not on RoPE, which may change while the
    weights go on."""
    others = [sentence for sentence in differences if not sentence.startswith("rope_")]
    # Transformers writes the scaled limit of positions into the config.
    if len(others) < len(differences):
        others = [
            sentence for sentence in others if not sentence.startswith("max_position_embeddings is")
        ]
    return others
