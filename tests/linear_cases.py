"""Random inputs of a layer with a short convolution and linear attention: over several ranks, and
token by token."""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from longctx.attention.linear.recurrence import Recurrence
from tests.attention_cases import Case

K_DIM, V_DIM = 3, 5
NAMES = ("out", "x", "decay", "beta", "weight", "bias")
RULES = ("delta", "mamba2", "kimi")
"""Gated delta rule, no delta rule, and the delta rule with a decay for each channel."""


def inputs(case: Case, kernel: int, rule: str) -> dict[str, torch.Tensor]:
    """Returns the inputs of all documents, concatenated, in float64, and weights of a
    convolution."""
    generator = torch.Generator().manual_seed(case.seed)
    tokens, heads = sum(case.lengths), case.heads
    channels = heads * (2 * K_DIM + V_DIM)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return {
        "x": draw(tokens, channels),
        "decay": -draw(tokens, heads, *([K_DIM] if rule == "kimi" else [])).exp() / 4,
        "beta": draw(tokens, heads).sigmoid(),
        "weight": draw(channels, kernel),
        "bias": draw(channels),
        "dout": draw(tokens, heads, V_DIM),
    }


def split(x: torch.Tensor, heads: int) -> list[torch.Tensor]:
    q, k, v = x.unflatten(1, (heads, -1)).split([K_DIM, K_DIM, V_DIM], dim=-1)
    return [q, F.normalize(k, dim=-1), v]


def run_linear(
    case: Case, kernel: int, rule: str, dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    """Runs on each rank: its rows of out and of the gradients of x, decay and beta, and its
    gradients of weight and bias."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    rows, given = case.rows(rank), inputs(case, kernel, rule)
    for name in ("x", "decay", "beta", "dout"):
        padding = torch.zeros(case.padding, *given[name].shape[1:], dtype=torch.float64)
        given[name] = torch.cat([given[name][rows], padding])
    given = {name: tensor.to(dtype).requires_grad_() for name, tensor in given.items()}
    recurrence = Recurrence(case.layout(rank))
    convolved = recurrence.convolve(given["x"], given["weight"], given["bias"], layer=0)
    out = recurrence.attend(
        *split(convolved, case.heads),
        given["decay"],
        given["beta"] if rule != "mamba2" else None,
        layer=0,
    )
    wanted = [given[name] for name in NAMES[1:]]
    gradients = torch.autograd.grad(
        out, wanted, given["dout"].detach(), allow_unused=True, materialize_grads=True
    )
    return [out.detach(), *gradients]


def gather(case: Case, results: list[list[torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Returns the ranks' results by document; sums the gradients of weights."""
    found = {}
    for number, name in enumerate(NAMES):
        parts = [result[number] for result in results]
        if name in ("weight", "bias"):
            found[name] = torch.stack(parts).sum(0)
            continue
        found[name] = parts[0].new_zeros(sum(case.lengths), *parts[0].shape[1:])
        for rank, part in enumerate(parts):
            rows = case.rows(rank)
            found[name][rows] = part[: len(rows)]
    return found


def token_by_token(
    case: Case, kernel: int, rule: str, tensors: dict[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Returns out and gradients, document by document, with a loop over tokens; of `inputs` or
    other tensors."""
    given = {
        name: x.detach().requires_grad_()
        for name, x in (tensors or inputs(case, kernel, rule)).items()
    }
    outs, start = [], 0
    for length in case.lengths:
        x, decay, beta = (given[name][start : start + length] for name in ("x", "decay", "beta"))
        start += length
        convolved = F.conv1d(
            F.pad(x.t()[None], (kernel - 1, 0)),
            given["weight"][:, None],
            given["bias"],
            groups=x.shape[1],
        )
        outs.append(
            _recurrence(
                *split(convolved[0].t(), case.heads), decay, beta if rule != "mamba2" else None
            )
        )
    out = torch.cat(outs)
    wanted = [given[name] for name in NAMES[1:]]
    gradients = torch.autograd.grad(
        out, wanted, given["dout"].detach(), allow_unused=True, materialize_grads=True
    )
    return dict(zip(NAMES, (out.detach(), *gradients), strict=True))


def _recurrence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: Any
) -> torch.Tensor:
    state, outs = torch.zeros(q.shape[1], K_DIM, V_DIM, dtype=q.dtype), []
    for token in range(len(q)):
        state = state * decay[token].exp().reshape(q.shape[1], -1, 1)
        new = v[token]
        if beta is not None:
            new = beta[token][:, None] * (new - torch.einsum("hkv,hk->hv", state, k[token]))
        state = state + k[token][:, :, None] * new[:, None]
        outs.append(torch.einsum("hkv,hk->hv", state, q[token]))
    return torch.stack(outs)
