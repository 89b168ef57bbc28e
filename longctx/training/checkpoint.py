"""Checkpoints: sharded by `torch.distributed.checkpoint`, written atomically, loadable on any number of ranks.

A checkpoint is written to `step-000100.partial` and renamed when all files are on disk, so that an interrupted write is never
used. `state.json`, written last, has the step, the position in the data, the model's shape and the size of every file, so that
files truncated later are detected too. Incomplete checkpoints are neither used nor deleted.
"""

import json
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

from longctx.errors import UserError

STATE = "state.json"
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)
"""Keys the optimizer state by parameter name, independent of the number of ranks."""


class CheckpointError(UserError):
    """Raised if a checkpoint cannot be written, found or used."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk; `state` is the one passed to `save`."""

    folder: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["step"])

    @property
    def stage(self) -> int:
        """Stage of the run at this step, counted from 0."""
        return int(self.state.get("stage", 0))


def save(
    run: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    group: dist.ProcessGroup,
    keep: int | None = None,
) -> Path:
    """Writes `checkpoints/step-…` under `run`. Collective over `group`, a gloo group of all ranks.

    `state` is plain JSON data with the key `step`. Afterwards `latest` in `run` links to the checkpoint, and all but the `keep`
    latest checkpoints are deleted (None: none). Raises CheckpointError.
    """
    final = run / "checkpoints" / f"step-{state['step']:06d}"
    partial = final.with_suffix(".partial")
    first = dist.get_rank(group) == 0
    if first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier(group)
    weights, moments = _state(model, optimizer)
    writer = FileSystemWriter(partial, sync_files=True)
    try:
        save_sharded({"model": weights, "optimizer": moments}, storage_writer=writer, process_group=group)
    except (CheckpointException, OSError) as error:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"could not write {partial}: {_cause(error)}. Earlier checkpoints are intact: free disk space, then --resume"
        ) from error
    if first:
        _publish(run, partial, final, state)
        _prune(run, keep, final)
    dist.barrier(group)
    return final


def _publish(run: Path, partial: Path, final: Path, state: dict[str, Any]) -> None:
    sizes = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
    with (partial / STATE).open("w", encoding="utf-8") as stream:
        json.dump({**state, "files": sizes}, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    if final.exists():  # a run resumed from an earlier checkpoint reaches this step again
        shutil.rmtree(final)
    partial.rename(final)
    link = run / "latest.partial"
    link.unlink(missing_ok=True)
    link.symlink_to(final.relative_to(run))
    link.replace(run / "latest")


def _prune(run: Path, keep: int | None, published: Path) -> None:
    """Deletes all complete checkpoints but the `keep` latest."""
    complete = [folder for folder in _folders(run) if _examine(folder)[0] is None]
    for folder in complete[: -keep if keep else 0]:
        if folder != published:
            shutil.rmtree(folder)


def _folders(run: Path) -> list[Path]:
    """Returns the checkpoints under `run`, complete or not, by step; of one step, the incomplete one first."""
    found = [(re.fullmatch(r"step-(\d+)(\.partial)?", folder.name), folder) for folder in (run / "checkpoints").glob("step-*")]
    return [folder for *_, folder in sorted((int(m[1]), m[2] is None, folder) for m, folder in found if m)]


def is_run(folder: Path) -> bool:
    """Returns True if a run has written to this folder, with or without a checkpoint."""
    return (folder / "config.yaml").is_file() or (folder / "checkpoints").is_dir()


def newest(run: Path) -> tuple[Checkpoint | None, list[str]]:
    """Returns the newest complete checkpoint under `run`, and a message on every incomplete later one."""
    damaged: list[str] = []
    for folder in reversed(_folders(run)):
        problem, state = _examine(folder)
        if problem is None:
            return Checkpoint(folder, state), damaged
        damaged.append(f"{folder} {problem}: not used")
    return None, damaged


def of_step(run: Path, step: int) -> tuple[Checkpoint | None, list[str]]:
    """Returns the checkpoint of one step if it is complete, otherwise a message if it exists."""
    folder = run / "checkpoints" / f"step-{step:06d}"
    problem, state = _examine(folder)
    return (Checkpoint(folder, state), []) if problem is None else (None, [f"{folder} {problem}"] if folder.exists() else [])


def steps(run: Path) -> list[int]:
    """Returns the steps of the complete checkpoints under `run`."""
    examined = [_examine(folder) for folder in _folders(run)]
    return [int(state["step"]) for problem, state in examined if problem is None]


def _examine(folder: Path) -> tuple[str | None, dict[str, Any]]:
    if folder.suffix == ".partial":
        return "is incomplete (its write was interrupted)", {}
    try:
        state: dict[str, Any] = json.loads((folder / STATE).read_text("utf-8"))
        sizes = state.pop("files")
    except (OSError, ValueError, KeyError) as error:
        return f"has no readable {STATE} ({error})", {}
    for name, size in sizes.items():
        file = folder / name
        found = file.stat().st_size if file.is_file() else 0
        if found != size:
            return f"is damaged ({name} has {found:,} bytes instead of {size:,})", {}
    return None, state


def load(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup) -> None:
    """Reads weights and optimizer state into a model and optimizer sharded over any number of ranks. Collective.

    Weight decay, betas and other settings of `optimizer` are kept. Raises CheckpointError.
    """
    weights, optimizer_state = _state(model, optimizer)
    moments = {name: value for name, value in optimizer_state.items() if not name.startswith("param_groups.")}
    state: dict[str, Any] = {"model": weights, "optimizer": moments}
    try:
        load_sharded(state, storage_reader=FileSystemReader(checkpoint.folder), process_group=group)
    except (CheckpointException, OSError, pickle.UnpicklingError, EOFError) as error:
        raise CheckpointError(
            f"{checkpoint.folder} is damaged: {_cause(error)}. Move it away to --resume from the previous checkpoint"
        ) from error
    optimizer_state = {**optimizer_state, **state["optimizer"]}
    options = replace(BY_NAME, strict=all(parameter.requires_grad for parameter in model.parameters()))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=optimizer_state, options=options)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns weights and optimizer state; of a partly frozen model only the trained weights."""
    weights, moments = get_state_dict(model, optimizer, options=BY_NAME)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if len(trained) < len(list(model.parameters())):
        weights = {name: weight for name, weight in weights.items() if name in trained}
    return weights, moments


class SavedWeights:
    """The weights of a checkpoint, sharded over any number of ranks, read by name in one process. Raises CheckpointError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self._saved = FileSystemReader(folder).read_metadata().state_dict_metadata
        except (OSError, pickle.UnpicklingError, EOFError) as error:
            raise CheckpointError(f"{folder} is damaged: {error}. Move it away, and use an earlier checkpoint") from error

    def without_values(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Returns tensors on the meta device with the saved shapes and dtypes."""
        return {name: self._empty(name, "meta") for name in names}

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Returns whole tensors on the CPU."""
        weights = {name: self._empty(name, "cpu") for name in names}
        state: dict[str, Any] = {"model": weights}
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # intended: one process
                load_sharded(state, storage_reader=FileSystemReader(self.folder), no_dist=True)
        except (CheckpointException, OSError, pickle.UnpicklingError, EOFError) as error:
            raise CheckpointError(
                f"{self.folder} is damaged: {_cause(error)}. Move it away, and use an earlier checkpoint"
            ) from error
        return weights

    def _empty(self, name: str, device: str) -> torch.Tensor:
        saved = self._saved.get(f"model.{name}")
        if not isinstance(saved, TensorStorageMetadata):
            raise CheckpointError(f"{self.folder} has no {name}: it is not a checkpoint of the whole model")
        return torch.empty(saved.size, dtype=saved.properties.dtype, device=device)


def load_weights(checkpoint: Checkpoint, model: nn.Module, group: dist.ProcessGroup) -> None:
    """Reads only the weights into a model sharded over any number of ranks. Collective.

    Of a partly frozen model only the trained weights are read. Raises CheckpointError.
    """
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    whole = len(trained) == len(list(model.parameters()))
    weights = {name: weight for name, weight in get_model_state_dict(model).items() if whole or name in trained}
    try:
        load_sharded({"model": weights}, storage_reader=FileSystemReader(checkpoint.folder), process_group=group)
    except (CheckpointException, OSError, pickle.UnpicklingError, EOFError) as error:
        raise CheckpointError(
            f"{checkpoint.folder} is damaged: {_cause(error)}. Move it away to use the previous checkpoint"
        ) from error
    set_model_state_dict(model, weights, options=StateDictOptions(strict=whole))


def _cause(error: BaseException) -> str:
    """Returns the error of the first failed rank, without the tracebacks of CheckpointException."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        return f"rank {rank}: {cause}"
    return str(error)
