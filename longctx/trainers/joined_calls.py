"""Calls of a model in a step that are planned together.

A trainer that accumulates gradients calls its model once per batch, often of one row, and draws all
batches of a step before. What a call will get is then known from its batch. As many calls as all
ranks hold the tokens of run together when the first of them comes; each gets the values of its own
rows. Gradients of these wait until the backward pass of the last call, which goes on through the
model.

If a call gets something else than its batch, as from a loss that masks tokens itself, calls are
planned one by one from then on.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from longctx.hf.exactness import replaced
from longctx.trainers.agreement import attempted
from longctx.trainers.documents import Document
from longctx.trainers.planned_call import Compute, PlannedCall
from longctx.trainers.step import placed

MASK = "attention_mask"
IDS = "input_ids"
SHARE = 0.75
"""Of the tokens that all ranks hold, those of calls that are planned together: ranks hold unequal
numbers, and what one does not hold together is computed twice."""
Fields = Mapping[str, torch.Tensor | None]
"""What a model is given, by name: tensors [rows, tokens]."""


@dataclass
class Group:
    """Calls of a step that ran together.

    Attributes:
        first: number of the first call in the step.
        own: values of the tokens of each call, one row after the other, [tokens, ..].
        waiting: those that calls have got, by number, whose gradients wait for the last call.
    """

    first: int
    own: Sequence[torch.Tensor]
    waiting: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def last(self) -> int:
        """Number of the last call."""
        return self.first + len(self.own) - 1

    def values_of(self, number: int) -> torch.Tensor:
        """Returns the values of a call. Gradients of all follow those of the last one."""
        own = self.own[number - self.first]
        if number == self.last:
            return self.followed(own)
        got = own.detach().requires_grad_()
        self.waiting[number] = got
        return got

    def followed(self, values: torch.Tensor) -> torch.Tensor:
        """Returns values in whose backward pass gradients that wait go through the model."""
        if not self.waiting:
            return values
        before, waiting = self._taken()
        apply: Any = _WithEarlier.apply  # untyped in torch
        result: torch.Tensor = apply(values, waiting, *before)
        return result

    def end(self) -> None:
        """Sends gradients that wait through the model, if they could follow no call."""
        if self.waiting:
            before, waiting = self._taken()
            torch.autograd.backward(before, _gradients(waiting))

    def _taken(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns values that calls have got, as they were computed and as they were given. None
        wait any more."""
        before = [self.own[number - self.first] for number in self.waiting]
        waiting = list(self.waiting.values())
        self.waiting = {}
        return before, waiting


class _WithEarlier(torch.autograd.Function):
    """Values of a call, in whose backward pass gradients of earlier calls are found."""

    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, waiting: list[torch.Tensor], *before: torch.Tensor
    ) -> torch.Tensor:
        ctx.waiting = waiting
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return gradients[0], None, *_gradients(ctx.waiting)


def _gradients(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the gradients of values that calls have got; 0 of those that a loss did not read."""
    found = []
    for values in given:
        gradient = values.grad
        if gradient is None:
            gradient = torch.zeros_like(values)
        found.append(gradient)
    return found


@dataclass
class JoinedCalls:
    """Plans calls of a model together, if it is given the batches of the trainer.

    Attributes:
        planned: what plans calls.
        read: returns the documents of a call.
        active: whether all calls so far got what their batches have.
    """

    planned: PlannedCall
    read: Callable[[Fields], list[Document]]
    active: bool = True
    _batches: Sequence[Mapping[str, Any]] = field(default=(), init=False)
    _expected: list[Fields] = field(default_factory=list, init=False)
    _documents: list[list[Document]] = field(default_factory=list, init=False)
    _ends: list[int] = field(default_factory=list, init=False)
    _group: Group | None = field(default=None, init=False)
    _number: int | None = field(default=None, init=False)

    def begin_step(self, batches: Sequence[Mapping[str, Any]]) -> None:
        """Makes known which batches a step has."""
        self._batches = batches
        self._ends = []
        self._group = None

    @contextlib.contextmanager
    def of_batch(self, batch: Mapping[str, Any]) -> Iterator[None]:
        """Goes around forward and backward of a batch of the step."""
        number = None
        for place, other in enumerate(self._batches):
            if other is batch:
                number = place
        with replaced(self, "_number", number):
            yield
        if self._group is not None and number == self._group.last:
            self._group.end()

    def values_of(self, fields: Fields, mask: torch.Tensor, compute: Compute) -> torch.Tensor:
        """Returns values of the tokens of a call's rows, [*mask.shape, ..]; see `PlannedCall`.
        Collective."""
        number = self._number
        joins = self.active and number is not None and torch.is_grad_enabled()
        if not joins:
            return self.planned.values_of(lambda: self.read(fields), mask, compute)
        assert number is not None
        self._number = None  # another call of the same batch is planned by itself
        if not self._ends:
            self.active = self._begin(number, fields)
        else:
            self.active = self.planned.exchange.all_agree(_same(fields, self._expected[number]))
        if not self.active:
            values = self.planned.values_of(lambda: self.read(fields), mask, compute)
            if self._group is None:
                return values
            return self._group.followed(values)
        if self._group is None or number > self._group.last:
            self._group = self._run(number, compute)
        return placed(self._group.values_of(number), mask)

    def _begin(self, number: int, fields: Fields) -> bool:
        """Finds which calls of a step run together, given what its first call got. Returns whether
        all ranks have found it. Collective."""

        def found() -> bool:
            names = [name for name, value in fields.items() if value is not None]
            self._expected = [_fields_of(batch, names) for batch in self._batches]
            self._documents = [self.read(expected) for expected in self._expected]
            return _same(fields, self._expected[number])

        self._documents = []
        is_same, _ = attempted(found, False)
        tokens = [_tokens_of(call) for call in self._documents]
        exchange = self.planned.exchange
        everyone: list[tuple[int, bool, list[int]]] = exchange.told_by_all(
            (number, is_same, tokens)
        )
        totals = [0] * len(tokens)
        for first, is_same_there, of_rank in everyone:
            if not is_same_there or first != number or len(of_rank) != len(totals):
                return False
            for call, count in enumerate(of_rank):
                totals[call] += count
        tokens_per_rank = exchange.planning.tokens_per_rank
        most = SHARE * tokens_per_rank * exchange.ranks
        self._ends = _ends_of_groups(totals, number, most)
        return True

    def _run(self, number: int, compute: Compute) -> Group:
        """Runs the calls of a group, of which this is the first. Collective."""
        end = next(end for end in self._ends if end > number)
        by_call = self._documents[number:end]
        rows = list(itertools.chain.from_iterable(by_call))
        own = self.planned.values_of_tokens(lambda: rows, compute)
        counts = [_tokens_of(call) for call in by_call]
        return Group(number, own.split(counts))


def _tokens_of(call: Sequence[Document]) -> int:
    """Returns the number of tokens of a call's documents."""
    return sum(len(document.tokens) for document in call)


def _ends_of_groups(tokens: Sequence[int], first: int, most: float) -> list[int]:
    """Returns the numbers of the calls after each group of calls with at most so many tokens, or of
    one call with more, given the tokens of every call of a step and the number of the first."""
    ends = []
    total = 0
    for number in range(first, len(tokens)):
        if number > first and total + tokens[number] > most:
            ends.append(number)
            total = 0
        total += tokens[number]
    return [*ends, len(tokens)]


def _fields_of(batch: Mapping[str, Any], names: Sequence[str]) -> Fields:
    """Returns what a model is given of a batch, if fields of these names: every choice is a row."""
    fields: dict[str, torch.Tensor | None] = {}
    for name in names:
        value = batch.get(name)
        if value is None and name == MASK:
            value = torch.ones_like(batch[IDS])
        if value is not None:
            value = value.reshape(-1, value.shape[-1])
        fields[name] = value
    return fields


def _same(fields: Fields, expected: Fields) -> bool:
    """Returns whether a call got what was expected."""
    for name, value in fields.items():
        other = expected.get(name)
        if value is None and other is None:
            continue
        if value is None or other is None or value.shape != other.shape:
            return False
        if not torch.equal(value.cpu(), other.cpu()):
            return False
    return True
