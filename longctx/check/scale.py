"""Faults of scale: a factor that all predictions share, and what it is."""

from collections import Counter
from collections.abc import Iterator

from .facts import Facts
from .finding import Finding

SCALE = "the loss has a wrong scale"


def wrong_scale(facts: Facts, factor: float) -> Iterator[Finding]:
    """Reports a uniform scale other than 1 or the token mean."""
    shown = facts.fit.shown
    if shown is not None and not shown.scaled:
        return
    wanted = len(facts.wanted)
    trained = sum(facts.kept.values()) + sum(facts.extra.values())
    # 1/N for all targets, or for all that is trained.
    if min(abs(factor - 1), abs(trained / wanted - 1)) < facts.same:
        return
    bases = (1.0, wanted * factor / trained)
    causes = [
        words
        for words, value in _known_scales(facts)
        if any(abs(factor / (base * value) - 1) < facts.same for base in bases)
    ]
    if causes:
        yield Finding(SCALE, " or ".join(causes[:3]))
    else:
        yield Finding(SCALE, f"× {factor:.5g}")


def _known_scales(facts: Facts) -> Iterator[tuple[str, float]]:
    """Yields scales that have a cause, the likeliest first, with words for it."""
    wanted = len(facts.wanted)
    ranks = facts.record.ranks
    micro_batches = 1 + max(row.call for row in facts.record.calls)
    counts = {"ranks": ranks, "micro-batches": micro_batches}
    if min(counts.values()) > 1:
        counts["ranks × micro-batches"] = ranks * micro_batches
    several = [(name, count) for name, count in counts.items() if count > 1]
    for name, count in several:
        yield f"× {count}, the number of {name}", float(count)
    for name, count in several:
        yield f"÷ {count}, the number of {name}", 1 / count
    yield "a sum and no mean", float(wanted)
    if facts.missing:
        yield "divided by the targets of missing documents, too", wanted / facts.all_wanted
    held = sum(facts.count.values())
    divisors = {"all tokens": sum(len(row.ids) for row in facts.record.calls)}
    divisors["the tokens of documents"] = held
    divisors["the tokens but the first of each"] = held - len(facts.documents)
    of_ranks = Counter(facts.rank(number) for number, _ in facts.wanted)
    if ranks > 1:
        for rank, count in of_ranks.items():
            words = f"divided by {ranks} times the targets of rank {rank}"
            yield words, wanted / (ranks * count)
    for name, count in divisors.items():
        yield f"divided by {name}, not by the targets", wanted / count
