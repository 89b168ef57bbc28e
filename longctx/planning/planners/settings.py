"""Settings of the search of mode auto: the number and kinds of ring placements tried. Any change
changes plans."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SearchSettings:
    """Settings of the search. Unless noted otherwise, more values sometimes find better plans and
    make planning slower."""

    blocks: Sequence[int] = (32, 16, 8, 4, 2, 1)
    """Ranks of a block, coarse to fine. Coarse blocks are quick; fine ones lose least by
    splitting."""
    finer_gap: float = 0.002
    """Gap from the fastest plan up to which that of finer blocks is preferred: it splits fewer
    documents, and the cost model counts neither messages nor kernel calls."""
    max_split_loss: float = 0.01
    """Maximum share of time that splitting every document over the ranks of a block may cost."""
    coarsest_of_many: int = 4
    """Maximum ranks of a block where documents are more than `few_per_rank`."""
    few_per_rank: int = 4
    """Maximum number of documents per rank for which coarse blocks are tried."""
    good_gaps: Sequence[tuple[int, float]] = ((0, 0.001), (1 << 18, 0.015))
    """(effort, gap): no finer blocks follow a step of at least this effort (documents · blocks, in
    a pipeline · micro-batches) within this gap of the lower bound."""
    max_effort: int = 1 << 22
    """Maximum effort, unless coarser blocks were not possible."""
    shares: Sequence[int] = range(44, 10, -2)
    """Limits for all documents, in 32nds of the time of evenly spread work. Descending: the highest
    limits give the least work, which often makes it unnecessary to place the others."""
    short: float = 0.3
    """Documents stay on one rank if they take less than this share of the even time and at most
    half the token budget. A lower value searches degrees for more documents and makes tables
    larger."""
    prices: Sequence[float] = (1, 0.75, 0.5, 0.25, 0)
    """Values of room for short documents if every micro-batch has its own limit; one shortest path
    per value."""
    many: int = 12
    """Number of micro-batches from which only placements with one limit per micro-batch are used,
    if any fit. A higher value also tries the others, which is slowest with many micro-batches."""
    tight: float = 0.9
    """Share of the token budget from which one more micro-batch is searched as thoroughly as the
    minimum. A lower value does this more often, which about doubles the time."""
    promising: int = 2
    """Number of best placements tried with one more micro-batch if the token budget is not
    tight."""
    filled: int = 3
    """Number of best placements per number of micro-batches that are filled with the documents of
    degree 1."""
    evened: Sequence[tuple[int, int]] = ((2, 8), (1, 24), (1, 48))
    """Number of best plans that are balanced and number of rounds, in turn: most of the planning
    time of large steps."""

    def good_gap(self, effort: int) -> float:
        """Returns the gap from the lower bound within which no finer blocks follow a step of this
        effort."""
        return max(gap for least, gap in self.good_gaps if effort >= least)


DEFAULT = SearchSettings()
