"""One rank of several_gpus.py: a ring over all ranks beside one call, by torchrun.

torchrun --nproc-per-node 8 bench/several_gpus_ring.py TASK.json
"""

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from attention_checks import document_rows
from longctx.attention import RingAttention, reference_attention
from longctx.parallel.device import prepare_device
from longctx.parallel.environment import Launch
from longctx.parallel.mesh import Mesh, join
from longctx.parallel.timing import finish
from longctx.planning.assignment import Assignment
from longctx.planning.cost.model import attention_ns, score
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.layout import Layout, Placement

REPEATS, WARM_UP = 5, 2
Tensors = tuple[torch.Tensor, ...]


def main(task: dict[str, Any]) -> None:
    launch = Launch.to_join()
    device = prepare_device("cuda" if torch.cuda.is_available() else "cpu", launch)
    with join(launch, device, timeout_s=120.0) as mesh:
        errors, right = compared(mesh, task)
        predicted = predicted_share(HardwareProfile.load(task["profile"]), mesh.ranks, task)
        tokens = mesh.ranks * task["timed"]
        alone = round(math.sqrt(mesh.ranks) * task["timed"])
        of_ring = seconds(mesh, attention_of(mesh, tokens), sizes=task)
        of_one = seconds(mesh, attention_of(None, alone, device), sizes=task)
        if mesh.rank == 0:
            answer = {"errors": errors, "right": right, "predicted": predicted}
            answer["measured"] = of_one / of_ring
            Path(task["answer"]).write_text(json.dumps(answer), encoding="utf-8")


def attention_of(mesh: Mesh | None, tokens: int, device: Any = None) -> RingAttention:
    """Returns attention of one document over all ranks of a mesh, or of one call."""
    if mesh is None:
        return RingAttention(Layout.of([Placement(0, 0, 1)], (tokens,), 0, 0), device=device)
    rounds = min(2, mesh.ranks - 1)
    layout = Layout.of([Placement(0, 0, mesh.ranks, rounds=rounds)], (tokens,), 0, mesh.rank)
    return RingAttention(layout, group=mesh.exchange, device=mesh.device)


def inputs_of(tokens: int, task: dict[str, Any], device: torch.device) -> Tensors:
    """Returns q, k, v and dout of a document, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    heads = task["heads"], task["kv_heads"], task["kv_heads"], task["heads"]
    found = []
    for count in heads:
        tensor = torch.randn(tokens, count, task["head_dim"], generator=generator)
        found.append(tensor.to(device, getattr(torch, task["dtype"])))
    return tuple(found)


def results(attention: RingAttention, inputs: Tensors) -> Tensors:
    """Returns out, dq, dk and dv."""
    q, k, v = (tensor.detach().requires_grad_() for tensor in inputs[:3])
    out = attention(q, k, v)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3])


def compared(mesh: Mesh, task: dict[str, Any]) -> tuple[float, bool]:
    """Returns the largest error of the ring over that of one call, both against float64, and
    whether each is at most twice as large. Only rank 0 knows; others return zeros."""
    tokens = mesh.ranks * task["checked"] - 1
    inputs = inputs_of(tokens, task, mesh.device)
    ring = attention_of(mesh, tokens)
    layout = ring.schedule.layout
    assert isinstance(layout, Layout)
    rows = document_rows(layout, (tokens,), mesh.device)
    mine = results(ring, tuple(tensor[rows] for tensor in inputs))
    parts: list[Any] = [None] * mesh.ranks
    dist.all_gather_object(
        parts, (rows.cpu(), [part.double().cpu() for part in mine]), group=mesh.control
    )
    if mesh.rank:
        return 0.0, True
    single = results(attention_of(None, tokens, mesh.device), inputs)
    q, k, v = (tensor.double().requires_grad_() for tensor in inputs[:3])
    out = reference_attention(q, k, v, (tokens,))
    truth = out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3].double())
    rounding = torch.finfo(getattr(torch, task["dtype"])).eps
    ratios = []
    right = True
    for number, (exact, whole) in enumerate(zip(truth, single, strict=True)):
        split = torch.full_like(exact, math.nan, device="cpu")
        for its_rows, its_parts in parts:
            split[its_rows] = its_parts[number]
        norm = exact.norm()
        of_ring = float((split.to(exact.device) - exact).norm() / norm)
        of_one = float((whole.double() - exact).norm() / norm)
        ratios.append(of_ring / of_one)
        right = right and of_ring <= 2 * of_one + rounding / 4
    worst = float(torch.tensor(ratios).max())  # NaN if one is
    return worst, right


def seconds(mesh: Mesh, attention: RingAttention, *, sizes: dict[str, Any]) -> float:
    """Returns the median time of forward and backward on the slowest rank."""
    inputs = inputs_of(attention.layout.tokens, sizes, mesh.device)
    times = []
    for _ in range(WARM_UP + REPEATS):
        finish(mesh.device)
        mesh.gather([0.0])  # all ranks start together
        began = time.perf_counter()
        results(attention, inputs)
        finish(mesh.device)
        times.append(float(mesh.gather([time.perf_counter() - began]).max()))
    return float(np.median(times[WARM_UP:]))


def predicted_share(profile: HardwareProfile, ranks: int, task: dict[str, Any]) -> float:
    """Returns the time of one call over that of a ring of as much work for each rank."""
    lengths = np.array([ranks * task["timed"]])
    none, all_ranks = np.array([0]), np.array([ranks])
    ring = Assignment(none, none, all_ranks, np.array([False]))
    exposed = float(score(profile, lengths, ring, ranks).exposed.max())
    of_ring = float(attention_ns(profile, lengths, all_ranks)[0]) + exposed
    alone = np.array([round(math.sqrt(ranks) * task["timed"])])
    return float(attention_ns(profile, alone, np.array([1]))[0]) / of_ring


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
