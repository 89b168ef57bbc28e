"""Steps of a whole model on many ranks without their memory: fake tensors, a process group that sends nothing, one rank of it.

All code of a step runs: sharding, recomputation, exchange, pipeline schedules, optimizer. Only matrix work and messages do not.
"""

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # registers collectives of fake tensors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from longctx.attention.kernels import KERNELS, cpu
from longctx.config import Config
from longctx.data.packing import StepBatch, pack_documents
from longctx.memory.loads import micro_batch_loads
from longctx.memory.model import Memory, estimate
from longctx.model.spec import ModelSpec
from longctx.parallel import mesh as mesh_module
from longctx.parallel.mesh import Mesh, make_groups
from longctx.planning.plan import Plan
from longctx.training import trainer as training
from longctx.training.objective import StepWeights
from longctx.training.run_profile import run_profile
from longctx.training.setup import make_planner, padding
from longctx.training.trainer import Trainer
from tests.host_waits import RINGS


class Sizes:
    """An attention kernel that computes nothing."""

    refusal = staticmethod(cpu.refusal)

    def forward(self, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(q.shape[:2], dtype=torch.float32)

    def backward(self, dout: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class Live(TorchDispatchMode):
    """Counts the bytes of tensors that are alive, and their peak; follows custom operators inside."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0

    def add(self, tensor: Any) -> None:
        if not isinstance(tensor, torch.Tensor):
            return
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        if storage._cdata not in self.sizes:
            self.sizes[storage._cdata] = 0
            weakref.finalize(storage, self._drop, storage._cdata)
            self.resize(storage)

    def resize(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self.sizes:
            self.now += storage.nbytes() - self.sizes[storage._cdata]
            self.sizes[storage._cdata] = storage.nbytes()
            self.peak = max(self.peak, self.now)

    def _drop(self, key: int) -> None:
        self.now -= self.sizes.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in RINGS:
            with self:
                return RINGS[func._schema.name](*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            self.add(tensor)
        return out


@contextmanager
def fake_ranks(rank: int, ranks: int) -> Iterator[None]:
    """Makes this process rank `rank` of `ranks`, whose messages go nowhere."""
    new_group = dist.new_group
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        with mock.patch.object(dist, "new_group", lambda *args, **named: new_group(*args, **{**named, "backend": "fake"})):
            yield
    finally:
        dist.destroy_process_group()


def plan_of(config: Config, ranks: int, vocabulary: int, lengths: list[int]) -> Plan:
    return make_planner(config, config.domain(ranks), run_profile(config, ranks, vocabulary).profile)(lengths)


def fullest(config: Config, ranks: int, spec: ModelSpec, plan: Plan) -> tuple[int, Memory]:
    """Returns the place in the domain of the rank with the highest estimate, and the estimate."""
    micro_batches = [list(micro_batch_loads(plan, number, config)) for number in range(len(plan.micro_batches))]
    found = []
    for place in range(config.domain(ranks)):
        memory = estimate(spec, config, ranks, [loads[place] for loads in micro_batches], fused=False)
        found.append((memory.total, place, memory))
    _, place, memory = max(found, key=lambda one: one[0])
    return place, memory


def peak_of_step_2(config: Config, ranks: int, rank: int, vocabulary: int, plan: Plan) -> int:
    """Returns the peak bytes of live tensors on `rank` in the second step of this plan."""
    parallel = config.parallel
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(KERNELS, {"cpu": Sizes()}))
        stack.enter_context(mock.patch.object(training, "rows_with_labels", return_value=None))
        stack.enter_context(mock.patch.object(mesh_module, "warm_up", return_value=None))
        stack.enter_context(fake_ranks(rank, ranks))
        live, fake = Live(), FakeTensorMode(allow_non_fake_inputs=True)
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            out = resize(storage, size)
            live.resize(storage)
            return out

        stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resized))
        mesh: Mesh = make_groups(
            torch.device("cpu"),
            tensor=parallel.tensor_parallel_size,
            pipeline=parallel.pipeline_parallel_size,
            shard_ranks=parallel.shard_ranks,
        )
        with fake:
            trainer = Trainer.build(config, mesh, config.model_source(vocabulary))
        documents = [np.zeros(length, np.int64) for length in plan.lengths]
        packed, targets = pack_documents(plan, mesh.rank, documents, pad_to_multiple_of=padding(config))
        names = tuple(map(str, range(len(plan.lengths))))
        batch = StepBatch(1, plan, names, sum(plan.lengths), targets, tuple(packed))
        attention = {id(micro.layout): trainer._attend(plan, micro.layout) for micro in batch.micro_batches}
        trainer.attend = lambda plan, layout: attention[id(layout)]
        for parameter in trainer.model.parameters():
            live.add(parameter)
        with fake, live:
            for _ in range(2):
                live.peak = live.now
                trainer._forward_backward(batch, StepWeights(1.0))
                trainer.optimizer.step()
                trainer.optimizer.zero_grad()
        return live.peak
