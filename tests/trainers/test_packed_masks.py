"""Masks by which other tools pack documents into a row: documents are found in them again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from longctx.trainers import TrainerError, dynamic_context_parallel
from longctx.trainers.documents import cut_rows
from longctx.trainers.packed_masks import with_flat_mask
from tests.trainer_cases import (
    LONGEST,
    PROFILE,
    TOKENS_PER_RANK,
    arguments,
    as_rank,
    documents,
    model,
    pad,
)
from tests.workers import Workers

Batch = dict[str, torch.Tensor]
NUMBERS = torch.tensor([[1, 1, 1, 2, 2, 3, 0, 0], [1, 1, 2, 2, 2, 2, 2, 2]])
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 0, 0, 0], [0, 1, 0, 1, 2, 3, 4, 5]])
LENGTHS = [[3, 2, 1], [2, 6]]


def visible(numbers: torch.Tensor) -> torch.Tensor:
    """True where a token sees another [rows, 1, tokens, tokens]."""
    same = numbers[:, None, :, None] == numbers[:, None, None, :]
    return same.tril() & (numbers != 0)[:, None, :, None]


def added(numbers: torch.Tensor) -> torch.Tensor:
    """As LLaMA-Factory's neat_packing."""
    lowest = torch.finfo(torch.float32).min
    return torch.where(visible(numbers), 0.0, lowest)


def batch_of(mask: torch.Tensor) -> Batch:
    ids = torch.arange(16).view(2, 8)
    return {"input_ids": ids, "labels": ids, "attention_mask": mask, "position_ids": POSITIONS}


@pytest.mark.parametrize("mask", [NUMBERS, added(NUMBERS), visible(NUMBERS)])
def test_documents_are_found_in_a_mask(mask: torch.Tensor) -> None:
    rows = cut_rows(with_flat_mask(batch_of(mask)))
    assert [[len(document.tokens) for document in row] for row in rows] == LENGTHS
    assert rows[0][1].tokens.tolist() == [3, 4]
    assert rows[0][1].labels.tolist() == [4, -100]  # no document learns the first of the next


def seen_across(mask: torch.Tensor) -> torch.Tensor:
    changed = mask.clone()
    changed[0, 0, 4, 1] = 0
    return changed


@pytest.mark.parametrize(
    "mask",
    [
        seen_across(added(NUMBERS)),
        added(NUMBERS) + 0.5,
        added(NUMBERS).expand(2, 4, 8, 8),
        visible(NUMBERS).long(),
        added(NUMBERS)[..., :-1],
        torch.full((2, 1, 8, 8), torch.nan),
    ],
    ids=["seen across", "biases", "of heads", "numbers", "not square", "NaN"],
)
def test_another_mask_of_four_axes_is_refused(mask: torch.Tensor) -> None:
    with pytest.raises(TrainerError, match="set packing and neat_packing to false"):
        with_flat_mask(batch_of(mask))


def test_a_window_in_a_mask_is_refused() -> None:
    """Plain training would see fewer tokens than documents have."""
    windowed = visible(torch.ones(1, 8, dtype=torch.int64)).triu(-3)
    with pytest.raises(TrainerError, match="see itself alone"):
        with_flat_mask({"attention_mask": windowed})


def test_numbers_that_positions_contradict_are_refused() -> None:
    batch = batch_of(NUMBERS)
    batch["position_ids"] = torch.arange(8).expand(2, 8)
    with pytest.raises(TrainerError, match=r"begin at tokens \[0, 3, 5\], but by position_ids"):
        cut_rows(batch)
    del batch["position_ids"]
    with pytest.raises(TrainerError, match="attention_mask has 2, but must be 1 for tokens"):
        cut_rows(batch)


def packed(make_mask: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Batch]:
    """A collator that packs the documents of a batch into a row, with padding after it."""

    def collate(rows: list[dict[str, list[int]]]) -> Batch:
        ids: list[int] = []
        labels: list[int] = []
        positions: list[int] = []
        numbers: list[int] = []
        for number, row in enumerate(rows, start=1):
            length = len(row["input_ids"])
            ids += row["input_ids"]
            labels += [-100, *row["labels"][1:]]
            positions += range(length)
            numbers += [number] * length
        batch = {
            "input_ids": [*ids, 0, 0],
            "labels": [*labels, -100, -100],
            "position_ids": [*positions, 0, 0],
        }
        found = {name: torch.tensor([values]) for name, values in batch.items()}
        found["attention_mask"] = make_mask(torch.tensor([[*numbers, 0, 0]]))
        return found

    return collate


def losses(folder: Path, form: str) -> list[float]:
    """Losses of training and evaluation of a run on packed rows, or a plain one on padded rows."""
    ranks = as_rank()
    collate = {"numbers": packed(torch.Tensor.clone), "four axes": packed(added), "plain": pad}
    trainer = Trainer(
        model("qwen2"),
        TrainingArguments(**arguments(folder, ranks, 1, max_steps=3, eval_steps=2)),
        data_collator=collate[form],
        train_dataset=documents(36),
        eval_dataset=documents(12, seed=1),
    )
    if form != "plain":
        budget = TOKENS_PER_RANK if ranks > 1 else LONGEST
        dynamic_context_parallel(trainer, profile=PROFILE, tokens_per_rank=budget)
    trainer.train()
    log = trainer.state.log_history
    return [entry.get("loss", entry.get("eval_loss")) for entry in log[:-1]]


@pytest.mark.parametrize("form", ["numbers", "four axes"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_packed_rows_train_as_padded_ones(
    workers: Workers, tmp_path: Path, form: str, ranks: int
) -> None:
    """Those of plain training."""
    (expected,) = workers.run(losses, 1, tmp_path, "plain")
    assert len(expected) == 4
    for found in workers.run(losses, ranks, tmp_path, form):
        assert found == pytest.approx(expected, rel=1e-6)
