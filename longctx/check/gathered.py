"""Record: the steps of all ranks as one, on the first rank, with the mean of gradients and the rows
of all calls by their numbers in the probe."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from .aim import Aim
from .errors import CheckError
from .largest import largest
from .looked import Looked, look
from .probe import END, PAD, Tokens
from .recording import Step
from .tensors import Tensors
from .tolerances import OF, Tolerances, coarsest
from .watched import Update

FEWEST_NEIGHBOURS = 16
"""Fewest pairs of neighbouring tokens that tell whether a step was made on a probe."""
SAME_SUM = 1e-9
"""Relative difference of sums of the same weights on two ranks, in float64."""


class Row(NamedTuple):
    """A row of token ids: their numbers in the probe, its rank, its call on it, and positions if
    the call was given some."""

    ids: list[int]
    numbers: list[int]
    rank: int
    call: int
    positions: list[int]


@dataclass
class Record:
    """A step of all ranks on a probe's tokens.

    Attributes:
        gradients: float64, mean of the ranks'.
        apart: names of parameters whose gradients differ between ranks, with the largest difference
            relative to the mean.
        calls: rows of all calls.
        rows: rows of batches before they were split over ranks, if `batched`; else those of calls.
        loss, norm: as a rank logged them.
        looked: what the output layer of each rank shows; None where it does not on all.
        dtype: the coarsest in which a rank computed.
        tolerances: what rounding explains.
        changed_at: number of a rank's first call with other weights; 0: none.
        not_finite_in: words for a rank's first part that is not finite; "": none.
        weights_apart: names of parameters that ranks began the step with different values of.
        updates: of each watched optimizer, every rank's.
        of_ranks: gradients of each rank, where they differ.
        aim: of the first rank.
        before: gradients from before the step, float64, mean of the ranks'; none of zeros.
    """

    tokens: Tokens
    reference: nn.Module
    ranks: int
    gradients: Tensors
    apart: dict[str, float]
    calls: list[Row]
    rows: list[Row]
    batched: bool
    loss: float | None
    norm: float | None
    looked: list[Looked] | None
    dtype: torch.dtype
    tolerances: Tolerances
    changed_at: int
    not_finite_in: str
    weights_apart: list[str]
    updates: list[list[Update]]
    of_ranks: list[Tensors]
    aim: Aim
    before: Tensors

    @property
    def documents(self) -> list[int]:
        """Documents with a token in a call."""
        return sorted(
            {
                self.tokens.document[number]
                for row in self.calls
                for number in row.numbers
                if number >= 0
            }
        )


@dataclass
class _OfRank:
    """What a rank sends of its step: attributes as of Record and Step."""

    gradients: Tensors
    calls: list[Row]
    batches: list[Row]
    looked: Looked | None
    loss: float | None
    norm: float | None
    dtype: torch.dtype
    changed_at: int
    not_finite_in: str
    before: Tensors
    sums: dict[str, float]
    updates: Sequence[Update]
    first_sums: dict[str, float]


def gather(step: Step, tokens: Tokens) -> Record | None:
    """Returns the steps of all ranks as one on the first rank, and None on others. Collective if
    there is a process group.

    Raises, on the first rank, CheckError for calls on other ids than the probe's, and what another
    rank raised meanwhile.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    mine: _OfRank | Exception
    try:
        mine = _of_this_rank(step, tokens, rank)
    except Exception as error:
        mine = error
    everyones = _at_first_rank(mine)
    if everyones is None:
        return None
    for each in everyones:
        if isinstance(each, Exception):
            raise each
    return _as_one(step, everyones, tokens)


def _of_this_rank(step: Step, tokens: Tokens, rank: int) -> _OfRank:
    looked = look(
        step.outputs,
        step.parts,
        calls=[ids.shape for ids in step.calls],
        config=getattr(step.reference, "config", None),
        limit=OF[step.dtype].objective,
    )
    return _OfRank(
        {name: value.double().cpu() for name, value in step.gradients.items()},
        _called(step, tokens, rank),
        batches=[
            row for call, ids in enumerate(step.rows) for row in _rows(tokens, rank, call, ids)
        ],
        looked=looked,
        loss=step.loss,
        norm=step.grad_norm,
        dtype=step.dtype,
        changed_at=step.changed_at,
        not_finite_in=step.not_finite_in,
        before={name: value.double().cpu() for name, value in step.before.items()},
        sums={
            name: float(weight.detach().sum()) for name, weight in step.reference.named_parameters()
        },
        updates=step.updates,
        first_sums=step.first_sums,
    )


def _as_one(own: Step, everyones: list[_OfRank], tokens: Tokens) -> Record:
    """Returns the record of all ranks; `own`: the first rank's step."""
    called = _with_ends([row for each in everyones for row in each.calls], tokens)
    _require_ids_of_the_probe(called, tokens)
    used = {token for row in called for token in row.ids}
    batched = [row for each in everyones for row in each.batches if set(row.ids) & used]
    mean, apart = _mean([each.gradients for each in everyones])
    before, _ = _mean([each.before for each in everyones])
    dtype = coarsest({each.dtype for each in everyones})
    looked = [each.looked for each in everyones if each.looked is not None]
    return Record(
        tokens,
        own.reference,
        ranks=len(everyones),
        gradients=mean,
        apart=apart,
        calls=called,
        rows=batched or called,
        batched=bool(batched),
        loss=_first(each.loss for each in everyones),
        norm=_first(each.norm for each in everyones),
        looked=looked if len(looked) == len(everyones) else None,
        dtype=dtype,
        tolerances=OF[dtype],
        changed_at=max(each.changed_at for each in everyones),
        not_finite_in=max(each.not_finite_in for each in everyones),
        weights_apart=_weights_apart(everyones),
        before=before,
        updates=_by_optimizer(everyones),
        of_ranks=[each.gradients for each in everyones] if apart else [],
        aim=own.aim,
    )


def _by_optimizer(everyones: list[_OfRank]) -> list[list[Update]]:
    """Returns what all ranks say of each watched optimizer. Raises CheckError for one that made no
    step on a rank, and ranks that watch another number of them."""
    counts = {len(each.updates) for each in everyones}
    if len(counts) > 1:
        raise CheckError(f"ranks watch {min(counts)} to {max(counts)} optimizers: watch as many")
    found = list[list[Update]]()
    for of_one in zip(*(each.updates for each in everyones), strict=True):
        if any(not update.steps for update in of_one):
            raise CheckError(
                "a watched optimizer made no step before the end of `record`: let it step there"
            )
        found.append(list(of_one))
    return found


def _weights_apart(everyones: list[_OfRank]) -> list[str]:
    """Returns the names of parameters that differ between ranks: when recording began, or at the
    first call."""
    first, *others = everyones
    found = list[str]()
    for name, value in first.sums.items():
        at_first_call = first.first_sums.get(name, 0.0)
        for each in others:
            differs = each.sums.get(name) != value
            by = each.first_sums.get(name, at_first_call) - at_first_call
            if differs or not abs(by) <= SAME_SUM * max(1.0, abs(at_first_call)):
                found.append(name)
                break
    return found


def _at_first_rank(mine: Any) -> list[Any] | None:
    """Returns an object of every rank on the first one, and None on others. Collective if there is
    a process group."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine]
    everyones = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, everyones)
    return everyones


def of_first_rank(theirs: Any) -> Any:
    """Returns what the first rank gives. Collective if there is a process group."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return theirs
    given = [theirs]
    dist.broadcast_object_list(given)
    return given[0]


def _called(step: Step, tokens: Tokens, rank: int) -> list[Row]:
    """Returns the rows of all calls of a rank's step."""
    if len(step.positions) == len(step.calls):
        positions = step.positions
    else:
        positions = [None] * len(step.calls)
    return [
        row
        for call, (ids, at) in enumerate(zip(step.calls, positions, strict=True))
        for row in _rows(tokens, rank, call=call, ids=ids, positions=at)
    ]


def _with_ends(rows: list[Row], tokens: Tokens) -> list[Row]:
    """Returns rows in which ENDs that do not follow their document, as where it is split in
    zigzag, have their numbers: those whose position only one of them has."""
    held = {number for row in rows for number in row.numbers}
    lasts = [tokens.of(document)[-1] for document in range(len(tokens.probe.lengths))]
    wanted = {
        tokens.place[last]: last for last in lasts if tokens.ids[last] == END and last not in held
    }
    places = Counter(
        position
        for row in rows
        for token, number, position in zip(row.ids, row.numbers, row.positions, strict=False)
        if token == END and number < 0
    )
    found = list[Row]()
    for row in rows:
        numbers = list(row.numbers)
        for at, position in enumerate(row.positions):
            is_end = row.ids[at] == END and numbers[at] < 0
            last = wanted.get(position)
            if is_end and last is not None and places[position] == 1 and last - 1 in held:
                numbers[at] = last
        found.append(row._replace(numbers=numbers))
    return found


def _first(values: Iterable[float | None]) -> float | None:
    """Returns the first number that a rank has."""
    return next((value for value in values if value is not None), None)


def _require_ids_of_the_probe(rows: Sequence[Row], tokens: Tokens) -> None:
    """Raises CheckError for ids that the probe does not have, and for its ids in an order that no
    split of its documents has: such a step was made on other data."""
    known = {PAD, END, *tokens.ids}
    unknown = sorted({token for row in rows for token in row.ids if token not in known})
    if unknown:
        raise CheckError(
            f"id {unknown[0]} was in a call of the model ({len(unknown)} such ids), which the "
            "probe does not have: train on `probe.rows`, and pad with `probe.pad`"
        )
    neighbours = 0
    ordered = 0
    for row in rows:
        for number, after in pairwise(row.numbers):
            if number < 0 or after < 0:
                continue
            neighbours += 1
            ordered += after > number and tokens.document[after] == tokens.document[number]
    if neighbours >= FEWEST_NEIGHBOURS and ordered < neighbours / 4:
        raise CheckError(
            f"of {neighbours} neighbouring tokens only {ordered} are of one document of the probe "
            "and in its order: train on `probe.rows`, not on other data"
        )


def _rows(
    tokens: Tokens, rank: int, call: int, ids: torch.Tensor, positions: torch.Tensor | None = None
) -> Iterator[Row]:
    """Yields the rows of [rows, tokens] or [tokens]. Positions of another length belong to ids that
    the model splits itself."""
    rows = ids.reshape(-1, ids.shape[-1]).tolist()
    at: list[list[int]] = [[] for _ in rows]
    if positions is not None and positions.shape[-1] == ids.shape[-1]:
        at = positions.expand(ids.shape).reshape(-1, ids.shape[-1]).tolist()
    for row, places in zip(rows, at, strict=True):
        yield Row(row, tokens.numbers(row), rank=rank, call=call, positions=places)


def _mean(of_ranks: Sequence[Tensors]) -> tuple[Tensors, dict[str, float]]:
    """Returns the mean gradients of ranks, and how far those that differ are from the first rank's,
    relative to the mean."""
    mean = Tensors()
    apart = dict[str, float]()
    for name in dict.fromkeys(name for gradients in of_ranks for name in gradients):
        found = [gradients.get(name) for gradients in of_ranks]
        mean[name] = torch.stack([each for each in found if each is not None]).sum(0) / len(found)
        if not mean[name].isfinite().all():  # which the verdict says of the mean
            continue
        given = [torch.zeros_like(mean[name]) if each is None else each for each in found]
        most = largest(float((each - given[0]).norm()) for each in given)
        if not most <= 1e-5 * float(mean[name].norm()):
            apart[name] = most / max(float(mean[name].norm()), 1e-30)
    return mean, apart
