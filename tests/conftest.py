"""What all tests share: the pool of processes, the repository's root, property tests that draw the
same examples each time."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

from tests.workers import Workers

# Triton reads this when it is first imported: where there is no GPU, the tests interpret its
# kernels.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# `--hypothesis-profile explore` draws new examples instead, and ten times as many, to look for what
# the fixed ones miss.
settings.register_profile("steady", deadline=None, derandomize=True, max_examples=25)
settings.register_profile("explore", deadline=None, max_examples=250, print_blob=True)
settings.load_profile("steady")


# What is imported and collected lasts for the run: to look for garbage in it, at every collection,
# takes an eighth of the time of the tests.
gc.disable()


def pytest_collection_finish() -> None:
    """Looks for garbage from here on, in what tests make."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def what_a_file_leaves_lasts() -> Iterator[None]:
    """Nobody looks again at what caches and imports of a file keep: of syntax trees, millions of
    objects."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    """The pool of processes for tests over several ranks."""
    pool = Workers()
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small store, for tests that leave it as it is."""
    from tests.training_cases import make_store

    return make_store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="session")
def shorts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of documents of at most 300 tokens, for tests that leave it as it is."""
    from tests.training_cases import make_store

    return make_store(tmp_path_factory.mktemp("shorts"), (60, 110, 300, 80))


@pytest.fixture(scope="session")
def alone(workers: Workers, store: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Metrics of ten steps of one process on the small store, with which tests compare runs on
    several ranks."""
    from tests.training_cases import train

    return workers.run(train, 1, store, tmp_path_factory.mktemp("alone"), [])[0]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of a tokenizer with the chat template of a family, by the family's name."""
    from tests.template_cases import FAMILIES

    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: family.save(folder / name) for name, family in FAMILIES.items()}


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """Whatever a test runs in this process, a later run there must not meet its process group."""
    yield
    left = dist.is_initialized()
    if left:
        dist.destroy_process_group()
    assert not left, "a process group is left"


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the source tree."""
    return Path(__file__).resolve().parents[1]
