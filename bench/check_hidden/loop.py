"""A training loop on one process, with a place for each fault."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from bench.check_hidden.attend import layout
from bench.check_hidden.cases import IGNORED, Batch, Row, cast
from longctx.check import Probe, Step, record


def all_rows(probe: Probe) -> list[Row]:
    return list(probe.rows)


def same(model: Any) -> Any:
    return model


def nothing(model: Any) -> None:
    """Changes nothing."""


# --- batches: [rows, tokens]; "documents" counts from 0, -1 is padding


def table(rows: Sequence[Sequence[int]], filler: int, left: bool, length: int) -> torch.Tensor:
    """Returns rows of one length, filled up at one side."""
    filled = []
    for row in rows:
        padding = [filler] * (length - len(row))
        whole = [*padding, *row] if left else [*row, *padding]
        filled.append(whole)
    return torch.tensor(filled)


def batch_of(probe: Probe, rows: list[Row], left: bool = False, multiple: int = 1) -> Batch:
    """Returns ids, labels and a mask of rows that are padded to the longest; at the left, first
    tokens lose their labels, which padding would predict."""
    longest = max(len(row["input_ids"]) for row in rows)
    length = math.ceil(longest / multiple) * multiple
    ids = [row["input_ids"] for row in rows]
    labels = [row["labels"] for row in rows]
    if left:
        labels = [[IGNORED, *row[1:]] for row in labels]
    ones = [[1] * len(row) for row in ids]
    return {
        "input_ids": table(ids, probe.pad, left, length),
        "labels": table(labels, IGNORED, left, length),
        "attention_mask": table(ones, 0, left, length),
    }


def padded(probe: Probe, rows: list[Row]) -> Batch:
    return batch_of(probe, rows)


def padded_left(probe: Probe, rows: list[Row]) -> Batch:
    """Returns rows that are padded at the left, with positions from their first token on."""
    batch = batch_of(probe, rows, left=True)
    batch["position_ids"] = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    return batch


def packed(probe: Probe, rows: list[Row]) -> Batch:
    """Returns one row of all documents, whose first tokens have no labels."""
    ids: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    documents: list[int] = []
    for number, row in enumerate(rows):
        length = len(row["input_ids"])
        ids += row["input_ids"]
        labels += [IGNORED, *row["labels"][1:]]
        positions += range(length)
        documents += [number] * length
    return {
        "input_ids": torch.tensor([ids]),
        "labels": torch.tensor([labels]),
        "position_ids": torch.tensor([positions]),
        "documents": torch.tensor([documents]),
    }


def block_mask(documents: torch.Tensor) -> torch.Tensor:
    """Returns what to add to scores so that documents stay apart, [rows, 1, queries, keys]."""
    tokens = documents.shape[-1]
    together = documents[:, :, None] == documents[:, None, :]
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    mask = torch.zeros(together.shape).masked_fill(~(together & causal), -1e9)
    return mask[:, None]


# --- forward


GIVEN = ("input_ids", "attention_mask", "position_ids")


def forward(model: Any, batch: Batch) -> torch.Tensor:
    """Returns logits, [rows, tokens, vocabulary]."""
    given = {name: batch[name] for name in GIVEN if name in batch}
    logits: torch.Tensor = model(**given, use_cache=False).logits
    return logits.float()


def forward_kernel(model: Any, batch: Batch) -> torch.Tensor:
    """Returns logits of a packed row, after a word to the kernel about its documents."""
    layout.at = batch["position_ids"][0]
    layout.documents = batch["documents"][0]
    return forward(model, batch)


def forward_masked(model: Any, batch: Batch) -> torch.Tensor:
    """Returns logits of a packed row, with a mask of documents for all layers."""
    mask = block_mask(batch["documents"]).to(next(model.parameters()).dtype)
    return forward(model, {**batch, "attention_mask": mask})


# --- the loss


def shifted(labels: torch.Tensor) -> torch.Tensor:
    """Returns what each token is to predict."""
    last = torch.full_like(labels[:, :1], IGNORED)
    return torch.cat([labels[:, 1:], last], dim=1)


def losses_of(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Returns losses, [rows, tokens]; 0 where nothing is to be predicted."""
    return cross_entropy(logits.transpose(1, 2), wanted, ignore_index=IGNORED, reduction="none")


@dataclass(frozen=True)
class Amounts:
    """Numbers that a loss may be divided by.

    Attributes:
        targets: of all micro-batches.
        steps: micro-batches.
        tokens: of all micro-batches, padding included.
    """

    targets: int
    steps: int
    tokens: int


def summed(losses: torch.Tensor, wanted: torch.Tensor, amounts: Amounts) -> torch.Tensor:
    return losses.sum() / amounts.targets


def nothing_between(model: Any, number: int, steps: int) -> None:
    """Changes nothing after a micro-batch."""


def no_log(model: Any, losses: list[float]) -> dict[str, float]:
    return {}


@dataclass(frozen=True)
class Loop:
    """A loop by parts.

    Attributes:
        adapt: makes of the model what is trained; reference and truth have it too.
        before: changes how the model computes, before it is recorded.
        prepare: the same, after.
        between, after: do something to gradients after each micro-batch, and at the end.
        log: returns the loss and the norm that are logged.
    """

    kind: str = "llama"
    sizes: dict[str, Any] = field(default_factory=dict)
    adapt: Callable[[Any], Any] = same
    before: Callable[[Any], Any] = same
    prepare: Callable[[Any], None] = nothing
    rows: Callable[[Probe], list[Row]] = all_rows
    collate: Callable[[Probe, list[Row]], Batch] = padded
    forward: Callable[[Any, Batch], torch.Tensor] = forward
    wanted: Callable[[torch.Tensor], torch.Tensor] = shifted
    losses: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = losses_of
    total: Callable[[torch.Tensor, torch.Tensor, Amounts], torch.Tensor] = summed
    between: Callable[[Any, int, int], None] = nothing_between
    after: Callable[[Any], None] = nothing
    log: Callable[[Any, list[float]], dict[str, float]] = no_log

    def model(self, probe: Probe) -> Any:
        """Returns the model that is trained."""
        model = cast(probe.model(self.kind, **self.sizes))
        return self.adapt(model)

    def step(self, probe: Probe) -> Step:
        """Returns one optimizer step on the probe's rows."""
        model = self.before(self.model(probe))
        rows = self.rows(probe)
        parts = [rows[number :: probe.micro_batches] for number in range(probe.micro_batches)]
        batches = [self.collate(probe, part) for part in parts if part]
        wanted = [self.wanted(batch["labels"]) for batch in batches]
        amounts = Amounts(
            targets=sum(int((labels != IGNORED).sum()) for labels in wanted),
            steps=len(batches),
            tokens=sum(batch["input_ids"].numel() for batch in batches),
        )
        logged = []
        with record(model) as seen:
            self.prepare(model)
            for number, batch in enumerate(batches):
                logits = self.forward(model, batch)
                losses = self.losses(logits, wanted[number])
                loss = self.total(losses, wanted[number], amounts)
                loss.backward()
                logged.append(float(loss.detach()))
                self.between(model, number, len(batches))
            self.after(model)
            log = self.log(model, logged)
            return seen.step(loss=log.get("loss"), grad_norm=log.get("grad_norm"))


PADDED = Loop()
PACKED = Loop(collate=packed)
