"""Saver: writes the checkpoints of a run beside training, and publishes each when all its files are
on disk.

`torch.distributed.checkpoint` plans who writes what; then every rank copies its part to host memory
and trains on while a thread writes the copy. When all ranks have written, a thread of rank 0 writes
`state.json`, renames the folder and deletes old ones. Threads use no process group, so the messages
of the run keep their order.
"""

import json
import os
import shutil
import sys
from collections import ChainMap
from collections.abc import Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from longctx.checksums import sealed
from longctx.parallel.device import rounds_pinned
from longctx.parallel.host_memory import free_bytes, pinned_bytes
from longctx.parallel.mesh import gather_objects
from longctx.training.saved.checkpoint import STATE, complete, folder_of, link_latest, tensors_of
from longctx.training.saved.checkpoint_io import CheckpointError, SummingFiles, cause
from longctx.training.saved.run_folder import BEST, keep_best
from longctx.units import format_bytes


class NotWritten(CheckpointError):
    """Raised on every rank if a checkpoint cannot be written. Earlier ones are intact."""


class Saver:
    """Writes checkpoints under `run`/checkpoints; all ranks of `group`, a gloo group, call its
    methods together.

    All but the `keep` latest checkpoints are deleted (None: none). With `beside`, `start` waits
    only until the tensors are copied, unless a copy would take more than half of the host memory
    that is free for each of `local_ranks` processes.
    """

    def __init__(
        self,
        run: Path,
        group: dist.ProcessGroup,
        keep: int | None = None,
        *,
        beside: bool = False,
        local_ranks: int = 1,
    ) -> None:
        self.run = run
        self.group = group
        self.keep = keep
        self.beside = beside
        self.local_ranks = local_ranks
        self.copies: _Copies | None = None
        self._stages: Iterator[futures.Future[Any]] | None = None
        self._task: futures.Future[Any] | None = None
        self._thread = futures.ThreadPoolExecutor(1, "checkpoint")

    @property
    def written(self) -> bool:
        """Whether `advance` need not wait for this rank."""
        return self._task is None or self._task.done()

    def start(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> Path:
        """Begins to write a checkpoint of this moment, after the end of one begun before. Returns
        its folder to be.

        `state` is plain JSON data with the key `step`. Collective. Raises NotWritten.
        """
        self.finish()
        final = folder_of(self.run, state["step"])
        partial = final.with_suffix(".partial")
        writer = _Writer(partial, self)
        if self._first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier(self.group)
        try:
            save_sharded(
                tensors_of(model, optimizer), storage_writer=writer, process_group=self.group
            )
        except (CheckpointException, OSError) as error:
            raise self._failed(partial, cause(error)) from error
        self._stages = self._write(final, state, writer)
        self._task = next(self._stages)
        return final

    def finish(self) -> None:
        """Waits until the checkpoint begun last, if any, is published as `latest` in `run`.
        Collective. Raises NotWritten."""
        while self._stages is not None:
            self.advance()

    def advance(self) -> None:
        """Begins to publish the checkpoint begun last, or notes that it is published. Waits only if
        a rank has not `written`.

        Collective. Raises NotWritten.
        """
        if self._stages is not None:
            stages = self._stages
            self._stages = None
            self._task = None  # an error ends it
            self._task = next(stages, None)
            self._stages = None if self._task is None else stages

    def _write(
        self, final: Path, state: dict[str, Any], writer: "_Writer"
    ) -> Iterator[futures.Future[Any]]:
        """Yields the tasks of this rank that write a checkpoint. All ranks go on together after
        each. Raises NotWritten."""
        partial = final.with_suffix(".partial")
        yield writer.task
        trouble = _said(writer.task, partial)
        parts = gather_objects(
            (trouble, [] if trouble else writer.task.result(), writer.checksums), self.group
        )
        self._require(partial, [trouble for trouble, _, _ in parts])
        publication = self._thread.submit(self._publish, final, state, writer, parts)
        yield publication
        self._require(partial, gather_objects(_said(publication, partial.parent), self.group))

    def _publish(
        self,
        final: Path,
        state: dict[str, Any],
        writer: "_Writer",
        parts: Sequence[tuple[Any, ...]],
    ) -> None:
        """Makes the written files the newest checkpoint; rank 0 does it for all."""
        if not self._first:
            return
        writer.describe([results for _, results, _ in parts])
        every = dict(ChainMap(writer.checksums, *(checksums for _, _, checksums in parts)))
        publish(self.run, final, state, every)
        if (state.get(BEST) or {}).get("step") == state["step"]:
            keep_best(self.run, final)
        prune(self.run, self.keep, final)

    @property
    def _first(self) -> bool:
        return dist.get_rank(self.group) == 0

    def _require(self, partial: Path, problems: Sequence[str]) -> None:
        """Raises NotWritten if a rank has a problem."""
        for rank, problem in enumerate(problems):
            if problem:
                raise self._failed(partial, f"rank {rank}: {problem}")

    def _failed(self, partial: Path, problem: str) -> NotWritten:
        if self._first:
            shutil.rmtree(partial, ignore_errors=True)
        way_out = "free disk space" if "No space left" in problem else "mend that"
        return NotWritten(
            f"could not write {partial}: {problem}. Earlier checkpoints are intact: {way_out}, "
            "then --resume"
        )


class _Writer(FileSystemWriter):
    """Writes files with checksums in a thread, for which `save_sharded` does not wait."""

    def __init__(self, folder: Path, saver: Saver) -> None:
        super().__init__(folder, sync_files=True)
        self.saver = saver
        self.checksums: dict[str, str] = {}
        """Of the files that this process has written, by name."""
        self.fs = SummingFiles(self.checksums)
        self.task: futures.Future[list[WriteResult]]
        self.metadata: Metadata

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        source: Any = planner
        if self.saver.beside and (self.saver.copies or self._has_room(plan)):
            source = self.saver.copies = self.saver.copies or _Copies()
            source.take(plan, planner)
        gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        write = super().write_data

        def task() -> list[WriteResult]:
            if gpu is not None:
                torch.cuda.set_device(gpu)  # threads begin on the first one
            return write(plan, source).wait()

        self.task = self.saver._thread.submit(task)
        if source is planner:
            futures.wait([self.task])
        begun: Future[list[WriteResult]] = Future()
        begun.set_result([])
        return begun

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.metadata = metadata  # there are no results yet

    def describe(self, results: list[list[WriteResult]]) -> None:
        """Writes the description of all tensors, from the results of all ranks. Only rank 0 calls
        it."""
        super().finish(self.metadata, results)

    def _has_room(self, plan: SavePlan) -> bool:
        data = [item.tensor_data for item in plan.items if item.tensor_data]
        sizes = (part.chunk.sizes.numel() * part.properties.dtype.itemsize for part in data)
        needed = pinned_bytes(sizes, rounded=torch.cuda.is_initialized() and rounds_pinned())
        free = free_bytes()
        if free is None or needed <= free // (2 * self.saver.local_ranks):
            return True
        print(
            f"longctx: rank {dist.get_rank(self.saver.group)} waits for its part of the "
            f"checkpoint: a copy needs {format_bytes(needed)}, more than half of its share of "
            f"{format_bytes(free)} of free host memory",
            file=sys.stderr,
        )
        return False


def _said(task: futures.Future[Any], folder: Path) -> str:
    """Waits for a task that writes into a folder. Returns what went wrong, or nothing."""
    error = task.exception()
    if error is None:
        return ""
    problem = cause(error) or type(error).__name__
    held = sum(file.stat().st_size for file in folder.glob("*"))
    if "No space left" in problem or shutil.disk_usage(folder).free > held:
        return problem
    # Which torch's writer does not say: "unexpected pos 704 vs 598".
    return f"No space left on device ({problem})"


class _Copies:
    """The data of plans in host memory, which is kept for the next one: memory that is new costs
    more time than the copy."""

    def __init__(self) -> None:
        self._held: dict[MetadataIndex, Any] = {}

    def take(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Copies the data of a plan as it is now."""
        for item in plan.items:
            value = planner.resolve_data(item)
            held = self._held.get(item.index)
            if isinstance(value, torch.Tensor):
                if held is None or held.shape != value.shape or held.dtype != value.dtype:
                    held = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
                value = held.copy_(value, non_blocking=True)
            self._held[item.index] = value
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()

    def resolve_data(self, item: WriteItem) -> Any:
        return self._held[item.index]


def publish(run: Path, final: Path, state: dict[str, Any], checksums: dict[str, str]) -> None:
    """Writes state.json, which makes the folder `final`.partial whole, renames it to `final`, and
    makes `latest` its link."""
    partial = final.with_suffix(".partial")
    sizes = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
    with (partial / STATE).open("w", encoding="utf-8") as stream:
        json.dump(sealed({**state, "files": sizes, "checksums": checksums}), stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    _sync(partial)
    replaced = final.with_suffix(".replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():  # a run resumed from an earlier checkpoint reaches this step again
        final.rename(replaced)
    partial.rename(final)
    _sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    link_latest(final)


def _sync(folder: Path) -> None:
    """Puts the names of a folder's files on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def prune(run: Path, keep: int | None, published: Path) -> None:
    """Deletes all complete checkpoints up to the published one but the `keep` latest; says which it
    cannot delete.

    Later ones are of a run that was resumed from an earlier checkpoint because they are damaged.
    """
    for old in complete(run, published)[: -keep if keep else 0]:
        try:
            shutil.rmtree(old)
        except (
            OSError
        ) as error:  # of a file that is open on a network file system, or deleted by somebody else
            if old.exists():
                print(
                    f"longctx: old checkpoint {old} cannot be deleted: {error}",
                    file=sys.stderr,
                    flush=True,
                )
