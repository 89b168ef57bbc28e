"""Faults of weights: how those of the predictions that count differ from 1/N."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .facts import Facts
from .finding import Finding
from .scale import wrong_scale

REPEATED = "documents are repeated in the step"
FILLED = "documents are repeated to fill the last batches of all ranks"
CHOICES = {FILLED: "accelerate's even_batches, which keeps ranks in step"}
"""Kinds that are no faults, with whose choice they are."""
WEIGHTS = "weights of predictions differ"
MEAN_OF_MEANS = "the loss is a mean of means of {}"
WEIGHTS_BY = "weights differ by {}"
CHUNKS = "chunks of rows"
MEANS: dict[str, Callable[[Facts, int], object]] = {
    "ranks": lambda f, n: f.at[n][0],
    "micro-batches": lambda f, n: f.at[n][:2],
    "micro-batches of all ranks": lambda f, n: f.at[n][1],
    "rows": lambda f, n: f.at[n][2],
    "documents": lambda f, n: f.tokens.document[n],
}
"""What predictions may be averaged over, and the one of a token."""


def wrong_weights(facts: Facts) -> Iterator[Finding]:
    """Yields how the weights of the predictions that count differ from 1/N."""
    weights = facts.kept.values()
    if not facts.kept:
        return
    if facts.even(weights):
        yield from wrong_scale(facts, sum(weights) / len(weights))
        return
    by_copy = []
    for (number, _), weight in facts.kept.items():
        by_copy.append(weight / max(1, facts.count[number + 1]))
    if facts.even(by_copy):
        which = facts.named(n for n, count in facts.count.items() if count > 1)
        if not facts.fills_ranks:
            yield Finding(REPEATED, which)
            return
        yield Finding(FILLED, which)
        yield from wrong_scale(facts, sum(by_copy) / len(by_copy))
        return
    yield from _by_groups(facts)


def _by_groups(facts: Facts) -> Iterator[Finding]:
    """Yields over what predictions are averaged, or with what their weights differ."""
    even = dict[str, list[list[float]]]()
    for name, group_of in MEANS.items():
        groups = defaultdict[Any, list[float]](list)
        for (number, _), weight in (facts.kept | facts.extra).items():
            if number >= 0:
                groups[group_of(facts, number)].append(weight)
        if len(groups) > 1 and all(facts.even(each) for each in groups.values()):
            even[name] = [groups[key] for key in sorted(groups)]
    for name, several in even.items():
        if facts.even(map(sum, several)):
            yield Finding(MEAN_OF_MEANS.format(name), _as_means(facts, several))
            return
    if even:
        name, several = min(even.items(), key=lambda each: len(each[1]))
        details = f"{_values(several)} times {facts.aim.unit}"
        if name in ("documents", "rows"):
            power = _power(several)
            details += f", as the power {power:.3g} of their lengths" if power else ""
        yield Finding(WEIGHTS_BY.format(name), details)
        return
    chunk = _chunk(facts)
    if chunk:
        yield Finding(MEAN_OF_MEANS.format(CHUNKS), f"of {chunk} columns")
        return
    least = min(facts.kept.values())
    most = max(facts.kept.values())
    shown = facts.fit.shown
    if shown is not None and shown.focus:
        yield Finding(WEIGHTS, f"those of a focal loss, with γ = {shown.focus:.3g}")
        return
    values = Counter(f"{weight:.4g}" for weight in facts.kept.values())
    if len(values) <= 3:
        counted = [f"{value} for {count} targets" for value, count in values.most_common()]
        yield Finding(WEIGHTS, f"{', '.join(counted)}, times {facts.aim.unit}")
        return
    yield Finding(WEIGHTS, f"from {least:.3g} to {most:.3g} times {facts.aim.unit}")


def _power(several: list[list[float]]) -> float:
    """Returns the power of the lengths of groups that their weights follow; 0: of none."""
    lengths = torch.tensor([len(each) for each in several]).double().log()
    weights = torch.tensor([each[0] for each in several]).double()
    if len(set(lengths.tolist())) < 3 or not bool((weights > 0).all()):
        return 0.0
    basis = torch.stack([lengths, torch.ones_like(lengths)], dim=1)
    solved = torch.linalg.lstsq(basis, weights.log()[:, None], driver="gelsd").solution
    apart = (basis @ solved)[:, 0] - weights.log()
    return float(solved[0, 0]) if float(apart.abs().max()) < 1e-3 else 0.0


def _chunk(facts: Facts) -> int:
    """Returns how many columns of rows the chunks have over whose means the loss is a mean; 0:
    there are none."""
    column = dict[int, int]()
    for row in facts.record.calls:
        for at, number in enumerate(row.numbers):
            column.setdefault(number, at)
    for chunk in range(2, 1 + max(column.values(), default=0)):
        groups = defaultdict[tuple[tuple[int, ...], int], list[float]](list)
        for (number, _), weight in facts.kept.items():
            groups[facts.call(number), column[number] // chunk].append(weight)
        several = list(groups.values())
        if len(several) > 1 and all(map(facts.even, several)) and facts.even(map(sum, several)):
            return chunk
    return 0


def _as_means(facts: Facts, several: list[list[float]]) -> str:
    """Returns in words that groups count alike, and what their sum is, if it is not 1."""
    words = f"each of {len(several)} counts alike"
    total = sum(map(sum, several)) / len(facts.wanted)
    if abs(total - 1) < facts.same:
        return words
    return f"{words}, and all together {total:.3g} times as much as they should"


def _values(several: list[list[float]]) -> str:
    """Returns the weights of groups in words, how often each is there, at most four."""
    counts = Counter(f"{each[0]:.3g}" for each in several)
    if len(counts) == len(several):
        shown = list(counts)
    else:
        shown = [f"{value} ({count} of them)" for value, count in counts.items()]
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")
