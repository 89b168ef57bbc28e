"""What commands share: options that were given, errors said once, CSV, and progress on a terminal."""

import argparse
import csv
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longctx.errors import UserError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from longctx.parallel.mesh import Launch

GRACE_S = 10
"""Seconds that local rank 0 has to print an error before other ranks do."""


def given_options(arguments: argparse.Namespace, *names: str) -> list[str]:
    """Those of the named options that were given, as they are written: `["--global-tokens"]`."""
    return [f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name) is not None]


@contextmanager
def said_once(launch: "Launch") -> Iterator[None]:
    """Lets local rank 0 be the first to print a UserError or OSError; other ranks that live on print theirs after some seconds.

    torchrun ends all processes when one fails. So an error of all ranks is printed once per node, and a rank-local error by
    that rank.
    """
    try:
        yield
    except (UserError, OSError):
        if launch.local_rank > 0:
            time.sleep(GRACE_S)
        raise


def check_writable(*paths: Path | None) -> None:
    """Raises UserError for a file that cannot be written, before anything is computed for it."""
    for path in (path for path in paths if path is not None):
        if path.is_dir():
            raise UserError(f"{path} cannot be written: it is a folder; give the name of a file in it")
        if not path.absolute().parent.is_dir():
            raise UserError(f"{path} cannot be written: there is no folder {path.parent}; make it, or choose another")
        if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
            raise UserError(f"{path} cannot be written: it is not allowed to; choose another")


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes one or more rows, of which all have the same columns."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


@contextmanager
def progress_bar(description: str = "", total: int = 100) -> Iterator[tuple["Progress", "TaskID"]]:
    """A bar on standard error, which is gone when all is done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield progress, progress.add_task(description, total=total)
