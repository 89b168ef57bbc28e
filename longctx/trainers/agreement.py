"""Errors of all ranks: what one rank refuses, all refuse, and one of them prints it."""

import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from longctx.errors import UserError
from longctx.trainers.refusals import TrainerError

SAID = "said_by_another_rank"
"""Attribute of an error that another rank prints."""


@contextmanager
def agreeing_on_errors(ranks: int) -> Iterator[None]:
    """At its end gathers the UserErrors of all ranks, also if there are none, and raises the first
    one on all, which would wait for it; one rank prints it. Collective.
    """
    if ranks == 1 or not dist.is_initialized():
        yield
        return
    error: UserError | None = None
    try:
        yield
    except UserError as found:
        error = found
    end_all(error, None)


def check_same(ranks: int, **given: Any) -> None:
    """Raises TrainerError if a rank was given other arguments. Collective."""
    if ranks == 1 or not dist.is_initialized():
        return
    everyone: list[Any] = [None] * ranks
    with agreeing_on_errors(ranks):
        dist.all_gather_object(everyone, {name: repr(value) for name, value in given.items()})
        for name in given:
            values = sorted({rank_given[name] for rank_given in everyone})
            if len(values) > 1:
                raise TrainerError(
                    f"{name} is {values[0]} on one rank and {values[1]} on another: give all "
                    "ranks the same"
                )


def check_buffers(ranks: int, model: torch.nn.Module) -> None:
    """Raises TrainerError if ranks have a model's buffers in other orders, as of a set of names,
    since DDP sends them by place: angles of windows would become those of whole layers.
    Collective."""
    if ranks == 1 or not dist.is_initialized():
        return
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, [name for name, _ in model.named_buffers()])
    with agreeing_on_errors(ranks):
        for names in everyone[1:]:
            if names != everyone[0]:
                raise TrainerError(
                    f"buffers of {type(model).__name__} are in other orders on other ranks, but "
                    "DDP sends them by their place: start all ranks with PYTHONHASHSEED=0, set "
                    "ddp_broadcast_buffers=False, or install a newer transformers"
                )


def drawing_together(
    exchange: Any, own: Any, trainer: Any, batches: Iterator[Any], count: int, *more: Any
) -> Any:
    """Calls `get_batch_samples` of a trainer with batches that are `drawn`. Collective."""
    return own(trainer, iter(drawn(exchange, batches, count)), count, *more)


def evaluating_together(
    exchange: Any, own: Any, trainer: Any, dataloader: Any, *more: Any, **named: Any
) -> Any:
    """Calls `evaluation_loop` of a trainer with batches that are `drawn`. Collective."""
    return own(trainer, _DrawingTogether(dataloader, exchange), *more, **named)


class _DrawingTogether:
    """A loader whose batches are `drawn`."""

    def __init__(self, loader: Any, exchange: Any) -> None:
        self.loader = loader
        self.exchange = exchange

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        batch = drawn(self.exchange, batches, 1)
        while batch:
            yield from batch
            batch = drawn(self.exchange, batches, 1)


def drawn(exchange: Any, batches: Iterator[Any], count: int) -> list[Any]:
    """Returns the next batches; what a data set or a collator raises on one rank ends all.
    Collective."""
    found: list[Any]
    found, error = attempted(functools.partial(list, itertools.islice(batches, count)), [])
    exchange.end_all(error)
    return found


def averaging(exchange: Any, own: Any, trainer: Any, *arguments: Any, **named: Any) -> torch.Tensor:
    """Calls `training_step` of a trainer, and returns the mean of its loss over the ranks: what
    transformers adds up after the last log, and looks for NaN in, would be the first rank's alone.
    Collective."""
    return mean_over_ranks(own(trainer, *arguments, **named), exchange.group)


def mean_over_ranks(loss: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Returns the mean of a loss over the ranks of a group; None: one process. Collective."""
    if group is None:
        return loss
    mean = loss.detach().clone()
    dist.all_reduce(mean, group=group)
    mean /= dist.get_world_size(group)
    return mean


def attempted(function: Callable[[], Any], otherwise: Any) -> tuple[Any, Exception | None]:
    """Returns the value of a function, or `otherwise` and what it raised: other ranks would wait
    for this one."""
    try:
        return function(), None
    except Exception as error:  # data sets and collators may raise anything
        return otherwise, error


def end_all(error: Exception | None, group: Any) -> None:
    """Raises an error of one rank on all ranks. Collective."""
    texts: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(texts, text_of(error), group=group)
    raise_on_all(texts, error)


def text_of(error: Exception | None) -> str | None:
    """Returns what is told to other ranks of an error; None if there is none."""
    if error is None:
        return None
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def raise_on_all(texts: Sequence[str | None], error: Exception | None) -> None:
    """Raises this rank's error, or one that tells of it, if one of `texts`, by rank, is not
    None."""
    first = next((rank for rank, text in enumerate(texts) if text is not None), None)
    if error is not None and len(texts) == 1:
        raise error
    if first is not None:
        text = texts[first] if error is None else text_of(error)
        raise said_by(
            texts.index(text), error or TrainerError(f"rank {first} cannot train: {text}")
        )


def said_by(rank: int, error: Exception) -> Exception:
    """Returns an error that nobody but `rank` prints, if it is not caught: of a UserError its text
    alone."""
    if getattr(sys.excepthook, "__module__", None) != __name__:
        before = sys.excepthook

        def print_once(kind: Any, raised: Any, trace: Any) -> None:
            if (
                hasattr(raised, SAID)
                and isinstance(raised, UserError)
                and not getattr(raised, SAID)
            ):
                print(f"error: {raised}", file=sys.stderr, flush=True)
            elif not getattr(raised, SAID, False):
                before(kind, raised, trace)

        sys.excepthook = print_once
    setattr(error, SAID, rank != dist.get_rank())
    return error
