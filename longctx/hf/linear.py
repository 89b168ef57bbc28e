"""Linear attention for models of `transformers`: gated delta nets, Kimi Delta Attention and
Mamba-2.

Their layers call functions of their own file, a convolution and a scan over all tokens of the row,
and pass on the keyword arguments of the model. These functions are replaced by ours, which act if a
layout is among the arguments; otherwise, in other models of the same class, they call the original.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from longctx.attention.linear.recurrence import Recurrence
from longctx.hf.exactness import LINEAR_LAYERS, HuggingFaceError, refuse_arguments

ARGUMENT = "ring_attention"
PASSED = "_layout_passed"
IGNORED = ("hidden_states", "position_embeddings", ARGUMENT)
"""Arguments of linear layers that are no reason to refuse a model; position embeddings, of a token
alone, are for others."""
_HOOKS: WeakKeyDictionary[nn.Module, list[RemovableHandle]] = WeakKeyDictionary()
_BOUND: WeakSet[nn.Module] = WeakSet()
"""Layers that require a layout; copies of these do not."""
_REPLACED: WeakSet[Callable[..., Any]] = WeakSet()


@dataclass(frozen=True)
class LayerRecurrence:
    """The recurrence of a micro-batch in one layer."""

    recurrence: Recurrence
    layer: int | None


def linear_layers(model: nn.Module) -> dict[nn.Module, type]:
    """Returns the linear layers of a model that are supported, with their classes before
    sharding."""
    return {
        module: kind
        for module in model.modules()
        for kind in type(module).__mro__
        if kind.__name__ in LINEAR_LAYERS and kind.__module__.startswith("transformers.models.")
    }


def has_delta_rule(layer: Any) -> bool:
    """Returns whether a linear layer has one; Mamba-2 has none."""
    return not hasattr(layer, "ssm_state_size")


def state_size(layer: Any) -> int:
    """Returns the number of values that a linear layer sends per segment: a state and its
    transition for every head."""
    if not has_delta_rule(layer):
        return int(layer.num_heads * (layer.ssm_state_size * layer.head_dim + 1))
    if hasattr(layer, "forget_gate"):  # Kimi Delta Attention
        return int(layer.num_heads * 2 * layer.head_dim**2)
    return int(layer.num_v_heads * layer.head_k_dim * (layer.head_k_dim + layer.head_v_dim))


def replace_linear(model: Any) -> None:
    """Replaces the functions of the linear layers of a model, and makes these layers require a
    layout."""
    restore_linear(model)
    handles: list[RemovableHandle] = []
    for layer, kind in linear_layers(model).items():
        replace_functions(sys.modules[kind.__module__])
        _BOUND.add(layer)
        handles.append(layer.register_forward_pre_hook(_bind, with_kwargs=True))
    if handles and type(model).__name__ == "Mamba2ForCausalLM":
        handles += _pass_layout_on(model)
    _HOOKS[model] = handles


def replace_functions(module: ModuleType) -> None:
    """Replaces the functions of a file of transformers by ours, which act if a layout is among the
    arguments."""
    for name, ours in FUNCTIONS.items():
        original = getattr(module, name, None)
        if original is not None and original not in _REPLACED:
            setattr(module, name, _replacement(original, ours))


def restore_linear(model: Any) -> None:
    """Undoes `replace_linear`: the layers work without a layout again."""
    for handle in _HOOKS.pop(model, []):
        handle.remove()


def _replacement(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def replaced(*arguments: Any, **named: Any) -> Any:
        return (original if named.get(ARGUMENT) is None else ours)(*arguments, **named)

    _REPLACED.add(replaced)
    return replaced


def _bind(
    layer: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Gives the layer's functions the recurrence of the micro-batch. Raises HuggingFaceError if
    they could not use it."""
    name = type(layer).__name__
    rings = named.get(ARGUMENT)
    if rings is None and layer not in _BOUND:
        return arguments, named
    if rings is None:
        raise HuggingFaceError(
            f"{name} was called without a layout: call the model as model(**model_inputs(model, "
            "batch, ..)), see longctx.hf.attention"
        )
    hidden = arguments[0] if arguments else named["hidden_states"]
    if hidden.shape[0] != 1:
        raise HuggingFaceError(
            f"input_ids has batch size {hidden.shape[0]}: pack all documents into one row of tokens"
        )
    refuse_arguments(name, {key: value for key, value in named.items() if key not in IGNORED})
    return arguments, named | {
        ARGUMENT: LayerRecurrence(
            rings.recurrence(hidden.device), getattr(layer, "layer_idx", None)
        )
    }


def _pass_layout_on(model: Any) -> list[RemovableHandle]:
    """Passes the layout from a model to its base model, if the model's own code does not."""
    return [
        model.register_forward_pre_hook(_take, with_kwargs=True),
        model.base_model.register_forward_pre_hook(_give, with_kwargs=True),
        model.register_forward_hook(_forget, always_call=True),
    ]


def _take(model: Any, _: tuple[Any, ...], named: dict[str, Any]) -> None:
    vars(model.base_model)[PASSED] = named.get(ARGUMENT)


def _give(
    base: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return arguments, {ARGUMENT: vars(base)[PASSED], **named} if PASSED in vars(base) else named


def _forget(model: Any, *_: Any) -> None:
    vars(model.base_model).pop(PASSED, None)


def _convolve(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    ring_attention: LayerRecurrence,
    **_: Any,
) -> torch.Tensor:
    """As `causal_conv1d_fn` of transformers: hidden states [1, channels, tokens], weight [channels,
    kernel]."""
    from transformers.activations import ACT2FN

    out = ring_attention.recurrence.convolve(
        hidden_states[0].t(), weight, bias, ring_attention.layer
    )
    out = out if activation is None else ACT2FN[activation](out)
    return out.t().unsqueeze(0)


def _delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    ring_attention: LayerRecurrence,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """As `torch_chunk_gated_delta_rule` and `chunk_kimi_delta_attention` of transformers.

    Takes query, key and value [1, tokens, heads, dim], g [1, tokens, heads] or by channel [1,
    tokens, heads, dim], and beta [1, tokens, heads].
    """
    repeats = value.shape[2] // key.shape[2]
    query, key = (
        x[0].to(torch.promote_types(x.dtype, torch.float32)).repeat_interleave(repeats, 1)
        for x in (query, key)
    )
    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    out = ring_attention.recurrence.attend(
        query, key, value[0], g[0], beta[0], ring_attention.layer
    )
    return out.unsqueeze(0), None


def _mamba2(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # transformers' names
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    *,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    ring_attention: LayerRecurrence,
    **_: Any,
) -> torch.Tensor:
    """As `mamba2_chunk_scan` of transformers.

    Takes hidden states [1, tokens, heads, head_dim], dt [1, tokens, heads], A and D [heads], and B
    and C [1, tokens, groups, state].
    """
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    wide = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
    step = dt.to(wide.dtype)
    repeats = wide.shape[2] // B.shape[2]
    q, k = (x[0].repeat_interleave(repeats, 1) for x in (C, B))
    value = wide * step[..., None]
    out = ring_attention.recurrence.attend(
        q, k, value[0], (A.to(wide.dtype) * step)[0], None, ring_attention.layer
    )
    if D is None:
        return out.unsqueeze(0)
    return out.unsqueeze(0) + D[..., None] * wide


def _not_fused(*_: Any, **__: Any) -> None:
    """As a kernel of transformers that is not installed: the layer then calls convolution and
    scan."""


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolve,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
    "mamba2_split_conv1d_scan_combined": _not_fused,
}
"""Functions of transformers' files, and ours."""
