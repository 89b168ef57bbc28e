"""Masks by which other tools pack documents into a row: one that numbers them, and one of four axes
that lets each see itself alone."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from longctx.trainers.refusals import TrainerError

HIDDEN = -1e4
"""What a mask that is added to scores has at most where nothing is seen."""
FOUR_AXES = (
    "attention_mask has 4 axes: return one of [rows, tokens], or one that lets each document of a "
    "row see itself alone, causally, as LLaMA-Factory's neat_packing does (True, or 0 where "
    "something is seen). Packing is not needed, as documents are planned without padding: in "
    "LLaMA-Factory set packing and neat_packing to false"
)


def with_flat_mask(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a batch whose `attention_mask` has two axes: one of four becomes the number of the
    document that each token is in [rows, tokens], 0 for padding. Raises TrainerError for what is
    no causal mask of documents."""
    mask = batch.get("attention_mask")
    if not isinstance(mask, torch.Tensor) or mask.dim() != 4:
        return batch
    return {**batch, "attention_mask": _numbers(mask)}


def _numbers(mask: torch.Tensor) -> torch.Tensor:
    rows, heads, queries, keys = mask.shape
    if heads != 1 or queries != keys:
        raise TrainerError(FOUR_AXES)
    mask = mask[:, 0].cpu()
    if mask.dtype == torch.bool:
        visible = mask
    elif mask.is_floating_point() and bool(((mask == 0) | (mask <= HIDDEN)).all()):
        visible = mask == 0
    else:
        raise TrainerError(FOUR_AXES)
    is_token = visible.diagonal(dim1=1, dim2=2)
    sees_previous = torch.zeros(rows, keys, dtype=torch.bool)
    sees_previous[:, 1:] = visible.diagonal(offset=-1, dim1=1, dim2=2)
    numbers = (is_token & ~sees_previous).long().cumsum(1) * is_token
    same = numbers[:, :, None] == numbers[:, None, :]
    expected = same.tril() & is_token[:, :, None]
    if not torch.equal(visible[is_token], expected[is_token]):
        raise TrainerError(FOUR_AXES)
    return numbers


def numbers_documents(mask: Any) -> bool:
    """Returns whether a mask [rows, tokens] numbers documents from 1, as packing does in Axolotl,
    and is no mask of 1 and 0."""
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or mask.is_floating_point():
        return False
    if mask.dtype == torch.bool or not mask.numel():
        return False
    return bool(mask.min() >= 0) and bool((mask == 1).any()) and int(mask.max()) > 1


def check_numbers(row: int, numbers: np.ndarray[Any, Any], cuts: list[int]) -> None:
    """Raises TrainerError unless `position_ids`, which cut a row without padding at `cuts`, begin
    again where another document is numbered."""
    numbered = np.flatnonzero(np.diff(numbers)) + 1
    if numbered.tolist() != cuts:
        raise TrainerError(
            f"attention_mask numbers documents of row {row}, which begin at tokens "
            f"{[0, *numbered.tolist()][:4]}, but by position_ids they begin at {[0, *cuts][:4]}: "
            "return position_ids that begin at 0 in each document"
        )
