"""Token ids: records of tokens that another program made, as trainers write them, and Megatron's
files of them."""

from typing import Any

import numpy as np
import numpy.typing as npt

from longctx.data import IGNORED_LABEL
from longctx.data.records.messages import FormatError
from longctx.data.records.tokenizer import TokenWeights, are_weights, token_weights

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
WEIGHTS = ("loss_mask", "weights")
"""Keys of the weight of each token in the loss, often only 0 or 1."""
MASKS = (*WEIGHTS, "completion_mask", "assistant_masks")
"""Keys of a mask with 1 for each token that has a loss; the last two are TRL's."""
PACKED = ("position_ids", "seq_lengths")
IDS_KEYS = ("input_ids", "labels", *MASKS, "attention_mask", *PACKED)
"""Keys that say something of the tokens of a record."""
APART = "give a record per document, so that attention does not cross their edges"


def token_ids(record: dict[str, Any]) -> tuple[Ids, TokenWeights | None, set[str]]:
    """Returns the tokens of a record, their weights as targets (None: all 1), and the keys used.

    `labels` are the ids themselves where there is a loss, not shifted, and -100 elsewhere; a mask
    has 1 for each token with a loss, or its weight. Raises FormatError for padding, and for several
    documents in one record.
    """
    tokens = _numbers(record, "input_ids", kinds="iu")
    each = {
        key: _numbers(record, key, len(tokens), _kinds(key))
        for key in IDS_KEYS[1:-1]
        if record.get(key) is not None
    }
    says = [key for key in ("labels", *MASKS) if key in each]
    if len(says) > 1:
        raise FormatError(
            f"`{says[0]}` and `{says[1]}` both say which tokens have a loss: remove one of the two"
        )
    if "attention_mask" in each and (place := _first(each["attention_mask"] != 1)) is not None:
        what = f"`attention_mask` is {each['attention_mask'][place]} at position {place}"
        raise FormatError(
            f"{what}: remove the padding, which has 0; if other numbers tell documents apart, "
            f"{APART}"
        )
    starts = (
        "position_ids" in each
        and _first(each["position_ids"] != np.arange(len(tokens))) is not None
    )
    if (
        starts
        or len(_numbers(record, "seq_lengths") if record.get("seq_lengths") is not None else ()) > 1
    ):
        key = "position_ids" if starts else "seq_lengths"
        raise FormatError(f"`{key}` shows that several documents are packed into one: {APART}")
    if not says:
        return tokens, None, {"input_ids"}
    (key,), values = says, each[says[0]]
    if key == "labels":
        learned = values != IGNORED_LABEL
        if (place := _first(learned & (values != tokens))) is not None:
            raise FormatError(
                f"`labels` has {values[place]} at position {place}, where `input_ids` has "
                f"{tokens[place]}: labels must be the ids themselves, not shifted by one, or "
                f"{IGNORED_LABEL} for no loss"
            )
        return tokens, learned, {"input_ids", key}
    allowed = are_weights(values) if key in WEIGHTS else (values == 0) | (values == 1)
    if (place := _first(~allowed)) is not None:
        if key in WEIGHTS:
            rule = "a weight of 0 or more, which float32 can hold"
        else:
            rule = "1 for a loss, or 0"
        raise FormatError(f"`{key}` is {values[place]} at position {place}: it must be {rule}")
    return tokens, token_weights(values), {"input_ids", key}


def _kinds(key: str) -> str:
    """Returns the kinds of numbers, by numpy's letters, that a list of this key may have: true and
    false are no labels."""
    if key in WEIGHTS:
        return "iubf"
    if key == "labels":
        return "iu"
    return "iub"


def _numbers(
    record: dict[str, Any], key: str, length: int | None = None, kinds: str = "iub"
) -> npt.NDArray[Any]:
    """Returns a list of numbers of these `kinds` of numpy. Raises FormatError if it is none, or has
    another length."""
    try:
        numbers = np.asarray(record[key])
    except (ValueError, OverflowError):
        numbers = np.array("no list of numbers")
    if numbers.ndim != 1 or (len(numbers) and numbers.dtype.kind not in kinds):
        what = "numbers" if "f" in kinds else "whole numbers"
        raise FormatError(f"`{key}` must be a list of {what}, one for each token of one document")
    if length is not None and len(numbers) != length:
        raise FormatError(
            f"`{key}` has {len(numbers):,} numbers, but `input_ids` has {length:,}: give one for "
            "each token"
        )
    if numbers.dtype.kind == "f":
        return numbers
    return numbers.astype(np.int64)


def _first(wrong: Mask) -> int | None:
    """Returns the first position where something is wrong; None: nowhere."""
    if wrong.any():
        return int(wrong.argmax())
    return None
