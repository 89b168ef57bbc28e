"""What a loop of one's own begins with, until a data set, collator and sampler of its own take the
place."""

import torch
import torch.distributed as dist

from .probe import Probe

IGNORED = -100
"""Label of a token that is no target."""


def place() -> tuple[int, int]:
    """Returns the rank of this process and the number of ranks."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def padded_batches(probe: Probe) -> list[dict[str, torch.Tensor]]:
    """Returns the micro-batches of this rank: ids, labels and attention mask, [rows, tokens] each,
    padded at the right. One without a row has a row of padding."""
    rank, ranks = place()
    mine = probe.rows[rank::ranks]
    batches = []
    for number in range(probe.micro_batches):
        rows = mine[number :: probe.micro_batches]
        if not rows:
            rows = [{"input_ids": [probe.pad], "labels": [IGNORED]}]
        batches.append(padded(rows, probe.pad))
    return batches


def padded(rows: list[dict[str, list[int]]], pad: int) -> dict[str, torch.Tensor]:
    """Returns ids, labels and attention mask of rows, [rows, tokens] each, padded at the right."""
    longest = max(len(row["input_ids"]) for row in rows)
    batch: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "attention_mask": []}
    for row in rows:
        length = len(row["input_ids"])
        missing = longest - length
        batch["input_ids"].append(row["input_ids"] + [pad] * missing)
        batch["labels"].append(row["labels"] + [IGNORED] * missing)
        batch["attention_mask"].append([1] * length + [0] * missing)
    return {name: torch.tensor(values) for name, values in batch.items()}


def packed_batches(
    probe: Probe, length: int = 128, *, shared: bool = False
) -> list[dict[str, torch.Tensor]]:
    """Returns the micro-batches of this rank, a row of whole documents each, [1, `length`], filled
    up with padding, whose tokens are documents of their own: ids, labels that stand at the token
    before, positions in documents and numbers of documents. All ranks have as many, or the same
    ones if `shared`."""
    rank, ranks = place()
    rows = [_empty_row()]
    for number, row in enumerate(probe.rows):
        ids = row["input_ids"]
        if len(rows[-1]["input_ids"]) + len(ids) > length:
            rows.append(_empty_row())
        last = rows[-1]
        last["input_ids"] += ids
        last["labels"] += [*row["labels"][1:], IGNORED]
        last["positions"] += range(len(ids))
        last["documents"] += [number] * len(ids)
    if not shared:
        while len(rows) % ranks:
            rows.append(_empty_row())
    for row in rows:
        missing = length - len(row["input_ids"])
        row["input_ids"] += [probe.pad] * missing
        row["labels"] += [IGNORED] * missing
        row["positions"] += [0] * missing
        row["documents"] += range(-missing, 0)
    mine = rows[rank::ranks]
    if shared:
        mine = rows
    return [{name: torch.tensor([values]) for name, values in row.items()} for row in mine]


def _empty_row() -> dict[str, list[int]]:
    return {"input_ids": [], "labels": [], "positions": [], "documents": []}


def targets_of(batches: list[dict[str, torch.Tensor]], *, shifted: bool = False) -> int:
    """Returns the number of targets in the micro-batches of all ranks, whose labels stand at their
    own token, or if `shifted` at the one before. Collective."""
    count = torch.tensor(0)
    for batch in batches:
        labels = batch["labels"] if shifted else batch["labels"][:, 1:]
        count += (labels != IGNORED).sum()
    if dist.is_initialized():
        dist.all_reduce(count)
    return int(count)
