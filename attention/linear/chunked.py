"""The recurrence of linear attention over segments of any lengths, a chunk of tokens at a time, in plain torch.

Inside a chunk everything is matrix products; the state goes from chunk to chunk, in all segments at once. The state S [k_dim,
v_dim] of a head, and the output o, with decay g ≤ 0:

    S_t = (I - β_t k_t k_tᵀ) exp(g_t) S_{t-1} + β_t k_t v_tᵀ    gated delta rule (Yang et al., 2025)
    S_t = exp(g_t) S_{t-1} + k_t v_tᵀ                           without β: Mamba-2 (Dao and Gu, 2024)
    o_t = S_tᵀ q_t

The delta rule of a chunk is solved as one triangular system (Yang et al., 2024, "UT transform").
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from longctx.attention.segment_builder import row_index

CHUNK = 64
"""Largest number of tokens per chunk."""


@dataclass(frozen=True)
class Chunks:
    """Segments of given lengths, one after the other, cut into chunks of `size` tokens, the last of each filled up.

    Attributes:
        lengths: tokens of each segment.
        size: tokens per chunk.
        active: number of segments that have a first, second, .. chunk. All first chunks come first, then all second ones, ..,
            each in the order of `order`.
        order, original: index tensors that sort segments by their number of chunks, descending, and back.
        gathered: row of every place of the chunks; the row after the last one fills up.
        outputs: place of every row.
    """

    lengths: tuple[int, ...]
    size: int
    active: tuple[int, ...]
    order: torch.Tensor
    original: torch.Tensor
    gathered: torch.Tensor
    outputs: torch.Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str) -> "Chunks":
        size = min(CHUNK, 1 << (max(lengths) - 1).bit_length())
        starts = list(accumulate(lengths, initial=0))
        filler, counts = starts[-1], [-(-length // size) for length in lengths]
        order = sorted(range(len(lengths)), key=lambda segment: -counts[segment])
        gathered: list[range] = []
        places: list[list[range]] = [[] for _ in lengths]
        active = [sum(count > step for count in counts) for step in range(max(counts))]
        for step, several in enumerate(active):
            first = sum(active[:step])
            for number, segment in enumerate(order[:several]):
                tokens = min(size, lengths[segment] - step * size)
                row, place = starts[segment] + step * size, (first + number) * size
                gathered += [range(row, row + tokens), *[range(filler, filler + 1)] * (size - tokens)]
                places[segment].append(range(place, place + tokens))
        return cls(
            tuple(lengths),
            size,
            tuple(active),
            torch.tensor(order, device=device),
            torch.tensor(sorted(range(len(order)), key=order.__getitem__), device=device),
            row_index(gathered, device),
            row_index([part for parts in places for part in parts], device),
        )

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """Returns rows [rows, heads, ..] as chunks [chunks, heads, size, ..]."""
        filled = torch.cat([x, x.new_zeros(1, *x.shape[1:])]).index_select(0, self.gathered)
        parts: torch.Tensor = filled.unflatten(0, (-1, self.size))
        return parts.transpose(1, 2)


def scan_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor | None,
    initial: torch.Tensor,
    chunks: Chunks,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the outputs [rows, heads, v_dim] and the state at the end of every segment [segments, heads, k_dim, v_dim].

    Args:
        q, k: [rows, heads, k_dim], float32 or float64, like all tensors.
        v: [rows, heads, v_dim].
        decay, beta: [rows, heads]; no beta: no delta rule.
        initial: state before every segment, as the result.
        chunks: the segments.
    """
    q, k, v, decay = map(chunks.split, (q, k, v, decay))
    total = decay.cumsum(-1)
    # Sums of the decays between two tokens: differences of their cumulative sums would lose digits.
    later = torch.ones(chunks.size, chunks.size, dtype=torch.bool, device=q.device).triu(1)
    sums = decay[..., None].expand(*decay.shape, chunks.size).masked_fill(~later.mT, 0).cumsum(-2)
    between = sums.masked_fill(later, -torch.inf).exp()
    scores = (q @ k.mT) * between
    reads, writes = q * total.exp()[..., None], k * between[..., -1, :, None]
    kept = total[..., -1].exp()[..., None, None]
    seen: torch.Tensor | None = None
    if beta is not None:
        factor = chunks.split(beta)[..., None]
        system = (factor * k @ k.mT) * between
        right = torch.cat([factor * v, factor * k * total.exp()[..., None]], dim=-1)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        v, seen = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    state, ended, outputs, first = initial.index_select(0, chunks.order), [], [], 0
    for several in chunks.active:
        now = slice(first, first + several)
        if several < len(state):
            ended.append(state[several:])
            state = state[:several]
        new = v[now] if seen is None else v[now] - seen[now] @ state
        outputs.append(reads[now] @ state + scores[now] @ new)
        state = kept[now] * state + writes[now].mT @ new
        first += several
    out = torch.cat(outputs).transpose(1, 2).flatten(0, 1).index_select(0, chunks.outputs)
    return out, torch.cat([state, *reversed(ended)]).index_select(0, chunks.original)
