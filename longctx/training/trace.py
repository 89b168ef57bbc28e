"""Trace: some steps of a run as one Chrome trace per rank, for https://ui.perfetto.dev."""

import json
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from longctx.data.packing import StepBatch
from longctx.model.protocol import Model


def micro_batch_name(batch: StepBatch, number: int) -> str:
    """Names a micro-batch by its number and its longest document; micro-batches after the plan's
    last one are empty."""
    if number >= len(batch.plan.micro_batches):
        return f"micro-batch {number}, empty"
    placements = batch.plan.micro_batches[number]
    longest = max(placements, key=lambda placement: batch.plan.lengths[placement.document])
    tokens = batch.plan.lengths[longest.document]
    return (
        f"micro-batch {number}, longest of {len(placements)} documents: "
        f"{batch.documents[longest.document]} ({tokens} tokens on {longest.degree} ranks)"
    )


class Tracer:
    """Profiles a range of steps and writes `rank-NNN.json` into a folder after the last one.

    As a context manager it also writes when a run ends within the range. A run that fails writes
    nothing.
    """

    def __init__(self, steps: range, folder: Path, rank: int, model: Model) -> None:
        self.steps = steps
        self.rank = rank
        self.path = folder / f"rank-{rank:03d}.json"
        self.model = model
        self.running: profile | None = None

    def before(self, step: int) -> None:
        """Starts the profiler before the first step of the range. A run that resumes within the
        range starts there."""
        if step in self.steps and self.running is None:
            activities = [ProfilerActivity.CPU] + [
                ProfilerActivity.CUDA
            ] * torch.cuda.is_available()
            self.running = profile(activities=activities)
            self.running.start()
            self.hooks = [hook for block in self.model.layers for hook in _named(block)]

    def after(self, step: int) -> None:
        if self.running is not None and step + 1 not in self.steps:
            self._write(self.running)

    def __enter__(self) -> "Tracer":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self.running is not None and error is None:
            self._write(self.running)

    def _write(self, running: profile) -> None:
        for hook in self.hooks:
            hook.remove()
        running.stop()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        running.export_chrome_trace(str(self.path))
        _name_process(self.path, self.rank)
        self.running = None
        if self.rank == 0:
            print(f"traces written to {self.path.parent}, one file per rank", flush=True)


def _name_process(path: Path, rank: int) -> None:
    """Names the process in a trace after its rank, so that one view can show several ranks."""
    trace = json.loads(path.read_text("utf-8"))
    for event in trace["traceEvents"]:
        if event.get("name") == "process_name":
            event["args"]["name"] = f"rank {rank}: {event['args']['name']}"
    path.write_text(json.dumps(trace), "utf-8")


def _named(block: nn.Module) -> list[torch.utils.hooks.RemovableHandle]:
    """Makes every forward pass of a block a range of the trace."""
    open_ranges: list[record_function] = []

    def enter(module: nn.Module, arguments: object) -> None:
        open_ranges.append(record_function(f"layer {module.layer}, forward pass"))
        open_ranges[-1].__enter__()

    def leave(module: nn.Module, arguments: object, output: object) -> None:
        open_ranges.pop().__exit__(None, None, None)

    return [block.register_forward_pre_hook(enter), block.register_forward_hook(leave)]
