"""Where hidden states are wrong: for which tokens, by a table of words and what holds for them
alone."""

from collections.abc import Callable, Iterator

from .facts import Facts
from .finding import Finding
from .off import ATTENTION

HIDDEN = "hidden states are wrong"
ORDER = "hidden states of all tokens are wrong, also of first ones"
SCORES = "attention is wrong for all tokens but first ones"
EXCHANGE = "attention is wrong where keys of other ranks are needed"
SPLIT = "attention is wrong in documents that are split over ranks"
EDGE = "attention is wrong from an edge between ranks on"
LATER = "attention is wrong in all documents of a row but the first"
REACH = "attention is wrong from a place in documents on"
PLACES: dict[str, Callable[[Facts, int], bool]] = {
    ORDER: lambda f, n: True,
    SCORES: lambda f, n: f.tokens.place[n] > 0,
    EXCHANGE: lambda f, n: f.split(range(n - f.tokens.place[n], n + 1)),
    SPLIT: lambda f, n: f.split(f.tokens.of(f.tokens.document[n])),
    EDGE: lambda f, n: n >= f.edge,
    LATER: lambda f, n: f.tokens.document[n] != f.tokens.document[f.of_row.get(n, n)],
    REACH: lambda f, n: f.tokens.place[n] >= f.reach,
}
"""Where hidden states are of no context: for these tokens alone, of all ranks or of one."""


def wrong_places(facts: Facts) -> Iterator[Finding]:
    """Yields where hidden states are wrong, or what a look at the parts has found as the cause."""
    if not facts.unknown:
        return
    shown = facts.fit.shown
    if shown is not None and shown.cause is not None:
        yield Finding(shown.cause.kind, shown.cause.details)
        return
    tokens = facts.tokens
    ranks = range(facts.record.ranks) if facts.record.ranks > 1 else ()
    first = (
        f"first at token {tokens.place[min(facts.unknown)]} of document "
        f"{tokens.document[min(facts.unknown)]}"
    )
    part = facts.fit.shown.first_off if facts.fit.shown is not None else ""
    if part:
        first += f", in the {part}"
    every = facts.unknown | facts.known
    if part and not ATTENTION.search(part):
        yield Finding(HIDDEN, f"of {len(facts.unknown)} of {len(every)} tokens, {first}")
        return
    for rank in (None, *ranks):
        held = {number for number in every if rank is None or facts.rank(number) == rank}
        for kind, holds in PLACES.items():
            if {number for number in held if holds(facts, number)} == facts.unknown:
                yield Finding(kind, first if rank is None else f"{first}, on rank {rank}")
                return
    yield Finding(HIDDEN, f"of {len(facts.unknown)} of {len(every)} tokens, {first}")
