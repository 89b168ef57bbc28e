"""Run folder: config.yaml, metrics.jsonl, TensorBoard events, checkpoints/, and `latest`, a link
for people.

It is checked before a run starts. The checkpoint found is that of the last step;
`checkpoint.verified` reads it later.

`best`, which is like a run folder, has the checkpoint with the lowest validation loss; its files
are links to those of the checkpoint, or copies where the file system has no links. The checkpoint
itself says which one is the best so far, so that a resumed run knows.
"""

import errno
import fcntl
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from longctx.config.removed import RUN_HEADER
from longctx.errors import UserError
from longctx.model.checkpoint_files import ENDS
from longctx.training.saved import checkpoint
from longctx.training.saved.checkpoint import Checkpoint, because
from longctx.training.saved.model_folder import model_folder

BEST = "best"
"""Folder of a run in which the checkpoint with the lowest validation loss is kept, and its key in
the state of checkpoints."""


class RunFolderError(UserError):
    """Raised if a run folder cannot be used as requested."""


def open_run_folder(
    folder: Path,
    *,
    resume: bool,
    checkpoint_bytes: int,
    or_begin: bool = False,
    step: int | None = None,
    best: bool = False,
) -> tuple[Checkpoint | None, list[str]]:
    """Checks that a run can write to `folder`, and finds the checkpoint to resume from.

    With `or_begin` a run that has saved no checkpoint yet starts from scratch; with a `step` the
    run resumes from the checkpoint of that step. Returns (the newest complete checkpoint or that of
    `step`, None for a new run; messages about damaged ones). Raises RunFolderError if the folder is
    not writable, has too little space for two checkpoints of `checkpoint_bytes` (0: none are
    written), three with a `best` one, contains another run, or has no checkpoint to resume from.
    """
    free = _writable(folder)
    if (folder / "latest").exists() and not (folder / "latest").is_symlink():
        raise RunFolderError(
            f"{folder / 'latest'} must be a link to a checkpoint, but is not a link: move it away"
        )
    saved, damaged = checkpoint.newest(folder)
    if step is not None and saved is not None:
        saved, damaged = checkpoint.of_step(folder, step)
        if saved is None:
            steps = ", ".join(map(str, checkpoint.steps(folder)))
            raise RunFolderError(
                f"--resume is {step}, but {folder} has no complete checkpoint of that "
                f"step{because(damaged)}: it has those of steps {steps}"
            )
    if resume and saved is None and not or_begin:
        raise RunFolderError(
            f"nothing to resume from: {folder} has no complete checkpoint{because(damaged)}. "
            "Start without --resume, or with --resume-if-any"
        )
    if or_begin and saved is None and checkpoint.was_saved(folder):
        raise RunFolderError(
            f"no checkpoint of {folder} can be used{because(damaged)}. {checkpoint.START_ANEW}"
        )
    if not resume and saved is not None:
        raise RunFolderError(
            f"run folder {folder} contains a run with a checkpoint at step {saved.step}: add "
            "--resume to continue it, or choose another folder with --train.run_dir"
        )
    if not resume and (folder / "metrics.jsonl").exists():
        raise RunFolderError(
            f"run folder {folder} contains a run without a checkpoint: add --resume-if-any to "
            "start it again, or choose another folder with --train.run_dir"
        )
    if saved is None and not (folder / "metrics.jsonl").exists():
        _refuse_foreign(folder)
    _check_space(folder, free, 3 if best else 2, checkpoint_bytes)
    return (saved if resume else None), damaged


def settings_header(ranks: int, computed: str) -> str:
    """Returns the first line of the settings in a run folder, by which they are known as those of a
    run."""
    return f"# {ranks} ranks: {computed}\n"


def _refuse_foreign(folder: Path) -> None:
    """Raises RunFolderError if a folder without a run has something that a run would replace."""
    settings = folder / "config.yaml"
    model = model_folder(folder)
    best = folder / BEST
    foreign = []
    if settings.is_file() and not RUN_HEADER.match(settings.read_text("utf-8", errors="replace")):
        foreign.append(settings)
    if os.path.lexists(model) and not (model / ENDS).is_file():
        foreign.append(model)
    if os.path.lexists(best) and not checkpoint.is_run(best):
        foreign.append(best)
    if foreign:
        raise RunFolderError(
            f"{foreign[0]} was not written by a run, which would replace it: choose another "
            "folder with --train.run_dir, or move it away"
        )


def _writable(folder: Path) -> int:
    """Makes the run folder, and returns the free bytes there. Raises RunFolderError if nothing can
    be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"x")
            probe.flush()
    except OSError as error:
        if error.errno == errno.ENOSPC:
            way_out = "free disk space"
        else:
            way_out = "choose another folder with --train.run_dir"
        raise RunFolderError(
            f"run folder {folder} cannot be written ({error}): {way_out}"
        ) from error
    return shutil.disk_usage(folder).free


def _check_space(folder: Path, free: int, count: int, checkpoint_bytes: int) -> None:
    """Raises RunFolderError if there is no space for `count` checkpoints."""
    # The old checkpoint stays until the new one is complete.
    if free < count * checkpoint_bytes:
        raise RunFolderError(
            f"run folder {folder} has {free / 1e6:,.1f} MB free, but {count} checkpoints of this "
            f"model need {count * checkpoint_bytes / 1e6:,.1f} MB: free disk space, or choose "
            "another folder with --train.run_dir"
        )


@contextmanager
def only_run_in(folder: Path) -> Iterator[None]:
    """Locks a run folder for this run. Raises RunFolderError if another run has locked it."""
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RunFolderError(
                f"another run is writing to {folder}: wait for it, stop it, or choose another "
                "folder with --train.run_dir"
            ) from error
        yield


def set_aside(run: Path, saved: Checkpoint) -> list[str]:
    """Moves the checkpoints after `saved` into a folder of the run, with the metrics so far.
    Returns a message on them, if any.

    The run, which goes on after `saved`, would take them for its own.
    """
    later = checkpoint.after(saved)
    best = [run / BEST] * any(step > saved.step for step in checkpoint.steps(run / BEST))
    if not later and not best:
        return []
    number = next(
        number for number in itertools.count(1) if not (run / f"set-aside-{number}").exists()
    )
    folder = run / f"set-aside-{number}"
    (folder / "checkpoints").mkdir(parents=True)
    checkpoint.link_latest(saved.folder)
    for each in later:
        each.rename(folder / "checkpoints" / each.name)
    for each in best:
        each.rename(folder / BEST)
    if (run / "metrics.jsonl").is_file():
        shutil.copy2(run / "metrics.jsonl", folder)
    names = ", ".join(each.name for each in (*later, *best))
    said = f"resumed from step {saved.step}: later checkpoints ({names}) were moved to {folder}"
    (folder / "NOTE.txt").write_text(f"{said}, with the metrics until then\n", "utf-8")
    return [said]


def restore_best(saved: Checkpoint) -> dict[str, Any] | None:
    """Returns step and loss of the best checkpoint when one was saved, None if it is no longer
    there. Only one rank calls it.

    Keeps it again if it is not the one that is kept: the run was killed in between, or went back to
    an earlier step.
    """
    best: dict[str, Any] | None = saved.state.get(BEST)
    if best is None or best["step"] in checkpoint.steps(saved.run / BEST):
        return best
    if best["step"] not in checkpoint.steps(saved.run):
        return None
    keep_best(saved.run, checkpoint.folder_of(saved.run, best["step"]))
    return best


def keep_best(run: Path, final: Path) -> None:
    """Makes the published checkpoint in the folder `final` the best one of the run."""
    best = run / BEST
    made = run / f"{BEST}.partial"
    shutil.rmtree(made, ignore_errors=True)
    shutil.copytree(final, made / final.relative_to(run), copy_function=_link)
    if (run / "config.yaml").is_file():
        shutil.copy2(run / "config.yaml", made)
    if model_folder(run).is_dir():
        shutil.copytree(model_folder(run), model_folder(made))
    replaced = run / f"{BEST}.replaced"
    shutil.rmtree(replaced, ignore_errors=True)
    if best.exists():
        best.rename(replaced)
    made.rename(best)
    shutil.rmtree(replaced, ignore_errors=True)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
