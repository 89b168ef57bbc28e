"""The second set of hidden faults: first readings stay, names are unique, faults are faults."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.check_hidden import __main__ as harness

SECOND = {case.name: case for case in harness.cases() if case.second}
NAME = "some ids have no loss"


def written(path: Path, verdict: str) -> Path:
    path.write_text(f"{verdict} | {NAME} | a sentence\n")
    return path


def test_the_first_reading_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "STORE", tmp_path / "store.json")
    case = SECOND[NAME]
    harness.keep({NAME: harness.entry(case, ["unclear"], far=0.1)})
    harness.read(written(tmp_path / "first.txt", "unnamed"))
    harness.keep({NAME: harness.entry(case, ["clear"], far=0.1)})
    harness.read(written(tmp_path / "mended.txt", "named"))
    entry: dict[str, Any] = json.loads((tmp_path / "store.json").read_text())[NAME]
    assert harness.reading(entry) == "named"
    assert harness.first_sight(entry) == "unnamed"
    assert entry["first_sight"]["lines"] == ["unclear"]


def test_stored_cases_of_the_second_set_have_a_first_reading() -> None:
    stored = harness.stored()
    unread = [name for name in SECOND if harness.first_sight(stored[name]) == "not read"]
    assert unread == []


def test_names_are_unique() -> None:
    names = [case.name for case in harness.cases()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", [NAME, "packed in two rows"])
def test_a_case_is_what_it_says(name: str) -> None:
    case = SECOND[name]
    lines, far = harness.judge(case)
    assert harness.complaint(case, far) == ""
    assert ("short: right" in lines) == (not case.fault)
