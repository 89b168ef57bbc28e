"""Watches the Trainer of any program whose PYTHONPATH has this folder, for bench/tools_commands.py.

Every process writes what its Trainer logged, and its CPU seconds and the time at the start of
training and after each step, into the folder TOOLS_WATCH_OUT. ms-swift packs rows without flash
attention, which no CPU has: SDPA reads the same `position_ids`.
"""

import importlib.abc
import importlib.machinery
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


class Finder(importlib.abc.MetaPathFinder):
    """Finds modules, and changes each once it is imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        change = CHANGES.pop(name, None)
        if change is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def executed(module: Any) -> None:
            execute(module)
            change(module)

        patched: Any = spec.loader
        patched.exec_module = executed
        return spec


def draw_adapters(model: Any) -> None:
    """Gives adapters weights that do not depend on what a tool has drawn before."""
    import torch

    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if "lora_A" in name:
            with torch.no_grad():
                weight.normal_(std=0.05, generator=generator)


def watch(module: Any) -> None:
    """Makes trainers write a report when they have trained."""
    kind = module.Trainer
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
        draw_adapters(trainer.model)
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


def pack_on_cpus(module: Any) -> None:
    """Lets ms-swift pack rows."""

    def check(arguments: Any) -> None:
        arguments.padding_free = arguments.padding_free or arguments.packing

    module.SftArguments._check_padding_free = check


CHANGES = {"transformers.trainer": watch, "swift.arguments.sft_args": pack_on_cpus}
"""By module."""
if "TOOLS_WATCH_OUT" in os.environ:
    sys.meta_path.insert(0, Finder())
