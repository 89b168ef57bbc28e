"""Loops of examples/check_loops.py are right, a fault in each is named, and the pytest plugin says
so."""

import runpy
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState

from longctx.check import PROBES, Probe, check_step
from longctx.cli import main

pytest_plugins = "pytester"
LOOPS = Path(__file__).parents[2] / "examples" / "check_loops.py"
FAULTS = {
    "with_accelerate": (
        "logits[:, :-1]",
        "logits[:, 1:]",
        "labels are not shifted: tokens predict themselves",
    ),
    "like_torchtitan": (
        "mask = same & ",
        "mask = ",
        "documents see each other, though positions begin anew with each",
    ),
    "like_megatron": (
        "main_grad / targets",
        "main_grad / (2 * targets)",
        "the loss has a wrong scale",
    ),
}
SHORT = Probe("short", lengths=(1, 9, 14, 5), micro_batches=2)


@pytest.mark.parametrize("name", FAULTS)
def test_a_loop_is_right_and_its_fault_is_named(name: str, tmp_path: Path) -> None:
    # A trainer of another test may have left its precision there.
    AcceleratorState._reset_state(True)
    right, wrong, kind = FAULTS[name]
    assert check_step(runpy.run_path(str(LOOPS))[name], [SHORT]).lines()[0] == "short: right"
    faulty = tmp_path / "loops.py"
    faulty.write_text(LOOPS.read_text(encoding="utf-8").replace(right, wrong), encoding="utf-8")
    (verdict,) = check_step(runpy.run_path(str(faulty))[name], [SHORT]).verdicts
    assert [finding.kind for finding in verdict.findings][:1] == [kind]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_loops_on_two_processes(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["check-step", str(LOOPS), "--make", name, "--processes", "2"]) == 0
    assert capfd.readouterr().out.splitlines() == [f"{probe.name}: right" for probe in PROBES]


MARKED = """
import pytest
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments
from longctx.check.trainer import arguments
ALLOWED = "documents see each other, though positions begin anew with each"

@pytest.mark.check_step(processes={}, probes=["few documents"])
def test_packing(probe):
    args = TrainingArguments(**arguments(per_device_train_batch_size=12, gradient_accumulation_steps=probe.micro_batches))
    return Trainer(probe.model("gpt_oss"), args, DataCollatorWithFlattening(), probe.rows)

@pytest.mark.check_step(allow=[ALLOWED], probes=["few documents"])
def test_allowed(probe, tmp_path):
    assert tmp_path.is_dir(), "fixtures are given"
    return test_packing(probe)

@pytest.mark.check_step(probes=["few documents"])
def test_no_trainer(probe):
    return probe
"""


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_marked_function_is_a_check(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    # A run in this process would forget what it imports, and transformers cannot be imported twice.
    monkeypatch.setattr("_pytest.pytester.SysModulesSnapshot.restore", lambda snapshot: None)
    pytester.makepyfile(**{f"test_on_{processes}": MARKED.replace("{}", str(processes))})
    result = pytester.runpytest_inprocess(
        "-p", "longctx.check.pytest_plugin", "--strict-markers", "-p", "no:xdist"
    )
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(
        ["few documents: documents see each other*, tokens of document 1 see document 0"]
    )
    result.stdout.fnmatch_lines(["*make returned Probe: return a transformers.Trainer, or a Step"])
    assert "Traceback" not in result.stdout.str()


def test_a_misspelt_mark_is_refused(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "import pytest\n@pytest.mark.check_step(process=2)\ndef test_it(probe): pass"
    )
    result = pytester.runpytest_inprocess("-p", "longctx.check.pytest_plugin", "-p", "no:xdist")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        [
            "test_it is marked with process, which check_step does not take: "
            "check_step(processes=1, *"
        ]
    )
