"""pytest plugin: a marked function that makes a trainer from a probe is a check of its step
(docs/check-step.md).

pytest_plugins = "longctx.check.pytest_plugin"      # in conftest.py

@pytest.mark.check_step(processes=2, allow=["documents are cut"], probes=["prompts"])
def test_my_trainer(probe):
    return Trainer(..)
"""

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

from .errors import CheckError, UsageError

MEANING = (
    "check_step(processes=1, allow=(), probes=()): longctx checks the step of the trainer "
    "that the function makes from a probe"
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MEANING)


@pytest.fixture
def probe() -> None:
    """Takes the place of the probes, one after another, with which a marked function is called."""


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("check_step"):
        if mark.args or (unknown := sorted(mark.kwargs.keys() - {"processes", "allow", "probes"})):
            what = f"{mark.args[0]!r} without a name" if mark.args else unknown[0]
            pytest.fail(
                f"{item.name} is marked with {what}, which check_step does not take: {MEANING}",
                pytrace=False,
            )


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Checks the step of a marked function; on several processes the command checks the same
    function."""
    mark = pyfuncitem.get_closest_marker("check_step")
    if mark is None:
        return None
    if wrong := _wrong(pyfuncitem, **mark.kwargs):
        pytest.fail(wrong, pytrace=False)
    return True


def _wrong(
    item: pytest.Function, processes: int = 1, allow: Sequence[str] = (), probes: Sequence[str] = ()
) -> str:
    """Returns what is wrong with the step, or why it is refused."""
    if processes == 1:
        from .probe import named
        from .step import check_step

        given = {name: item.funcargs[name] for name in item._fixtureinfo.argnames}
        try:
            report = check_step(
                lambda each: item.obj(**given | {"probe": each}), named(probes), allow
            )
        except (CheckError, UsageError) as error:
            return str(error)
        if report.status:
            return "\n".join(report.lines())
        return ""
    command = [
        sys.executable,
        "-m",
        str(__package__),
        str(item.path),
        "--make",
        item.originalname,
    ]
    command += [
        "--processes",
        str(processes),
        *(f"--allow={kind}" for kind in allow),
        *(f"--probe={name}" for name in probes),
    ]
    # Modules beside the test are imported as here.
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": paths}
    )
    if not done.returncode:
        return ""
    if done.returncode < 3 and done.stdout:
        return done.stdout
    return done.stderr
