"""Checkpoints that are written beside training: of the moment they began, published on all ranks
together, or refused."""

import errno
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem

from longctx.parallel import host_memory
from longctx.training.saved import checkpoint, saving
from longctx.training.saved.saving import NotWritten
from longctx.training.trainer import NonFiniteLoss, Trainer
from tests.training_cases import start
from tests.workers import Workers

NAMES = ["step-000001"]


def test_copies_are_of_the_moment_and_in_the_same_memory() -> None:
    weight = torch.ones(3)
    item, planner = SimpleNamespace(index="weight"), SimpleNamespace(resolve_data=lambda _: weight)
    plan: Any = SimpleNamespace(items=[item])
    copies: Any = saving._Copies()
    held = list[torch.Tensor]()
    for value in (1, 2):
        copies.take(plan, planner)
        held.append(copies.resolve_data(item))
        weight += 1
        assert held[-1].tolist() == [value] * 3
    assert held[0] is held[1]


@contextmanager
def held(fails: bool = False) -> Iterator[Event]:
    """Holds every write of a tensor until the event; then it `fails`."""
    may_write, write = Event(), filesystem._write_item

    def hold(*arguments: Any, **named: Any) -> Any:
        assert may_write.wait(600)
        if fails:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filesystem, "_write_item", hold)
        yield may_write


def names(run: Path) -> list[str]:
    return sorted(folder.name for folder in (run / "checkpoints").iterdir())


def wait_until_written(trainer: Trainer) -> None:
    deadline = time.monotonic() + 600
    while not trainer.saver.written and time.monotonic() < deadline:
        time.sleep(0.01)


def trained_on_while_written(store: Path, run: Path, settings: list[str]) -> list[float]:
    """Losses of steps 2 to 4; the checkpoint of step 1 is written, on rank 1 last, while steps 2
    and 3 change the weights."""
    trainer, losses = start(store, run, settings), []
    with trainer.loader, held() as may_write:
        trainer.step()
        trainer.save(wait=False)
        for _ in range(2):
            losses.append(trainer.step().loss)
            assert not trainer._written and not trainer.saver.written
        if dist.get_rank() == 0:
            may_write.set()
            wait_until_written(trainer)
        dist.barrier()
        assert names(run) == ["step-000001.partial"], "rank 1 has not written"
        may_write.set()
        wait_until_written(trainer)
        losses.append(trainer.step().loss)
        assert trainer._written, "so train() publishes now"
        trainer.saver.advance()
        wait_until_written(trainer)
        trainer.saver.advance()
        assert names(run) == NAMES
    return losses


def resumed(store: Path, run: Path, settings: list[str]) -> list[float]:
    trainer = start(store, run, settings, resume=True)
    with trainer.loader:
        assert trainer.steps_done == 1
        return [trainer.step().loss for _ in range(3)]


@pytest.mark.parametrize(
    "settings",
    [
        [],
        pytest.param(
            ["parallel.tensor_parallel_size=2", "train.dtype=bfloat16"], marks=pytest.mark.slow
        ),
    ],
    ids=["fsdp", "tensor"],
)
def test_a_checkpoint_is_of_the_moment_when_it_began(
    workers: Workers, store: Path, tmp_path: Path, settings: list[str]
) -> None:
    losses = workers.run(trained_on_while_written, 2, store, tmp_path, settings)
    assert workers.run(resumed, 2, store, tmp_path, settings) == losses


def without_room(store: Path, run: Path) -> tuple[bool, list[str]]:
    trainer = start(store, run, [])
    with trainer.loader, pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "free_bytes", lambda: 1000 if dist.get_rank() == 1 else None)
        trainer.step()
        trainer.save(wait=False)
        waited = trainer.saver.written
        trainer.saver.finish()
    return waited, names(run)


def test_a_rank_without_room_for_a_copy_waits(
    workers: Workers, store: Path, tmp_path: Path
) -> None:
    (_, there), (waited, _) = workers.run(without_room, 2, store, tmp_path)
    assert waited and there == NAMES
    assert workers.run(resumed, 2, store, tmp_path, []), "it is complete"


def with_a_disk_that_fills(store: Path, run: Path) -> tuple[str, list[str]]:
    trainer = start(store, run, ["train.steps=8", "checkpoint.every=1"])
    with held(fails=dist.get_rank() == 1) as may_write:
        may_write.set()
        with pytest.raises(NotWritten) as error:
            trainer.train()
    dist.barrier()
    return str(error.value), names(run)


def test_a_write_that_fails_stops_all_ranks(workers: Workers, store: Path, tmp_path: Path) -> None:
    """At the same step on all ranks, named with the rank; the incomplete checkpoint is deleted."""
    answers = workers.run(with_a_disk_that_fills, 2, store, tmp_path)
    assert answers[0] == answers[1] and answers[0][1] == []
    assert (
        "rank 1: [Errno 28] No space left on device. Earlier checkpoints are intact"
        in answers[0][0]
    )
    assert "free disk space, then --resume" in answers[0][0] and len(answers[0][0]) < 400


def with_state_that_cannot_be_written(store: Path, run: Path) -> str:
    trainer = start(store, run, [])
    with trainer.loader, pytest.MonkeyPatch.context() as patch:
        trainer.step()
        patch.setattr(
            saving, "publish", lambda *_: (_ for _ in ()).throw(OSError(errno.EROFS, "Read-only"))
        )
        with pytest.raises(NotWritten) as error:
            trainer.save()
    return str(error.value)


def test_a_state_that_cannot_be_written_stops_all_ranks(
    workers: Workers, store: Path, tmp_path: Path
) -> None:
    answers = workers.run(with_state_that_cannot_be_written, 2, store, tmp_path)
    assert answers[0] == answers[1] and "rank 0: [Errno 30] Read-only" in answers[0]


def not_finite_after_a_checkpoint(store: Path, run: Path) -> list[str]:
    trainer, queue = start(store, run, ["train.steps=3", "checkpoint.every=1"]), Trainer._queue

    def fails(self: Trainer, batch: None) -> Any:
        if self.steps_done == 1:
            may_write.set()
            raise NonFiniteLoss("loss is nan")
        return queue(self, batch)

    with pytest.MonkeyPatch.context() as patch, held() as may_write:
        patch.setattr(Trainer, "_queue", fails)
        with pytest.raises(NonFiniteLoss):
            trainer.train()
    return names(run)


def updated_after_a_checkpoint_of_nothing(
    store: Path, run: Path, saves: bool
) -> list[torch.Tensor]:
    """Weights after a step, before which a checkpoint was written or not."""
    trainer = start(store, run, [])
    with trainer.loader:
        if saves:
            trainer.save()
        trainer.step()
    return [parameter.detach().to_local().clone() for parameter in trainer.model.parameters()]


def test_a_checkpoint_before_the_first_update_changes_nothing(
    workers: Workers, store: Path, tmp_path: Path
) -> None:
    plain, saved = (
        workers.run(updated_after_a_checkpoint_of_nothing, 1, store, tmp_path / str(s), s)[0]
        for s in (False, True)
    )
    assert all(torch.equal(a, b) for a, b in zip(plain, saved, strict=True))


def test_a_step_that_is_not_finite_leaves_the_checkpoint_before_it(
    workers: Workers, store: Path, tmp_path: Path
) -> None:
    assert workers.run(not_finite_after_a_checkpoint, 2, store, tmp_path) == [NAMES] * 2
    assert checkpoint.newest(tmp_path)[0].step == 1


def test_free_memory_of_this_machine() -> None:
    free = host_memory.free_bytes()
    assert free is None or 1 << 20 < free < 1 << 50


def test_a_full_disk_is_said_where_torch_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of a file that was cut short, torch's writer says: unexpected pos 704 vs 598."""
    (tmp_path / "__0_0.distcp").write_bytes(b"0" * 598)
    task: Future[None] = Future()
    task.set_exception(RuntimeError("unexpected pos 704 vs 598"))
    for free, said in (
        (500, "No space left on device (unexpected pos 704 vs 598)"),
        (10**9, "unexpected pos 704 vs 598"),
    ):
        monkeypatch.setattr(
            saving.shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free)
        )
        assert saving._said(task, tmp_path) == said
