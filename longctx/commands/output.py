"""Output of the commands: files to write, and progress bars; and the error for words that no
command takes."""

import argparse
import csv
import difflib
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longctx.errors import UserError
from longctx.paths import PathError, expanded
from longctx.remote import any_name

if TYPE_CHECKING:
    from longctx.data.store.writer import Progress as Show

PICTURES = (".png", ".svg", ".pdf")
LINES_EVERY_S = 10
"""Seconds between two lines of progress where there is no terminal."""


def a_path(text: str) -> Path:
    """Returns the path that an argument names, as `type` of argparse."""
    return Path(a_name(text))


def a_name(text: str) -> str:
    """Returns an argument that is a path or a name, its `~` and `$NAME` expanded, as `type` of
    argparse."""
    try:
        return expanded(text)
    except PathError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def a_source(text: str) -> str:
    """Returns an argument that is also read in object storage, as `type` of argparse."""
    try:
        return any_name(text)
    except PathError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def check_writable(path: Path | None) -> None:
    """Raises UserError if a file cannot be written; called before anything is computed."""
    if path is None:
        return
    if path.is_dir():
        raise UserError(f"{path} cannot be written: it is a folder; give a file name")
    if not path.absolute().parent.is_dir():
        raise UserError(
            f"{path} cannot be written: folder {path.parent} does not exist; create it, or choose "
            "another"
        )
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise UserError(f"{path} cannot be written: permission denied; choose another")


def check_picture(path: Path | None) -> None:
    """Raises UserError if --png names a file that cannot be written, or of an unknown kind."""
    if path is not None and path.suffix not in PICTURES:
        raise UserError(f"--png is {path}: the file name must end in one of {', '.join(PICTURES)}")
    check_writable(path)


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


@contextmanager
def progress_bar() -> Iterator["Show"]:
    """Yields `show(stage, share)`, which shows progress on standard error: a bar, or without a
    terminal a line now and then."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description:24}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=1.0)
        yield lambda stage, share: bars.update(task, description=stage, completed=share)


def _lines() -> "Show":
    last = time.monotonic()

    def show(stage: str, share: float) -> None:
        nonlocal last
        if time.monotonic() - last >= LINES_EVERY_S:
            print(f"{stage}: {share:.0%}", file=sys.stderr, flush=True)
            last = time.monotonic()

    return show


def not_taken(words: list[str], parser: argparse.ArgumentParser, *, takes_settings: bool) -> str:
    """Returns the error for words that a command does not take, with the option or setting that was
    probably meant."""
    from longctx.config.names import setting_of  # pydantic takes long to import

    option = next((word.partition("=")[0] for word in words if word.startswith("--")), "")
    setting = setting_of(option[2:].replace("-", "_")) if takes_settings else None
    near = difflib.get_close_matches(option, parser._option_string_actions, n=1)
    if setting:
        meant = f"--{setting.replace(': ', ' ')}"
    else:
        meant = near[0] if near else ""
    hint = f"did you mean {meant}?" if meant else f"`{parser.prog} --help` lists what it takes"
    return f"unrecognized arguments: {' '.join(words)}: {hint}"
