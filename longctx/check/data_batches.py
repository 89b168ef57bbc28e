"""What a trainer reads: batches of a collator or of a Trainer, with the rows that each was made of.
No model is called."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch

from .errors import CheckError
from .loop import IGNORED

MOST_ROWS = 2000
"""Rows that are read unless another number is given."""


@dataclass
class Data:
    """Rows, and what makes batches of them.

    Attributes:
        rows: what the collator takes; `input_ids` in each, or texts.
        collate: returns a batch of a list of rows.
        tokenizer: of transformers.
        texts: what the rows were made of: strings, lists of messages, or rows with `text`,
            `messages`, or `prompt` and `completion`. Without them roles are not known.
        rows_per_batch: rows that `collate` gets at a time.
        attention: implementation, as `attn_implementation` of transformers; empty: not known.
        most_rows: rows to read.
    """

    rows: Sequence[Any]
    collate: Callable[[list[Any]], Any]
    tokenizer: Any
    texts: Sequence[Any] = ()
    rows_per_batch: int = 4
    attention: str = ""
    most_rows: int = MOST_ROWS


@dataclass
class DataOfTrainer:
    """The training data of a transformers.Trainer, or of a class that inherits from it; `texts` and
    `most_rows` as in `Data`."""

    trainer: Any
    texts: Sequence[Any] = ()
    most_rows: int = MOST_ROWS


@dataclass
class Batch:
    """One micro-batch, on the CPU.

    Attributes:
        rows: what the collator was given.
        ids, labels: [rows, tokens]; labels are -100 where a token is no target.
        given: all that the collator returned, by name.
        counted: number that a Trainer divides the sum of losses by; None without a Trainer, where
            the loss is the user's, or where the model takes means.
    """

    rows: list[Any]
    ids: torch.Tensor
    labels: torch.Tensor
    given: dict[str, Any] = field(default_factory=dict)
    counted: int | None = None

    @property
    def targets(self) -> torch.Tensor:
        """Tokens [rows, tokens] that causal LMs of transformers have a loss for."""
        found = self.labels != IGNORED
        found[:, 0] = False
        return found

    @property
    def not_padded(self) -> torch.Tensor:
        """Tokens [rows, tokens] that the attention mask has, if it has two dimensions; else all."""
        mask = self.given.get("attention_mask")
        if mask is None or mask.dim() != 2:
            return torch.ones_like(self.ids, dtype=torch.bool)
        found: torch.Tensor = mask != 0
        return found


def batch_of(rows: list[Any], collated: Any) -> Batch:
    """Returns a batch of what a collator returned. Raises CheckError if it has no token ids, or no
    labels."""
    given = {name: _tensor(value) for name, value in dict(collated).items()}
    for name in ("input_ids", "labels"):
        if given.get(name) is None:
            raise CheckError(f"the collator returned no {name}, but {', '.join(given)}")
    ids = torch.atleast_2d(torch.as_tensor(given["input_ids"]))
    labels = torch.atleast_2d(torch.as_tensor(given["labels"]))
    if ids.shape != labels.shape:
        raise CheckError(
            f"input_ids are {list(ids.shape)}, labels {list(labels.shape)}: they must be alike"
        )
    if given.get("shift_labels") is not None:
        labels = _shifted_back(torch.atleast_2d(given["shift_labels"]), labels)
    return Batch(rows, ids=ids, labels=labels, given=given)


def batches_of(data: Data) -> Iterator[Batch]:
    """Yields the batches of the first rows, in order."""
    rows = first_rows(data)
    for begin in range(0, len(rows), data.rows_per_batch):
        of_batch = rows[begin : begin + data.rows_per_batch]
        yield batch_of(of_batch, data.collate(list(of_batch)))


def first_rows(data: Data) -> list[Any]:
    """Returns the rows that are read."""
    count = min(len(data.rows), data.most_rows)
    return [data.rows[number] for number in range(count)]


def batches_of_trainer(data: DataOfTrainer) -> Iterator[Batch]:
    """Yields the batches of a Trainer's first epoch until they have so many rows. Nothing is
    trained."""
    trainer = data.trainer
    made = list[list[Any]]()
    own_loss = has_own_loss(trainer)
    read = 0
    with _recorded(trainer, made):
        for number, collated in enumerate(trainer.get_train_dataloader()):
            batch = batch_of(made[number], collated)
            if not own_loss:
                batch.counted = _counted(trainer, collated)
            yield batch
            read += len(made[number])
            if read >= data.most_rows:
                return


@contextmanager
def _recorded(trainer: Any, made: list[list[Any]]) -> Iterator[None]:
    """Appends to `made` the rows of each batch, meanwhile, in this process alone."""
    collate = trainer.data_collator
    args = trainer.args

    def recorded(rows: list[Any]) -> Any:
        made.append(list(rows))
        return collate(rows)

    trainer.data_collator = recorded
    trainer.args = copy(args)
    trainer.args.dataloader_num_workers = 0
    trainer.args.dataloader_prefetch_factor = None
    trainer.args.dataloader_persistent_workers = False
    try:
        yield
    finally:
        trainer.data_collator = collate
        trainer.args = args


def has_own_loss(trainer: Any) -> bool:
    """Returns whether the loss of a Trainer is that of no class of transformers or TRL."""
    losses = (type(trainer).compute_loss, trainer.compute_loss_func)
    return any(loss is not None and not _is_theirs(loss) for loss in losses)


def _is_theirs(loss: Any) -> bool:
    package, _, _ = str(getattr(loss, "__module__", "")).partition(".")
    return package in ("transformers", "trl")


def _counted(trainer: Any, collated: Any) -> int | None:
    """Returns `num_items_in_batch` of a micro-batch that is a step of its own."""
    count = trainer._get_num_items_in_batch([collated], trainer.args.device)
    if count is None:
        return None
    return int(count)


def _shifted_back(shifted: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns labels at their tokens, of those that are at the tokens before; the first of a row is
    ignored."""
    found = torch.full_like(labels, IGNORED)
    found[:, 1:] = shifted[:, :-1]
    return found


def _tensor(value: Any) -> Any:
    """Returns a tensor, or an array of numpy, as a tensor on the CPU, and all else as it is."""
    if hasattr(value, "__array__"):
        value = torch.as_tensor(value)
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    return value
