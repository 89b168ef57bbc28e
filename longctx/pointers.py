"""Pointers: small texts, and links, that version control keeps in the place of files that are not
here."""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

MOST_BYTES = 4096
"""Size of the largest pointer."""


class Pointer(NamedTuple):
    """What a file is instead of its data; `command` gets the data."""

    tool: str
    command: str


LFS = Pointer("Git LFS", "git lfs pull")
DVC = Pointer("DVC", "dvc pull")
ANNEX = Pointer("git-annex", "git annex get")
XET = Pointer("git-xet", "git xet checkout")
_BEGINNINGS = (
    (re.compile(rb"version https://(git-lfs|hawser)\.github\.com/spec/v\d"), LFS),
    (
        re.compile(
            rb"(md5: \w+\r?\n|frozen: \w+\r?\n|wdir: .+\r?\n)*outs:\r?\n *- "
            rb"*(md5|hash|etag|path|size): "
        ),
        DVC,
    ),
    (re.compile(rb"/annex/objects/[A-Z0-9]+-"), ANNEX),
    (re.compile(rb"# xet version \d"), XET),
)
_DVC_PATH = re.compile(r"^[ -]*path: *['\"]?(.+?)['\"]?\s*$", re.MULTILINE)


def pointer(file: Path) -> Pointer | None:
    """Returns what a file, or a link to no file, stands for; None: it is no pointer."""
    if file.is_symlink() and not file.exists():
        if "annex/objects" in Path(os.readlink(file)).as_posix():
            return ANNEX
        return None
    if not file.is_file() or file.stat().st_size > MOST_BYTES:
        return None
    with file.open("rb") as stream:
        content = stream.read(MOST_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
    return next((kind for beginning, kind in _BEGINNINGS if beginning.match(content)), None)


def missing_of_dvc(file: Path) -> list[Path]:
    """Returns the files and folders that a .dvc file stands for and that are not here."""
    named = _DVC_PATH.findall(file.read_text("utf-8", "replace")) or [file.stem]
    return [file.parent / name for name in named if not (file.parent / name).exists()]


def complaint(files: Iterable[Path]) -> str:
    """Returns what is wrong with those files that are pointers, and the way out; an empty text if
    none is one."""
    found: dict[Pointer, list[str]] = {}
    for file in files:
        if (kind := pointer(file)) is not None:
            found.setdefault(kind, []).append(str(file))
    said = []
    for kind, names in found.items():
        few = ", ".join(names[:3]) + (", .." if len(names) > 3 else "")
        are = f"{len(names):,} files are pointers" if len(names) > 1 else "a file is a pointer"
        said.append(
            f"{are} of {kind.tool}, not the data ({few}): get the data with `{kind.command}`, or "
            "remove the pointer"
        )
    return "; ".join(said)
