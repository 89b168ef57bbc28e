"""Linear attention over documents that are split over ranks.

The state at the end of a segment is an affine function of the state S before it: M S + B, with M
[k_dim, k_dim] per head (a number without delta rule), and so is every output: o + W S. Each rank
computes M, B, W and o of its segments at once, all ranks of a ring exchange M and B, and each
combines those before its segments to their initial states S. This costs one message per pair of
ranks and layer, however many segments; autograd runs the same in reverse.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch

from longctx.attention.host_to_device import copy_to
from longctx.attention.linear.chunked import Chunks, scan_chunks
from longctx.attention.linear.fused import dtype_of, scan_fused
from longctx.attention.linear.segments import (
    Messages,
    RankSegment,
    RankSegments,
    before,
    carried_rows,
    state_messages,
)
from longctx.attention.linear.sending import MakeExchange, receive
from longctx.attention.segment_builder import RowSet, row_index

Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]
"""q, k, v, decay and beta of some rows."""


@dataclass(frozen=True)
class Group:
    """Some segments of a buffer: their rows, lengths and bounds, on the device and on the CPU."""

    segments: tuple[RankSegment, ...]
    rows: RowSet
    lengths: tuple[int, ...]
    bounds: tuple[torch.Tensor, torch.Tensor]

    @cached_property
    def chunks(self) -> Chunks:
        return Chunks.of(self.lengths, self.bounds[0].device)

    @classmethod
    def of(cls, segments: list[RankSegment], device: torch.device | str) -> "Group | None":
        if not segments:
            return None
        ranges = [segment.rows for segment in segments]
        lengths = tuple(map(len, ranges))
        bounds = torch.tensor([0, *accumulate(lengths)])
        return cls(
            tuple(segments), RowSet.of(ranges, device), lengths, (copy_to(bounds, device), bounds)
        )

    def run(
        self, tensors: Given, fused: torch.dtype | None, initial: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the outputs of its rows, and the states at the ends of its segments; initial
        states are zero if not given.

        `fused`: see `dtype_of`.
        """
        q, k, v, decay, beta = tensors
        if fused is not None and beta is not None:
            return scan_fused(q, k, v, decay, beta, initial, self.bounds, fused)
        if initial is None:
            initial = v.new_zeros(len(self.segments), *v.shape[1:2], k.shape[2], v.shape[2])
        return scan_chunks(q, k, v, decay, beta, initial, self.chunks)

    def split(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Returns the rows of every segment."""
        return list(x.split(self.lengths))


@dataclass(frozen=True)
class Scan:
    """The segments of a buffer for linear attention.

    Attributes:
        first: segments at the start of a document, with a state of zero before them.
        later: the others.
        order: index tensor from [rows of first; rows of later] to the rows of the buffer; None:
            they are in order.
        carried: number in [first; later] of every segment that others follow, whose state is sent
            or used here.
        messages: the exchange of states; items are (document, place).
        before: for each later segment, the rows of the states before it in [own; received], in the
            order of its path.
    """

    first: Group | None
    later: Group | None
    order: torch.Tensor | None
    carried: torch.Tensor
    messages: Messages
    before: tuple[tuple[int, ...], ...]

    @classmethod
    def build(cls, segments: RankSegments, device: torch.device | str) -> "Scan":
        """Builds the scan; index tensors are on `device`."""
        first = [segment for segment in segments.own if not segment.place]
        later = [segment for segment in segments.own if segment.place]
        ordered = first + later
        order = None
        if first and later:
            rows = row_index([segment.rows for segment in ordered], "cpu")
            order = copy_to(torch.argsort(rows), device)
        messages, states_held = state_messages(segments, device), carried_rows(segments)
        states = states_held | {
            item: len(states_held) + row for item, row in messages.received.items()
        }
        numbers = {
            (segment.document, segment.place): number for number, segment in enumerate(ordered)
        }
        carried = copy_to(
            torch.tensor([numbers[item] for item in states_held], dtype=torch.int64), device
        )
        paths = (before(segments.chains[segment.document], segment.place) for segment in later)
        rows_before = (
            tuple(states[s.document, place] for place in path)
            for s, path in zip(later, paths, strict=True)
        )
        return cls(
            Group.of(first, device),
            Group.of(later, device),
            order,
            carried,
            messages,
            tuple(rows_before),
        )


def linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor | None,
    scan: Scan,
    make: MakeExchange,
) -> torch.Tensor:
    """Returns linear attention [tokens, heads, v_dim] within every document, in the dtype of v.

    Computes and sends states in float32, or in float64 if v is float64; see also `fused`.

    Args:
        q, k: [tokens, heads, k_dim]; scaled, and normalized if the model does so.
        v: [tokens, heads, v_dim].
        decay: [tokens, heads], logarithm of the factor of the state at every token, at most 0; or
            [tokens, heads, k_dim]: one for each of the state's rows.
        beta: [tokens, heads], strength of the delta rule; None: no delta rule.
        scan: the segments.
        make: makes the exchange of a pass.
    """
    if not len(q):
        return v
    wide = torch.promote_types(v.dtype, torch.float32)
    decay = decay if decay.dim() == 3 else decay[..., None]
    kind = q.device.type
    # Meta has none.
    with (
        torch.autocast(kind, enabled=False)
        if torch.amp.is_autocast_available(kind)
        else nullcontext()
    ):
        fused = dtype_of(v, k.shape[2], beta)
        return _attend(_each(lambda x: x.to(wide), (q, k, v, decay, beta)), scan, make, fused).to(
            v.dtype
        )


def _each(function: Callable[[torch.Tensor], torch.Tensor], tensors: Given) -> Given:
    q, k, v, decay, beta = tensors
    return (
        function(q),
        function(k),
        function(v),
        function(decay),
        None if beta is None else function(beta),
    )


def _attend(
    tensors: Given, scan: Scan, make: MakeExchange, fused: torch.dtype | None
) -> torch.Tensor:
    q, k, _, decay, beta = tensors
    outs: list[torch.Tensor] = []
    ends: list[torch.Tensor] = []
    transitions: list[torch.Tensor] = []
    reach = q  # replaced if there are later segments, which alone use it
    if scan.first is not None:
        out, end = scan.first.run(_each(scan.first.rows.read, tensors), fused)
        outs, ends = [out], [end]
        transitions = [
            end.new_zeros(
                *end.shape[:2], *((k.shape[2],) * 2 if beta is not None else (decay.shape[2], 1))
            )
        ]
    if scan.later is not None:
        out, reach, end, transition = _affine(
            scan.later, _each(scan.later.rows.read, tensors), fused
        )
        outs, ends, transitions = [*outs, out], [*ends, end], [*transitions, transition]
    if len(scan.carried):
        parts = [torch.cat(each).index_select(0, scan.carried) for each in (transitions, ends)]
    else:
        parts = [each[0][:0] for each in (transitions, ends)]
    shapes = [part.shape[1:] for part in parts]
    states, outs[0], received = receive(
        torch.cat([part.flatten(1) for part in parts], 1), outs[0], scan.messages.hop, make
    )
    if scan.later is not None:
        table = torch.cat([states, received]).split([shape.numel() for shape in shapes], dim=1)
        starts = _combine(
            scan, *(each.unflatten(1, shape) for each, shape in zip(table, shapes, strict=True))
        )
        begun = [
            torch.einsum("thk,hkv->thv", *each)
            for each in zip(scan.later.split(reach), starts, strict=True)
        ]
        outs[-1] = outs[-1] + torch.cat(begun)
    return outs[0] if scan.order is None else torch.cat(outs).index_select(0, scan.order)


def _affine(
    group: Group, tensors: Given, fused: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns o [rows, heads, v_dim], W [rows, heads, k_dim], B [segments, heads, k_dim, v_dim] and
    M of each segment.

    M is [segments, heads, k_dim, k_dim], or without delta rule its diagonal, see `affine.Maps`.
    """
    q, k, v, decay, beta = tensors
    if beta is None:
        totals = [part.cumsum(0) for part in group.split(decay)]
        out, end = group.run(tensors, fused)
        return (
            out,
            q * torch.cat(totals).exp(),
            end,
            torch.stack([total[-1] for total in totals]).exp()[..., None],
        )
    # W and M are the output and the state of values of zero after a state of one.
    k_dim = k.shape[2]
    one = torch.eye(k_dim, dtype=q.dtype, device=q.device).expand(
        len(group.segments), v.shape[1], -1, -1
    )
    out, end = group.run(
        tensors, fused, torch.cat([one, one.new_zeros(*one.shape[:3], v.shape[2])], dim=-1)
    )
    return out[..., k_dim:], out[..., :k_dim], end[..., k_dim:], end[..., :k_dim]


def _combine(scan: Scan, transitions: torch.Tensor, ends: torch.Tensor) -> list[torch.Tensor]:
    """Returns the state before every later segment, from M and B of the segments before it."""
    assert scan.later is not None
    moves, added = transitions.unbind(), ends.unbind()
    after: dict[int, torch.Tensor] = {}  # state after the segment of a row
    for rows in scan.before:
        after.setdefault(rows[0], added[rows[0]])
        for previous, row in pairwise(rows):
            if row not in after:
                move, state = moves[row], after[previous]
                after[row] = added[row] + (move * state if move.shape[-1] == 1 else move @ state)
    return [after[rows[-1]] for rows in scan.before]
