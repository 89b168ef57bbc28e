"""Schedules of attention are built by the loader's thread, a step ahead, and copied to the device
when a layer needs them."""

import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from longctx.attention import Mask, RingAttention, ring
from longctx.attention.ring_schedule import ExchangeRound, Hop, RingSchedule
from longctx.attention.segment_builder import Call, RowSet
from longctx.attention.ulysses import HybridAttention
from longctx.data.packing import StepBatch, empty_micro_batch
from longctx.planning.layout import Layout, Placement
from longctx.training.runner import ReadyMicroBatch
from tests.marks import slow_unless
from tests.training_cases import start
from tests.workers import Workers

WINDOWS = ["model.overrides.sliding_window=100", "model.overrides.full_attention_every=2"]
SETTINGS = {
    "two levels, with windows": ["context.two_level_exchange=true", *WINDOWS],
    "heads swapped": ["context.ulysses_degree=2"],
    "pipeline": ["parallel.pipeline_parallel_size=2", "model.overrides.num_hidden_layers=4"],
}


def builders(store: Path, run: Path, settings: list[str]) -> set[str]:
    """Returns the threads that build schedules in three steps, and compares the losses with those
    of attention that is built in the step."""
    threads = set()
    build = RingSchedule.build

    def building(*given: Any, **named: Any) -> RingSchedule:
        threads.add(threading.current_thread().name)
        return build(*given, **named)

    def losses(folder: Path, ahead: bool) -> list[tuple[float, float]]:
        trainer = start(store, folder, settings)
        finish = trainer.loader.finish
        batches = []

        def finishing(batch: StepBatch) -> StepBatch:
            batches.append(finish(batch) if ahead else batch)
            return batches[-1]

        trainer.loader.finish = finishing
        with trainer.loader:
            steps = [trainer.step() for _ in range(3)]
        if ahead:
            trained = [each for batch in batches[:3] for each in batch.micro_batches]
            assert not any(each.ready for each in trained), "what one pass took is gone"
        return [(step.loss, step.grad_norm) for step in steps]

    with mock.patch.object(ring.RingSchedule, "build", building):
        found = losses(run / "ahead", True)
    assert found == losses(run / "plain", False)
    return threads


@pytest.mark.parametrize("name", slow_unless(lambda name: name.startswith("two"), SETTINGS))
def test_no_step_builds_schedules(workers: Workers, store: Path, tmp_path: Path, name: str) -> None:
    ranks = 4 if name == "pipeline" else 2
    for threads in workers.run(builders, ranks, store, tmp_path, SETTINGS[name]):
        assert {thread.split("_")[0] for thread in threads} == {"longctx-loader"}


def devices_in(value: Any) -> set[str]:
    """Returns the devices of the tensors in dataclasses and tuples, at any depth."""
    if isinstance(value, torch.Tensor):
        return {value.device.type}
    parts: list[Any] = []
    if isinstance(value, tuple):
        parts = list(value)
    elif isinstance(value, (RingSchedule, ExchangeRound, Hop, Call, RowSet)):
        parts = list(vars(value).values())
    found = set[str]()
    for part in parts:
        found |= devices_in(part)
    return found


def attention_on_meta() -> None:
    """Builds attention with rows that no range has, and asks for what layers need."""
    placements = [Placement(0, 0, 2), Placement(1, 0, 1), Placement(2, 0, 2, rounds=1)]
    layout = Layout.of(placements, [40, 3, 50], 0, dist.get_rank())
    mask = Mask(window=9, sinks=3)
    attention = RingAttention(layout, mask=mask, device="meta")
    assert devices_in(vars(attention)["_on_host"]) == {"cpu"}
    assert devices_in(attention.schedule) == {"meta"}
    assert attention.schedule is attention.schedule
    mixed = HybridAttention(layout, 2, device="meta")
    assert mixed.swap is not None
    assert devices_in(tuple(vars(mixed.swap).values())) == {"cpu"}
    rows = (mixed.swap.rows, mixed.swap.order, mixed.swap.back)
    assert devices_in(rows) == {"meta"}


def test_index_tensors_are_copied_when_a_layer_needs_them(workers: Workers) -> None:
    """Those of a whole step would take memory of the device, and the loader's thread would copy
    them in a stream of its own."""
    workers.run(attention_on_meta, 2)


def test_one_pass_takes_the_attention_of_a_micro_batch() -> None:
    """Its index tensors leave the device with it, not with the step."""
    attention = object()
    ready = ReadyMicroBatch.of(empty_micro_batch(0, 0), attention)
    assert ready.take_attention() is attention
    assert ready.take_attention() is None
