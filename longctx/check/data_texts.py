"""Texts that documents were made of: which one each is, and what of each is there."""

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .data_batches import Batch
from .data_documents import common_length, documents_of, has_ids, ids_of_text, messages_of
from .data_roles import Tokenizer, contents_of
from .errors import CheckError

MOST_ADDED = 4
"""Tokens that a trainer may add to what a template makes of a text, as the end of texts."""
BETWEEN = -1
"""Between texts that are searched; no token."""


@dataclass
class Document:
    """A document of a row that was read.

    Attributes:
        text: number of the text that it was made of; None if that is not known.
        offset: of its first token in the text.
        count: tokens of the text that it has.
        is_part: whether it lacks tokens of the text.
        is_cut: whether it lacks the last ones.
    """

    ids: list[int]
    text: int | None = None
    offset: int = 0
    count: int = 0
    is_part: bool = False
    is_cut: bool = False


class Sorted:
    """Texts in order of their tokens, so that those that begin alike are neighbours."""

    def __init__(self, texts: list[list[int]]) -> None:
        self._order = sorted(range(len(texts)), key=lambda number: texts[number])
        self._texts = [texts[number] for number in self._order]
        self._used = set[int]()

    def has_begin(self, ids: list[int]) -> bool:
        """Returns whether a text begins with tokens."""
        at = bisect_left(self._texts, ids)
        return at < len(self._texts) and self._texts[at][: len(ids)] == ids

    def begins_with(self, ids: list[int]) -> int | None:
        """Returns a text that begins with tokens, one that was not returned before if there is one;
        None without one."""
        found: int | None = None
        for at in range(bisect_left(self._texts, ids), len(self._texts)):
            if self._texts[at][: len(ids)] != ids:
                break
            found = self._order[at]
            if found not in self._used:
                break
        if found is not None:
            self._used.add(found)
        return found

    def begin_of(self, ids: list[int]) -> int | None:
        """Returns the longest text that tokens begin with; None without one."""
        while ids:
            at = bisect_right(self._texts, ids) - 1
            if at < 0:
                return None
            theirs = self._texts[at]
            alike = common_length(theirs, ids)
            if theirs and alike == len(theirs):
                return self._order[at]
            ids = ids[:alike]
        return None


class Texts:
    """Texts as the tokenizer makes tokens of them, to find the one that a document was made of.

    Attributes:
        messages: of each text; none of a plain one.
        ids: of each text.
    """

    def __init__(self, texts: Sequence[Any], tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bos = tokenizer.bos
        self.messages = [messages_of(text) for text in texts]
        self.ids = [_ids_if_any(text, tokenizer.given) for text in texts]
        self._sorted = Sorted(self.ids)
        self._without_begins = Sorted([self._without_begin(ids) for ids in self.ids])
        self._firsts = {ids[0] for ids in self.ids if ids}
        all_ids = array("q")
        self._begins = list[int]()
        for ids in self.ids:
            self._begins.append(len(all_ids))
            all_ids.extend([*ids, BETWEEN])
        self._searched = all_ids.tobytes()
        self._size = all_ids.itemsize

    def document(self, ids: list[int]) -> Document:
        """Returns a document of a row, with the text that it was made of, or of which it is the
        begin, if there is one. How often a text begins does not matter."""
        own = self._without_begin(ids)
        number = self._without_begins.begins_with(own)
        if number is None:
            number = self._without_begins.begin_of(own)
            if number is not None and len(ids) - len(self.ids[number]) > MOST_ADDED:
                number = None
        if number is None:
            return Document(ids)
        theirs = self.ids[number]
        count = min(len(own) + len(theirs) - len(self._without_begin(theirs)), len(theirs))
        is_part = count < len(theirs)
        return Document(ids, text=number, count=count, is_part=is_part, is_cut=is_part)

    def are_in(self, documents: Sequence[Document]) -> bool:
        """Returns whether the messages of each text are in the document of the same number, as
        where rows come from a template that is not the tokenizer's."""
        for messages, document in zip(self.messages, documents, strict=True):
            words = self._tokenizer.text(document.ids)
            contents = contents_of(messages)
            if not contents or any(content not in words for _, content in contents):
                return False
        return True

    def split(self, ids: list[int]) -> list[Document]:
        """Returns the texts, and parts of texts, that follow each other in a row: whole ones, the
        end of one before these, and the begin of one after them. Returns the row itself if it has
        more than a trainer may add to these."""
        whole = self._whole_ones(ids)
        if whole:
            first, _ = whole[0]
            last, document = whole[-1]
            found = self._end_of_one(ids[:first])
            found += [document for _, document in whole]
            found += self._begin_of_one(ids[last + len(document.ids) :])
        else:
            found = self._in_the_middle(ids) or self._end_and_begin(ids)
        known = sum(len(document.ids) for document in found)
        if len(ids) - known > MOST_ADDED * len(found):
            return [Document(ids)]
        return found

    def _whole_ones(self, ids: list[int]) -> list[tuple[int, Document]]:
        """Returns whole texts in a row, each with its first token."""
        found = []
        at = 0
        while at < len(ids):
            document = self._whole_at(ids, at)
            if document is None:
                at += 1
                continue
            found.append((at, document))
            at += len(document.ids)
        return found

    def _whole_at(self, ids: list[int], at: int) -> Document | None:
        """Returns the longest text that is whole from a token of a row on."""
        if ids[at] not in self._firsts:
            return None
        number = self._sorted.begin_of(ids[at:])
        if number is None:
            return None
        return Document(self.ids[number], text=number, count=len(self.ids[number]))

    def _in_the_middle(self, ids: list[int]) -> list[Document]:
        """Returns tokens as the part of a text that has them all; nothing without one."""
        for number, offset in self._places(ids):
            return [self._part(number, offset, length=len(ids))]
        return []

    def _end_of_one(self, ids: list[int]) -> list[Document]:
        """Returns tokens as the end of a text, after which a trainer may have added some; nothing
        without one."""
        for added in range(MOST_ADDED + 1):
            length = len(ids) - added
            if length < 1:
                break
            for number, offset in self._places([*ids[:length], BETWEEN]):
                return [self._part(number, offset, length=length)]
        return []

    def _begin_of_one(self, ids: list[int]) -> list[Document]:
        """Returns tokens as the begin of a text; nothing without one."""
        number = self._sorted.begins_with(ids)
        if not ids or number is None:
            return []
        return [self._part(number, 0, length=len(ids))]

    def _end_and_begin(self, ids: list[int]) -> list[Document]:
        """Returns the end of a text, and the begin of another that follows it to the end of a row;
        or the one of them that is all of the row."""
        for after in range(len(ids)):
            if ids[after] not in self._firsts or not self._sorted.has_begin(ids[after:]):
                continue
            before = self._end_of_one(ids[:after])
            if before or not after:
                return before + self._begin_of_one(ids[after:])
        return self._end_of_one(ids)

    def _part(self, number: int, offset: int, *, length: int) -> Document:
        end = offset + length
        ids = self.ids[number]
        return Document(
            ids[offset:end],
            text=number,
            offset=offset,
            count=length,
            is_part=length < len(ids),
            is_cut=end < len(ids),
        )

    def _places(self, ids: list[int]) -> Iterator[tuple[int, int]]:
        """Yields texts, and where in them tokens follow each other."""
        sought = array("q", ids).tobytes()
        at = self._searched.find(sought)
        while at >= 0:
            place, rest = divmod(at, self._size)
            if not rest:
                number = bisect_left(self._begins, place + 1) - 1
                yield number, place - self._begins[number]
            at = self._searched.find(sought, at + 1)

    def _without_begin(self, ids: list[int]) -> list[int]:
        begin = 0
        while self._bos is not None and ids[begin : begin + 1] == [self._bos]:
            begin += 1
        return ids[begin:]


def _ids_if_any(text: Any, tokenizer: Any) -> list[int]:
    """Returns the token ids of a text; none if the tokenizer has no template for it."""
    try:
        return ids_of_text(text, tokenizer)
    except CheckError:
        if messages_of(text):
            return []
        raise


def documents_in(
    batches: Sequence[Batch], texts: Texts | None, tokenizer: Tokenizer
) -> list[list[Document]]:
    """Returns the documents of the rows of each batch. `texts`: what these were made of, if it is
    known; if a row is none of them, rows are parted where texts are."""
    of_batches = list[list[list[int]]]()
    for batch in batches:
        of_batch = list[list[int]]()
        for row in batch.rows:
            if has_ids(row):
                of_batch += documents_of(row, tokenizer)
            else:
                of_batch.append(ids_of_text(row, tokenizer.given))
        of_batches.append(of_batch)
    if texts is None:
        return [[Document(ids) for ids in of_batch] for of_batch in of_batches]
    found = [[texts.document(ids) for ids in of_batch] for of_batch in of_batches]
    every = [document for of_batch in found for document in of_batch]
    if all(document.text is not None for document in every):
        return found
    if len(every) == len(texts.ids) and texts.are_in(every):
        for number, document in enumerate(every):
            document.text = number
        return found
    return [_parted(documents, texts) for documents in found]


def _parted(documents: Sequence[Document], texts: Texts) -> list[Document]:
    """Returns documents of a batch, those that are no whole text alone parted where texts
    are."""
    found = list[Document]()
    for document in documents:
        if document.text is None or document.is_part or len(document.ids) > document.count:
            found += texts.split(document.ids)
        else:
            found.append(document)
    return found


@dataclass
class Left:
    """What of texts is in no row.

    Attributes:
        texts: of which nothing is there; None if that is not known, as texts lie over rows.
        cut: texts of which a part is there; None as well.
        tokens: those that are not there.
    """

    texts: int | None
    cut: int | None
    tokens: int


def left_of(texts: Texts, documents: Sequence[Sequence[Document]]) -> Left:
    """Returns what of texts is in no document. A part over several rows may be of several texts:
    only the sum of all is known."""
    whole = set[int]()
    parts = Counter[int]()
    there = 0
    lying_over_rows = False
    for of_batch in documents:
        for document in of_batch:
            if document.text is None:
                continue
            there += document.count
            if not document.is_part:
                whole.add(document.text)
                continue
            lying_over_rows = lying_over_rows or document.text in parts
            parts[document.text] += document.count
    total = sum(len(ids) for ids in texts.ids)
    if lying_over_rows:
        return Left(None, cut=None, tokens=max(0, total - there))
    cut = parts.keys() - whole
    missing = [number for number, ids in enumerate(texts.ids) if ids and number not in whole | cut]
    lost = sum(len(texts.ids[number]) - parts[number] for number in cut)
    return Left(len(missing), cut=len(cut), tokens=lost)
