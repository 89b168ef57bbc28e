"""Shapes of the native decoder, with the names of Hugging Face configs, from `tiny` (for a laptop) to `8b` (Llama 3.1)."""

from functools import cache
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from longctx.model.spec import LayerSpec, ModelSpec


class ModelShape(BaseModel):
    """Sizes and options of a decoder. `vocab_size` None: from the tokenizer of the store."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    vocab_size: int | None = Field(None, ge=2, description="vocabulary size; default: the tokenizer's")
    hidden_size: int = Field(ge=1, description="width of the residual stream")
    intermediate_size: int = Field(ge=1, description="width of the gated MLP")
    num_hidden_layers: int = Field(ge=1, description="number of blocks")
    num_attention_heads: int = Field(ge=1, description="query heads")
    num_key_value_heads: int = Field(ge=1, description="key and value heads; divides the query heads (GQA)")
    head_dim: int = Field(ge=2, description="size of one head; even, for RoPE")
    rms_norm_eps: float = Field(1e-5, gt=0, description="added to the mean square in RMSNorm")
    tie_word_embeddings: bool = Field(False, description="share the embedding with the output projection")
    hidden_act: Literal["silu", "gelu"] = Field("silu", description="activation of the MLP; gelu: its tanh form, as in Gemma")
    qkv_bias: bool = Field(False, description="biases of the projections to queries, keys and values, as in Qwen 2")
    qk_norm: bool = Field(False, description="RMSNorm of every head's queries and keys before RoPE, as in Qwen 3")
    output_norms: bool = Field(False, description="RMSNorm also after attention and after the MLP, as in Gemma 2 and 3")
    norm_offset: bool = Field(False, description="norms multiply by 1 + weight, with weights from 0 on, as in Gemma")
    embedding_scale: float = Field(1.0, gt=0, description="factor of the embeddings, √hidden_size in Gemma")
    attention_scale: float | None = Field(None, gt=0, description="factor of attention scores instead of 1/√head_dim")
    attention_softcap: float = Field(0.0, ge=0, description="tanh bound of attention scores, 50 in Gemma 2; 0: no bound")
    logit_softcap: float = Field(0.0, ge=0, description="tanh bound of logits, 30 in Gemma 2; 0: no bound")
    sliding_window: int | None = Field(
        None, ge=1, description="attention window in tokens, the token itself included, instead of none"
    )
    full_attention_every: int | None = Field(
        None,
        ge=1,
        description="every n-th layer has no window (n is 2 in Gemma 2, 6 in Gemma 3), instead of none",
    )
    rope_theta: float = Field(500_000.0, gt=0, description="base of the rotary position embedding")
    rope_local_theta: float | None = Field(
        None, gt=0, description="RoPE base in layers with a window, never scaled, instead of RoPE as in other layers"
    )
    partial_rotary_factor: float = Field(1.0, gt=0, le=1, description="share of a head, from its start, that RoPE rotates")
    rope_scaling: Literal["none", "linear", "ntk", "yarn", "llama3"] = Field(
        "none", description="RoPE scaling for longer documents"
    )
    rope_factor: float = Field(1.0, ge=1, description="new context length / original context length, for rope_scaling")
    rope_original_length: int = Field(8192, ge=1, description="original context length in tokens (yarn, llama3)")
    rope_low_freq_factor: float = Field(
        1.0, gt=0, description="llama3: frequencies with fewer rotations are divided by rope_factor"
    )
    rope_high_freq_factor: float = Field(4.0, gt=0, description="llama3: frequencies with more rotations are kept")
    rope_beta_fast: float = Field(32.0, gt=0, description="yarn: frequencies with more rotations are kept")
    rope_beta_slow: float = Field(1.0, gt=0, description="yarn: frequencies with fewer rotations are divided by rope_factor")

    @model_validator(mode="after")
    def _fits_together(self) -> "ModelShape":
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads}, which is not divisible by num_key_value_heads "
                f"{self.num_key_value_heads}: choose a divisor, or equal numbers for attention without GQA"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}: RoPE rotates pairs, so it must be even")
        if self.rotary_dim % 2 or self.rotary_dim < (4 if self.rope_scaling == "ntk" else 2):
            raise ValueError(
                f"partial_rotary_factor is {self.partial_rotary_factor}, so RoPE rotates {self.rotary_dim} of {self.head_dim} "
                "dimensions of a head: their number must be even, at least 2, and at least 4 for rope_scaling ntk"
            )
        if self.full_attention_every is not None and self.sliding_window is None:
            raise ValueError(f"full_attention_every is {self.full_attention_every}, but sliding_window is not set: set it")
        if self.rope_low_freq_factor >= self.rope_high_freq_factor:
            raise ValueError(
                f"rope_low_freq_factor is {self.rope_low_freq_factor}: must be below rope_high_freq_factor "
                f"{self.rope_high_freq_factor}"
            )
        return self

    @property
    def rotary_dim(self) -> int:
        """Number of dimensions of a head that RoPE rotates."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def spec(self) -> ModelSpec:
        """Sizes of the model with this shape."""
        return _spec(self)


@cache
def _spec(shape: ModelShape) -> ModelSpec:
    heads = shape.num_attention_heads + shape.num_key_value_heads
    matrices = 2 * shape.hidden_size * shape.head_dim * heads + 3 * shape.hidden_size * shape.intermediate_size
    biases = (heads + shape.num_key_value_heads) * shape.head_dim if shape.qkv_bias else 0
    norms = (4 if shape.output_norms else 2) * shape.hidden_size + (2 * shape.head_dim if shape.qk_norm else 0)
    every, attention = shape.full_attention_every, (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim)
    windows = (
        shape.sliding_window if every is None or (layer + 1) % every else None for layer in range(shape.num_hidden_layers)
    )
    sizes = (shape.hidden_size, *attention, shape.intermediate_size, matrices, norms + biases)
    output_norm = shape.hidden_size if shape.output_norms else 0
    of_heads = heads * shape.head_dim if shape.qk_norm else 0
    queries = shape.hidden_size * shape.num_attention_heads * shape.head_dim
    return ModelSpec(
        layers=tuple(
            LayerSpec(*sizes, window, output_norm + of_heads, output_norm, query_parameters=queries) for window in windows
        ),
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        tie_word_embeddings=shape.tie_word_embeddings,
        attention_scale=shape.attention_scale,
        attention_softcap=shape.attention_softcap,
        logit_softcap=shape.logit_softcap,
    )


def _shape(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, head_dim: int, tied: bool) -> ModelShape:
    return ModelShape(
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        tie_word_embeddings=tied,
    )


PRESETS: dict[str, ModelShape] = {
    "tiny": _shape(128, 384, 2, 4, 2, 32, tied=True),
    "small": _shape(512, 1536, 8, 8, 4, 64, tied=True),
    "160m": _shape(768, 2048, 12, 12, 4, 64, tied=True),
    "1b": _shape(2048, 8192, 16, 32, 8, 64, tied=True),
    "3b": _shape(3072, 8192, 28, 24, 8, 128, tied=True),
    "8b": _shape(4096, 14336, 32, 32, 8, 128, tied=False),
}
"""Shapes by name; from 1b on, the sizes are those of Llama 3.1 and 3.2, without the vocabulary."""
