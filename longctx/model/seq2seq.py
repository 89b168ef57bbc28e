"""Trains encoder-decoders of transformers, such as T5Gemma: the encoder reads a document's source, the decoder its target.

Both run in one forward over packed documents. What differs from other models of transformers is the blocks, of which there are
two lists, and attention, of which there are three: it comes with the tokens of the source.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from longctx.attention.huggingface import Rings, check_length, packing_from_layout
from longctx.attention.huggingface_seq2seq import ROLES, ByRole, Role, attention_inputs, check_packed_seq2seq, find_roles
from longctx.model.huggingface import TransformersModel, TransformersSource, check_base, row
from longctx.model.huggingface_spec import spec_of_seq2seq
from longctx.model.lora import AdaptedModel, AdaptedSource
from longctx.model.protocol import MakeAttention
from longctx.planning.cost.spec import ModelSpec


@dataclass(frozen=True)
class SourceAttention(ByRole):
    """The attention of one micro-batch, and what the encoder reads there: tokens and positions, each [tokens]."""

    source: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def of(cls, make: Callable[[Role], MakeAttention], tokens: torch.Tensor, positions: torch.Tensor) -> "SourceAttention":
        """`make` returns what makes the attention of a role."""

        def rings(role: Role) -> Rings:
            made = make(role)
            return Rings(lambda scale, softcap, window, _: made(scale, softcap, window))

        return cls({role: rings(role) for role in ROLES}, (tokens, positions))

    @property
    def last(self) -> str:
        """Layer and pass that this rank entered last, per role; for error messages."""
        return ", ".join(f"{role} {self.rings[role].last}" for role in ROLES)


class Seq2SeqSource(TransformersSource):
    """A checkpoint of an encoder-decoder."""

    def make(self) -> TransformersModel:
        return Seq2SeqModel(self.files)

    def check_length(self, longest: int) -> None:
        hf = self._without_values.hf
        for part in (hf.get_encoder(), hf.get_decoder()):
            check_length(part.config, longest)


class Seq2SeqModel(TransformersModel):
    """An encoder-decoder of transformers with the interface of `Model`: `layers` are the blocks of the encoder, then of the
    decoder, and tokens and positions of `forward` are those of targets."""

    def _blocks(self) -> nn.ModuleList:
        with packing_from_layout():  # otherwise positions are read, which a model without values has none of
            find_roles(self.hf)  # refuses models that cannot be trained, before anything starts
        check_base(self.hf)
        return nn.ModuleList([*self.hf.get_encoder().layers, *self.hf.get_decoder().layers])

    def _sizes(self) -> ModelSpec:
        return spec_of_seq2seq(self.hf)

    def _arguments(self, tokens: torch.Tensor, positions: torch.Tensor | None, attention: Any) -> dict[str, Any]:
        """As in other models; without a source, as in probes, the encoder reads the same tokens as the decoder."""
        source = getattr(attention, "source", (tokens, positions))
        rows: list[Any] = [None if each is None else row(each) for each in (tokens, positions, *source)]
        return {**attention_inputs(*rows), "ring_attention": attention}

    def _check(self, dtype: torch.dtype) -> None:
        check_packed_seq2seq(self.hf, self._as_probed, dtype)

    def _as_probed(
        self, decoder_input_ids: torch.Tensor, ring_attention: Any, decoder_position_ids: torch.Tensor | None = None, **_: Any
    ) -> Any:
        """Calls this model as probes call transformers' own, whose source and target have the same tokens."""
        positions = None if decoder_position_ids is None else decoder_position_ids[0]
        return SimpleNamespace(logits=self(decoder_input_ids[0], positions, ring_attention)[None])


class AdaptedSeq2SeqSource(AdaptedSource, Seq2SeqSource):
    """A checkpoint of an encoder-decoder with adapters."""

    def make(self) -> TransformersModel:
        return AdaptedSeq2SeqModel(self.files, self.lora, self.dtype)


class AdaptedSeq2SeqModel(AdaptedModel, Seq2SeqModel):
    """An encoder-decoder in which only adapters are trained, in the blocks of both parts."""

    task = "SEQ_2_SEQ_LM"
