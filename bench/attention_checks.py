"""Checks attention kernels on packed documents of mixed degrees; one process plays all ranks of the
ring in turn.

The errors of out, dQ, dK and dV against float64 may have at most twice the norm of the errors of
the same kernel on whole documents, and a second run must be bit-identical if its backward pass is
deterministic.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from attention_times import Sizes
from longctx.attention import RingAttention, reference_attention
from longctx.attention.exchange import Exchange, Pending, Rows
from longctx.attention.kernels import KERNELS, KernelRequest
from longctx.attention.kernels.flash import Flash
from longctx.attention.masks import Mask
from longctx.planning.layout import Layout, Placement

Tensors = tuple[torch.Tensor, ...]
# Maximum error of a kernel, in units of rounding of the largest number in a result.
MOST_ROUNDINGS = 10
COLUMNS = (
    "kernel",
    "mask",
    "dtype",
    "head_dim",
    "deterministic",
    "tensor",
    "ring",
    "single",
    "same_bits",
    "right",
    "failed",
)
"""`ring` and `single` are distances from float64 by norm, relative to the norm of the result. Two
runs may differ if the backward pass is not `deterministic`."""
# Masks of a ring's parts; a kernel that fails only other masks is timed all the same.
TIMED_MASKS = "causal", "dense"


def masks(window: int) -> dict[str, Mask]:
    return {
        "causal": Mask(),
        "dense": Mask(causal=False),
        "window": Mask(window=window),
        "window with sinks": Mask(window=window, sinks=4),
        "prefix": Mask(prefix={0: window, 2: 9}),
    }


def check_cases(kernel: str, sizes: Sizes, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yields every mask, dtype and head size that the kernel supports; those to be timed first.

    A flash attention library has a backward pass of its own for deterministic gradients: the
    default one, which trains, is checked first.
    """
    timed = sizes.dtype, sizes.head_dim
    kinds = sorted(
        product(sizes.checked_dtypes, sizes.checked_head_dims), key=lambda kind: kind != timed
    )
    for dtype, head_dim in kinds:
        request = KernelRequest(device.type, dtype, head_dim, head_dim, bands=True)
        for deterministic in backward_passes(kernel, request):
            for mask in masks(sizes.checked_window):
                yield {
                    "kernel": kernel,
                    "mask": mask,
                    "dtype": dtype,
                    "head_dim": head_dim,
                    "deterministic": deterministic,
                }


def backward_passes(kernel: str, request: KernelRequest) -> list[bool]:
    """Returns whether each backward pass that a kernel has is deterministic, the default first;
    none if it refuses the request."""
    known = KERNELS[kernel]
    if known.refusal(request) is not None:
        return []
    why = known.refusal(request._replace(deterministic=True))
    if why is not None:
        print(f"two runs may differ: {kernel} {why}")
        return [False]
    if isinstance(known, Flash):
        return [False, True]
    return [True]  # the same with and without


def check_kernel(
    case: dict[str, Any], sizes: Sizes, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Yields a row for every result of a case."""
    kernel, mask_name, dtype, head_dim, deterministic = case.values()
    lengths, mask = sizes.checked_lengths, masks(sizes.checked_window)[mask_name]
    places = (0, 4), (1, 3), (0, 2), (3, 1), (0, 2)
    rings = [Placement(document, *place, rounds=2) for document, place in enumerate(places)]
    alone = [Placement(document, 0, 1) for document in range(len(lengths))]
    generator = torch.Generator().manual_seed(head_dim)
    heads, kv_heads = sizes.checked_heads, sizes.checked_heads * sizes.kv_heads // sizes.heads
    shapes = [(sum(lengths), count, head_dim) for count in (heads, kv_heads, kv_heads, heads)]
    inputs = tuple(torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    q, k, v = (x.double().requires_grad_() for x in inputs[:3])
    out = reference_attention(q, k, v, lengths, mask=mask)
    truth = out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3].double())
    single = play(kernel, inputs, lengths, alone, 1, mask, deterministic)
    ring, again = (play(kernel, inputs, lengths, rings, 4, mask, deterministic) for _ in range(2))
    rounding = torch.finfo(dtype).eps
    for tensor, exact, whole, split, second in zip(
        ("out", "dq", "dk", "dv"), truth, single, ring, again, strict=True
    ):
        single_error, ring_error = (
            float((x - exact).norm() / exact.norm()) for x in (whole, split)
        )
        same = torch.equal(split, second)
        right = (same or not deterministic) and ring_error <= 2 * single_error + rounding / 4
        # Errors in a few numbers hardly change the norm, and errors of the kernel itself are in
        # both norms.
        most = MOST_ROUNDINGS * rounding * float(exact.abs().max())
        right &= all(float((x - exact).abs().max()) <= most for x in (whole, split))
        yield {
            **case,
            "tensor": tensor,
            "ring": ring_error,
            "single": single_error,
            "same_bits": same,
            "right": right,
        }


def document_rows(layout: Layout, lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """Returns, for each row of a rank's buffer, its row in the concatenated documents."""
    spans = [(s.document, span) for s in layout.shards for span in (s.head, s.tail)]
    parts = [torch.arange(*span) + sum(lengths[:document]) for document, span in spans]
    return torch.cat([torch.empty(0, dtype=torch.int64), *parts]).to(device)


def play(
    kernel: str,
    inputs: Tensors,
    lengths: Sequence[int],
    placements: Sequence[Placement],
    ranks: int,
    mask: Mask,
    deterministic: bool,
) -> Tensors:
    """Returns out, dq, dk, dv (float64) of ring attention, with this process as every rank in
    turn."""
    device = inputs[0].device
    # Every layout gets rank 0, the rank of this process, but keeps its ring indices.
    layouts = [replace(Layout.of(placements, lengths, 0, rank), rank=0) for rank in range(ranks)]
    rows = [document_rows(layout, lengths, device) for layout in layouts]
    options: dict[str, Any] = {
        "mask": mask,
        "kernel": kernel,
        "keep_kv": True,
        "deterministic": deterministic,
    }
    rings = [RingAttention(layout, device=device, **options) for layout in layouts]
    kv = torch.cat([x.flatten(1) for x in inputs[1:3]], dim=1)
    results = tuple(
        torch.zeros(x.shape, dtype=torch.float64, device=device) for x in (inputs[3], *inputs[:3])
    )
    remote = torch.zeros(kv.shape, dtype=torch.float64, device=device)
    for rank, ring in enumerate(rings):
        received = []
        for number, round_ in enumerate(ring.schedule.rounds):
            (hop,) = round_.hops
            sent = [
                dict(rings[peer].schedule.rounds[number].hops[0].sends)[rank]
                for peer, _ in hop.receives
            ]
            parts = [x.read(rows[peer]) for (peer, _), x in zip(hop.receives, sent, strict=True)]
            received.append(torch.cat([rows[rank][:0], *parts]))
        ring.exchange = messages(kv, remote, received)
        q, k, v, dout = (x[rows[rank]] for x in inputs)
        for x in (q, k, v):
            x.requires_grad_()
        out = ring(q, k, v)
        gradients = torch.autograd.grad(out, (q, k, v), dout)
        for result, part in zip(results, (out.detach(), *gradients), strict=True):
            result[rows[rank]] = part.double()
    dk, dv = remote.split([inputs[1][0].numel(), inputs[2][0].numel()], dim=1)
    return *results[:2], results[2] + dk.view_as(results[2]), results[3] + dv.view_as(results[3])


def messages(
    kv: torch.Tensor, gradients: torch.Tensor, received: Sequence[torch.Tensor]
) -> type[Exchange]:
    """Makes the exchange of one rank: every round receives rows of `kv`, and adds the returned
    gradients to `gradients`."""

    class Messages(Exchange):
        def start(
            self, outgoing: Sequence[tuple[int, torch.Tensor]], incoming: torch.Tensor, rows: Rows
        ) -> Pending:
            number = self.started = getattr(self, "started", -1) + 1
            if "backward" in self.where:
                if outgoing:
                    gradients.index_add_(
                        0, received[number], torch.cat([part for _, part in outgoing]).double()
                    )
                incoming.zero_()
            else:
                incoming.copy_(kv[received[number]])
            return Pending(self, [], incoming, [], [])

    return Messages
