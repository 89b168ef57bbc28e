"""`longctx verify`: reads every file of stores and runs, and compares it with its checksums."""

import argparse
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from longctx.checksums import Read
from longctx.commands.output import progress_bar
from longctx.errors import UserError
from longctx.units import format_bytes

SUMMARY = "Compare every file of stores and checkpoints with its checksums"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", type=Path, metavar="STORE|RUN", help="folder of a store, or of a run")
    parser.epilog = "Exit status: 0 if nothing is damaged, 1 if something is."


def run(arguments: argparse.Namespace) -> int:
    from longctx.data.manifest import MANIFEST
    from longctx.training.saved import checkpoint

    damaged = False
    for path in arguments.paths:
        if (path / MANIFEST).is_file():
            sentences = _store(path)
        elif checkpoint.is_run(path):
            sentences = _run(path)
        else:
            raise UserError(f"{path} is neither a store nor the folder of a run: give the folder of one")
        for sentence, is_damage in sentences:
            print(f"{path}: {sentence}", file=sys.stderr if is_damage else sys.stdout, flush=True)
            damaged |= is_damage
    return int(damaged)


def _store(path: Path) -> Iterator[tuple[str, bool]]:
    """Yields sentences on a store, and whether they tell of damage."""
    from longctx.data.manifest import Manifest, StoreError
    from longctx.data.store import Store

    try:
        manifest = Manifest.load(path)
        with _reading(path, sum(manifest.files.values())) as read:
            problems = [problem for name in manifest.files if (problem := manifest.damage(path, name, read))]
        yield from ((problem, True) for problem in problems)
        if problems:
            return
        store = Store.open(path)
        if manifest.checksums:
            yield f"undamaged: {_size(manifest.files)}, {len(store):,} documents", False
            return
        for document, length in enumerate(store.lengths):
            store.tokens(document, 0, int(length))
        yield "no checksums, as it was prepared by an older version; sizes and token ids are right", False
    except StoreError as error:
        yield str(error), True


def _run(path: Path) -> Iterator[tuple[str, bool]]:
    """Yields sentences on the checkpoints of a run, and whether they tell of damage."""
    from longctx.training.saved import checkpoint

    empty = True
    for folder, saved in checkpoint.examined(path):
        name, empty = folder.name, False
        if isinstance(saved, str):
            yield f"{name} {saved}", not folder.suffix
            continue
        sizes = {file: (folder / file).stat().st_size for file in saved.checksums}
        with _reading(folder, sum(sizes.values())) as read:
            problem = saved.damage(read=read)
        if problem:
            yield f"{name} is damaged: {problem}", True
        elif saved.checksums:
            yield f"{name} is undamaged: {_size(sizes)}", False
        else:
            yield f"{name} has no checksums, as it was written by an older version; sizes are right", False
    if empty:
        yield "no checkpoints", False


@contextmanager
def _reading(folder: Path, total: int) -> Iterator[Read]:
    """Yields a function that shows how many of `total` bytes have been read."""
    done = 0
    with progress_bar() as show:

        def read(count: int) -> None:
            nonlocal done
            done += count
            show(folder.name, done / total)

        yield read


def _size(files: Mapping[str, int]) -> str:
    return f"{len(files)} files, {format_bytes(sum(files.values()))}"
