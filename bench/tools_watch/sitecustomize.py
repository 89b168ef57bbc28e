"""Watches the Trainer of any program whose PYTHONPATH has this folder, for bench/tools_commands.py.

Every process writes what its Trainer logged, and its CPU seconds and the time at the start of
training and after each step, into the folder TOOLS_WATCH_OUT.
"""

import importlib.abc
import importlib.machinery
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

TRAINER = "transformers.trainer"


class Finder(importlib.abc.MetaPathFinder):
    """Finds the module of Trainer, and watches it once it is imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != TRAINER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def executed(module: Any) -> None:
            execute(module)
            watch(module.Trainer)

        spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec


def watch(kind: Any) -> None:
    """Makes trainers of a class write a report when they have trained."""
    own = kind.train

    def train(trainer: Any, *arguments: Any, **named: Any) -> Any:
        from transformers import TrainerCallback

        class Steps(TrainerCallback):
            """CPU seconds and time at the start of training and after every step."""

            def on_train_begin(self, *_: Any, **__: Any) -> None:
                cpu_s.append(time.process_time())
                times.append(time.time())

            on_step_end = on_train_begin

        cpu_s: list[float] = []
        times: list[float] = []
        trainer.add_callback(Steps())
        found = own(trainer, *arguments, **named)
        plans = trainer.dynamic.plans if hasattr(trainer, "dynamic") else []
        degrees = {degree for plan in plans for degree in plan.degrees}
        report = {
            "cpu_s": cpu_s,
            "times": times,
            "log": trainer.state.log_history,
            "degrees": sorted(degrees),
            "trainer": type(trainer).__name__,
        }
        rank = trainer.args.process_index
        file = Path(os.environ["TOOLS_WATCH_OUT"], f"rank-{rank}.json")
        file.write_text(json.dumps(report))
        return found

    kind.train = train


if "TOOLS_WATCH_OUT" in os.environ:
    sys.meta_path.insert(0, Finder())
