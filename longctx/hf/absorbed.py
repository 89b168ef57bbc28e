"""Latent attention in its absorbed form, which sparse kernels compute: queries are turned to what
all heads share, and values are computed of what attention returns.

Both are linear maps, which the layer's own `expand_kv` gives, of unit vectors: no formula of ours.
"""

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from longctx.attention import operator
from longctx.attention.expansion import Compressed
from longctx.attention.ring import RingAttention
from longctx.hf.latents import Latents

TOLERANCE = 0.05
"""Largest error of a linear map in bfloat16, relative to what it maps to."""
_LINEAR: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""Whether the expansion of a layer is linear."""


class _AsTheyAre:
    """An `Expansion` to the keys and values of absorbed attention, one KV head."""

    def __init__(self) -> None:
        self.handle = operator.register(self)

    def expand(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        keys = torch.cat([first, second], dim=1)
        return keys.unsqueeze(1), first.unsqueeze(1)

    def weights(self) -> list[Tensor]:
        return []


_AS_THEY_ARE = _AsTheyAre()


class _Maps(NamedTuple):
    """Linear maps of latents to keys [latent, heads, head_dim], of rotary keys to keys, and of
    latents to values."""

    latent_keys: Tensor
    rotary_keys: Tensor
    values: Tensor

    @classmethod
    def of(cls, latents: Compressed) -> "_Maps":
        width = latents.first.shape[1]
        in_all = width + latents.second.shape[1]
        units = torch.eye(in_all, dtype=latents.first.dtype, device=latents.first.device)
        keys, values = latents.expansion.expand(units[:, :width], units[:, width:])
        return cls(keys[:width], keys[width:], values[:width])


def attend_absorbed(
    attention: RingAttention,
    q: Tensor,
    latents: Compressed,
    *,
    layer: int | None,
    sink_logits: Tensor | None,
) -> Tensor:
    """Returns attention [tokens, heads, v_dim] of q [tokens, heads, head_dim] to the keys and
    values that a layer expands of `latents`.

    `attention` gets queries, and keys of one KV head, [tokens, .., latent + rotary].
    """
    maps = _Maps.of(latents)
    latent_q = torch.einsum("thd,lhd->thl", q, maps.latent_keys)
    rotary_q = torch.einsum("thd,rhd->thr", q, maps.rotary_keys)
    absorbed_q = torch.cat([latent_q, rotary_q], dim=2)
    k, v = _AS_THEY_ARE.expand(latents.first, latents.second)
    sent = Compressed(latents.first, latents.second, _AS_THEY_ARE)
    out = attention(absorbed_q, k, v, layer, sink_logits=sink_logits, compressed=sent)
    return torch.einsum("thl,lhv->thv", out, maps.values)


def is_linear(latents: Compressed) -> bool:
    """Returns whether what a layer expands is linear, without a bias; looks once at each layer. A
    call without rows says nothing, and is not."""
    assert isinstance(latents.expansion, Latents)
    if len(latents.first) == 0:
        return False
    layer = latents.expansion.layer
    if layer not in _LINEAR:
        with torch.no_grad():
            _LINEAR[layer] = _looks_linear(latents)
    return _LINEAR[layer]


def _looks_linear(latents: Compressed) -> bool:
    first = latents.first[:1]
    second = latents.second[:1]
    keys, values = latents.expansion.expand(first, second)
    maps = _Maps.of(latents)
    linear_keys = torch.einsum("tl,lhd->thd", first, maps.latent_keys)
    linear_keys += torch.einsum("tr,rhd->thd", second, maps.rotary_keys)
    linear_values = torch.einsum("tl,lhv->thv", first, maps.values)
    return _is_near(linear_keys, keys) and _is_near(linear_values, values)


def _is_near(found: Tensor, wanted: Tensor) -> bool:
    error = found - wanted
    return bool(error.norm() <= TOLERANCE * wanted.norm())
