"""The GPU benchmark of training works: on a CPU, with a tiny model, and no row that failed or ran
late takes others with it."""

import csv
import importlib.util
import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import training_rows

pytestmark = pytest.mark.slow

Rows = list[dict[str, str]]
STEP = {"step_time_s": 2.0, "peak_memory_bytes": 3 << 30}


@pytest.fixture
def script(repository: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark as a module, where there is no GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    spec = importlib.util.spec_from_file_location(
        "bench_training_gpu", repository / "bench" / "training_gpu.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def table(path: Path) -> Rows:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def rows(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Rows]:
    """Runs the script: `does(run, option)` is the Python code of what trains, in the folder of its
    metrics."""

    def run(does: Callable[[Any, Any], str], *options: str) -> Rows:
        def command_of(run: Any, option: Any, steps: int, folder: Path) -> list[str]:
            (folder / "run").mkdir()
            code = (
                f"import json, sys, time; folder, step = {str(folder / 'run')!r}, "
                f"{json.dumps(STEP)!r}\n"
            )
            code += "metrics = open(folder + '/metrics.jsonl', 'a', buffering=1)\n"
            return [sys.executable, "-c", code + does(run, option)]

        monkeypatch.setattr(script, "command_of", command_of)
        monkeypatch.setattr(
            sys, "argv", ["training_gpu.py", "--smoke", "--out", str(tmp_path / "out"), *options]
        )
        script.main()
        return table(tmp_path / "out.csv")

    return run


def h100(gib: float) -> training_rows.Gpu:
    return training_rows.Gpu(gib * 2**30, 989e12, "torch's flash operators")


def finished(steps: int) -> str:
    """Code that finishes so many steps."""
    return f"[print(step, file=metrics) for _ in range({steps})]"


@pytest.mark.slow
def test_smoke(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sys.argv", ["training_gpu.py", "--smoke", "--steps", "3", "--out", str(tmp_path / "out")]
    )
    script.main()
    rows = table(tmp_path / "out.csv")
    named = {row["options"] for row in rows if row["system"] == "longctx"}
    assert named == {option.name for option in training_rows.MEMORY_OPTIONS}
    assert all(
        not row["failed"] and float(row["tokens_per_s"]) > 0 and row["steps"] == "2" for row in rows
    )
    assert {row["system"] for row in rows} == {"longctx", "transformers"}
    assert len({row["parameters"] for row in rows}) == 1  # the peer counts its own


def test_a_row_that_fails_leaves_its_reason_and_the_others_go_on(
    rows: Callable[..., Rows], script: ModuleType
) -> None:
    def does(run: Any, option: Any) -> str:
        return (
            "raise SystemExit('error: out of memory')"
            if option.name in ("none", "full")
            else finished(5)
        )

    found = rows(does)
    reasons = {row["options"]: row["failed"] for row in found}
    assert reasons["none"] == reasons["full"] == "error: out of memory (exit status 1)"
    assert not any(
        reasons[option.name]
        for option in training_rows.MEMORY_OPTIONS
        if option.name not in ("none", "full")
    )
    good = next(row for row in found if not row["failed"])
    assert (good["steps"], good["warm_up_steps"], good["step_s"], good["tokens_per_s"]) == (
        "3",
        "2",
        "2.0",
        "256.0",
    )
    assert good["torch"] == version("torch") and good["date"] and good["device"].startswith("CPU")
    assert good["command"] == "python bench/training_gpu.py --smoke --out out"


def test_what_needs_less_is_tried_where_memory_runs_out(
    rows: Callable[..., Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of the tiny model most is what a device needs by itself.
    monkeypatch.setattr(
        training_rows.Run, "bytes", lambda run, option: 2**30 // (1 + run.options.index(option))
    )

    def does(run: Any, option: Any) -> str:
        return finished(2) if "none" not in option.name else "sys.exit('error: CUDA out of memory')"

    trials = rows(does, "--only", training_rows.FASTEST)
    assert [bool(row["failed"]) for row in trials] == [True] * (len(trials) - 1) + [False]
    assert len(trials) > 1
    estimates = [float(row["estimate_gib"]) for row in trials]
    assert estimates == sorted(estimates, reverse=True)


def test_a_row_that_runs_late_keeps_its_steps(
    rows: Callable[..., Rows], script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "START_S", 0.0)
    monkeypatch.setattr(script, "ROW_S", 5.0)
    late = finished(2) + "; metrics.write('{\"step_'); metrics.flush(); time.sleep(60)"
    (row,) = rows(lambda run, option: late, "--only", "selective, not compiled")
    assert not row["failed"]
    assert (row["steps"], row["step_s"], row["note"]) == (
        "1",
        "2.0",
        "took more than 5 s with 2 of 7 steps",
    )


def test_the_disk_stays_bounded(
    rows: Callable[..., Rows], script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a row leaves is gone before the next one starts, and no row is made to write a
    checkpoint."""
    monkeypatch.setattr(script.tempfile, "tempdir", str(tmp_path / "rows"))
    (tmp_path / "rows").mkdir()
    others = (
        "import glob; assert len(glob.glob(folder + '/../../*')) == 1, 'error: others are there'\n"
    )
    found = rows(
        lambda run, option: others + "open(folder + '/large', 'w').write('x')\n" + finished(2)
    )
    assert len(found) > 5 and not any(row["failed"] for row in found)
    assert not list((tmp_path / "rows").iterdir())
    assert all(
        "--checkpoint.every=null" in row["settings"] for row in found if row["system"] == "longctx"
    )


def test_a_store_that_cannot_be_made_takes_its_row_alone(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_store(folder: Path, tokens: int) -> Path:
        raise RuntimeError("no store of documents could be made: error: no space")

    monkeypatch.setattr(script, "make_store", make_store)
    monkeypatch.setattr(
        sys,
        "argv",
        ["training_gpu.py", "--smoke", "--only", "longctx", "--out", str(tmp_path / "out")],
    )
    script.main()
    found = table(tmp_path / "out.csv")
    assert len(found) >= len(training_rows.MEMORY_OPTIONS)
    assert all(
        row["failed"] == "RuntimeError: no store of documents could be made: error: no space"
        for row in found
    )


def test_every_length_gets_settings_that_fit(script: ModuleType) -> None:
    """On an H100 and on an H200; also kernels that need much memory in backward are counted."""
    for gib in (79.2, 139.8):
        gpu = h100(gib)
        planned = list(script.runs(gpu))
        best = {
            (run.model, run.tokens): run.fitting(gpu)[0]
            for run in planned
            if run.chosen == training_rows.FASTEST
        }
        assert len(best) == 7  # three lengths of two models, and the stack
        stack = next(run for run in planned if run.model == "llama-3.1-8b")
        tiled = training_rows.SELECTIVE + training_rows.TILES
        tiles, triton = (stack.bytes(option) for option in (tiled, tiled + training_rows.TRITON))
        # dQ in float32, dK and dV per query head.
        assert tiles - triton == stack.tokens * ((4 + 4) * 4096 - 8 * 32)
    assert [run.label for run in planned][:3] == [
        "longctx llama-3.2-1b 32768 fastest that fits",
        "transformers llama-3.2-1b 32768 gradient checkpointing",
        "longctx llama-3.2-1b 131072 fastest that fits",
    ]


def test_reasons_are_the_last_error_told(script: ModuleType, tmp_path: Path) -> None:
    code = "import sys; sys.exit('warning: an error may follow\\nValueError: this one\\nsome more')"
    assert (
        script.finish([sys.executable, "-c", code], tmp_path / "log", 60)
        == "ValueError: this one (exit status 1)"
    )


def test_what_has_no_time_is_left_for_another_call(
    rows: Callable[..., Rows], capsys: pytest.CaptureFixture[str]
) -> None:
    assert rows(lambda run, option: finished(3), "--minutes", "0") == []
    assert "not started" in capsys.readouterr().out
    first = rows(lambda run, option: finished(3))
    again = rows(lambda run, option: "sys.exit('error: measured twice')")
    assert first == again and not any(row["failed"] for row in again)
