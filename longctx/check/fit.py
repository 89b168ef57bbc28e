"""Fit: which token predicts what, with which weight and in which context, so that a step's gradient follows."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

from longctx.check.contexts import APART, Context, Sequence
from longctx.check.probe import END, Tokens
from longctx.check.record import Record, Tensors
from longctx.check.reference import Columns, Reference, Target

EXACT, NEAR = 1e-4, 2e-2
"""Largest residual relative to the gradient: of a true context, where float32 leaves about 1e-6, a wrong one 1e-2 and more; and
where hidden states are unknown."""
SAME_STATE = 1e-4
"""Largest relative difference of two hidden states that are the same."""
Pair = tuple[int, int, int]
"""A prediction in a context: the context's number, the token's, and the id."""
States = list[tuple[list[int], torch.Tensor]]
"""By context: numbers of tokens, and their hidden states [tokens, H]."""
Prediction = tuple[int, int]
"""Number of a token (-1: padding, or what no context has), and the id that it predicts."""


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
        residual: norm of what is left of the gradient, relative to it.
        loss, gradients: what the loss and all parameters' gradients must then be.
        whole: whether that is all of them; False: some predictions are those of unknown hidden states.
        unknown: tokens whose hidden states no context has.
        tolerance: largest residual that rounding explains, or what is unknown.
    """

    contexts: dict[int, Context]
    weights: dict[Prediction, float]
    residual: float
    loss: float
    gradients: Tensors
    whole: bool = True
    unknown: list[int] = field(default_factory=list)
    tolerance: float = EXACT

    @property
    def exact(self) -> bool:
        return self.residual <= self.tolerance


class Fitter:
    """Explains one gradient."""

    def __init__(self, record: Record, tokens: Tokens, reference: Reference) -> None:
        self.tokens, self.reference = tokens, reference
        self.gradient = reference.of(record.gradients)
        self.documents = range(len(tokens.probe.lengths))
        self.following = defaultdict[int, dict[int, None]](dict)  # ids after each token, in its document or in a row
        for document in self.documents:
            for number in tokens.of(document)[:-1]:
                self.following[number][tokens.ids[number + 1]] = None
            if tokens.ids[tokens.of(document)[-1]] == END:  # which may be made to predict itself
                self.following[tokens.of(document)[-1]][END] = None
        for row in [*record.rows, *(call.ids for call in record.calls)]:
            for number, after in zip(tokens.numbers(row), row[1:], strict=False):
                self.following[number][after] = None
        self._made: dict[tuple[Sequence, ...], tuple[list[Term], Columns]] = {}

    def fit(self, candidates: list[Context]) -> Fit:
        """Returns the first context that is exact for all documents; else what the gradient tells; else the nearest context."""
        tried = list[tuple[float, int, torch.Tensor]]()
        for at, context in enumerate(candidates):
            residual, weights = self._solve(context)
            tried.append((residual, at, weights))
            if residual <= EXACT:
                break
        residual, at, weights = min(tried, key=lambda each: each[:2])
        best, pairs = candidates[at], defaultdict[Pair, float](float)
        if residual > EXACT and (inverted := self._inverted(candidates, best)) is not None and inverted.exact:
            return inverted
        predictions = (each for term in self._terms(best)[0] for each in term.predictions)
        for prediction, weight in zip(predictions, weights.tolist(), strict=True):
            pairs[at, *prediction] += weight
        return self._outcome(candidates, pairs, {}, dict.fromkeys(self.documents, best), residual, EXACT)

    def _outcome(
        self,
        candidates: list[Context],
        pairs: dict[Pair, float],
        unknown: dict[Prediction, float],
        contexts: dict[int, Context],
        residual: float,
        tolerance: float,
    ) -> Fit:
        found = defaultdict[Prediction, float](float)
        for prediction, weight in [*((each[1:], weight) for each, weight in pairs.items()), *unknown.items()]:
            found[prediction] += weight
        # Padding is alike in many places, so that the weight of each is in doubt.
        of_padding = max((abs(weight) for (number, _), weight in found.items() if number < 0), default=0.0)
        whole = not unknown and tolerance == EXACT and of_padding < 1e-3 * max(map(abs, found.values()))
        gradients = self.reference.gradients(self._of_pairs(candidates, pairs))
        lost = [number for number, _ in unknown if number >= 0]
        return Fit(contexts, dict(found), residual, *gradients, whole, lost, tolerance)

    def alike(self, fit: Fit, candidates: list[Context]) -> list[str]:
        """Returns the names of other contexts that are exact, too, if the one of `fit` is a fault."""
        names = {context.name for context in fit.contexts.values()}
        if not fit.exact or APART in names or fit.unknown:
            return []
        exact = (context.name for context in candidates if self._solve(context)[0] <= EXACT)
        return list(dict.fromkeys(name for name in exact if name not in names))

    def _solve(self, context: Context) -> tuple[float, torch.Tensor]:
        """Returns the relative residual, and the weights of all predictions."""
        left, weights = _least_squares(self._terms(context)[1], self.gradient)
        return float(left.norm() / self.gradient.norm().clamp_min(1e-300)), weights

    def _terms(self, context: Context) -> tuple[list[Term], Columns]:
        """Returns the predictions of all that follows a token somewhere, and their columns."""
        if context.sequences not in self._made:
            terms = [self._term(sequence, lambda number: [*self.following[number]]) for sequence in context.sequences]
            terms = [term for term in terms if term.predictions]
            columns = [self.reference.columns(term.sequence, term.ids, term.targets) for term in terms]
            self._made[context.sequences] = terms, Columns(*map(torch.cat, zip(*columns, strict=True)))
        return self._made[context.sequences]

    def _ids(self, sequence: Sequence) -> list[int]:
        return [self.tokens.ids[number] if number >= 0 else self.tokens.probe.pad for number in sequence.numbers]

    def _term(self, sequence: Sequence, targets_of: Callable[[int], list[int]]) -> Term:
        ids = self._ids(sequence)
        after = zip(sequence.numbers, [*ids[1:], self.tokens.probe.pad], strict=True)
        each = [targets_of(number) if number >= 0 else [following] for number, following in after]
        turns = range(max(map(len, each)))
        targets: list[list[Target]] = [[options[turn] if turn < len(options) else None for options in each] for turn in turns]
        pairs = ((number, target) for turn in targets for number, target in zip(sequence.numbers, turn, strict=True))
        return Term(sequence, ids, targets, [(number, target) for number, target in pairs if target is not None])

    # --- what the gradient tells without a context for all documents

    def _inverted(self, candidates: list[Context], best: Context) -> Fit | None:
        """Returns weight and context of every prediction by its own row of the gradient; None without an output matrix.

        Row y is w · (softmax(W h) - 1)[y] · h, but for small parts of others, if one token alone predicts y. All h have the
        length that the last norm gives them, so that w and h follow, whatever forward was; contexts tell whose h it is.
        """
        matrix, size = self.reference.matrix, float(self._terms(best)[1].right.norm(dim=1).median())
        if matrix is None:
            return None
        # Of ids that many tokens predict, columns are known; or, if their tokens are unknown too, all of them count as one.
        pad, states = self.tokens.probe.pad, [self._states(context) for context in candidates]
        tries = {frozenset(shared): None for shared in ({END, pad}, {END}, set[int]())}
        fits = (self._inverted_but(set(shared), candidates, best, matrix, size, states) for shared in tries)
        return min(fits, key=lambda fit: (not fit.exact, len(fit.unknown), fit.residual))

    def _inverted_but(
        self, shared: set[int], candidates: list[Context], best: Context, matrix: torch.Tensor, size: float, states: States
    ) -> Fit:
        given = dict.fromkeys((*self.tokens.ids, self.tokens.probe.pad))
        ids, chosen = [token for token in given if token not in shared], dict.fromkeys(self.documents, best)
        as_one = END in given and END not in shared  # which is not exact
        near = 50 * SAME_STATE if as_one else SAME_STATE
        for tolerance in (100 * SAME_STATE, near):  # then the ends of documents have the contexts of their documents
            known, columns = self._shared(candidates, chosen, shared)
            h, weights, left, of_known = _read(self.gradient, matrix, torch.tensor(ids), size, columns)
            pairs, unknown = self._matched(ids, h, weights, states, tolerance)
            chosen = {document: self._context_of(document, pairs, candidates) for document in self.documents}
        left[list(shared)] = 0
        pairs |= dict(zip(known, of_known.tolist(), strict=True))
        if as_one:
            pairs = {each: weight for each, weight in pairs.items() if each[2] != END}
            unknown.pop((-1, END), None)
        residual = float(left.norm() / self.gradient.norm())
        return self._outcome(candidates, pairs, unknown, chosen, residual, NEAR if unknown or as_one else EXACT)

    def _states(self, context: Context) -> tuple[list[int], torch.Tensor]:
        """Returns the numbers of a context's tokens and their hidden states [tokens, H]."""
        numbers = [number for sequence in context.sequences for number in sequence.numbers]
        return numbers, torch.cat([self.reference.states(each, self._ids(each)) for each in context.sequences])

    def _shared(self, candidates: list[Context], chosen: dict[int, Context], shared: set[int]) -> tuple[list[Pair], Columns]:
        """Returns predictions of ids that many tokens predict: number of the context, token, id; and their columns."""
        keys, parts = list[Pair](), list[Columns]()
        for at, context in enumerate(candidates):
            terms, columns = self._terms(context)
            predictions = [prediction for term in terms for prediction in term.predictions]
            used = [
                place
                for place, (number, target) in enumerate(predictions)
                if target in shared and number >= 0 and chosen[self.tokens.document[number]] is context
            ]
            keys += [(at, *predictions[place]) for place in used]
            parts.append(Columns(columns.left[used], columns.right[used]))
        return keys, Columns(*map(torch.cat, zip(*parts, strict=True)))

    def _matched(
        self, ids: list[int], h: torch.Tensor, weights: torch.Tensor, states: States, near: float
    ) -> tuple[dict[Pair, float], dict[Prediction, float]]:
        """Returns weights by context, token and id: whose hidden state predicts an id; by token and id, where it is none's.

        The token before the predicted one comes first, in its first context.
        """
        owners = [(at, number) for at, (numbers, _) in enumerate(states) for number in numbers]
        owned = torch.cat([state for _, state in states])
        alike = torch.cdist(F.normalize(h), F.normalize(owned)) < near
        pairs, unknown = dict[Pair, float](), dict[Prediction, float]()
        for at, (token, weight) in enumerate(zip(ids, weights.tolist(), strict=True)):
            if weight > 1e-3 * float(weights.max()):
                before = self.tokens.before(token)
                if found := alike[at].nonzero()[:, 0].tolist():
                    nearest = min(found, key=lambda n: (owners[n][1] != before, owners[n]))
                    pairs[*owners[nearest], token] = weight * float(h[at].norm() / owned[nearest].norm())
                else:
                    unknown[before, token] = weight
        return pairs, unknown

    def _context_of(self, document: int, pairs: Iterable[Pair], candidates: list[Context]) -> Context:
        """Returns the wrong context that most tokens of a document have, or the right one."""
        votes = Counter(at for at, number, _ in pairs if number >= 0 and self.tokens.document[number] == document)
        return candidates[max((at for at in votes if candidates[at].name != APART), key=votes.__getitem__, default=0)]

    def _of_pairs(self, candidates: list[Context], pairs: dict[Pair, float]) -> Iterable[tuple[Term, torch.Tensor]]:
        """Yields terms, and the weights of their predictions."""
        for at, context in enumerate(candidates):
            own = {(number, target): weight for (n, number, target), weight in pairs.items() if n == at}
            targets = defaultdict[int, list[int]](list)
            for number, target in own:
                targets[number].append(target)
            for sequence in context.sequences:
                term = self._term(sequence, targets.__getitem__)
                given = [own.pop(each, 0.0) for each in term.predictions]
                if any(given):
                    yield term, torch.tensor(given, dtype=torch.float64)


def _read(
    gradient: torch.Tensor, matrix: torch.Tensor, ids: torch.Tensor, size: float, known: Columns
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns h [T, H] and weights [T] of predictions of `ids` [T], what is left [V, H], and weights of known columns."""
    one, of_ids = torch.eye(len(ids)).double(), gradient.new_zeros(len(ids), len(matrix))
    of_ids[range(len(ids)), ids] = 1
    h, of_known = torch.zeros(len(ids), matrix.shape[1]).double(), torch.zeros(len(known.left)).double()
    for _ in range(20):
        p = torch.softmax(h @ matrix.T, -1)
        weighted = -torch.linalg.solve(one - p[:, ids].T, (gradient - known.sum(of_known))[ids])
        weights = weighted.norm(dim=1) / size
        h = weighted / weights[:, None].clamp_min(1e-300)
        left = gradient - (torch.softmax(h @ matrix.T, -1) - of_ids).T @ weighted
        left, of_known = _least_squares(known, left)
    return h, weights, left, of_known


def _least_squares(columns: Columns, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what is left of a gradient, and the weights of the columns."""
    if not len(columns.left):
        return wanted, torch.zeros(0, dtype=torch.float64)
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
    return wanted - columns.sum(weights), weights
