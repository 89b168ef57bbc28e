"""States along chains of affine maps in many segments at once, with few dependent steps.

A map turns the state S [k, v] before it into the one after it, with the matrices of a chunk of the
delta rule as factors:

    new = values + right S    S' = move S + added + leftᵀ new

Segments are cut into lanes of up to 16 maps. The maps of every lane but a segment's last are
combined to one, the state before each lane follows from the combined maps, by the same scan, and
then all lanes go through their maps side by side: the number of dependent steps grows with the
logarithm of the longest segment (a blocked prefix sum; Blelloch, 1990). Combining costs about as
much as going through, and segments of one lane go without. Backward is the same scan from the end:
`right` and `left` change places, and gradients of the states and of `new` are what is added.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from longctx.attention.host_to_device import copy_to

LANE = 16
"""Largest number of maps in a lane."""


@dataclass(frozen=True)
class Lanes:
    """The maps of segments of given numbers of maps, one segment after the other, cut into lanes.

    Attributes:
        active: number of lanes that have a first, second, .. map. The first maps of all lanes come
            first, then the second ones.
        carried: number of lanes that another lane of their segment follows; they come first, in the
            order of the segments.
        gathered, places: map of every place in that order, and place of every map.
        mirror: map of every map if each segment is reversed.
        begins: row of the state before every lane, in [states before the combined maps; states
            after them], or in the states before the segments if each is one lane.
        last: last lane of every segment.
        upper: the lanes of the combined maps; None: every segment is one lane.
    """

    active: tuple[int, ...]
    carried: int
    gathered: Tensor
    places: Tensor
    mirror: Tensor
    begins: Tensor
    last: Tensor
    upper: "Lanes | None"

    @classmethod
    def of(cls, counts: Sequence[int], device: torch.device | str, size: int = LANE) -> "Lanes":
        """Cuts segments of `counts` maps, also of none, into lanes of `size` maps; index tensors
        are on `device`."""
        starts = list(accumulate(counts, initial=0))
        carried = list[range]()
        last = list[range]()
        for start, count in zip(starts, counts, strict=False):
            cuts = range(start, start + max(1, count), size)
            carried += [range(cut, cut + size) for cut in cuts[:-1]]
            last.append(range(cuts[-1], start + count))
        order = sorted(range(len(last)), key=lambda segment: -len(last[segment]))
        lanes = [*carried, *(last[segment] for segment in order)]
        sizes = list(map(len, lanes))
        active = [sum(length > step for length in sizes) for step in range(sizes[0])]
        gathered = [lane[step] for step, several in enumerate(active) for lane in lanes[:several]]
        mirror = list[int]()
        for first, stop in pairwise(starts):
            mirror += reversed(range(first, stop))
        upper = None
        if carried:
            upper = cls.of([(max(1, count) - 1) // size for count in counts], device, size)

        def index(numbers: Sequence[int]) -> Tensor:
            return copy_to(torch.tensor(numbers, dtype=torch.int64), device)

        return cls(
            active=tuple(active),
            carried=len(carried),
            gathered=index(gathered),
            places=index(sorted(range(len(gathered)), key=gathered.__getitem__)),
            mirror=index(mirror),
            begins=index([*range(len(carried)), *(len(carried) + segment for segment in order)]),
            last=index([len(carried) + order.index(segment) for segment in range(len(order))]),
            upper=upper,
        )

    def mirrored(self) -> "Lanes":
        """Returns the lanes of the same segments, each from its end."""
        return replace(self, gathered=self.mirror[self.gathered], places=self.places[self.mirror])

    def run(self, maps: "Maps", initial: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Returns what `scan` does, without gradients."""
        heads = maps.move.shape[1]
        of_lanes = maps.each(lambda x: x.index_select(0, self.gathered).flatten(0, 1))
        steps = of_lanes.split([n * heads for n in self.active])
        if self.upper is not None:
            carried = self.carried * heads
            combined = _combine([step.each(lambda x: x[:carried]) for step in steps])
            upper_maps = combined.each(lambda x: x.unflatten(0, (-1, heads)))
            before, _, ends = self.upper.run(upper_maps, initial)
            initial = torch.cat([before, ends])
        state = initial.index_select(0, self.begins).flatten(0, 1)
        ended: list[Tensor] = []
        passed: list[Tensor] = [state[:0]]
        news: list[Tensor] = []
        for step in steps:
            if len(step.move) < len(state):
                ended.append(state[len(step.move) :])
                state = state[: len(step.move)]
            passed.append(state)
            state, new = _apply(step, state)
            if new is not None:
                news.append(new)

        def of_maps(parts: list[Tensor]) -> Tensor:
            in_order = torch.cat(parts).unflatten(0, (-1, heads))
            result: Tensor = in_order.index_select(0, self.places)
            return result

        end = torch.cat([state, *reversed(ended)]).unflatten(0, (-1, heads))
        new = of_maps(news) if news else None
        return of_maps(passed), new, end.index_select(0, self.last)


class Maps(NamedTuple):
    """Affine maps, see above.

    Attributes:
        move: diagonal of a matrix, [maps, heads, k or 1, 1]; of combined maps also the matrix
            [maps, heads, k, k].
        added: [maps, heads, k, v], like `values` zero in columns that it does not have, before the
            columns that it has.
        left, right: [maps, heads, rows, k].
        values: [maps, heads, rows, v].
    """

    move: Tensor
    added: Tensor | None = None
    left: Tensor | None = None
    right: Tensor | None = None
    values: Tensor | None = None

    def each(self, function: Callable[[Tensor], Tensor]) -> "Maps":
        parts = [None if x is None else function(x) for x in self]
        return Maps._make(parts)

    def split(self, sizes: list[int]) -> "list[Maps]":
        columns = [repeat(None) if x is None else x.split(sizes) for x in self]
        return list(map(Maps._make, zip(*columns, strict=False)))


def scan(maps: Maps, initial: Tensor, lanes: Lanes) -> tuple[Tensor, Tensor | None, Tensor]:
    """Returns the state before every map, `new` of every map, and the state after every segment
    [segments, heads, k, v].

    `initial` is the state before every segment; `move` of the maps must be diagonals.
    """
    out: tuple[Tensor, Tensor | None, Tensor]
    out = _Scan.apply(*maps, initial, lanes)  # type: ignore[no-untyped-call]  # torch's own
    return out


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor | None, Tensor]:
        *parts, initial, lanes = arguments
        maps = Maps._make(parts)
        before, new, ends = lanes.run(maps, initial)
        ctx.save_for_backward(maps.move, maps.left, maps.right, before, new)
        ctx.lanes = lanes
        ctx.added_columns = None if maps.added is None else maps.added.shape[-1]
        ctx.value_columns = None if maps.values is None else maps.values.shape[-1]
        return before, new, ends

    @staticmethod
    def backward(ctx: Any, dbefore: Tensor, dnew: Tensor | None, dends: Tensor) -> tuple[Any, ...]:
        move, left, right, before, new = ctx.saved_tensors
        backwards = Maps(move, added=dbefore, left=right, right=left, values=dnew)
        dafter, dnew_values, dinitial = ctx.lanes.mirrored().run(backwards, dends)
        dmove = (dafter * before).sum(-1, keepdim=True).sum_to_size(move.shape)
        dleft = dright = None
        if new is not None:
            dleft = new @ dafter.mT
            dright = dnew_values @ before.mT
        dadded = _last_columns(dafter, ctx.added_columns)
        dvalues = _last_columns(dnew_values, ctx.value_columns)
        return dmove, dadded, dleft, dright, dvalues, dinitial, None


def _last_columns(x: Tensor | None, columns: int | None) -> Tensor | None:
    """Returns the gradient of a tensor of so many columns; None if there is no such tensor."""
    return None if x is None or columns is None else x[..., -columns:]


def _combine(steps: list[Maps]) -> Maps:
    """Returns the maps that do one step after the other."""
    first, *others = steps
    if first.left is None:
        assert first.added is not None
        move, added = first.move, first.added
        for step in others:
            move = step.move * move if move.shape[-1] == 1 else step.move @ move
            added, _ = _apply(step, added)
        return Maps(move, added)
    assert first.values is not None
    k_dim, columns = first.left.shape[-1], first.values.shape[-1]
    state = torch.eye(
        k_dim, k_dim + columns, dtype=first.left.dtype, device=first.left.device
    ).expand(len(first.move), -1, -1)
    for step in steps:
        state, _ = _apply(step, state)
    return Maps(state[..., :k_dim], state[..., k_dim:])


def _apply(step: Maps, state: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns the states after maps, and their `new`."""
    moved = _plus(step.added, step.move, state)
    if step.left is None or step.right is None:
        return moved, None
    new = _plus(step.values, step.right, state)
    return torch.baddbmm(moved, step.left.mT, new), new


def _plus(added: Tensor | None, move: Tensor, state: Tensor) -> Tensor:
    """Returns `added`, if any, in the last columns, plus move · state."""
    diagonal = move.shape[-1] == 1
    if added is None:
        return move * state if diagonal else move @ state
    # Not in place: checkpoints may keep what operators return.
    if added.shape[-1] < state.shape[-1]:
        added = F.pad(added, (state.shape[-1] - added.shape[-1], 0))
    return torch.addcmul(added, move, state) if diagonal else torch.baddbmm(added, move, state)
