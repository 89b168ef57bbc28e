"""Facts: what a record and its fit say of tokens and predictions."""

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from math import copysign, inf

from .contexts import ORDER, TWICE, Sequence
from .fit import Fit, Pair
from .probe import END, Tokens
from .record import Record, Row
from .reference import Prediction, Reference
from .tolerances import FLOAT32

LEAST_SHARE = 0.05
"""Of the largest right weight: a smaller one is not the measure of its own rounding."""

LEAST_SHARE_OF_ROUGH = 0.5
"""The same, of what least squares find in a coarse dtype."""
TIMES_OF_ALIKE = 4.0
"""Times what a coarse dtype leaves of weights, of predictions that least squares hardly tell apart:
a pair of ends of texts that both predict an end had 0.05 in bfloat16."""


class Facts:
    """What a record and its fit say of tokens and predictions.

    Attributes:
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
        self.aim = record.aim
        self.right = self.aim.weights(self.wanted, tokens, reference)
        self.same += self.aim.rounding(record, reference)
        is_coarse = self.limits.weights > FLOAT32.weights
        self._is_rough = fit.shown is None and is_coarse
        self._least_share = LEAST_SHARE_OF_ROUGH if self._is_rough else LEAST_SHARE
        sizes = [abs(weight) for weight in self.right.values()]
        self._largest = max(sizes, default=0.0)
        self._usual = sum(sizes) / max(len(sizes), 1) or inf
        self.relative = {pair: self._relative(pair, weight) for pair, weight in fit.pairs().items()}
        # Nobody knows which tokens predict the ends of documents.
        if fit.shown is None and not any(target == END for _, target in self.relative):
            self.wanted = [pair for pair in self.wanted if pair[1] != END]
            every_wanted = [pair for pair in every_wanted if pair[1] != END]
            self.right = self.aim.weights(self.wanted, tokens, reference)
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

    def _relative(self, pair: Pair, weight: float) -> float:
        """Returns the weight of a prediction relative to the right one; of one that should not
        count, to the usual one. Of a right one that is far below others, the difference is compared
        with these, as what is left by rounding is."""
        if pair not in self.right:
            return weight / self._usual
        right = self.right[pair]
        least = self._least_share * self._largest
        if abs(right) >= least:
            return weight / right
        return 1 + (weight - right) / copysign(least, right)

    def _least_weight(self) -> float:
        """Returns what a weight has to exceed to count."""
        if self.fit.shown is None:
            least = self.limits.weights * max(self._largest / self._usual, 1.0)
            if self._is_rough:
                least *= TIMES_OF_ALIKE
            return least
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

    def _of_rules(self) -> None:
        """Sets what only rules ask for."""
        tokens = self.tokens
        self.unshifted = any(
            n >= 0 and target == tokens.ids[n] and target != tokens.probe.pad
            for n, target in self.extra
        )
        calls = self.record.calls
        self.firsts = {ids[0] for ids in tokens.probe.documents}
        self.next_documents = _next_documents(self.record)
        self.around = _around(tokens, self.record.rows)
        self.around_parts = _around(tokens, calls)
        self.starts = set[int]()
        self.adjacent = set[Pair]()
        for row in calls:
            self.adjacent.update(zip(row.numbers, row.ids[1:], strict=False))
            for piece in tokens.pieces(row.numbers):
                if tokens.place[piece[0]]:
                    self.starts.add(piece[0])
        self.in_another_order = _in_another_order(tokens, self.fit)
        self.of_row = dict[int, int]()
        for row in calls:
            real = [number for number in row.numbers if number >= 0]
            for number in real:
                self.of_row[number] = real[0]
        trained = [number for number, _ in self.kept | self.extra if number >= 0]
        with_loss = {tokens.document[number] for number in trained}
        self.untrained = {tokens.document[number] for number, _ in self.wanted} - with_loss
        trained_ranks = {self.rank(number) for number in trained}
        wanted_ranks = {self.rank(number) for number, _ in self.wanted}
        self.untrained_ranks = wanted_ranks - trained_ranks if len(wanted_ranks) > 1 else set()
        trained_calls = {self.at[number][:2] for number in trained if number in self.at}
        wanted_calls = {self.at[number][:2] for number, _ in self.wanted if number in self.at}
        self.untrained_calls = wanted_calls - trained_calls if len(wanted_calls) > 1 else set()
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
