"""Faults of targets: what tokens predict and should not, and which are not predicted.

Both are tables of words, and what holds for a token or a prediction with the fault; the first that
holds is named.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator

from .facts import Facts
from .finding import Finding
from .fit import Pair
from .probe import END, PAD

NOT_SHIFTED = "labels are not shifted: tokens predict themselves"
SHIFTED_TWICE = "labels are shifted twice"
OF_OTHERS = "labels belong to other tokens"
AFTER_SPLIT = (
    "labels are shifted after the split: tokens at an edge predict the next one on their rank"
)

EXTRA: dict[str, Callable[[Facts, int, int], bool]] = {
    NOT_SHIFTED: lambda f, n, target: (
        target == f.id_after(n, 0) and (target != f.tokens.probe.pad or f.unshifted)
    ),
    "prompts are trained": lambda f, n, target: target == f.id_after(n, 1),
    SHIFTED_TWICE: lambda f, n, target: target == f.id_after(n, 2),
    "an end token was appended that the probe does not have": lambda f, n, target: (
        n >= 0 and target == END and END not in f.tokens.ids
    ),
    "padding is trained": lambda f, n, target: target in (f.tokens.probe.pad, PAD),
    "first tokens are predicted from padding": lambda f, n, target: n < 0 and target in f.firsts,
    "tokens are predicted from padding": lambda f, n, target: n < 0,
    "last tokens predict the first one of the next document": lambda f, n, target: (
        f.id_after(n, 1) is None and (n, target) in f.next_documents
    ),
    "last tokens of rows predict the first one of their row": lambda f, n, target: (
        (n, target) in f.around
    ),
    "last tokens of ranks' parts predict the first one of their part": lambda f, n, target: (
        f.record.ranks > 1 and (n, target) in f.around_parts
    ),
    "last tokens predict the first one of another document": lambda f, n, target: (
        f.id_after(n, 1) is None and target in f.firsts
    ),
    AFTER_SPLIT: lambda f, n, target: f.record.ranks > 1 and (n, target) in f.adjacent,
    OF_OTHERS: lambda f, n, target: True,
}
"""What a token predicts, and should not."""
UNTRAINED = "predictions have no loss"
LOST: dict[str, Callable[[Facts, int], bool]] = {
    "documents are cut short: tokens are in no call": lambda f, n: not f.count[n],
    "ranks have no loss": lambda f, n: f.rank(n) in f.untrained_ranks,
    "micro-batches have no loss": lambda f, n: f.call(n) in f.untrained_calls,
    "documents have no loss": lambda f, n: f.tokens.document[n] in f.untrained,
    "first tokens of answers have no loss": lambda f, n: f.begins_answer(n),
    "first tokens of the later parts of documents have no loss": lambda f, n: n in f.starts,
    "last tokens have no loss": lambda f, n: f.id_after(n, 1) is None,
    UNTRAINED: lambda f, n: True,
}
"""Which token should be predicted, and is not."""


def extra_targets(facts: Facts) -> list[Finding]:
    """Returns what tokens predict and should not."""
    found = defaultdict[str, list[Pair]](list)
    for pair in facts.extra:
        if pair in facts.in_another_order:  # which is said of its document
            continue
        found[next(kind for kind, holds in EXTRA.items() if holds(facts, *pair))].append(pair)
    for kind in (NOT_SHIFTED, SHIFTED_TWICE):
        if len(found.get(kind, ())) < len(found.get(OF_OTHERS, ())):  # by chance
            found[OF_OTHERS] += found.pop(kind, [])
    findings = list[Finding]()
    for kind, pairs in found.items():
        owners = [
            facts.tokens.number.get(target, -1) if number < 0 else number
            for number, target in pairs
        ]
        if max(owners) >= 0:
            documents = facts.named(number for number in owners if number >= 0)
        else:
            documents = ""
        if not documents:
            details = ""
        elif min(number for number, _ in pairs) < 0:  # padding is counted once for each id
            details = documents
        else:
            details = f"{len(pairs)} predictions, {documents}"
        findings.append(Finding(kind, details))
    return findings


def lost_targets(facts: Facts) -> Iterator[Finding]:
    """Yields which predictions have no loss, but those whose token predicts another one instead."""
    predicting = {number for number, _ in facts.extra}
    predicted = {target for _, target in facts.extra}
    # Neither by another token, nor in favour of another id.
    lost = [
        number
        for number, target in facts.lost
        if target not in predicted and number not in predicting
    ]
    for kind, numbers in _kinds_of_lost(facts, lost).items():
        details = f"{len(numbers)} of {len(facts.wanted)} targets, {facts.named(numbers)}"
        yield Finding(kind, details)


def _kinds_of_lost(facts: Facts, numbers: list[int]) -> dict[str, list[int]]:
    """Returns tokens whose prediction has no loss by kind: one kind for all, or else each token's
    first."""
    for kind, holds in LOST.items():
        if kind != UNTRAINED and numbers and all(holds(facts, number + 1) for number in numbers):
            return {kind: numbers}
    found = defaultdict[str, list[int]](list)
    for number in numbers:
        kind = next(kind for kind, holds in LOST.items() if holds(facts, number + 1))
        found[kind].append(number)
    return found
