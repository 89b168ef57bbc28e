"""Fit: which token predicts what, with which weight and in which context, so that a step's gradient
follows."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from .contexts import APART, Context, Sequence
from .gathered import Record
from .off import Cause
from .probe import END
from .reference import Columns, Prediction, Reference

Pair = tuple[int, int]
"""Number of a token (-1: padding, or what no context has), and the id that it predicts."""


@dataclass(frozen=True)
class Shown:
    """What a step showed at its output layer, beside weights.

    Attributes:
        states: of each token in a call, whether a context has its hidden state.
        documents: those whose hidden states are not all as they should be.
        objective: tokens whose objective is not cross-entropy, with what that leaves of it.
        beside: names of terms that explain the rest.
        after: what is left of the output layer's gradient without that of backward, relative to it;
            None where the layer has no gradient of its own.
        scaled: whether the factor between backward and the optimizer is known.
        alike: names of wrong contexts that have all hidden states.
        first_off: name of the first part of a layer whose output is wrong for a token without a
            context; "" if that is not known.
        cause: why that is so; None if that is not known.
        focus: γ of a focal loss that weights follow; 0: they do not.
        slopes: ∂loss/∂ of what the output layer returned, as the optimizer would get it, for the
            tokens of each sequence [tokens, V]; None if that of some tokens has no sequence.
        of_calls: the same of each call, by rank and call; none where slopes are None.
    """

    states: dict[int, bool]
    documents: set[int]
    objective: dict[int, float]
    beside: list[str]
    after: float | None
    scaled: bool
    alike: list[str]
    first_off: str
    cause: Cause | None
    focus: float
    slopes: dict[Sequence, torch.Tensor] | None
    of_calls: dict[tuple[int, int], dict[Sequence, torch.Tensor]]


@dataclass
class Fit:
    """What explains a gradient.

    Attributes:
        contexts: of each document.
        weights: of predictions in these contexts.
        unknown: weights of predictions by hidden states that no context has.
        residual: norm of what is left of the gradient, relative to it.
        tolerance: largest residual that rounding explains, or what is unknown.
        roughly: whether some hidden states are unknown, so that weights are not exact.
        shown: what the output layer showed, if it did: then nothing is inferred.
        errors: what the loss sends back to logits otherwise, in words; "": nothing.
    """

    contexts: dict[int, Context]
    weights: dict[Prediction, float]
    unknown: dict[Pair, float]
    residual: float
    tolerance: float
    roughly: bool = False
    shown: Shown | None = None
    errors: str = ""

    @property
    def exact(self) -> bool:
        return self.residual <= self.tolerance

    @property
    def unseen(self) -> set[int]:
        """Tokens whose hidden states no context has."""
        if self.shown is not None:
            return {number for number, known in self.shown.states.items() if not known}
        return {number for number, _ in self.unknown if number >= 0}

    def pairs(self) -> dict[Pair, float]:
        """Returns the weight of all predictions by token and id."""
        found = defaultdict[Pair, float](float)
        for prediction, weight in self.weights.items():
            found[prediction.number, prediction.target] += weight
        for pair, weight in self.unknown.items():
            found[pair] += weight
        return dict(found)

    @property
    def whole(self) -> bool:
        """Whether all of the gradient follows from what forward gave."""
        if self.shown is not None:
            return self.shown.slopes is not None
        # Padding is alike in many places, so that the weight of each is in doubt.
        pairs = self.pairs()
        of_padding = max(
            (abs(weight) for (number, _), weight in pairs.items() if number < 0), default=0.0
        )
        return (
            not self.unknown
            and not self.roughly
            and of_padding < 1e-3 * max(map(abs, pairs.values()))
        )


class Fitter:
    """Explains the gradient of a record by its contexts, the right one first."""

    def __init__(self, record: Record, reference: Reference, candidates: list[Context]) -> None:
        tokens = record.tokens
        self.tokens = tokens
        self.reference = reference
        self.candidates = candidates
        self.gradient = reference.of(record.gradients)
        self.tolerances = record.tolerances
        self.documents = range(len(tokens.probe.lengths))
        # Ids after each token, in its document or in a row.
        self.following = defaultdict[int, dict[int, None]](dict)
        for document in self.documents:
            *others, last = tokens.of(document)
            for number in others:
                self.following[number][tokens.ids[number + 1]] = None
            if tokens.ids[last] == END:  # which may be made to predict itself
                self.following[last][END] = None
        for row in (*record.rows, *record.calls):
            for number, after in zip(row.numbers, row.ids[1:], strict=False):
                self.following[number][after] = None
        self._columns: dict[tuple[Sequence, ...], tuple[list[Prediction], Columns]] = {}

    def fit(self) -> Fit:
        """Returns the first context that is exact for all documents; else what the gradient tells;
        else the nearest context."""
        fits = list[Fit]()
        for context in self.candidates:
            fits.append(self._of(context))
            if fits[-1].exact:
                return fits[-1]
        nearest = min(fits, key=lambda fit: fit.residual)
        matrix = self.reference.matrix
        read = Reading(self, nearest.contexts[0], matrix).fit() if matrix is not None else nearest
        if read.exact:
            return read
        return nearest

    def alike(self, fit: Fit) -> list[str]:
        """Returns the names of other contexts that are exact, too, if the one of `fit` is a
        fault."""
        names = {context.name for context in fit.contexts.values()}
        if not fit.exact or APART in names or fit.unseen:
            return []
        others = (context for context in self.candidates if context.name not in names)
        return list(dict.fromkeys(context.name for context in others if self._of(context).exact))

    def _of(self, context: Context) -> Fit:
        """Returns the best weights in a context."""
        predictions, columns = self.columns(context)
        left, weights = columns.solve(self.gradient)
        found = dict(zip(predictions, weights.tolist(), strict=True))
        return Fit(
            dict.fromkeys(self.documents, context),
            found,
            unknown={},
            residual=self.relative(left),
            tolerance=self.tolerances.residual,
        )

    def relative(self, left: torch.Tensor) -> float:
        return float(left.norm() / self.gradient.norm().clamp_min(1e-300))

    def columns(self, context: Context) -> tuple[list[Prediction], Columns]:
        """Returns the predictions of all that follows a token somewhere, and their columns."""
        if context.sequences not in self._columns:
            found = list[Prediction]()
            for sequence in context.sequences:
                after = [
                    *(self.reference.id_of(number) for number in sequence.numbers[1:]),
                    self.tokens.probe.pad,
                ]
                for place, number in enumerate(sequence.numbers):
                    targets = self.following[number] if number >= 0 else [after[place]]
                    found += [Prediction(sequence, place, target) for target in targets]
            self._columns[context.sequences] = found, self.reference.columns(found)
        return self._columns[context.sequences]


class Reading:
    """What a gradient tells without a context for all documents: weight and hidden state of every
    prediction, by its own row.

    Row y is w · (softmax(W h) - 1)[y] · h, but for small parts of others, if one token alone
    predicts y. All h have the length that the last norm gives them, so that w and h follow,
    whatever forward was; contexts tell whose h it is.
    """

    def __init__(self, fitter: Fitter, nearest: Context, matrix: torch.Tensor) -> None:
        self.fitter = fitter
        self.tokens = fitter.tokens
        self.nearest = nearest
        self.matrix = matrix
        self.size = float(fitter.columns(nearest)[1].right.norm(dim=1).median())
        self.context_of = dict[Sequence, Context]()
        for context in fitter.candidates:
            for sequence in context.sequences:
                self.context_of.setdefault(sequence, context)
        self.owners = [
            (sequence, place)
            for sequence in self.context_of
            for place in range(len(sequence.numbers))
        ]
        self.owned = torch.cat([fitter.reference.states(sequence) for sequence in self.context_of])

    def fit(self) -> Fit:
        """Returns the best fit. Of ids that many tokens predict, columns are known; if not, all
        these tokens count as one."""
        pad = self.tokens.probe.pad
        fits = [
            self._fit(shared)
            for shared in dict.fromkeys(map(frozenset, ({END, pad}, {END}, set[int]())))
        ]
        return min(fits, key=lambda fit: (not fit.exact, len(fit.unseen), fit.residual))

    def _fit(self, shared: frozenset[int]) -> Fit:
        """Returns the fit in which several tokens predict the `shared` ids."""
        given = dict.fromkeys((*self.tokens.ids, self.tokens.probe.pad))
        ids = [token for token in given if token not in shared]
        contexts = dict.fromkeys(self.fitter.documents, self.nearest)
        as_one = END in ids  # which is not exact
        same = self.fitter.tolerances.direction
        for tolerance in (100 * same, 50 * same if as_one else same):
            # The second time, the ends of documents have the contexts of their documents.
            known = self._known(contexts, shared)
            columns = self.fitter.reference.columns(known)
            h, of_ids, left, of_known = _read(
                self.fitter.gradient,
                self.matrix,
                ids=torch.tensor(ids),
                size=self.size,
                known=columns,
            )
            weights, unknown = self._matched(ids, h, of_ids, tolerance)
            contexts = {
                document: self._context(document, weights) for document in self.fitter.documents
            }
        left[list(shared)] = 0
        weights |= dict(zip(known, of_known.tolist(), strict=True))
        if as_one:
            weights = {each: weight for each, weight in weights.items() if each.target != END}
            unknown.pop((-1, END), None)
        roughly = bool(unknown) or as_one
        if roughly:
            tolerance = self.fitter.tolerances.residual_of_unknown
        else:
            tolerance = self.fitter.tolerances.residual
        return Fit(
            contexts,
            weights,
            unknown=unknown,
            residual=self.fitter.relative(left),
            tolerance=tolerance,
            roughly=roughly,
        )

    def _known(self, contexts: Mapping[int, Context], shared: frozenset[int]) -> list[Prediction]:
        """Returns the predictions of shared ids by tokens in the contexts of their documents."""
        return [
            each
            for context in dict.fromkeys(contexts.values())
            for each in self.fitter.columns(context)[0]
            if each.target in shared
            and each.number >= 0
            and contexts[self.tokens.document[each.number]] is context
        ]

    def _matched(
        self, ids: list[int], h: torch.Tensor, weights: torch.Tensor, near: float
    ) -> tuple[dict[Prediction, float], dict[Pair, float]]:
        """Returns weights of predictions: whose hidden state predicts an id; and by token and id,
        where it is none's.

        The token before the predicted one comes first, in its first context.
        """
        alike = torch.cdist(F.normalize(h), F.normalize(self.owned)) < near
        known = dict[Prediction, float]()
        unknown = dict[Pair, float]()
        for at, (token, weight) in enumerate(zip(ids, weights.tolist(), strict=True)):
            if weight <= 1e-3 * float(weights.max()):
                continue
            number = self.tokens.number.get(token, 0)
            before = number - 1 if self.tokens.place[number] else -1
            predictions = {
                n: Prediction(self.owners[n][0], self.owners[n][1], token)
                for n in alike[at].nonzero()[:, 0].tolist()
            }
            if not predictions:
                unknown[before, token] = weight
                continue
            nearest = min(predictions, key=lambda n: (predictions[n].number != before, n))
            known[predictions[nearest]] = weight * float(h[at].norm() / self.owned[nearest].norm())
        return known, unknown

    def _context(self, document: int, weights: Mapping[Prediction, float]) -> Context:
        """Returns the wrong context that most tokens of a document have, or the right one."""
        found = (
            each
            for each in weights
            if each.number >= 0 and self.tokens.document[each.number] == document
        )
        votes = Counter(self.context_of[each.sequence] for each in found)
        wrong = (context for context in votes if context.name != APART)
        return max(wrong, key=votes.__getitem__, default=self.fitter.candidates[0])


def _read(
    gradient: torch.Tensor, matrix: torch.Tensor, ids: torch.Tensor, size: float, known: Columns
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns h [T, H] and weights [T] of predictions of `ids` [T], what is left [V, H], and
    weights of known columns."""
    one = torch.eye(len(ids)).double()
    of_ids = gradient.new_zeros(len(ids), len(matrix))
    of_ids[range(len(ids)), ids] = 1
    h = torch.zeros(len(ids), matrix.shape[1]).double()
    of_known = torch.zeros(len(known.left)).double()
    for _ in range(20):
        p = torch.softmax(h @ matrix.T, -1)
        weighted = -torch.linalg.solve(one - p[:, ids].T, (gradient - known.sum(of_known))[ids])
        weights = weighted.norm(dim=1) / size
        h = weighted / weights[:, None].clamp_min(1e-300)
        left = gradient - (torch.softmax(h @ matrix.T, -1) - of_ids).T @ weighted
        left, of_known = known.solve(left)
    return h, weights, left, of_known
