"""Run folder: config.yaml, metrics.jsonl, TensorBoard events, checkpoints/, latest. Checked before anything starts."""

import errno
import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from longctx.errors import UserError
from longctx.training import checkpoint
from longctx.training.checkpoint import Checkpoint


class RunFolderError(UserError):
    """A run folder that cannot be used as asked."""


def open_run_folder(
    folder: Path, *, resume: bool, checkpoint_bytes: int, or_begin: bool = False
) -> tuple[Checkpoint | None, list[str]]:
    """Makes sure that a run can write to `folder`, and finds the checkpoint to go on from; `or_begin`: else it begins anew.

    Returns (the newest complete checkpoint, or None for a new run; sentences about damaged ones). Raises RunFolderError: no
    permission, less free space than two checkpoints of `checkpoint_bytes` (0: none will be written) need, a run that is there
    already, or nothing to resume from.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"x")
            probe.flush()
    except OSError as error:
        way_out = "make room there" if error.errno == errno.ENOSPC else "choose another with --train.run_dir"
        raise RunFolderError(f"run folder {folder} cannot be written: {error}. Please {way_out}") from error
    if (folder / "latest").exists() and not (folder / "latest").is_symlink():
        raise RunFolderError(f"{folder / 'latest'} is not the link that a run keeps there: move it away")
    found, damaged = checkpoint.newest(folder)
    if resume and found is None and not or_begin:
        why = f" ({'; '.join(damaged)})" if damaged else ""
        raise RunFolderError(
            f"nothing to resume from: {folder} has no complete checkpoint{why}. Start without --resume, or with --resume-if-any"
        )
    if not resume and found is not None:
        raise RunFolderError(
            f"run folder {folder} holds a run up to its checkpoint at step {found.step}: give --resume to go on with it, or "
            "another folder with --train.run_dir"
        )
    if not resume and (folder / "metrics.jsonl").exists():
        raise RunFolderError(
            f"run folder {folder} holds a run without a checkpoint: give --resume-if-any to begin it anew, or another folder "
            "with --train.run_dir"
        )
    # The old checkpoint stays until the new one is complete.
    if free < 2 * checkpoint_bytes:
        raise RunFolderError(
            f"run folder {folder} has {free / 1e6:,.1f} MB free, and two checkpoints of this model need "
            f"{2 * checkpoint_bytes / 1e6:,.1f} MB: make room, or choose another with --train.run_dir"
        )
    return (found if resume else None), damaged


@contextmanager
def only_run_in(folder: Path) -> Iterator[None]:
    """Keeps other runs out of a run folder while this one lasts. Raises RunFolderError if one is there already."""
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RunFolderError(
                f"another run is writing to {folder}: wait for it, end it, or choose another folder with --train.run_dir"
            ) from error
        yield
