"""The fit of a step whose output layer was looked at: whose hidden state each token has, what it
predicts with which weight, and what became of the gradient after backward."""

import math
from collections import defaultdict
from statistics import median
from typing import NamedTuple

import torch
from torch.nn import functional as F

from .causes import cause_of
from .contexts import APART, Context, Sequence
from .fit import Fit, Pair, Shown
from .gathered import Record
from .looked import Looked
from .objectives import focus
from .off import FirstOff, Spot
from .reference import LAST, Columns, Prediction, Reference

NEARER = 0.5
"""Share of a context's distance from hidden states that another one has to fall below: both are
within tolerance where dtypes are coarse."""
LEAST_SHARE = 1e-3
"""Of the largest gradient's norm: smaller ones do not tell a factor."""


class Token(NamedTuple):
    """A token of a call: its number in the probe (-1: padding), rank, call, target, weight, what is
    left of its objective without cross-entropy, and how likely its target is."""

    number: int
    rank: int
    call: int
    target: int
    weight: float
    left: float
    chance: float


class Place(NamedTuple):
    """A place of a sequence of a context, and the relative difference of the hidden state of a
    token from the one there."""

    sequence: Sequence
    at: int
    apart: float


def fit_shown(
    record: Record, looked: list[Looked], reference: Reference, candidates: list[Context]
) -> Fit:
    """Returns the fit of a step by what its ranks' output layers showed; the first context is the
    right one."""
    seen = Seen(record, looked, reference=reference, candidates=candidates)
    factors, after = _factors(seen.tokens, looked, record=record, reference=reference)
    slopes = seen.slopes(factors)
    if after is not None and slopes is not None and len(record.gradients) > 1:
        rightly = _explained(record, reference, slopes)
        is_one = len(set(factors.values())) == 1 and after <= record.tolerances.after
        if not (is_one and rightly):
            # The output layer's gradient alone may be the one that is wrong.
            usual = _usual(seen, factors, record=record, reference=reference)
            if not rightly or usual.explained > rightly:
                factors = usual.factors
                slopes = usual.slopes
                after = usual.after
    weights, unknown = seen.weights(factors)
    if after is None:
        scaled = False
    else:
        scaled = after <= record.tolerances.after
    if after is None and slopes is not None:
        factor = _factor_of_all(record, reference, slopes)
        weights = {prediction: weight * factor for prediction, weight in weights.items()}
        slopes = {sequence: each * factor for sequence, each in slopes.items()}
        factors = {call: each * factor for call, each in factors.items()}
        scaled = True
    limit = record.tolerances.objective
    off = seen.first_off()
    shown = Shown(
        seen.known,
        seen.documents_off(),
        objective={each.number: each.left for each in seen.tokens if not each.left <= limit},
        beside=list(dict.fromkeys(name for each in looked for name in each.beside)),
        after=after,
        scaled=scaled,
        alike=seen.alike(),
        first_off=off.part if off is not None else "",
        cause=cause_of(off, record.tokens, reference, seen.spots(record))
        if off is not None
        else None,
        focus=seen.focus(record.tolerances.weights),
        slopes=slopes,
        of_calls=seen.slopes_of_calls(factors) if slopes is not None else {},
    )
    return Fit(
        seen.contexts,
        weights,
        unknown=unknown,
        residual=0.0,
        tolerance=record.tolerances.residual,
        shown=shown,
    )


class Seen:
    """The tokens of a step in the contexts that have their hidden states.

    Attributes:
        tokens: of all calls, rank after rank.
        contexts: of each document.
        known: of each token of the probe in a call, whether its document's context has its hidden
            state.
    """

    def __init__(
        self,
        record: Record,
        looked: list[Looked],
        *,
        reference: Reference,
        candidates: list[Context],
    ) -> None:
        self._probe = record.tokens
        self._looked = looked
        self._limit = record.tolerances.states
        self._reference = reference
        self._candidates = candidates
        self.tokens = _tokens(record, looked)
        states = torch.cat([each.states for each in looked])
        self._places = {
            context.sequences: _places(
                self.tokens, states, context=context, reference=reference, limit=self._limit
            )
            for context in candidates
        }
        self._real = {index for index, token in enumerate(self.tokens) if token.number >= 0}
        self._real = self._judged()
        self.contexts = self._contexts()
        self.known = dict[int, bool]()
        for index in sorted(self._real):
            number = self.tokens[index].number
            self.known[number] = self.known.get(number, True) and self._place(index) is not None

    def _judged(self) -> set[int]:
        """Returns the tokens of the probe whose hidden states are judged: all, or those with a
        slope, where these are as they should be, as no gradient comes from others."""
        rows = torch.cat([each.slopes for each in self._looked])
        trained = {index for index in self._real if rows[index].any()}
        rightly = self._with_all(trained)
        if trained and rightly is not None and rightly.name == APART:
            return trained
        return self._real

    def _place(self, index: int) -> Place | None:
        """Returns the place of a token in the context of its document; of padding, in any."""
        number = self.tokens[index].number
        if number >= 0:
            own = self.contexts[self._probe.document[number]]
            return self._places[own.sequences].get(index)
        found = (places[index] for places in self._places.values() if index in places)
        return next(found, None)

    def weights(
        self, factors: dict[tuple[int, int], float]
    ) -> tuple[dict[Prediction, float], dict[Pair, float]]:
        """Returns the weights of predictions, in the order of their sequences, and of tokens whose
        hidden state no context has; by factors of ranks' calls after backward."""
        weights = defaultdict[Prediction, float](float)
        unknown = defaultdict[Pair, float](float)
        for index, token in enumerate(self.tokens):
            weight = token.weight * factors[token.rank, token.call]
            if not weight:
                continue
            place = self._place(index)
            if place is None:
                unknown[token.number, token.target] += weight
            else:
                weights[Prediction(place.sequence, place.at, token.target)] += weight
        in_order = sorted(weights.items(), key=lambda each: each[0])
        return dict(in_order), dict(unknown)

    def slopes(self, factors: dict[tuple[int, int], float]) -> dict[Sequence, torch.Tensor] | None:
        """Returns ∂loss/∂ of what the output layer returned, for the tokens of each sequence
        [tokens, V], by factors of ranks' calls after backward; None if no context has the hidden
        state of a token with slopes."""
        rows = torch.cat([each.slopes for each in self._looked])
        found = dict[Sequence, torch.Tensor]()
        for index, token in enumerate(self.tokens):
            factor = factors[token.rank, token.call]
            if not factor or not rows[index].any():
                continue
            place = self._place(index)
            if place is None:
                return None
            if place.sequence not in found:
                shape = len(place.sequence.numbers), rows.shape[1]
                found[place.sequence] = torch.zeros(shape, dtype=torch.float64)
            found[place.sequence][place.at] += factor * rows[index]
        return found

    def slopes_of_calls(
        self, factors: dict[tuple[int, int], float]
    ) -> dict[tuple[int, int], dict[Sequence, torch.Tensor]]:
        """Returns the slopes of each call alone, by rank and call; where all have sequences."""
        found = {}
        for call, factor in factors.items():
            alone = dict.fromkeys(factors, 0.0) | {call: factor}
            slopes = self.slopes(alone)
            if slopes is not None:
                found[call] = slopes
        return found

    def _contexts(self) -> dict[int, Context]:
        """Returns the context of each document: one that has all hidden states of the step, or else
        each document's."""
        documents = range(len(self._probe.probe.lengths))
        everyones = self._with_all(self._real)
        if everyones is not None:
            return dict.fromkeys(documents, everyones)
        return {document: self._context_of(document) for document in documents}

    def _with_all(self, indices: set[int]) -> Context | None:
        """Returns the first context that has the hidden states of all these tokens, or one that is
        nearer to them by far; None if no context has all."""
        found = None
        least = math.inf
        for context in self._candidates:
            places = self._places[context.sequences]
            if not indices <= places.keys():
                continue
            if not self._broken(context).isdisjoint(places[index].sequence for index in indices):
                continue
            apart = sum(places[index].apart ** 2 for index in indices) ** 0.5
            if found is None or apart < NEARER * least:
                found = context
                least = apart
        return found

    def _context_of(self, document: int) -> Context:
        """Returns the context that has most hidden states of a document, if those are more than
        half of what the right one lacks; else the right one."""
        own = [
            index
            for index in self._real
            if self._probe.document[self.tokens[index].number] == document
        ]
        whole = self._with_all(set(own))
        if whole is not None:
            return whole
        counts = dict[int, int]()
        for number, context in enumerate(self._candidates):
            places = self._places[context.sequences]
            broken = self._broken(context)
            held = [places[index].sequence for index in own if index in places]
            counts[number] = sum(sequence not in broken for sequence in held)
        named_right = [n for n, each in enumerate(self._candidates) if each.name == APART]
        right = max(named_right, key=counts.__getitem__)
        best = max(counts, key=counts.__getitem__)
        if 2 * (counts[best] - counts[right]) > len(own) - counts[right]:
            return self._candidates[best]
        return self._candidates[right]

    def _broken(self, context: Context) -> set[Sequence]:
        """Returns the sequences of several documents, of one of which a token has another hidden
        state: what a row does to one document, it does to the others in it."""
        places = self._places[context.sequences]
        document_of = self._probe.document
        lacking = {
            document_of[self.tokens[index].number] for index in self._real if index not in places
        }
        found = set[Sequence]()
        for sequence in context.sequences:
            documents = {document_of[number] for number in sequence.numbers if number >= 0}
            if len(documents) > 1 and not lacking.isdisjoint(documents):
                found.add(sequence)
        return found

    def focus(self, limit: float) -> float:
        """Returns γ of a focal loss that the weights of tokens follow; 0 if they do not."""
        trained = [token for token in self.tokens if token.weight]
        weights = [token.weight for token in trained]
        return focus(weights, [token.chance for token in trained], limit=limit)

    def spots(self, record: Record) -> dict[int, Spot]:
        """Returns where each token is that is in a call, by its number."""
        places = dict[int, tuple[int, int]]()
        for row_at, row in enumerate(record.rows):
            for column, number in enumerate(row.numbers):
                places.setdefault(number, (row_at, column))
        found = dict[int, Spot]()
        for token in self.tokens:
            if token.number >= 0:
                row_at, column = places.get(token.number, (-1, 0))
                found[token.number] = Spot(token.rank, row_at, column)
        return found

    def documents_off(self) -> set[int]:
        """Returns the documents with a token whose hidden state no right context has."""
        right = [each for each in self._candidates if each.name == APART]
        off = set(self._real)
        for context in right:
            off -= self._places[context.sequences].keys()
        return {self._probe.document[self.tokens[index].number] for index in off}

    def alike(self) -> list[str]:
        """Returns the names of other contexts that have all hidden states, if those of documents
        are wrong."""
        names = {context.name for context in self.contexts.values()}
        if APART in names:
            return []
        found = dict[str, None]()
        for context in self._candidates:
            as_said = any(
                context.name.startswith(name) or name.startswith(context.name) for name in names
            )
            if not as_said and self._real <= self._places[context.sequences].keys():
                found[context.name] = None
        return list(found)

    def first_off(self) -> FirstOff | None:
        """Returns the first part of a layer whose output differs from the reference's for a token
        whose hidden state no context has; None if none does."""
        unknown = {index for index in self._real if not self.known[self.tokens[index].number]}
        if not unknown:
            return None
        places = self._right_places()
        sequences = list(dict.fromkeys(sequence for sequence, _ in places.values()))
        offset = dict[Sequence, int]()
        total = 0
        for sequence in sequences:
            offset[sequence] = total
            total += len(sequence.numbers)
        indices = list(places)
        rows = [offset[sequence] + at for sequence, at in places.values()]
        expected = [self._reference.parts(sequence) for sequence in sequences]
        for part in expected[0]:
            given = [each.states if part == LAST else each.parts.get(part) for each in self._looked]
            outputs = [each for each in given if each is not None]
            if len(outputs) < len(given):
                continue
            found = torch.cat(outputs)[indices].double()
            right = torch.cat([each[part] for each in expected])[rows].double()
            same = (found - right).norm(dim=1) <= self._limit * right.norm(dim=1)
            wrong = [at for at in range(len(indices)) if not same[at]]
            if any(indices[at] in unknown for at in wrong):
                return FirstOff(
                    part,
                    [self.tokens[index].number for index in indices],
                    found=found,
                    right=right,
                    wrong=wrong,
                    sequences=sequences,
                    limit=self._limit,
                )
        return None

    def _right_places(self) -> dict[int, tuple[Sequence, int]]:
        """Returns the place of each token, by its index, in the sequences of its document's
        context; of a token that is in several calls, once."""
        found = dict[int, tuple[Sequence, int]]()
        taken = set[int]()
        for index in sorted(self._real):
            number = self.tokens[index].number
            context = self.contexts[self._probe.document[number]]
            holder = next((each for each in context.sequences if number in each.numbers), None)
            if holder is not None and number not in taken:
                found[index] = holder, holder.numbers.index(number)
                taken.add(number)
        return found


def _tokens(record: Record, looked: list[Looked]) -> list[Token]:
    """Returns the tokens of all calls, rank after rank, as `looked` has them."""
    found = list[Token]()
    for rank, shown in enumerate(looked):
        rows = [row for row in record.calls if row.rank == rank]
        places = [(number, row.call) for row in rows for number in row.numbers]
        for at, (number, call) in enumerate(places):
            token = Token(
                number,
                rank,
                call=call,
                target=shown.targets[at],
                weight=shown.weights[at],
                left=shown.left[at],
                chance=shown.chances[at],
            )
            found.append(token)
    return found


def _places(
    tokens: list[Token],
    states: torch.Tensor,
    *,
    context: Context,
    reference: Reference,
    limit: float,
) -> dict[int, Place]:
    """Returns where in a context tokens have their hidden states, by their index; `limit`: largest
    relative difference of the same ones."""
    owners = defaultdict[int, list[tuple[Sequence, int]]](list)
    of_owners = defaultdict[int, list[torch.Tensor]](list)
    for sequence in context.sequences:
        own_states = reference.states(sequence)
        for at, number in enumerate(sequence.numbers):
            owners[number].append((sequence, at))
            of_owners[number].append(own_states[at])
    stacked = {number: torch.stack(rows) for number, rows in of_owners.items()}
    found = {}
    for index, token in enumerate(tokens):
        if token.number not in owners:
            continue
        wanted = stacked[token.number]
        apart = (wanted - states[index]).norm(dim=1)
        nearest = int(apart.argmin())
        difference = float(apart[nearest] / wanted[nearest].norm().clamp_min(1e-300))
        if difference <= limit:
            sequence, at = owners[token.number][nearest]
            found[index] = Place(sequence, at, apart=difference)
    return found


def _factors(
    tokens: list[Token], looked: list[Looked], *, record: Record, reference: Reference
) -> tuple[dict[tuple[int, int], float], float | None]:
    """Returns by what the gradient of each rank's calls was multiplied after backward, and what is
    left of the output layer's gradient without them, relative to it.

    One factor for all is tried first, then one for each rank, then one for each call. Where the
    output layer has no gradient of its own, nothing is known: factors are 1, and None is left.
    """
    calls = [(token.rank, token.call) for token in tokens]
    if reference.output is None:
        return dict.fromkeys(calls, 1.0), None
    wanted = record.gradients[reference.output]
    size = max(float(wanted.norm()), 1e-300)
    slopes = torch.cat([each.slopes for each in looked])
    states = torch.cat([each.states for each in looked])
    columns = Columns(slopes, states)
    gram = (slopes @ slopes.T) * (states @ states.T)
    projected = ((slopes @ wanted) * states).sum(1)
    one_for_all = [0 for _ in calls]
    by_rank = [rank for rank, _ in calls]
    number_of = {call: number for number, call in enumerate(dict.fromkeys(calls))}
    by_call = [number_of[call] for call in calls]
    fits = []
    for groups in (one_for_all, by_rank, by_call):
        members = F.one_hot(torch.tensor(groups)).double()
        grams = members.T @ gram @ members
        solved = torch.linalg.pinv(grams, hermitian=True) @ (members.T @ projected)
        weights = members @ solved
        left = float((wanted - columns.sum(weights)).norm()) / size
        factors = dict(zip(calls, weights.tolist(), strict=True))
        if left <= record.tolerances.after:
            return factors, left
        fits.append((factors, left))
    return fits[0]


class _Usual(NamedTuple):
    """A usual factor between backward and the optimizer, of each rank's calls, with the slopes that
    it leaves, how many parameters it explains, and what is left of the output layer's gradient."""

    factors: dict[tuple[int, int], float]
    slopes: dict[Sequence, torch.Tensor] | None
    explained: int
    after: float


def _usual(
    seen: Seen,
    factors: dict[tuple[int, int], float],
    *,
    record: Record,
    reference: Reference,
) -> _Usual:
    """Returns the factor of a sum or of a mean over ranks, whichever explains more parameters, or
    leaves less of the output layer's gradient."""
    found = list[_Usual]()
    for factor in (1.0, 1 / record.ranks):
        usual = dict.fromkeys(factors, factor)
        slopes = seen.slopes(usual)
        explained = _explained(record, reference, slopes)
        after = _left_of_output(record, reference, slopes)
        found.append(_Usual(usual, slopes, explained=explained, after=after))
    return max(found, key=lambda each: (each.explained, -each.after))


def _explained(
    record: Record, reference: Reference, slopes: dict[Sequence, torch.Tensor] | None
) -> int:
    """Returns how many parameters but the output layer's have the gradients that follow."""
    if slopes is None:
        return 0
    count = 0
    for name, expected in reference.gradients_of(slopes).of.items():
        apart = float((record.gradients[name] - expected).norm())
        limit = record.tolerances.of_parameter(name) * float(expected.norm())
        count += name != reference.output and apart <= limit
    return count


def _left_of_output(
    record: Record, reference: Reference, slopes: dict[Sequence, torch.Tensor] | None
) -> float:
    """Returns what is left of the output layer's gradient, relative to it; infinity where that is
    not known."""
    if slopes is None or reference.output is None:
        return math.inf
    found = record.gradients[reference.output]
    expected = reference.gradients_of(slopes).of[reference.output]
    return float((found - expected).norm() / found.norm().clamp_min(1e-300))


def _factor_of_all(
    record: Record, reference: Reference, slopes: dict[Sequence, torch.Tensor]
) -> float:
    """Returns what most gradients are of those that follow from slopes; 1 where that explains as
    many of them, or nothing explains one."""
    expected = reference.gradients_of(slopes).of
    sizes = {name: float(value.norm()) for name, value in expected.items()}
    least = LEAST_SHARE * max(sizes.values())
    large = [name for name, size in sizes.items() if size > least]
    ratios = dict[str, float]()
    for name in large:
        ratios[name] = float((record.gradients[name] * expected[name]).sum()) / sizes[name] ** 2

    def explained_by(factor: float) -> list[float]:
        """Returns the factors of the parameters that one factor explains."""
        found = list[float]()
        for name in large:
            apart = float((record.gradients[name] - factor * expected[name]).norm())
            if apart <= record.tolerances.of_parameter(name) * sizes[name]:
                found.append(ratios[name])
        return found

    most = explained_by(1.0)
    for factor in ratios.values():
        own = explained_by(factor)
        if len(own) > len(most):
            most = own
    return median(most) if most else 1.0
