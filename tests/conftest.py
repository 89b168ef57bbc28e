"""What all tests share: the pool of processes, the repository's root, property tests that draw the same examples each time."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.workers import Workers

# `--hypothesis-profile explore` draws new examples instead, to look for what the fixed ones miss.
settings.register_profile("steady", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile("steady")


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    """The pool of processes for tests over several ranks."""
    pool = Workers()
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the source tree."""
    return Path(__file__).resolve().parents[1]
