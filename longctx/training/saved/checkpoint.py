"""Checkpoints on disk: found, verified and read, on any number of ranks. `saving` writes them.

A checkpoint is sharded by `torch.distributed.checkpoint`, written to `step-000100.partial`, and
renamed when all files are on disk, so that an interrupted write is never used. `state.json`,
written last, has the step, the position in the data, the model's shape, and sizes and checksums of
the other files. A checkpoint is verified before it is used; a damaged one is named and not used,
until a run reaches its step again and replaces it, or keeps fewer checkpoints.
"""

import errno
import json
import os
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded

from longctx.checksums import check_files, damage, persistent, unsealed
from longctx.parallel.mesh import gather_objects
from longctx.training.saved.checkpoint_io import CheckpointError, TensorPlanner, TensorReader, cause

STATE = "state.json"
WITHOUT_MOMENTS = "without_moments"
EARLIER = "to use an earlier checkpoint"
PREVIOUS = "to --resume from the previous checkpoint"
START_ANEW = "Restore one of them, or move the folder away to start from scratch"
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)
"""Keys the optimizer state by parameter name, independent of the number of ranks."""


class NoCheckpoint(CheckpointError):
    """Raised on every rank if all checkpoints of a run are damaged."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk; `state` is what `Saver.start` was given, `checksums` are those
    of its files."""

    folder: Path
    state: dict[str, Any]
    checksums: dict[str, str]

    @property
    def step(self) -> int:
        return int(self.state["step"])

    @property
    def run(self) -> Path:
        return self.folder.parents[1]

    def damage(self, group: dist.ProcessGroup | None = None) -> str:
        """Reads all files; with a `group`, its ranks share them. Returns what is wrong, the same on
        every rank, or nothing."""
        rank, ranks = (
            (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        )
        files = sorted(self.checksums)[rank::ranks]
        problems = [
            list(filter(None, (damage(self.folder / name, self.checksums[name]) for name in files)))
        ]
        if group is not None:
            problems = gather_objects(problems[0], group)
        return "; ".join(problem for each in problems for problem in each)


def because(damaged: Sequence[str]) -> str:
    """Returns messages on checkpoints that cannot be used, in brackets; nothing without
    messages."""
    if damaged:
        return f" ({'; '.join(damaged)})"
    return ""


def folder_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:06d}"


def complete(run: Path, last: Path) -> list[Path]:
    """Returns the folders of the complete checkpoints up to the one in `last`, by step."""
    folders = [folder for folder in _folders(run) if _step(folder) <= _step(last)]
    return [folder for folder in folders if isinstance(_examine(folder), Checkpoint)]


def _folders(run: Path) -> list[Path]:
    """Returns the checkpoints under `run`, complete or not, by step; of one step, the incomplete
    one first."""
    parent = run / "checkpoints"
    try:
        names = persistent(lambda: os.listdir(parent))
    except FileNotFoundError:
        return []
    folders = [parent / name for name in names if re.fullmatch(r"step-\d+(\.partial)?", name)]
    return sorted(folders, key=lambda folder: (_step(folder), folder.suffix == ""))


def after(saved: Checkpoint) -> list[Path]:
    """Returns the folders of the later checkpoints of its run, complete or not."""
    return [folder for folder in _folders(saved.run) if _step(folder) > saved.step]


def link_latest(final: Path) -> None:
    """Makes the checkpoint in a folder the `latest` of its run."""
    run = final.parents[1]
    link = run / "latest.partial"
    link.unlink(missing_ok=True)
    link.symlink_to(final.relative_to(run))
    link.replace(run / "latest")


def _step(folder: Path) -> int:
    return int(folder.stem.removeprefix("step-"))


def is_run(folder: Path) -> bool:
    """Returns True if a run has written to this folder, with or without a checkpoint."""
    return (folder / "config.yaml").is_file() or (folder / "checkpoints").is_dir()


def was_saved(run: Path) -> bool:
    """Returns True if a checkpoint was completed under `run`, whether or not it still can be
    used."""
    return (run / "latest").is_symlink() or any(not folder.suffix for folder in _folders(run))


def newest(run: Path, before: int | None = None) -> tuple[Checkpoint | None, list[str]]:
    """Returns the newest complete checkpoint under `run`, and a message on every incomplete later
    one.

    `before` leaves out this step and later ones. Sizes of the files are checked, not their content;
    see `verified`. Raises OSError if the folder cannot be read.
    """
    damaged: list[str] = []
    for folder in reversed(_folders(run)):
        if before is not None and _step(folder) >= before:
            continue
        saved = _examine(folder)
        if isinstance(saved, Checkpoint):
            return saved, damaged
        damaged.append(f"{folder} {saved}: not used")
    return None, damaged


def to_continue(run: Path, steps: int) -> tuple[Checkpoint, list[str]]:
    """Returns the newest complete checkpoint of a run that another one of `steps` steps continues,
    as `newest` does.

    Raises CheckpointError if there is none, or if no step is left.
    """
    saved, damaged = newest(run)
    if saved is None:
        raise CheckpointError(
            f"--continue is {run}, which has no complete checkpoint{because(damaged)}: give the "
            "folder of a run"
        )
    if saved.step >= steps:
        raise CheckpointError(
            f"--continue is {run}, which has done {saved.step} steps, but train.steps is {steps}: "
            "it counts the steps of both runs, so raise it"
        )
    return saved, damaged


def verified(
    saved: Checkpoint | None, group: dist.ProcessGroup, *, only: bool = False
) -> tuple[Checkpoint | None, list[str]]:
    """Returns the checkpoint that rank 0 has if it is undamaged, otherwise the newest undamaged one
    before it.

    Also returns a message on every checkpoint that is not used. Raises NoCheckpoint if none is
    undamaged, or with `only` if this one is not. Collective.
    """
    first = saved = gather_objects(saved, group)[0]
    damaged: list[str] = []
    while saved is not None and (problem := saved.damage(group)):
        damaged.append(f"{saved.folder} is damaged ({problem}): not used")
        if only:
            raise NoCheckpoint(f"{damaged[0]}. Give another step with --resume")
        saved, more = gather_objects(
            newest(saved.run, before=saved.step) if dist.get_rank(group) == 0 else None, group
        )[0]
        damaged += more
    if saved is None and first is not None:
        raise NoCheckpoint(
            f"no checkpoint of {first.run} can be used: {'; '.join(damaged)}. {START_ANEW}"
        )
    return saved, damaged


def of_step(run: Path, step: int) -> tuple[Checkpoint | None, list[str]]:
    """Returns the checkpoint of one step if it is complete, otherwise a message if it exists."""
    folder = folder_of(run, step)
    saved = _examine(folder)
    if isinstance(saved, Checkpoint):
        return (saved, [])
    return (None, [f"{folder} {saved}"] if folder.exists() else [])


def steps(run: Path) -> list[int]:
    """Returns the steps of the complete checkpoints under `run`."""
    return [saved.step for saved in map(_examine, _folders(run)) if isinstance(saved, Checkpoint)]


def _examine(folder: Path) -> Checkpoint | str:
    """Returns the checkpoint in a folder, or what is wrong with it. Files other than `state.json`
    are not read."""
    if folder.suffix == ".partial":
        return "is incomplete (its write was interrupted)"
    try:
        return persistent(lambda: _read_state(folder))
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EIO):
            raise
        return f"has no readable {STATE} ({error})"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"is damaged ({STATE}: {error})"


def _read_state(folder: Path) -> Checkpoint:
    """Reads `state.json`. Raises ValueError, KeyError, TypeError or AttributeError if something is
    wrong."""
    state = unsealed(json.loads((folder / STATE).read_text("utf-8")))
    sizes = state.pop("files")
    checksums = state.pop("checksums")
    if state["step"] != _step(folder):
        raise ValueError(f"it has step {state['step']}")
    if not all(isinstance(state.get(key, {}), dict) for key in ("data", "model")):
        raise ValueError("data and model must be objects")
    check_files(folder, sizes, checksums)
    return Checkpoint(folder, state, checksums)


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns all tensors of a checkpoint, sharded as they are; of a model with adapters only
    these."""
    weights, optimizer_state = _state(model, optimizer)
    return {"model": weights, "optimizer": _moments(optimizer_state)}


def load(
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    group: dist.ProcessGroup,
) -> None:
    """Reads weights and optimizer state into a model and optimizer sharded over any number of
    ranks. Collective.

    Weight decay, betas and other settings of `optimizer` are kept. Raises CheckpointError.
    """
    weights, optimizer_state = _state(model, optimizer)
    saved = SavedWeights(checkpoint.folder).names
    moments = {}
    new = {f"state.{name}" for name in checkpoint.state[WITHOUT_MOMENTS]}
    for name, value in _moments(optimizer_state).items():
        if f"optimizer.{name}" in saved:
            moments[name] = value
        elif (parameter := _parameter(name)) not in new:
            if any(
                _parameter(other) == f"optimizer.{parameter}"
                for other in saved
                if ".exp_avg" in other
            ):
                raise CheckpointError(
                    f"{checkpoint.folder} has moments of {parameter} with another number of bits, "
                    "as of an earlier version of longctx: start a new run from an export of it "
                    "(longctx export), or go on with the version that wrote it"
                )
            raise CheckpointError(
                f"{checkpoint.folder} is damaged: it has no moments of {parameter}. Move it away "
                f"{PREVIOUS}"
            )
    state: dict[str, Any] = {"model": weights, "optimizer": moments}
    _load(state, checkpoint.folder, PREVIOUS, group)
    optimizer_state = {**optimizer_state, **state["optimizer"]}
    options = replace(BY_NAME, strict=_saved(model) is None)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=optimizer_state,
        options=options,
    )


def without_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Returns the names of trained parameters that never had a gradient, as of an encoder of
    images, which reads no text.

    Their moments are zero, as before the first step.
    """
    trained = ((name, weight) for name, weight in model.named_parameters() if weight.requires_grad)
    return [name for name, weight in trained if weight not in optimizer.state]


def _parameter(key: str) -> str:
    """Returns `state.NAME` for the key of a moment: `state.NAME.exp_avg`, or of 8 bits
    `state.NAME.exp_avg.codes`."""
    return key.removesuffix(".codes").removesuffix(".scale").rpartition(".")[0]


def _state(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns weights and optimizer state; of a model with adapters only these."""
    new = not optimizer.state
    weights, moments = get_state_dict(model, optimizer, options=BY_NAME)
    # Torch has made its state by a step with gradients of zero, which leaves moments at zero, but
    # counts.
    if new:
        for value in (value for values in optimizer.state.values() for value in values.values()):
            if isinstance(value, torch.Tensor) and not value.dim():
                value.zero_()
    saved = _saved(model)
    return (
        weights if saved is None else {name: weights[name] for name in weights if name in saved}
    ), moments


def _saved(model: nn.Module) -> set[str] | None:
    """Returns the names of the weights that checkpoints have: adapters without their base, or all
    (None)."""
    spec: Any = model.spec
    if not spec.adapted:
        return None
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def _moments(optimizer_state: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of the optimizer's state that is saved: settings of the optimizer are those
    of the run."""
    return {
        name: value
        for name, value in optimizer_state.items()
        if not name.startswith("param_groups.")
    }


def _load(
    state: dict[str, Any], folder: Path, purpose: str, group: dist.ProcessGroup | None
) -> None:
    """Reads the tensors of `state` in place, in one process if there is no group. Raises
    CheckpointError."""
    try:
        load_sharded(
            state,
            storage_reader=TensorReader(folder),
            planner=TensorPlanner(),
            process_group=group,
            no_dist=group is None,
        )
    except (CheckpointException, CheckpointError, OSError) as error:
        raise CheckpointError(
            f"{folder} is damaged: {cause(error)}. Move it away {purpose}"
        ) from error


class SavedWeights:
    """The weights of a checkpoint, sharded over any number of ranks, read by name in one process.
    Raises CheckpointError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self._saved = TensorReader(folder).read_metadata().state_dict_metadata
        except (OSError, CheckpointError) as error:
            raise CheckpointError(
                f"{folder} is damaged: {error}. Move it away {EARLIER}"
            ) from error

    @property
    def names(self) -> set[str]:
        """Names of all tensors, as `model.NAME` and `optimizer.NAME`."""
        return {
            name for name, saved in self._saved.items() if isinstance(saved, TensorStorageMetadata)
        }

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Returns whole tensors on the CPU."""
        weights = {}
        for name in names:
            saved = self._saved.get(f"model.{name}")
            if not isinstance(saved, TensorStorageMetadata):
                raise CheckpointError(
                    f"{self.folder} has no {name}: it is not a checkpoint of the whole model"
                )
            weights[name] = torch.empty(saved.size, dtype=saved.properties.dtype)
        with warnings.catch_warnings():
            # intended: one process.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            _load({"model": weights}, self.folder, EARLIER, None)
        return weights


def load_weights(checkpoint: Checkpoint, model: nn.Module, group: dist.ProcessGroup) -> None:
    """Reads only the weights into a model sharded over any number of ranks. Collective.

    Of a model with adapters only these are read. Raises CheckpointError.
    """
    saved = _saved(model)
    weights = {
        name: weight
        for name, weight in get_model_state_dict(model).items()
        if saved is None or name in saved
    }
    _load({"model": weights}, checkpoint.folder, EARLIER, group)
    set_model_state_dict(model, weights, options=StateDictOptions(strict=saved is None))
