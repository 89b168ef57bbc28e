"""Checkpoints: sharded by `torch.distributed.checkpoint`, complete or not there at all, loadable on any number of ranks.

A checkpoint is written to `step-000100.partial` and renamed when all of it is on disk, so one cut short by a kill is never
taken for a good one. `state.json`, written last, holds the step, the place in the data, the model's shape and the size of every
file, so that one truncated later is noticed too. Checkpoints that are not complete are neither used nor deleted.
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
"""Optimizer state goes by the name of its parameter, whichever ranks hold that one."""


class CheckpointError(UserError):
    """A checkpoint that cannot be written, found or used."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk; `state` is what `save` was given."""

    folder: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["step"])

    @property
    def stage(self) -> int:
        """Which one of the run's was going on, counted from 0."""
        return int(self.state.get("stage", 0))


def save(
    run: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    group: dist.ProcessGroup,
    keep: int | None = None,
) -> Path:
    """Writes `checkpoints/step-…` under `run`; all ranks of `group` (a gloo group over all ranks) call it.

    `state` is plain JSON data with the key `step`. `latest` in `run` then links to it, and all but the last `keep` are deleted.
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
            f"could not write {partial}: {_cause(error)}. Earlier checkpoints are intact: make room, then --resume"
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
    if final.exists():  # a run that went back to an earlier checkpoint comes past this step again
        shutil.rmtree(final)
    partial.rename(final)
    link = run / "latest.partial"
    link.unlink(missing_ok=True)
    link.symlink_to(final.relative_to(run))
    link.replace(run / "latest")


def _prune(run: Path, keep: int | None, published: Path) -> None:
    """Deletes complete checkpoints but the `keep` latest."""
    complete = [folder for folder in _folders(run) if _examine(folder)[0] is None]
    for folder in complete[: -keep if keep else 0]:
        if folder != published:
            shutil.rmtree(folder)


def _folders(run: Path) -> list[Path]:
    """The checkpoints under `run`, complete or not, in ascending order of steps; of one step, the one cut short first."""
    found = [(re.fullmatch(r"step-(\d+)(\.partial)?", folder.name), folder) for folder in (run / "checkpoints").glob("step-*")]
    return [folder for *_, folder in sorted((int(m[1]), m[2] is None, folder) for m, folder in found if m)]


def is_run(folder: Path) -> bool:
    """Whether a run has written to this folder, a checkpoint or not."""
    return (folder / "config.yaml").is_file() or (folder / "checkpoints").is_dir()


def newest(run: Path) -> tuple[Checkpoint | None, list[str]]:
    """The complete checkpoint with the highest step under `run`, and a sentence on each later one that is not complete."""
    damaged: list[str] = []
    for folder in reversed(_folders(run)):
        problem, state = _examine(folder)
        if problem is None:
            return Checkpoint(folder, state), damaged
        damaged.append(f"{folder} {problem}: not used")
    return None, damaged


def of_step(run: Path, step: int) -> tuple[Checkpoint | None, list[str]]:
    """The same for one step alone."""
    folder = run / "checkpoints" / f"step-{step:06d}"
    problem, state = _examine(folder)
    return (Checkpoint(folder, state), []) if problem is None else (None, [f"{folder} {problem}"] if folder.exists() else [])


def steps(run: Path) -> list[int]:
    """Those of the complete checkpoints under `run`."""
    examined = [_examine(folder) for folder in _folders(run)]
    return [int(state["step"]) for problem, state in examined if problem is None]


def _examine(folder: Path) -> tuple[str | None, dict[str, Any]]:
    if folder.suffix == ".partial":
        return "was cut short", {}
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
    """Reads weights and moments into a model and optimizer sharded over any number of ranks; all ranks call it.

    Weight decay, betas and the like stay those of `optimizer`: they are settings of this run.
    """
    weights, optimizer_state = _state(model, optimizer)
    moments = {name: value for name, value in optimizer_state.items() if not name.startswith("param_groups.")}
    state: dict[str, Any] = {"model": weights, "optimizer": moments}
    try:
        load_sharded(state, storage_reader=FileSystemReader(checkpoint.folder), process_group=group)
    except (CheckpointException, OSError, pickle.UnpicklingError, EOFError) as error:
        raise CheckpointError(
            f"{checkpoint.folder} is damaged: {_cause(error)}. Move it away, and --resume goes on from the one before it"
        ) from error
    optimizer_state = {**optimizer_state, **state["optimizer"]}
    options = replace(BY_NAME, strict=all(parameter.requires_grad for parameter in model.parameters()))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=optimizer_state, options=options)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights and moments; of a model that is partly frozen only what is trained: the rest is read where it came from."""
    weights, moments = get_state_dict(model, optimizer, options=BY_NAME)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if len(trained) < len(list(model.parameters())):
        weights = {name: weight for name, weight in weights.items() if name in trained}
    return weights, moments


class SavedWeights:
    """The weights of a checkpoint, read by name in one process, however they are sharded. Raises CheckpointError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self._saved = FileSystemReader(folder).read_metadata().state_dict_metadata
        except (OSError, pickle.UnpicklingError, EOFError) as error:
            raise CheckpointError(f"{folder} is damaged: {error}. Move it away, and take an earlier one") from error

    def without_values(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Tensors on meta of these shapes and dtypes."""
        return {name: self._empty(name, "meta") for name in names}

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Whole tensors, on the CPU."""
        weights = {name: self._empty(name, "cpu") for name in names}
        state: dict[str, Any] = {"model": weights}
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as is meant here
                load_sharded(state, storage_reader=FileSystemReader(self.folder), no_dist=True)
        except (CheckpointException, OSError, pickle.UnpicklingError, EOFError) as error:
            raise CheckpointError(
                f"{self.folder} is damaged: {_cause(error)}. Move it away, and take an earlier one"
            ) from error
        return weights

    def _empty(self, name: str, device: str) -> torch.Tensor:
        saved = self._saved.get(f"model.{name}")
        if not isinstance(saved, TensorStorageMetadata):
            raise CheckpointError(f"{self.folder} lacks {name}: it is no checkpoint of the whole model")
        return torch.empty(saved.size, dtype=saved.properties.dtype, device=device)


def load_weights(checkpoint: Checkpoint, model: nn.Module, group: dist.ProcessGroup) -> None:
    """Reads the weights alone into a model sharded over any number of ranks; all ranks call it.

    Of a model that is partly frozen only what is trained.
    """
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    whole = len(trained) == len(list(model.parameters()))
    weights = {name: weight for name, weight in get_model_state_dict(model).items() if whole or name in trained}
    try:
        load_sharded({"model": weights}, storage_reader=FileSystemReader(checkpoint.folder), process_group=group)
    except (CheckpointException, OSError, pickle.UnpicklingError, EOFError) as error:
        raise CheckpointError(
            f"{checkpoint.folder} is damaged: {_cause(error)}. Move it away to take the one before"
        ) from error
    set_model_state_dict(model, weights, options=StateDictOptions(strict=whole))


def _cause(error: BaseException) -> str:
    """What went wrong on the first rank that failed, without the tracebacks that CheckpointException carries."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        return f"rank {rank}: {cause}"
    return str(error)
