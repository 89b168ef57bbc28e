"""Measures the peak memory of a rank's allocator in training, for the tests of the memory model."""

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from longctx.config import load
from longctx.data.store.store import Store
from longctx.memory.block import BlockMemory
from longctx.memory.loads import loads
from longctx.memory.model import Memory, estimate
from longctx.training.data import plan_steps
from longctx.training.trainer import Trainer
from longctx.units import format_bytes
from tests.training_cases import SMALL, forced, start
from tests.workers import Workers

MODEL = [
    "model.overrides.hidden_size=128",
    "model.overrides.intermediate_size=384",
    "model.overrides.head_dim=32",
    "model.overrides.num_hidden_layers=3",
    "data.max_length=2048",
    "batch.global_tokens=4096",
]


def peak_of_step_2(store: Path, run: Path, settings: list[str], max_load: float = 2.0) -> int:
    with forced(expert_max_load=max_load):
        return peak_of_second_step(lambda: start(store, run, [*MODEL, *settings]))


def peak_of_second_step(start: Callable[[], Trainer]) -> int:
    """Returns the peak bytes of live tensors on this rank during the second step, counted from the
    start of the run.

    Torch's profiler reports every allocation and release of the CPU allocator, also inside
    operators.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        trainer = start()
        with trainer.loader:
            trainer.step()
            began = time.time_ns()
            trainer.step()
    events = [
        event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    assert events
    held, peak = 0, 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.device_type() == torch.autograd.DeviceType.CPU:
            held += event.nbytes()
            peak = max(peak, held if event.start_ns() >= began else 0)
    return peak


def peak_and_estimate(
    workers: Workers, store: Path, run: Path, ranks: int, given: list[str]
) -> tuple[int, Memory]:
    """Returns the peak of the second step of a checkpoint's run, on the fullest rank, and its
    estimate."""
    settings = [
        *(f"{each.partition('=')[0]}=null" for each in MODEL if each.startswith("model.")),
        *given,
    ]
    measured = max(workers.run(peak_of_step_2, ranks, store, run, settings))
    config = load(None, [*SMALL, f"data.store={store}", *MODEL, *settings], world_size=ranks)
    second = plan_steps(config, Store.open(store), ranks, 2)[1].plan
    return measured, estimate(
        config.model_source().spec, config, ranks, list(loads([second], config)), fused=False
    )


def ledger(block: BlockMemory, mode: str) -> str:
    """Formats the tensors of a block, with a star at those that a mode of recomputation keeps."""
    rows = [
        f"{'*' if mode in each.kept_by else ' '} {format_bytes(each.size):>10} {each.part}: "
        f"{each.name}"
        for each in block.entries
    ]
    return "\n".join([*rows, f"* {format_bytes(block.kept(mode)):>10} of every block"])
