"""Settings of mode auto's search: how many layouts it looks at, and which. Plans change with any of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SearchSettings:
    """What the search tries. Where nothing else is said, more values find better plans at times, and planning takes longer."""

    shares: Sequence[int] = range(44, 10, -2)
    """Limits for all documents, in 32nds of the time that micro-batches take if all work is spread evenly. Descending: the
    highest give least work, and once these are placed others need not be."""
    lower_shares: Sequence[float] = (1.2, 1.0, 0.8)
    """The same for the documents that come after the longest, where these have micro-batches of their own."""
    waste: Sequence[float] = (1.1, 1.25, math.inf)
    """Work of a document over all its ranks, as a multiple of the least of any degree, that a layout allows. Each is tried with
    each of `shares`."""
    few: int = 4
    """Up to so many documents a rank, layouts in which they share groups of ranks are tried as well."""
    narrowest: Sequence[int] = (1, 2, 4)
    """How many ranks each of these groups has at least; one layout for each."""
    short: float = 0.3
    """Documents that take less of the even time than this, and at most half a token budget, are left on one rank. A lower value
    looks at the degrees of more documents, and tables grow."""
    own_micro_batches: int = 2
    """Most micro-batches that the longest documents have for themselves."""
    own_choices: int = 3
    """How many ways to choose these documents are placed, of all that the closed form compares."""
    prices: Sequence[float] = (1, 0.75, 0.5, 0.25, 0)
    """What room for short documents may be worth where every micro-batch has its own limit; a shortest path for each."""
    many: int = 12
    """From so many micro-batches on, these layouts are taken alone if there are any. A higher value looks at the others too,
    which takes longest where micro-batches are many."""
    tight: float = 0.9
    """Share of the token budget from which one more micro-batch is searched as thoroughly as the fewest. A lower value does so
    more often, which about doubles the time."""
    promising: int = 2
    """How many of the best layouts are tried with one more micro-batch where the tokens leave room for fewer."""
    filled: int = 3
    """How many of the best layouts for each number of micro-batches are filled with the documents of degree 1."""
    evened: Sequence[tuple[int, int]] = ((2, 8), (1, 24), (1, 48))
    """How many of the best plans are evened out, and for how many rounds, in turn: most of the time of large steps."""


DEFAULT = SearchSettings()
