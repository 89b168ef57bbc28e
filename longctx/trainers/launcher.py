"""Launcher: any program that trains by transformers' Trainer, as it is, with dynamic context
parallelism.

    torchrun --nproc-per-node 8 -m longctx.trainers train.py --learning_rate 1e-5
    torchrun --nproc-per-node 8 -m longctx.trainers trl sft --model_name_or_path ..

Every Trainer that the program makes gets it when its `train` is called. Options are those of
`dynamic_context_parallel`, as YAML: in a file (`--options FILE` before the program) or in the
environment (`LONGCTX_OPTIONS='tokens_per_rank: 16384'`).
"""

import argparse
import functools
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from longctx.errors import UserError
from longctx.parallel.device import choose_device, prepare_allocator, prepare_queues
from longctx.parallel.environment import TRAINER_OPTIONS, Launch, trainer_options
from longctx.safe_yaml import YamlError, parse, read_text
from longctx.trainers.dynamic import check_options, dynamic_context_parallel, train_planned
from longctx.trainers.options import OPTIONS, check_names
from longctx.trainers.starters import Program, run_here

NOT_TRAINED = (
    "longctx: {} has trained no Trainer in this process. A command that starts processes of its "
    "own (accelerate launch, torchrun) trains there: give the script or module that those run, and "
    "let torchrun start this launcher"
)


class LauncherError(UserError):
    """A program that cannot be started, or a file of options that cannot be read."""


class Launched:
    """Gives dynamic context parallelism to every trainer whose `train` is called, until `undo`.

    Attributes:
        options: arguments of `dynamic_context_parallel`.
        trained: names of the classes of trainers that have begun to train.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        from transformers import Trainer

        self.options = options
        self.trained: list[str] = []
        self._class = Trainer
        self._own_train = Trainer.train

        @functools.wraps(Trainer.train)
        def train(trainer: Any, *arguments: Any, **named: Any) -> Any:
            return self._train(trainer, arguments, named)

        self._planned_train = train
        Trainer.train = train

    def _train(self, trainer: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Trains, planned. A trainer that has a `train` of its own, as ms-swift's, calls this one
        inside it; another's is replaced on the trainer itself, and calls this function again."""
        if hasattr(trainer, "dynamic"):
            return self._own_train(trainer, *arguments, **named)
        name = type(trainer).__name__
        has_own_train = type(trainer).train is not self._planned_train
        dynamic_context_parallel(trainer, **self.options)
        if trainer.is_world_process_zero():
            print(f"longctx: {name} trains with dynamic context parallelism", flush=True)
        self.trained.append(name)
        if has_own_train:
            return train_planned(self._own_train, trainer, *arguments, **named)
        return trainer.train(*arguments, **named)

    def undo(self) -> None:
        """Gives transformers its own `train` again."""
        self._class.train = self._own_train


def read_options(file: Path | None, text: str | None) -> dict[str, Any]:
    """Returns the options of a file, or of the text of the environment. Raises LauncherError for
    both, and OptionError for what is no mapping of names that `dynamic_context_parallel` knows."""
    if file is not None and text is not None:
        raise LauncherError(f"--options {file} and {TRAINER_OPTIONS} are both given: leave one out")
    if file is None and text is None:
        return {}
    source = TRAINER_OPTIONS if file is None else str(file)
    try:
        values = parse(read_text(file) if file is not None else str(text))
    except OSError as error:
        raise LauncherError(f"{source} cannot be read: {error.strerror}") from error
    except YamlError as error:
        raise LauncherError(f"{source} is not valid YAML: {error}") from error
    if values is None:
        return {}
    return check_names(values, source)


def run(program: Program) -> None:
    """Runs a program in this process: a module, a file, or a command that a package has installed.
    Raises LauncherError if there is none."""
    name = program.name
    sys.argv = [name, *program.arguments]
    if program.is_module:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
        _require_module(name)
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return
    path = Path(name)
    if path.is_file():
        sys.path.insert(0, str(path.resolve().parent))  # as `python FILE` does
        runpy.run_path(name, run_name="__main__")
        return
    command = _command(name).load()
    status = command()
    if status:
        sys.exit(status)


def _require_module(name: str) -> None:
    """Raises LauncherError if there is no module of this name."""
    try:
        found = find_spec(name)
    except ModuleNotFoundError:  # of a package before a dot
        found = None
    if found is None:
        raise LauncherError(
            f"no module {name!r} can be imported here: install its package, or without -m give a "
            "script or a command"
        )


def _command(name: str) -> EntryPoint:
    """Returns the command of this name that a package has installed. Raises LauncherError."""
    found = list(entry_points(group="console_scripts", name=name))
    if not found:
        raise LauncherError(
            f"{name!r} is neither a file nor a command that a Python package has installed here: "
            "give a script, a command such as llamafactory-cli, or -m and a module"
        )
    return found[0]


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line, in which all after the program is the program's."""
    result = argparse.ArgumentParser(
        prog="python -m longctx.trainers",
        description="Runs a program that trains by transformers' Trainer, or TRL's, with dynamic "
        "context parallelism. Start it by torchrun: torchrun --nproc-per-node 8 -m "
        "longctx.trainers train.py",
        allow_abbrev=False,
    )
    result.add_argument(
        "--options",
        type=Path,
        metavar="FILE",
        help=f"YAML with {', '.join(OPTIONS)}; or set {TRAINER_OPTIONS}, such as "
        "'tokens_per_rank: 16384'",
    )
    result.add_argument("-m", "--module", action="store_true", help="PROGRAM is a module")
    result.add_argument("program", metavar="PROGRAM", help="script, installed command, or module")
    result.add_argument(
        "arguments", metavar="ARGUMENTS", nargs=argparse.REMAINDER, help="those of the program"
    )
    return result


def main(given: Sequence[str]) -> None:
    """Runs the program that the arguments name. Exits with 2 for what longctx refuses."""
    parsed = parser().parse_args(given)
    try:
        options = read_options(parsed.options, trainer_options())
        launch = Launch.read()
        check_options(launch.world_size, options)
        device = choose_device("auto", launch.local_rank)  # CUDA has not started yet
        prepare_allocator(device)
        prepare_queues(device)
        launched = Launched(options)
        try:
            program = Program(parsed.program, parsed.arguments, is_module=parsed.module)
            run(run_here(program))
        finally:
            launched.undo()
        if launch.rank == 0 and not launched.trained:
            print(NOT_TRAINED.format(parsed.program), file=sys.stderr)
    except UserError as error:
        print(f"longctx: {error}", file=sys.stderr)
        sys.exit(2)
