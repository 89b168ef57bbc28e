"""Facts: what a record and its fit say of tokens and predictions."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import copysign, inf

from .contexts import ORDER, TWICE, Sequence
from .fit import Fit, Pair
from .gathered import Record, Row
from .probe import END, Tokens
from .reference import Prediction, Reference
from .tolerances import FLOAT32

LEAST_SHARE = 0.05
"""Of the largest right weight: a smaller one is not the measure of its own rounding."""

LEAST_SHARE_OF_ROUGH = 0.5
"""The same, of what least squares find in a coarse dtype."""
TIMES_OF_ALIKE = 4.0
"""Times what a coarse dtype leaves of weights, of predictions that least squares hardly tell apart:
a pair of ends of texts that both predict an end had 0.05 in bfloat16."""


@dataclass(frozen=True)
class Measure:
    """What the weights of a step are compared with.

    Attributes:
        right: weights of wanted predictions in a right step.
        least_share: of the largest of these; a smaller one is not the measure of its own rounding.
    """

    right: dict[Pair, float]
    least_share: float

    @cached_property
    def largest(self) -> float:
        """The largest right weight."""
        return max(map(abs, self.right.values()), default=0.0)

    @cached_property
    def usual(self) -> float:
        """The mean of right weights; infinity if there is none."""
        total = sum(map(abs, self.right.values()))
        return total / max(len(self.right), 1) or inf

    def relative(self, pair: Pair, weight: float) -> float:
        """Returns the weight of a prediction relative to the right one; of one that should not
        count, to the usual one. Of a right one that is far below others, the difference is compared
        with these, as what is left by rounding is."""
        if pair not in self.right:
            return weight / self.usual
        right = self.right[pair]
        least = self.least_share * self.largest
        if abs(right) >= least:
            return weight / right
        return 1 + (weight - right) / copysign(least, right)


class Facts:
    """What a record and its fit say of tokens and predictions.

    Attributes:
        same: relative difference of weights that are the same.
        count: how often each token is in the step.
        documents, missing: those with a token in a call, and others that have something to predict.
        at: rank, call, and row of all calls where each token is first.
        wanted: predictions that count in a right step, of the documents that are in it.
        all_wanted: how many would count with the missing documents.
        right: weights of wanted predictions in a right step.
        relative: weights relative to these, or of others to the mean of these: 1 if right.
        kept, lost, extra: wanted predictions that count, those that do not, and others that count.
        unknown, known: tokens whose hidden states no context has, and others.
    """

    def __init__(self, record: Record, reference: Reference, fit: Fit) -> None:
        self.record = record
        self.tokens = record.tokens
        self.reference = reference
        self.fit = fit
        self.limits = record.tolerances
        self.aim = record.aim
        self.same = self._same()
        self.count, self.at = _tokens_in(record)
        self.documents = record.documents
        everything = range(len(self.tokens.probe.lengths))
        self.missing = [
            document
            for document in everything
            if document not in self.documents and self._wanted_of([document])
        ]
        self.wanted = self._wanted_of(self.documents)
        every_wanted = self._wanted_of(everything)
        self.right = self.aim.weights(self.wanted, self.tokens, reference)
        least_share = LEAST_SHARE_OF_ROUGH if self._is_rough else LEAST_SHARE
        measure = Measure(self.right, least_share)
        self.relative = {
            pair: measure.relative(pair, weight) for pair, weight in fit.pairs().items()
        }
        if self._ends_are_unknown():
            self.wanted = _without_ends(self.wanted)
            every_wanted = _without_ends(every_wanted)
            self.right = self.aim.weights(self.wanted, self.tokens, reference)
        self.all_wanted = len(every_wanted)
        counted = self._counted(self._least_weight(measure))
        self.kept = {pair: counted[pair] for pair in self.wanted if pair in counted}
        self.lost = [pair for pair in self.wanted if pair not in counted]
        self.extra = {pair: weight for pair, weight in counted.items() if pair not in self.kept}
        self.unknown = fit.unseen
        self.known = self._judged() - self.unknown

    def _same(self) -> float:
        """Returns the relative difference of weights that are the same."""
        rounding = self.aim.rounding(self.record, self.reference)
        if self.fit.shown is not None:
            return self.limits.weights_shown + rounding
        if self.fit.roughly:
            return self.limits.residual_of_unknown + rounding
        return self.limits.weights + rounding

    @property
    def _is_rough(self) -> bool:
        """Whether weights are inferred by least squares in a coarse dtype."""
        return self.fit.shown is None and self.limits.weights > FLOAT32.weights

    def _ends_are_unknown(self) -> bool:
        """Returns whether nobody knows which tokens predict the ends of documents."""
        return self.fit.shown is None and all(target != END for _, target in self.relative)

    def _least_weight(self, measure: Measure) -> float:
        """Returns what a relative weight has to exceed to count."""
        if self.fit.shown is None:
            least = self.limits.weights * max(measure.largest / measure.usual, 1.0)
            if self._is_rough:
                least *= TIMES_OF_ALIKE
            return least
        return self.limits.least_weight * max(map(abs, self.relative.values()), default=0.0)

    def _counted(self, least: float) -> dict[Pair, float]:
        """Returns the relative weights that are not known to be this small; NaN is not."""
        return {pair: weight for pair, weight in self.relative.items() if not abs(weight) <= least}

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

    def right_predictions(self) -> dict[Prediction, float]:
        """Returns the weights of a right step, documents apart."""
        right = dict[Prediction, float]()
        for document in self.documents:
            numbers = self.tokens.of(document)
            sequence = Sequence(tuple(numbers), tuple(range(len(numbers))))
            for number, target in self.wanted:
                if number in numbers:
                    place = self.tokens.place[number]
                    prediction = Prediction(sequence, place, target)
                    right[prediction] = self.right[number, target]
        return right

    # What only rules ask for:

    @cached_property
    def unshifted(self) -> bool:
        """Whether a token predicts itself that is no padding."""
        ids = self.tokens.ids
        pad = self.tokens.probe.pad
        return any(
            number >= 0 and target == ids[number] and target != pad for number, target in self.extra
        )

    @cached_property
    def firsts(self) -> set[int]:
        """Ids of the first tokens of documents."""
        return {ids[0] for ids in self.tokens.probe.documents}

    @cached_property
    def next_documents(self) -> set[Pair]:
        """The last token of each document with the first id of the next one, in rows or from one
        row to the next."""
        return _next_documents(self.record)

    @cached_property
    def around(self) -> set[Pair]:
        """The last token of each row with the row's first id."""
        return _around(self.tokens, self.record.rows)

    @cached_property
    def around_parts(self) -> set[Pair]:
        """The same of the parts of rows that calls have."""
        return _around(self.tokens, self.record.calls)

    @cached_property
    def starts(self) -> set[int]:
        """The first tokens in a call of the later parts of documents."""
        found = set[int]()
        for row in self.record.calls:
            for first, *_ in self.tokens.pieces(row.numbers):
                if self.tokens.place[first]:
                    found.add(first)
        return found

    @cached_property
    def adjacent(self) -> set[Pair]:
        """Tokens of calls with the id that is next to them there."""
        found = set[Pair]()
        for row in self.record.calls:
            found.update(zip(row.numbers, row.ids[1:], strict=False))
        return found

    @cached_property
    def in_another_order(self) -> set[Pair]:
        """Tokens with the id that follows them, as documents are in another order."""
        return _in_another_order(self.tokens, self.fit)

    @cached_property
    def of_row(self) -> dict[int, int]:
        """The first token of the row of calls that each token is in."""
        found = dict[int, int]()
        for row in self.record.calls:
            real = [number for number in row.numbers if number >= 0]
            for number in real:
                found[number] = real[0]
        return found

    @cached_property
    def _trained(self) -> list[int]:
        """Tokens with a prediction that counts."""
        return [number for number, _ in self.kept | self.extra if number >= 0]

    @cached_property
    def _wanted_tokens(self) -> list[int]:
        """Tokens with a prediction that should count."""
        return [number for number, _ in self.wanted]

    @cached_property
    def untrained(self) -> set[int]:
        """Documents of which no prediction counts, though some should."""
        document = self.tokens.document
        trained = {document[number] for number in self._trained}
        return {document[number] for number in self._wanted_tokens} - trained

    @cached_property
    def untrained_ranks(self) -> set[int]:
        """Ranks, if there are several, of which no prediction counts, though some should."""
        wanted = {self.rank(number) for number in self._wanted_tokens}
        if len(wanted) == 1:
            return set()
        return wanted - {self.rank(number) for number in self._trained}

    @cached_property
    def untrained_calls(self) -> set[tuple[int, ...]]:
        """Rank and call, if there are several, of which no prediction counts, though some
        should."""
        wanted = {self.call(number) for number in self._wanted_tokens if number in self.at}
        if len(wanted) == 1:
            return set()
        return wanted - {self.call(number) for number in self._trained}

    @cached_property
    def reach(self) -> int:
        """The first place in documents at which hidden states are of no context."""
        return min((self.tokens.place[number] for number in self.unknown), default=0)

    @cached_property
    def edge(self) -> int:
        """The last token up to the first unknown one that begins a rank's part; beyond all tokens
        without one."""
        found = len(self.tokens.ids)
        for number in range(1, min(self.unknown, default=0) + 1):
            if self.rank(number) != self.rank(number - 1):
                found = number
        return found

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
        """Whether documents are repeated so that the batches of all ranks have as many; a sampler
        that fills them up leaves no document out."""
        if self.record.ranks == 1 or self.missing:
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


def _without_ends(pairs: list[Pair]) -> list[Pair]:
    """Returns the predictions that are of no end of a document."""
    return [pair for pair in pairs if pair[1] != END]


def _in_another_order(tokens: Tokens, fit: Fit) -> set[Pair]:
    """Returns with each token the id that follows it, where that is not the next one of its
    document, as documents are in another order."""
    found = set[Pair]()
    for context in set(fit.contexts.values()):
        if context.name not in (TWICE, ORDER):
            continue
        for sequence in context.sequences:
            for number, after in pairwise(sequence.numbers):
                if after != number + 1:
                    found.add((number, tokens.ids[after]))
    return found


def _next_documents(record: Record) -> set[Pair]:
    """Returns with the last token of each document the first id of the next one, in rows or from
    one row to the next."""
    found = set[Pair]()
    for rows in (record.rows, record.calls):
        in_order = [number for row in rows for number in row.numbers if number >= 0]
        for number, after in pairwise(in_order):
            if record.tokens.document[number] != record.tokens.document[after]:
                found.add((number, record.tokens.ids[after]))
    return found


def _around(tokens: Tokens, rows: Iterable[Row]) -> set[Pair]:
    """Returns with the last token of each row its first id."""
    found = set[Pair]()
    for row in rows:
        real = [number for number in row.numbers if number >= 0]
        if real:
            found.add((real[-1], tokens.ids[real[0]]))
    return found
