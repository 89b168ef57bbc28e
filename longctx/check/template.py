"""Files to begin with, one for each kind of trainer: `longctx-check --template ddp -o check.py`."""

from pathlib import Path

from .errors import UsageError

TEMPLATES = (
    "accelerate",
    "context_parallel",
    "data",
    "ddp",
    "fsdp2",
    "lightning",
    "megatron",
    "own",
    "torchtitan",
    "trainer",
    "trl",
    "verl",
)
DISTRIBUTIONS = {
    "accelerate": "accelerate",
    "lightning": "lightning",
    "megatron": "megatron-core",
    "tensordict": "verl",
    "torchtitan": "torchtitan",
    "trl": "trl",
    "verl": "verl",
}
"""Packages that the files import, and that may be absent → what pip installs."""
MARK = "PUT YOURS HERE"
"""Where a user's code goes in the files."""
ROOM = "longctx.check"
"""Name of this package in the files, where longctx is installed."""
PROGRAM = "longctx check-step"
"""Name of the command in the files."""


def text_of(name: str, program: str) -> str:
    """Returns the file of a template as this package and its command `program` are called."""
    path = Path(__file__).with_name("templates") / f"check_{name}.py"
    text = path.read_text(encoding="utf-8")
    return text.replace(ROOM, str(__package__)).replace(PROGRAM, program)


def give(name: str, program: str, path: Path | None) -> None:
    """Prints a template, or writes it to a file and says what comes next. Raises UsageError as
    `write`."""
    if path is None:
        print(text_of(name, program), end="")
        return
    write(name, program=program, path=path)
    option = "--processes 2"
    if name == "data":
        option = "--data"
    print(f"{path}: replace what {MARK} marks, then run {program} {path} {option}")


def write(name: str, program: str, path: Path) -> None:
    """Writes the file of a template. Raises UsageError for a file that exists, or that has the name
    of a package that it imports."""
    if path.exists():
        raise UsageError(f"{path} exists: choose another file, or delete it")
    if path.stem in DISTRIBUTIONS:
        raise UsageError(f"{path} would be imported in place of {path.stem}: choose another name")
    path.write_text(text_of(name, program), encoding="utf-8")


def missing_package(error: ModuleNotFoundError) -> str:
    """Returns what to install, or to import, for a module that is not there; nothing for a module
    that no template imports."""
    package = str(error.name).partition(".")[0]
    if package == "longctx":
        return f"longctx is not installed: import {__package__} in place of {ROOM}"
    if package not in DISTRIBUTIONS:
        return ""
    return f"{package} is not installed: pip install {DISTRIBUTIONS[package]}"
