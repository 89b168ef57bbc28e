"""In place: files of tokens that Megatron's `preprocess_data.py` or datatrove wrote become a store
where they are, without a copy.

Index, checksums, tokenizer and manifest are written beside them. A file is read if its documents
lie one behind the other:

    NAME.bin and NAME.idx       Megatron, tokens in uint16 or int32; see `records/megatron.py`
    NAME.ds and NAME.ds.index   datatrove, in uint16 or uint32; the end of every document in tokens
                                (uint64)
"""

import hashlib
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from longctx.arguments import a_path, callable_, checked, flag, or_none
from longctx.checksums import CHUNK, checksums
from longctx.data.records.corpus import Corpus
from longctx.data.records.formats import TOKEN_IDS
from longctx.data.records.megatron import MegatronIndex
from longctx.data.records.readers import CorpusError
from longctx.data.store.documents import in_place_names
from longctx.data.store.folder import present
from longctx.data.store.held_out import halves
from longctx.data.store.index import BATCH, BATCHES, LENGTHS, NAMES, write_groups
from longctx.data.store.manifest import (
    MANIFEST,
    TOKEN_TYPES,
    TOKENIZER,
    TOKENIZER_FILES,
    Counts,
    Manifest,
    StoreError,
    files_of_store,
    is_store,
)
from longctx.data.store.prepare import Prepared, copy_files, unnamed
from longctx.data.store.request import RULES, StoreRequest
from longctx.data.store.writer import Progress
from longctx.own_files import MOVE_AWAY
from longctx.paths import local_path

BLOCK = 1 << 24
"""Tokens that are looked at at once."""


class TokenFile(NamedTuple):
    """A file of nothing but tokens.

    Attributes:
        kind: their type in the file.
        ends: int64 [documents], the end of each document in tokens; each has a token.
        empty: number of documents without one, which are left out.
    """

    file: Path
    kind: np.dtype[Any]
    ends: npt.NDArray[np.int64]
    empty: int

    @classmethod
    def of_ends(cls, file: Path, kind: np.dtype[Any], ends: npt.NDArray[np.int64]) -> "TokenFile":
        """Returns a file whose documents lie one behind the other, some of them empty. Raises
        ValueError if they do not."""
        lengths = np.diff(ends, prepend=0)
        if (lengths < 0).any():
            raise ValueError("its documents are not in order")
        has_tokens = lengths > 0
        empty = len(ends) - int(has_tokens.sum())
        return cls(file, kind, ends=ends[has_tokens], empty=empty)

    @classmethod
    def of_megatron(cls, file: Path) -> "TokenFile":
        """Returns a .bin file. Raises ValueError for one that the .idx file does not describe, or
        whose tokens are of another type."""
        known = MegatronIndex.of(file.with_suffix(".idx"))
        kind = known.kind
        if kind not in map(np.dtype, TOKEN_TYPES.values()):
            raise ValueError(f"its tokens are {kind}, but must be uint16 or int32")
        stops = np.zeros(len(known.lengths) + 1, np.int64)
        np.cumsum(known.lengths, out=stops[1:])
        begins = stops[:-1] * kind.itemsize
        if (known.starts != begins).any():
            raise ValueError("its documents do not lie one behind the other")
        last = int(stops[-1])
        end = last * kind.itemsize
        state = file.stat()
        size = state.st_size
        if size != end:
            raise ValueError(f"its documents end at byte {end:,} of {size:,}")
        return cls.of_ends(file, kind, stops[known.firsts[1:]])

    @classmethod
    def of_datatrove(cls, file: Path) -> "TokenFile":
        """Returns a .ds file, whose size says how wide a token is. Raises ValueError if its index
        does not fit, or if a mask hides tokens from the loss."""
        if file.with_suffix(".ds.loss").exists():
            raise ValueError("it has a mask of the loss, which is not read")
        index = np.fromfile(file.with_suffix(".ds.index"), "<u8")
        ends = index.astype(np.int64)
        tokens = int(ends[-1:].sum())
        size = file.stat().st_size
        for width, kind in TOKEN_TYPES.items():
            if tokens * width == size:
                return cls.of_ends(file, np.dtype(kind), ends)
        raise ValueError(f"its index is of {tokens:,} tokens, but it has {size:,} bytes")

    @property
    def index_file(self) -> Path:
        """The file beside it that says where documents end."""
        if self.file.suffix == ".ds":
            return self.file.with_suffix(".ds.index")
        return self.file.with_suffix(".idx")

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of every document."""
        return np.diff(self.ends, prepend=0)

    def batches(self, part: int, first: int) -> npt.NDArray[Any]:
        """Returns the spans of bytes in which documents are read, BATCH `[spans]`: those of the
        documents that begin in the same chunk of the checksums.

        `part` is the number of the file, `first` that of its first document in the store.
        """
        width = self.kind.itemsize
        stops = self.ends * width
        begins = stops - self.lengths * width
        chunks = begins // CHUNK
        _, firsts = np.unique(chunks, return_index=True)
        lasts = np.append(firsts[1:], len(stops)) - 1
        found = np.zeros(len(firsts), BATCH)
        found["document"] = first + firsts
        found["begin"] = begins[firsts]
        found["end"] = stops[lasts]
        found["part"] = part
        return found

    def largest(self) -> int:
        """Returns the largest token, or one below 0."""
        tokens = np.memmap(self.file, self.kind, "r")
        found = 0
        for start in range(0, len(tokens), BLOCK):
            block = tokens[start : start + BLOCK]
            if block.min() < 0:
                return int(block.min())
            found = max(found, int(block.max()))
        return found


@checked(
    StoreError,
    source=a_path,
    overwrite=flag,
    progress=callable_,
    tokenizer=a_path,
    end_of_document=or_none(RULES["end_of_document"]),
)
def prepare_in_place(
    source: Path | str,
    tokenizer: Path | str,
    *,
    end_of_document: str | None = None,
    overwrite: bool = False,
    progress: Progress = lambda stage, share: None,
) -> Prepared:
    """Makes a store of the token files in a folder, or of a single one, in their own folder.

    `tokenizer`, which they were made with, and `end_of_document`: as in `StoreRequest`. `overwrite`
    replaces what an earlier call has written.

    Raises CorpusError for files that cannot be read in place, TokenizerError, and StoreError if
    other files have the names of a store's.
    """
    path = local_path(source)
    files = _token_files(path)
    folder = files[0].file.parent
    paths = []
    for each in files:
        paths.append(each.file)
        paths.append(each.index_file)
    corpus = Corpus(str(path), "files", root=folder, files=tuple(paths))
    request = StoreRequest(corpus, str(tokenizer), end_of_document=end_of_document)
    if request.given is None:
        raise unnamed(corpus)
    listing = request.digest(corpus.listing(with_times=True))

    def matches(manifest: Manifest) -> bool:
        return manifest.request == listing

    if is_store(folder) and (manifest := present(folder, matches, overwrite)) is not None:
        return Prepared(manifest, made=False)
    known = _checksums(files, request, progress)
    partial = Path(tempfile.mkdtemp(dir=folder, prefix=".longctx-"))
    try:
        counts = _write(partial, files, request)
        sizes = {each.file.name: each.file.stat().st_size for each in files}
        for name in _names_in(partial):
            sizes[name] = (partial / name).stat().st_size
        sums = dict(known)
        for name in _names_in(partial):
            sums[name] = checksums(partial / name)
        contents = "".join(known.values())
        contents += sums[LENGTHS]
        source_print = hashlib.sha256(contents.encode()).hexdigest()
        fingerprint = request.fingerprint(request.given, source_print)
        manifest = Manifest(
            **vars(counts),
            request=listing,
            fingerprint=fingerprint,
            source=str(path),
            tokenizer_fingerprint=request.given.fingerprint,
            vocab_size=request.given.vocab_size,
            end_of_document_token=request.given.end_of_document_token,
            files=sizes,
            checksums=sums,
            formats={TOKEN_IDS: counts.documents},
            empty_documents=sum(each.empty for each in files),
        )
        _put_beside(folder, partial, manifest)
    finally:
        shutil.rmtree(partial)
    return Prepared(manifest, made=True)


def _token_files(path: Path) -> list[TokenFile]:
    """Returns the token files of a folder, or the one at a path, sorted as parts of a store; those
    without a document are left out.

    Raises CorpusError for one that cannot be read in place, and if there is none.
    """
    listed = [path]
    if path.is_dir():
        listed = sorted(path.iterdir())
    found = {}
    for file in listed:
        try:
            if file.suffix in (".bin", ".idx") and file.with_suffix(".idx").exists():
                tokens = file.with_suffix(".bin")
                found[tokens.name] = TokenFile.of_megatron(tokens)
            elif file.suffix == ".ds":
                found[file.name] = TokenFile.of_datatrove(file)
        except (ValueError, OSError) as error:
            way_out = "give the files as they were written"
            if file.suffix != ".ds":
                way_out += ", or prepare it without --in-place"
            raise CorpusError(f"{file} cannot be read in place: {error}; {way_out}") from error
    if not sum(len(each.ends) for each in found.values()):
        raise CorpusError(
            f"{path} has no document in NAME.bin with NAME.idx, or NAME.ds with NAME.ds.index: "
            "give a file or folder of Megatron's or datatrove's tokens"
        )
    return [found[name] for name in sorted(found) if len(found[name].ends)]


def _checksums(
    files: Sequence[TokenFile], request: StoreRequest, progress: Progress
) -> dict[str, str]:
    """Returns the checksums of token files, by name. Raises CorpusError for a token that the
    tokenizer does not have."""
    assert request.given is not None
    size = request.given.vocab_size
    sums = {}
    for number, each in enumerate(files):
        progress("reading tokens", number / len(files))
        token = each.largest()
        if not 0 <= token < size:
            raise CorpusError(
                f"{each.file} has token {token}, but its tokenizer has {size:,} tokens: give the "
                "one that it was made with (--tokenizer)"
            )
        sums[each.file.name] = checksums(each.file)
    progress("reading tokens", 1)
    return sums


def _write(folder: Path, files: Sequence[TokenFile], request: StoreRequest) -> Counts:
    """Writes index and tokenizer into a folder. Returns what the documents add up to.

    The index is made in memory: some 30 bytes a document, and its name.
    """
    lengths = np.concatenate([each.lengths for each in files])
    np.save(folder / LENGTHS, lengths.astype("<i4"))
    names = []
    for each in files:
        names += in_place_names(each.file.name, range(len(each.ends)))
    np.save(folder / NAMES, halves(names))
    write_groups(folder, lengths)
    batches = []
    first = 0
    for part, each in enumerate(files):
        batches.append(each.batches(part, first))
        first += len(each.ends)
    np.save(folder / BATCHES, np.concatenate(batches))
    assert request.given is not None
    request.given.save(folder / TOKENIZER)
    if request.pretrained is not None:
        copy_files(folder / TOKENIZER_FILES, request.pretrained, request.templates)
    longest = int(lengths.argmax())
    tokens = int(lengths.sum())
    return Counts(
        documents=len(lengths),
        tokens=tokens,
        trained_tokens=tokens - len(lengths),
        longest_name=names[longest],
        longest_length=int(lengths[longest]),
        lightest=1.0,
        heaviest=1.0,
    )


def _put_beside(folder: Path, partial: Path, manifest: Manifest) -> None:
    """Moves what was made beside the token files, in the place of what an earlier call has made.
    The manifest comes first: by it a later call knows what an interrupted one has moved.

    Raises StoreError for files of others, and moves nothing.
    """
    own = set[str]()
    if is_store(folder):
        own.update(files_of_store(folder))
    made = _names_in(partial)
    for name in (MANIFEST, *made):
        is_of_others = name not in own and (folder / name).exists()
        if is_of_others:
            raise StoreError(f"{folder / name} is not of a store, and is not replaced: {MOVE_AWAY}")
    for name in own:
        (folder / name).unlink(missing_ok=True)
    manifest.save(folder)
    for name in made:
        place = folder / name
        place.parent.mkdir(exist_ok=True)
        (partial / name).rename(place)


def _names_in(folder: Path) -> list[str]:
    """Returns the names of all files of a folder and its folders."""
    names = []
    for file in folder.rglob("*"):
        if file.is_file():
            names.append(file.relative_to(folder).as_posix())
    return names
