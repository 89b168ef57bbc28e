"""The first script for a GPU: its answers say what the rows say, and a part that fails takes no other with it."""

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml

import attention_checks
import attention_gpu
import attention_times
import first_contact
import training_gpu
from attention_times import FIRST, SMOKE
from harness import Table, repeats
from longctx.attention.kernels import KERNELS, KernelRequest, cpu
from longctx.cli import COMMANDS
from longctx.planning.hardware_profile import HardwareProfile


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
    unchecked = "; ".join(sorted(f"not checked: {mask}" for mask in attention_checks.masks(1) if mask != "causal"))
    assert line_of(page, "| flash | 1 of 2") == f"| flash | 1 of 2 | 9.00 | causal dq; {unchecked} |"
    assert line_of(page, "| flash | 8192 | 1 ").endswith("| 50% | 50% |  |")
    assert line_of(page, "| flash | 8192 | 4 ").endswith("| 600 | 400 | 93% | 89% | not reached |")
    assert line_of(page, "| flash | 8192 | 16 ").endswith("| 93% | 91% | reached |")
    assert line_of(page, "| flash | 8192 | 64 ").endswith("| OutOfMemoryError: x |")
    assert line_of(page, "| 32768 | norms").endswith("| 1.5 | 21845.0 | 51.0% | 50.0 | 54.0 | MFU reached |")
    assert line_of(page, "| 131072 | norms").endswith("| MFU not reached, estimate off by +12% |")
    assert line_of(page, "| 32768 | full").endswith("| error: out of memory |")
    assert "not measured" in page  # the profile


def test_a_row_that_would_end_too_late_is_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of torch's flash attention on an H100: a rank's part of 131,072 tokens in a ring of 4 takes 170 s, of a share of 90 s."""
    clock, deadline = [0.0], 90.0
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(attention_checks, "check_cases", lambda *_: [])

    def measure_cell(cell: dict[str, Any], sizes: attention_times.Sizes, device: torch.device) -> dict[str, Any]:
        pairs = cell["tokens"] ** 2 * cell["degree"] / 2
        s_per_flop = {"forward": 1 / 306e12, "backward": 2.5 / 166e12}
        times = {kind: pairs * 4 * 32 * 128 * s_per_flop[kind.partition("_")[0]] for kind in attention_times.KINDS}
        clock[0] += 5 + sum(each * (2 + repeats(each, sizes.longest_s)) for each in times.values())
        return {**cell, **times, **{f"{kind}_{what}": 1.0 for kind in times for what in ("tflops", "share")}}

    monkeypatch.setattr(attention_times, "measure_cell", measure_cell)
    times = Table(tmp_path / "times.csv", attention_times.COLUMNS, {})
    checks = Table(tmp_path / "checks.csv", attention_checks.COLUMNS, {})
    checks.append({"kernel": "flash", "mask": "causal", "dtype": FIRST.dtype, "head_dim": FIRST.head_dim, "right": True})
    attention_gpu.measure_kernel("flash", FIRST, torch.device("cpu"), times, checks, deadline)
    cells = [(row["tokens"], row["degree"]) for row in times.rows]
    assert cells == [("8192", "1"), ("8192", "4"), ("32768", "1"), ("32768", "4"), ("131072", "1")]
    assert 60 < clock[0] < deadline + 15
    assert attention_times.needed_s({"tokens": 131072, "degree": 4, "documents": 1}, times.rows, FIRST) > 150


@pytest.mark.slow
def test_a_kernel_that_is_refused_for_determinism_alone_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`auto` trains with it, unless settings ask for determinism. Checks have as many heads for a key head as what is timed."""
    asked: list[tuple[bool, tuple[int, ...]]] = []

    class Unordered:
        forward = staticmethod(cpu.forward)

        @staticmethod
        def refusal(request: KernelRequest) -> str | None:
            return "adds in any order" if request.deterministic else None

        @staticmethod
        def backward(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, *rest: Any) -> Any:
            asked.append((rest[-1].deterministic, (q.shape[1], k.shape[1])))
            dq, dk, dv = cpu.backward(dout, q, k, *rest)
            return dq * (1 + 1.2e-7 * (len(asked) % 3 == 0)), dk, dv

    monkeypatch.setitem(KERNELS, "unordered", Unordered())
    sizes = replace(SMOKE, heads=32, kv_heads=8, checked_heads=16)
    device = torch.device("cpu")
    (case, *others) = attention_checks.check_cases("unordered", sizes, device)
    assert len(others) == 4 and "two runs may differ: unordered adds in any order" in capsys.readouterr().out
    checks = Table(tmp_path / "first-attention-checks.csv", attention_checks.COLUMNS, {})
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        for row in attention_checks.check_kernel(case, sizes, device):
            checks.append(row)
    finally:
        dist.destroy_process_group()
    assert set(asked) == {(False, (16, 4))}
    assert [row["same_bits"] for row in checks.rows] == ["True", "False", "True", "True"]
    assert line_of("\n".join(first_contact.kernels(checks.rows)), "| unordered").endswith("| two runs may differ |")


@pytest.mark.slow
def test_the_script_itself_takes_no_memory_of_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would lack in the training rows, which fill the GPU."""

    def here(**_: Any) -> Any:
        raise AssertionError("in the process that waits for all parts")

    monkeypatch.setattr(first_contact, "median_s", here)
    monkeypatch.setattr(first_contact, "commands", lambda *_, **__: ["-c", ""])
    assert run(monkeypatch, tmp_path / "first") == 0
    assert "matrix product: " in (tmp_path / "first.md").read_text()


@pytest.mark.slow
def test_a_part_that_fails_or_hangs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    codes = {"attention": "raise SystemExit(3)", "training": "print('trained')", "profile": "import time; time.sleep(600)"}
    monkeypatch.setattr(first_contact, "commands", lambda part, *_, **__: ["-c", codes[part]])
    monkeypatch.setattr(first_contact, "SHARES", {"attention": 0.0, "training": 0.0, "profile": 1.0})
    assert run(monkeypatch, tmp_path / "first", "--minutes", "-0.95") == 1
    page = (tmp_path / "first.md").read_text()
    assert "**Failed** attention: exit status 3: its output says why" in page
    assert "**Failed** profile: ended after" in page and "**Failed** training" not in page
    assert "trained" in capfd.readouterr().out


@pytest.mark.parametrize("gpus", [1, 8])
def test_every_part_is_a_command_that_exists(gpus: int) -> None:
    parts = first_contact.OF_SEVERAL if gpus > 1 else first_contact.SHARES
    assert ("messages" in parts) == (gpus > 1) and list(parts.values())[-1] == 1.0
    for part in parts:
        module, *words = first_contact.commands(part, Path("out"), 1.0, smoke=False, gpus=gpus)
        if module != "-m":
            assert Path(module).exists()
            continue
        name, *words = words
        if name == "pytest":
            assert Path(words[-1]).exists() and words[1:3] == ["-m", "gpu"]
            continue
        assert name == "longctx" and words[0] in COMMANDS
        assert (f"--processes={gpus}" in words) == (gpus > 1)


def test_predicted_constants_stand_beside_those_of_this_machine(tmp_path: Path) -> None:
    profile = HardwareProfile.load("h100-nvlink-ib")
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(replace(profile, overlap=0.125).to_dict()), encoding="utf-8")
    page = "\n".join(first_contact.constants(path, "NVIDIA H100 80GB HBM3"))
    assert line_of(page, "| overlap") == "| overlap | 0.8 | 0.125 |"
    assert line_of(page, "| intra_node") == "| intra_node_bytes_per_s | 3e+11 | 3e+11 |"


@pytest.mark.slow
def test_smoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, tmp_path / "first", "--minutes", "20") == 0  # of which a busy machine takes several to start
    page = (tmp_path / "first.md").read_text()
    assert "| cpu | 20 of 20 |" in page and "| cpu | 128 | 4 |" in page and "| 256 | none | cpu |" in page
    assert "`--context.profile first-profile.yaml`" in page
