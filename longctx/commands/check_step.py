"""`longctx check-step`: names what is wrong with one optimizer step of any trainer."""

import argparse

from longctx.check.errors import UsageError
from longctx.check.options import SUMMARY, check_given
from longctx.check.options import add_arguments as add_options
from longctx.check.template import give
from longctx.commands.output import a_path
from longctx.errors import UserError

__all__ = ["SUMMARY", "add_arguments", "run"]
PROCESSES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, path=a_path)


def run(arguments: argparse.Namespace) -> int:
    from longctx.parallel.environment import Launch

    try:
        check_given(arguments)
        if arguments.template is not None:
            give(arguments.template, program=arguments.program, path=arguments.out)
            return 0
        Launch.to_join()  # raises UserError for processes that would not join each other
        from longctx.check import command  # and torch, which takes seconds

        return command.run(arguments, passed=(UserError,))
    except UsageError as error:
        raise UserError(str(error)) from error
