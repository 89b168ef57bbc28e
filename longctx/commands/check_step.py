"""`longctx check-step`: names what is wrong with one optimizer step of any trainer."""

import argparse

from longctx.commands.output import a_path
from longctx.errors import UserError

SUMMARY = (
    "Name what is wrong with packing, padding, accumulation or context parallelism in a step "
    "of any trainer"
)
PROCESSES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from longctx.check import command

    command.add_arguments(parser, path=a_path)


def run(arguments: argparse.Namespace) -> int:
    from longctx.check import UsageError, command
    from longctx.parallel.environment import Launch

    Launch.to_join()  # raises UserError for processes that would not join each other
    try:
        return command.run(arguments, passed=(UserError,))
    except UsageError as error:
        raise UserError(str(error)) from error
