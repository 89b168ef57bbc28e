"""Measures the time of everything except attention by tokens, of attention by length, and the fixed cost of a step."""

import math
from collections.abc import Callable
from typing import Any

import torch

from longctx.attention.exchange import Exchange, Pending, Rows
from longctx.attention.inputs import Queries
from longctx.calibration.fit import AttentionTime, fit_attention, fit_line
from longctx.calibration.profiled_run import Measurement, ProfiledRun, layout_of, no_documents
from longctx.errors import UserError
from longctx.planning.layout import Layout

SHORTEST = {1: 16, 2: 512, 4: 1024, 8: 2048}
"""Shortest document measured, in tokens, by degree: kernel launches dominate shorter documents, which are rarely split."""
DOCUMENTS_AT_FIRST = 64


class _Through(torch.autograd.Function):
    """Attention without cost: returns q unchanged and gives k and v gradients of the right shape."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ctx.kv_heads = k.shape[1]
        return q.view_as(q)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
        part = dout[:, : ctx.kv_heads].contiguous()
        return dout, part, part


def no_attention(q: Queries, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
    """Replaces attention to time everything else. q, k and v must have the same head size."""
    out: torch.Tensor = _Through.apply(q(lambda x: x), k, v)  # type: ignore[no-untyped-call]  # torch's own
    return out


class Silent(Exchange):
    """An exchange that sends nothing and receives zeros at once, to time attention without messages."""

    def start(self, outgoing: object, incoming: torch.Tensor, rows: Rows) -> Pending:
        return Pending(self, [], incoming.zero_(), [], [])


def measure_linear(profiled: ProfiledRun) -> Measurement:
    """Measures linear_s_per_token and launch_s: a line through four micro-batches without attention, one of them empty.

    An empty micro-batch gathers all parameters and builds the attention schedule, so launch_s includes both.
    """
    most = profiled.config.batch.tokens_per_rank
    counts = [0, most // 4, most // 2, most]
    full = (profiled.micro_batch(count, no_attention) for count in counts[1:])
    timings = profiled.time(profiled.micro_batch(0), *full)
    seconds = [timing.seconds for timing in timings]
    if not all(map(math.isfinite, seconds)):
        raise UserError(
            f"{most} tokens per rank, without attention, exceed GPU memory: lower batch.tokens_per_rank (the profile may use "
            "a smaller value than training), or set train.recompute"
        )
    line = fit_line(counts, seconds)
    return Measurement(
        {"linear_s_per_token": line.slope, "launch_s": line.intercept},
        f"model without attention, with 0, {', '.join(f'{count:,}' for count in counts[1:])} tokens",
        line.residual,
    )


def measure_step(profiled: ProfiledRun) -> Measurement:
    """Measures step_s: the time of a step with one empty micro-batch minus that of an empty micro-batch."""
    alone = profiled.batch([no_documents(profiled.mesh.rank)], [0])
    other, whole = profiled.time(profiled.micro_batch(0), profiled.step(alone))
    how = "gradient reduction (not hidden), gradient norm, flags, optimizer"
    return Measurement({"step_s": max(0.0, whole.seconds - other.seconds)}, how, whole.spread)


def attention_passes(profiled: ProfiledRun, layout: Layout, exchange: type[Exchange] = Exchange) -> Callable[[], None]:
    """Builds a run of one layer's attention passes in a step, forward and backward, on random tensors."""
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
    """Measures attention_s_per_token2 and attention_efficiency on unsplit documents, attention_split_penalty on split ones.

    Every buffer is filled with documents of one length, so that the fixed cost of a kernel call is shared by all of them.
    Lengths double until a document would take too long for one measurement, exceeds batch.tokens_per_rank, or memory runs out.
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
        raise UserError(f"attention on {SHORTEST[1]} tokens exceeds free GPU memory: stop other programs on the GPU")
    fit = fit_attention(times)
    longest = max(time.length for time in times if time.degree == 1)
    table = Measurement(
        {"attention_s_per_token2": fit.s_per_token2, "attention_efficiency": fit.efficiency},
        f"unsplit documents of {SHORTEST[1]} to {longest:,} tokens",
        fit.residual,
    )
    if fit.split_penalty is None:
        return [table]
    degrees = sorted({time.degree for time in times} - {1})
    how = f"one rank of rings of degree {', '.join(map(str, degrees))}, forward and backward, without messages"
    return [table, Measurement({"attention_split_penalty": fit.split_penalty}, how, fit.split_residual)]


def _attention_time(profiled: ProfiledRun, documents: int, length: int, degree: int) -> float:
    """Returns the seconds of one document in one layer, without the fixed cost of a call; infinite if out of memory."""
    layouts = layout_of(profiled.mesh.rank, documents, length, degree=degree), no_documents(profiled.mesh.rank)
    full, empty = (
        timing.seconds for timing in profiled.time(*(attention_passes(profiled, layout, Silent) for layout in layouts))
    )
    return max(full - empty, full / 100) / documents
