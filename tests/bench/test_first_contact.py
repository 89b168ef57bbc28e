"""The first script for a GPU: its answers say what the rows say, and a part that fails takes no
other with it."""

import json
import sys
import time
from collections.abc import Sequence
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
import several_gpus
import training_gpu
from attention_times import FIRST, SMOKE
from first_contact_page import Page, kernels, verdict
from harness import Table, repeats
from longctx.attention.kernels import KERNELS, KernelRequest, cpu
from longctx.attention.kernels.flash import Flash
from longctx.cli import COMMANDS
from longctx.planning.hardware_profile import HardwareProfile
from training_rows import FASTEST

Parts = dict[str, str]
"""The Python code of each part."""
CALIBRATION = first_contact.commands("profile", Path("out"), 1.0, small=False, gpus=1)[3:6]
H100 = {"device": "NVIDIA H100 80GB HBM3", "memory": 80e9, "peak": 989e12, "attention": "flash"}


def contact(
    patch: pytest.MonkeyPatch, out: Path, parts: Parts, *, small: bool = False
) -> tuple[list[str], str]:
    """Runs parts, each with an equal share of 1000 seconds. Returns the failures and the page."""
    patch.setattr(
        first_contact, "commands", lambda part, *_, **__: ["-c", parts.get(part, ""), *CALIBRATION]
    )
    shares = {part: (number + 1) / len(parts) for number, part in enumerate(parts)}
    page = out.with_suffix(".md")
    failures = first_contact.contact(out, page, shares, 1000.0, small=small, gpus=1)
    return failures, page.read_text()


def answers(out: Path, about: dict[str, Any] | None = None) -> str:
    Path(f"{out}-device.json").write_text(json.dumps(about or H100))
    page = Page(out, CALIBRATION)
    text = "\n".join(page.lines())
    assert not page.failures
    return text


def line_of(page: str, start: str) -> str:
    return next(line for line in page.splitlines() if line.startswith(start))


def test_answers(tmp_path: Path) -> None:
    out = tmp_path / "first"
    checks = Table(tmp_path / "first-attention-checks.csv", attention_checks.COLUMNS, {})
    check = {
        "kernel": "flash",
        "mask": "causal",
        "tensor": "out",
        "ring": 0.002,
        "single": 0.001,
        "right": True,
    }
    checks.append(check)
    checks.append({**check, "tensor": "dq", "ring": 0.009, "right": False})
    times = Table(tmp_path / "first-attention.csv", attention_times.COLUMNS, {})
    cell = {
        "kernel": "flash",
        "tokens": 8192,
        "forward_single_tflops": 600.0,
        "backward_single_tflops": 400.0,
    }
    cell |= {"forward_calls_share": 0.8, "backward_calls_share": 0.9}
    times.append({**cell, "degree": 1, "forward_ring_share": 0.5, "backward_ring_share": 0.5})
    times.append({**cell, "degree": 4, "forward_ring_share": 0.93, "backward_ring_share": 0.89})
    times.append({**cell, "degree": 16, "forward_ring_share": 0.93, "backward_ring_share": 0.91})
    times.append({**cell, "degree": 64, "failed": "OutOfMemoryError: x"})
    rows = Table(tmp_path / "first-training.csv", training_gpu.COLUMNS, {})
    row = {
        "tokens": 32768,
        "chosen": FASTEST,
        "options": "norms",
        "step_s": 1.5,
        "tokens_per_s": 21845.0,
    }
    rows.append({**row, "mfu": 0.51, "peak_gib": 50.0, "estimate_gib": 54.0})
    rows.append({**row, "tokens": 131072, "mfu": 0.51, "peak_gib": 50.0, "estimate_gib": 56.0})
    rows.append({**row, "chosen": "full", "options": "full", "failed": "error: out of memory"})
    with times.path.open("a") as file:
        file.write("flash,32768,1,1,0")  # of a part that was ended
    page = answers(out)

    claims = "Kernels agree", "A ring reaches", "A 1B model", "Memory is", "Several GPUs"
    verdicts = [line_of(page, f"| {claim}").split(" | ")[1] for claim in claims]
    assert verdicts == [
        "**fails** (1 of 2 hold) |",
        "**fails** (1 of 2 hold) |",
        "**fails** (1 of 2 hold) |",
        "**fails** (1 of 2 hold) |",
        "not measured |",
    ]
    unchecked = "; ".join(
        sorted(f"not checked: {mask}" for mask in attention_checks.masks(1) if mask != "causal")
    )
    assert (
        line_of(page, "| flash | 1 of 2") == f"| flash | 1 of 2 | 9.00 | causal dq; {unchecked} |"
    )
    assert line_of(page, "| flash | 8192 | 1 ").endswith("| 50% | 50% | 80% |  |")
    assert line_of(page, "| flash | 8192 | 4 ").endswith(
        "| 524 | 442 | 600 | 400 | 93% | 89% | 80% | not reached |"
    )
    assert line_of(page, "| flash | 8192 | 16 ").endswith("| 93% | 91% | 80% | reached |")
    assert line_of(page, "| flash | 8192 | 64 ").endswith("| OutOfMemoryError: x |")
    assert (
        line_of(page, "| flash | 32768 | 1 ")
        == "| flash | 32768 | 1 | 524 |  |  |  |  |  |  | not measured |"
    )
    assert line_of(page, "| 32768 | norms").endswith(
        "| 1.062 | 1.5 | 21845.0 | 51.0% | 41.6 | 50.0 | MFU reached |"
    )
    assert line_of(page, "| 131072 | norms").endswith("| MFU not reached, estimate off by +12% |")
    assert line_of(page, "| 32768 | full").endswith("| error: out of memory |")
    assert line_of(page, "| 32768 | mlp").endswith("| not measured |")
    assert line_of(page, "| launch_s") == "| launch_s | 0.025 | not measured |"


def test_a_row_that_would_end_too_late_is_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of torch's flash attention on an H100: a rank's part of 131,072 tokens in a ring of 4 takes
    170 s, of a share of 90 s."""
    clock, deadline = [0.0], 90.0
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(attention_checks, "check_cases", lambda *_: [])

    def measure_cell(
        cell: dict[str, Any], sizes: attention_times.Sizes, device: torch.device
    ) -> dict[str, Any]:
        pairs = cell["tokens"] ** 2 * cell["degree"] / 2
        s_per_flop = {"forward": 1 / 306e12, "backward": 2.5 / 166e12}
        times = {
            kind: pairs * 4 * 32 * 128 * s_per_flop[kind.partition("_")[0]]
            for kind in attention_times.KINDS
        }
        clock[0] += 5 + sum(each * (2 + repeats(each, sizes.longest_s)) for each in times.values())
        return {
            **cell,
            **times,
            **{f"{kind}_{what}": 1.0 for kind in times for what in ("tflops", "share")},
        }

    monkeypatch.setattr(attention_times, "measure_cell", measure_cell)
    times = Table(tmp_path / "times.csv", attention_times.COLUMNS, {})
    checks = Table(tmp_path / "checks.csv", attention_checks.COLUMNS, {})
    checks.append(
        {
            "kernel": "flash",
            "mask": "causal",
            "dtype": FIRST.dtype,
            "head_dim": FIRST.head_dim,
            "right": True,
        }
    )
    attention_gpu.measure_kernel("flash", FIRST, torch.device("cpu"), times, checks, deadline)
    cells = [(row["tokens"], row["degree"]) for row in times.rows]
    assert cells == [("8192", "1"), ("8192", "4"), ("32768", "1"), ("32768", "4"), ("131072", "1")]
    assert 60 < clock[0] < deadline + 15
    assert (
        attention_times.needed_s({"tokens": 131072, "degree": 4, "documents": 1}, times.rows, FIRST)
        > 150
    )


def test_the_first_length_is_timed_before_masks_that_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flash-attn 4 compiles for each mask, which may take all of its time."""
    done: list[object] = []

    def check_kernel(case: dict[str, Any], *_: Any) -> list[dict[str, Any]]:
        done.append(case["mask"])
        return [{**case, "tensor": "out", "right": True}]

    def measure_cell(cell: dict[str, Any], *_: Any) -> dict[str, Any]:
        done.append(cell["tokens"])
        return {
            **cell,
            **{
                f"{kind}{end}": 0.01
                for kind in attention_times.KINDS
                for end in ("", "_tflops", "_share")
            },
        }

    monkeypatch.setattr(attention_checks, "check_kernel", check_kernel)
    monkeypatch.setattr(attention_times, "measure_cell", measure_cell)
    times = Table(tmp_path / "times.csv", attention_times.COLUMNS, {})
    checks = Table(tmp_path / "checks.csv", attention_checks.COLUMNS, {})
    sizes = replace(SMOKE, degrees=(4,), documents=(1,))
    attention_gpu.measure_kernel(
        "cpu", sizes, torch.device("cpu"), times, checks, time.monotonic() + 99
    )
    assert done == ["causal", "dense", 64, "window", "window with sinks", "prefix", 128]


def test_the_backward_pass_that_trains_is_checked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flash attention library has another one for deterministic gradients, compiled apart."""

    class Present(Flash):
        def refusal(self, request: KernelRequest) -> str | None:
            return None

    monkeypatch.setitem(KERNELS, "flash-attn 9", Present())
    cases = list(attention_checks.check_cases("flash-attn 9", SMOKE, torch.device("cpu")))
    every = list(attention_checks.masks(1))
    assert [case["mask"] for case in cases] == every * 2
    assert [case["deterministic"] for case in cases] == [False] * 5 + [True] * 5
    rows = [{**case, "right": "True", "ring": "", "single": ""} for case in cases]
    rows = [{name: str(value) for name, value in row.items()} for row in rows]
    assert line_of("\n".join(kernels(rows)), "| flash-attn 9").endswith("| 10 of 10 |  |  |")
    late = "; ".join(sorted(f"not checked: {mask}, deterministic" for mask in every))
    missing = [*rows[:5], {**rows[5], "mask": "other"}]
    assert late in line_of("\n".join(kernels(missing)), "| flash-attn 9")


def test_a_kernel_is_timed_if_the_backward_pass_that_trains_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the deterministic one is wrong, which is checked after the first length."""
    done: list[object] = []

    class Present(Flash):
        def refusal(self, request: KernelRequest) -> str | None:
            return None

    def check_kernel(case: dict[str, Any], *_: Any) -> list[dict[str, Any]]:
        done.append((case["mask"], case["deterministic"]))
        return [{**case, "tensor": "dq", "right": not case["deterministic"]}]

    def measure_times(name: str, tokens: Sequence[int], *_: Any) -> None:
        done.extend(tokens)

    monkeypatch.setitem(KERNELS, "flash-attn 9", Present())
    monkeypatch.setattr(attention_checks, "check_kernel", check_kernel)
    monkeypatch.setattr(attention_gpu, "measure_times", measure_times)
    times = Table(tmp_path / "times.csv", attention_times.COLUMNS, {})
    checks = Table(tmp_path / "checks.csv", attention_checks.COLUMNS, {})
    until = time.monotonic() + 99
    attention_gpu.measure_kernel("flash-attn 9", SMOKE, torch.device("cpu"), times, checks, until)
    assert done[:3] == [("causal", False), ("dense", False), 64]
    assert [case[0] for case in done[6:11]] == list(attention_checks.masks(1)) and done[-1] == 128
    assert times.rows == []


@pytest.mark.slow
def test_a_kernel_that_is_refused_for_determinism_alone_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`auto` trains with it, unless settings ask for determinism. Checks have as many heads for a
    key head as what is timed."""
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
    assert (
        len(others) == 4
        and "two runs may differ: unordered adds in any order" in capsys.readouterr().out
    )
    checks = Table(tmp_path / "first-attention-checks.csv", attention_checks.COLUMNS, {})
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        for row in attention_checks.check_kernel(case, sizes, device):
            checks.append(row)
    finally:
        dist.destroy_process_group()
    assert set(asked) == {(False, (16, 4))}
    assert [row["same_bits"] for row in checks.rows] == ["True", "False", "True", "True"]
    assert line_of("\n".join(kernels(checks.rows)), "| unordered").endswith(
        "; two runs may differ |"
    )


def test_a_part_that_dies_hangs_or_says_nothing_leaves_the_others_and_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What a part started goes with it, also in a session of its own, as torchrun's processes are:
    it would hold the GPU."""
    started = tmp_path / "started"
    hangs = (
        "import pathlib, subprocess, time; other = subprocess.Popen(['sleep', '99'], "
        "start_new_session=True)\n"
    )
    hangs += f"pathlib.Path({str(started)!r}).write_text(str(other.pid)); time.sleep(99)"
    device = f"open({str(tmp_path / 'first-device.json')!r}, 'w').write('{{')"
    parts = {
        "device": "print('no GPU answers'); raise SystemExit(3)",
        "attention": "import os; print('flash-attn is broken', flush=True); os.kill(os.getpid(), "
        "11)",
        "training": hangs,
        "profile": "print('the last part ran')",
    }
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + (1000.0 if started.exists() else 0.0))
    failures, page = contact(monkeypatch, tmp_path / "first", parts)
    assert [failure.split(",")[0] for failure in failures[:2]] == [
        "device: exit status 3",
        "attention: exit status -11",
    ]
    assert failures[2].startswith("training: ended after ") and len(failures) == 3
    assert (
        "**Failed** attention: exit status -11, at the end of its output:\n\n```\nflash-attn is "
        "broken\n```" in page
    )
    assert (
        "# First contact: unknown device" in page
        and "- profile: done in" in page
        and "| 32768 | norms" in page
    )
    assert "the last part ran" in capfd.readouterr().out
    pid = int(started.read_text())
    status = Path(f"/proc/{pid}/stat")
    assert not status.exists() or status.read_text().split()[2] == "Z"

    failures, page = contact(monkeypatch, tmp_path / "first", {"device": device})
    assert "## Do messages between GPUs work?" in page and "# First contact: unknown device" in page


@pytest.mark.slow
def test_a_dry_run_on_a_machine_that_others_use_is_slow_and_does_not_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts that reach their deadline say nothing of what is right; one that dies fails."""
    started = tmp_path / "started"
    waits = f"import time; open({str(started)!r}, 'w').close(); time.sleep(99)"
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + (1000.0 if started.exists() else 0.0))
    parts = {"device": waits, "profile": "pass"}
    failures, page = contact(monkeypatch, tmp_path / "first", parts, small=True)
    assert failures == [] and "- device: **slow**, ended at its deadline in " in page
    assert "**Failed**" not in page
    started.unlink()
    parts["profile"] = "raise SystemExit(1)"
    failures, page = contact(monkeypatch, tmp_path / "first", parts, small=True)
    assert [failure.split(",")[0] for failure in failures] == ["profile: exit status 1"]


def test_what_kernels_are_passed_over_for_stands_at_the_top(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "print('not measured: flash-attn 4: not installed (no module cutlass)')"
    about = json.dumps({**H100, "driver": "580.95", "cuda": "13.2"})
    device = f"open({str(tmp_path / 'first-device.json')!r}, 'w').write({about!r})"
    _, page = contact(monkeypatch, tmp_path / "first", {"device": device, "attention": said})
    top = page.partition("\n## ")[0]
    assert "- **passed over**: flash-attn 4: not installed (no module cutlass)" in top
    assert "driver: 580.95; cuda: 13.2" in top


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([], "not measured"),
        ([True, True], "holds (2 of 2)"),
        ([True, False], "**fails** (1 of 2 hold)"),
    ],
)
def test_a_claim_holds_if_all_that_was_measured_does(found: list[bool], said: str) -> None:
    assert verdict(found) == said


@pytest.mark.parametrize(
    ("last", "said"),
    [("= 6 passed in 9 s =", "holds (1 of 1)"), ("= 1 failed, 5 passed =", "**fails** (0 of 1")],
)
def test_messages_have_a_verdict(tmp_path: Path, last: str, said: str) -> None:
    (tmp_path / "first-messages.log").write_text(f"...\n{last}\n")
    assert said in line_of(answers(tmp_path / "first"), "| Several GPUs")


def test_each_claim_on_several_gpus_has_a_verdict(tmp_path: Path) -> None:
    """Beside what was predicted; a row that failed says why, unless it was measured later."""
    rows = Table(tmp_path / "first-several.csv", several_gpus.COLUMNS, {})
    rows.append({**several_gpus.row_of(several_gpus.RING, 2.0, 1.25)})
    rows.append(several_gpus.row_of(several_gpus.SPEED, failed="RuntimeError: no NCCL"))
    rows.append(several_gpus.row_of(several_gpus.SPEED, 0.95, 0.8))
    rows.append(several_gpus.row_of(several_gpus.SINGLE, 1.06, 1.04))
    rows.append(several_gpus.row_of(several_gpus.PACKING, failed="ModuleNotFoundError: trl"))
    page = answers(tmp_path / "first")
    head, _, table = page.partition("## What do several GPUs gain?")
    said = [line_of(head, f"| {claim}").split(" | ")[1] for claim in several_gpus.CLAIMS]
    assert said == [
        "**fails** (0 of 1 hold) |",  # by the rule of speeds, which a ring's row replaces
        "**fails** (0 of 1 hold) |",
        "holds (1 of 1) |",
        "not measured |",
        "not measured |",
    ]
    assert line_of(table, f"| {several_gpus.SPEED}").endswith("| 0.95 | 0.8 |  |")
    assert line_of(table, f"| {several_gpus.PACKING}").endswith(
        "|  |  | ModuleNotFoundError: trl |"
    )


def test_seconds_of_compilation_stand_apart(tmp_path: Path) -> None:
    assert "## How long do attention kernels compile, once?\n\nnot measured" in answers(
        tmp_path / "none"
    )
    found = {"attention": {"kernel": "flash-attn 4", "seconds": 63.5}}
    (tmp_path / "first-compile.json").write_text(json.dumps(found))
    assert "| attention | flash-attn 4 | 63.5 |" in answers(tmp_path / "first")


def test_a_section_that_cannot_be_read_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "first-profile.yaml").write_text("linear_s_per_token: 1")
    failures, page = contact(monkeypatch, tmp_path / "first", {"profile": ""})
    assert [
        failure.startswith("What are the planner's constants here? ProfileError: ")
        for failure in failures
    ] == [True]
    assert "**Failed** What are the planner's" in page and "| 32768 | norms" in page


def test_the_page_stands_before_the_first_part_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = f"print(open({str(tmp_path / 'first.md')!r}).read())"
    contact(monkeypatch, tmp_path / "first", {"device": seen})
    assert "- no part has ended" in Path(tmp_path / "first-device.log").read_text()


@pytest.mark.parametrize("gpus", [1, 8])
def test_all_parts_end_within_a_quarter_of_an_hour(gpus: int) -> None:
    shares, minutes = first_contact.plan(gpus, dry=False)
    assert list(shares.values()) == sorted(shares.values()) and list(shares.values())[-1] == 1.0
    assert minutes * 60 + first_contact.LATE_S < 15 * 60 - 45  # of which the start takes some
    start, *_ = shares.values()
    assert start * minutes * 60 > 30  # torch and CUDA start


@pytest.mark.parametrize("gpus", [1, 8])
def test_every_part_is_a_command_that_exists(gpus: int) -> None:
    parts, _ = first_contact.plan(gpus, dry=False)
    assert ("messages" in parts) == (gpus > 1) and list(parts) == [
        part for part in first_contact.DRY if part in parts
    ]
    for part in parts:
        module, *words = first_contact.commands(part, Path("out"), 1.0, small=False, gpus=gpus)
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
    path = tmp_path / "mine-profile.yaml"
    path.write_text(yaml.safe_dump(replace(profile, overlap=0.125).to_dict()), encoding="utf-8")
    page = answers(tmp_path / "mine")
    assert line_of(page, "| overlap") == "| overlap | 0.8 | 0.125 |"
    assert line_of(page, "| linear_s_per_token") == "| linear_s_per_token | 1.576e-05 | 9.63e-05 |"
    assert line_of(page, "| intra_node") == "| intra_node_bytes_per_s | 3e+11 | 3e+11 |"


def test_a_dry_run_names_rows_that_failed_or_are_missing(tmp_path: Path) -> None:
    """Parts end with 0 then, as on a GPU the other rows are worth having."""
    out = tmp_path / "dry"
    rows = Table(tmp_path / "dry-training.csv", training_gpu.COLUMNS, {})
    rows.append(
        {
            "tokens": 256,
            "chosen": "mlp",
            "options": "mlp",
            "failed": "error: train.recompute: unknown",
        }
    )
    found = list(Page(out, CALIBRATION, small=True).missing())
    assert {
        "attention-checks: no rows",
        "attention: no rows",
        "attention-elementwise: no rows",
    } < set(found)
    assert any("error: train.recompute: unknown" in line for line in found)
    assert any(line.startswith("| 256 | selective, not compiled") for line in found)


@pytest.mark.slow
def test_dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(
        sys, "argv", ["first_contact.py", "--dry-run", "--out", str(tmp_path / "first")]
    )
    with pytest.raises(SystemExit) as ended:
        first_contact.main()
    page = (tmp_path / "first-dry-run.md").read_text()
    assert ended.value.code == 0, page
    assert [path.name for path in tmp_path.iterdir()] == ["first-dry-run.md"]
    assert all(f"- {part}: done in" in page for part in first_contact.DRY) and page.count(
        "not shown here"
    ) == len(first_contact.DRY)
    assert line_of(page, "| 131072 | mlp").endswith("| not measured |")
    assert (
        "| cpu | 20 of 20 |" in page
        and "| cpu | 128 | 4 |" in page
        and "| 256 | none | cpu |" in page
    )
    assert f"| {several_gpus.RING} | holds (1 of 1) |" in page
    assert all(f"| {claim} | " in page for claim in several_gpus.CLAIMS)
    assert "6 skipped" in page and "intra_node_bytes_per_s: " in page
