"""Fit: the context and the weight of every prediction that explain a step's gradient."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from longctx.check.contexts import APART, Context, Sequence
from longctx.check.probe import Tokens
from longctx.check.record import Record, Tensors
from longctx.check.reference import Columns, Reference, Target

EXACT = 1e-4
"""Largest residual of a true context, relative to the gradient: float32 leaves about 1e-6, a wrong context 1e-2 and more."""
OTHERS = -2
"""Stands for all documents that have no context of their own in a mix."""
Prediction = tuple[int, int]
"""Number of a token (-1: padding), and the id that it predicts."""


@dataclass
class Term:
    """Predictions of one sequence: lists of one target per token, and the prediction of every column."""

    sequence: Sequence
    ids: list[int]
    targets: list[list[Target]]
    predictions: list[Prediction]


@dataclass
class Fit:
    """What explains a gradient.

    Attributes:
        contexts: the context of every document; of padding under -1.
        weights: by prediction.
        residual: norm of what is left of the gradient, relative to it.
        loss, gradients: what the loss and all parameters' gradients must then be.
        whole: whether that is all of them; False: predictions from padding are missing.
    """

    contexts: dict[int, Context]
    weights: dict[Prediction, float]
    residual: float
    loss: float
    gradients: Tensors
    whole: bool = True

    @property
    def exact(self) -> bool:
        return self.residual <= EXACT


class Fitter:
    """Explains one gradient by contexts."""

    def __init__(self, record: Record, tokens: Tokens, reference: Reference, gradients: Tensors) -> None:
        self.tokens, self.reference = tokens, reference
        self.gradient = reference.of(gradients)
        self.following = self._following(record)
        self._made: dict[tuple[str, bool], tuple[list[Term], Columns]] = {}

    def fit(self, candidates: list[Context]) -> Fit:
        """Returns the first context that is exact; else the best with other predictions, or a mix, one for each document."""
        tried: list[tuple[float, int]] = []
        for number, context in enumerate(candidates):
            residual, _ = self._solve({OTHERS: context})
            tried.append((residual, number))
            if residual <= EXACT:
                return self._outcome({OTHERS: context})
        best = [candidates[number] for _, number in sorted(tried)[:4]]
        for context in dict.fromkeys((candidates[0], best[0])):
            if (found := self._from_padding(context)) is not None:
                return found
            if self._solve({OTHERS: context}, more=True)[0] <= EXACT:
                return self._outcome({OTHERS: context}, more=True)
        return self._outcome(self._mixed(list(dict.fromkeys((candidates[0], *best))), best[0]))

    def alike(self, fit: Fit, candidates: list[Context]) -> list[str]:
        """Returns the names of other contexts that are exact, too, if the one of `fit` is a fault."""
        names = {context.name for context in fit.contexts.values()}
        if not fit.exact or APART in names:
            return []
        exact = (context.name for context in candidates if self._solve({OTHERS: context})[0] <= EXACT)
        return list(dict.fromkeys(name for name in exact if name not in names))

    def _from_padding(self, context: Context) -> Fit | None:
        """Returns a fit in which padding, of unknown hidden states, predicts first tokens of documents; None if it is none.

        Such a prediction of y with weight w adds w · (softmax(W h) - e(y)) hᵀ: row y gives h, if w is that of all others.
        """
        if self.reference.output is None:
            return None
        matrix = self.reference.named[self.reference.output].detach()
        columns, firsts = self._columns({OTHERS: context}), [ids[0] for ids in self.tokens.probe.documents]
        others = torch.ones(len(matrix), dtype=torch.bool)
        others[firsts] = False
        _, weights = _solved(Columns(columns.left[:, others], columns.right), self.gradient[others])
        of_row = (self.gradient - columns.sum(weights)).norm(dim=1)
        predicted = [first for first in firsts if of_row[first] > 0.1 * of_row.max()]
        hidden, own = torch.zeros(len(predicted), matrix.shape[1], dtype=torch.float64), range(len(predicted))
        added = torch.zeros_like(self.gradient)
        for _ in range(12):
            weight, slope = weights.median(), torch.softmax(hidden @ matrix.T, -1)
            slope[own, predicted] -= 1
            off = (self.gradient - columns.sum(weights) - added)[predicted]
            hidden = hidden + off / (weight * slope[own, predicted])[:, None]
            slope = torch.softmax(hidden @ matrix.T, -1)
            slope[own, predicted] -= 1
            added = weight * slope.T @ hidden
            residual, weights = self._solve({OTHERS: context}, without=added)
            if residual <= EXACT:
                found = self._outcome({OTHERS: context}, without=added)
                return replace(found, weights=found.weights | {(-1, first): float(weight) for first in predicted}, whole=False)
        return None

    def _mixed(self, candidates: list[Context], best: Context) -> dict[int, Context]:
        """Returns a context for each document, changed one at a time while the residual falls."""
        documents = sorted({self.tokens.document[n] for n in range(len(self.tokens))})
        chosen = {OTHERS: best} | dict.fromkeys(documents, best)
        least = self._solve(chosen)[0]
        for _ in range(2):
            before = least
            for document in documents:
                for context in candidates:
                    residual = self._solve(chosen | {document: context})[0]
                    if residual < 0.9 * least:
                        least, chosen = residual, chosen | {document: context}
            if least > 0.9 * before or least <= EXACT:
                break
        return chosen

    def _following(self, record: Record) -> dict[int, set[int]]:
        """Returns the ids that follow each token in its document, or in a row: what it might have been made to predict."""
        found = defaultdict[int, set[int]](set)
        for number in range(len(self.tokens)):
            if (after := self.tokens.next(number)) is not None:
                found[number].add(self.tokens.ids[after])
        for row in [*record.rows, *(row for call in record.calls for row in call.rows)]:
            for number, after in zip(self.tokens.numbers(row), row[1:], strict=False):
                if number >= 0:
                    found[number].add(after)
        return found

    def _targets(self, number: int, more: bool) -> list[int]:
        targets = sorted(self.following[number])
        if more:
            after = self.tokens.next(number)
            second = None if after is None else self.tokens.next(after)
            targets += [self.tokens.ids[each] for each in (number, second) if each is not None]
        return list(dict.fromkeys(targets))

    def _terms(self, context: Context, more: bool) -> tuple[list[Term], Columns]:
        key = context.name + str(hash(context.sequences)), more
        if key not in self._made:
            terms = [term for sequence in context.sequences if (term := self._term(sequence, more)).predictions]
            columns = [self.reference.columns(term.sequence, term.ids, term.targets) for term in terms]
            self._made[key] = terms, Columns.joined(columns)
        return self._made[key]

    def _term(self, sequence: Sequence, more: bool) -> Term:
        pad = self.tokens.probe.pad
        ids = [self.tokens.ids[number] if number >= 0 else pad for number in sequence.numbers]
        each = [
            self._targets(number, more) if number >= 0 else [after]
            for number, after in zip(sequence.numbers, [*ids[1:], pad], strict=True)
        ]
        targets: list[list[Target]] = [
            [options[turn] if turn < len(options) else None for options in each] for turn in range(max(map(len, each)))
        ]
        predictions = [
            (number, target)
            for turn in targets
            for number, target in zip(sequence.numbers, turn, strict=True)
            if target is not None
        ]
        return Term(sequence, ids, targets, predictions)

    def _chosen(self, contexts: dict[int, Context], more: bool) -> Iterator[tuple[list[Term], torch.Tensor, Columns]]:
        """Yields terms of each context with the columns of its documents. Under OTHERS stands the context of all others."""
        of_others = contexts[OTHERS]
        for context in {id(context): context for context in contexts.values()}.values():
            terms, columns = self._terms(context, more)
            document = [-1 if n < 0 else self.tokens.document[n] for term in terms for n, _ in term.predictions]
            used = torch.tensor([contexts.get(each, of_others) is context for each in document], dtype=torch.bool)
            yield terms, used, columns

    def _columns(self, contexts: dict[int, Context], more: bool = False) -> Columns:
        return Columns.joined([columns[used] for _, used, columns in self._chosen(contexts, more)])

    def _solve(
        self, contexts: dict[int, Context], more: bool = False, without: torch.Tensor | None = None
    ) -> tuple[float, torch.Tensor]:
        """Returns the relative residual, and the weights of all used columns, of the gradient `without` a part of it."""
        columns = self._columns(contexts, more)
        left, weights = _solved(columns, self.gradient if without is None else self.gradient - without)
        return left / float(self.gradient.norm().clamp_min(1e-300)), weights

    def _outcome(self, contexts: dict[int, Context], more: bool = False, without: torch.Tensor | None = None) -> Fit:
        residual, weights = self._solve(contexts, more, without)
        found, terms, at = defaultdict[Prediction, float](float), [], 0
        for of_context, used, _ in self._chosen(contexts, more):
            spread = torch.zeros(len(used), dtype=torch.float64)
            spread[used] = weights[at : at + int(used.sum())]
            at += int(used.sum())
            start = 0
            for term in of_context:
                own = spread[start : start + len(term.predictions)]
                start += len(own)
                if own.any():
                    terms.append((term.sequence, term.ids, term.targets, own))
                for prediction, weight in zip(term.predictions, own.tolist(), strict=True):
                    found[prediction] += weight
        given = {document: context for document, context in contexts.items() if document != OTHERS}
        every = {document: given.get(document, contexts[OTHERS]) for document in range(len(self.tokens.probe.lengths))}
        of_padding = [abs(weight) for (number, _), weight in found.items() if number < 0]
        # Padding is alike in many places, so that the weight of each is in doubt.
        whole = max(of_padding, default=0.0) < 1e-3 * max(map(abs, found.values()))
        return Fit(every, dict(found), residual, *self.reference.gradients(terms), whole)


def _solved(columns: Columns, wanted: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Returns the norm of what is left of a gradient by least squares, and the weights of the columns."""
    if not len(columns):
        return float(wanted.norm()), torch.zeros(0, dtype=torch.float64)
    gram, projected = columns.gram(), columns.project(wanted)
    scale = gram.diagonal().sqrt().clamp_min(1e-300)
    gram = gram / scale[:, None] / scale[None, :]
    lower, failed = torch.linalg.cholesky_ex(gram)
    if failed or float(lower.diagonal().min()) < 1e-5:  # two columns that are alike: they share the weight
        values, vectors = torch.linalg.eigh(gram)
        kept = values > 1e-11 * values[-1]
        weights = (vectors[:, kept] / values[kept]) @ (vectors[:, kept].T @ (projected / scale)) / scale
    else:
        weights = torch.cholesky_solve((projected / scale)[:, None], lower)[:, 0] / scale
    return float((wanted - columns.sum(weights)).norm()), weights
