"""Pieces: the training documents of a store, numbered in its order, without a list of them.

Documents longer than `max_length` are split into pieces, dropped, refused or cut; a piece is
trained as a document of its own, and those without a target are left out. What is held of a store
is the number of pieces before every GROUP-th document; the documents of a group are looked at again
when one of its pieces is asked for.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from longctx.data import TRUNCATED
from longctx.data.store.groups import GROUP
from longctx.errors import UserError

BLOCK = 1 << 18
"""Documents that are read at once, a multiple of GROUP."""
FOUND_AT_ONCE = 1 << 12
"""Pieces that are looked up at once."""

Numbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
LeftOut = Callable[[Any], Mask]
"""Returns which documents of a store no step takes, of a slice of them or of an array of
numbers."""


class SamplerError(UserError):
    """Settings under which no step can be made."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens start … stop - 1 of a document of the store, as a training document of its own, in one
    epoch."""

    document: int
    start: int
    stop: int
    epoch: int = 0

    @property
    def length(self) -> int:
        return self.stop - self.start


class Documents(Protocol):
    """Documents of which the lengths are known; those of the store `source` of several are numbered
    from 0."""

    def size(self, source: int) -> int:
        """Returns the number of documents."""
        ...

    def columns(self, source: int, which: Any) -> tuple[Numbers, Numbers | None]:
        """Returns lengths and targets of documents, of a slice of them or of an array of numbers;
        None if pieces without a target are taken too."""
        ...

    def groups(self, source: int) -> npt.NDArray[Any] | None:
        """Returns what is known of every group, GROUPS `[groups]`; None if nothing is."""
        ...

    def first(self, source: int) -> int:
        """Returns the number of the first document, counted over all stores."""
        ...

    def has_targets(self, documents: Numbers, starts: Numbers, stops: Numbers) -> Mask:
        """Returns which spans have a target as separate documents, by numbers over all stores."""
        ...

    def name(self, document: int) -> str:
        """Returns the name of a document, by its number over all stores."""
        ...


class LengthsAlone:
    """Documents of which nothing but the lengths is known, int64 `[documents]`."""

    def __init__(self, lengths: Numbers) -> None:
        self._lengths = lengths

    def size(self, source: int) -> int:
        return len(self._lengths)

    def columns(self, source: int, which: Any) -> tuple[Numbers, Numbers | None]:
        return self._lengths[which], None

    def groups(self, source: int) -> None:
        return None

    def first(self, source: int) -> int:
        return 0

    def has_targets(self, documents: Numbers, starts: Numbers, stops: Numbers) -> Mask:
        return np.ones(len(documents), np.bool_)

    def name(self, document: int) -> str:
        return str(document)


@dataclass
class Tally:
    """What the documents of a store add up to.

    Attributes:
        documents, long: those that may be taken, and those among them that are too long.
        long_partly: those that are too long and of which some tokens have no loss.
        pieces, tokens, longest: pieces, their tokens, and the length of the longest piece.
        longest_document, longest_partly: the longest of the documents that are too long, and of
            those with tokens without loss: its length, and minus its number; 0 and 0 without one.
    """

    documents: int = 0
    long: int = 0
    long_partly: int = 0
    pieces: int = 0
    tokens: int = 0
    longest: int = 0
    longest_document: tuple[int, int] = (0, 0)
    longest_partly: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Heard:
    """Pieces with a target of the long documents of which some tokens have no loss: these are read
    once. `indices` has, for each of the sorted `documents`, which of its pieces they are."""

    documents: list[int] = field(default_factory=list)
    indices: list[Numbers] = field(default_factory=list)

    def counts(self, documents: Numbers, counts: Numbers) -> None:
        """Sets the counts of those documents that are among `documents`."""
        if not self.documents:
            return
        places = np.searchsorted(self.documents, documents)
        places = np.minimum(places, len(self.documents) - 1)
        read = np.array(self.documents)[places] == documents
        sizes = np.array([len(each) for each in self.indices])
        counts[read] = sizes[places[read]]

    def index(self, document: int, place: int) -> int:
        """Returns which piece of its document is the one at a place among those with a target."""
        at = int(np.searchsorted(self.documents, document))
        if at < len(self.documents) and self.documents[at] == document:
            return int(self.indices[at][place])
        return place


class Pieces:
    """The pieces of the documents of one store.

    Args:
        documents: a store, of which pieces without a target are left out, or lengths alone.
        max_length: maximum tokens of a piece.
        long_documents: treatment of longer documents: split, drop, error, truncate_left (keeps the
            end) or truncate_right. None: error for those of a store that are partly trained, as
            conversations are, split for the others.
        source: number of the store, of several.
        left_out: documents that are not taken, of a slice or an array of numbers in this store.
        stop: documents from this number on are not taken; None: the number of all.

    Raises SamplerError for a long document under `error`.
    """

    def __init__(
        self,
        documents: Documents,
        *,
        max_length: int,
        long_documents: str | None,
        source: int = 0,
        left_out: LeftOut | None = None,
        stop: int | None = None,
    ) -> None:
        self._documents = documents
        self._source = source
        self._first = documents.first(source)
        # No document is longer, and lengths are compared as they are stored.
        self._max_length = min(max_length, np.iinfo(np.int64).max)
        self._long_documents = long_documents
        self._left_out = left_out
        self._stop = documents.size(source) if stop is None else stop
        self._heard = Heard()
        self.tally = Tally()
        known = documents.groups(source)
        # The piece that is the first one of every group, and the number of all.
        self._firsts = np.zeros(-(-self._stop // GROUP) + 1, np.int64)
        if known is None or left_out is not None or stop is not None:
            self._count(self._firsts[1:])
        else:
            self._count_known(known, self._firsts[1:])
        self._refuse_long()
        np.cumsum(self._firsts, out=self._firsts)
        self.tally.pieces = int(self._firsts[-1])

    def find(self, numbers: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """Returns document, start and stop of pieces, by their numbers; documents are counted over
        all stores."""
        parts = [np.zeros((3, 0), np.int64)]
        for start in range(0, len(numbers), FOUND_AT_ONCE):
            parts.append(self._find(numbers[start : start + FOUND_AT_ONCE]))
        documents, starts, stops = np.concatenate(parts, axis=1)
        return documents + self._first, starts, stops

    def in_order(self) -> Iterator[Piece]:
        """Yields every piece once, in the order of the store, as of epoch 0."""
        for start in range(0, self.tally.pieces, FOUND_AT_ONCE):
            stop = min(start + FOUND_AT_ONCE, self.tally.pieces)
            spans = np.stack(self.find(np.arange(start, stop)), axis=1)
            for document, begin, end in spans.tolist():
                yield Piece(document, begin, end)

    def _count(self, groups: Numbers) -> None:
        """Sets the number of pieces of every group, and the tally."""
        for start in range(0, self._stop, BLOCK):
            stop = min(start + BLOCK, self._stop)
            counts = self._counted(slice(start, stop), np.arange(start, stop))
            found = np.add.reduceat(counts, np.arange(0, len(counts), GROUP))
            groups[start // GROUP : start // GROUP + len(found)] = found

    def _count_known(self, known: npt.NDArray[Any], groups: Numbers) -> None:
        """Does so from what is known of groups: only those with a long document are looked at."""
        at_once = BLOCK // GROUP
        for start in range(0, len(known), BLOCK):
            its = known[start : start + BLOCK]
            groups[start : start + len(its)] = its["learned"]
            is_long = its["longest_of_all"] > self._max_length
            self.tally.tokens += int(its["tokens"].sum(where=~is_long))
            longest = int(its["longest"].max(where=~is_long, initial=0))
            self.tally.longest = max(self.tally.longest, longest)
            looked_at = np.flatnonzero(is_long) + start
            for first in range(0, len(looked_at), at_once):
                numbers = looked_at[first : first + at_once]
                rows = numbers[:, None] * GROUP + np.arange(GROUP)
                flat = rows[rows < self._stop]
                counts = np.zeros(rows.shape, np.int64)
                counts.flat[: len(flat)] = self._counted(flat, flat)
                groups[numbers] = counts.sum(axis=1)
        self.tally.documents = self._stop

    def _counted(self, which: Any, documents: Numbers) -> Numbers:
        """Returns the number of pieces of documents, which are those of a slice or an array, in
        ascending order, and adds them to the tally."""
        lengths, targets = self._documents.columns(self._source, which)
        taken = np.ones(len(lengths), np.bool_)
        if self._left_out is not None:
            taken = ~self._left_out(which)
        is_long = taken & (lengths > self._max_length)
        tally = self.tally
        tally.documents += int(np.count_nonzero(taken))
        tally.long += int(np.count_nonzero(is_long))
        tally.longest_document = max(
            tally.longest_document, _longest(documents, lengths, among=is_long)
        )
        if targets is not None:
            long_partly = is_long & (targets < lengths - 1)
            tally.long_partly += int(np.count_nonzero(long_partly))
            tally.longest_partly = max(
                tally.longest_partly, _longest(documents, lengths, among=long_partly)
            )
            if not self._refuses:
                self._listen(documents, lengths, np.flatnonzero(long_partly))
        counts = self._counts(documents, lengths=lengths, targets=targets)
        counts[~taken] = 0
        self._add_tokens(documents, lengths, targets=targets, counts=counts)
        return counts

    @property
    def _refuses(self) -> bool:
        """Whether a long document that was seen is refused."""
        if self._long_documents is None:
            return self.tally.long_partly > 0
        return self._long_documents == "error" and self.tally.long > 0

    def _counts(self, documents: Numbers, *, lengths: Numbers, targets: Numbers | None) -> Numbers:
        """Returns the number of pieces of documents that are taken; arrays may have any shape."""
        learned = lengths > 0 if targets is None else targets > 0
        counts = learned.astype(np.int64)
        is_long = lengths > self._max_length
        if not is_long.any():
            return counts
        if self._long_documents == "drop":
            counts[is_long] = 0
        elif self._long_documents in TRUNCATED:
            counts[is_long] = targets is None or self._max_length > 1
        else:
            full, rest = np.divmod(lengths[is_long], self._max_length)
            # The first token of a piece is no target.
            least = 1 if targets is None else 2
            counts[is_long] = full * (self._max_length >= least) + (rest >= least)
        self._heard.counts(documents, counts)
        return counts

    def _listen(self, documents: Numbers, lengths: Numbers, rows: Numbers) -> None:
        """Reads which pieces have a target of the long documents at these rows, of which some
        tokens have no loss."""
        if self._long_documents == "drop":
            return
        for row in rows.tolist():
            length = int(lengths[row])
            in_all = 1
            if self._long_documents not in TRUNCATED:
                in_all = -(-length // self._max_length)
            starts, stops = self._spans(np.arange(in_all), np.full(in_all, length))
            number = int(documents[row])
            document = np.full(in_all, self._first + number)
            has_target = self._documents.has_targets(document, starts, stops)
            self._heard.documents.append(number)
            self._heard.indices.append(np.flatnonzero(has_target))
            sizes = (stops - starts)[has_target]
            self.tally.tokens += int(sizes.sum())
            self.tally.longest = max(self.tally.longest, *sizes.tolist(), 0)

    def _spans(self, indices: Numbers, lengths: Numbers) -> tuple[Numbers, Numbers]:
        """Returns start and stop of pieces by their indices in documents of these lengths."""
        starts = indices * self._max_length
        if self._long_documents == "truncate_left":
            starts = np.maximum(lengths - self._max_length, 0)
        return starts, np.minimum(starts + self._max_length, lengths)

    def _add_tokens(
        self, documents: Numbers, lengths: Numbers, *, targets: Numbers | None, counts: Numbers
    ) -> None:
        """Adds the tokens of pieces to the tally, but for those of documents that were read."""
        taken = counts > 0
        if self._heard.documents:
            taken &= ~np.isin(documents, self._heard.documents)
        tokens = np.minimum(lengths, self._max_length)
        tokens[~taken] = 0
        longest = int(tokens.max())
        if longest == self._max_length and self._long_documents not in TRUNCATED:
            rows = np.flatnonzero(taken & (lengths > self._max_length))
            rests = lengths[rows] % self._max_length
            is_left_out = (rests == 1) & (targets is not None)
            tokens[rows] = lengths[rows] - is_left_out
        self.tally.tokens += int(tokens.sum())
        self.tally.longest = max(self.tally.longest, longest)

    def _find(self, numbers: Numbers) -> Numbers:
        """Returns document, start and stop of pieces by their numbers, int64 `[3, pieces]`."""
        groups = np.searchsorted(self._firsts, numbers, side="right") - 1
        asked, group = np.unique(groups, return_inverse=True)
        rows = asked[:, None] * GROUP + np.arange(GROUP)
        inside = rows < self._stop
        rows = np.minimum(rows, self._stop - 1)
        lengths, targets = self._documents.columns(self._source, rows)
        counts = self._counts(rows, lengths=lengths, targets=targets)
        counts[~inside] = 0
        if self._left_out is not None:
            counts[self._left_out(rows)] = 0
        ends = np.cumsum(counts, axis=1)
        within = numbers - self._firsts[groups]
        place = (ends[group] <= within[:, None]).sum(axis=1)
        documents = rows[group, place]
        indices = within - (ends[group, place] - counts[group, place])
        if self._heard.documents:
            pairs = zip(documents.tolist(), indices.tolist(), strict=True)
            heard = [self._heard.index(document, index) for document, index in pairs]
            indices = np.array(heard, np.int64)
        starts, stops = self._spans(indices, lengths[group, place])
        return np.stack([documents, starts, stops])

    def _partly(self) -> int:
        """Returns the number of documents of which some tokens have no loss."""
        count = 0
        for start in range(0, self._stop, BLOCK):
            its = slice(start, min(start + BLOCK, self._stop))
            lengths, targets = self._documents.columns(self._source, its)
            assert targets is not None
            partly = targets < lengths - 1
            if self._left_out is not None:
                partly &= ~self._left_out(its)
            count += int(np.count_nonzero(partly))
        return count

    def _refuse_long(self) -> None:
        """Raises SamplerError for documents that are too long, naming the longest of them: for all
        under "error", for conversations without a setting."""
        if not self._refuses:
            return
        tally = self.tally
        if self._long_documents == "error":
            length, number = tally.longest_document
            refused = f"{tally.long} of {tally.documents} documents"
            ways = "split or drop"
        else:
            length, number = tally.longest_partly
            what = "conversations, or other documents with tokens without loss,"
            refused = f"{tally.long_partly} of {self._partly()} {what}"
            ways = "drop, truncate_left (keeps the end), truncate_right or split"
        name = self._documents.name(self._first - number)
        raise SamplerError(
            f"document {name!r} has {length:,} tokens, and {refused} have more than the "
            f"{self._max_length:,} that fit: set data.long_documents to {ways}, raise "
            "data.max_length, or use more ranks or more batch.tokens_per_rank"
        )


def _longest(documents: Numbers, lengths: Numbers, *, among: Mask) -> tuple[int, int]:
    """Returns length and minus the number of the longest document `among` these, the first of equal
    ones; 0 and 0 without one."""
    if not among.any():
        return 0, 0
    row = int(np.where(among, lengths, 0).argmax())
    return int(lengths[row]), -int(documents[row])


def first_documents(most: int, size: int, left_out: LeftOut | None) -> tuple[int, int]:
    """Returns how many of the first `most` documents that are not left out there are among `size`,
    and the number behind the last one."""
    count = 0
    stop = 0
    while stop < size and count < most:
        block = slice(stop, min(stop + BLOCK, size))
        taken = np.ones(block.stop - block.start, np.bool_)
        if left_out is not None:
            taken = ~left_out(block)
        places = np.flatnonzero(taken)
        if count + len(places) >= most:
            last = int(places[most - count - 1])
            return most, stop + last + 1
        count += len(places)
        stop = block.stop
    return count, stop
