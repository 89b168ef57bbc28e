"""Run folder: config.yaml, metrics.jsonl, TensorBoard events, checkpoints/, latest. Checked before anything starts."""

import shutil
import tempfile
from pathlib import Path

from longctx.errors import UserError
from longctx.training import checkpoint
from longctx.training.checkpoint import Checkpoint


class RunFolderError(UserError):
    """A run folder that cannot be used as asked."""


def open_run_folder(folder: Path, *, resume: bool, checkpoint_bytes: int) -> tuple[Checkpoint | None, list[str]]:
    """Makes sure that a run can write to `folder`, and finds the checkpoint to go on from.

    Returns (the newest complete checkpoint, or None for a new run; sentences about damaged ones). Raises RunFolderError: no
    permission, less free space than two checkpoints need, a run that is there already, or nothing to resume from.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"x")
            probe.flush()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise RunFolderError(f"run folder {folder} cannot be written: {error}. Choose another with --train.run_dir") from error
    found, damaged = checkpoint.newest(folder)
    if resume and found is None:
        why = f" ({'; '.join(damaged)})" if damaged else ""
        raise RunFolderError(f"nothing to resume from: {folder} has no complete checkpoint{why}. Start without --resume")
    if not resume and (found is not None or (folder / "metrics.jsonl").exists()):
        there = f"a run up to its checkpoint at step {found.step}" if found else "a run without a checkpoint"
        ways_out = "--resume to go on with it, " if found else ""
        raise RunFolderError(f"run folder {folder} holds {there}: give {ways_out}or another folder with --train.run_dir")
    # The old checkpoint stays until the new one is complete.
    if free < 2 * checkpoint_bytes:
        raise RunFolderError(
            f"run folder {folder} has {free / 2**30:.2f} GiB free, and two checkpoints of this model need "
            f"{2 * checkpoint_bytes / 2**30:.2f} GiB: make room, or choose another with --train.run_dir"
        )
    return (found if resume else None), damaged
