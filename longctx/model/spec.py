"""Spec: the sizes of a model, layer by layer, from which memory, operations, pipeline stages and profiles are computed."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerSpec:
    """The sizes of one block: self-attention and a gated MLP.

    Attributes:
        hidden_size: width of the residual stream.
        num_attention_heads, num_key_value_heads, head_dim: of its attention.
        intermediate_size: width of the MLP.
        matrix_parameters: by which every token is multiplied.
        other_parameters: of norms and biases.
        idle_parameters: of matrices that a token does not meet: experts that it does not go to.
        window: tokens that a token sees, itself counted; None: all before it.
        attention_norms, mlp_norms: numbers of a token that norms behind the one at the entrance of either half keep.
        adapter_parameters: of LoRA's matrices beside the others, which are then frozen.
        adapter_width: numbers of a token between the two matrices of all adapters.
    """

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    matrix_parameters: int
    other_parameters: int
    window: int | None = None
    attention_norms: int = 0
    mlp_norms: int = 0
    idle_parameters: int = 0
    adapter_parameters: int = 0
    adapter_width: int = 0

    @property
    def parameters(self) -> int:
        return self.matrix_parameters + self.other_parameters + self.idle_parameters + self.adapter_parameters

    def multiplications(self, keys: int) -> int:
        """For one token that attends to `keys` tokens; those of norms are left out."""
        seen = keys if self.window is None else min(keys, self.window)
        return self.matrix_parameters + self.adapter_parameters + 2 * seen * self.num_attention_heads * self.head_dim

    def attention_flops(self, length: int) -> int:
        """Operations of causal attention over a document, forward.

        Each query and key it sees take 2 · head_dim operations for the score and as many for the value, in every query head.
        A query sees s/2 keys on average; with a window of w, the s queries see w · s - w²/2 in all.
        """
        window = length if self.window is None else min(length, self.window)
        return 2 * self.num_attention_heads * self.head_dim * (2 * window * length - window * window)


@dataclass(frozen=True)
class ModelSpec:
    """The sizes of a model.

    Attributes:
        layers: of every block, in order.
        hidden_size: width of the residual stream.
        vocab_size: entries of the embedding and of the output projection; None as long as no tokenizer is known.
        tie_word_embeddings: whether both are one matrix.
        attention_scale: factor of attention scores; None: 1/√head_dim.
        attention_softcap, logit_softcap: bounds of attention scores and of logits, by tanh; 0 leaves them.
    """

    layers: tuple[LayerSpec, ...]
    hidden_size: int
    vocab_size: int | None
    tie_word_embeddings: bool
    attention_scale: float | None = None
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0

    @property
    def largest_layer(self) -> LayerSpec:
        """The block with most parameters, by which activations are estimated."""
        return max(self.layers, key=lambda layer: layer.parameters)

    @property
    def vocabulary_parameters(self) -> int:
        """Parameters of the embedding, and of the output projection. Needs `vocab_size`."""
        if self.vocab_size is None:
            raise ValueError("vocab_size is not set: it comes from the store's tokenizer")
        return self.vocab_size * self.hidden_size

    @property
    def parameters(self) -> int:
        """All of them, a tied embedding counted once. Needs `vocab_size`."""
        embeddings = self.vocabulary_parameters * (1 if self.tie_word_embeddings else 2)
        return sum(layer.parameters for layer in self.layers) + embeddings + self.hidden_size

    @property
    def adapted(self) -> bool:
        """Whether adapters alone are trained."""
        return any(layer.adapter_parameters for layer in self.layers)

    @property
    def trained_parameters(self) -> int:
        """Those that have gradients. Needs `vocab_size`."""
        return sum(layer.adapter_parameters for layer in self.layers) if self.adapted else self.parameters

    @property
    def multiplied_parameters(self) -> int:
        """Parameters by which every token is multiplied: the blocks' matrices and the output projection."""
        in_blocks = sum(layer.matrix_parameters + layer.adapter_parameters for layer in self.layers)
        return in_blocks + self.vocabulary_parameters

    def flops(self, lengths: Sequence[int]) -> int:
        """Operations of a forward pass over documents of these lengths. Needs `vocab_size`."""
        attention = sum(layer.attention_flops(length) for layer in self.layers for length in lengths)
        return 2 * self.multiplied_parameters * sum(lengths) + attention
