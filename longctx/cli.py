"""The `longctx` command: imports the module of a subcommand, passes its arguments on and prints
user errors as one message.

`longctx NAME` is `longctx/commands/NAME.py` (with `_` for `-`), a module with `SUMMARY` (one line),
`add_arguments(parser)` and `run(arguments) -> exit status`. Only the requested module is imported,
and it imports torch in `run` at the earliest, so that help and planning are quick. Two more names
are optional:

- `OVERRIDES = True`: settings such as `--batch.tokens_per_rank 4096` are accepted, as
  `arguments.overrides`.
- `PROCESSES = True`: `--processes N` is accepted, and but for a `--dry-run`, torchrun starts N
  processes on this machine, which run the same command.

Errors: UserError and OSError (no such file, no permission, no space) are printed without a
traceback, and the exit status is 2. Any other exception is a bug in longctx or a library, and its
traceback is shown.
"""

import argparse
import difflib
import importlib
import io
import logging
import os
import re
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from types import ModuleType

import longctx
from longctx.errors import LONGEST_MESSAGE, UserError, shortened

COMMANDS = (
    "prepare",
    "train",
    "finetune",
    "eval",
    "export",
    "plan",
    "compare",
    "measure",
    "check-step",
    "calibrate",
    "warm-up",
    "estimate",
    "config",
)

SHELLS = ("bash", "zsh", "tcsh")
PROCESSES_HELP = (
    "start N processes on this machine, by torchrun (default: this process; on several machines, "
    "start torchrun on each)"
)

NOISY = ("torchao", "torch.utils._pytree")
"""Loggers that warn of themselves when transformers is imported, before the first line of a
command, on every rank."""

_OVERRIDE = re.compile(r"--[A-Za-z_-]+\.[^=\s]+(=.*)?", re.DOTALL)


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows the default of every option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        shown = action.option_strings and action.default not in (None, False, [], argparse.SUPPRESS)
        if action.help and shown and "%(default)" not in action.help:
            return f"{action.help} (default: %(default)s)"
        return action.help


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns its exit status; `argv` is `sys.argv[1:]` unless given."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] not in COMMANDS:
        return _main_help(argv)
    name = argv[0]
    rest = argv[1:]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for file names that are not UTF-8
    try:
        if any("\0" in argument for argument in argv):
            raise UserError(
                "an argument has a NUL character, which no path or setting may have: remove it"
            )
        _check_package()
        return _run(name, rest)
    except (
        BrokenPipeError
    ):  # `longctx plan | head`: the reader has left, and there is nobody to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (UserError, OSError) as error:
        from longctx.parallel.environment import wait_for_rank_0

        wait_for_rank_0()
        print(f"longctx {name}: error: {shortened(str(error), LONGEST_MESSAGE)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"longctx {name}: interrupted", file=sys.stderr)
        return 130


def split_overrides(argv: list[str]) -> tuple[list[str], list[str]]:
    """Separates `--section.key value` and `--section.key=value` from the other arguments, keeping
    the order of both.

    Returns (other arguments, overrides), every override as `section.key=value`. Raises UserError if
    a value is missing.
    """
    others: list[str] = []
    overrides: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        if not _OVERRIDE.fullmatch(argument):
            others.append(argument)
        elif "=" in argument:
            overrides.append(argument[2:])
        else:
            value = next(arguments, None)
            if value is None or value.startswith("--"):
                raise UserError(
                    f"{argument} has no value: write {argument} VALUE, or {argument}=VALUE"
                )
            overrides.append(f"{argument[2:]}={value}")
    return others, overrides


def _run(name: str, argv: list[str]) -> int:
    for logger in NOISY:
        logging.getLogger(logger).setLevel(logging.ERROR)
    module = _module(name)
    command = [name, *argv]
    parser = argparse.ArgumentParser(
        prog=f"longctx {name}", description=module.SUMMARY, formatter_class=HelpFormatter
    )
    _add_arguments(parser, module)
    overrides: list[str] = []
    if getattr(module, "OVERRIDES", False):
        argv, overrides = split_overrides(argv)
    processes = getattr(module, "PROCESSES", False)
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        from longctx.commands.output import not_taken

        raise UserError(
            not_taken(unknown, parser, takes_settings=getattr(module, "OVERRIDES", False))
        )
    arguments.overrides = overrides
    if processes and arguments.processes is not None and not getattr(arguments, "dry_run", False):
        from longctx.parallel.launch import launch, launches

        if launches(arguments.processes):
            return launch(arguments.processes, command)
    return int(module.run(arguments))


def _add_arguments(parser: argparse.ArgumentParser, module: ModuleType) -> None:
    """Adds the arguments of a command, without settings."""
    module.add_arguments(parser)
    if getattr(module, "PROCESSES", False):
        parser.add_argument("--processes", type=int, metavar="N", help=PROCESSES_HELP)


def _completion(shell: str) -> str:
    """Returns a script with which a shell completes commands, options and settings."""
    from longctx.commands.completion import add_settings, script

    parser = argparse.ArgumentParser(prog="longctx")
    commands = parser.add_subparsers()
    for name in COMMANDS:
        module = _module(name)
        command = commands.add_parser(name, help=module.SUMMARY)
        _add_arguments(command, module)
        if getattr(module, "OVERRIDES", False):
            add_settings(command)
    return script(parser, shell)


def _check_package() -> None:
    """Raises UserError if the registry's `longctx`, another program with the same import name, is
    installed over this one."""
    with suppress(metadata.PackageNotFoundError):
        other = metadata.distribution("longctx")
        ours = Path(longctx.__file__)
        theirs = Path(str(other.locate_file("longctx/__init__.py")))
        if (
            "longctx/__init__.py," in (other.read_text("RECORD") or "")
            and theirs.resolve() == ours.resolve()
        ):
            raise UserError(
                f"another program, longctx {other.version} of the package registry, is installed "
                "over this one: pip uninstall longctx longctx-train, then pip install . in the "
                "folder of longctx's source code"
            )


def _main_help(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="longctx", description=longctx.__doc__, formatter_class=HelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"longctx {longctx.__version__}")
    parser.add_argument(
        "--completion",
        choices=SHELLS,
        help="print a script with which this shell completes commands, options and settings: "
        'eval "$(longctx --completion bash)"',
    )
    parser.add_argument("command", nargs="?", metavar="COMMAND", help="one of the commands below")
    width = max(map(len, COMMANDS))
    listing = "\n".join(f"  {name:{width}}  {_module(name).SUMMARY}" for name in COMMANDS)
    parser.epilog = (
        f"commands:\n{listing}\n\n`longctx COMMAND --help` shows the options of a command."
    )
    given = parser.parse_known_args(argv)[0]
    command = given.command
    if command is not None:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(COMMANDS)}"
        parser.error(f"no command {command!r}: {hint}")
    if argv:
        parser.parse_args(argv)  # refuses any other option
    if given.completion is not None:
        print(_completion(given.completion))
        return 0
    parser.print_help(sys.stderr)
    return 2


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"longctx.commands.{name.replace('-', '_')}")
