"""`check_data`: what a collator or a Trainer makes of texts, without a model: who sees whom, what
has labels, and by how many targets the loss is divided.

from longctx.check import Data, check_data

def test_my_collator():
    check_data(Data(rows, collator, tokenizer)).raise_if_wrong()
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from inspect import signature
from typing import Any

from .data_batches import (
    Batch,
    Data,
    DataOfTrainer,
    batches_of,
    batches_of_trainer,
    first_rows,
    has_own_loss,
)
from .data_documents import has_ids, has_text, says_documents
from .data_places import places_of
from .data_read import Read
from .data_roles import Tokenizer
from .data_shown import KINDS, Words
from .data_sight import marks
from .data_texts import Texts, documents_in
from .errors import CheckError, UsageError
from .finding import Finding

NAME = "data"
"""What lines of the report begin with."""


@dataclass
class DataReport:
    """What batches are like.

    Attributes:
        findings: faults, the most telling first; none: nothing is wrong that was tested.
        allowed: faults that the user has allowed.
        facts: what is no fault by itself, in words.
        picture: lines that show what is trained of some documents.
        not_tested: what these batches could not show, with the reason.
    """

    findings: list[Finding]
    allowed: list[Finding]
    facts: list[str]
    picture: list[str]
    not_tested: dict[str, str]

    @property
    def status(self) -> int:
        """Exit status: 0 right, 1 wrong."""
        return int(bool(self.findings))

    def raise_if_wrong(self) -> None:
        """Raises AssertionError with all that is wrong."""
        if self.status:
            raise AssertionError("\n".join(self.lines()))

    def lines(self) -> list[str]:
        """Returns what to print: a line for each fault, then facts, and what was not tested."""
        words = [str(finding) for finding in self.findings] or ["right"]
        if self.allowed:
            words.append(f"allowed: {', '.join(each.kind for each in self.allowed)}")
        found = [f"{NAME}: {each}" for each in [*words, *self.facts]]
        found += [f"    {line}" for line in self.picture]
        return found + [f"not tested: {what}: {why}" for what, why in self.not_tested.items()]

    def to_json(self) -> str:
        """Returns the report as JSON."""
        row = {
            "faults": [asdict(finding) for finding in self.findings],
            "allowed": [finding.kind for finding in self.allowed],
            "facts": self.facts,
            "picture": self.picture,
            "not_tested": self.not_tested,
        }
        return json.dumps(row, indent=1)


def check_data(made: Any, allow: Sequence[str] = ()) -> DataReport:
    """Judges the batches that a model would be trained on; calls no model.

    `made` is a `Data`, or rows, collator and tokenizer; or a transformers.Trainer or a
    `DataOfTrainer`, whose first epoch is read. `allow` has faults that are meant, as they are
    printed before the first colon. Raises CheckError for what cannot be read, UsageError for an
    allowed fault that does not exist.
    """
    for name in allow:
        if name not in KINDS:
            near = get_close_matches(name, KINDS, n=3, cutoff=0.0)
            known = ", or ".join(map(repr, near))
            raise UsageError(f"no fault of data is called {name!r}: did you mean {known}?")
    data = _data_of(made)
    if isinstance(data, DataOfTrainer):
        read = _read_trainer(data)
        attention = str(data.trainer.model.config._attn_implementation or "")
    else:
        read = _read_data(data)
        attention = data.attention
    words = Words(read, attention)
    allowed = [finding for finding in words.findings if finding.kind in allow]
    left = [finding for finding in words.findings if finding not in allowed]
    return DataReport(
        left,
        allowed=allowed,
        facts=words.facts,
        picture=words.picture,
        not_tested=words.not_tested,
    )


def _data_of(made: Any) -> Data | DataOfTrainer:
    if isinstance(made, Data | DataOfTrainer):
        return made
    if isinstance(made, tuple) and len(made) == 3:
        rows, collate, tokenizer = made
        return Data(rows, collate, tokenizer)
    if hasattr(made, "get_train_dataloader"):
        return DataOfTrainer(made)
    raise CheckError(
        f"data is {type(made).__name__}: return a Data, or rows, collator and tokenizer, or a "
        "transformers.Trainer"
    )


def _read_trainer(data: DataOfTrainer) -> Read:
    """Reads the batches of a Trainer. Raises CheckError if it has no tokenizer, its model an
    encoder, or the process several GPUs."""
    if data.trainer.args.n_gpu > 1:
        raise CheckError("this process has several GPUs: set CUDA_VISIBLE_DEVICES=0")
    if "decoder_input_ids" in signature(data.trainer.model.forward).parameters:
        raise CheckError("the Trainer's model has an encoder: its labels are not of its input")
    processor = data.trainer.processing_class
    if processor is None:
        raise CheckError("the Trainer has no tokenizer: pass processing_class")
    tokenizer = getattr(processor, "tokenizer", processor)
    batches = list(batches_of_trainer(data))
    rows = data.trainer.train_dataset
    unread = 0
    if hasattr(rows, "__len__"):
        read = sum(len(batch.rows) for batch in batches)
        unread = max(0, len(rows) - read)
    return _read(
        batches,
        tokenizer=tokenizer,
        texts=data.texts,
        unread=unread,
        divided_by_trainer=not has_own_loss(data.trainer),
    )


def _read_data(data: Data) -> Read:
    """Reads the batches of a collator. Rows that have texts beside token ids, or no token ids, are
    also the texts."""
    rows = first_rows(data)
    texts = data.texts
    if not len(texts) and rows and (has_text(rows[0]) or not has_ids(rows[0])):
        texts = rows
    unread = len(data.rows) - len(rows)
    batches = list(batches_of(data))
    return _read(
        batches,
        tokenizer=data.tokenizer,
        texts=texts,
        unread=unread,
        divided_by_trainer=False,
    )


def _read(
    batches: list[Batch],
    *,
    tokenizer: Any,
    texts: Sequence[Any],
    unread: int,
    divided_by_trainer: bool,
) -> Read:
    """Returns batches with what follows of each. Raises CheckError if there is none."""
    if not batches:
        raise CheckError("there is no batch: is the data set empty?")
    asked = Tokenizer(tokenizer)
    known: Texts | None = None
    if len(texts):
        known = Texts(texts, asked)
    documents = documents_in(batches, known, asked)
    places = []
    marked = []
    for batch, of_batch in zip(batches, documents, strict=True):
        ids = [document.ids for document in of_batch]
        places.append(places_of(batch, ids, asked))
        says = any(has_ids(row) and says_documents(row, asked) for row in batch.rows)
        marked.append(says or any(marks(batch)))
    return Read(
        batches,
        places=places,
        documents=documents,
        marked=marked,
        tokenizer=asked,
        texts=known,
        divided_by_trainer=divided_by_trainer,
        unread=unread,
    )
