"""Errors of all ranks: what one rank refuses, all refuse, and one of them prints it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from longctx.errors import UserError
from longctx.trainers.refusals import TrainerError

SAID = "said_by_another_rank"
"""Attribute of an error that another rank prints."""


@contextmanager
def on_all_ranks(ranks: int) -> Iterator[None]:
    """Raises an error of one rank on all ranks, which would wait for it, and lets the first one print it. Collective."""
    if ranks == 1 or not dist.is_initialized():
        yield
        return
    error: UserError | None = None
    try:
        yield
    except UserError as found:
        error = found
    texts: list[str | None] = [None] * ranks
    dist.all_gather_object(texts, None if error is None else str(error))
    first = next((rank for rank, text in enumerate(texts) if text is not None), None)
    if first is not None:
        text = texts[first] if error is None else str(error)
        error = error or TrainerError(f"rank {first} cannot train: {text}")
        raise said_by(texts.index(text), error)


def said_by(rank: int, error: UserError) -> UserError:
    """Returns an error that nobody but `rank` prints, if it is not caught: its text, as the command line of longctx does."""
    if getattr(sys.excepthook, "__module__", None) != __name__:
        before = sys.excepthook

        def print_once(kind: Any, raised: Any, trace: Any) -> None:
            if not hasattr(raised, SAID):
                before(kind, raised, trace)
            elif not getattr(raised, SAID):
                print(f"error: {raised}", file=sys.stderr, flush=True)

        sys.excepthook = print_once
    setattr(error, SAID, rank != dist.get_rank())
    return error
