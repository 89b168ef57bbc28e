"""The first script for a GPU: its answers say what the rows say, and a part that fails takes no other with it."""

import sys
from pathlib import Path

import pytest
import torch

import attention_checks
import attention_times
import first_contact
import training_gpu
from harness import Table


def run(patch: pytest.MonkeyPatch, out: Path, *options: str) -> int:
    """Runs the script as where there is no GPU. Returns its exit status."""
    patch.setattr(torch.cuda, "is_available", lambda: False)
    patch.setattr(sys, "argv", ["first_contact.py", "--smoke", "--out", str(out), *options])
    with pytest.raises(SystemExit) as ended:
        first_contact.main()
    return int(ended.value.code or 0)


def line_of(page: str, start: str) -> str:
    return next(line for line in page.splitlines() if line.startswith(start))


def test_answers(tmp_path: Path) -> None:
    out = tmp_path / "first"
    checks = Table(tmp_path / "first-attention-checks.csv", attention_checks.COLUMNS, {})
    check = {"kernel": "flash", "mask": "causal", "tensor": "out", "ring": 0.002, "single": 0.001, "right": True}
    checks.append(check)
    checks.append({**check, "tensor": "dq", "ring": 0.009, "right": False})
    times = Table(tmp_path / "first-attention.csv", attention_times.COLUMNS, {})
    cell = {"kernel": "flash", "tokens": 8192, "forward_single_tflops": 600.0, "backward_single_tflops": 400.0}
    times.append({**cell, "degree": 1, "forward_ring_share": 0.5, "backward_ring_share": 0.5})
    times.append({**cell, "degree": 4, "forward_ring_share": 0.93, "backward_ring_share": 0.89})
    times.append({**cell, "degree": 16, "forward_ring_share": 0.93, "backward_ring_share": 0.91})
    times.append({**cell, "degree": 64, "failed": "OutOfMemoryError: x"})
    rows = Table(tmp_path / "first-training.csv", training_gpu.COLUMNS, {})
    row = {"tokens": 32768, "chosen": "fastest that fits", "options": "norms", "step_s": 1.5, "tokens_per_s": 21845.0}
    rows.append({**row, "mfu": 0.51, "peak_gib": 50.0, "estimate_gib": 54.0})
    rows.append({**row, "tokens": 131072, "mfu": 0.51, "peak_gib": 50.0, "estimate_gib": 56.0})
    rows.append({**row, "options": "full", "failed": "error: out of memory"})
    page = "\n".join(first_contact.answers(out, {"device": "a GPU", "torch": "2"}, ["profile: exit status 1"]))

    assert "# First contact: a GPU" in page and "torch: 2" in page and "**Failed** profile: exit status 1" in page
    assert line_of(page, "| flash | 1 of 2") == "| flash | 1 of 2 | 9.00 | causal dq |"
    assert line_of(page, "| flash | 8192 | 1 ").endswith("| 50% | 50% |  |")
    assert line_of(page, "| flash | 8192 | 4 ").endswith("| 600 | 400 | 93% | 89% | not reached |")
    assert line_of(page, "| flash | 8192 | 16 ").endswith("| 93% | 91% | reached |")
    assert line_of(page, "| flash | 8192 | 64 ").endswith("| OutOfMemoryError: x |")
    assert line_of(page, "| 32768 | norms").endswith("| 1.5 | 21845.0 | 51.0% | 50.0 | 54.0 | MFU reached |")
    assert line_of(page, "| 131072 | norms").endswith("| MFU not reached, estimate off by +12% |")
    assert line_of(page, "| 32768 | full").endswith("| error: out of memory |")
    assert "not measured" in page  # the profile


def test_a_part_that_fails_or_hangs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    codes = {"attention": "raise SystemExit(3)", "training": "print('trained')", "profile": "import time; time.sleep(600)"}
    monkeypatch.setattr(first_contact, "commands", lambda part, *_, **__: ["-c", codes[part]])
    assert run(monkeypatch, tmp_path / "first", "--minutes", "-0.95") == 1
    page = (tmp_path / "first.md").read_text()
    assert "**Failed** attention: exit status 3: its output says why" in page
    assert "**Failed** profile: ended after" in page and "**Failed** training" not in page
    assert "trained" in capfd.readouterr().out


@pytest.mark.slow
def test_smoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, tmp_path / "first", "--minutes", "2") == 0
    page = (tmp_path / "first.md").read_text()
    assert "| cpu | 20 of 20 |" in page and "| cpu | 128 | 4 |" in page and "| 256 | none | cpu |" in page
    assert "`--context.profile first-profile.yaml`" in page
