"""Once: of the files of a folder, those that are data, each read once.

Left out, by name and count: what a program has not finished, or keeps for itself; links to files,
and copies of records, that are read; compressed records beside the same ones as they are. Refused:
pointers without their data, tables of which only a log tells the current files, and shards of two
versions. Told: shards that are missing, and records in two formats.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from longctx.data.records.readers import (
    COMPRESSED,
    MEGATRON,
    READERS,
    CorpusError,
    ending_of,
    lines,
)
from longctx.pointers import DVC, complaint, missing_of_dvc, pointer
from longctx.remote import RemotePath

NAMED = 3
"""Number of files that are named of each kind."""
LOGS = {"_delta_log": "Delta Lake", ".hoodie": "Hudi"}
"""Folders beside the files of a table that tell which of them are current."""
_ICEBERG = ".metadata.json"
_PARTLY = {"tmp", "incomplete", "inprogress", "partial", "unfinished", "crdownload"}
_ENDINGS = {*_PARTLY, "part", "temp", "aria2", "lock", "swp"}
_FOLDERS = {"_temporary", "_tmp", "_spark_metadata", "__macosx", "$recycle.bin", "lost+found"}
_OF_WRITERS = re.compile(
    r"_SUCCESS|_(common_)?metadata|_(started|committed)_\w+|.*_\$folder\$|~\$.*|#.*#|.*~"
)
_CACHES = re.compile(r"cache-\w+\.arrow|tmp[a-z0-9_]{8}(\.arrow)?")
_SHARD = re.compile(
    r"(?P<head>.*?)(?P<number>\d{3,})-of-(?P<total>\d{3,})(-[0-9a-f]{6,})?(?P<rest>(?!.*-of-\d)(\D.*)?)"
)


def named(what: str, files: Sequence[Path], root: Path) -> str:
    """Returns what some files are, with the names of the first."""
    names = [str(file.relative_to(root)) for file in files[:NAMED]]
    return f"{what}: {', '.join(names)}{', ..' if len(files) > NAMED else ''}"


def check_pointers(files: Iterable[Path]) -> None:
    """Raises CorpusError for files to read that are pointers, and for pointers of DVC without their
    data."""
    files = list(files)
    read = [file for file in files if file.suffix.lower() != ".dvc"]
    if said := complaint(read):
        raise CorpusError(said)
    for file in files:
        if (
            file.suffix.lower() == ".dvc"
            and pointer(file) == DVC
            and (missing := missing_of_dvc(file))
        ):
            names = ", ".join(map(str, missing[:NAMED]))
            raise CorpusError(
                f"{file} is a pointer of DVC, and {names} is not there: get the data with "
                f"`{DVC.command}`, or remove it"
            )


def check_tables(folder: Path, folders: Iterable[str], names: Iterable[str]) -> None:
    """Raises CorpusError for the folder of a table that has files of earlier versions among its
    current ones."""
    kinds = [LOGS[name] for name in folders if name in LOGS]
    if folder.name == "metadata" and any(name.endswith(_ICEBERG) for name in names):
        kinds.append("Iceberg")
        folder = folder.parent
    for kind in kinds:
        raise CorpusError(
            f"{folder} is a table of {kind}, of which only its log tells which files are current: "
            "write the current version as Parquet files into a folder of its own"
        )


def finished(files: Sequence[Path], root: Path, not_read: Counter[str]) -> list[Path]:
    """Returns the files without those that a program has not finished, or keeps for itself. Counts
    these in `not_read`."""
    groups: dict[str, list[Path]] = {}
    kept = []
    for file in files:
        what = _leftover(file.relative_to(root))
        if what:
            groups.setdefault(what, []).append(file)
        else:
            kept.append(file)
    for what, left in groups.items():
        not_read[named(what, left, root)] += len(left)
    return kept


def _leftover(file: Path) -> str:
    """Returns what a file is, if it is no data by its path; otherwise an empty text."""
    for folder in file.parts[:-1]:
        if folder.lower() in _FOLDERS or _is_unfinished(folder):
            return "in a folder of what is not finished, or deleted"
    if _CACHES.fullmatch(file.name):
        return "cache of `datasets`"
    if _OF_WRITERS.fullmatch(file.name):
        return "no data but a note of a program"
    if _is_unfinished(file.name):
        return "not finished, by the name"
    return ""


def _is_unfinished(name: str) -> bool:
    """Returns whether the name of a file or folder says that its writer has not finished it."""
    first, *others = name.lower().split(".")
    return bool(first and others) and (others[-1] in _ENDINGS or bool(_PARTLY & {*others}))


def once(files: Sequence[Path], root: Path, not_read: Counter[str], *, as_text: bool) -> list[Path]:
    """Returns the files without those that have the same content as another one. Counts these in
    `not_read`.

    Texts may be the same, but not the same file. Raises CorpusError for compressed records that
    differ from those as they are.
    """
    links = _links(files)
    kept = [file for file in files if file not in links]
    records = [] if as_text else [file for file in kept if ending_of(file) in READERS]
    packed = _packed(records)
    copies = _copies([file for file in records if file not in packed])
    for what, left in (
        ("link to a file that is read already", links),
        ("the same records, compressed", packed),
        ("copy of records that are read already", copies),
    ):
        if left:
            not_read[named(what, sorted(left), root)] += len(left)
    return [file for file in kept if file not in packed and file not in copies]


def _links(files: Sequence[Path]) -> set[Path]:
    """Returns the symbolic and hard links to files that are read by another path."""
    paths: dict[tuple[int, int], list[Path]] = {}
    for file in files:
        status = file.stat()
        if status.st_ino:  # some file systems have no numbers
            paths.setdefault((status.st_dev, status.st_ino), []).append(file)
    links: set[Path] = set()
    for same in paths.values():
        same.sort(key=lambda file: file.is_symlink())  # the file itself comes first
        links.update(same[1:])
    return links


def _packed(records: Sequence[Path]) -> set[Path]:
    """Returns compressed files of the same records as another file of the same name, but for the
    compression."""
    names: dict[str, list[Path]] = {}
    for file in records:
        names.setdefault(_unpacked_name(file), []).append(file)
    again: set[Path] = set()
    for same in names.values():
        if len({file.suffix.lower() for file in same}) < 2:
            continue
        read: dict[str, Path] = {}
        for file in sorted(same, key=lambda file: (file.suffix.lower() in COMPRESSED, file)):
            digest = _digest(file)
            if digest in read:
                again.add(file)
                continue
            beside = [other for other in read.values() if other.parent == file.parent]
            if beside:
                raise CorpusError(
                    f"{file} and {beside[0]} have the same name but for the compression, and "
                    "different records: remove the one that is out of date, or rename it"
                )
            read[digest] = file
    return again


def _unpacked_name(file: Path) -> str:
    if file.suffix.lower() in COMPRESSED:
        return file.stem
    return file.name


def _copies(records: Sequence[Path]) -> set[Path]:
    """Returns files that have every byte of another one; of Megatron's two files, both have."""
    sizes: dict[tuple[int, ...], list[Path]] = {}
    for file in records:
        if file.suffix.lower() != MEGATRON[1]:
            sizes.setdefault(tuple(each.stat().st_size for each in _whole(file)), []).append(file)
    copies: set[Path] = set()
    for size, same in sizes.items():
        if len(same) < 2 or not sum(size):
            continue
        read = set[tuple[str, ...]]()
        for file in same:
            digests = tuple(map(_bytes_digest, _whole(file)))
            if digests in read:
                copies.update(_whole(file))
            read.add(digests)
    return copies


def _whole(file: Path) -> list[Path]:
    """Returns the file, and of Megatron's .idx file the .bin file with the tokens, too."""
    beside = file.with_suffix(MEGATRON[1])
    if file.suffix.lower() == MEGATRON[0] and beside.is_file():
        return [file, beside]
    return [file]


def _bytes_digest(file: Path) -> str:
    if isinstance(file, RemotePath):  # which is not read twice to tell copies
        return file.state().version
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _digest(file: Path) -> str:
    """Returns the SHA-256 (hex) of a file's content, decompressed."""
    digest = hashlib.sha256()
    for line in lines(file):
        digest.update(line)
    return digest.hexdigest()


def told(files: Sequence[Path], root: Path) -> dict[str, int]:
    """Returns what to know of files that are read, with counts. Raises CorpusError for shards of
    two versions."""
    return _missing_shards(files) | _in_two_formats(files, root)


def _missing_shards(files: Sequence[Path]) -> dict[str, int]:
    """Returns the shards that are missing. Raises CorpusError for shards of two versions."""
    sets: dict[tuple[Path, str, str], dict[int, dict[int, Path]]] = {}
    for file in files:
        found = _SHARD.fullmatch(file.name)
        if found is None or ending_of(file) not in READERS or file.suffix.lower() == MEGATRON[1]:
            continue
        number = int(found["number"])
        total = int(found["total"])
        known = sets.setdefault((file.parent, found["head"], found["rest"]), {}).setdefault(
            total, {}
        )
        if number in known:
            raise CorpusError(
                f"{known[number]} and {file} are the same shard in two versions: remove the one "
                "that is out of date"
            )
        known[number] = file
    missing: dict[str, int] = {}
    for (folder, head, rest), totals in sets.items():
        if len(totals) > 1:
            several = " and ".join(
                f"{total:,} ({min(each.values()).name})" for total, each in sorted(totals.items())
            )
            raise CorpusError(
                f"{folder} has shards {head}*{rest} of {several}: remove those that are out of date"
            )
        for total, present in totals.items():
            first = int(total in present)  # some writers count from 1
            absent = [number for number in range(first, first + total) if number not in present]
            if absent:
                names = ", ".join(f"{number:05d}" for number in absent[:NAMED]) + (
                    ", .." if len(absent) > NAMED else ""
                )
                missing[f"shards of {head}*-of-{total:05d}{rest} that are not there: {names}"] = (
                    len(absent)
                )
    return missing


def _in_two_formats(files: Sequence[Path], root: Path) -> dict[str, int]:
    """Returns the files of records whose name another file has, too, but for the ending."""
    stems: dict[Path, list[Path]] = {}
    for file in files:
        if file.suffix.lower() not in MEGATRON:
            stems.setdefault(file.with_name(Path(_unpacked_name(file)).stem), []).append(file)
    twice: list[Path] = []
    for same in stems.values():
        endings = set(map(ending_of, same))
        if len(same) > 1 and endings & READERS.keys():
            twice += same
    what = "files that may hold the same records in two formats, all read"
    if twice:
        return {named(what, twice, root): len(twice)}
    return {}
