"""Output that commands share: files that can be written, tables as CSV, and progress on a terminal."""

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longctx.errors import UserError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


def check_folders(*paths: Path | None) -> None:
    """Raises UserError for a file whose folder does not exist, before anything is computed for it."""
    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            raise UserError(f"{path} cannot be written: there is no folder {path.parent}")


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
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
