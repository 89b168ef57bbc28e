"""Ledger of a block: the tensors that it keeps from forward to backward, and which modes of
recomputation keep each of them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from longctx.config import Config
from longctx.memory.kernels import FLOAT32
from longctx.memory.loads import Load
from longctx.planning.cost.spec import LayerSpec, ModelSpec, OwnBlock, OwnCode
from longctx.planning.cost.work import ELEMENT_BYTES

NONE = ("none",)
MATRICES = ("norms",)
AROUND_ATTENTION = (*MATRICES, "mlp")
OPERATORS = (*AROUND_ATTENTION, "selective")
INPUT = (*OPERATORS, "full")
"""Modes that keep: everything (none); outputs of matrices that others recompute (norms); also what
surrounds attention (mlp); also attention's own results (selective); and the block's input, which
every mode but none keeps."""


@dataclass(frozen=True)
class Entry:
    """One line of the ledger.

    Attributes:
        part: part of the block that keeps the tensor: attention, its swap of heads for tokens, or
            MLP.
        kept_by: modes of recomputation that keep it from forward to backward (see
            `longctx.parallel.recompute`).
        spared: bytes of further tensors that recomputation frees or does not make, because this one
            is kept.
    """

    part: str
    name: str
    size: int
    kept_by: tuple[str, ...]
    spared: int = 0


class BlockMemory:
    """Bytes of the tensors of one block on a rank; `entries` is the ledger, without received K and
    V.

    Attributes:
        element_bytes: bytes of an element in the compute dtype.
        own: what transformers' own code keeps, one operation at a time; None for other blocks, or
            where it is not known.
        composed: whether norms are simple operations, each of which keeps its result.
        whole_norms: whether a norm is one operation, which keeps only its input.
        normed: output of a norm, gathered for tensor-parallel matrices.
        norm: kept by a norm: its input; if it is composed of simple operations a copy in float32,
            and the normalized input, which the weight gradient needs.
        norms_of_heads: kept by norms of queries and keys.
        queries: Q, and also the output of attention.
        kv_row, keys: K and V of one token, and of all tokens on the rank.
        sent_row: what split documents send of one token: K and V, or its latent.
        mlp: one intermediate tensor of the MLP.
        turn: its part that is computed in tiles or turns: not an expert of all tokens.
        routed: rows into or out of experts.
        routed_at_once: the same, of a tile or turn.
        swapped_share: share of rows whose heads are swapped for tokens (Ulysses).
    """

    def __init__(
        self, spec: ModelSpec, config: Config, layer: LayerSpec, load: Load, fused: bool
    ) -> None:
        self.layer = layer
        self.train = config.train
        self.tokens = load.tokens
        self.tensor_ranks = config.parallel.tensor_parallel_size
        self.element_bytes = ELEMENT_BYTES[config.dtype]
        code = spec.own
        if config.compiles("cuda" if fused else "cpu", spec):
            code = None  # the compiler fuses operations
        self.composed = code is not None and code.composes_norms
        self.own = self._traced(code, spec, dtype=config.dtype)
        self.whole_norms = fused and not self.composed
        self.stream = self._size(spec.hidden_size)
        self.normed = self.stream * self.tensor_ranks
        self.norm_bytes = self._norm_bytes(frozen=spec.adapted)
        self.norm = self._size(spec.hidden_size, self.norm_bytes)
        self.norms_of_heads = self._size(layer.attention_norms, self.norm_bytes)
        self.queries = self._size(layer.num_attention_heads * layer.head_dim)
        self.kv_row = (
            2 * layer.num_key_value_heads * layer.head_dim * self.element_bytes // self.tensor_ranks
        )
        self.sent_row = layer.sent_values(self.tensor_ranks) * self.element_bytes
        self.keys = self.kv_row * load.tokens
        self.swapped_keys = self.keys * load.kv_copies
        self.log_sum_exp = self._size(layer.num_attention_heads, FLOAT32)
        at_once = self._tokens_at_once(config)
        in_turns = layer.routed_size or layer.intermediate_size
        self.turn = at_once * in_turns * self.element_bytes // self.tensor_ranks
        self.mlp = self.turn + self._size(layer.intermediate_size - in_turns)
        self.routed = self._size(layer.expert_rows * spec.hidden_size)
        self.routed_at_once = at_once * self.routed // max(1, load.tokens)
        self.swapped_share = load.swapped / load.tokens if load.tokens else 0.0
        # The first norm keeps the block's input itself, unless it keeps a copy in float32.
        spared = self.stream if self.whole_norms or self.element_bytes == FLOAT32 else 0
        self.offloaded = fused and self.train.offload_activations
        block_input = Entry(
            "attention",
            "input of the block",
            size=0 if self.offloaded else self.stream,
            kept_by=INPUT,
            spared=spared,
        )
        self.entries = (
            block_input,
            *self._attention(),
            *self._cross(load.source),
            *self._swap(),
            *self._mlp(),
        )
        if self.own is not None:
            self.entries += tuple(self._beside_the_ledger(self.own))

    def _traced(self, code: OwnCode | None, spec: ModelSpec, *, dtype: str) -> OwnBlock | None:
        """Returns what a block of this code keeps; a trace is of one kind of block, and of an MLP
        that is not in tiles."""
        if code is None or spec.encoder_layers or self.train.mlp_tile_tokens:
            return None
        return code.bytes_per_token(dtype, frozen=spec.adapted)

    def _tokens_at_once(self, config: Config) -> int:
        """Returns the tokens of a tile or turn of the MLP. Experts that are split over ranks may
        get more than their even share."""
        ranks = config.parallel.expert_parallel_size * self.tensor_ranks
        at_once = self.tokens
        if self.layer.experts > 0 and ranks > 1:
            at_once = round(self.tokens * config.expert_max_load)
        return min(self.train.mlp_tile_tokens or at_once, at_once)

    def _norm_bytes(self, *, frozen: bool) -> int:
        """Returns the bytes that a norm keeps of a value; `frozen`: its weight is."""
        if self.whole_norms:
            return self.element_bytes
        if frozen:
            return FLOAT32
        if self.composed:
            return FLOAT32 + self.element_bytes
        return 2 * FLOAT32

    @property
    def outputs_offloaded(self) -> bool:
        """Whether attention's results are in host memory between forward and backward."""
        return self.offloaded and self.train.recompute == "selective"

    @property
    def on_host(self) -> int:
        """Bytes in host memory between forward and backward; those of the block that backward comes
        to next are back."""
        if not self.offloaded:
            return 0
        if self.outputs_offloaded:
            return self.stream + self.queries + self.log_sum_exp
        return self.stream

    def _size(self, values: int, element_bytes: int | None = None) -> int:
        """Returns the bytes of a tensor with `values` values per token on all tensor ranks
        together."""
        return self.tokens * values * (element_bytes or self.element_bytes) // self.tensor_ranks

    def _attention(self) -> Iterator[Entry]:
        yield Entry("attention", "input of the norm", self.norm, NONE)
        yield Entry("attention", "output of the norm", self.normed, NONE)
        # Modes that keep products are assumed to keep all, which is too much.
        if (scan := self.layer.scan) is not None:
            yield Entry(
                "attention", "linear attention", self.tokens * scan.kept, NONE + AROUND_ATTENTION
            )
        if not self.layer.attends:
            return
        yield Entry("attention", "Q", self.queries, NONE + AROUND_ATTENTION)
        yield Entry("attention", "K and V", self.keys, NONE + AROUND_ATTENTION)
        on_device = NONE if self.outputs_offloaded else NONE + OPERATORS
        yield Entry("attention", "output of attention", self.queries, on_device)
        yield Entry("attention", "log-sum-exp", self.log_sum_exp, on_device)
        selected = self.tokens * self.layer.selection_bytes
        yield Entry("attention", "selected keys", selected, NONE + OPERATORS)
        lent = self.tokens * self.layer.lent_bytes
        yield Entry("attention", "keys selected for later blocks", lent, NONE + INPUT)
        yield Entry("attention", "output of the output matrix", self.normed, AROUND_ATTENTION)
        yield Entry("attention", "further norms", self.norms_of_heads, NONE)
        yield Entry(
            "attention",
            "of adapters",
            self.tokens * self.layer.adapter_width * self.element_bytes,
            NONE,
        )

    def _cross(self, source: int) -> Iterator[Entry]:
        """Yields what cross-attention keeps: as much as the other attention, but K and V of the
        source."""
        if self.layer.source_parameters:
            keys = self.kv_row * source
            yield from (
                replace(each, size=keys) if each.name == "K and V" else each
                for each in self._attention()
            )

    def _swap(self) -> Iterator[Entry]:
        if not self.swapped_share:
            return
        yield Entry("swap", "output for the next matrix", self.queries, NONE + OPERATORS)
        if self.swapped_share == 1:
            swapped = self.queries + self.swapped_keys
            yield Entry("swap", "swapped Q, K and V", swapped, OPERATORS, spared=swapped)
        else:  # attention runs twice
            second = round(
                self.swapped_share * (2 * self.queries + self.swapped_keys + self.log_sum_exp)
            )
            yield Entry(
                "swap",
                "Q, K, V, output and log-sum-exp of the second run",
                second,
                NONE + OPERATORS,
            )

    def _mlp(self) -> Iterator[Entry]:
        tiled = self.train.mlp_tile_tokens is not None
        outputs = 2 * (self.mlp - self.turn if tiled else self.mlp)
        yield Entry("mlp", "input of the norm", self.norm, NONE)
        yield Entry("mlp", "output of the norm", self.normed, NONE)
        yield Entry(
            "mlp", "outputs of the first matrices", outputs, NONE if tiled else NONE + MATRICES
        )
        yield Entry("mlp", "activations, and their products with a gate", outputs, NONE)
        yield Entry(
            "mlp",
            "logits and scores of the router",
            self._size(3 * self.layer.experts, FLOAT32),
            NONE,
        )
        yield Entry(
            "mlp", "outputs of experts, for the gradients of their weights", self.routed, NONE
        )
        if not tiled:
            last = self.routed_at_once or self.normed
            yield Entry("mlp", "rows into experts", self.routed_at_once, NONE)
            yield Entry("mlp", "output of the last matrix", last, MATRICES)

    def _beside_the_ledger(self, own: OwnBlock) -> Iterator[Entry]:
        """Yields how much more, or less, transformers' own norms and MLP keep than the entries of
        ours. Attention and MLP have half of the residual stream's norms each."""
        norms = round(self.tokens * own.norms / 2)
        in_attention = norms - self.norm
        if own.heads is not None and self.layer.attends:
            in_attention += round(self.tokens * own.heads) - self.norms_of_heads
        of_mlp = sum(entry.size for entry in self._mlp() if "none" in entry.kept_by)
        # The norm's output is the MLP's input, which is not in the trace.
        in_mlp = norms + round(self.tokens * own.mlp) - (of_mlp - self.normed)
        name = "what transformers' own code keeps beside"
        yield Entry("attention", name, in_attention, NONE)
        yield Entry("mlp", name, in_mlp, NONE)

    @property
    def tile(self) -> int:
        """Recomputed in backward for one tile of the MLP, if it is tiled."""
        whole = 4 * self.turn + self.routed_at_once
        if self.train.mlp_tile_tokens:
            return whole
        return 0

    @property
    def mlp_gradients(self) -> int:
        """Gradients in the backward of the MLP: of its first matrices' outputs, of experts' rows
        and of the output. Simple operations put rows in order and weigh them, which has three
        copies of all rows."""
        if self.own is not None:
            return round(self.tokens * self.own.gradients) + self.stream
        gradients = 2 * self.mlp + self.routed
        if self.composed:
            gradients = max(gradients, 3 * self.routed)
        return gradients + self.stream

    def kept(self, mode: str, part: str | None = None) -> int:
        """Returns the bytes that a mode of recomputation keeps, in all parts or in one."""
        return sum(
            entry.size
            for entry in self.entries
            if mode in entry.kept_by and part in (None, entry.part)
        )

    def recomputed(self, mode: str) -> int:
        """Returns the bytes that recomputation in a mode adds to what forward kept."""
        added = sum(
            entry.size
            for entry in self.entries
            if "none" in entry.kept_by and mode not in entry.kept_by
        )
        return added - sum(entry.spared for entry in self.entries if mode in entry.kept_by)
