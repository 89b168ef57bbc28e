"""Linear attention over documents that are split over ranks.

The state at the end of a segment is an affine function of the state S before it: M S + B, with M
[k_dim, k_dim] per head (a number without delta rule), and so is every output: o + W S. Each rank
computes M, B, W and o of its segments at once, all ranks of a ring exchange M and B, and each
combines those before its segments to their initial states S. This costs one message per pair of
ranks and layer, however many segments; autograd runs the same in reverse.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

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

Given = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""q, k, v, decay and beta of some rows."""


@dataclass(frozen=True)
class Group:
    """Some segments of a buffer: their rows, lengths and bounds, on the device and on the CPU."""

    segments: tuple[RankSegment, ...]
    rows: RowSet
    lengths: tuple[int, ...]
    bounds: tuple[Tensor, Tensor]

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
            segments=tuple(segments),
            rows=RowSet.of(ranges, device),
            lengths=lengths,
            bounds=(copy_to(bounds, device), bounds),
        )

    def run(
        self, tensors: Given, fused: torch.dtype | None, initial: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns the outputs of its rows, and the states at the ends of its segments; initial
        states are zero if not given.

        `fused`: see `dtype_of`.
        """
        q, k, v, decay, beta = tensors
        if fused is not None and beta is not None:
            return scan_fused(
                q, k, v, decay=decay, beta=beta, initial=initial, bounds=self.bounds, dtype=fused
            )
        if initial is None:
            initial = v.new_zeros(len(self.segments), v.shape[1], k.shape[2], v.shape[2])
        return scan_chunks(q, k, v, decay=decay, beta=beta, initial=initial, chunks=self.chunks)

    def split(self, x: Tensor) -> list[Tensor]:
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
    order: Tensor | None
    carried: Tensor
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
        messages = state_messages(segments, device)
        states = carried_rows(segments)
        numbers = {(segment.document, segment.place): i for i, segment in enumerate(ordered)}
        carried = torch.tensor([numbers[item] for item in states], dtype=torch.int64)
        own_states = len(states)
        for item, row in messages.received.items():
            states[item] = own_states + row
        rows_before = []
        for segment in later:
            path = before(segments.chains[segment.document], segment.place)
            rows_before.append(tuple(states[segment.document, place] for place in path))
        return cls(
            first=Group.of(first, device),
            later=Group.of(later, device),
            order=order,
            carried=copy_to(carried, device),
            messages=messages,
            before=tuple(rows_before),
        )


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    scan: Scan,
    make: MakeExchange,
) -> Tensor:
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
    fused = dtype_of(v, k.shape[2], beta)
    with _without_autocast(q.device.type):
        tensors = _each(lambda x: x.to(wide), (q, k, v, decay, beta))
        return _attend(tensors, scan, make, fused).to(v.dtype)


def _without_autocast(device: str) -> AbstractContextManager[object]:
    """Switches autocast off, which device meta does not have."""
    if not torch.amp.is_autocast_available(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)


def _each(function: Callable[[Tensor], Tensor], tensors: Given) -> Given:
    q, k, v, decay, beta = tensors
    beta = None if beta is None else function(beta)
    return function(q), function(k), function(v), function(decay), beta


def _attend(tensors: Given, scan: Scan, make: MakeExchange, fused: torch.dtype | None) -> Tensor:
    q, k, _, decay, beta = tensors
    outs: list[Tensor] = []
    ends: list[Tensor] = []
    transitions: list[Tensor] = []
    reach = q  # replaced if there are later segments, which alone use it
    if scan.first is not None:
        out, end = scan.first.run(_each(scan.first.rows.read, tensors), fused)
        outs.append(out)
        ends.append(end)
        size = (k.shape[2], k.shape[2]) if beta is not None else (decay.shape[2], 1)
        transitions.append(end.new_zeros(end.shape[:2] + size))
    if scan.later is not None:
        given = _each(scan.later.rows.read, tensors)
        out, reach, end, transition = _affine(scan.later, given, fused)
        outs.append(out)
        ends.append(end)
        transitions.append(transition)
    moves, added = _carried(scan, transitions), _carried(scan, ends)
    move_shape, added_shape = moves.shape[1:], added.shape[1:]
    packed = torch.cat([moves.flatten(1), added.flatten(1)], 1)
    states, outs[0], received = receive(packed, outs[0], scan.messages.hop, make)
    if scan.later is not None:
        table = torch.cat([states, received])
        moves, added = table.split([move_shape.numel(), added_shape.numel()], dim=1)
        starts = _combine(scan, moves.unflatten(1, move_shape), added.unflatten(1, added_shape))
        begun = [
            torch.einsum("thk,hkv->thv", rows, start)
            for rows, start in zip(scan.later.split(reach), starts, strict=True)
        ]
        outs[-1] = outs[-1] + torch.cat(begun)
    return outs[0] if scan.order is None else torch.cat(outs).index_select(0, scan.order)


def _carried(scan: Scan, parts: list[Tensor]) -> Tensor:
    """Returns the rows of [first; later] segments that other segments follow."""
    if not len(scan.carried):
        return parts[0][:0]
    return torch.cat(parts).index_select(0, scan.carried)


def _affine(
    group: Group, tensors: Given, fused: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns o [rows, heads, v_dim], W [rows, heads, k_dim], B [segments, heads, k_dim, v_dim] and
    M of each segment.

    M is [segments, heads, k_dim, k_dim], or without delta rule its diagonal, see `affine.Maps`.
    """
    q, k, v, decay, beta = tensors
    if beta is None:
        totals = [part.cumsum(0) for part in group.split(decay)]
        out, end = group.run(tensors, fused)
        reach = q * torch.cat(totals).exp()
        return out, reach, end, torch.stack([total[-1] for total in totals]).exp()[..., None]
    # W and M are the output and the state of values of zero after a state of one.
    k_dim, v_dim = k.shape[2], v.shape[2]
    one = torch.eye(k_dim, dtype=q.dtype, device=q.device)
    one = one.expand(len(group.segments), v.shape[1], k_dim, k_dim)
    zero = one.new_zeros(len(group.segments), v.shape[1], k_dim, v_dim)
    out, end = group.run(tensors, fused, torch.cat([one, zero], dim=-1))
    return out[..., k_dim:], out[..., :k_dim], end[..., k_dim:], end[..., :k_dim]


def _combine(scan: Scan, transitions: Tensor, ends: Tensor) -> list[Tensor]:
    """Returns the state before every later segment, from M and B of the segments before it."""
    assert scan.later is not None
    moves, added = transitions.unbind(), ends.unbind()
    after: dict[int, Tensor] = {}  # state after the segment of a row
    for rows in scan.before:
        after.setdefault(rows[0], added[rows[0]])
        for previous, row in pairwise(rows):
            if row not in after:
                move, state = moves[row], after[previous]
                moved = move * state if move.shape[-1] == 1 else move @ state
                after[row] = added[row] + moved
    return [after[rows[-1]] for rows in scan.before]
