"""Verdicts: what is wrong with a step, in words, from the context and the weight of every
prediction.

Most faults are rows of tables: words, and what holds for a token or a prediction with the fault.
The first that holds is named.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from math import isfinite
from typing import Any

import torch

from .attended import gradients_without_others
from .causes import KINDS as CAUSES
from .changes import ROUNDED, change_of_gradient
from .contexts import APART, Sequence
from .contexts import FAULTS as CONTEXTS
from .errors import UsageError
from .fit import Fit, Pair, Shown
from .largest import largest
from .probe import END, PAD
from .record import Record, Tensors
from .reference import Gradients, Prediction, Reference
from .routers import loss_of_routers
from .variants import KINDS as VARIANTS

NOT_FINITE = "gradients are not finite"
OTHER_WEIGHTS = "ranks begin with different weights"
WEIGHTS_CHANGED = "weights change within the step"
NO_GRADIENT = "trained parameters have no gradient"
MISSING = "documents are missing in the step"
APART_RANKS = "gradients differ between ranks"
SAME_DATA = "all ranks have the same documents"
HIDDEN = "hidden states are wrong"
REPEATED = "documents are repeated in the step"
FILLED = "documents are repeated to fill the last batches of all ranks"
CHOICES = {FILLED: "accelerate's even_batches, which keeps ranks in step"}
"""Kinds that are no faults, with whose choice they are."""
WEIGHTS = "weights of predictions differ"
SCALE = "the loss has a wrong scale"
BACKWARD_WRONG = "the backward pass is wrong"
KEYS_WITHOUT_GRADIENT = "keys and values get no gradient from the queries of other ranks"
MEAN_OF_MEANS = "the loss is a mean of means of {}"
WEIGHTS_BY = "weights differ by {}"
OBJECTIVE_OTHER = "the objective is not the cross-entropy of one id for each token"
ATTENTION = re.compile(r"att(?!\w*norm)|mixer")
"""What names of parts have that mix tokens."""
DECAY = "a share of the weights is added to gradients"
ROUTERS = "the loss of routers is added to that of tokens"
CHANGED = "gradients are changed after backward"
LOGGED_LOSS = "the logged loss is wrong"
LOGGED_NORM = "the logged gradient norm is wrong"
UNEXPLAINED = "the gradient is that of no known fault"
NOT_SHIFTED = "labels are not shifted: tokens predict themselves"
SHIFTED_TWICE = "labels are shifted twice"
OF_OTHERS = "labels belong to other tokens"
ORDER = "hidden states of all tokens are wrong, also of first ones"
SCORES = "attention is wrong for all tokens but first ones"
EXCHANGE = "attention is wrong where keys of other ranks are needed"
SPLIT = "attention is wrong in documents that are split over ranks"
EDGE = "attention is wrong from an edge between ranks on"
LATER = "attention is wrong in all documents of a row but the first"
REACH = "attention is wrong from a place in documents on"
AFTER_SPLIT = (
    "labels are shifted after the split: tokens at an edge predict the next one on their rank"
)


@dataclass(frozen=True)
class Finding:
    """One fault: its `kind`, always the same words, and what of the step shows it."""

    kind: str
    details: str = ""

    def __str__(self) -> str:
        if self.details:
            return f"{self.kind}: {self.details}"
        return self.kind


class Facts:
    """What a record and its fit say of tokens and predictions.

    Attributes:
        count: how often each token is in the step.
        documents, missing: those with a token in a call, and others that have something to predict.
        at: rank, call, and row of all calls where each token is first.
        wanted: predictions that count in a right step, of the documents that are in it.
        all_wanted: how many would count with the missing documents.
        relative: weights times the number of wanted predictions: 1 if right.
        kept, lost, extra: wanted predictions that count, those that do not, and others that count.
        unknown, known: tokens whose hidden states no context has, and others.
    """

    def __init__(self, record: Record, reference: Reference, fit: Fit) -> None:
        self.record = record
        tokens = record.tokens
        self.tokens = tokens
        self.reference = reference
        self.fit = fit
        self.limits = record.tolerances
        if fit.shown is not None:
            self.same = self.limits.weights_shown
        elif fit.roughly:
            self.same = self.limits.residual_of_unknown
        else:
            self.same = self.limits.weights
        self.count, self.at = _tokens_in(record)
        self.documents = record.documents
        everything = range(len(tokens.probe.lengths))
        self.missing = [
            document
            for document in everything
            if document not in self.documents and self._wanted_of([document])
        ]
        self.wanted = self._wanted_of(self.documents)
        every_wanted = self._wanted_of(everything)
        self.relative = {pair: weight * len(self.wanted) for pair, weight in fit.pairs().items()}
        # Nobody knows which tokens predict the ends of documents.
        if fit.shown is None and not any(target == END for _, target in self.relative):
            self.wanted = [pair for pair in self.wanted if pair[1] != END]
            every_wanted = [pair for pair in every_wanted if pair[1] != END]
        self.all_wanted = len(every_wanted)
        least = self._least_weight()
        counted = {
            pair: weight for pair, weight in self.relative.items() if not abs(weight) <= least
        }
        self.kept = {pair: counted[pair] for pair in self.wanted if pair in counted}
        self.lost = [pair for pair in self.wanted if pair not in counted]
        self.extra = {pair: weight for pair, weight in counted.items() if pair not in self.kept}
        self.unknown = fit.unseen
        self.known = self._judged() - self.unknown
        self._of_rules()

    def _least_weight(self) -> float:
        """Returns what a weight has to exceed to count."""
        if self.fit.shown is None:
            return self.limits.weights
        return self.limits.least_weight * max(map(abs, self.relative.values()), default=0.0)

    def _judged(self) -> set[int]:
        """Returns the tokens whose hidden states can be told from others."""
        if self.fit.shown is None:
            return {number for number, _ in self.kept | self.extra if number >= 0}
        return set(self.fit.shown.states)

    def _wanted_of(self, documents: Iterable[int]) -> list[Pair]:
        """Returns the predictions that should count, of these documents."""
        tokens = self.tokens
        return [
            (number, tokens.ids[number + 1])
            for document in documents
            for number in tokens.of(document)[:-1]
            if tokens.probe.trained(document, tokens.place[number + 1])
        ]

    def _of_rules(self) -> None:
        """Sets what only rules ask for."""
        tokens = self.tokens
        self.unshifted = any(
            n >= 0 and target == tokens.ids[n] and target != tokens.probe.pad
            for n, target in self.extra
        )
        calls = self.record.calls
        self.firsts = {ids[0] for ids in tokens.probe.documents}
        self.starts = set[int]()
        self.adjacent = set[Pair]()
        for row in calls:
            self.adjacent.update(zip(row.numbers, row.ids[1:], strict=False))
            for piece in tokens.pieces(row.numbers):
                if tokens.place[piece[0]]:
                    self.starts.add(piece[0])
        self.of_row = dict[int, int]()
        for row in calls:
            real = [number for number in row.numbers if number >= 0]
            for number in real:
                self.of_row[number] = real[0]
        kept = {tokens.document[number] for number, _ in self.kept}
        self.untrained = {tokens.document[number] for number, _ in self.wanted} - kept
        kept_ranks = {self.rank(number) for number, _ in self.kept}
        wanted_ranks = {self.rank(number) for number, _ in self.wanted}
        self.untrained_ranks = wanted_ranks - kept_ranks if len(wanted_ranks) > 1 else set()
        kept_calls = {self.at[number][:2] for number, _ in self.kept if number in self.at}
        wanted_calls = {self.at[number][:2] for number, _ in self.wanted if number in self.at}
        self.untrained_calls = wanted_calls - kept_calls if len(wanted_calls) > 1 else set()
        self.reach = min((tokens.place[number] for number in self.unknown), default=0)
        self.edge = len(tokens.ids)
        for number in range(1, min(self.unknown, default=0) + 1):
            if self.rank(number) != self.rank(number - 1):
                self.edge = number

    def id_after(self, number: int, by: int) -> int | None:
        """Returns the id so many tokens after another one of its document; None beyond its end, and
        after padding."""
        after = self.tokens.next(number, by) if number >= 0 else None
        if after is None:
            return None
        return self.tokens.ids[after]

    def call(self, number: int) -> tuple[int, ...]:
        """Returns rank and call of a token; none if it is in no call."""
        return self.at[number][:2] if number in self.at else ()

    def begins_answer(self, number: int) -> bool:
        """Returns whether a token is the first with a loss of a document with a prompt."""
        document = self.tokens.document[number]
        place = self.tokens.place[number]
        probe = self.tokens.probe
        return bool(probe.prompt) and not probe.trained(document, place - 1)

    def rank(self, number: int) -> int:
        if number in self.at:
            return self.at[number][0]
        return -1

    @property
    def fills_ranks(self) -> bool:
        """Whether documents are repeated so that the batches of all ranks have as many."""
        if self.record.ranks == 1:
            return False
        held = Counter[tuple[int, int]]()
        for row in self.record.calls:
            for piece in self.tokens.pieces(row.numbers):
                held[row.rank, row.call] += self.tokens.place[piece[0]] == 0
        sizes = set(held.values())
        together = self.record.ranks * max(sizes)
        missing = -len(self.documents) % together
        return len(sizes) == 1 and 0 < held.total() - len(self.documents) == missing

    def split(self, numbers: Iterable[int]) -> bool:
        """Returns whether tokens are on several ranks."""
        return len({self.rank(number) for number in numbers}) > 1

    def even(self, weights: Iterable[float]) -> bool:
        most, least = max(weights := list(weights)), min(weights)
        return most - least < self.same * max(abs(most), abs(least))

    def named(self, numbers: Iterable[int]) -> str:
        """Returns the documents of tokens in words."""
        return self.named_documents({self.tokens.document[number] for number in numbers})

    def named_documents(self, documents: Iterable[int]) -> str:
        """Returns documents in words, at most four of them by number."""
        found = [str(document) for document in sorted(documents)]
        shown = ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
        return f"document{'s' * (len(found) > 1)} {shown}"


def _tokens_in(record: Record) -> tuple[Counter[int], dict[int, tuple[int, int, int]]]:
    """Returns how often each token is in a call, and rank, call and row where it is first."""
    count = Counter[int]()
    at = dict[int, tuple[int, int, int]]()
    for place, row in enumerate(record.calls):
        for number in row.numbers:
            if number >= 0:
                count[number] += 1
                at.setdefault(number, (row.rank, row.call, place))
    return count, at


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
        f.id_after(n, 1) is None and target in f.firsts
    ),
    AFTER_SPLIT: lambda f, n, target: (n, target) in f.adjacent,
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

CHUNKS = "chunks of rows"
MEANS: dict[str, Callable[[Facts, int], object]] = {
    "ranks": lambda f, n: f.at[n][0],
    "micro-batches": lambda f, n: f.at[n][:2],
    "micro-batches of all ranks": lambda f, n: f.at[n][1],
    "rows": lambda f, n: f.at[n][2],
    "documents": lambda f, n: f.tokens.document[n],
}
"""What predictions may be averaged over, and the one of a token."""


def kinds() -> list[str]:
    """Returns the kinds of all faults, also of the one without a name."""
    of_documents = (MISSING, SAME_DATA, REPEATED, FILLED)
    several = (
        NOT_FINITE,
        OTHER_WEIGHTS,
        WEIGHTS_CHANGED,
        NO_GRADIENT,
        APART_RANKS,
        HIDDEN,
        WEIGHTS,
    )
    of_numbers = (
        SCALE,
        OBJECTIVE_OTHER,
        DECAY,
        ROUTERS,
        CHANGED,
        BACKWARD_WRONG,
        KEYS_WITHOUT_GRADIENT,
        LOGGED_LOSS,
        LOGGED_NORM,
    )
    by_groups = [words.format(name) for words in (MEAN_OF_MEANS, WEIGHTS_BY) for name in MEANS]
    by_groups.append(MEAN_OF_MEANS.format(CHUNKS))
    return [
        UNEXPLAINED,
        *several,
        *of_documents,
        *of_numbers,
        *by_groups,
        *CONTEXTS,
        *PLACES,
        *CAUSES,
        *VARIANTS,
        *EXTRA,
        *LOST,
    ]


def words_before_colon(kind: str) -> str:
    return kind.partition(":")[0]


def require_kinds(allow: Iterable[str]) -> None:
    """Raises UsageError for what no fault is called: neither a kind, nor the words of a kind before
    its first colon."""
    known = {name for kind in kinds() for name in (kind, words_before_colon(kind))}
    for name in allow:
        if name not in known:
            near = get_close_matches(name, known, n=3, cutoff=0.3)
            hint = f": did you mean {', or '.join(map(repr, near))}?" if near else ""
            raise UsageError(f"no fault is called {name!r}{hint}")


def is_allowed(finding: Finding, allow: Iterable[str]) -> bool:
    """Returns whether a fault is among these: by its kind, or the words before its first colon."""
    return not {finding.kind, words_before_colon(finding.kind)}.isdisjoint(allow)


def not_finite(record: Record) -> list[Finding]:
    """Returns what is said of a step with a gradient that is NaN or infinite, from which nothing
    else follows; nothing if all are finite."""
    names = [name for name, value in record.gradients.items() if not value.isfinite().all()]
    if not names:
        return []
    count = f"{len(names)} of {len(record.gradients)} parameters"
    details = f"NaN or infinity in {count}: {_suffixes(names)}"
    if record.not_finite_in:
        details += f"; first in the {record.not_finite_in}"
    found = [Finding(NOT_FINITE, details)]
    if record.loss is not None and not isfinite(record.loss):
        found.append(Finding(LOGGED_LOSS, f"it is {record.loss}"))
    if record.norm is not None and isfinite(record.norm):
        found.append(Finding(LOGGED_NORM, f"{record.norm:.5g}, of gradients that are not finite"))
    return found


def findings(facts: Facts) -> Iterator[Finding]:
    """Yields the faults of a step, the most telling first."""
    record = facts.record
    fit = facts.fit
    if not facts.wanted:
        yield Finding(
            UNEXPLAINED, "no token of the probe that should be predicted was in a call of the model"
        )
        return
    if record.weights_apart:
        yield Finding(OTHER_WEIGHTS, _suffixes(record.weights_apart))
        return
    yield from _apart(record)
    if record.changed_at:
        calls = 1 + max(row.call for row in record.calls)
        yield Finding(WEIGHTS_CHANGED, f"before call {record.changed_at} of 0 to {calls - 1}")
        return
    if not fit.exact:
        names = ", ".join(dict.fromkeys(context.name for context in fit.contexts.values()))
        yield Finding(UNEXPLAINED, f"the nearest, “{names}”, leaves {fit.residual:.1%} of it")
        return
    yield from _contexts(facts)
    yield from _places(facts)
    yield from _missing(facts)
    other_objective = fit.shown is not None and bool(fit.shown.objective)
    if fit.shown is not None and fit.shown.objective:
        yield _objective(fit.shown)
    else:
        extra = _extra(facts)
        yield from extra
        if (
            extra
            and not facts.kept
            and {finding.kind for finding in extra} <= {NOT_SHIFTED, SHIFTED_TWICE}
        ):
            return
        yield from _lost(facts)
    if facts.missing:
        yield from _same_data(record)
    gradients = _expected(facts)
    if gradients.missing:
        names = _suffixes(gradients.missing)
        yield Finding(NO_GRADIENT, f"{len(gradients.missing)} of them: {names}")
    if not record.apart:
        if not other_objective:
            yield from _weights(facts)
        after = list(_after(facts))
        beside = list(_beside(facts, gradients.of)) if fit.whole else []
        yield from beside or after
        if fit.whole and not after and not beside:
            yield from _backward(facts, gradients.of)
    loss = facts.reference.loss(fit.weights) if fit.whole and not other_objective else None
    yield from _log(facts, loss)


def _expected(facts: Facts) -> Gradients:
    """Returns the gradients that follow from forward and objective; of a right step where those are
    not known whole, to tell which parameters have one."""
    fit = facts.fit
    if not fit.whole:
        return facts.reference.gradients(_right_weights(facts))
    if fit.shown is not None and fit.shown.slopes is not None:
        return facts.reference.gradients_of(fit.shown.slopes)
    return facts.reference.gradients(fit.weights)


def _apart(record: Record) -> Iterator[Finding]:
    if not record.apart:
        return
    if len(record.apart) == len(record.gradients):
        which = "all parameters"
    else:
        which = _suffixes(record.apart)
    most = max(record.apart.values())
    yield Finding(APART_RANKS, f"those of {which}, by up to {100 * most:.3g} %")


def _missing(facts: Facts) -> Iterator[Finding]:
    if not facts.missing:
        return
    of = len(facts.tokens.probe.lengths)
    which = f"{len(facts.missing)} of {of}: {facts.named_documents(facts.missing)}"
    yield Finding(MISSING, f"{which}; one step has to hold the whole probe")


def _same_data(record: Record) -> Iterator[Finding]:
    """Yields that ranks hold the same tokens, which tensor parallelism has to, where documents are
    missing."""
    held: list[set[int]] = [set() for _ in range(record.ranks)]
    for row in record.calls:
        held[row.rank].update(row.numbers)
    if len(held) > 1 and all(numbers == held[0] for numbers in held):
        yield Finding(SAME_DATA)


def _contexts(facts: Facts) -> Iterator[Finding]:
    """Yields wrong contexts, with an example of documents that see each other."""
    by_name = defaultdict[str, list[int]](list)
    for document in facts.documents:
        by_name[facts.fit.contexts[document].name].append(document)
    by_name.pop(APART, None)
    for name, several in by_name.items():
        shown = facts.fit.shown
        off = shown.documents if shown is not None else several
        documents = [document for document in several if document in off] or several
        details = facts.named_documents(documents)
        for number, sequence in enumerate(facts.fit.contexts[documents[0]].sequences):
            if sequence.sight != "causal":
                continue
            held = list(dict.fromkeys(facts.tokens.document[n] for n in sequence.numbers if n >= 0))
            seeing = [at for at, document in enumerate(held) if at and document in documents]
            if seeing:
                sees, seen = held[seeing[0]], held[seeing[0] - 1]
                details = f"in row {number}, tokens of document {sees} see document {seen}"
                break
        yield Finding(name, details)


def _places(facts: Facts) -> Iterator[Finding]:
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


def _extra(facts: Facts) -> list[Finding]:
    found = defaultdict[str, list[Pair]](list)
    for pair in facts.extra:
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


def _lost(facts: Facts) -> Iterator[Finding]:
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


def _weights(facts: Facts) -> Iterator[Finding]:
    """Yields how the weights of the predictions that count differ from 1/N."""
    weights = facts.kept.values()
    if not facts.kept:
        return
    if facts.even(weights):
        yield from _scale(facts, sum(weights) / len(weights))
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
        yield from _scale(facts, sum(by_copy) / len(by_copy))
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
        details = f"{_values(several)} times 1/N"
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
        yield Finding(WEIGHTS, f"{', '.join(counted)}, times 1/N")
        return
    yield Finding(WEIGHTS, f"from {least:.3g} to {most:.3g} times 1/N")


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


def _scale(facts: Facts, factor: float) -> Iterator[Finding]:
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


def _objective(shown: Shown) -> Finding:
    """Returns what is said of tokens whose objective is another one."""
    most = max(shown.objective.values())
    details = f"for {len(shown.objective)} tokens it leaves {most:.1e} of ∂loss/∂logits"
    if shown.beside:
        details += f"; {' or '.join(shown.beside)} would explain it"
    return Finding(OBJECTIVE_OTHER, details)


def _after(facts: Facts) -> Iterator[Finding]:
    """Yields that the output layer's gradient is not the one that backward gave."""
    shown = facts.fit.shown
    if shown is None or shown.after is None or shown.after <= facts.limits.after:
        return
    name = facts.reference.output
    assert name is not None  # else there is nothing to compare
    found = facts.record.gradients[name]
    rounded = [
        words
        for dtype, words in ROUNDED.items()
        if bool((found.float().to(dtype).double() == found).all())
    ]
    details = f"the output layer's differs by {shown.after:.1e} of it from what backward gave"
    if rounded:
        details += f"; it is rounded to {rounded[0]}"
    yield Finding(CHANGED, details)


def _beside(facts: Facts, expected: Tensors) -> Iterator[Finding]:
    """Yields what is added to all gradients: a share of the weights, or the loss of routers."""
    lacking = {name: facts.record.gradients[name] - right for name, right in expected.items()}
    limit = facts.limits.backward
    size = _norm(expected)
    if not _norm(lacking) > limit * size:
        return
    weights = {name: weight.detach() for name, weight in facts.reference.named.items()}
    candidates = {DECAY: weights}
    routers = loss_of_routers(facts.record, facts.reference)
    if routers is not None:
        candidates[ROUTERS] = routers
    for kind, added in candidates.items():
        times = _product(lacking, added) / max(_norm(added) ** 2, 1e-300)
        left = {name: lacking[name] - times * each for name, each in added.items()}
        if _norm(left) <= limit * _norm(lacking):
            yield Finding(kind, f"{times:.3g} times")
            return


def _norm(tensors: Tensors) -> float:
    return float(_product(tensors, tensors) ** 0.5)


def _product(ones: Tensors, others: Tensors) -> float:
    return sum(float((one * others[name]).sum()) for name, one in ones.items())


def _backward(facts: Facts, gradients: Tensors) -> Iterator[Finding]:
    """Yields parameters whose gradients do not follow from the weights: what is wrong in a layer
    shows in all before it."""
    if facts.reference.output is None and facts.fit.shown is None:
        # What was fitted at once leaves nothing to compare.
        fitted = facts.reference.fitted
        gradients = {name: each for name, each in gradients.items() if name not in fitted}
    if not gradients:
        return
    sizes = {name: float(value.norm()) for name, value in gradients.items()}
    least = 1e-3 * largest(sizes.values())
    layers = _layers(facts.reference.order)
    off = defaultdict[int, dict[str, str]](dict)
    for name, expected in gradients.items():
        found = facts.record.gradients[name]
        limit = facts.limits.of_parameter(name)
        if not float((found - expected).norm()) <= limit * max(sizes[name], least):
            off[layers[name]][name] = change_of_gradient(found, expected, gradients, limit=limit)
    if not off:
        return
    if _is_without_others(facts):
        yield Finding(KEYS_WITHOUT_GRADIENT)
        return
    last = max(off)
    details = _suffixes(off[last])
    if 0 <= last < BEHIND:
        details += f" in layer {last}"
    details += ": " + ", ".join(sorted(set(off[last].values())))
    before = sum(map(len, off.values())) - len(off[last])
    if before:
        details += f"; {before} before it are off, too"
    yield Finding(BACKWARD_WRONG, details)


def _is_without_others(facts: Facts) -> bool:
    """Returns whether gradients are those of keys and values that get none from other ranks."""
    shown = facts.fit.shown
    if facts.record.ranks == 1:
        return False
    if shown is not None:
        slopes = shown.slopes
    elif facts.reference.output is not None:
        slopes = facts.reference.slopes_of(facts.fit.weights)
    else:
        slopes = None
    if slopes is None:
        return False
    ranks = {number: place[0] for number, place in facts.at.items()}
    try:
        expected = gradients_without_others(facts.reference, slopes, ranks)
    except (RuntimeError, ValueError, TypeError):
        return False
    return all(
        float((facts.record.gradients[name] - each).norm())
        <= facts.limits.of_parameter(name) * float(each.norm())
        for name, each in expected.items()
    )


BEHIND = 1 << 30
"""Number of a layer that parameters behind all layers count as being in."""


def _layers(names: Iterable[str]) -> dict[str, int]:
    """Returns the number of the layer of each parameter: -1 before all layers, BEHIND behind them;
    names are in the order of the model."""
    found = dict[str, int]()
    outside = -1
    for name in names:
        number = next((int(part) for part in name.split(".") if part.isdigit()), None)
        if number is not None:
            outside = BEHIND
        found[name] = outside if number is None else number
    return found


def _log(facts: Facts, loss: float | None) -> Iterator[Finding]:
    record = facts.record
    if record.loss is not None and loss is not None:
        right = _right_loss(facts)
        if (
            not min(abs(record.loss - right), abs(record.loss - loss))
            <= facts.limits.logged * right
        ):
            yield Finding(
                LOGGED_LOSS,
                f"{record.loss:.5g} and not {right:.5g} ({record.loss / right:.4g} times)",
            )
    if record.norm is not None and not record.apart:
        norm = sum(float(value.norm()) ** 2 for value in record.gradients.values()) ** 0.5
        if not abs(record.norm - norm) <= facts.limits.logged * norm:
            words = f"{record.norm:.5g} and not {norm:.5g} ({record.norm / norm:.4g} times)"
            yield Finding(LOGGED_NORM, words)


def _right_loss(facts: Facts) -> float:
    """Returns the mean loss of the wanted predictions, documents apart."""
    return facts.reference.loss(_right_weights(facts))


def _right_weights(facts: Facts) -> dict[Prediction, float]:
    """Returns the weights of a right step: 1/N of each wanted prediction, documents apart."""
    right = dict[Prediction, float]()
    for document in facts.documents:
        numbers = facts.tokens.of(document)
        sequence = Sequence(tuple(numbers), tuple(range(len(numbers))))
        own = (pair for pair in facts.wanted if pair[0] in numbers)
        right |= {
            Prediction(sequence, facts.tokens.place[number], target): 1 / len(facts.wanted)
            for number, target in own
        }
    return right


def picture(facts: Facts) -> list[str]:
    """Returns a line for each document with a wrong weight; of its targets `.` are right, `0` lost,
    `+` and `-` off."""
    if facts.record.weights_apart or facts.record.changed_at:
        return []
    if not facts.fit.exact or not (
        facts.lost or facts.extra or (facts.kept and not facts.even(facts.kept.values()))
    ):
        return []
    lines = list[str]()
    for document in facts.documents:
        signs = ""
        for number in facts.tokens.of(document)[:-1]:
            pair = (number, facts.tokens.ids[number + 1])
            weight = facts.relative.get(pair, 0.0)
            wanted = float(pair in facts.wanted)
            signs += _sign(weight, wanted, same=facts.limits.weights)
        if len(signs) > 96:
            signs = signs[:96] + "…"
        if signs.strip(".…"):
            lines.append(f"document {document:2} {signs}")
    return lines


def _sign(weight: float, wanted: float, *, same: float) -> str:
    """Returns how a weight relates to the one that it should be."""
    if abs(weight - wanted) < same:
        return "."
    if abs(weight) < same:
        return "0"
    if weight > wanted:
        return "+"
    return "-"


def _suffixes(names: Iterable[str]) -> str:
    """Returns the names of parameters without the number of their layer."""
    found = Counter(
        ".".join(part for part in name.split(".")[-3:] if not part.isdigit()) for name in names
    )
    shown = [f"{name} ({count})" if count > 1 else name for name, count in found.items()]
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")
