"""A step of the trainer over trees has the loss and gradients of its sequences, under every kind of parallelism."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from longctx.data.packing import StepBatch
from longctx.data.trees import merge_prefixes, pack_merged
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.planners.planner import make_plan
from tests.marks import slow_unless
from tests.training_cases import make_store, start
from tests.workers import Workers

PARALLEL = {
    "three ranks": (3, []),
    "two levels, kept keys, windows": (4, ["context.keep_kv=true", "model.sliding_window=40"]),
    "swapped heads": (2, ["context.ulysses_degree=2"]),
    "tensor and pipeline": (4, ["parallel.tensor_parallel_size=2", "parallel.pipeline_parallel_size=2"]),
    "pipeline": (4, ["parallel.pipeline_parallel_size=2"]),
    "recomputed": (2, ["train.recompute=full"]),
    "by micro-batch": (2, ["train.recompute=selective", "parallel.reshard_after=micro_batch"]),
}
QUICK = ("two levels, kept keys, windows", "tensor and pipeline")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("store"))


def step(store: Path, run: Path, settings: list[str], least_shared: int) -> tuple[float, float, int]:
    """Runs on each rank: loss, norm of the gradients and tokens of a step over groups of sequences, merged or not."""
    trainer = start(store, run, settings)
    generator = torch.Generator().manual_seed(0)

    def draw(length: int) -> list[int]:
        return torch.randint(0, 200, (length,), generator=generator).tolist()

    sequences, labels = [], []
    for prompt, turn in ((draw(150), draw(60)), (draw(31), draw(5))):
        for end in (draw(90), draw(23), draw(41)):
            sequences += [[*prompt, *end], [*prompt, *turn, *end[:20]]]
            labels += [[*[-100] * len(prompt), *each[len(prompt) :]] for each in sequences[-2:]]
    merged = merge_prefixes([*sequences, draw(99)], [*labels, draw(99)], least_shared=least_shared)
    mesh, profile = trainer.mesh, replace(HardwareProfile.load("h100-nvlink-ib"), ranks_per_node=2)
    ranks = mesh.ranks
    plan = make_plan(
        merged.lengths,
        ranks=ranks,
        tokens_per_rank=1200 // ranks,
        profile=profile,
        mode="static",
        degree=ranks,
        trees=merged.trees,
    )
    packed, targets = pack_merged(plan, mesh.rank, merged, pad_to_multiple_of=2)
    names = tuple(map(str, range(len(plan.lengths))))
    batch = StepBatch(1, plan, names, sum(plan.lengths), int(targets), tuple(packed), target_weight=targets)
    with trainer.loader:
        metrics = trainer.step(batch)
    return metrics.loss, metrics.grad_norm, batch.tokens


@pytest.mark.parametrize("name", slow_unless(lambda name: name in QUICK, PARALLEL))
def test_a_step_over_trees_is_that_of_its_sequences(workers: Workers, store: Path, tmp_path: Path, name: str) -> None:
    ranks, settings = PARALLEL[name]
    model = [setting for setting in settings if setting.startswith("model.")]
    ((loss, norm, tokens),) = workers.run(step, 1, store, tmp_path / "alone", model, 10**6)
    for merged in workers.run(step, ranks, store, tmp_path / "merged", settings, 1):
        assert merged[0] == pytest.approx(loss, rel=1e-5) and merged[1] == pytest.approx(norm, rel=1e-4)
        assert merged[2] < 0.7 * tokens
