"""`longctx config`: the settings of a run, with type, meaning and default."""

import argparse

from longctx.config import describe
from longctx.config.run import SECTIONS
from longctx.errors import UserError

SUMMARY = "Show the settings of a run, of all sections or of some"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"{', '.join(SECTIONS)} (default: all of them)")


def run(arguments: argparse.Namespace) -> int:
    for section in arguments.sections:
        if section not in SECTIONS:
            raise UserError(f"there is no section {section!r} of settings: choose from {', '.join(SECTIONS)}")
    print(describe(arguments.sections or SECTIONS))
    return 0
