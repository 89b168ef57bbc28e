"""Shapes of the native decoder, with the names of Hugging Face configs, from `tiny` (for a laptop)
to 1T parameters."""

from dataclasses import replace
from functools import cache
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from longctx.errors import UserError
from longctx.planning.cost.spec import LayerSpec, Matrix, ModelSpec

MOST_ENTRIES = (1 << 31) - 1
"""Maximum of vocabulary, positions and windows."""
WIDEST, MOST_LAYERS, MOST_EXPERTS = 1 << 20, 10_000, 1 << 16
"""Maxima of widths and heads, layers, and experts: far above any model, and low enough to compute
with at once."""
EXPERT_OPTIONS = {
    *(
        "num_experts_per_tok",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "first_dense_layers",
    ),
    *("router_scores", "norm_topk_prob", "routed_scaling_factor", "router_bias"),
}
"""Options of shapes that have no effect without experts."""


class NoNativeModel(UserError):
    """The native decoder cannot run a model of transformers, or transformers has no model of a
    shape; the text says why."""


class ModelShape(BaseModel):
    """Sizes and options of a decoder. `vocab_size` None: from the tokenizer of the store."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    vocab_size: int | None = Field(
        None, ge=2, le=MOST_ENTRIES, description="vocabulary size; default: the tokenizer's"
    )
    hidden_size: int = Field(ge=1, le=WIDEST, description="width of the residual stream")
    intermediate_size: int = Field(ge=1, le=WIDEST, description="width of the MLP")
    num_hidden_layers: int = Field(ge=1, le=MOST_LAYERS, description="number of blocks")
    num_attention_heads: int = Field(ge=1, le=WIDEST, description="query heads")
    num_key_value_heads: int = Field(
        ge=1, le=WIDEST, description="key and value heads; divides the query heads (GQA)"
    )
    head_dim: int = Field(ge=2, le=WIDEST, description="size of one head; even, for RoPE")
    rms_norm_eps: float = Field(1e-5, gt=0, description="added to the mean square in RMSNorm")
    tie_word_embeddings: bool = Field(
        False, description="share the embedding with the output projection"
    )
    qkv_bias: bool = Field(
        False, description="biases of the projections to queries, keys and values, as in Qwen 2"
    )
    qk_norm: bool = Field(
        False, description="norms of every head's queries and keys before RoPE, as in Qwen 3"
    )
    sliding_window: int | None = Field(
        None,
        ge=1,
        le=MOST_ENTRIES,
        description="attention window in tokens, the token itself included, instead of none",
    )
    full_attention_every: int | None = Field(
        None,
        ge=1,
        le=MOST_LAYERS,
        description="every n-th layer has no window (n is 2 in gpt-oss), instead of none",
    )
    num_experts: int = Field(
        0,
        ge=0,
        le=MOST_EXPERTS,
        description="experts of each mixture-of-experts layer; 0: dense MLPs",
    )
    num_experts_per_tok: int = Field(
        2, ge=1, le=MOST_EXPERTS, description="experts that a token uses (top-k)"
    )
    moe_intermediate_size: int | None = Field(
        None, ge=1, le=WIDEST, description="width of each expert, instead of intermediate_size"
    )
    shared_expert_intermediate_size: int = Field(
        0, ge=0, le=WIDEST, description="width of an expert that all tokens use; 0: none"
    )
    first_dense_layers: int = Field(
        0,
        ge=0,
        le=MOST_LAYERS,
        description="number of first layers with a dense MLP instead of experts",
    )
    router_scores: Literal["softmax", "sigmoid"] = Field(
        "softmax", description="scores of experts from the router's logits"
    )
    norm_topk_prob: bool = Field(
        True,
        description="divide the scores of the chosen experts by their sum; with softmax, as a "
        "softmax of the chosen alone",
    )
    routed_scaling_factor: float = Field(
        1.0, gt=0, description="factor of the scores, 2.5 in DeepSeek-V3"
    )
    router_bias: bool = Field(
        False,
        description="a bias per expert to choose experts, moved by balance.bias_rate instead of "
        "gradients (DeepSeek-V3)",
    )
    rope_theta: float = Field(500_000.0, gt=0, description="base of the rotary position embedding")
    rope_scaling: Literal["none", "linear", "ntk", "yarn", "llama3"] = Field(
        "none", description="RoPE scaling for longer documents"
    )
    rope_factor: float = Field(
        1.0, ge=1, description="new context length / original context length, for rope_scaling"
    )
    rope_original_length: int = Field(
        8192, ge=1, le=MOST_ENTRIES, description="original context length in tokens (yarn, llama3)"
    )
    rope_low_freq_factor: float = Field(
        1.0, gt=0, description="llama3: frequencies with fewer rotations are divided by rope_factor"
    )
    rope_high_freq_factor: float = Field(
        4.0, gt=0, description="llama3: frequencies with more rotations are kept"
    )
    rope_beta_fast: float = Field(
        32.0, gt=0, description="yarn: frequencies with more rotations are kept"
    )
    rope_beta_slow: float = Field(
        1.0, gt=0, description="yarn: frequencies with fewer rotations are divided by rope_factor"
    )

    @model_validator(mode="after")
    def _fits_together(self) -> "ModelShape":
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads}, which is not divisible by "
                f"num_key_value_heads {self.num_key_value_heads}: choose a divisor, or equal "
                "numbers for attention without GQA"
            )
        if self.full_attention_every is not None and self.sliding_window is None:
            raise ValueError(
                f"full_attention_every is {self.full_attention_every}, but sliding_window is not "
                "set: set it"
            )
        if self.num_experts and self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok is {self.num_experts_per_tok}, but there are only "
                f"{self.num_experts} experts: lower it"
            )
        if self.num_experts and self.first_dense_layers >= self.num_hidden_layers:
            raise ValueError(
                f"first_dense_layers is {self.first_dense_layers}, which leaves none of "
                f"{self.num_hidden_layers} layers for experts: lower it, or set num_experts to 0"
            )
        if self.head_dim % 2 or (self.rope_scaling == "ntk" and self.head_dim < 4):
            raise ValueError(
                f"head_dim is {self.head_dim}: RoPE rotates pairs, so it must be even, and at "
                "least 4 for rope_type ntk"
            )
        if self.rope_low_freq_factor >= self.rope_high_freq_factor:
            raise ValueError(
                f"low_freq_factor is {self.rope_low_freq_factor}: must be below high_freq_factor "
                f"{self.rope_high_freq_factor}"
            )
        return self

    @property
    def expert_width(self) -> int:
        return self.moe_intermediate_size or self.intermediate_size

    def has_experts(self, layer: int) -> bool:
        return self.num_experts > 0 and layer >= self.first_dense_layers

    @property
    def spec(self) -> ModelSpec:
        return _spec(self)


@cache
def _spec(shape: ModelShape) -> ModelSpec:
    heads = shape.num_attention_heads + shape.num_key_value_heads
    biases = (heads + shape.num_key_value_heads) * shape.head_dim if shape.qkv_bias else 0
    norms = 2 * shape.hidden_size + (2 * shape.head_dim if shape.qk_norm else 0)
    hidden = shape.hidden_size
    queries = shape.num_attention_heads * shape.head_dim
    keys = Matrix(shape.num_key_value_heads * shape.head_dim, hidden)
    dense = LayerSpec(
        hidden_size=hidden,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        matrices=(
            *(Matrix(queries, hidden, role="query"), keys, keys, Matrix(hidden, queries)),
            *_mlp(hidden, shape.intermediate_size),
        ),
        vectors=norms + biases,
        attention_norms=heads * shape.head_dim if shape.qk_norm else 0,
    )
    sparse = _with_experts(dense, shape)
    every = shape.full_attention_every
    kinds = (
        sparse if shape.has_experts(layer) else dense for layer in range(shape.num_hidden_layers)
    )
    return ModelSpec(
        layers=tuple(
            replace(
                kind, window=shape.sliding_window if every is None or (layer + 1) % every else None
            )
            for layer, kind in enumerate(kinds)
        ),
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        tie_word_embeddings=shape.tie_word_embeddings,
    )


def _mlp(hidden: int, width: int, **experts: Any) -> tuple[Matrix, ...]:
    """Returns the matrices of a gated MLP, or of experts."""
    first = Matrix(width, hidden, **experts)
    return first, first, Matrix(hidden, width, **experts)


def _with_experts(dense: LayerSpec, shape: ModelShape) -> LayerSpec:
    """Returns the sizes of a layer with experts instead of its MLP."""
    hidden = shape.hidden_size
    shared = shape.shared_expert_intermediate_size
    chosen = shape.num_experts_per_tok
    count = shape.num_experts
    experts = _mlp(hidden, shape.expert_width, count=count, used=chosen, role="expert")
    # router, and expert of all tokens.
    of_all = (Matrix(count, hidden), *(_mlp(hidden, shared) if shared else ()))
    return replace(
        dense,
        intermediate_size=chosen * shape.expert_width + shared,
        matrices=(*dense.matrices[:4], *of_all, *experts),
    )


def _shape(
    hidden: int,
    mlp: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    /,
    tied: bool,
    **options: Any,
) -> ModelShape:
    return ModelShape(
        **options,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        tie_word_embeddings=tied,
    )


def _llama(
    hidden: int, mlp: int, layers: int, heads: int, head_dim: int = 128, tied: bool = False
) -> ModelShape:
    return _shape(hidden, mlp, layers, heads, 8, head_dim, tied=tied)


def _qwen3(
    hidden: int,
    mlp: int,
    layers: int,
    heads: int,
    kv_heads: int = 8,
    tied: bool = False,
    expert: int = 0,
) -> ModelShape:
    options: dict[str, Any] = {"qk_norm": True, "rms_norm_eps": 1e-6, "rope_theta": 1e6}
    if expert:
        options |= {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": expert}
    return _shape(hidden, mlp, layers, heads, kv_heads, 128, tied=tied, **options)


def _gpt_oss(layers: int, experts: int) -> ModelShape:
    options: dict[str, Any] = {
        "qkv_bias": True,
        "sliding_window": 128,
        "full_attention_every": 2,
        "rope_theta": 150_000.0,
    }
    return _shape(
        2880,
        2880,
        layers,
        64,
        8,
        64,
        tied=False,
        num_experts=experts,
        num_experts_per_tok=4,
        **options,
    )


PRESETS: dict[str, ModelShape] = {
    "tiny": _shape(128, 384, 2, 4, 2, 32, tied=True),
    "small": _shape(512, 1536, 8, 8, 4, 64, tied=True),
    "160m": _shape(768, 2048, 12, 12, 4, 64, tied=True),
    "tiny-moe": _shape(
        128,
        384,
        3,
        4,
        2,
        32,
        tied=True,
        num_experts=8,
        moe_intermediate_size=96,
        shared_expert_intermediate_size=96,
        first_dense_layers=1,
        router_scores="sigmoid",
        router_bias=True,
    ),
    "llama-3.2-1b": _llama(2048, 8192, 16, 32, head_dim=64, tied=True),
    "llama-3.2-3b": _llama(3072, 8192, 28, 24, tied=True),
    "llama-3.1-8b": _llama(4096, 14336, 32, 32),
    "llama-3.1-70b": _llama(8192, 28672, 80, 64),
    "llama-3.1-405b": _llama(16384, 53248, 126, 128),
    "llama-style-462b": _llama(16384, 53248, 144, 128),
    "llama-style-1t": _llama(24576, 79872, 140, 192),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64),
    "qwen3-30b-a3b": _qwen3(2048, 6144, layers=48, heads=32, kv_heads=4, expert=768),
    "qwen3-235b-a22b": _qwen3(4096, 12288, layers=94, heads=64, kv_heads=4, expert=1536),
    "mixtral-8x7b": _shape(4096, 14336, 32, 32, 8, 128, tied=False, num_experts=8, rope_theta=1e6),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
}
"""Shapes by name, without the vocabulary, and without the RoPE scaling by which trained models were
extended.

Sources: config.json of meta-llama/Llama-3.2-1B, -3B, Llama-3.1-8B, -70B, -405B, Qwen/Qwen3-0.6B to
-235B-A22B, mistralai/Mixtral-8x7B-v0.1, and openai/gpt-oss-20b and -120b, which also have attention
sinks, biases of experts and of the output projection, and bounds of their activations, that the
decoder lacks. llama-style-462b is 405b with more layers, and llama-style-1t is wider: models of
docs/evidence/scaling.md.
"""

PUBLISHED_VOCABULARIES: dict[str, int] = {
    **dict.fromkeys((name for name in PRESETS if name.startswith("llama")), 128_256),
    **dict.fromkeys((name for name in PRESETS if name.startswith("qwen3")), 151_936),
    "mixtral-8x7b": 32_000,
    **dict.fromkeys((name for name in PRESETS if name.startswith("gpt-oss")), 201_088),
}
"""Entries of the vocabularies of the models that presets are named after, from the same files:
predictions take them where no store and no setting says another number."""
