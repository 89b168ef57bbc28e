"""Attention of one sequence, forward and backward, in float32 or float64.

Queries are [queries, heads, width], keys and values [keys, heads of keys, width]; a head of keys
serves as many heads of queries as there are for each.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rules:
    """How scores are made, and which count.

    Attributes:
        scale: of products of queries and keys.
        causal: whether a query sees no later keys; the last query and the last key are at the same
            place.
        left, right: how many keys before and after its place a query sees; -1 for all.
        softcap: scores s become softcap · tanh(s / softcap); 0 for none.
    """

    scale: float
    causal: bool = False
    left: int = -1
    right: int = -1
    softcap: float = 0.0


def visible(queries: int, keys: int, rules: Rules) -> torch.Tensor:
    """Returns which keys each query sees: [queries, keys]."""
    place = torch.arange(queries) + keys - queries
    distance = torch.arange(keys) - place[:, None]
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if rules.left >= 0:
        seen &= distance >= -rules.left
    if rules.causal:
        seen &= distance <= 0
    elif rules.right >= 0:
        seen &= distance <= rules.right
    return seen


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: Rules
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the output, as `q`, and the logarithm of the sum of exponentials of scores, [heads,
    queries]: 0 and infinity for a query that sees no key."""
    q_wide, k_wide, v_wide = _widened(q, k, v)
    scores, _ = _scores(q_wide, k_wide, rules)
    sums = scores.logsumexp(-1)
    blind = sums == float("-inf")
    sums = sums.masked_fill(blind, float("inf"))
    weights = torch.exp(scores - sums[..., None])
    out = torch.einsum("hqk,khd->qhd", weights, v_wide)
    return out.to(q.dtype), sums


def attend_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    rules: Rules,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of queries, keys and values.

    `out` and `sums` may be those of more keys than `k`, as in a ring: then the gradients are what
    these keys contribute.
    """
    q_wide, k_wide, v_wide = _widened(q, k, v)
    dout_wide = dout.to(q_wide.dtype)
    scores, slope = _scores(q_wide, k_wide, rules)
    weights = torch.exp(scores - sums[..., None])
    of_weights = torch.einsum("qhd,khd->hqk", dout_wide, v_wide)
    inner = (dout_wide * out.to(q_wide.dtype)).sum(-1)
    of_scores = weights * (of_weights - inner.T[..., None]) * slope * rules.scale
    dq = torch.einsum("hqk,khd->qhd", of_scores, k_wide)
    dk = torch.einsum("hqk,qhd->khd", of_scores, q_wide)
    dv = torch.einsum("hqk,qhd->khd", weights, dout_wide)
    heads_of_keys = k.shape[1]
    dk = dk.unflatten(1, (heads_of_keys, -1)).sum(2)
    dv = dv.unflatten(1, (heads_of_keys, -1)).sum(2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype that attention of inputs of this one is computed in."""
    return torch.promote_types(dtype, torch.float32)


def _widened(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns all three in the dtype of the computation, with as many heads of keys as of
    queries."""
    dtype = computed_in(q.dtype)
    heads = q.shape[1] // k.shape[1]
    k_wide = k.to(dtype).repeat_interleave(heads, dim=1)
    v_wide = v.to(dtype).repeat_interleave(heads, dim=1)
    return q.to(dtype), k_wide, v_wide


def _scores(
    q: torch.Tensor, k: torch.Tensor, rules: Rules
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Returns scores, -infinity for keys that are not seen, and their derivative by scores without
    a cap: both [heads, queries, keys], the derivative 1 without a cap."""
    scores = torch.einsum("qhd,khd->hqk", q, k) * rules.scale
    slope: torch.Tensor | float = 1.0
    if rules.softcap > 0:
        share = torch.tanh(scores / rules.softcap)
        scores = rules.softcap * share
        slope = 1 - share**2
    hidden = ~visible(len(q), len(k), rules)
    return scores.masked_fill(hidden, float("-inf")), slope
