"""Inputs with mistakes end with a message that says what is wrong, never with a traceback, and
within seconds."""

from collections.abc import Iterator

import pytest

from tests.faults.inputs import FULL, Fuzzer

pytestmark = pytest.mark.slow

SHORT = {
    "configs": 100,
    "YAML texts": 60,
    "overrides": 40,
    "lengths files": 30,
    "profiles": 30,
    "corpus files": 30,
    "saved files": 40,
}


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzer]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HF_HUB_OFFLINE", "1")  # a mutated name may look like one on the hub
        yield Fuzzer(tmp_path_factory.mktemp("fuzz"))


def check(fuzzer: Fuzzer, kind: str, count: int) -> None:
    tally = fuzzer.run(kind, count)
    assert not tally.failures, "\n".join(tally.failures)
    assert tally.tried == count
    assert count // 4 < tally.refused  # most mutations are mistakes


@pytest.mark.parametrize("kind", SHORT)
def test_no_mistake_is_a_riddle(fuzzer: Fuzzer, kind: str) -> None:
    check(fuzzer, kind, SHORT[kind])


@pytest.mark.slow
@pytest.mark.parametrize("kind", FULL)
def test_no_mistake_of_very_many_is_a_riddle(fuzzer: Fuzzer, kind: str) -> None:
    check(fuzzer, kind, FULL[kind])
