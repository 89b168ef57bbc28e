"""A package of sparse attention for tests: the interface of Megatron's functions of TileLang, in
plain torch on CPUs."""

import math
from typing import Any

import torch
from torch import Tensor

HAVE_TILELANG = True
CALLS = {"forward": 0, "backward": 0}


def sparse_mla_fwd_interface(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float | None = None,
    d_v: int = 512,
    block_I: int = 64,
    num_stages: int = 2,
    threads: int = 256,
) -> tuple[Tensor, Tensor]:
    CALLS["forward"] += 1
    _check(q, kv, indices)
    scores, keys = _scores(q, kv, indices, sm_scale)
    hidden = ~(indices >= 0).any(-1)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp()
    out = torch.einsum("thk,tkd->thd", weights, keys[..., :d_v])
    out = out.masked_fill(hidden.unsqueeze(-1), 0)
    return out, lse.masked_fill(hidden, 0) / math.log(2)


def sparse_mla_bwd(
    q: Tensor,
    kv: Tensor,
    o: Tensor,
    do: Tensor,
    indices: Tensor,
    lse: Tensor,
    sm_scale: float | None = None,
    delta: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    CALLS["backward"] += 1
    _check(q, kv, indices)
    assert lse.is_contiguous() and lse.isfinite().all() and o.is_contiguous()
    scores, keys = _scores(q, kv, indices, sm_scale)
    weights = (scores - lse.unsqueeze(-1) * math.log(2)).exp()
    width = o.shape[2]
    products = torch.einsum("thd,tkd->thk", do, keys[..., :width])
    products -= (o * do).sum(-1, keepdim=True)
    dscores = weights * products * sm_scale
    dq = torch.einsum("thk,tkd->thd", dscores, keys)
    of_keys = torch.einsum("thk,thd->tkd", dscores, q)
    of_keys[..., :width] += torch.einsum("thk,thd->tkd", weights, do)
    dkv = torch.zeros_like(kv)
    rows = indices[:, 0].flatten().clamp(min=0).long()
    dkv[:, 0].index_add_(0, rows, of_keys.flatten(0, 1))
    return dq, dkv


def other_bwd(q: Tensor, kv: Tensor, o: Tensor, do: Tensor, top: Tensor, lse: Tensor) -> Any:
    """A function of another interface."""
    raise AssertionError


def _check(q: Tensor, kv: Tensor, indices: Tensor) -> None:
    assert q.is_contiguous() and kv.is_contiguous() and indices.is_contiguous()
    assert indices.dtype == torch.int32
    assert indices.shape[:2] == (len(q), 1) and kv.shape[1] == 1
    assert kv.shape[2] == q.shape[2] and int(indices.max()) < len(kv)


def _scores(
    q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float | None
) -> tuple[Tensor, Tensor]:
    """Returns scores [tokens, heads, most], of no key -inf, and the keys [tokens, most, width]."""
    assert sm_scale is not None
    keys = kv[:, 0][indices[:, 0].clamp(min=0).long()]
    scores = torch.einsum("thd,tkd->thk", q, keys) * sm_scale
    return scores.masked_fill(indices < 0, float("-inf")), keys
