"""Two ranks give what one gives, on the CPU and, where there are two, on GPUs: ring attention,
training, and a checkpoint.

On GPUs these are the tests of NCCL: its groups, messages of ring attention and of a pipeline, and
the offloaded optimizer.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from longctx.attention import RingAttention
from longctx.parallel.mesh import make_groups
from longctx.planning.layout import Placement
from longctx.training.metrics import StepMetrics
from tests.attention_cases import Case, gather, run_case
from tests.training_cases import start
from tests.workers import Workers

TWO_GPUS = (
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
)
SPLIT = (Placement(0, 0, 2), Placement(1, 0, 1), Placement(2, 1, 1), Placement(3, 0, 2))
CASE = Case(2, (130, 65, 40, 7), SPLIT, heads=4, kv_heads=2, head_dim=64)


def this_device(name: str) -> torch.device:
    return torch.device(name, dist.get_rank()) if name == "cuda" else torch.device(name)


def ring(case: Case, name: str) -> tuple[torch.Tensor, ...]:
    """Returns out, dq, dk and dv of this rank's rows, twice: as received and with the kept K and
    V."""
    rank, device = dist.get_rank(), this_device(name)
    mesh = make_groups(device, timeout_s=60.0)
    q, k, v, dout = (tensor[case.rows(rank)].to(device) for tensor in case.inputs())
    found = []
    for keep_kv in (False, True):
        q, k, v = (tensor.detach().requires_grad_() for tensor in (q, k, v))
        attention = RingAttention(
            case.layout(rank),
            group=mesh.exchange,
            device=device,
            mask=case.mask,
            kernel=case.kernel,
            keep_kv=keep_kv,
        )
        out = attention(q, k, v, layer=0)
        found.append((out.detach(), *torch.autograd.grad(out, (q, k, v), dout)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), (
        "K and V are the same if they are fetched again"
    )
    return tuple(tensor.cpu() for tensor in found[0])


@pytest.mark.parametrize(
    ("device", "kernel", "dtype"),
    [
        pytest.param("cpu", "auto", torch.float32, marks=pytest.mark.slow),
        pytest.param("cuda", "reference", torch.float32, marks=TWO_GPUS),
        pytest.param("cuda", "auto", torch.bfloat16, marks=TWO_GPUS),
    ],
)
def test_a_ring_equals_one_device(
    workers: Workers, device: str, kernel: str, dtype: torch.dtype
) -> None:
    case = replace(CASE, kernel=kernel, dtype=dtype)
    results = gather(case, workers.run(ring, 2, case, device, device=device))
    placements = tuple(Placement(number, 0, 1) for number in range(len(case.lengths)))
    alone = replace(case, ranks=1, placements=placements, kernel="reference", dtype=torch.float64)
    expected = run_case(alone, tuple(tensor.double() for tensor in case.inputs()))
    rows = alone.rows(0)
    for found, wanted in zip(results, expected, strict=True):
        whole = torch.zeros_like(wanted)
        whole[rows] = wanted
        error = (found.double() - whole).norm() / whole.norm()
        assert error < (0.02 if dtype == torch.bfloat16 else 1e-5)


def steps(store: Path, run: Path, settings: list[str], name: str) -> list[StepMetrics]:
    """Trains a step, writes a checkpoint, and continues from it for another."""
    kernel = "reference" if name == "cuda" else "auto"  # in float32, on every GPU
    found = []
    for resume in (False, True):
        settings = [
            *settings,
            f"train.device={name}",
            f"context.kernel={kernel}",
            "model.overrides.tie_word_embeddings=true",
        ]
        trainer = start(
            store, run, settings, resume=resume, timeout_s=60.0, device=this_device(name)
        )
        with trainer.loader:
            found.append(trainer.step())
            trainer.save()
    return found


HALF, OFFLOADED = "batch.tokens_per_rank=1000", "train.offload_optimizer=true"
SPLITS = {
    "domain": [HALF],
    "replicas, offloaded": [HALF, "parallel.shard_ranks=1", OFFLOADED],
    "tensor": ["parallel.tensor_parallel_size=2"],
    "pipeline, offloaded": ["parallel.pipeline_parallel_size=2", OFFLOADED],
}


@pytest.mark.parametrize(
    ("device", "split"),
    [
        *(pytest.param("cpu", name, marks=pytest.mark.slow) for name in SPLITS),
        *(pytest.param("cuda", name, marks=TWO_GPUS) for name in SPLITS),
    ],
)
def test_training_on_two_devices_equals_one(
    workers: Workers, store: Path, tmp_path: Path, device: str, split: str
) -> None:
    alone = workers.run(steps, 1, store, tmp_path / "one", [], device, device=device)[0]
    both = workers.run(steps, 2, store, tmp_path / "two", SPLITS[split], device, device=device)[0]
    assert [metrics.step for metrics in both] == [1, 2]
    assert [metrics.tokens for metrics in both] == [metrics.tokens for metrics in alone]
    assert [metrics.loss for metrics in both] == pytest.approx(
        [metrics.loss for metrics in alone], rel=1e-4
    )
    assert [metrics.grad_norm for metrics in both] == pytest.approx(
        [metrics.grad_norm for metrics in alone], rel=1e-3
    )
