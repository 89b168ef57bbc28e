"""Versions of transformers and TRL that trainers need."""

import re
from importlib.metadata import version

LEAST = {"transformers": (5, 6), "trl": (1, 15)}
"""The first versions with what is replaced: of TRL, its fused head."""
NEWEST = {"transformers": (5, 24), "trl": (1, 16)}
"""The last ones that were tried."""


def is_too_old(package: str) -> bool:
    """Returns whether an installed package is older than what is replaced in it."""
    found = re.match(r"(\d+)\.(\d+)", version(package))
    return found is not None and (int(found[1]), int(found[2])) < LEAST[package]


def span(package: str) -> str:
    """Returns the first and the last version that were tried, as `5.6 to 5.24`."""
    first, last = (".".join(map(str, versions[package])) for versions in (LEAST, NEWEST))
    return f"{first} to {last}"
