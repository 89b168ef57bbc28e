"""Settings of the search of mode auto: the number and kinds of ring placements tried. Any change
changes plans."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class SearchSettings:
    """Settings of the search. Unless noted otherwise, more values sometimes find better plans and
    make planning slower.

    Blocks:
        blocks: ranks of a block that are possible, coarse to fine.
        first_block: largest block of the first plan: a node, as rings over two nodes cost most.
        finer_gap: gap from the best plan up to which finer blocks follow.
        good_gap: gap from the lower bound at which the search ends.

    Placements with one time limit for all documents:
        shares: limits, in 32nds of the time of evenly spread work. Descending: the highest limits
            give the least work, which often makes it unnecessary to place the others.
        short: documents stay in one slot if they take less than this share of the even time and at
            most half the token budget. A lower value searches degrees for more documents and makes
            tables larger.
        tight: share of the token budget from which one more micro-batch is searched as thoroughly
            as the minimum. A lower value does this more often, which about doubles the time.
        promising: number of best placements tried with one more micro-batch if the token budget is
            not tight.

    Placements with a limit for each micro-batch:
        several: number of micro-batches from which they are tried.
        prices: values of room for short documents, in 32nds; one shortest path per value.
        price_gap: gap of an estimate from the best one so far from which no lower price is tried.
        good_own_gap: gap of their estimate from evenly spread work up to which only they are used;
            0: never.
        many: number of micro-batches from which only they are used if the longest document is too
            long for even micro-batches. A higher value also tries the others, which is slowest with
            many micro-batches.

    Plans:
        filled: number of best placements, of each kind and number of micro-batches, that are filled
            with the other documents.
        finer_shares: shares of the mean time and of the token budget up to which documents take
            half a block, a quarter, … one rank. A higher share splits fewer documents, which are
            then less even.
        together_every: number of micro-batches for each that short documents have to themselves.
        evened_early: maximum number of rounds in which documents on parts of a block are balanced
            before shorter ones are placed.
        evened: number of best plans that are balanced and number of rounds, in turn.
        compared: number of balanced plans that are compared with the rounds of their exchange.
        same_gap: gap up to which two plans count as equally fast, and the one with fewer splits is
            chosen.

    Whole documents:
        whole_gap: share of time that a plan with fewer splits may take more.
        whole_tries: maximum number of plans with fewer splits that are tried.
        whole_rounds: maximum number of rounds in which each is balanced.
        few: documents · ranks up to which all degrees are tried.
        few_gap: share of time that such a plan, if it splits fewer documents, may take more.

    Plans for wrong rates (`hedge.py`):
        hedge_shares: limits as in `shares`, one plan for each: below 32 rings leave room for short
            documents on their ranks.
    """

    blocks: Sequence[int] = (32, 16, 8, 4, 2, 1)
    first_block: int = 8
    finer_gap: float = 0.002
    good_gap: float = 0.003

    shares: Sequence[int] = range(44, 10, -2)
    short: float = 0.15
    tight: float = 0.9
    promising: int = 2

    several: int = 5
    prices: Sequence[int] = (*range(32, 23, -1), 22, 19, 16, 8, 0)
    price_gap: float = 0.005
    good_own_gap: float = 0.02
    many: int = 12

    filled: int = 3
    finer_shares: Sequence[float] = (1 / 32, 1 / 8)
    together_every: int = 6
    evened_early: int = 16
    evened: Sequence[tuple[int, int]] = ((2, 8), (1, 24), (1, 48))
    compared: int = 4
    same_gap: float = 0.002

    whole_gap: float = 0.003
    whole_tries: int = 6
    whole_rounds: int = 48
    few: int = 128
    few_gap: float = 0.01

    hedge_shares: Sequence[int] = (28, 20, 14, 10)


DEFAULT = SearchSettings()
LARGE_EFFORT = 1 << 19
"""Documents · ranks from which a step is large."""
LARGE = replace(
    DEFAULT,
    good_gap=0.0175,
    good_own_gap=0.015,
    filled=2,
    together_every=3,
    whole_gap=0.002,
    whole_tries=4,
    hedge_shares=(20, 14),
)
"""For large steps, which take seconds to plan."""
HUGE_EFFORT = 1 << 23
"""Documents · ranks from which a step is huge."""
HUGE = replace(LARGE, filled=1, good_gap=0.025)
"""For huge steps: their first plan is mostly good enough, and each further one takes seconds."""


PIPELINED = replace(DEFAULT, finer_gap=math.inf)
"""For pipelines, whose bubble rewards even micro-batches, of blocks of any size."""


def settings_for(documents: int, ranks: int, pipelined: bool) -> SearchSettings:
    """Returns the settings for a step of this size, in a pipeline or not."""
    if documents * ranks >= HUGE_EFFORT:
        return HUGE
    if documents * ranks >= LARGE_EFFORT:
        return LARGE
    if pipelined:
        return PIPELINED
    return DEFAULT
