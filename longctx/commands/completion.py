"""Completion of the command line by shells, as shtab writes it."""

import argparse
from typing import Any

from longctx.commands.output import a_name, a_path
from longctx.config.names import FIELDS
from longctx.errors import UserError


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Adds every setting as an option, as commands take them."""
    settings = parser.add_argument_group("settings")
    for name, field in FIELDS.items():
        sentences = (field.description or "").split(";")
        settings.add_argument(f"--{name}", help=sentences[0].replace("%", "%%"))


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Returns the script of a shell for a parser with subparsers. Raises UserError without
    shtab."""
    try:
        import shtab
    except ImportError as error:
        raise UserError("completion needs shtab, which is not installed: pip install shtab") from (
            error
        )
    _complete_files(parser, shtab.FILE)
    written: str = shtab.complete(parser, shell=shell)
    return written


def _complete_files(parser: argparse.ArgumentParser, file: Any) -> None:
    """Marks arguments that are paths, of a parser and its subparsers, to be completed as `file` of
    shtab says."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_files(command, file)
        elif action.type in (a_path, a_name):
            action.complete = file  # type: ignore[attr-defined]
