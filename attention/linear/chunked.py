"""The recurrence of linear attention over segments of any lengths, a chunk of tokens at a time, in
plain torch.

Inside a chunk everything is matrix products, in all chunks at once. Each chunk is an affine map of
the state before it to the state after it, and `affine` scans these maps. The state S [k_dim, v_dim]
of a head, and the output o, with decay g ≤ 0:

    S_t = (I - β_t k_t k_tᵀ) diag(exp(g_t)) S_{t-1} + β_t k_t v_tᵀ    Kimi Delta Attention (2025)
    S_t = (I - β_t k_t k_tᵀ) exp(g_t) S_{t-1} + β_t k_t v_tᵀ          gated delta rule (2025)
    S_t = exp(g_t) S_{t-1} + k_t v_tᵀ                                 Mamba-2 (2024), without β
    o_t = S_tᵀ q_t

The decay g_t is a vector [k_dim] in Kimi Delta Attention, and a number in the gated delta rule
(Yang et al., 2025) and Mamba-2 (Dao and Gu, 2024).

The delta rule of a chunk is solved as one triangular system (Yang et al., 2024, "UT transform").
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from longctx.attention.linear.affine import Lanes, Maps, scan
from longctx.attention.segment_builder import row_index

CHUNK = 64
"""Largest number of tokens per chunk, a power of two."""


@dataclass(frozen=True)
class Chunks:
    """Segments of given lengths, one after the other, cut into chunks of `size` tokens, the last of
    each filled up.

    Attributes:
        lengths: tokens of each segment.
        size: tokens per chunk.
        lanes: the scan over the chunks.
        gathered: row of every place of the chunks; the row after the last one fills up.
        outputs: place of every row.
    """

    lengths: tuple[int, ...]
    size: int
    lanes: Lanes
    gathered: Tensor
    outputs: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str) -> "Chunks":
        size = min(CHUNK, 1 << (max(lengths) - 1).bit_length())
        starts = list(accumulate(lengths, initial=0))
        counts = [-(-length // size) for length in lengths]
        # First place of every segment.
        firsts = [size * count for count in accumulate(counts, initial=0)]
        gathered: list[range] = []
        filling = range(starts[-1], starts[-1] + 1)
        for (start, stop), count in zip(pairwise(starts), counts, strict=True):
            gathered.append(range(start, stop))
            gathered += [filling] * (size * count - (stop - start))
        places = [
            range(first, first + length) for first, length in zip(firsts, lengths, strict=False)
        ]
        return cls(
            lengths=tuple(lengths),
            size=size,
            lanes=Lanes.of(counts, device),
            gathered=row_index(gathered, device),
            outputs=row_index(places, device),
        )

    def split(self, x: Tensor) -> Tensor:
        """Returns rows [rows, heads, ..] as chunks [chunks, heads, size, ..]."""
        zeros = x.new_zeros((1, *x.shape[1:]))
        filled = torch.cat([x, zeros]).index_select(0, self.gathered)
        parts: Tensor = filled.unflatten(0, (-1, self.size))
        return parts.transpose(1, 2)


def scan_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    initial: Tensor,
    chunks: Chunks,
) -> tuple[Tensor, Tensor]:
    """Returns the outputs [rows, heads, columns] and the state at the end of every segment
    [segments, heads, k_dim, columns].

    Args:
        q, k: [rows, heads, k_dim], float32 or float64, like all tensors.
        v: [rows, heads, v_dim].
        decay: [rows, heads, k_dim or 1].
        beta: [rows, heads]; no beta: no delta rule.
        initial: state before every segment, as the result; the last v_dim of its columns belong to
            v, and the others take values of zero.
        chunks: the segments.
    """
    q, k, v, decay = map(chunks.split, (q, k, v, decay))
    total = decay.cumsum(-2)
    writes = k * sums_after(decay).exp()
    move = total[..., -1:, :].mT.exp()
    if beta is None:
        scores = _between(q, k, decay)
        before, _, ends = scan(Maps(move, writes.mT @ v), initial, chunks.lanes)
        new = v
    else:
        factor = chunks.split(beta)[..., None]
        scores, system = _between(torch.stack([q, factor * k]), k, decay)
        right = torch.cat([factor * v, -factor * k * total.exp()], dim=-1)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        values, seen = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
        maps = Maps(move, left=writes, right=seen, values=values)
        before, found, ends = scan(maps, initial, chunks.lanes)
        assert found is not None
        new = found
    out = (q * total.exp()) @ before + scores @ new
    return out.transpose(1, 2).flatten(0, 1).index_select(0, chunks.outputs), ends


def sums_after(decay: Tensor) -> Tensor:
    """Returns the sum of the rows after each row of decay [.., rows, k_dim]."""
    return F.pad(decay[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)


def _between(x: Tensor, k: Tensor, decay: Tensor) -> Tensor:
    """Returns x_i · k_j for j ≤ i, each product decayed by the tokens after j up to i, and zero for
    j > i.

    Decays between two tokens are summed: differences of their cumulative sums would lose digits,
    and factors of their exponentials overflow. With one per channel this takes a level for each
    power of two: between tokens of two neighbouring blocks, the decays up to the border belong to
    k, those after it to x.
    """
    size = x.shape[-2]
    if decay.shape[-1] == 1:
        later = torch.ones(size, size, dtype=torch.bool, device=x.device).triu(1)
        decays = decay.expand((*decay.shape[:-1], size))
        sums = decays.masked_fill(~later.mT, 0).cumsum(-2)
        return (x @ k.mT) * sums.masked_fill(later, -torch.inf).exp()
    blocks = (x * k).sum(-1)[..., None, None]
    half = 1
    while half < size:
        _, after = _halves(x, half)
        before, _ = _halves(k, half)
        first, second = _halves(decay, half)
        across = (after * second.cumsum(-2).exp()) @ (before * sums_after(first).exp()).mT
        above, below = blocks.unflatten(-3, (-1, 2)).unbind(-3)
        upper = torch.cat([above, torch.zeros_like(across)], -1)
        lower = torch.cat([across, below], -1)
        blocks = torch.cat([upper, lower], -2)
        half *= 2
    return blocks[..., 0, :, :]


def _halves(x: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """Returns the first and the second `half` rows of every block of 2 · `half` rows."""
    first, second = x.unflatten(-2, (-1, 2, half)).unbind(-3)
    return first, second
