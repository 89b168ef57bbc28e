"""Best: the checkpoint with the lowest validation loss, kept in `best` of a run's folder, which is like the folder of a run.

Its files are links to those of the checkpoint, or copies where the file system has no links. The checkpoint itself says which
one is the best so far, so that a resumed run knows.
"""

import os
import shutil
from pathlib import Path
from typing import Any

from longctx.training.saved.checkpoint import Checkpoint, folder_of, steps
from longctx.training.saved.model_folder import model_folder

KEY = "best"
"""Key of the best checkpoint so far in the state of checkpoints: its step and loss."""
FOLDER = "best"


def restore_best(saved: Checkpoint) -> dict[str, Any] | None:
    """Returns step and loss of the best checkpoint when one was saved, None if it is no longer there. Only one rank calls it.

    Keeps it again if it is not the one that is kept: the run was killed in between, or went back to an earlier step.
    """
    best: dict[str, Any] | None = saved.state.get(KEY)
    if best is None or best["step"] in steps(saved.run / FOLDER):
        return best
    if best["step"] not in steps(saved.run):
        return None
    keep_best(saved.run, folder_of(saved.run, best["step"]))
    return best


def keep_best(run: Path, final: Path) -> None:
    """Makes the published checkpoint in the folder `final` the best one of the run."""
    best, made = run / FOLDER, run / f"{FOLDER}.partial"
    shutil.rmtree(made, ignore_errors=True)
    shutil.copytree(final, made / final.relative_to(run), copy_function=_link)
    if (run / "config.yaml").is_file():
        shutil.copy2(run / "config.yaml", made)
    if model_folder(run).is_dir():
        shutil.copytree(model_folder(run), model_folder(made))
    replaced = run / f"{FOLDER}.replaced"
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
