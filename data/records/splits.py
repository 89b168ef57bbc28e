"""Splits: which of the files of a folder are read, by the split that their paths name."""

import json
import re
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from longctx.data.records.readers import READERS, CorpusError, ending_of
from longctx.errors import brief

_ENDINGS = """
    txt text md markdown rst adoc org tex bib htm html xhtml xml srt vtt
    py pyi pyx c h cc cpp cxx hh hpp hxx inl cu cuh cl rs go java kt kts scala groovy clj
    js mjs cjs jsx ts tsx vue css scss less rb php pl pm lua jl r m mm swift cs fs vb hs
    ml mli ex exs erl elm lean v sv vhd f f90 f95 pas asm s sh bash zsh fish ps1 bat
    sql proto thrift graphql yaml yml toml ini cfg conf cmake mk diff patch jinja j2
"""
TEXT_ENDINGS = frozenset(f".{ending}" for ending in _ENDINGS.split())
"""Endings of files that are one text each."""
PLAIN = (".txt", ".text")
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""Split by the word in the path of a file of records, as `datasets` has it."""
_SPLIT = re.compile(rf"(?<![^\W_])(({'|'.join(SPLITS)})(?![^\W\d_])\w*)", re.IGNORECASE)
_SHARD = re.compile(r"(\w+(?:\.\w+)*)-\d{5}-of-\d{5}")
_ABOUT = re.compile(r"(readme|licen[cs]e|notice|citation|changelog|requirements)\b", re.IGNORECASE)


class _Names(NamedTuple):
    """The split that the path of a file names, and the file's own word for it: train and train_sft
    of `train_sft/a.parquet`; empty if it names none."""

    split: str
    own: str


_TRAIN = _Names("train", "train")


def files_of_split(
    source: str,
    root: Path,
    *,
    files: Sequence[Path],
    split: str | None,
    not_read: Counter[str],
) -> list[Path]:
    """Returns the files to read: texts by their endings, and the records of one split.

    Args:
        source: What the user named, for errors.
        root: Folder of the files.
        files: Files under `root`, in the order in which they are read.
        split: Split to read; None: train.
        not_read: The other files are counted here, by reason.
    """
    records = {file for file in files if _has_records(file)}
    # Such as train.txt and valid.txt.
    texts = [
        file
        for file in files
        if file.suffix.lower() in PLAIN and file.stem.lower() in SPLITS and file not in records
    ]
    names = {file: _names_of(file, root) for file in (*records, *texts)}
    if all(named.split != "train" for named in names.values()):
        names = {file: named if all(named) else _TRAIN for file, named in names.items()}
    by_own_names = (split or "train") in {named.own for named in names.values()}
    if by_own_names:
        split_of = {file: named.own for file, named in names.items()}
    else:
        split_of = {file: named.split for file, named in names.items()}
    there = set(split_of.values())
    if len(there) > 1 or split is not None:
        every_name = {name for named in names.values() for name in named if name}
        chosen = chosen_split(source, split, sorted(every_name))
    else:
        chosen = "".join(there)
    if split is None and not by_own_names:
        _refuse_several(source, chosen, list(names.values()))
    read = []
    for file in files:
        reason = _reason_to_leave(
            file, split_of.get(file), chosen=chosen, beside_records=bool(records)
        )
        if reason is None:
            read.append(file)
        else:
            not_read[reason] += 1
    return read


def _has_records(file: Path) -> bool:
    return ending_of(file) in READERS and not file.stem.lower().startswith("dataset_info")


def _names_of(file: Path, root: Path) -> _Names:
    words = _SPLIT.findall(str(file.relative_to(root)))
    own, word = words[-1] if words else ("", "")
    shard = _SHARD.match(file.name) if file.parent.name == "data" else None
    name = shard[1] if shard else own.rstrip("_0123456789")
    return _Names(split=SPLITS.get(word.lower(), name), own=SPLITS.get(name.lower(), name))


def _refuse_several(source: str, chosen: str, names: Sequence[_Names]) -> None:
    """Raises CorpusError if files of the chosen split have several words for it."""
    several = sorted({named.own for named in names if named.split == chosen})
    if len(several) > 1:
        raise CorpusError(
            f"source {source!r} has {' and '.join(several)}: choose one with --split; --split "
            f"{chosen} reads all"
        )


def _reason_to_leave(
    file: Path, split: str | None, *, chosen: str, beside_records: bool
) -> str | None:
    """Returns why a file is not read; None: it is.

    Args:
        file: The file.
        split: Split that the file has; None: files of its kind have none.
        chosen: Split that is read.
        beside_records: Whether some files of the folder have records.
    """
    if split == chosen:
        return None
    if split is not None:
        return f"split {split}" if split else "no split in the name, beside train"
    ending = file.suffix.lower()
    is_about_others = _ABOUT.match(file.name) is not None
    if beside_records and (is_about_others or ending not in (*PLAIN, ".md")):
        name = file.name if is_about_others or not ending else file.suffix
        return f"{name} beside records"
    if ending in TEXT_ENDINGS:
        return None
    return f"ending {ending}" if ending else "no ending"


def chosen_split(source: str, split: str | None, splits: Collection[str]) -> str:
    """Returns the split to read. Raises CorpusError if there is none of that name."""
    name = split or "train"
    if name not in splits:
        name = SPLITS.get(name.lower(), name)
    if name not in splits:
        raise CorpusError(
            f"source {source!r} has no split {name!r}: choose one with --split, "
            f"{' or '.join(splits) or 'none'}"
        )
    return name


def splits_of(file: Path) -> list[str]:
    """Returns the splits that a `dataset_dict.json` lists. Raises CorpusError if it is damaged."""
    try:
        return [str(split) for split in json.loads(file.read_text("utf-8"))["splits"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorpusError(
            f"{file} is damaged: {brief(error)}; give the folder of one split"
        ) from error
