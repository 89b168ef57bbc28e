"""Every claim of the README has tests that exist, and every line of the README a claim."""

import ast
import re
from pathlib import Path

import pytest

import first_contact
from tools.claims import CLAIMS, NO_CLAIM, Claim

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text("utf-8")
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
NO_TEXT = ("#", "<!--", "![", "|---", "    ")


def claiming_lines(text: str) -> list[str]:
    """The lines of a page that may claim something: no headings, pictures, rules and code."""
    lines = FENCE.sub("", text).splitlines()
    return [line for line in lines if line.strip() and not line.startswith(NO_TEXT)]


def without_claim(text: str) -> list[str]:
    """The lines of a page that have no claim of the list."""
    return [
        line
        for line in claiming_lines(text)
        if not line.startswith(NO_CLAIM) and not any(claim.said in line for claim in CLAIMS)
    ]


def test_every_line_of_the_readme_has_a_claim_or_says_where_things_are() -> None:
    assert without_claim(README) == []
    assert without_claim(f"{README}\nIt is twice as fast on GPUs.") != []


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.said[:40])
def test_a_claim_is_the_readmes_and_its_tests_exist(claim: Claim) -> None:
    assert claim.said in README
    assert claim.tests
    for test in claim.tests:
        name, _, function = test.partition("::")
        path = ROOT / "tests" / name
        assert path.is_file(), test
        definitions = ast.parse(path.read_text("utf-8")).body
        names = [each.name for each in definitions if isinstance(each, ast.FunctionDef)]
        assert function in names or not function, test


def test_parts_of_first_contact_that_claims_name_exist() -> None:
    named = {part for claim in CLAIMS for part in re.findall(r"`(\w+)`", claim.gpu)}
    assert named and named <= set(first_contact.OF_SEVERAL)


def test_every_beginning_without_a_claim_is_needed() -> None:
    lines = claiming_lines(README)
    unused = [start for start in NO_CLAIM if not any(line.startswith(start) for line in lines)]
    assert unused == []
