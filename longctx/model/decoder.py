"""The native decoder for models like Llama (RMSNorm, RoPE, grouped-query attention, a gated MLP) and like GPT-2 (LayerNorm,
learned positions, a plain MLP, biases).

Plain single-device PyTorch. A sequence is `[tokens, hidden]` without a batch axis: documents follow one another, and only the
attention callable knows which token belongs to which document. Attention and head are arguments, so the model does not depend
on rings, shards or losses. Options that a shape does not use (norms of heads, output norms) are modules that do nothing.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from longctx.model.balance import RouterWatch, RowDocuments
from longctx.model.experts import Router, SparseMLP
from longctx.model.families import expressed
from longctx.model.family import Family
from longctx.model.mlp import MLP
from longctx.model.presets import ModelShape
from longctx.model.protocol import Attention, AttentionByLayer, Head, StagedModel, generator_of
from longctx.model.rope import Rope, rotate


class OffsetNorm(nn.RMSNorm):
    """RMSNorm that multiplies by 1 + weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(
            x,
            self.normalized_shape,
            (1 + self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))).to(x.dtype),
            self.eps,
        )


def _norm(shape: ModelShape, size: int) -> nn.RMSNorm | nn.LayerNorm:
    if shape.norm == "layer":
        return nn.LayerNorm(size, eps=shape.rms_norm_eps)
    return (OffsetNorm if shape.norm_offset else nn.RMSNorm)(size, eps=shape.rms_norm_eps)


class SelfAttention(nn.Module):
    """Projections around the given attention: normalized hidden states → residual update, both [tokens, hidden]."""

    def __init__(self, shape: ModelShape, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, shape.head_dim
        queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        bias = shape.qkv_bias or shape.linear_bias
        self.q_proj = nn.Linear(shape.hidden_size, queries, bias=bias)
        self.k_proj = nn.Linear(shape.hidden_size, keys, bias=bias)
        self.v_proj = nn.Linear(shape.hidden_size, keys, bias=bias)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=shape.linear_bias)
        self.q_norm = _norm(shape, shape.head_dim) if shape.qk_norm else nn.Identity()
        self.k_norm = _norm(shape, shape.head_dim) if shape.qk_norm else nn.Identity()

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: Attention) -> torch.Tensor:
        def heads(proj: nn.Module, x: torch.Tensor) -> torch.Tensor:
            wide: torch.Tensor = proj(x).unflatten(-1, (-1, self.head_dim))
            return wide

        k, v = rotate(self.k_norm(heads(self.k_proj, x)), cos, sin), heads(self.v_proj, x)

        def queries(sent: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:  # while keys and values travel
            return rotate(self.q_norm(heads(self.q_proj, sent(x))), cos, sin)

        out: torch.Tensor = attention(queries, k, v, self.layer)
        updated: torch.Tensor = self.o_proj(out.flatten(1))
        return updated


class Block(nn.Module):
    """One layer: attention and MLP (or a mixture of experts), each with a norm before it, optionally a norm after it, and a
    residual connection.
    """

    def __init__(self, shape: ModelShape, layer: int) -> None:
        super().__init__()
        self.layer, self.is_sparse = layer, shape.has_experts(layer)
        self.input_layernorm = _norm(shape, shape.hidden_size)
        self.self_attn = SelfAttention(shape, layer)
        self.attention_output_norm = _norm(shape, shape.hidden_size) if shape.output_norms else nn.Identity()
        self.post_attention_layernorm = _norm(shape, shape.hidden_size)
        if shape.has_experts(layer):
            self.moe = SparseMLP(shape)
        else:
            self.mlp = MLP(shape, shape.intermediate_size)
        self.mlp_output_norm = _norm(shape, shape.hidden_size) if shape.output_norms else nn.Identity()

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attention: Attention,
        documents: RowDocuments | None = None,
    ) -> torch.Tensor:
        x = x + self.attention_output_norm(self.self_attn(self.input_layernorm(x), cos, sin, attention))
        normed = self.post_attention_layernorm(x)
        updated = self.moe(normed, documents) if self.is_sparse else self.mlp(normed)
        out: torch.Tensor = x + self.mlp_output_norm(updated)
        return out


class Embedding(nn.Embedding):
    """torch's embedding, with `rows_of`."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        split = type(self.weight.data) is not torch.Tensor  # a DTensor, which follows torch's own rules
        return super().forward(tokens) if split else rows_of(self.weight, tokens)


def rows_of(weight: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Returns the rows of an embedding, as torch does, but in bfloat16 on CPU, where it sums gradients of an entry in bfloat16
    and loses terms.
    """
    if weight.device.type == "cpu" and weight.dtype == torch.bfloat16:
        rows: torch.Tensor = weight.index_select(0, tokens.flatten()).unflatten(0, tokens.shape)
        return rows
    return F.embedding(tokens, weight)


class Decoder(StagedModel):
    """Embedding, blocks, final norm, head. Parameters are named as in Hugging Face's Llama.

    With `layers` it has only these blocks, under their names in the whole model: the first block comes with the embedding, the
    last with final norm and head. A tied embedding comes with either.
    """

    tensor_plan: ClassVar[Mapping[str, str]] = {
        "input_layernorm": "tokens",
        "self_attn": "gather",
        "self_attn.q_proj": "columns",
        "self_attn.k_proj": "columns",
        "self_attn.v_proj": "columns",
        "self_attn.q_norm": "heads",
        "self_attn.k_norm": "heads",
        "self_attn.o_proj": "rows",
        "attention_output_norm": "residual",
        "post_attention_layernorm": "tokens",
        "mlp": "gather",
        "mlp.gate_proj": "split columns",
        "mlp.up_proj": "split columns",
        "mlp.down_proj": "rows",
        "moe": "own tokens",
        "moe.gate": "residual",
        "moe.shared_expert": "gather",
        "moe.shared_expert.gate_proj": "split columns",
        "moe.shared_expert.up_proj": "split columns",
        "moe.shared_expert.down_proj": "rows",
        "mlp_output_norm": "residual",
    }

    def __init__(self, shape: ModelShape, layers: Collection[int] | None = None) -> None:
        super().__init__()
        if shape.vocab_size is None:
            raise ValueError("vocab_size is not set: it comes from the store's tokenizer")
        self.shape, self.spec = shape, shape.spec
        self.rope = Rope(
            shape.rotary_dim,
            shape.rope_theta,
            shape.rope_scaling,
            shape.rope_factor,
            shape.rope_original_length,
            low_freq_factor=shape.rope_low_freq_factor,
            high_freq_factor=shape.rope_high_freq_factor,
            beta_fast=shape.rope_beta_fast,
            beta_slow=shape.rope_beta_slow,
        )
        local = shape.rope_local_theta
        self.local_rope = self.rope if local is None else Rope(shape.rotary_dim, local)
        held = range(shape.num_hidden_layers) if layers is None else layers
        has_head = shape.num_hidden_layers - 1 in held
        if 0 in held or (has_head and shape.tie_word_embeddings):
            self.embed_tokens = Embedding(shape.vocab_size, shape.hidden_size)
        if 0 in held and shape.max_position_embeddings is not None and shape.learned_positions:
            self.embed_positions = Embedding(shape.max_position_embeddings, shape.hidden_size)
        self.layers = nn.ModuleList()
        for layer in held:
            self.layers.add_module(str(layer), Block(shape, layer))
        if has_head:
            self.norm = _norm(shape, shape.hidden_size)
            self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
            if shape.tie_word_embeddings:
                self.lm_head.weight = self.embed_tokens.weight

    def initial_value(self, name: str, parameter: torch.Tensor, seed: int) -> torch.Tensor:
        """Draws from a normal with σ = 0.02, times 1/√(2·layers) into the residual stream (GPT-2, §2.3); norms 1, biases 0."""
        if parameter.dim() == 1:
            return torch.full_like(parameter, 0.0 if name.endswith("bias") or self.shape.norm_offset else 1.0)
        into_residual = name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj"))
        scale = (2 * self.shape.num_hidden_layers) ** -0.5 if into_residual else 1.0
        generator = generator_of(name, seed, parameter.device)
        return torch.empty_like(parameter).normal_(0.0, 0.02 * scale, generator=generator)

    def describe(self) -> dict[str, Any]:
        return self.shape.model_dump()

    def differences(self, described: Mapping[str, Any]) -> list[str]:
        """As `Model.differences`; settings that an earlier version did not have are at their defaults."""
        if "transformers" in described:
            return ["it was trained by transformers' own code, not by the native decoder (see model.implementation)"]
        ours, theirs = self.describe(), ModelShape.model_validate(described).model_dump()
        return [f"{key} is {ours[key]!r}, was {value!r}" for key, value in theirs.items() if ours[key] != value]

    @cached_property
    def family(self) -> Family:
        """Family of transformers that has models of this shape. Raises NoNativeModel if there is none."""
        return expressed(self.shape, longest=1)[0]

    @property
    def architecture(self) -> str:
        return self.family.architecture

    def to_checkpoint(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return self.family.tensors(weights, self.shape.num_experts)

    def routers(self) -> list[RouterWatch]:
        return [module.watch for module in self.layers.modules() if isinstance(module, Router)]

    def finish(self, device: torch.device, dtype: torch.dtype) -> None:
        for module in self.modules():
            if isinstance(module, Router) and self.shape.router_bias:
                module.expert_bias = torch.zeros(self.shape.num_experts, device=device)

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embed_tokens(tokens)
        hidden = hidden if self.shape.embedding_scale == 1 else hidden * self.shape.embedding_scale
        return hidden + self.embed_positions(positions) if self.shape.learned_positions else hidden

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attention: Attention | AttentionByLayer,
        head: Head | None = None,
        documents: RowDocuments | None = None,
    ) -> torch.Tensor:
        """As `Model.forward`; without a `head`, returns logits [tokens, vocab]."""
        return super().forward(tokens, positions, attention, self._logits if head is None else head, documents)

    def _logits(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        logits, cap = F.linear(hidden, weight), self.spec.logit_softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    def run(
        self,
        blocks: Iterable[nn.Module],
        x: torch.Tensor,
        positions: torch.Tensor,
        attention: Attention | AttentionByLayer,
        head: Head | None,
        documents: RowDocuments | None = None,
    ) -> torch.Tensor:
        whole = self.rope.tables(positions)
        local = whole if self.local_rope == self.rope else self.local_rope.tables(positions)
        for block in blocks:
            assert isinstance(block, Block)
            cos, sin = whole if self.spec.layers[block.layer].window is None else local
            each = attention.of_layer(block.layer) if isinstance(attention, AttentionByLayer) else attention
            x = block(x, cos, sin, each, *[documents] * block.is_sparse)
        return x if head is None else head(self.norm(x), self.lm_head.weight)
