"""The native decoder for models like Llama: RMSNorm, RoPE, grouped-query attention, a gated MLP or
a mixture of experts.

Plain single-device PyTorch. A sequence is `[tokens, hidden]` without a batch axis: documents follow
one another, and only the attention callable knows which token belongs to which document. Attention
and head are arguments, so the model does not depend on rings, shards or losses. Norms of heads that
a shape does not use are modules that do nothing.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from longctx.model.balance import RouterWatch, RowDocuments
from longctx.model.experts import MLP, Router, SparseMLP
from longctx.model.families import expressed
from longctx.model.presets import ModelShape
from longctx.model.protocol import Attention, AttentionByLayer, Head, StagedModel, generator_of
from longctx.model.rope import Rope, rotate
from longctx.model.translation import Family


class SelfAttention(nn.Module):
    """Projections around the given attention: normalized hidden states → residual update, both
    [tokens, hidden]."""

    def __init__(self, shape: ModelShape, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = shape.head_dim
        queries = shape.num_attention_heads * shape.head_dim
        keys = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, queries, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(shape.hidden_size, keys, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(shape.hidden_size, keys, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if shape.qk_norm:
            self.q_norm = nn.RMSNorm(shape.head_dim, eps=shape.rms_norm_eps)
            self.k_norm = nn.RMSNorm(shape.head_dim, eps=shape.rms_norm_eps)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        def heads(proj: nn.Module, x: torch.Tensor) -> torch.Tensor:
            wide: torch.Tensor = proj(x).unflatten(-1, (-1, self.head_dim))
            return wide

        k = rotate(self.k_norm(heads(self.k_proj, x)), cos, sin)
        v = heads(self.v_proj, x)

        # While keys and values travel.
        def queries(sent: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
            return rotate(self.q_norm(heads(self.q_proj, sent(x))), cos, sin)

        out: torch.Tensor = attention(queries, k, v, self.layer)
        updated: torch.Tensor = self.o_proj(out.flatten(1))
        return updated


class Block(nn.Module):
    """One layer: attention and MLP (or a mixture of experts), each with a norm before it and a
    residual connection."""

    def __init__(self, shape: ModelShape, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.is_sparse = shape.has_experts(layer)
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.self_attn = SelfAttention(shape, layer)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        if shape.has_experts(layer):
            self.moe = SparseMLP(shape)
        else:
            self.mlp = MLP(shape, shape.intermediate_size)

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attention: Attention,
        documents: RowDocuments | None = None,
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attention)
        normed = self.post_attention_layernorm(x)
        updated = self.moe(normed, documents) if self.is_sparse else self.mlp(normed)
        out: torch.Tensor = x + updated
        return out


class Embedding(nn.Embedding):
    """torch's embedding, with `rows_of`."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        # A DTensor, which follows torch's own rules.
        split = type(self.weight.data) is not torch.Tensor
        if split:
            return super().forward(tokens)
        return rows_of(self.weight, tokens)


def rows_of(weight: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Returns the rows of an embedding, as torch does, but in bfloat16 on CPU, where it sums
    gradients of an entry in bfloat16 and loses terms.
    """
    if weight.device.type == "cpu" and weight.dtype == torch.bfloat16:
        rows: torch.Tensor = weight.index_select(0, tokens.flatten()).unflatten(0, tokens.shape)
        return rows
    return F.embedding(tokens, weight)


class Decoder(StagedModel):
    """Embedding, blocks, final norm, head. Parameters are named as in Hugging Face's Llama.

    With `layers` it has only these blocks, under their names in the whole model: the first block
    comes with the embedding, the last with final norm and head. A tied embedding comes with either.
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
    }

    def __init__(self, shape: ModelShape, layers: Collection[int] | None = None) -> None:
        super().__init__()
        if shape.vocab_size is None:
            raise ValueError("vocab_size is not set: it comes from the store's tokenizer")
        self.shape = shape
        self.spec = shape.spec
        self.rope = Rope(
            shape.head_dim,
            shape.rope_theta,
            scaling=shape.rope_scaling,
            factor=shape.rope_factor,
            original_length=shape.rope_original_length,
            low_freq_factor=shape.rope_low_freq_factor,
            high_freq_factor=shape.rope_high_freq_factor,
            beta_fast=shape.rope_beta_fast,
            beta_slow=shape.rope_beta_slow,
        )
        held = range(shape.num_hidden_layers) if layers is None else layers
        has_head = shape.num_hidden_layers - 1 in held
        if 0 in held or (has_head and shape.tie_word_embeddings):
            self.embed_tokens = Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList()
        for layer in held:
            self.layers.add_module(str(layer), Block(shape, layer))
        if has_head:
            self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
            self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
            if shape.tie_word_embeddings:
                self.lm_head.weight = self.embed_tokens.weight

    def initial_value(self, name: str, parameter: torch.Tensor, seed: int) -> torch.Tensor:
        """Draws from a normal with σ = 0.02, times 1/√(2·layers) into the residual stream (GPT-2,
        §2.3); norms 1, biases 0."""
        if parameter.dim() == 1:
            return torch.full_like(parameter, 0.0 if name.endswith("bias") else 1.0)
        into_residual = name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj"))
        scale = (2 * self.shape.num_hidden_layers) ** -0.5 if into_residual else 1.0
        generator = generator_of(name, seed, parameter.device)
        return torch.empty_like(parameter).normal_(0.0, 0.02 * scale, generator=generator)

    def describe(self) -> dict[str, Any]:
        return self.shape.model_dump()

    def differences(self, described: Mapping[str, Any]) -> list[str]:
        if "transformers" in described:
            return [
                "it was trained by transformers' own code, not by the native decoder (see "
                "model.implementation)"
            ]
        ours = self.describe()
        theirs = ModelShape.model_validate(described).model_dump()
        return [
            f"{key} is {ours[key]!r}, was {value!r}"
            for key, value in theirs.items()
            if ours[key] != value
        ]

    @cached_property
    def family(self) -> Family:
        """Family of transformers that has models of this shape. Raises NoNativeModel if there is
        none."""
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

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embed_tokens(tokens)
        return hidden

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attention: Attention | AttentionByLayer,
        head: Head | None = None,
        documents: RowDocuments | None = None,
    ) -> torch.Tensor:
        """As `Model.forward`; without a `head`, returns logits [tokens, vocab]."""
        return super().forward(
            tokens, positions, attention, F.linear if head is None else head, documents
        )

    def run(
        self,
        blocks: Iterable[nn.Module],
        x: torch.Tensor,
        positions: torch.Tensor,
        attention: Attention | AttentionByLayer,
        head: Head | None,
        documents: RowDocuments | None = None,
    ) -> torch.Tensor:
        cos, sin = self.rope.tables(positions)
        for block in blocks:
            assert isinstance(block, Block)
            if isinstance(attention, AttentionByLayer):
                each = attention.of_layer(block.layer)
            else:
                each = attention
            x = block(x, cos, sin, each, *[documents] * block.is_sparse)
        if head is None:
            return x
        return head(self.norm(x), self.lm_head.weight)
