"""Indexed attention: an indexer selects the keys that each query of a long document sees (DeepSeek
V3.2, §2.1).

Two steps per layer: `gather` brings the index keys of long documents to the ranks that hold their
queries, for the indexer, and `attention` then sees the keys that it selected. Documents of at most
as many tokens as are selected see all their keys: they have no index keys to send, and dense
kernels compute them. Keys and values travel as in ring attention, with its rounds.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from longctx.attention.inputs import AttentionInputError
from longctx.attention.kernels.contract import Computes, KernelRequest
from longctx.attention.kernels.selected import SelectedKernel
from longctx.attention.kernels.sparse import SparseFunctions, SparseKernel
from longctx.attention.ring import RingAttention
from longctx.attention.ring_pass import NO_LAYER, Choose, RingPass
from longctx.attention.ring_schedule import chunks
from longctx.attention.segment_builder import Call
from longctx.attention.segments import Segment
from longctx.planning.layout import Layout, Shard, Span


class LongDocuments:
    """The documents of a micro-batch with more than `most` tokens, the number that is selected.

    Attributes:
        shards: this rank's shards of them, with one round of index keys.
    """

    def __init__(self, ring: RingAttention, most: int) -> None:
        layout = ring.layout
        assert isinstance(layout, Layout)
        if not all(shard.is_sequence for shard in layout.shards):
            raise AttentionInputError(
                "a document holds sequences with a common prefix, but an indexer selects keys by "
                "their place in one sequence: do not merge prefixes"
            )
        long = (shard for shard in layout.shards if shard.length > most)
        self.shards = tuple(replace(shard, rounds=1) for shard in long)
        self.longest = max((shard.length for shard in self.shards), default=0)
        self._ring = RingAttention(
            replace(layout, shards=self.shards),
            group=ring.group,
            ranks_per_node=ring.ranks_per_node,
            device=ring.device,
            exchange=ring.exchange,
            watch=ring.watch,
        )
        self._ring.across = ring.across
        own = torch.zeros(ring.tokens, dtype=torch.int64)
        for shard in layout.shards:
            for rows, (start, stop) in queries_of(shard):
                own[rows.start : rows.stop] = torch.arange(start, stop)
        self._own = own.to(ring.device)
        self._received = _received_positions(ring)

    def gather(
        self,
        keys: Tensor,
        layer: int | None,
    ) -> list[tuple[Shard, Tensor]]:
        """Returns for each long document of this rank the index keys of its tokens [length, width].

        `keys` [tokens, width] are those of this rank's tokens. Those that none of its queries sees
        are 0. All ranks of a document must call it.
        """
        layer = NO_LAYER if layer is None else layer
        nothing = keys[:, :0]
        whole: dict[int, Tensor] = {}
        for shard in self.shards:
            whole[shard.document] = keys.new_zeros(shard.length, keys.shape[1])
            for rows, (start, stop) in queries_of(shard):
                whole[shard.document][start:stop] = keys[rows.start : rows.stop]
        index_pass = RingPass(self._ring, layer, name="index", k=keys, v=nothing)
        with self._ring.watch(f"attention of layer {layer}, index pass"):
            steps = index_pass.steps(keys, nothing, keys[:0], fetch=True)
            next(steps)  # local keys
            for round_, (received, _) in zip(self._ring.schedule.rounds, steps, strict=True):
                assert received is not None
                for document, run in round_.keys:
                    (rows,) = run.rows
                    whole[document][run.start : run.stop] = received[rows.start : rows.stop]
        gathered = []
        for shard in self.shards:
            gathered.append((shard, whole[shard.document]))
        return gathered

    def attention(
        self,
        ring: RingAttention,
        selected: Tensor,
    ) -> RingAttention:
        """Returns attention in which the queries of long documents see only selected keys.

        `ring` is that of this micro-batch. `selected` [tokens, most] are positions in the document
        of each token, in any order; below 0: none. Each query must select a key that it sees.
        """
        choose = partial(self._choose, selected, ring.choose)
        return ring.choosing(choose)

    def sparse_attention(
        self,
        ring: RingAttention,
        selected: Tensor,
        functions: SparseFunctions,
    ) -> RingAttention:
        """Returns the same attention, on latents, by the functions of a package."""

        def choose(_: KernelRequest, call: Call) -> Computes:
            return SparseKernel(
                functions,
                selected,
                self._positions(call),
                longest=self.longest,
                has_selection=self._holds,
            )

        return ring.choosing(choose)

    def _choose(
        self,
        selected: Tensor,
        dense: Choose,
        request: KernelRequest,
        call: Call,
    ) -> Computes:
        """Returns the kernel of a call of ring attention."""
        return SelectedKernel(
            selected,
            self._positions(call),
            longest=self.longest,
            has_selection=self._holds,
            dense=partial(dense, request, call),
        )

    def _positions(self, call: Call) -> Tensor:
        """Returns the positions of a call's keys in their documents."""
        if call.rows is None:
            return self._own
        return self._received[id(call)]

    def _holds(self, segment: Segment) -> bool:
        """Returns whether the queries of a segment belong to a long document."""
        row = segment.q_start
        return any(shard.offset <= row < shard.offset + shard.tokens for shard in self.shards)


def queries_of(shard: Shard) -> list[tuple[range, Span]]:
    """Returns the buffer rows of each run of this rank's tokens of a document, and their
    positions."""
    runs = []
    for start, stop in chunks(shard, shard.ring_index):
        rows = shard.rows(start, stop)
        runs.append((rows, (start, stop)))
    return runs


def _received_positions(ring: RingAttention) -> dict[int, Tensor]:
    """Returns the positions in their documents of the keys of each call on received rows, by the
    call's id."""
    found = {}
    for round_ in ring.schedule.rounds:
        positions = torch.zeros(round_.received_rows, dtype=torch.int64)
        for _, run in round_.keys:
            (rows,) = run.rows
            positions[rows.start : rows.stop] = torch.arange(run.start, run.stop)
        positions = positions.to(ring.device)
        for call in round_.calls:
            assert call.rows is not None
            found[id(call)] = call.rows.read(positions)
    return found
