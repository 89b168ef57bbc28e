"""What is counted in all batches: who sees whom, labels, ends, roles, and documents that are
missing or cut."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from .data_batches import Batch
from .data_labels import (
    BOS_TWICE,
    ENDS,
    NEXT_DOCUMENT,
    Ends,
    add_ends,
    begins_twice,
    masked_like_padding,
    wrong_labels,
)
from .data_places import BEYOND, MIXED, Places, wrong_sight
from .data_roles import Roles, Tokenizer
from .data_sight import FLASH, READINGS, beyond_lengths, sight
from .data_texts import Document, Texts
from .loop import IGNORED

LEARNT = 100
"""Texts that show what a template writes before messages."""


@dataclass
class Read:
    """Batches that were read, each with what of it follows: where its documents are, these, and
    whether batch or rows say that they are several.

    Attributes:
        texts: what documents were made of, if it is known.
        divided_by_trainer: whether a Trainer, and no loss of the user's, divides the sum of losses.
        unread: rows that were not read.
    """

    batches: list[Batch]
    places: list[Places]
    documents: list[list[Document]]
    marked: list[bool]
    tokenizer: Tokenizer
    texts: Texts | None
    divided_by_trainer: bool
    unread: int

    @cached_property
    def unknown(self) -> int:
        """Tokens that batches have together, but that no row had."""
        return sum(places.unknown for places in self.places)

    @cached_property
    def targets(self) -> list[int]:
        """How many targets each batch has."""
        return [int(batch.targets.sum()) for batch in self.batches]


@dataclass
class Where:
    """Tokens that show something.

    Attributes:
        batch, row, token: the first of them.
        count: how many.
    """

    batch: int
    row: int
    token: int
    count: int = 0

    def __str__(self) -> str:
        first = f"token {self.token} of row {self.row} of batch {self.batch}"
        if self.count == 1:
            return first
        return f"{self.count:,} tokens, the first is {first}"


class Kinds:
    """Where each kind of fault is."""

    def __init__(self) -> None:
        self.of = dict[str, Where]()

    def add(self, kind: str, tokens: list[int], *, batch: int, width: int) -> None:
        """Adds tokens of a batch whose rows have `width` tokens."""
        if not tokens:
            return
        row, token = divmod(tokens[0], width)
        where = self.of.setdefault(kind, Where(batch, row=row, token=token))
        where.count += len(tokens)


@dataclass
class Sights:
    """Who sees whom, wrongly, under each reading.

    Attributes:
        wrong: reading → fault → where.
        unmarked: where documents see each other that nothing in batch or rows marks.
        unknown: reading → why it is not known.
    """

    wrong: dict[str, dict[str, Where]]
    unmarked: dict[str, Where]
    unknown: dict[str, str]


def sights_of(read: Read, readings: Iterable[str] = READINGS) -> Sights:
    """Returns who sees whom under each reading."""
    wrong = {}
    unmarked = dict[str, Where]()
    unknown = dict[str, str]()
    for reading in readings:
        kinds = Kinds()
        without_marks = Kinds()
        for number, batch in enumerate(read.batches):
            seen = sight(batch, reading)
            if seen.unknown:
                unknown[reading] = seen.unknown
                continue
            width = batch.ids.shape[1]
            if reading == FLASH:
                kinds.add(BEYOND, beyond_lengths(batch), batch=number, width=width)
            for kind, tokens in wrong_sight(seen, read.places[number], width=width):
                kept = kinds
                if kind == MIXED and not read.marked[number]:
                    kept = without_marks
                kept.add(kind, tokens, batch=number, width=width)
        wrong[reading] = kinds.of
        if MIXED in without_marks.of:
            unmarked[reading] = without_marks.of[MIXED]
    return Sights(wrong, unmarked=unmarked, unknown=unknown)


@dataclass
class Labels:
    """What labels train, wrongly or by choice.

    Attributes:
        wrong: fault → where.
        first: labels of first tokens of rows, which have no loss.
        next_unmarked: first tokens of documents that nothing marks, as targets.
        lost_ends: tokens of documents that are also padding, and no targets though the token before
            is one.
        trained_alike: such tokens that are targets.
    """

    wrong: dict[str, Where]
    first: int
    next_unmarked: Where | None
    lost_ends: Where | None
    trained_alike: int


def labels_of(read: Read) -> Labels:
    """Returns what labels train."""
    kinds = Kinds()
    facts = Kinds()
    trained_alike = 0
    first = 0
    for number, batch in enumerate(read.batches):
        width = batch.ids.shape[1]
        places = read.places[number]
        first += int((batch.labels[:, 0] != IGNORED).sum())
        for kind, tokens in wrong_labels(batch, places):
            kept = kinds
            if kind == NEXT_DOCUMENT and not read.marked[number]:
                kept = facts
            kept.add(kind, tokens, batch=number, width=width)
        twice = begins_twice(batch, places, read.tokenizer.bos)
        kinds.add(BOS_TWICE, twice, batch=number, width=width)
        lost, alike = masked_like_padding(batch, places, read.tokenizer.pad)
        facts.add(ENDS, lost, batch=number, width=width)
        trained_alike += alike
    return Labels(
        kinds.of,
        first=first,
        next_unmarked=facts.of.get(NEXT_DOCUMENT),
        lost_ends=facts.of.get(ENDS),
        trained_alike=trained_alike,
    )


def ends_of(read: Read) -> Ends:
    """Returns the ends of documents that are in a batch to their end."""
    ends = Ends()
    for batch, places, documents in zip(read.batches, read.places, read.documents, strict=True):
        whole = set[int]()
        for number, (_, piece) in enumerate(places.pieces):
            if piece.document is None:
                continue
            document = documents[piece.document]
            last = piece.offset + piece.end - piece.begin
            if last == len(document.ids) and not document.is_cut:
                whole.add(number)
        add_ends(ends, batch, places, whole=whole, tokenizer=read.tokenizer)
    return ends


@dataclass
class Trained:
    """Tokens by role.

    Attributes:
        tokens, targets: role → how many.
        unknown: documents of which no message was found.
        known: documents whose roles are known.
    """

    tokens: Counter[str] = field(default_factory=Counter)
    targets: Counter[str] = field(default_factory=Counter)
    unknown: int = 0
    known: int = 0


def trained_roles(read: Read) -> Trained:
    """Returns how many tokens of each role are targets."""
    trained = Trained()
    if read.texts is None:
        return trained
    roles = Roles(read.tokenizer)
    for number in range(min(LEARNT, len(read.texts.ids))):
        roles.learn(read.texts.ids[number], read.texts.messages[number])
    for batch, places, documents in zip(read.batches, read.places, read.documents, strict=True):
        for row, piece in places.pieces:
            if piece.document is None:
                continue
            document = documents[piece.document]
            if document.text is None:
                continue
            messages = read.texts.messages[document.text]
            if not messages:
                continue
            if document.is_part:
                of_tokens = roles.of(read.texts.ids[document.text], messages)[document.offset :]
            else:
                of_tokens = roles.of(document.ids, messages)
            if not of_tokens:
                trained.unknown += 1
                continue
            trained.known += 1
            targets = batch.targets[row, piece.begin : piece.end].tolist()
            of_piece = of_tokens[piece.offset :]
            for role, is_target in zip(of_piece, targets, strict=False):
                trained.tokens[role] += 1
                trained.targets[role] += is_target
    return trained


@dataclass
class Totals:
    """Tokens and documents.

    Attributes:
        parts: documents that lack tokens of their text.
        added, added_targets: tokens that are in no document and no padding, and targets of them.
        without_target: documents that are in a batch, and have no target there.
        missing: documents of which no token is in a batch.
        repeated: documents that are there more than once.
        cut, lost: documents of which only a part is there, and the tokens that are not.
    """

    rows: int
    tokens: int
    padding: int
    added: int
    added_targets: int
    documents: int
    parts: int
    without_target: int
    missing: int
    repeated: int
    cut: int
    lost: int


def totals_of(read: Read) -> Totals:
    """Returns sums over all batches."""
    without_target = 0
    added_targets = 0
    for batch, places in zip(read.batches, read.places, strict=True):
        without_target += _without_target(batch, places)
        added_targets += int((batch.targets.flatten() & places.added).sum())
    lost = list[int]()
    for places, documents in zip(read.places, read.documents, strict=True):
        placed = places.placed
        for number in places.placing.parts:
            missing = len(documents[number].ids) - placed[number]
            if missing:
                lost.append(missing)
    return Totals(
        rows=sum(len(batch.ids) for batch in read.batches),
        tokens=sum(batch.ids.numel() for batch in read.batches),
        padding=sum(int(places.padding.sum()) for places in read.places),
        added=sum(int(places.added.sum()) for places in read.places),
        added_targets=added_targets,
        documents=sum(len(documents) for documents in read.documents),
        parts=sum(document.is_part for documents in read.documents for document in documents),
        without_target=without_target,
        missing=sum(len(places.placing.left) for places in read.places),
        repeated=sum(len(places.placing.repeated) for places in read.places),
        cut=len(lost),
        lost=sum(lost),
    )


def _without_target(batch: Batch, places: Places) -> int:
    """Returns how many documents of a batch have no target, but for their first token."""
    with_target = set[int]()
    every = set[int]()
    for row, piece in places.pieces:
        if piece.document is None:
            continue
        every.add(piece.document)
        begin = piece.begin
        if not piece.offset:
            begin += 1  # no token of the document is before it
        if batch.targets[row, begin : piece.end].any():
            with_target.add(piece.document)
    return len(every - with_target)
