"""A Llama-style decoder over packed tokens: RMSNorm, RoPE, grouped-query attention, SwiGLU, tied or untied embeddings.

Plain single-device PyTorch. A sequence is `[tokens, hidden]` with no batch axis: documents lie one after the other, and which
token belongs to which document is known to the attention callable alone. Attention and head are handed in, so the model
knows nothing of rings, shards or losses.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional as F

from longctx.model.presets import ModelShape
from longctx.model.rope import rope_tables, rotate


class Attention(Protocol):
    """Attention of every document to itself: q [tokens, heads, dim], k and v [tokens, kv_heads, dim] → [tokens, heads, dim]."""

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor: ...


Head = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From hidden states [tokens, hidden] and output weight [vocab, hidden] to whatever the caller wants: logits, or a loss."""


class AttentionBlock(nn.Module):
    """Projections around the attention that is handed in; called, it is those before it."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Normed hidden states [tokens, hidden] → rotated q and k, and v, each [tokens, heads, head_dim]."""
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        return rotate(q, cos, sin), rotate(k, cos, sin), v


class MLP(nn.Module):
    """SwiGLU (Shazeer, 2020)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """One layer: attention and MLP, each normed before and added to the residual stream."""

    def __init__(self, shape: ModelShape, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.self_attn = AttentionBlock(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: Attention) -> torch.Tensor:
        q, k, v = self.self_attn(self.input_layernorm(x), cos, sin)
        x = x + self.self_attn.o_proj(attention(q, k, v, self.layer).flatten(1))
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Embedding(nn.Embedding):
    """torch's, but for bfloat16 on a CPU, where torch adds up the gradient of an entry in bfloat16: it stops growing."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        split = type(weight.data) is not torch.Tensor  # over ranks, by torch's own rules
        if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and not split:
            return weight.index_select(0, tokens)
        return super().forward(tokens)


class Transformer(nn.Module):
    """Embedding, blocks, final norm, head. Parameter names are those of Hugging Face's Llama.

    With `layers` it holds these blocks alone, under the names they have in the whole model: the embedding comes with the first,
    final norm and head with the last. A tied embedding is there with either.
    """

    def __init__(self, shape: ModelShape, layers: Collection[int] | None = None) -> None:
        super().__init__()
        if shape.vocab_size is None:
            raise ValueError("vocab_size is not set: it comes from the store's tokenizer")
        self.shape = shape
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

    def initial_weight(self, name: str, parameter: torch.Tensor, seed: int) -> torch.Tensor:
        """The first value of a parameter, whole and on its device, drawn from `seed` and its name alone.

        Normal with σ = 0.02, projections into the residual stream scaled by 1/√(2·layers) (GPT-2, §2.3); norms are 1.
        """
        weight = torch.ones(parameter.shape, device=parameter.device, dtype=parameter.dtype)
        if parameter.dim() > 1:
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            generator = torch.Generator(parameter.device).manual_seed(int.from_bytes(digest[:7], "big"))
            into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            scale = (2 * self.shape.num_hidden_layers) ** -0.5 if into_residual else 1.0
            weight.normal_(0.0, 0.02 * scale, generator=generator)
        return weight

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Gives every parameter its `initial_weight`."""
        for name, parameter in self.named_parameters():
            parameter.copy_(self.initial_weight(name, parameter, seed))

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, attention: Attention, head: Head = F.linear
    ) -> torch.Tensor:
        """tokens and positions [tokens] → logits [tokens, vocab], or what `head` makes of hidden states and output weight."""
        return self.run(self.layers, self.embed_tokens(tokens), positions, attention, head)

    def run(
        self,
        blocks: Iterable[nn.Module],
        x: torch.Tensor,
        positions: torch.Tensor,
        attention: Attention,
        head: Head | None,
    ) -> torch.Tensor:
        """Hidden states [tokens, hidden] through some blocks; final norm and `head` follow unless it is None."""
        cos, sin = rope_tables(positions, self.shape.head_dim, self.shape.rope_theta)
        for block in blocks:
            x = block(x, cos, sin, attention)
        return x if head is None else head(self.norm(x), self.lm_head.weight)
