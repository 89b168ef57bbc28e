"""Own files: the list of what longctx has written into a folder, and the replacement of these files
alone.

Whatever else lies in a folder that is replaced stays there, and is named. A store lists its files
in its manifest, an export in `longctx-files.json`.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path

from longctx.checksums import checksums, sealed, unsealed
from longctx.errors import UserError

LIST = "longctx-files.json"
"""File with the checksums of every other file that longctx has written into a folder."""
MOVE_AWAY = "move it away, or choose another folder"
"""What to do about files of other people."""


class NotReplaced(UserError):
    """A folder with something of other people that would have to be replaced."""


def write_list(folder: Path) -> None:
    """Writes the list of all files that are in a folder now."""
    written = {name: checksums(folder / name) for name in others(folder, own=[LIST])}
    (folder / LIST).write_text(json.dumps(sealed({"files": written}), indent=1) + "\n", "utf-8")


def begin_list(folder: Path) -> None:
    """Writes a list without a file, by which a folder that is being written is known as longctx's
    own."""
    (folder / LIST).write_text(list_of({}), "utf-8")


def list_of(files: Mapping[str, str]) -> str:
    """Returns the text of a list of files, given with their checksums."""
    return json.dumps(sealed({"files": dict(files)}))


def read_list(folder: Path) -> dict[str, str] | None:
    """Returns the checksums of longctx's files in a folder by name; None without a list, or with
    one that is damaged."""
    try:
        content = unsealed(json.loads((folder / LIST).read_text("utf-8")))
    except (OSError, ValueError):
        return None
    files = content.get("files")
    if isinstance(files, dict):
        return files
    return None


def changed(folder: Path, listed: Mapping[str, str]) -> list[str]:
    """Returns the names of listed files that are no longer as longctx wrote them. Files that are
    gone do not count."""
    present = [name for name in listed if (folder / name).is_file()]
    return [name for name in present if checksums(folder / name) != listed[name]]


def others(folder: Path, own: Collection[str]) -> list[str]:
    """Returns the names of all files, links and empty folders that are not `own`, relative to the
    folder, sorted."""
    found: list[str] = []
    for parent, folders, files in os.walk(folder):
        links = [name for name in folders if Path(parent, name).is_symlink()]
        names = [Path(parent, name).relative_to(folder).as_posix() for name in (*files, *links)]
        is_empty = not folders and not files and Path(parent) != folder
        if is_empty:
            names.append(Path(parent).relative_to(folder).as_posix())
        found += [name for name in names if name not in own]
    return sorted(found)


def replace(out: Path, made: Path, own: Collection[str]) -> list[str]:
    """Puts the folder `made` in the place of `out`, in which only the files `own` are removed.

    Returns the names of all others, which stay. Raises NotReplaced, with both folders as they were,
    if `made` has a file of the same name.
    """
    staying = others(out, own=own) if out.is_dir() else []
    for name in staying:
        place = made / name
        in_the_way = [
            parent for parent in place.relative_to(made).parents if (made / parent).is_file()
        ]
        if os.path.lexists(place) or in_the_way:
            raise NotReplaced(
                f"{out / name} was not written by longctx, and is not replaced: {MOVE_AWAY}"
            )
    for name in staying:
        _link(out / name, made / name)
    if not out.exists():
        made.rename(out)
        return []
    aside = Path(tempfile.mkdtemp(dir=out.parent, prefix=f"{out.name}.old-"))
    out.rename(aside / out.name)
    try:
        made.rename(out)
    except OSError:
        (aside / out.name).rename(out)
        aside.rmdir()
        raise
    shutil.rmtree(aside)  # what stays has its name in `out` by now
    return staying


def _link(source: Path, target: Path) -> None:
    """Gives a file, link or empty folder a second name, or copies it where the file system has no
    links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir() and not source.is_symlink():
        target.mkdir()
        return
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def that_stay(names: list[str]) -> str:
    """Returns words on what stays in a folder that was replaced; empty if nothing does."""
    if not names:
        return ""
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{shown}: not written by longctx, left there"
