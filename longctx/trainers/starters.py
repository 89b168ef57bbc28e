"""Commands of tools that start processes, which train: the launcher runs, in each process of
torchrun, what those would run.

Such a command would start more processes in every process, without the launcher.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module

from longctx.trainers.kinds import KINDS

END_OF_OPTIONS = "--"


@dataclass(frozen=True)
class Program:
    """What the launcher runs.

    Attributes:
        name: of a script, a command that a package has installed, or a module.
        arguments: those of the program.
        is_module: whether `name` is a module.
    """

    name: str
    arguments: Sequence[str]
    is_module: bool = False


SCRIPTS = [name.removesuffix("Trainer").lower() for name in KINDS]
"""Of TRL, one for each trainer."""
MODULES = {
    **{("trl", name): f"trl.scripts.{name}" for name in SCRIPTS},
    **{("swift", name): f"swift.cli.{name}" for name in ("sft", "pt", "rlhf")},
    **{(name, "train"): "llamafactory.launcher" for name in ("llamafactory-cli", "lmf")},
}
"""By command and its first argument: the module that its processes run."""


def run_here(program: Program) -> Program:
    """Returns what a program runs in the processes that it starts; the program, if none is known to
    be started."""
    if program.is_module or not program.arguments:
        return program
    first, *others = program.arguments
    if (program.name, first) == ("axolotl", "train"):
        return replace(program, arguments=[first, *_without_processes(others)])
    module = MODULES.get((program.name, first))
    if module is None:
        return program
    if program.name == "swift":
        others = _with_yaml_read(others)
    return Program(name=module, arguments=others, is_module=True)


def _without_processes(arguments: Sequence[str]) -> list[str]:
    """Returns arguments of Axolotl with the launcher that starts no process, and none for others;
    of two launchers the last counts."""
    own = list(arguments)
    if END_OF_OPTIONS in own:
        own = own[: own.index(END_OF_OPTIONS)]
    return [*own, "--launcher", "python"]


def _with_yaml_read(arguments: list[str]) -> list[str]:
    """Returns arguments of ms-swift, whose command reads a file in the first place into others."""
    with suppress(ModuleNotFoundError):  # the launcher says what is not installed
        main = import_module("swift.cli.main")
        main.parse_yaml_args(arguments)
    return arguments
