"""The forward of an 8B model on 64 ranks runs on fake CUDA devices, without a GPU: devices, dtypes,
shapes and memory.

Its backward does not run there: torch's autograd asks for a device. See `test_whole_size` for whole
steps.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import pytest
import torch

from longctx.attention import merge
from longctx.config import Config, load
from longctx.memory.loads import micro_batch_loads
from longctx.memory.model import RankMemory
from longctx.planning.plan import Plan
from longctx.training.objectives.objective import StepWeights
from tests.fake_cuda import fake_cuda
from tests.memory.test_whole_size import (
    FULL,
    LENGTHS,
    LONG,
    MODEL,
    PIPELINE,
    RANKS,
    RECOMPUTATION,
    SELECTIVE,
    TENSOR,
    VOCABULARY,
)
from tests.whole_size import FakeHostWaits, MadeOnHost, Traced, plan_of, traced

pytestmark = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="torch is built without CUDA"
)
CUDA = ["train.device=cuda", "context.kernel=reference", LONG]
SETTINGS = {
    **RECOMPUTATION,
    "activations offloaded": [FULL, "train.offload_activations=true"],
    "optimizer offloaded": [FULL, "train.offload_optimizer=true"],
    "matrices split over 8": [TENSOR + "8"],
    "heads swapped for tokens": [SELECTIVE, "context.ulysses_degree=4"],
    "first of a pipeline": [FULL, PIPELINE],
    "last of a pipeline": [FULL, PIPELINE],
}

OFFLOADED = {"activations offloaded": {torch.bfloat16}, "optimizer offloaded": {torch.float32}}


def forward(this: Traced) -> Iterator[torch.Tensor]:
    """Yields the outputs of the model, or of each of its stages, for the first micro-batch."""
    trainer = this.trainer
    given = trainer.runner.inputs(this.batch, StepWeights(1.0), 0)
    if trainer.runner.pipeline is None:
        yield trainer.model(given.tokens, given.positions, given.attention, given.head)
        return
    for stage in trainer.runner.pipeline.stages:
        stage.inputs = lambda number: given
        stage.micro_batch = 0
        yield stage(trainer.runner.pipeline.hidden(trainer.mesh.device).requires_grad_())


def loss_moment(config: Config, plan: Plan, rank: int) -> int:
    """Returns the estimated bytes of `rank` in the loss of the first micro-batch of a run, before
    there is optimizer state."""
    place, domain = rank // config.parallel.tensor_parallel_size, config.domain(RANKS)
    load = list(micro_batch_loads(plan, 0, config))[place % domain]
    step = RankMemory(
        config.model_source(VOCABULARY).spec, config, RANKS, load, True, place // domain
    )
    (loss,) = (moment for moment in step.moments() if moment.moment == "loss")
    return replace(loss, optimizer=0, pipeline=0).total - step.earlier_gradients


@pytest.mark.parametrize("name", SETTINGS)
def test_forward(name: str) -> None:
    if "split" in name and torch.__version__ < "2.13":
        pytest.skip("torch's DTensor takes gathered weights for float32 when it traces")
    torch.set_num_threads(1)
    config = load(None, [*MODEL, *CUDA, *SETTINGS[name]], world_size=RANKS)
    plan = plan_of(config, RANKS, VOCABULARY, LENGTHS)
    rank, device = RANKS - 1 if "last" in name else 0, torch.device("cuda", 0)
    blocks: list[torch.Tensor] = []
    with ExitStack() as stack:
        stack.enter_context(fake_cuda())
        stack.enter_context(mock.patch.object(merge, "_has_triton", return_value=False))
        this = stack.enter_context(traced(config, RANKS, rank, VOCABULARY, plan, device))
        for block in this.trainer.model.layers:
            block.register_forward_hook(lambda block, given, out: blocks.append(out))
        watch = FakeHostWaits(this.fake)
        for mode in (this.fake, MadeOnHost(), this.live, watch.watching(iter(()))):
            stack.enter_context(mode)
        outs = list(forward(this))
    tokens = len(this.batch.micro_batches[0].tokens) // config.parallel.tensor_parallel_size
    hidden = this.trainer.model.spec.hidden_size
    assert len(blocks) == len(this.trainer.model.layers)
    assert {(out.device, out.dtype, out.shape) for out in blocks} == {
        (device, torch.bfloat16, (tokens, hidden))
    }
    kinds = {(kind, dtype) for kind, dtype in this.live.kinds if dtype.is_floating_point}
    assert {dtype for kind, dtype in kinds if kind == "cuda"} <= {
        torch.bfloat16,
        torch.float32,
        torch.float64,
    }
    assert {dtype for kind, dtype in kinds if kind == "cpu"} == OFFLOADED.get(name, set())
    assert watch.found == set()
    if name == "first of a pipeline":
        assert [(out.device, out.dtype, out.shape) for out in outs] == [
            (device, torch.bfloat16, (16384, hidden))
        ]
        return
    assert [(out.device, out.dtype, out.shape) for out in outs] == [(device, torch.float32, ())]
    assert loss_moment(config, plan, rank) == pytest.approx(this.live.peak, rel=0.1)
    print(
        f"{name}: {this.live.peak / 2**30:.2f} GiB, estimate "
        f"{loss_moment(config, plan, rank) / 2**30:.2f}"
    )
