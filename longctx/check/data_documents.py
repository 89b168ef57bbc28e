"""Documents that rows are made of, and where they lie in the rows of a batch."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .data_roles import Tokenizer
from .errors import CheckError

SHORTEST_PART = 2
"""Tokens of a part of a document that are not found by chance, as a token of padding may be."""

NO_CHANCE = 8
"""Tokens of a document that are not found twice by chance."""


@dataclass(frozen=True)
class Piece:
    """Tokens `begin` to `end` of a row: those of a document from `offset` on. `document` is None
    for tokens of which only the batch says that they belong together."""

    document: int | None
    begin: int
    end: int
    offset: int = 0


def has_ids(row: Any) -> bool:
    """Returns whether a row has token ids: as `input_ids`, as a list of numbers, or in the rows
    that it is a list of."""
    if isinstance(row, Mapping):
        return "input_ids" in row
    if not isinstance(row, list) or not row:
        return False
    return isinstance(row[0], int) or has_ids(row[0])


def has_text(row: Any) -> bool:
    """Returns whether a row has a text beside its token ids."""
    if not isinstance(row, Mapping):
        return False
    return "text" in row or "prompt" in row or bool(messages_of(row))


def documents_of(row: Any, tokenizer: Tokenizer) -> list[list[int]]:
    """Returns the token ids of a row, apart for each document that the row says it has: by
    `seq_lengths`, by positions that begin anew, or by numbers in its attention mask; without what
    this mask leaves out, and without padding at an end. A list of rows has the documents of all."""
    if isinstance(row, list) and isinstance(row[0], int):
        return [row]
    if isinstance(row, list):
        return [document for each in row for document in documents_of(each, tokenizer)]
    ids = _numbers(row["input_ids"])
    if row.get("seq_lengths") is not None:
        return _split(ids, _numbers(row["seq_lengths"]))
    begin, end = _without_padding(ids, tokenizer)
    numbers = [1] * len(ids)
    if row.get("attention_mask") is not None:
        numbers = _numbers(row["attention_mask"])
    positions = list(range(len(ids)))
    if row.get("position_ids") is not None:
        positions = _numbers(row["position_ids"])
    found = list[list[int]]()
    before = None
    for place in range(begin, end):
        number = numbers[place]
        if number and before == (number, positions[place] - 1):
            found[-1].append(ids[place])
        elif number:
            found.append([ids[place]])
        before = (number, positions[place])
    return found


def _without_padding(ids: list[int], tokenizer: Tokenizer) -> tuple[int, int]:
    """Returns the begin and end of a row without padding before or after it. One token of it alone
    is the begin or the end of a text if it may be."""
    begin = 0
    end = len(ids)
    while begin < end and ids[begin] == tokenizer.pad:
        begin += 1
    while end > begin and ids[end - 1] == tokenizer.pad:
        end -= 1
    if begin == 1 and tokenizer.pad == tokenizer.bos:
        begin = 0
    if end == len(ids) - 1 and tokenizer.pad == tokenizer.eos:
        end = len(ids)
    return begin, end


def says_documents(row: Any, tokenizer: Tokenizer) -> bool:
    """Returns whether a row says where its documents begin: it has several, or `seq_lengths`."""
    if isinstance(row, list):
        return not isinstance(row[0], int) and any(says_documents(each, tokenizer) for each in row)
    return row.get("seq_lengths") is not None or len(documents_of(row, tokenizer)) > 1


def ids_of_text(text: Any, tokenizer: Any) -> list[int]:
    """Returns the token ids of a text, as the tokenizer and its chat template make them. Raises
    CheckError for a text that the template does not take."""
    messages = messages_of(text)
    if not messages:
        return _numbers(tokenizer(_words_of(text))["input_ids"])
    try:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception as error:  # jinja2's for what a template refuses, else ValueError
        raise CheckError(f"the tokenizer's chat template does not take a text: {error}") from error
    return _numbers(tokenizer(rendered, add_special_tokens=False)["input_ids"])


def messages_of(text: Any) -> list[dict[str, Any]]:
    """Returns the messages of a conversation; none of a plain text."""
    if isinstance(text, Mapping):
        for name in ("messages", "conversations"):
            if text.get(name):
                return [_message(each) for each in text[name]]
        if isinstance(text.get("prompt"), list):
            both = [*text["prompt"], *text["completion"]]
            return [_message(each) for each in both]
        return []
    if isinstance(text, list):
        return [_message(each) for each in text]
    return []


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message with `role` and `content`, also of one with `from` and `value`."""
    if "from" in message:
        return {"role": message["from"], "content": message["value"]}
    return dict(message)


def _words_of(text: Any) -> str:
    if isinstance(text, str):
        return text
    if isinstance(text, Mapping) and "text" in text:
        return str(text["text"])
    if isinstance(text, Mapping) and "prompt" in text:
        return str(text["prompt"]) + str(text["completion"])
    raise CheckError(
        f"a text is {type(text).__name__}: give strings, lists of messages, or rows with text, "
        "messages, or prompt and completion"
    )


def _numbers(values: Any) -> list[int]:
    if isinstance(values, torch.Tensor):
        values = values.flatten().tolist()
    return [int(value) for value in values]


def _split(ids: list[int], lengths: list[int]) -> list[list[int]]:
    if sum(lengths) != len(ids):
        raise CheckError(f"seq_lengths sum up to {sum(lengths)}, but a row has {len(ids)} tokens")
    found = []
    begin = 0
    for length in lengths:
        found.append(ids[begin : begin + length])
        begin += length
    return found


class Placing:
    """Places documents in the rows of a batch: whole ones first, then once more those that are
    repeated, then parts of those that are left.

    `pad`: id of padding, which may follow a part.

    Attributes:
        pieces: of each row, in order.
        parts: documents of which a part is placed → tokens up to its end.
        repeated: documents that are placed again.
        left: documents of which no token is placed.
    """

    def __init__(
        self, rows: Sequence[list[int]], documents: Sequence[list[int]], pad: int | None
    ) -> None:
        self._rows = rows
        self._documents = documents
        self._pad = pad
        self.parts = dict[int, int]()
        self.repeated = list[int]()
        self.left = [number for number, ids in enumerate(documents) if ids]
        self._by_first = defaultdict[int, list[int]](list)
        for number in self.left:
            self._by_first[documents[number][0]].append(number)
        self._unplaced = {first: list(each) for first, each in self._by_first.items()}
        self.pieces = [self._whole_ones(row) for row in rows]
        for find in (self._repeated_in, self._parts_in):
            for row, pieces in zip(rows, self.pieces, strict=True):
                for begin, end in list(gaps(pieces, len(row))):
                    pieces += find(row, begin, end)
                pieces.sort(key=lambda piece: piece.begin)

    def _whole_ones(self, row: list[int]) -> list[Piece]:
        found = []
        at = 0
        while at < len(row):
            number = self._whole_at(row, at)
            if number is None:
                at += 1
                continue
            end = at + len(self._documents[number])
            found.append(Piece(number, begin=at, end=end))
            self.left.remove(number)
            self._unplaced[row[at]].remove(number)
            at = end
        return found

    def _whole_at(self, row: list[int], at: int) -> int | None:
        """Returns the document that is whole from a token on: the next one if it is, and if
        another, padding or nothing follows it; else the longest."""
        begun = self._unplaced.get(row[at], [])
        fitting = [number for number in begun if self._is_whole(row, at, number)]
        if not fitting:
            return None
        first = fitting[0]
        if first == self.left[0] and self._may_end(row, at + len(self._documents[first])):
            return first
        return max(fitting, key=lambda number: len(self._documents[number]))

    def _may_end(self, row: list[int], at: int) -> bool:
        """Returns whether a token of a row is none, padding, or the first of a document."""
        return at == len(row) or row[at] == self._pad or row[at] in self._by_first

    def _is_whole(self, row: list[int], at: int, number: int) -> bool:
        ids = self._documents[number]
        return row[at : at + len(ids)] == ids

    def _repeated_in(self, row: list[int], begin: int, end: int) -> list[Piece]:
        """Returns documents that are in a gap though they are placed elsewhere."""
        found = []
        at = begin
        while at < end:
            number = self._again_at(row, at, begin=begin, end=end)
            if number is None:
                at += 1
                continue
            found.append(Piece(number, begin=at, end=at + len(self._documents[number])))
            self.repeated.append(number)
            at = found[-1].end
        return found

    def _again_at(self, row: list[int], at: int, *, begin: int, end: int) -> int | None:
        """Returns the longest document that is whole from a token of a gap on, and too long for
        chance, or all of the gap but padding."""
        best: int | None = None
        for number in self._by_first.get(row[at], []):
            length = len(self._documents[number])
            after = at + length
            is_all = at == begin and (after == end or row[after : after + 1] == [self._pad])
            is_long_enough = length >= NO_CHANCE or (is_all and length >= SHORTEST_PART)
            if after > end or not is_long_enough:
                continue
            is_longer = best is None or length > len(self._documents[best])
            if is_longer and self._is_whole(row, at, number):
                best = number
        return best

    def _parts_in(self, row: list[int], begin: int, end: int) -> list[Piece]:
        """Returns parts of documents, one after another from the begin of a gap on, where padding
        may be."""
        found = []
        at = begin
        while at < end:
            piece = self._part_at(row, at, end)
            if piece is None and row[at] != self._pad:
                break
            if piece is None:
                at += 1
                continue
            found.append(piece)
            at = piece.end
        return found

    def _part_at(self, row: list[int], at: int, end: int) -> Piece | None:
        """Returns the longest part from a token on: the begin or the end of a document that is not
        placed, or what follows a part that is."""
        best = None
        for number, offset in self._starts(row[at]):
            ids = self._documents[number]
            length = common_length(row[at:end], ids[offset:])
            is_begin = offset == self.parts.get(number, 0)
            if length < SHORTEST_PART or not (is_begin or offset + length == len(ids)):
                continue
            after = at + length
            if after < end and row[after] != self._pad and row[after] not in self._by_first:
                continue
            if best is None or length > best.end - best.begin:
                best = Piece(number, begin=at, end=after, offset=offset)
        if best is not None and best.document is not None:
            self.parts[best.document] = best.offset + best.end - best.begin
            if best.document in self.left:
                self.left.remove(best.document)
        return best

    def _starts(self, token: int) -> Iterator[tuple[int, int]]:
        """Yields documents, with where in them a part that begins with a token may begin."""
        for number, placed in self.parts.items():
            if self._documents[number][placed : placed + 1] == [token]:
                yield number, placed
        for number in self.left:
            for offset, each in enumerate(self._documents[number]):
                if each == token:
                    yield number, offset


def common_length(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Returns how many tokens two lists begin with alike."""
    length = 0
    for token, other in zip(tokens, others, strict=False):
        if token != other:
            break
        length += 1
    return length


def gaps(pieces: Iterable[Piece], length: int) -> Iterator[tuple[int, int]]:
    """Yields the begin and end of what pieces, in order, leave free of a row of this length."""
    free_from = 0
    for piece in pieces:
        if free_from < piece.begin:
            yield free_from, piece.begin
        free_from = piece.end
    if free_from < length:
        yield free_from, length
