"""What several GPUs gain, measured here on two processes: a wrong ring is found, and what has a row
is not measured again."""

import csv
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import several_gpus
import several_gpus_ring
from longctx.parallel.mesh import make_groups
from longctx.planning.hardware_profile import HardwareProfile
from several_gpus import CLAIMS, SMOKE, Sizes, Task, row_of
from tests.workers import Workers


def task(gpus: int, out: Path = Path("out")) -> Task:
    return Task(gpus, SMOKE, "cpu-2core", out)


def of_a_ring(fault: float) -> tuple[float, bool]:
    """Compares a ring over all processes of which one has results that are off by a share."""
    mesh = make_groups(torch.device("cpu"), timeout_s=60.0)
    right = several_gpus_ring.results

    def results(attention: Any, inputs: Any) -> Any:
        off = fault * (dist.get_rank() == 1)
        return tuple(tensor * (1 + off) for tensor in right(attention, inputs))

    with mock.patch.object(several_gpus_ring, "results", results):
        return several_gpus_ring.compared(mesh, vars(SMOKE))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_ring_over_all_ranks_is_compared_with_float64(workers: Workers, ranks: int) -> None:
    errors, right = workers.run(of_a_ring, ranks, 0.0)[0]
    assert right and 0 < errors <= 2
    errors, right = workers.run(of_a_ring, ranks, 1e-4)[0]
    assert not right and errors > 10


@pytest.mark.parametrize(
    ("measured", "holds"), [(1.0, True), (0.95, True), (0.85, False), (math.nan, False)]
)
def test_a_claim_holds_if_nine_tenths_of_its_prediction_are_reached(
    measured: float, holds: bool
) -> None:
    assert row_of("a claim", 1.0, measured)["holds"] is holds


def test_a_ring_is_predicted_to_lose_what_messages_do_not_hide() -> None:
    profile = HardwareProfile.load("h100-nvlink-ib")
    slow = replace(profile, intra_node_bytes_per_s=profile.intra_node_bytes_per_s / 50)
    fast, slower = (
        several_gpus_ring.predicted_share(each, 8, vars(Sizes())) for each in (profile, slow)
    )
    assert 0.9 < fast <= 1.05 and slower < 0.8 * fast


@pytest.mark.parametrize("gpus", [2, 3, 8])
def test_all_ways_hold_all_documents(gpus: int) -> None:
    lengths = task(gpus).lengths()
    assert lengths == task(gpus).lengths() and max(lengths) == SMOKE.longest
    assert sum(lengths) >= SMOKE.steps * SMOKE.step_tokens
    degrees = Task(gpus, Sizes(), "", Path()).degrees()
    assert degrees == [degree for degree in (2, 4, 8) if degree <= gpus]


def test_what_has_a_row_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that fails leaves the others, and is tried again."""
    called: list[str] = []

    def part(*claims: str) -> Any:
        def measured(task: Task, until: float) -> Iterator[dict[str, Any]]:
            called.append(claims[0])
            for claim in claims:
                yield row_of(claim, 1.0, 1.0)

        return measured

    def broken(task: Task, until: float) -> Iterator[dict[str, Any]]:
        called.append("broken")
        raise RuntimeError("no trl")

    ring, speed, single, tokens, _ = CLAIMS
    monkeypatch.setattr(several_gpus, "ring", part(ring, speed))
    monkeypatch.setattr(several_gpus, "single_degree", part(single, tokens))
    monkeypatch.setattr(several_gpus, "packing", broken)
    words = ["several_gpus.py", "--gpus", "2", "--smoke", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", words)
    several_gpus.main()
    several_gpus.main()
    assert called == [ring, single, "broken", "broken"]
    assert (tmp_path / "out.csv").read_text("utf-8").count("RuntimeError: no trl") == 2


def test_a_part_that_is_late_can_end_what_it_started(tmp_path: Path) -> None:
    """As torchrun does with the processes of ranks, which would hold the memory of GPUs."""
    ended = tmp_path / "ended"
    code = (
        "import pathlib, signal, sys, time\n"
        f"signal.signal(signal.SIGTERM, lambda *_: sys.exit(pathlib.Path({str(ended)!r}).touch()))\n"
        "time.sleep(99)"
    )
    with pytest.raises(subprocess.TimeoutExpired):
        several_gpus.ended(["-c", code], time.monotonic() + 2)
    assert ended.exists()
    with pytest.raises(RuntimeError, match="exit status 3: no NCCL"):
        several_gpus.ended(["-c", "print('no NCCL'); exit(3)"], time.monotonic() + 60)
    with pytest.raises(RuntimeError, match="no time was left"):
        several_gpus.ended(["-c", "pass"], time.monotonic())


def test_without_trl_the_row_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several_gpus, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"TRL is not installed: pip install '.\[trl\]'"):
        next(several_gpus.packing(task(2), time.monotonic() + 60))


@pytest.mark.slow
def test_two_processes_measure_every_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["several_gpus.py", "--gpus", "2", "--smoke", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", words)
    several_gpus.main()
    with (tmp_path / "out.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["what"] for row in rows] == list(CLAIMS)
    assert not any(row["failed"] for row in rows) and rows[0]["holds"] == "True"
    assert all(float(row["predicted"]) > 0 and float(row["measured"]) > 0 for row in rows)
