"""Computation: the time of everything but attention by the number of tokens, of attention by length, and of ending a step."""

import math
from collections.abc import Callable
from typing import Any

import torch

from longctx.attention.exchange import Exchange, Pending, Rows
from longctx.errors import UserError
from longctx.planning.calibration.fit import AttentionTime, fit_attention, fit_line
from longctx.planning.layout import Layout
from longctx.profiling.profiled_run import Measurement, ProfiledRun, layout_of, no_documents

SHORTEST = {1: 16, 2: 512, 4: 1024, 8: 2048}
"""Tokens of the shortest document by degree. Few split shorter ones, and there a kernel call costs mostly itself."""
DOCUMENTS_AT_FIRST = 64


class OutOfMemory(UserError):
    """The configured micro-batch does not fit into the GPU."""


class _Through(torch.autograd.Function):
    """Queries come out unchanged, and keys and values get gradients: attention that costs nothing."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ctx.kv_heads = k.shape[1]
        return q.view_as(q)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
        part = dout[:, : ctx.kv_heads].contiguous()
        return dout, part, part


def no_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
    """In place of attention, where all the rest is to be timed. q, k and v must have one head size."""
    out: torch.Tensor = _Through.apply(q, k, v)  # type: ignore[no-untyped-call]  # torch's own
    return out


class Silent(Exchange):
    """Sends nothing and receives zeros at once: attention on remote keys, without waiting for them."""

    def start(self, outgoing: object, incoming: torch.Tensor, rows: Rows) -> Pending:
        return Pending(self, [], incoming.zero_(), [], [])


def measure_linear(profiled: ProfiledRun) -> Measurement:
    """linear_s_per_token and launch_s: the line through an empty micro-batch and three numbers of tokens, without attention.

    An empty micro-batch gathers all parameters and builds the attention's schedule, so that both are in launch_s.
    """
    most = profiled.config.batch.tokens_per_rank
    counts = [0, most // 4, most // 2, most]
    full = (profiled.micro_batch(count, no_attention) for count in counts[1:])
    timings = profiled.time(profiled.micro_batch(0), *full)
    seconds = [timing.seconds for timing in timings]
    if not all(map(math.isfinite, seconds)):
        raise OutOfMemory(
            f"{most} tokens on a rank, without attention, need more memory than the GPU has: lower batch.tokens_per_rank "
            "(it may be smaller here than in training), or set train.recompute"
        )
    line = fit_line(counts, seconds)
    return Measurement(
        {"linear_s_per_token": line.slope, "launch_s": line.intercept},
        f"model without attention, empty and with {', '.join(f'{count:,}' for count in counts[1:])} tokens",
        line.residual,
    )


def measure_step(profiled: ProfiledRun) -> Measurement:
    """step_s: what a step of one empty micro-batch, with everything that ends it, takes longer than another empty one."""
    alone = profiled.batch([no_documents(profiled.mesh.rank)], [0])
    other, whole = profiled.time(profiled.micro_batch(0), profiled.step(alone))
    how = "gradient reduction with nothing to hide it, norm, flags, optimizer"
    return Measurement({"step_s": max(0.0, whole.seconds - other.seconds)}, how, whole.spread)


def attention_passes(profiled: ProfiledRun, layout: Layout, exchange: type[Exchange] = Exchange) -> Callable[[], None]:
    """Forward and backward of one layer's attention, as often as a step runs them, on random tensors."""
    layer, device = profiled.layer, profiled.mesh.device

    def random(heads: int) -> torch.Tensor:
        return torch.randn(layout.tokens, heads, layer.head_dim, dtype=profiled.dtype, device=device)

    q, dout = random(profiled.heads), random(profiled.heads)
    k, v = random(profiled.kv_heads), random(profiled.kv_heads)
    attention = profiled.attention(layout, exchange)
    for tensor in (q, k, v):
        tensor.requires_grad_()

    def run() -> None:
        with torch.no_grad():
            for _ in range(profiled.forwards - 1):
                attention(q, k, v, layer=0)
        torch.autograd.grad(attention(q, k, v, layer=0), (q, k, v), dout)

    return run


def measure_attention(profiled: ProfiledRun) -> list[Measurement]:
    """attention_s_per_token2 and attention_efficiency by whole documents, attention_split_penalty by one rank's part of rings.

    Every buffer is filled with documents of one length, so that what a kernel call costs in itself, whatever it holds, is not
    counted for each of them. Lengths are doubled until a document would take longer than a measurement may, does not fit into
    batch.tokens_per_rank, or memory is short.
    """
    times: list[AttentionTime] = []
    for degree, shortest in SHORTEST.items():
        rate, length = 0.0, shortest
        while length <= degree * profiled.config.batch.tokens_per_rank and rate * length**2 / degree <= profiled.longest_s:
            affordable = int(profiled.longest_s / 4 / (rate * length**2 / degree)) if rate else DOCUMENTS_AT_FIRST
            documents = max(1, min(degree * profiled.config.batch.tokens_per_rank // length, affordable))
            seconds = _attention_time(profiled, documents, length, degree)
            if not math.isfinite(seconds):
                break
            times.append(AttentionTime(length, degree, seconds * len(profiled.spec.layers)))
            rate = seconds / times[-1].pairs
            length *= 2
    if not any(time.degree == 1 for time in times):
        raise OutOfMemory(f"attention over {SHORTEST[1]} tokens needs more memory than the GPU has: free some")
    fit = fit_attention(times)
    longest = max(time.length for time in times if time.degree == 1)
    table = Measurement(
        {"attention_s_per_token2": fit.s_per_token2, "attention_efficiency": fit.efficiency},
        f"whole documents of {SHORTEST[1]} to {longest:,} tokens",
        fit.residual,
    )
    if fit.split_penalty is None:
        return [table]
    degrees = sorted({time.degree for time in times} - {1})
    how = f"one rank's part of rings of {', '.join(map(str, degrees))}, forward and backward, without messages"
    return [table, Measurement({"attention_split_penalty": fit.split_penalty}, how, fit.split_residual)]


def _attention_time(profiled: ProfiledRun, documents: int, length: int, degree: int) -> float:
    """Seconds of one document in one layer, the cost of a call without documents taken off; infinite if out of memory."""
    layouts = layout_of(profiled.mesh.rank, documents, length, degree=degree), no_documents(profiled.mesh.rank)
    full, empty = (
        timing.seconds for timing in profiled.time(*(attention_passes(profiled, layout, Silent) for layout in layouts))
    )
    return max(full - empty, full / 100) / documents
