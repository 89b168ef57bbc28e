"""`longctx config`: every setting with type, meaning and default, or what a file sets."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from longctx.config import Config, describe, load
from longctx.config.names import FIELDS, SETTINGS
from longctx.config.problems import yaml_text
from longctx.config.run import SECTIONS
from longctx.errors import UserError

SUMMARY = "Show every setting with type, meaning and default, or what a YAML file sets"
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sections = (
        f"{', '.join(SECTIONS)} (default: all of them); a setting, such as context.mode; or "
        "a YAML file of settings"
    )
    parser.add_argument("names", nargs="*", metavar="SECTION", help=sections)
    parser.add_argument(
        "--schema",
        action="store_true",
        help="print the JSON schema of a settings file, by which editors complete and check it",
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.schema:
        if arguments.names:
            raise UserError("--schema is of all settings: omit the names")
        print(json.dumps(schema(), indent=1))
        return 0
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


def schema() -> dict[str, Any]:
    """Returns the JSON schema of a settings file. Rules between settings are not in it."""
    of_config = Config.model_json_schema()
    for name, section in of_config["properties"].items():
        # As `load` reads it: a section whose lines are all commented out is null.
        of_config["properties"][name] = {
            "description": section.get("description", SECTIONS[name].__doc__),
            "anyOf": [{"$ref": section["$ref"]}, {"type": "null"}],
        }
    of_config["title"] = "longctx"
    of_config["description"] = "Settings of a run of longctx"
    return {"$schema": DIALECT, **of_config}


def _not_default(config: Config) -> Iterator[str]:
    for name, setting in SETTINGS.items():
        value = config.value_of(name)
        if value != setting.default:
            yield f"  {name}: {yaml_text(value)}  # default: {yaml_text(setting.default)}"
