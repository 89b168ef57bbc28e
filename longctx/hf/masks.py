"""Masks of `transformers`, described without building them: causal, or in both directions, with or
without a window."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from longctx.hf.exactness import HuggingFaceError


@dataclass(frozen=True)
class CausalMask:
    """Stands in for a dense mask. As it is not a tensor, models that compute attention themselves
    fail.

    Every query sees the last `window` keys up to itself, or all earlier keys if `window` is None.
    """

    window: int | None = None

    def __getitem__(self, _: object) -> "CausalMask":
        """Returns itself: models hand their indexers a view without heads."""
        return self


def describe_mask(
    *,
    mask_function: Callable[..., Any],
    attention_mask: torch.Tensor | None = None,
    causal: bool = True,
    **_: Any,
) -> "CausalMask | BidirectionalMask":
    """Describes the mask without building it; transformers calls this function before the first
    layer.

    Raises HuggingFaceError for padding, and for masks that are neither causal nor a causal window;
    or, if not `causal`, neither full nor a window in both directions.
    """
    if attention_mask is not None and not attention_mask.is_meta and not bool(attention_mask.all()):
        raise HuggingFaceError(
            "attention_mask hides tokens: leave it out, as packed documents have no padding "
            "between them"
        )
    parts = list(_parts(mask_function))
    windows = [
        inside["sliding_window"] for name, inside in parts if name == "sliding_window_overlay"
    ]
    # transformers derives packed sequences from jumps in the positions; the layout already has the
    # exact boundaries.
    known = {"causal_mask_function", "sliding_window_overlay", "packed_sequence_mask_function"}
    names = {name for name, _ in parts}
    if not causal:
        known = {"bidirectional_mask_function", "sliding_window_bidirectional_overlay"}
        if not {"bidirectional_mask_function"} <= names <= known:
            raise HuggingFaceError(
                f"the model uses a mask of {', '.join(sorted(names))}: encoders are supported "
                "only with attention in both directions, with or without a sliding window"
            )
        # Keys at a distance of `sliding_window` are visible.
        both = [
            inside["sliding_window"] + 1
            for name, inside in parts
            if name == "sliding_window_bidirectional_overlay"
        ]
        return BidirectionalMask(min(both, default=None))
    if not {"causal_mask_function"} <= names <= known:
        raise HuggingFaceError(
            f"the model uses a mask of {', '.join(sorted(names))}: 'longctx' supports only causal "
            "attention, with or without a sliding window"
        )
    return CausalMask(min(windows, default=None))


def describe_either_mask(
    *, mask_function: Callable[..., Any], **others: Any
) -> "CausalMask | BidirectionalMask":
    """Describes the masks of an encoder-decoder, which are causal in its decoder only."""
    causal = any(name == "causal_mask_function" for name, _ in _parts(mask_function))
    return describe_mask(mask_function=mask_function, causal=causal, **others)


@dataclass(frozen=True)
class BidirectionalMask:
    """As CausalMask, for encoders: every query sees `window` - 1 keys before itself and as many
    after it, or all if None."""

    window: int | None = None


def _parts(mask_function: Callable[..., Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the intersected mask functions of `transformers.masking_utils`: their names and
    closure variables."""
    name = mask_function.__qualname__.split(".")[0]
    cells = getattr(mask_function, "__closure__", None) or ()
    inside = dict(
        zip(mask_function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True)
    )
    if name == "and_masks":
        for part in inside["mask_functions"]:
            yield from _parts(part)
    elif name == "remap_positions_for_packed_sequence":
        yield from _parts(inside["mask_function"])
    else:
        yield name, inside


def one_window(
    attention_mask: CausalMask | BidirectionalMask | torch.Tensor | None,
    sliding_window: int | None,
    causal: bool,
) -> int | None:
    """Returns the sliding window of mask and argument, which must agree; some causal models pass
    only one of them.

    Without a mask, encoders do not say whether the argument counts the tokens on one side or on
    both.
    """
    if attention_mask is None and not causal and sliding_window is not None:
        raise HuggingFaceError(
            f"the layer has a sliding window of {sliding_window}, but no mask: this encoder is not "
            "supported"
        )
    if attention_mask is None:
        return sliding_window
    if not isinstance(attention_mask, CausalMask if causal else BidirectionalMask):
        raise HuggingFaceError(
            "a dense attention mask was given: leave attention_mask out, as the layout defines "
            "visibility"
        )
    # torch.compile breaks graphs at `in`.
    if sliding_window is not None and sliding_window != attention_mask.window:
        raise HuggingFaceError(
            f"the layer has a sliding window of {sliding_window}, but its mask has a window of "
            f"{attention_mask.window}: make them equal"
        )
    return attention_mask.window
