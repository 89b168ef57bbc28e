"""What batches are like, in words: faults, facts, and a picture of what is trained."""

from collections.abc import Iterator

import torch

from .data_batches import Batch
from .data_labels import (
    BOS_TWICE,
    ENDS,
    FROM_PADDING,
    NEXT_DOCUMENT,
    NOTHING,
    OTHER,
    PADDING_TRAINED,
    SHIFTED,
)
from .data_places import MIXED, SIGHTS
from .data_read import (
    Labels,
    Read,
    Totals,
    Trained,
    Where,
    ends_of,
    labels_of,
    sights_of,
    totals_of,
    trained_roles,
)
from .data_roles import Tokenizer
from .data_sight import ADDING, FLASH, HIDES, marks, readings_of
from .data_texts import left_of
from .finding import Finding

MISSING = "documents are missing in batches"
REPEATED = "documents are repeated in batches"
SCALE = "the loss has a wrong scale"
LABELS = (
    NOTHING,
    SHIFTED,
    OTHER,
    PADDING_TRAINED,
    FROM_PADDING,
    NEXT_DOCUMENT,
    ENDS,
    BOS_TWICE,
)
KINDS = (*SIGHTS, *LABELS, MISSING, REPEATED, SCALE)
"""All faults, the most telling first."""
HINTS = {
    NEXT_DOCUMENT: "; first tokens of documents have labels",
    FROM_PADDING: "; they have labels, and padding is before them",
    OTHER: "; models are trained to predict what the input does not have there",
}
"""What is added to some faults."""
SHOWN_DOCUMENTS = 2
SHOWN_PARTS = 12
SHOWN_CHARACTERS = 80
"""Of each part of a document, which is trained or is not."""
BEGIN, END = "«", "»"
"""Around what is trained, in pictures."""


class Words:
    """Faults and facts of batches that were read.

    Attributes:
        findings: faults, the most telling first.
        facts: what is no fault by itself.
        picture: lines that show what is trained of some documents.
        not_tested: what these batches could not show, with the reason.
    """

    def __init__(self, read: Read, attention: str) -> None:
        self._read = read
        self._attention = attention
        readings = readings_of(attention)
        self._readings = readings
        self._sights = sights_of(read, readings)
        self._labels = labels_of(read)
        self._totals = totals_of(read)
        self.not_tested = dict(self._not_tested())
        self.findings = sorted(self._faults(), key=lambda finding: KINDS.index(finding.kind))
        self.facts = list(self._facts())
        self.picture = list[str]()
        if not self._is_shifted:
            self.picture += _picture(read)

    def _faults(self) -> Iterator[Finding]:
        for kind in SIGHTS:
            wrong = self._wrong_readings(kind)
            if wrong and len(wrong) == len(self._known):
                where = self._sights.wrong[wrong[0]][kind]
                yield Finding(kind, f"{where}{self._cause(kind, where, wrong[0])}")
        for kind, where in self._labels.wrong.items():
            yield Finding(kind, f"{where}{HINTS.get(kind, '')}")
        if not any(self._read.targets):
            yield Finding(NOTHING, "no token of a batch is a target")
        if self._masks_ends():
            assert self._labels.lost_ends is not None
            name = self._read.tokenizer.text([self._read.tokenizer.pad or 0])
            yield Finding(ENDS, f"{self._labels.lost_ends}, all {name}; give padding its own token")
        yield from self._of_documents()
        yield from self._of_scale()

    @property
    def _is_shifted(self) -> bool:
        """Returns whether labels are other tokens' than those that they stand at."""
        return SHIFTED in self._labels.wrong

    @property
    def _known(self) -> list[str]:
        """Readings under which it is known who sees whom."""
        return [each for each in self._readings if each not in self._sights.unknown]

    def _wrong_readings(self, kind: str) -> list[str]:
        return [each for each in self._known if kind in self._sights.wrong[each]]

    def _cause(self, kind: str, where: Where, reading: str) -> str:
        """Returns why tokens see what they should not under a reading, in words that follow
        others."""
        batch = self._read.batches[where.batch]
        mask = batch.given.get("attention_mask")
        if mask is not None and mask.dim() == 4:
            return _cause_of_four(mask, reading)
        if kind != MIXED:
            return ""
        found = list(marks(batch))
        if "attention_mask" in found:
            return "; transformers reads numbers of attention_mask as 0 or 1"
        if not found:
            return "; rows have several documents, and batches do not say where these begin"
        if "position_ids" not in found:
            return f"; {reading} does not part them by {', '.join(found)}"
        is_hiding = not batch.not_padded.all()
        if mask is not None and (is_hiding or reading != FLASH):
            return "; with an attention mask, positions that begin anew part nothing"
        if reading == FLASH and len(batch.ids) > 1:
            return "; flash attention reads positions of batches of one row"
        return "; positions do not begin anew there"

    def _masks_ends(self) -> bool:
        """Returns whether all tokens that are also padding are no targets, though rows have no
        labels that say so."""
        if self._labels.lost_ends is None or self._labels.trained_alike:
            return False
        batch = self._read.batches[self._labels.lost_ends.batch]
        of_rows = [row["labels"] for row in batch.rows if isinstance(row, dict) and "labels" in row]
        return not of_rows or any(self._read.tokenizer.pad in list(labels) for labels in of_rows)

    def _of_documents(self) -> Iterator[Finding]:
        totals = self._totals
        if totals.missing and not self._read.unknown:
            yield Finding(MISSING, f"{totals.missing:,} of {totals.documents:,}")
        if totals.repeated:
            yield Finding(REPEATED, f"{totals.repeated:,} of {totals.documents:,}")

    def _of_scale(self) -> Iterator[Finding]:
        for number, targets in enumerate(self._read.targets):
            counted = self._read.batches[number].counted
            if counted and counted != targets:
                yield Finding(
                    SCALE,
                    f"× {targets / counted:.3g} in batch {number}: the Trainer divides by "
                    f"{counted:,}, and {_many(targets, 'token')} have a loss",
                )
                return

    def _not_tested(self) -> Iterator[tuple[str, str]]:
        by_reason = dict[str, list[str]]()
        for reading, reason in self._sights.unknown.items():
            by_reason.setdefault(reason, []).append(reading)
        for reason, readings in by_reason.items():
            yield f"who sees whom in {', '.join(readings)}", reason
        if not self._readings:
            yield "who sees whom", f"attn_implementation {self._attention!r} is not known"
        of_model = "attention, windows and losses of its own, and how it shifts labels"
        yield "the model", f"{of_model}: a check of a step tests these"
        if self._read.unknown:
            yield "missing documents", f"{self._read.unknown:,} tokens are in no row that was read"
        if self._read.texts is None and not all(self._read.marked):
            yield "rows of several documents", "no texts were given, and a row is taken for one"
        if self._read.unread:
            yield "other rows", f"{self._read.unread:,} were not read (most_rows)"

    def _facts(self) -> Iterator[str]:
        totals = self._totals
        batches = _many(len(self._read.batches), "batch", "batches")
        documents = _many(totals.documents, "document")
        if totals.parts:
            documents += f" ({totals.parts:,} of them are parts of texts)"
        yield (
            f"read: {documents} in {_many(totals.rows, 'row')} of {batches}: "
            f"{_many(totals.tokens, 'token')}, {totals.padding:,} of padding"
        )
        yield from self._facts_of_sight()
        yield from self._facts_of_labels()
        if not self._is_shifted:
            yield from _facts_of_ends(self._read)
        yield from _facts_of_count(self._read, self._labels)
        yield from _facts_of_texts(self._read, totals)

    def _facts_of_sight(self) -> Iterator[str]:
        partly = False
        for kind in SIGHTS:
            wrong = self._wrong_readings(kind)
            right = [each for each in self._known if each not in wrong]
            if wrong and right:
                partly = True
                yield f"{kind} in {', '.join(wrong)}; not in {', '.join(right)}"
        if self._sights.unmarked:
            readings = [each for each in self._known if each in self._sights.unmarked]
            where = self._sights.unmarked[readings[0]]
            names = ", ".join(readings)
            yield f"documents see each other in {names}, and nothing marks them: {where}"
        elif self._known and not partly and not any(self._sights.wrong.values()):
            unit = "row"
            if self._read.texts is not None or all(self._read.marked):
                unit = "document"
            yield (
                f"who sees whom, in usual models: tokens see what is before them in their {unit}, "
                f"and no other {unit} or padding ({', '.join(self._known)})"
            )

    def _facts_of_labels(self) -> Iterator[str]:
        totals = self._totals
        targets = sum(self._read.targets)
        yield f"trained: {targets:,} of {totals.tokens - totals.padding:,} tokens"
        trained = trained_roles(self._read)
        if trained.tokens and not self._is_shifted:
            yield f"trained by role: {_by_role(trained)}"
        if trained.unknown:
            documents = _many(trained.unknown, "document")
            yield f"messages of {documents} are not found in their tokens"
        if self._labels.next_unmarked is not None:
            yield (
                "first tokens of documents that follow another are targets: "
                f"{self._labels.next_unmarked}"
            )
        if totals.added:
            yield (
                f"tokens that are in no document and no padding: {totals.added:,}, "
                f"{totals.added_targets:,} of them targets"
            )
        if totals.without_target:
            yield f"documents without a target: {totals.without_target:,}"


def _cause_of_four(mask: torch.Tensor, reading: str) -> str:
    """Returns why a mask of four dimensions does not hide what it should, if it hides nothing."""
    is_added = reading in ADDING or mask.is_floating_point()
    if is_added and not (mask.double() <= HIDES).any():
        return f"; {reading} adds this mask to scores, and it hides nothing"
    return ""


def _by_role(trained: Trained) -> str:
    names = sorted(trained.tokens, key=lambda role: (-trained.targets[role], role))
    counts = [f"{name} {trained.targets[name]:,} of {trained.tokens[name]:,}" for name in names]
    return ", ".join(counts)


def _facts_of_ends(read: Read) -> Iterator[str]:
    ends = ends_of(read)
    if ends.tokens:
        name = read.tokenizer.text([ends.tokens.most_common(1)[0][0]])
        count = ends.tokens.total()
        yield (
            f"ends: special tokens at the end of {_many(count, 'document')}, mostly {name}, "
            f"{ends.trained:,} of them targets"
        )
    if ends.untrained:
        yield (
            "ends that are no targets though the token before them is, so that nothing trains a "
            f"model to stop there: {ends.untrained:,}"
        )
    if ends.missing:
        yield (
            "documents that end without a special token, so that nothing trains a model to stop "
            f"there: {ends.missing:,}"
        )


def _facts_of_count(read: Read, labels: Labels) -> Iterator[str]:
    targets = sum(read.targets)
    fewest = min(read.targets)
    most = max(read.targets)
    of_batch = f"{fewest:,}"
    if most > fewest:
        of_batch += f" to {most:,}"
    yield f"N: {of_batch} targets in a batch, {targets:,} in all{_divided(read)}"
    if labels.first and targets:
        factor = targets / (targets + labels.first)
        yield (
            f"labels of first tokens of rows, which have no loss: {labels.first:,}; who divides by "
            f"all labels scales the loss by {factor:.3g}"
        )


def _divided(read: Read) -> str:
    """Returns by what a Trainer divides the sum of losses, in words that follow others."""
    if not read.divided_by_trainer:
        return ""
    counted = [batch.counted for batch in read.batches]
    if None in counted:
        return ", and each batch has the mean of its own: its model takes no num_items_in_batch"
    if counted == read.targets:
        return ", and the Trainer counts as many"
    return ""


def _facts_of_texts(read: Read, totals: Totals) -> Iterator[str]:
    if totals.cut:
        yield f"cut documents: {totals.cut:,}, of which {totals.lost:,} tokens are in no batch"
    if read.texts is None or read.unread:
        return
    strange = _of_no_text(read)
    if strange:
        yield f"documents of no text, as the tokenizer's template makes it: {strange:,}"
        return
    left = left_of(read.texts, read.documents)
    if left.texts:
        yield f"texts that are in no row: {left.texts:,} of {len(read.texts.ids):,}"
    if left.cut:
        yield f"cut texts: {left.cut:,}, of which {left.tokens:,} tokens are in no row"
    if left.cut is None and left.tokens and not read.unknown and not totals.added:
        yield f"texts lie over several rows: {left.tokens:,} tokens of them are in no row"


def _of_no_text(read: Read) -> int:
    """Returns how many documents were made of no text that is known."""
    return sum(document.text is None for each in read.documents for document in each)


def _many(count: int, what: str, plural: str = "") -> str:
    """Returns a number of things in words."""
    if count == 1:
        return f"1 {what}"
    return f"{count:,} {plural or what + 's'}"


def _picture(read: Read) -> Iterator[str]:
    """Yields lines of the first documents that have targets: their text, with marks around what is
    trained."""
    shown = 0
    for batch, places in zip(read.batches, read.places, strict=True):
        for row, piece in places.pieces:
            if not batch.targets[row, piece.begin : piece.end].any():
                continue
            yield _marked(batch, row, begin=piece.begin, end=piece.end, tokenizer=read.tokenizer)
            shown += 1
            if shown == SHOWN_DOCUMENTS:
                return


def _marked(batch: Batch, row: int, *, begin: int, end: int, tokenizer: Tokenizer) -> str:
    """Returns the text of tokens of a row, on one line, with marks around what is trained."""
    ids = batch.ids[row].tolist()
    targets = batch.targets[row].tolist()
    parts = []
    first = begin
    for at in range(begin + 1, end + 1):
        if at < end and targets[at] == targets[first]:
            continue
        text = _short(tokenizer.text(ids[first:at]))
        parts.append(f"{BEGIN}{text}{END}" if targets[first] else text)
        first = at
    if len(parts) > SHOWN_PARTS:
        parts[SHOWN_PARTS - 1 : -1] = [" .. "]
    return "".join(parts).replace("\n", "\\n")


def _short(text: str) -> str:
    if len(text) <= SHOWN_CHARACTERS:
        return text
    half = SHOWN_CHARACTERS // 2
    return f"{text[:half]} .. {text[-half:]}"
