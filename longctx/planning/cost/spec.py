"""Spec: sizes of a model, layer by layer, from which memory, operations, pipeline stages and
profiles are computed."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple, Protocol, get_args

from longctx.planning.cost.tower import TowerSpec
from longctx.planning.parts import EQUAL_PARTS, PartCosts
from longctx.planning.tree import NO_TREES, Trees

Recompute = Literal["none", "norms", "mlp", "selective", "full"]
RECOMPUTE_MODES: tuple[Recompute, ...] = get_args(Recompute)
"""What backward recomputes of each block, from most memory to least; see
`longctx.parallel.recompute`."""


class PassFlops(NamedTuple):
    forward: float = 0.0
    backward: float = 0.0


NO_FLOPS = PassFlops()


@dataclass(frozen=True)
class Scan:
    """Linear attention of a block, per token.

    Attributes:
        state_size: values of its state and of its transition, which segments of a split document
            send to each other.
        flops: matrix products of its scan in float32, in a long document.
        split_flops: how many more in a document on several ranks: for the transitions, and for
            outputs from the states that other ranks send.
        kept: bytes that it keeps for backward.
        working: bytes that backward needs beside.
    """

    state_size: int
    flops: PassFlops = NO_FLOPS
    split_flops: PassFlops = NO_FLOPS
    delta_rule: bool = False
    kept: int = 0
    working: int = 0


Role = Literal["own", "query", "source", "expert", "lora_a", "adapter"]


@dataclass(frozen=True)
class Matrix:
    """Matrices of one size in a block.

    Attributes:
        rows, columns: values of an output, and of an input.
        count: how many there are: of experts of a layer, several.
        used: how many of them multiply a token.
        role: query: it computes queries while K and V travel; source: it multiplies tokens of the
            source, for K and V of a decoder's cross-attention; expert: a router chooses it; lora_a,
            adapter: LoRA's first matrices, and what else is trained beside frozen weights; own:
            none of these.
        stored: bytes of each one that is kept quantized; None: it has the dtype of the others.
    """

    rows: int
    columns: int
    count: int = 1
    used: int = 1
    role: Role = "own"
    stored: int | None = None

    @property
    def size(self) -> int:
        return self.rows * self.columns


class Latent(NamedTuple):
    """What split documents send of a token in place of K and V: values, and the parameters that
    compute K and V of them, whose heads have other sizes than each other.
    """

    values: int
    parameters: int
    key_dim: int = 0
    value_dim: int = 0


NO_LATENT = Latent(0, 0)


@dataclass(frozen=True)
class LayerSpec:
    """Sizes of one block: self-attention and an MLP.

    Attributes:
        hidden_size: width of the residual stream.
        intermediate_size: width of the MLP, or of all experts that a token uses.
        matrices: all its matrices; the properties below are sums over them.
        vectors: parameters of norms and biases.
        window: attention window in tokens, the token itself included; None: no window.
        attention_norms: values per token that norms of heads keep for backward.
        attends: whether it has softmax attention, whose operations and exchange grow with the
            document.
        scan: its linear attention; None: none.
        latent: what split documents send of a token of latent attention; `head_dim` is then the
            mean of keys and values.
    """

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    matrices: tuple[Matrix, ...]
    vectors: int
    window: int | None = None
    attention_norms: int = 0
    attends: bool = True
    scan: Scan | None = None
    latent: Latent = NO_LATENT

    def of(self, *roles: Role) -> list[Matrix]:
        """Returns the matrices with one of these roles."""
        return [matrix for matrix in self.matrices if matrix.role in roles]

    @cached_property
    def model_matrices(self) -> list[Matrix]:
        """The matrices of the model itself, without adapters."""
        return self.of("own", "query", "source", "expert")

    @cached_property
    def matrix_parameters(self) -> int:
        """Parameters of the matrices that multiply every token, without adapters."""
        return sum(matrix.used * matrix.size for matrix in self.model_matrices)

    @cached_property
    def idle_parameters(self) -> int:
        """Parameters of matrices that do not multiply a token: experts that it does not use."""
        return sum((matrix.count - matrix.used) * matrix.size for matrix in self.model_matrices)

    @cached_property
    def query_parameters(self) -> int:
        """Part of `matrix_parameters` that computes queries while K and V travel; 0 if queries come
        first."""
        return sum(matrix.size for matrix in self.of("query"))

    @cached_property
    def source_parameters(self) -> int:
        """Part of `matrix_parameters` that multiplies tokens of the source; 0 without an
        encoder."""
        return sum(matrix.size for matrix in self.of("source"))

    @cached_property
    def adapter_parameters(self) -> int:
        """Parameters that are trained beside frozen ones: of adapters; if there are any, all others
        are frozen."""
        return sum(matrix.size for matrix in self.of("lora_a", "adapter"))

    @property
    def adapter_width(self) -> int:
        """Values per token between LoRA's two matrices, of all of them: the sum of ranks."""
        return sum(matrix.rows for matrix in self.of("lora_a"))

    @property
    def quantized(self) -> list[Matrix]:
        return [matrix for matrix in self.matrices if matrix.stored is not None]

    @property
    def experts(self) -> int:
        """Number of experts that a router chooses from, whose parameters are in `matrix_parameters`
        and `idle_parameters`."""
        return max((matrix.count for matrix in self.of("expert")), default=0)

    @property
    def expert_rows(self) -> int:
        """Rows that a token has in experts: of this decoder, or stacked ones in transformers' own
        code, which have no role. 0 without experts."""
        used = (matrix.used for matrix in self.model_matrices if matrix.count > 1)
        return max(used, default=0)

    @property
    def experts_per_token(self) -> int:
        return max((matrix.used for matrix in self.of("expert")), default=0)

    @cached_property
    def expert_parameters(self) -> int:
        return sum(matrix.count * matrix.size for matrix in self.of("expert"))

    def attention_in(self, other: "LayerSpec") -> "LayerSpec":
        """Returns another block with the kind of attention that this one has."""
        return replace(other, attends=self.attends, scan=self.scan)

    def pair_values(self, float32: float = 1.0) -> float:
        """Returns the products of a query and a key, and of a value, in all heads, per product of
        both: heads · head size.

        `float32` is the time of an operation in float32, relative to that in the dtype of the
        matrices.
        """
        return self.num_attention_heads * self.head_dim

    @property
    def selection_bytes(self) -> int:
        """Bytes per token that say which keys it sees, kept for backward; here it sees all."""
        return 0

    @property
    def lent_bytes(self) -> int:
        """The same, where later blocks see these keys too: kept until all are done."""
        return 0

    def sent_values(self, tensor: int) -> int:
        """Returns the values per token that one of `tensor` tensor-parallel ranks sends to other
        ranks of a document."""
        return self.latent.values or 2 * (self.num_key_value_heads // tensor) * self.head_dim

    @property
    def routed_size(self) -> int:
        """Part of `intermediate_size` in experts that a router chooses; the rest is a dense MLP, or
        an expert of all tokens."""
        return max(
            (matrix.used * matrix.size // self.hidden_size for matrix in self.of("expert")),
            default=0,
        )

    @property
    def parameters(self) -> int:
        return (
            self.matrix_parameters + self.vectors + self.idle_parameters + self.adapter_parameters
        )

    def multiplications(self, keys: int) -> int:
        """Returns the multiplications for one token that attends to `keys` tokens, without those of
        norms."""
        seen = 0 if not self.attends else keys if self.window is None else min(keys, self.window)
        scanned = 0 if self.scan is None else int(self.scan.flops.forward) // 2
        return (
            self.matrix_parameters
            + self.adapter_parameters
            + scanned
            + 2 * seen * self.num_attention_heads * self.head_dim
        )

    def attention_flops(self, length: int) -> int:
        """Returns the operations of the forward pass of causal attention over a document of
        `length` tokens.

        Each visible pair of a query and a key takes 2 · head_dim operations for the score and as
        many for the value, in every query head. A query sees s/2 keys on average; with a window of
        w, the s queries see w · s - w²/2 keys in total.
        """
        if not self.attends:
            return 0
        window = length if self.window is None else min(length, self.window)
        return (
            2 * self.num_attention_heads * self.head_dim * (2 * window * length - window * window)
        )


class OwnBlock(NamedTuple):
    """Bytes per token of norms and MLP of a block that transformers' own code runs one operation at
    a time.

    Attributes:
        norms: kept by the norms of the residual stream.
        heads: kept by norms of heads and latents; None where they were not traced.
        mlp: kept by the MLP beside its input.
        gradients: what is there beside, and beside the gradient of the output, at the peak of the
            MLP's backward.
    """

    norms: float
    heads: float | None
    mlp: float
    gradients: float


class OwnCode(Protocol):
    """Transformers' own code of a model's largest block."""

    @property
    def composes_norms(self) -> bool:
        """Whether norms are simple operations, each of which keeps its result."""

    def bytes_per_token(self, dtype: str, *, frozen: bool) -> OwnBlock | None:
        """Returns what the block keeps in a dtype, `frozen`: where only adapters are trained; None
        where it could not be traced."""


@dataclass(frozen=True)
class ModelSpec:
    """Sizes of a model.

    Attributes:
        hidden_size: width of the residual stream.
        vocab_size: entries of the embedding and of the output projection; None while no tokenizer
            is known.
        attention_softcap: tanh bound of attention scores; 0: no bound.
        encoder_root_parameters: parameters of an encoder's embedding and last norm; 0 without.
        frozen_tower: parameters of an encoder of images that are not trained, where there are no
            adapters.
        causal: whether a token sees only earlier tokens; False: also later ones, which doubles the
            operations of attention.
        encoder_layers: number of blocks of an encoder, the first of `layers`, which tokens of
            sources run through; tokens of targets run through the others. 0: there is no encoder.
        tower_parameters: parameters of an encoder of images, with what projects its features.
        tower_values: values that it keeps for backward for a token of an image.
        tower: its sizes, from which its operations are counted; None without one.
        tower_adapters: parameters of LoRA's matrices in it; all others are then frozen.
        own: transformers' own code, where it runs the model; None for the native decoder.
    """

    layers: tuple[LayerSpec, ...]
    hidden_size: int
    vocab_size: int | None
    tie_word_embeddings: bool
    attention_softcap: float = 0.0
    encoder_root_parameters: int = 0
    frozen_tower: int = 0
    causal: bool = True
    encoder_layers: int = 0
    tower_parameters: int = 0
    tower_values: int = 0
    tower: TowerSpec | None = None
    tower_adapters: int = 0
    own: OwnCode | None = None

    @property
    def largest_layer(self) -> LayerSpec:
        """Block with the most parameters, from which activations are estimated."""
        return max(self.layers, key=lambda layer: layer.parameters)

    @property
    def experts(self) -> int:
        """Number of experts of a layer that has some; 0 without. The largest layer may be dense."""
        return max(layer.experts for layer in self.layers)

    @property
    def selects_keys(self) -> bool:
        return any(layer.selection_bytes + layer.lent_bytes > 0 for layer in self.layers)

    @property
    def compiled_by_default(self) -> bool:
        """Whether blocks are compiled on GPUs unless settings say otherwise: experts, linear
        attention and selected keys are not."""
        if self.selects_keys:
            return False
        return not any(layer.expert_rows or layer.scan for layer in self.layers)

    @property
    def sends_latents(self) -> bool:
        return any(layer.latent.values for layer in self.layers)

    @property
    def vocabulary_parameters(self) -> int:
        """Number of parameters of the embedding, and also of the output projection. Needs
        `vocab_size`."""
        if self.vocab_size is None:
            raise ValueError("vocab_size is not set: it comes from the store's tokenizer")
        return self.vocab_size * self.hidden_size

    @property
    def parameters(self) -> int:
        """Number of all parameters, a tied embedding counted once. Needs `vocab_size`."""
        embeddings = self.vocabulary_parameters * (1 if self.tie_word_embeddings else 2)
        outside = embeddings + self.encoder_root_parameters + self.hidden_size
        outside += self.tower_parameters + self.tower_adapters
        return sum(layer.parameters for layer in self.layers) + outside

    @property
    def adapted(self) -> bool:
        return self.tower_adapters > 0 or any(layer.adapter_parameters for layer in self.layers)

    @property
    def trained_parameters(self) -> int:
        """Number of parameters with gradients. Needs `vocab_size`."""
        if self.adapted:
            return self.trained_matrices + self.tower_adapters
        return self.parameters - self.frozen_tower

    @property
    def trained_tower(self) -> int:
        """Number of parameters of the encoder of images with gradients."""
        return self.tower_adapters if self.adapted else self.tower_parameters - self.frozen_tower

    @property
    def tower_backward(self) -> float:
        """Share of its operations that backward of the encoder of images has.

        Adapters need the gradients of inputs alone: half of those of matrices, but all of
        attention's, which are taken as half.
        """
        if self.adapted:
            return 0.5 if self.tower_adapters else 0.0
        return self.trained_tower / self.tower_parameters

    @property
    def trained_matrices(self) -> int:
        """Number of parameters with gradients in matrices of blocks."""
        if self.adapted:
            return sum(layer.adapter_parameters for layer in self.layers)
        return sum(layer.matrix_parameters + layer.idle_parameters for layer in self.layers)

    @cached_property
    def trained_sizes(self) -> Counter[Matrix]:
        """How many parameters of each size have gradients; vectors count as a matrix of one column.
        Needs `vocab_size`.

        Those outside of blocks, as of an encoder of images, are taken to have as many columns as
        the residual stream.
        """
        roles: tuple[Role, ...] = (
            ("lora_a", "adapter") if self.adapted else ("own", "query", "source", "expert")
        )
        sizes = Counter(matrix for layer in self.layers for matrix in layer.of(*roles))
        if not self.adapted:
            sizes[Matrix(sum(layer.vectors for layer in self.layers) + self.hidden_size, 1)] = 1
        inside = sum(times * matrix.count * matrix.size for matrix, times in sizes.items())
        sizes[Matrix((self.trained_parameters - inside) // self.hidden_size, self.hidden_size)] += 1
        return sizes

    @property
    def frozen_products(self) -> int:
        """Number of parameters without gradients that multiply every token."""
        return self.multiplied_parameters - self.trained_matrices if self.adapted else 0

    @property
    def scan_flops(self) -> float:
        """Operations of all scans per token, in forward and backward."""
        return sum(sum(layer.scan.flops) for layer in self.layers if layer.scan is not None)

    @property
    def multiplied_parameters(self) -> int:
        """Number of parameters that multiply every token: matrices of the blocks, and the output
        projection."""
        in_blocks = sum(layer.matrix_parameters + layer.adapter_parameters for layer in self.layers)
        return in_blocks + self.vocabulary_parameters

    @property
    def parts(self) -> PartCosts:
        """What tokens of sources and of targets cost; needs `vocab_size`. Operations of backward
        count as those of forward."""
        if not self.encoder_layers:
            return EQUAL_PARTS
        of_layers = [layer.matrix_parameters + layer.adapter_parameters for layer in self.layers]
        # Adapters of K and V of the source are taken to be the same share as of all matrices of a
        # decoder's block.
        blocks = zip(of_layers, self.layers, strict=True)
        crossed = sum(
            size * layer.source_parameters // layer.matrix_parameters for size, layer in blocks
        )
        source = sum(of_layers[: self.encoder_layers]) + crossed
        target = sum(of_layers) - source + self.vocabulary_parameters
        queries = [layer.num_attention_heads * layer.head_dim for layer in self.layers]
        keys = [layer.num_key_value_heads * layer.head_dim for layer in self.layers]
        encoder_queries = sum(queries[: self.encoder_layers])
        decoder_queries = sum(queries[self.encoder_layers :])
        encoder_keys = sum(keys[: self.encoder_layers])
        decoder_keys = sum(keys[self.encoder_layers :])
        return PartCosts(
            attention=encoder_queries / decoder_queries,
            products=2 * source / (source + target),
            keys=2 * (encoder_keys + decoder_keys) / (encoder_keys + 2 * decoder_keys),
        )

    def flops(self, lengths: Sequence[int], trees: Trees = NO_TREES) -> int:
        """Returns the operations of a forward pass over documents of these lengths, of which some
        are trees.

        Needs `vocab_size`. A node of a tree adds to a sequence up to its start the operations of a
        sequence up to its end, and those of a sequence of its own tokens if it sees itself both
        ways.
        """
        runs = [(0, length) for document, length in enumerate(lengths) if document not in trees]
        for tree in trees.values():
            for node in tree.nodes:
                runs.append(node.positions)
                if node.both_ways:
                    runs.append((0, node.stop - node.start))
        flops = (
            layer.attention_flops(stop) - layer.attention_flops(start)
            for layer in self.layers
            for start, stop in runs
        )
        directions = 1 if self.causal else 2
        return 2 * self.multiplied_parameters * sum(lengths) + directions * sum(flops)
