"""The attention benchmark: in a smoke test here, so that it is ready when there is a GPU, and its
checks on one."""

import csv
import math
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import attention_checks
import attention_gpu
from longctx.attention.kernels import KERNELS, cpu
from longctx.attention.segments import Segments


@pytest.fixture(autouse=True)
def on_the_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels that the benchmark adds are gone after every test, and tests that are not for a GPU
    see none."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with mock.patch.dict(KERNELS):
        yield
    if dist.is_initialized():  # by the script, whose process ends with it
        dist.destroy_process_group()


def run(patch: pytest.MonkeyPatch, out: Path, *options: str) -> None:
    patch.setattr(sys, "argv", ["attention_gpu.py", "--out", str(out), *options])
    attention_gpu.main()


def table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_smoke_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, tmp_path / "a", "--smoke", "--kernels", "cpu")
    checks = table(tmp_path / "a-checks.csv")
    assert {row["mask"] for row in checks} == {
        "causal",
        "dense",
        "window",
        "window with sinks",
        "prefix",
    }
    assert {row["tensor"] for row in checks} == {"out", "dq", "dk", "dv"}
    assert all(row["right"] == "True" and 0 < float(row["ring"]) < 1e-5 for row in checks)

    rows = table(tmp_path / "a.csv")
    assert {(row["tokens"], row["degree"], row["documents"]) for row in rows} == {
        (tokens, degree, documents)
        for tokens in ("64", "128")
        for degree in ("1", "2", "4")
        for documents in ("1", "4")
    }
    for row in rows:
        tokens, degree, documents = int(row["tokens"]), int(row["degree"]), int(row["documents"])
        pairs = tokens**2 * degree / documents / 2
        assert int(row["pairs"]) == pytest.approx(pairs, rel=0.1, abs=tokens)
        assert int(row["single_pairs"]) == pytest.approx(pairs, rel=0.1, abs=tokens)
        # The last of a ring has none after it.
        assert int(row["calls"]) == {1: 1, 2: 2, 4: 3}[degree]
        for what in ("calls", "ring", "single"):
            for direction, factor in (("forward", 1.0), ("backward", 2.5)):
                work = (
                    int(row["single_pairs" if what == "single" else "pairs"]) * 4 * 4 * 16 * factor
                )
                rate = work / float(row[f"{direction}_{what}"]) / 1e12
                assert float(row[f"{direction}_{what}_tflops"]) == pytest.approx(rate, rel=1e-4)
        assert row["torch"] == version("torch") and row["date"]

    pieces = {
        row["piece"]: float(row["share_of_copy"]) for row in table(tmp_path / "a-elementwise.csv")
    }
    assert list(pieces) == ["copy", "rotary embedding", "RMSNorm", "SwiGLU"]
    assert pieces["copy"] == 1 and all(share > 0 for share in pieces.values())


class Off:
    """The CPU kernel, with an error in one gradient."""

    refusal = staticmethod(cpu.refusal)
    forward = staticmethod(cpu.forward)

    @staticmethod
    def backward(dout: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dq, dk, dv = cpu.backward(dout, *rest)
        return dq, dk * (1 + 1e-5), dv


class Unsteady(Off):
    """The CPU kernel, whose last digits change from run to run."""

    runs = 0

    @staticmethod
    def backward(dout: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        Unsteady.runs += 1
        dq, dk, dv = cpu.backward(dout, *rest)
        return dq * (1 + 6e-8 * Unsteady.runs), dk, dv


class Merging(Off):
    """The CPU kernel with a log-sum-exp that is a little off: right alone, wrong once it is
    merged."""

    @staticmethod
    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, *rest: Any
    ) -> Any:
        out, lse = cpu.forward(q, k, v, segments, *rest)
        return out, lse + 1e-5 * (len(k) != len(q))

    backward = staticmethod(cpu.backward)


class Windowless(Off):
    """The CPU kernel, which fails where a window or a prefix bounds what is seen."""

    @staticmethod
    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, *rest: Any
    ) -> Any:
        if not all(segment.dense or segment.causal for segment in segments):
            raise RuntimeError("no windows")
        return cpu.forward(q, k, v, segments, *rest)

    backward = staticmethod(cpu.backward)


class Breaking(Off):
    """The CPU kernel, which cannot be compiled for 128 queries."""

    @staticmethod
    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, *rest: Any
    ) -> Any:
        if len(q) == 128:
            raise RuntimeError("out of resource:\nshared memory")
        return cpu.forward(q, k, v, segments, *rest)

    backward = staticmethod(cpu.backward)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [Off, Unsteady, Merging])
def test_a_wrong_kernel_is_not_timed(
    wrong: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KERNELS, wrong.__name__, wrong())
    with pytest.raises(SystemExit, match=rf"these checks failed.*\nkernel {wrong.__name__}; mask"):
        run(monkeypatch, tmp_path / "a", "--smoke", "--kernels", wrong.__name__)
    (row,) = table(tmp_path / "a.csv")
    assert (row["kernel"], row["failed"], row["pairs"]) == (wrong.__name__, "not timed: wrong", "")


@pytest.mark.slow
def test_what_is_right_where_it_is_timed_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KERNELS, "Windowless", Windowless())
    with pytest.raises(SystemExit, match=r"mask window; .*no windows"):
        run(monkeypatch, tmp_path / "a", "--smoke", "--kernels", "Windowless")
    assert [row["failed"] for row in table(tmp_path / "a.csv")] == [""] * 12


def test_a_cell_that_fails_leaves_its_reason_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KERNELS, "Breaking", Breaking())
    run(monkeypatch, tmp_path / "a", "--smoke", "--kernels", "Breaking")
    rows = table(tmp_path / "a.csv")
    assert (
        len({(row["tokens"], row["degree"], row["documents"]) for row in rows}) == len(rows) == 12
    )
    failed = [row for row in rows if row["failed"]]
    assert {row["failed"] for row in failed} == {"RuntimeError: out of resource: shared memory"}
    assert {row["tokens"] for row in failed} >= {"128"} and all(
        row["device"] and row["pairs"] == "" for row in failed
    )
    assert 0 < len(failed) < 12 and all(
        float(row["forward_ring"]) for row in rows if not row["failed"]
    )


def test_a_check_that_cannot_run_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unable(*_: Any) -> Any:
        raise RuntimeError("compiling failed")

    monkeypatch.setattr(Breaking, "forward", staticmethod(unable))
    monkeypatch.setitem(KERNELS, "Breaking", Breaking())
    with pytest.raises(SystemExit, match="RuntimeError: compiling failed"):
        run(monkeypatch, tmp_path / "a", "--smoke", "--kernels", "Breaking")
    assert {row["mask"] for row in table(tmp_path / "a-checks.csv")} == set(
        attention_checks.masks(1)
    )
    assert [row["failed"] for row in table(tmp_path / "a.csv")] == ["not timed: wrong"]


def test_a_lost_gpu_leaves_a_row_and_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    rows = attention_gpu.Table(tmp_path / "a.csv", ["kernel", "tokens", "failed"], {})
    with (
        pytest.raises(SystemExit, match=r"GPU is unusable .*--append"),
        attention_gpu.failures(rows, torch.device("cuda"), kernel="triton", tokens=64),
    ):
        lost()
    (row,) = table(tmp_path / "a.csv")
    assert row == {
        "kernel": "triton",
        "tokens": "64",
        "failed": "RuntimeError: an illegal memory access was encountered",
    }
    cells = [{"kernel": "triton", "tokens": tokens} for tokens in (64, 128)]
    assert list(rows.missing(cells, math.inf)) == cells[1:], "the next process goes on behind it"


@pytest.mark.slow
def test_what_tables_have_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smoke = ["--smoke", "--kernels", "cpu"]
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path / "a", *smoke, "--minutes", "0")
    run(monkeypatch, tmp_path / "a", *smoke, "--append")
    checks, times = table(tmp_path / "a-checks.csv"), table(tmp_path / "a.csv")
    assert len(checks) == 20 and [row["failed"] for row in times] == [""] * 12
    run(monkeypatch, tmp_path / "a", *smoke, "--append")
    assert (checks, times) == (table(tmp_path / "a-checks.csv"), table(tmp_path / "a.csv"))


def test_without_a_gpu_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path / "a")
    assert "--smoke tests the script on a CPU" in capsys.readouterr().err


@pytest.mark.gpu
def test_every_kernel_is_right_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 and with heads of 64 and 128 also those that take nothing else."""
    run(monkeypatch, tmp_path / "a", "--smoke")
    checks, times = table(tmp_path / "a-checks.csv"), table(tmp_path / "a.csv")
    names = attention_gpu.kernels_here(None, attention_gpu.GPU_SMOKE, torch.device("cuda"))
    assert {"triton", "torch's flash operators"} <= set(names) == {row["kernel"] for row in checks}
    assert all(row["right"] == "True" for row in checks)
    assert {row["kernel"] for row in times if not row["failed"]} == set(names)
