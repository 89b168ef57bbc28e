"""Ring attention for encoder-decoders of `transformers`, such as T5Gemma; `longctx.hf.attention`
calls it for them.

Three attentions of a micro-batch replace those of the model: of the source in both directions, of
the target to earlier tokens, and of the target to its source. Which layer has which is seen in a
run with sources and targets of different lengths.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from longctx.hf.exactness import (
    Alone,
    HuggingFaceError,
    Probe,
    check_finite,
    check_loss,
    check_rows,
    entries_of,
    evaluating,
    run_checked,
)

Role = Literal["encoder", "decoder", "cross"]
ROLES: tuple[Role, ...] = ("encoder", "decoder", "cross")
ROLE = "longctx_role"
"""Attribute of a layer's attention."""
SOURCE_TOKENS = 12
TARGET_TOKENS = 16


@dataclass(frozen=True)
class ByRole:
    """The attention of one micro-batch: `rings` by role, each a `Rings`."""

    rings: dict[Role, Any]

    def of_role(self, role: Role) -> Any:
        return self.rings[role]


class _FindRoles:
    """Replaces `ByRole`: gives every attention its role, by the number of queries and keys, and
    returns zeros."""

    def __init__(self) -> None:
        self.found: set[Role] = set()

    def see(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        roles: dict[tuple[int, int], Role] = {
            (SOURCE_TOKENS, SOURCE_TOKENS): "encoder",
            (TARGET_TOKENS, TARGET_TOKENS): "decoder",
            (TARGET_TOKENS, SOURCE_TOKENS): "cross",
        }
        role = roles.get((query.shape[2], key.shape[2]))
        if role is None or getattr(module, ROLE, role) != role:
            raise HuggingFaceError(
                f"{type(module).__name__} attends to tokens of the source and of the target in "
                "one call: encoder-decoders are supported only if each attention has keys of one "
                "of them, as in T5Gemma"
            )
        setattr(module, ROLE, role)
        self.found.add(role)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


def attend_by_role(
    attend: Callable[..., tuple[torch.Tensor, None]],
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    *,
    ring_attention: Any = None,
    position_bias: torch.Tensor | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Computes attention for transformers as `attend`, of the role that the layer has."""
    name = type(module).__name__
    if position_bias is not None:
        raise HuggingFaceError(
            f"{name} adds a bias by relative position to the scores, as in T5, which no attention "
            "kernel here supports: use an encoder-decoder with rotary positions, such as T5Gemma"
        )
    if others.get("decoder_position_ids") is not None:
        raise HuggingFaceError(
            f"{name} is of a model whose decoder takes no decoder_position_ids and counts "
            "positions in the row, unlike in packed documents: use an encoder-decoder with rotary "
            "positions, such as T5Gemma"
        )
    if isinstance(ring_attention, _FindRoles):
        return ring_attention.see(module, query, key, value), None
    role: Role | None = getattr(module, ROLE, None)
    if role is None or ring_attention is None:
        # Raises an error.
        return attend(module, query, key, value, attention_mask, causal=role == "decoder", **others)
    window = getattr(attention_mask, "window", None)
    if role != "decoder" and window is not None and sliding_window == window - 1:
        # Counts the tokens on one side; the mask, whose window includes the token itself, decides.
        sliding_window = None
    return attend(
        module,
        query,
        key,
        value,
        attention_mask,
        causal=role == "decoder",
        ring_attention=ring_attention.of_role(role),
        sliding_window=sliding_window,
        **others,
    )


def attention_inputs(
    tokens: torch.Tensor,
    positions: torch.Tensor | None,
    source: torch.Tensor,
    source_positions: Any,
) -> Any:
    """Returns keyword arguments of a model for tokens of the target and of the source, each [1,
    tokens]."""
    inputs = {
        "input_ids": source,
        # Otherwise T5Gemma hides tokens with the id of padding.
        "attention_mask": torch.ones_like(source),
        "decoder_input_ids": tokens,
        "decoder_attention_mask": torch.ones_like(tokens),
        "use_cache": False,
    }
    places = {"position_ids": source_positions, "decoder_position_ids": positions}
    return inputs | {name: place for name, place in places.items() if place is not None}


class _Seq2SeqProbe(Probe):
    """Runs a model on as many tokens of the source as of the target, the same ones."""

    wanted = "an encoder-decoder with a language model head"

    def forward(self, ids: torch.Tensor, positions: torch.Tensor | None, **arguments: Any) -> Any:
        tokens = ids.unsqueeze(0)
        places = None if positions is None else positions.to(self.device).unsqueeze(0)
        inputs = attention_inputs(tokens, places, tokens, places)
        return run_checked(
            self.call, self.name, **{"ring_attention": Alone(), **inputs, **arguments}
        )


def find_roles(model: Any) -> None:
    """Gives every attention of a model its role, by a run on a few tokens; the model may be on the
    meta device.

    Raises HuggingFaceError if an attention has no role, or the model does not run so.
    """
    finder = _FindRoles()
    name = type(model).__name__
    embedding = model.get_input_embeddings()
    ids = torch.arange(TARGET_TOKENS, device=embedding.weight.device).unsqueeze(0) % entries_of(
        embedding
    )
    places = torch.arange(TARGET_TOKENS, device=ids.device).unsqueeze(0)
    inputs = attention_inputs(ids, places, ids[:, :SOURCE_TOKENS], places[:, :SOURCE_TOKENS])
    run_checked(model, name, **inputs, ring_attention=finder)
    missing = set(ROLES) - finder.found
    if missing:
        raise HuggingFaceError(
            f"{name} computes attention ({', '.join(sorted(missing))}) outside transformers' "
            "attention interface, so documents in one row would see each other: this model is not "
            "supported"
        )


def check_seq2seq(model: Any) -> None:
    """Raises HuggingFaceError unless only attention mixes tokens, and the loss is the sum over the
    given labels.

    Gives every attention its role. Runs the model six times on a few tokens without gradients.
    """
    probe = _Seq2SeqProbe(model, model, next(model.get_input_embeddings().parameters()).dtype)
    check_finite(model)
    with torch.no_grad(), evaluating(model):
        find_roles(model)
        check_loss(probe, check_rows(probe))
