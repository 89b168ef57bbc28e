"""Shapes of the Llama-style decoder, by the names that Hugging Face configs use, from `tiny` (a laptop) to `8b` (Llama 3.1)."""

from pydantic import BaseModel, ConfigDict, Field, model_validator


class ModelShape(BaseModel):
    """Sizes of a decoder. `vocab_size` None: taken from the tokenizer of the store."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    vocab_size: int | None = Field(None, ge=2, description="entries of the embedding; default: the tokenizer's")
    hidden_size: int = Field(ge=1, description="width of the residual stream")
    intermediate_size: int = Field(ge=1, description="width of the SwiGLU MLP")
    num_hidden_layers: int = Field(ge=1, description="number of blocks")
    num_attention_heads: int = Field(ge=1, description="query heads")
    num_key_value_heads: int = Field(ge=1, description="key and value heads; divides the query heads (GQA)")
    head_dim: int = Field(ge=2, description="size of one head; even, for RoPE")
    rope_theta: float = Field(500_000.0, gt=0, description="base of the rotary position embedding")
    rms_norm_eps: float = Field(1e-5, gt=0, description="added to the mean square in RMSNorm")
    tie_word_embeddings: bool = Field(False, description="share the embedding with the output projection")

    @model_validator(mode="after")
    def _heads_fit(self) -> "ModelShape":
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads}, which num_key_value_heads {self.num_key_value_heads} does "
                "not divide: choose a divisor, or equal numbers for attention without GQA"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}: RoPE rotates pairs, so it must be even")
        return self

    def parameters(self) -> int:
        """Number of parameters, the tied embedding counted once. Needs `vocab_size`."""
        embeddings = self.vocabulary_parameters * (1 if self.tie_word_embeddings else 2)
        return self.num_hidden_layers * (self.block_parameters + 2 * self.hidden_size) + embeddings + self.hidden_size

    @property
    def block_parameters(self) -> int:
        """Parameters of one block's matrices; its two norms have `hidden_size` more each."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_attention_heads + self.num_key_value_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def vocabulary_parameters(self) -> int:
        """Parameters of the embedding, and of the output projection. Needs `vocab_size`."""
        if self.vocab_size is None:
            raise ValueError("vocab_size is not set: it comes from the store's tokenizer")
        return self.vocab_size * self.hidden_size

    @property
    def multiplied_parameters(self) -> int:
        """Parameters by which every token is multiplied: the blocks' matrices and the output projection."""
        return self.num_hidden_layers * self.block_parameters + self.vocabulary_parameters

    def block_cost(self, keys: int) -> int:
        """Multiplications of a block for one token that attends to `keys` tokens; those of the norms are left out."""
        return self.block_parameters + 2 * keys * self.num_attention_heads * self.head_dim


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
"""Sizes from 1b on are those of Llama 3.1 and 3.2, without the vocabulary."""
