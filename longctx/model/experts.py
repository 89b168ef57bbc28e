"""Mixture of experts: a router sends every token to a few of many gated MLPs. None is dropped.

Routing depends on a token alone, so it does not depend on how documents are split. Rows are sorted
by expert; where `torch.nn.functional.grouped_mm` supports the tensors, one call multiplies the rows
of all experts. Matrices are stored as [experts · width, hidden], so that any number of ranks shards
them evenly. Tokens are gathered and added up in a fixed order, by their own backward: two runs are
bitwise identical.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from longctx.attention import keeping
from longctx.attention.kernels.grouped_product import leaves_gradients
from longctx.attention.products import PLAIN, Products
from longctx.model.balance import RouterWatch, RowDocuments
from longctx.model.presets import ModelShape

Routes = tuple[torch.Tensor, torch.Tensor]
"""Chosen experts and their weights, [tokens, experts per token]."""
Send = Callable[[torch.Tensor, torch.Tensor, "SparseMLP"], torch.Tensor]
"""Function of hidden states [tokens, hidden] and chosen experts → their outputs [tokens · experts
per token, hidden]."""


class MLP(nn.Module):
    """The gated MLP of blocks and of shared experts: SwiGLU (Shazeer, 2020), `width` wide."""

    def __init__(self, shape: ModelShape, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self.gated(self.gate_proj(x), self.up_proj(x)))
        return out

    def gated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return F.silu(gate) * up


class Router(nn.Linear):
    """Chooses the experts of every token, in float32.

    Attributes:
        expert_bias: float32 [experts], added to the scores to choose experts, but not to weigh them
            (DeepSeek-V3, §2.1.2); present if the shape has one.
        watch: counts tokens per expert, and adds gradients of balance losses.
        products: how it multiplies.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape.hidden_size, shape.num_experts, bias=False)
        self.shape = shape
        self.products = PLAIN
        self.expert_bias: torch.Tensor
        if shape.router_bias:
            self.register_buffer("expert_bias", torch.zeros(shape.num_experts))
        bias = (self, "expert_bias") if shape.router_bias else None
        self.watch = RouterWatch(
            shape.num_experts, shape.num_experts_per_tok, shape.router_scores, bias
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns logits [tokens, experts]."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return self.products.linear(x.to(wide), self.weight.to(wide))

    def routes(self, logits: torch.Tensor, documents: RowDocuments | None) -> Routes:
        """Returns the routes of tokens with these logits."""
        shape = self.shape
        scores = logits.softmax(1) if shape.router_scores == "softmax" else logits.sigmoid()
        preferred = scores.detach() + self.expert_bias if shape.router_bias else scores.detach()
        chosen = preferred.topk(shape.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(1, chosen)
        if shape.norm_topk_prob:
            weights = weights / weights.sum(1, keepdim=True)
        return chosen, self.watch(weights * shape.routed_scaling_factor, logits, chosen, documents)


class Experts(nn.Module):
    """Some or all of the experts of a layer, each a gated MLP; `products`: how they multiply."""

    def __init__(self, shape: ModelShape, count: int) -> None:
        super().__init__()
        self.count = count
        self.products = PLAIN
        width = shape.expert_width
        self.gate_proj = nn.Parameter(torch.empty(count * width, shape.hidden_size))
        self.up_proj = nn.Parameter(torch.empty(count * width, shape.hidden_size))
        self.down_proj = nn.Parameter(torch.empty(count * shape.hidden_size, width))

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Returns the outputs of `rows` [rows, hidden], of which the first `counts[0]` are for the
        first expert, and so on."""
        gate = grouped_product(rows, self.gate_proj, counts, self.products)
        up = grouped_product(rows, self.up_proj, counts, self.products)
        return grouped_product(F.silu(gate) * up, self.down_proj, counts, self.products)


def grouped_product(
    rows: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor, products: Products
) -> torch.Tensor:
    """Multiplies groups of `rows` [rows, n], `counts` [groups] of each, by their matrices: `weight`
    is [groups · m, n].

    Returns [rows, m].
    """
    matrices = weight.unflatten(0, (len(counts), -1))
    if _is_grouped(rows, matrices):
        if leaves_gradients() and matrices.requires_grad:
            unused = (counts == 0)[:, None, None]
            matrices.register_hook(lambda gradient: gradient.masked_fill(unused, 0))
        ends = counts.cumsum(0).to(torch.int32)
        return products.grouped(rows, matrices.transpose(1, 2), ends)
    groups = zip(rows.split(counts.tolist()), matrices.unbind(), strict=True)
    return torch.cat([products.linear(group, matrix) for group, matrix in groups])


def _is_grouped(rows: torch.Tensor, matrices: torch.Tensor) -> bool:
    """Returns whether torch has a grouped product for such tensors, whose rows must be multiples of
    16 bytes."""
    known = (torch.bfloat16,) if rows.is_cuda else (torch.bfloat16, torch.float16, torch.float32)
    aligned = all(size * rows.element_size() % 16 == 0 for size in matrices.shape[1:])
    return hasattr(F, "grouped_mm") and rows.dtype in known and aligned


class SparseMLP(nn.Module):
    """Router, experts, and optionally an expert that all tokens share: hidden states → residual
    update, [tokens, hidden].

    Attributes:
        send: sends tokens to experts of other ranks, under expert parallelism; None: all experts
            are here.
        most_rows: rows that the experts compute at once; further ones are computed in turns, which
            backward recomputes.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate = Router(shape)
        self.experts = Experts(shape, shape.num_experts)
        width = shape.shared_expert_intermediate_size
        self.shared_expert = MLP(shape, width) if width else None
        self.send: Send | None = None
        self.most_rows: int | None = None

    def forward(self, x: torch.Tensor, documents: RowDocuments | None = None) -> torch.Tensor:
        chosen, weights = self.gate.routes(self.gate(x), documents)
        out = here(x, chosen, self) if self.send is None else self.send(x, chosen, self)
        mixed = torch.bmm(
            weights.unsqueeze(1).to(out.dtype), out.unflatten(0, chosen.shape)
        ).squeeze(1)
        if self.shared_expert is not None:
            mixed = mixed + self.shared_expert(x)
        return mixed


def here(x: torch.Tensor, chosen: torch.Tensor, mlp: SparseMLP) -> torch.Tensor:
    """Computes experts that are all on this rank, as `Send`."""
    experts = mlp.experts
    count = chosen.shape[1]

    def turn(x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        order, counts = by_expert(chosen.flatten(), experts.count)
        back = inverse(order)
        rows = take(x, order // count, back)
        computed = experts(rows, counts)
        return take(computed, back, order)

    turns = 1
    if mlp.most_rows is not None:
        turns = max(1, -(-chosen.numel() // mlp.most_rows))
    tokens = x.tensor_split(turns)
    choices = chosen.tensor_split(turns)
    results = in_turns(turn, list(zip(tokens, choices, strict=True)))
    if len(results) == 1:
        return results[0]
    return torch.cat(results)


def in_turns(
    turn: Callable[..., torch.Tensor], arguments: Sequence[tuple[Any, ...]]
) -> list[torch.Tensor]:
    """Returns the results of `turn` for each of `arguments`; several turns are recomputed in
    backward."""
    if len(arguments) == 1:
        return [turn(*arguments[0])]
    how: dict[str, Any] = {
        "use_reentrant": False,
        "preserve_rng_state": False,
        "context_fn": keeping.nothing,
    }
    return [checkpoint(turn, *each, **how) for each in arguments]


def by_expert(expert: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the order that sorts rows by their `expert` [rows], and the rows of each of `count`
    experts."""
    counts = torch.zeros(count, dtype=torch.int64, device=expert.device)
    return expert.argsort(stable=True), counts.scatter_add_(0, expert, torch.ones_like(expert))


def inverse(order: torch.Tensor) -> torch.Tensor:
    """Returns the inverse of a permutation, int64 `[n]`."""
    places = torch.arange(len(order), device=order.device)
    return torch.empty_like(order).scatter_(0, order, places)


def take(x: torch.Tensor, rows: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
    """Returns `x[rows]`, where each row of x is taken equally often: row i of x as rows `back[i · n
    : (i + 1) · n]`."""
    out: torch.Tensor = _Take.apply(x, rows, back)  # type: ignore[no-untyped-call]  # torch's is untyped
    return out


class _Take(torch.autograd.Function):
    """Adds up gradients in the order of `back`, where index_select's own backward adds them in any
    order."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(back)
        ctx.taken = len(x)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (back,) = ctx.saved_tensors
        total = gradient.index_select(0, back)
        if len(back) != ctx.taken:
            total = total.unflatten(0, (ctx.taken, len(back) // max(1, ctx.taken))).sum(1)
        return total, None, None


def stacks_experts(parameter: torch.Tensor) -> bool:
    """Returns whether a parameter of transformers has the matrices of several experts, unlike a
    depthwise convolution."""
    return parameter.dim() == 3 and min(parameter.shape[1:]) > 1
