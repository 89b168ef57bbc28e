"""pytest plugin: a marked function that makes a trainer from a probe is a check of its step (docs/check-step.md).

pytest_plugins = "longctx.check.pytest_plugin"      # in conftest.py

@pytest.mark.check_step(processes=2, allow=["documents are cut"], probes=["prompts"])
def test_my_trainer(probe):
    return Trainer(..)
"""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from longctx.errors import UserError

MARK = "check_step"
MEANING = (
    f"{MARK}(processes=1, allow=(), probes=()): longctx checks the step of the trainer that the function makes from a probe"
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MEANING)


def pytest_pycollect_makeitem(collector: Any, name: str, obj: Any) -> pytest.Item | None:
    """Makes a check of a function of a module with the mark."""
    marks = [mark for mark in getattr(obj, "pytestmark", ()) if mark.name == MARK]
    if not marks or not isinstance(collector, pytest.Module):
        return None
    if marks[0].args or (unknown := sorted(marks[0].kwargs.keys() - {"processes", "allow", "probes"})):
        what = f"{marks[0].args[0]!r} without a name" if marks[0].args else unknown[0]
        raise collector.CollectError(f"{name} is marked with {what}, which {MARK} does not take: {MEANING}")
    item: StepItem = StepItem.from_parent(collector, name=name, make=obj, **marks[0].kwargs)
    item.own_markers += obj.pytestmark
    item.keywords.update({mark.name: mark for mark in obj.pytestmark})
    return item


class StepItem(pytest.Item):
    """A check of one step on all probes; on several processes it is the command's, of the same function."""

    def __init__(
        self,
        *,
        make: Callable[[Any], Any],
        processes: int = 1,
        allow: Sequence[str] = (),
        probes: Sequence[str] = (),
        **given: Any,
    ) -> None:
        super().__init__(**given)
        self.make, self.processes, self.allow, self.probes = make, processes, allow, probes

    def runtest(self) -> None:
        if self.processes == 1:
            from longctx.check import check_step
            from longctx.check.probe import named

            check_step(self.make, named(self.probes), self.allow).raise_if_wrong()
            return
        command = [sys.executable, "-m", "longctx", "check-step", str(self.path), "--make", self.name]
        command += ["--processes", str(self.processes), *(f"--allow={kind}" for kind in self.allow)]
        command += [f"--probe={name}" for name in self.probes]
        paths = os.pathsep.join(path for path in sys.path if path)  # modules beside the test are imported as here
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": paths})
        if done.returncode:
            raise AssertionError(done.stdout if done.returncode < 3 and done.stdout else done.stderr)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        ours = Path(excinfo.traceback[-1].path).is_relative_to(Path(__file__).parent)
        told = ours and isinstance(excinfo.value, AssertionError | UserError)
        return str(excinfo.value) if told else super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[os.PathLike[str], int, str]:
        return self.path, self.make.__code__.co_firstlineno, self.name
