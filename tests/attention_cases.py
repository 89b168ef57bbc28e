"""Random packed micro-batches for the attention tests, and the code that their ranks run."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from longctx.attention import HybridAttention, Mask, RingAttention, packed_attention
from longctx.attention.exchange import Exchange
from longctx.planning.layout import Layout, Placement
from longctx.planning.tree import Trees


def in_rounds(placements: Sequence[Placement], rounds: int | tuple[int, ...]) -> list[Placement]:
    """Returns the placements with these exchange rounds, one number for all documents or one for
    each."""
    return [
        replace(p, rounds=rounds if isinstance(rounds, int) else rounds[p.document])
        for p in placements
    ]


@dataclass(frozen=True)
class Case:
    """One micro-batch: documents with their rings, head sizes, and padding rows per rank.

    `exchange_rounds` is for all documents, or one number for each.
    """

    ranks: int
    lengths: tuple[int, ...]
    placements: tuple[Placement, ...]
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 8
    exchange_rounds: int | tuple[int, ...] = 1
    padding: int = 0
    dtype: torch.dtype = torch.float32
    seed: int = 0
    kernel: str = "auto"
    mask: Mask = field(default_factory=Mask)
    softcap: float = 0.0
    sink_logits: bool = False
    v_head_dim: int | None = None
    keep_kv: bool = False
    ranks_per_node: int | None = None
    ulysses_degree: int = 1
    across: Any = None
    trees: Trees = field(default_factory=dict)

    def layout(self, rank: int) -> Layout:
        return Layout.of(
            in_rounds(self.placements, self.exchange_rounds), self.lengths, 0, rank, self.trees
        )

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns q, k, v and dout of all documents, concatenated, in `dtype`."""
        generator = torch.Generator().manual_seed(self.seed)
        tokens, dim, v_dim = sum(self.lengths), self.head_dim, self.v_head_dim or self.head_dim
        heads = (self.heads, dim), (self.kv_heads, dim), (self.kv_heads, v_dim), (self.heads, v_dim)
        shapes = [(tokens, *shape) for shape in heads]
        q, k, v, dout = (
            torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)
            for shape in shapes
        )
        return q, k, v, dout

    def attention(self, rank: int, exchange: Any = Exchange) -> RingAttention | HybridAttention:
        options: dict[str, Any] = {
            "mask": self.mask,
            "softcap": self.softcap,
            "kernel": self.kernel,
            "keep_kv": self.keep_kv,
            "ranks_per_node": self.ranks_per_node,
            "across": self.across,
            "exchange": exchange,
        }
        return packed_attention(self.layout(rank), self.ulysses_degree, **options)

    def sinks(self) -> torch.Tensor | None:
        """Returns a learned logit per head, if the case has them."""
        return (
            torch.linspace(-1, 2, self.heads, dtype=torch.float64).requires_grad_()
            if self.sink_logits
            else None
        )

    def rows(self, rank: int) -> torch.Tensor:
        """Returns the row in `inputs` of each row of a rank's buffer (without padding)."""
        starts = torch.tensor([0, *self.lengths]).cumsum(0)
        parts = [
            torch.arange(*span) + starts[shard.document]
            for shard in self.layout(rank).shards
            for span in (shard.head, shard.tail)
        ]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def run_case(
    case: Case, inputs: tuple[torch.Tensor, ...] | None = None
) -> tuple[torch.Tensor, ...]:
    """Runs on each rank: ring attention on its rows; returns out, dq, dk, dv including padding
    rows, and dsinks."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    rows = case.rows(rank)
    padded = []
    for tensor in inputs or case.inputs():
        # NaN in the padding must not reach any result.
        padding = torch.full((case.padding, *tensor.shape[1:]), float("nan"), dtype=tensor.dtype)
        padded.append(torch.cat([tensor[rows], padding]))
    q, k, v = (tensor.requires_grad_() for tensor in padded[:3])
    dout = padded[3].nan_to_num(nan=0.0)
    attention = case.attention(rank)
    sinks = case.sinks()
    out = attention(q, k, v, layer=0, sink_logits=sinks)
    gradients = torch.autograd.grad(out, [x for x in (q, k, v, sinks) if x is not None], dout)
    return (out.detach(), *gradients)


def gather(case: Case, results: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    """Reorders the ranks' results by document, sums gradients of sinks, and checks that padding
    rows are zero."""
    q, k, v, dout = case.inputs()
    like: list[Any] = [torch.zeros_like(t) for t in (dout, q, k, v)]
    for rank, result in enumerate(results):
        rows = case.rows(rank)
        for whole, part in zip(like, result[:4], strict=True):
            assert not part[len(rows) :].any(), "padding rows must stay zero"
            whole[rows] = part[: len(rows)]
    return (
        [*like, torch.stack([result[4] for result in results]).sum(0)] if case.sink_logits else like
    )


def relative_errors(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> list[float]:
    return [
        float((g.double() - w.double()).norm() / w.double().norm().clamp_min(1e-30))
        for g, w in zip(got, wanted, strict=True)
    ]


def assert_exact(got: list[torch.Tensor], exact: list[torch.Tensor]) -> None:
    """With a single key, gradients of q and k are 0 in float64: these are compared with the size of
    the inputs instead."""
    for error, part, reference in zip(relative_errors(got, exact), got, exact, strict=True):
        assert error <= 1e-5 or float((part.double() - reference).abs().max()) <= 1e-6
