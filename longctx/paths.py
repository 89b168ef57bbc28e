"""Paths as people write them: `~` and `$NAME` are expanded, `file://` is a path, and addresses of
storage are refused where only folders of this machine are read or written (`remote.py` has where
not).

A shell expands neither in `--train.run_dir=~/runs`, nor in a file of settings or in Python, and a
folder named `~` or `s3:` is nobody's intention.
"""

import os
import re
from pathlib import Path

from longctx.errors import UserError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
_SECRETS = (
    (re.compile(r"(?<=:/)(/?)[^/@\s]+@"), r"\1***@"),
    (re.compile(r"(://[^?\s]*\?)[^\s'\")]+"), r"\1***"),
)
"""What may be a key in an address: a user with a password, and what is asked for."""
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


class PathError(UserError):
    """A path that cannot be meant as it is written; `rule` and `way_out` are the parts of its
    text."""

    def __init__(self, given: str, rule: str, way_out: str) -> None:
        super().__init__(f"{redacted(given)}: {rule}; {way_out}")
        self.rule = rule
        self.way_out = way_out


def redacted(text: str) -> str:
    """Returns a text without keys in the addresses that it contains."""
    for secret, instead in _SECRETS:
        text = secret.sub(instead, text)
    return text


def scheme_of(text: str) -> str:
    """Returns the scheme of an address, in lower case; empty of a path."""
    scheme = _SCHEME.match(text)
    if scheme is None:
        return ""
    return scheme[1].lower()


def local_path(given: Path | str) -> Path:
    """Returns a path of this machine with `~` and `$NAME` expanded. See `expanded`."""
    return Path(expanded(given))


def expanded(given: Path | str) -> str:
    """Returns a path, or another name that may be given in its place, with a leading `~` and every
    `$NAME` expanded.

    What exists as it is written stays as it is. Raises PathError for an address such as
    s3://bucket/x, a variable that is not set, and a user who does not exist.
    """
    if not isinstance(given, str | Path):
        raise PathError(repr(given), "a path must be a text", "give a str or a pathlib.Path")
    text = str(given)
    if scheme_of(text) == "file":
        host, slash, rest = text.partition(":")[2].removeprefix("//").partition("/")
        if host or not slash:
            raise PathError(text, "it names another machine, or no path", "write file:///PATH")
        return "/" + rest.lstrip("/")
    if scheme := scheme_of(text):
        raise _elsewhere(text, scheme)
    if not ("~" in text or "$" in text) or os.path.lexists(text):
        return text
    for match in _VARIABLE.finditer(text):
        is_set = os.path.expandvars(match[0]) != match[0]
        if not is_set:
            name = match[1] or match[2]
            rule = f"the environment variable {name} is not set"
            raise PathError(text, rule, "set it, or write the path without it")
    filled = os.path.expandvars(text)
    if not filled:
        raise PathError(
            text, "its environment variable is empty", "set it, or write the path without it"
        )
    home = os.path.expanduser(filled)
    if home == filled and filled.startswith("~"):
        user = filled.partition("/")[0]
        raise PathError(
            text, f"this machine has no home folder of {user}", "write the path without it"
        )
    return home


def is_hub_name(name: str) -> bool:
    """Returns whether a name may be OWNER/NAME on the hub: none has other slashes, begins like a
    path, or lies in the folder of runs, which `train.run_dir` names by default."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~", "runs/"))


def no_run(folder: Path) -> str:
    """Returns the words for a run folder that does not exist."""
    return f"run folder {folder} not found: give the train.run_dir of a run"


def _elsewhere(text: str, scheme: str) -> PathError:
    """Returns the error of an address of a storage."""
    if scheme == "hf":
        way_out = (
            "write OWNER/NAME of a model or data set on the hub, or download it and give the folder"
        )
        return PathError(text, "hf:// is read as source of data only", way_out)
    rule = f"folders of this machine are read and written here, and not {scheme}://"
    return PathError(
        text, rule, "give a folder, such as a mounted one, and copy it from or to there"
    )
