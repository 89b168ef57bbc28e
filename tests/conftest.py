"""Fixtures for all tests."""

from collections.abc import Iterator

import pytest

from tests.workers import Workers


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    """The pool of processes for tests over several ranks."""
    pool = Workers()
    yield pool
    pool.stop()
