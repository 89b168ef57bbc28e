"""Files that name versions and folders of others say what those say."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = ROOT / ".github" / "workflows"


def matrix_of(workflow: str, job: str) -> dict[str, Any]:
    content = yaml.safe_load((WORKFLOWS / workflow).read_text("utf-8"))
    matrix: dict[str, Any] = content["jobs"][job]["strategy"]["matrix"]
    return matrix


def test_pre_commit_has_the_version_of_ruff_that_make_check_has() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))
    (pinned,) = re.findall(r"^ruff==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert hooks["repos"][0]["rev"] == f"v{pinned}"


def test_the_nightly_tests_have_every_folder_of_tests() -> None:
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    assert set(matrix_of("nightly.yml", "release-tests")["room"]) == folders
    assert not list((ROOT / "tests").glob("test_*.py")), "a test is in the folder of its room"


@pytest.mark.parametrize("package", ["transformers", "trl", "accelerate"])
def test_the_oldest_and_newest_trainers_are_those_of_the_extra(package: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    required = [Requirement(text) for text in project["optional-dependencies"]["trl"]]
    (allowed,) = [each.specifier for each in required if each.name == package]
    rows = {row["name"]: row["install"] for row in matrix_of("versions.yml", "versions")["include"]}
    (oldest,) = re.findall(rf"{package}==([\d.]+)\.\*", rows["oldest trainers"])
    lower = {str(each.version) for each in allowed if each.operator == ">="}
    assert lower == {oldest}
    (newest,) = re.findall(rf"{package}(<[\d.]+)?(?: |$)", rows["newest trainers"])
    upper = {f"<{each.version}" for each in allowed if each.operator == "<"}
    assert upper == ({newest} if newest else set())


def test_the_oldest_torch_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    (torch,) = [text for text in project["dependencies"] if text.startswith("torch>=")]
    rows = {row["name"]: row["install"] for row in matrix_of("versions.yml", "versions")["include"]}
    assert rows["oldest torch"] == f"torch=={torch.removeprefix('torch>=')}.*"


def test_nothing_is_published_before_somebody_says_so() -> None:
    jobs = yaml.safe_load((WORKFLOWS / "release.yml").read_text("utf-8"))["jobs"]
    assert jobs["publish"]["if"] == "vars.PUBLISH == 'true'"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
