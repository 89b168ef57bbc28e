"""`longctx config`: every setting with type, meaning and default, or what a file sets."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from longctx.config import Config, describe, load
from longctx.config.names import FIELDS, SETTINGS
from longctx.config.problems import yaml_text
from longctx.config.run import SECTIONS
from longctx.errors import UserError

SUMMARY = "Show every setting with type, meaning and default, or what a YAML file sets"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sections = (
        f"{', '.join(SECTIONS)} (default: all of them); a setting, such as context.mode; or "
        "a YAML file of settings"
    )
    parser.add_argument("names", nargs="*", metavar="SECTION", help=sections)


def run(arguments: argparse.Namespace) -> int:
    for name in arguments.names:
        if Path(name).is_file():
            print(
                f"settings of {name} that are not at their defaults:",
                *_not_default(load(name)),
                sep="\n",
            )
        elif name not in SECTIONS and name not in FIELDS:
            raise UserError(
                f"there is no section or setting {name!r}, nor such a file: sections are "
                f"{', '.join(SECTIONS)}"
            )
    if names := [name for name in arguments.names if not Path(name).is_file()] or (
        [] if arguments.names else SECTIONS
    ):
        print(describe(names))
    return 0


def _not_default(config: Config) -> Iterator[str]:
    for name, setting in SETTINGS.items():
        value = config.value_of(name)
        if value != setting.default:
            yield f"  {name}: {yaml_text(value)}  # default: {yaml_text(setting.default)}"
