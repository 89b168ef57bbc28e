"""Templates are right as printed, a fault in each is named, and the pytest plugin says so."""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState

from longctx.check import PROBES, Probe, check_step, template
from longctx.check.command import main as wheel_main
from longctx.check.loop import packed_batches, padded_batches, targets_of
from longctx.check.probe import PAD
from longctx.check.template import DISTRIBUTIONS, TEMPLATES
from longctx.cli import main

pytest_plugins = "pytester"
FOLDER = Path(__file__).parents[2] / "longctx" / "check" / "templates"
FAULTS = {
    "accelerate": (
        "logits[:, :-1]",
        "logits[:, 1:]",
        "labels are not shifted: tokens predict themselves",
    ),
    "context_parallel": (
        "mask = (same & earlier)",
        "mask = earlier[None]",
        "documents see each other, though positions begin anew with each",
    ),
    "ddp": ("losses / targets", "losses / (2 * targets)", "the loss has a wrong scale"),
    "fsdp2": (
        "losses / targets",
        "losses / (labels[:, 1:] != -100).sum() / probe.micro_batches",
        "the loss is a mean of means of micro-batches",
    ),
    "own": (
        "mask = same & earlier",
        "mask = earlier",
        "documents see each other, though positions begin anew with each",
    ),
    "trainer": ('"qwen3"', '"gpt_oss"', "documents see each other"),
    "trl": (
        "max_length=None,\n        padding_free=True",
        "max_length=64, packing=True, packing_strategy='wrapped'",
        "documents see each other",
    ),
}
"""Template → what takes the place of what in it, and the fault that is then named first."""
ABSENT = [name for name in TEMPLATES if name not in (*FAULTS, "data")]
"""Of packages that tests do not have."""
SHORT = Probe("short", lengths=(1, 9, 14, 5), micro_batches=2)


def function(text: str, folder: Path) -> Callable[[Probe], Any]:
    file = folder / "check.py"
    file.write_text(text, encoding="utf-8")
    make: Callable[[Probe], Any] = runpy.run_path(str(file))["make"]
    return make


@pytest.mark.parametrize("name", FAULTS)
def test_a_template_is_right_and_its_fault_is_named(name: str, tmp_path: Path) -> None:
    # A trainer of another test may have left its precision there.
    AcceleratorState._reset_state(True)
    text = template.text_of(name, "longctx check-step")
    report = check_step(function(text, tmp_path), [SHORT])
    assert report.lines()[0] == "short: right"
    right, wrong, kind = FAULTS[name]
    assert right in text
    (verdict,) = check_step(function(text.replace(right, wrong), tmp_path), [SHORT]).verdicts
    assert verdict.findings[0].kind.startswith(kind)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_templates_on_two_processes(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "check.py")
    assert main(["check-step", "--template", name, "-o", file]) == 0
    next_one = f"longctx check-step {file} --processes 2"
    assert capfd.readouterr().out.endswith(f"marks, then run {next_one}\n")
    assert main(["check-step", file, "--processes", "2"]) == 0
    assert capfd.readouterr().out.splitlines() == [f"{probe.name}: right" for probe in PROBES]


@pytest.mark.parametrize("name", ABSENT)
def test_a_template_without_its_package_says_what_to_install(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "check.py")
    assert main(["check-step", "--template", name, "-o", file]) == 0
    assert main(["check-step", file]) == 3
    error = capsys.readouterr().err
    assert f"is not installed: pip install {DISTRIBUTIONS[name]}\n" in error


def test_a_micro_batch_without_a_document_is_no_fault(tmp_path: Path) -> None:
    """Of a loop that begins with batches of the room, as a rank may have more than documents."""
    make = function(template.text_of("ddp", "longctx check-step"), tmp_path)
    probe = Probe("one", lengths=(9,), micro_batches=2)
    assert [len(batch["input_ids"][0]) for batch in padded_batches(probe)] == [9, 1]
    assert check_step(make, [probe]).lines()[0] == "one: right"


def test_rows_of_whole_documents_are_the_probes() -> None:
    """Each row is full, and each document is in one, with its positions."""
    probe = Probe("three", lengths=(3, 6, 4), prompt=0.4)
    first, second = packed_batches(probe, length=10)
    assert first["input_ids"].tolist() == [[*range(2, 11), PAD]]
    assert first["positions"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 5, 0]]
    assert first["documents"].tolist() == [[0, 0, 0, 1, 1, 1, 1, 1, 1, -1]]
    assert first["labels"].tolist() == [[3, 4, -100, -100, 7, 8, 9, 10, -100, -100]]
    assert second["input_ids"].tolist() == [[11, 12, 13, 14, *[PAD] * 6]]
    assert second["documents"].tolist() == [[2, 2, 2, 2, -6, -5, -4, -3, -2, -1]]
    wanted = sum(
        probe.trained(number, at) for number in range(3) for at in range(probe.lengths[number])
    )
    assert targets_of([first, second], shifted=True) == wanted
    assert targets_of(padded_batches(probe)) == wanted


def test_there_is_a_template_of_each_name() -> None:
    files = {path.stem.removeprefix("check_"): path for path in FOLDER.glob("*.py")}
    assert sorted(files) == sorted(TEMPLATES)
    for name, path in files.items():
        text = path.read_text(encoding="utf-8")
        assert text.count("# PUT YOURS HERE: ") in (2, 3, 4), name


def test_a_template_imports_what_prints_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["check-step", "--template", "ddp"]) == 0
    text = capsys.readouterr().out
    assert "from longctx.check.loop import" in text and "longctx check-step FILE" in text
    monkeypatch.setattr(template, "__package__", "longctx_check")
    assert wheel_main(["--template", "ddp"]) == 0
    text = capsys.readouterr().out
    assert "from longctx_check.loop import" in text and "longctx-check FILE" in text
    assert "longctx.check" not in text and "check-step" not in text


def test_a_template_replaces_no_file_and_hides_no_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "check.py"
    file.write_text("mine")
    assert main(["check-step", "--template", "ddp", "-o", str(file)]) == 2
    assert f"{file} exists: choose another file, or delete it" in capsys.readouterr().err
    assert file.read_text() == "mine"
    assert main(["check-step", "--template", "trl", "--out", str(tmp_path / "trl.py")]) == 2
    assert "would be imported in place of trl" in capsys.readouterr().err
    assert main(["check-step"]) == 2
    assert "`--template KIND -o FILE` writes one to begin with" in capsys.readouterr().err


def test_a_file_imports_what_lies_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside_the_check.py").write_text("def loop(probe): return 7")
    file = tmp_path / "check.py"
    file.write_text("from beside_the_check import loop as make")
    assert main(["check-step", str(file)]) == 3
    assert "make returned int" in capsys.readouterr().err
    file.write_text("import no_such_module")
    assert main(["check-step", str(file)]) == 4
    assert "No module named 'no_such_module'" in capsys.readouterr().err


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
