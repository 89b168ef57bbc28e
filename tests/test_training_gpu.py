"""The GPU benchmark of training works: on a CPU, with a tiny model, and rows that a table can be made of."""

import csv
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def script(repository: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark as a module."""
    spec = importlib.util.spec_from_file_location("bench_training_gpu", repository / "bench" / "training_gpu.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_smoke(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["training_gpu.py", "--smoke", "--steps", "1", "--out", str(tmp_path / "out")])
    script.main()
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    assert [row["options"] for row in rows if row["system"] == "longctx"] == list(script.MEMORY_OPTIONS)
    assert all(not row["failed"] and float(row["tokens_per_s"]) > 0 for row in rows)


def test_a_row_that_fails_says_why(script: ModuleType) -> None:
    assert script._run([sys.executable, "-c", "raise SystemExit('error: out of memory')"], 60) == "error: out of memory"
    assert "more than" in script._run([sys.executable, "-c", "import time; time.sleep(60)"], 0.2)
