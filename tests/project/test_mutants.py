"""The tool that puts faults into the code: its own parts."""

import json
import subprocess
from pathlib import Path

import pytest

from tools import mutants

MODULE = """
LIMIT = 3
ROWS = {
    "first": 1,
    "second": 2,
}

def outer(x):
    return x + 1

class Kind:
    def outer(self, x):
        if (
            x > LIMIT
        ):
            return x
        return x + 1
"""


@pytest.mark.parametrize(
    ("name", "before", "after", "expected"),
    [
        ("outer", "x + 1", "x - 1", ("def outer(x):\n    return x - 1",)),
        ("Kind.outer", "(\n            x > LIMIT\n        )", "x", ("        if x:",)),
        ("ROWS", '    "second": 2,\n', "", ('    "first": 1,\n}',)),
        ("LIMIT", "3", "4", ("LIMIT = 4",)),
    ],
)
def test_one_part_of_one_definition_is_replaced(name, before, after, expected):
    faulty = mutants.with_fault(MODULE, name, before, after)
    assert all(text in faulty for text in expected)
    assert len(faulty) == len(MODULE) - len(before) + len(after)


@pytest.mark.parametrize(
    ("name", "before"), [("outer", "x - 1"), ("Kind.outer", "x"), ("Kind.other", "x + 1")]
)
def test_text_that_is_not_there_once_is_not_replaced(name, before):
    assert mutants.with_fault(MODULE, name, before, "y") is None


FAILED = "F\nFAILED tests/test_b.py::test_x[a - b] - AssertionError: assert 1 == 2\n1 failed"


@pytest.mark.parametrize(
    ("status", "output", "result"),
    [
        (0, "1 passed", "survives"),
        (1, FAILED, "tests/test_b.py::test_x[a - b]"),
        (1, "FAILED tests/test_b.py::test_x[a]", "tests/test_b.py::test_x[a]"),
        (1, FAILED.replace("[a - b]", ""), "tests/test_b.py::test_x"),
        (2, "ERROR tests/test_b.py - SyntaxError\n", "tests/test_b.py"),
        (-11, "", "tests/test_a.py"),
        (4, "ERROR: file or directory not found", "missing"),
        (5, "no tests ran", "missing"),
    ],
)
def test_a_run_is_classified_by_its_exit_status(status, output, result):
    assert mutants.classified(status, output, ["tests/test_a.py", "tests/test_b.py"]) == result


def test_tests_that_do_not_end_have_not_found_a_fault(monkeypatch):
    def run(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(mutants.subprocess, "run", run)
    assert mutants.run_tests(Path("nowhere"), ["tests/test_a.py"], limit_s=1) == "timed out"


def test_what_timed_out_is_tried_again_alone_with_more_time(monkeypatch):
    calls, results = [], {}

    class Copy:
        def __init__(self, folder):
            pass

        def result(self, fault, tests, limit_s):
            calls.append((fault["function"], limit_s))
            slow = fault["function"] == "slow" and limit_s == mutants.LIMIT_S
            return "timed out" if slow else "survives"

    monkeypatch.setattr(mutants, "Copy", Copy)
    faults = [{"function": name, "by": "unknown"} for name in ("slow", "quick")]
    mutants.try_all(
        faults, lambda fault: [], lambda fault, result: results.update({fault["function"]: result})
    )
    assert results == {"slow": "survives", "quick": "survives"}
    assert calls[-1] == ("slow", mutants.LIMIT_ALONE_S) and len(calls) == 3


def test_a_test_that_fails_without_the_fault_has_not_found_it(monkeypatch, tmp_path):
    module = tmp_path / "longctx" / "toy.py"
    module.parent.mkdir()
    module.write_text(MODULE)
    copy = mutants.Copy.__new__(mutants.Copy)
    copy.root, copy.sound, copy.broken = tmp_path, set(), set()

    def run_tests(root, tests, limit_s):
        is_faulty = "x - 1" in module.read_text()
        for test in ("tests/test_a.py::broken", "tests/test_b.py::sharp"):
            asked = test in tests or (len(tests) > 1 and f"--deselect={test}" not in tests)
            if asked and (is_faulty or test.endswith("broken")):
                return test
        return "survives"

    monkeypatch.setattr(mutants, "run_tests", run_tests)
    fault = {"file": "longctx/moved.py", "function": "outer", "before": "x + 1", "after": "x - 1"}
    assert copy.result(fault, ["tests", "-x"], limit_s=1) == "tests/test_b.py::sharp"
    assert copy.broken == {"tests/test_a.py::broken"} and module.read_text() == MODULE
    assert copy.result(fault | {"before": "x * 1"}, ["tests"], limit_s=1) == "changed"
    assert copy.result(fault | {"function": "none"}, ["tests"], limit_s=1) == "gone"


def test_the_score_counts_by_room(capsys):
    files = ("attention/merge.py", "longctx/hf/lora.py", "longctx/hf/lora.py", "longctx/cli.py")
    results = ("tests/test_a.py::test_x", "survives", "timed out", "unknown")
    listed = [{"file": file, "by": by} for file, by in zip(files, results, strict=True)]
    mutants.score(listed)
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| attention | 1 | 0 | 0 | 0 |",
        "| hf | 0 | 1 | 1 | 0 |",
        "| longctx | 0 | 0 | 0 | 1 |",
        "| all | 1 | 1 | 1 | 1 |",
    ]


def test_the_score_stands_in_contributing(capsys: pytest.CaptureFixture[str]) -> None:
    mutants.score(json.loads(mutants.LIST.read_text("utf-8")))
    table = capsys.readouterr().out
    assert table.count("\n") > 10
    assert table in (mutants.ROOT / "CONTRIBUTING.md").read_text("utf-8"), (
        "python -m tools.mutants score"
    )
