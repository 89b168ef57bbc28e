"""Steps of a whole model on many ranks without their memory: fake device tensors, a process group
that sends nothing, one rank.

All code of a step runs: sharding, recomputation, exchange, pipeline schedules, clipping, optimizer.
Only matrix work and messages do not. Host tensors are real, so whatever the host reads from a
device is found.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # registers collectives of fake tensors
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_iter

from longctx.attention import exchange
from longctx.attention.kernels import KERNELS, KernelRequest, choose_kernel
from longctx.config import Config
from longctx.data.packing import StepBatch, pack_documents
from longctx.hf import live
from longctx.memory.loads import micro_batch_loads
from longctx.memory.model import Memory, RankMemory
from longctx.parallel import mesh as mesh_module
from longctx.parallel import offload
from longctx.parallel.mesh import Mesh, make_groups
from longctx.parallel.offload import Offload
from longctx.parallel.recompute import apply_recompute
from longctx.planning.cost.spec import ModelSpec
from longctx.planning.plan import Plan
from longctx.training import build, runner
from longctx.training.data import make_planner
from longctx.training.optimizer import make_optimizer
from longctx.training.run_profile import run_profile
from longctx.training.trainer import Trainer
from tests.fake_cuda import fake_cuda
from tests.host_waits import OPERATORS, HostWaits


class Sizes:
    """An attention kernel that computes nothing."""

    def refusal(self, request: KernelRequest) -> str | None:
        return None

    def forward(
        self, q: Any, k: Any, v: Any, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(q.shape[:2], dtype=torch.float32)

    def backward(
        self, dout: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, ...]:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class FusedNorm(torch.autograd.Function):
    """Keeps and makes the tensors of torch's fused RMSNorm, which only GPUs have."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class FakeDevice(FakeTensorMode):
    """Fakes tensors that are made on a named device, and all that is computed from them; others
    stay real, as the host's."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.device = device

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made_on = (kwargs or {}).get("device")
        fake = made_on is not None and made_on.type in (self.device.type, "meta")
        if fake or any(isinstance(one, FakeTensor) for one in tree_iter((args, kwargs))):
            return super().dispatch(func, types, args, kwargs)
        return func(*args, **kwargs or {})


class MadeOnHost(TorchFunctionMode):
    """Makes real tensors where no device is named, which torch's dispatcher cannot tell from the
    CPU named."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _device_constructors() or (kwargs or {}).get("device") is not None:
            return func(*args, **kwargs or {})
        with unset_fake_temporarily():
            return func(
                *args,
                **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"},
            )


class FakeHostWaits(HostWaits):
    """Counts as the device's what is fake. All numbers that the host reads from it are 1."""

    def __init__(self, fake: FakeDevice) -> None:
        super().__init__()
        self.fake = fake

    def has_one(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, FakeTensor)

    def mark(self, tensor: torch.Tensor) -> None:
        pass

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        with self.fake:
            return torch.empty_like(tensor, device=self.fake.device)

    def value(
        self, name: str, tensor: torch.Tensor, original: Any, *arguments: Any, **named: Any
    ) -> Any:
        read = {"__float__": 1.0, "__bool__": True, "item": 1}
        return read[name] if name in read else torch.ones(tensor.shape, dtype=tensor.dtype)


class Live(live.Live):
    """Counts the fake tensors of one device; follows custom operators inside."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.kinds: set[tuple[str, torch.dtype]] = set()
        """Types of devices and dtypes of all fake tensors that were made."""

    def add(self, tensor: Any) -> None:
        tensor = getattr(tensor, "_local_tensor", tensor)
        if not isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
            return
        self.kinds.add((tensor.device.type, tensor.dtype))
        if tensor.device.type == self.device.type:
            super().add(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in OPERATORS:
            with self:
                return OPERATORS[func._schema.name](*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextmanager
def fake_ranks(rank: int, ranks: int) -> Iterator[None]:
    """Makes this process rank `rank` of `ranks`, whose messages go nowhere."""
    new_group = dist.new_group
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        with mock.patch.object(
            dist,
            "new_group",
            lambda *args, **named: new_group(
                *args, **{**named, "backend": "fake", "pg_options": None}
            ),
        ):
            yield
    finally:
        dist.destroy_process_group()


class AtTheEnd:
    """Runs hops where their end is waited for."""

    def __init__(self, hops: Callable[[], None]) -> None:
        self.end = hops

    @staticmethod
    def end_others() -> None: ...


@contextmanager
def as_on_gpus(config: Config) -> Iterator[None]:
    """Uses what the trainer would use on a GPU: torch's fused norm and AdamW, and offloading of
    activations, which come back as tensors of the device."""

    def on_host(tensor: torch.Tensor) -> torch.Tensor:
        with unset_fake_temporarily():
            return torch.empty(tensor.shape, dtype=tensor.dtype)

    def has_stream(tensor: torch.Tensor) -> bool:  # a mock would keep the tensor
        return True

    def norm(module: nn.RMSNorm, x: torch.Tensor) -> torch.Tensor:
        return FusedNorm.apply(x, module.weight)

    def optimizer(
        model: Any, settings: Any, device: torch.device, stage: Any = None
    ) -> torch.optim.Optimizer:
        return make_optimizer(model, settings, torch.device("cuda"))

    def recompute(*args: Any, **named: Any) -> None:
        apply_recompute(
            *args, **named | {"offload": Offload() if config.train.offload_activations else None}
        )

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(nn.RMSNorm, "forward", norm))
        stack.enter_context(mock.patch.object(runner, "make_optimizer", optimizer))
        stack.enter_context(mock.patch.object(build, "apply_recompute", recompute))
        if config.train.offload_activations:
            stack.enter_context(fake_cuda())
            stack.enter_context(mock.patch.object(offload, "_pinned_like", on_host))
            stack.enter_context(mock.patch.object(offload, "_has_stream", has_stream))
        # Fake tensors belong to one thread; on a GPU there is none.
        stack.enter_context(mock.patch.object(exchange, "_Beside", AtTheEnd))
        yield


def plan_of(config: Config, ranks: int, vocabulary: int, lengths: list[int]) -> Plan:
    return make_planner(
        config, config.domain(ranks), run_profile(config, ranks, vocabulary).profile
    )(lengths)


def fullest(config: Config, ranks: int, spec: ModelSpec, plan: Plan) -> tuple[int, Memory]:
    """Returns the rank with the highest estimate for a GPU, and the estimate."""
    domain, tensor = config.domain(ranks), config.parallel.tensor_parallel_size
    found = []
    for stage in range(config.parallel.pipeline_parallel_size):
        for number in range(len(plan.micro_batches)):
            for place, load in enumerate(micro_batch_loads(plan, number, config)):
                for memory in RankMemory(spec, config, ranks, load, True, stage).moments():
                    found.append((memory.total, (stage * domain + place) * tensor, memory))
    _, rank, memory = max(found, key=lambda one: one[0])
    return rank, memory


@dataclass
class Traced:
    """A trainer of fake tensors on one rank, its share of a step, and what counts its tensors."""

    trainer: Trainer
    batch: StepBatch
    fake: FakeDevice
    live: Live


@contextmanager
def traced(
    config: Config, ranks: int, rank: int, vocabulary: int, plan: Plan, device: torch.device
) -> Iterator[Traced]:
    """Builds the trainer of `rank` for a plan, with fake tensors on `device`."""
    parallel = config.parallel
    with ExitStack() as stack:
        choose_kernel.cache_clear()
        stack.callback(choose_kernel.cache_clear)
        stack.enter_context(mock.patch.dict(KERNELS, {config.context.kernel: Sizes()}))
        stack.enter_context(mock.patch.object(mesh_module, "warm_up", return_value=None))
        stack.enter_context(fake_ranks(rank, ranks))
        live, fake = Live(device), FakeDevice(device)
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            out = resize(storage, size)
            live.resize(storage)
            return out

        stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resized))
        stack.enter_context(
            mock.patch.object(torch.UntypedStorage, "data_ptr", lambda storage: storage._cdata)
        )
        mesh: Mesh = make_groups(
            device,
            tensor=parallel.tensor_parallel_size,
            pipeline=parallel.pipeline_parallel_size,
            shard_ranks=parallel.shard_ranks,
        )
        with fake, MadeOnHost():
            trainer = Trainer.of(config, mesh, config.model_source(vocabulary))
        documents = [np.zeros(length, np.int64) for length in plan.lengths]
        packed, targets = pack_documents(
            plan, mesh.rank, documents, pad_to_multiple_of=config.padding
        )
        names = tuple(map(str, range(len(plan.lengths))))
        for parameter in trainer.model.parameters():
            live.add(parameter)
        yield Traced(
            trainer,
            StepBatch(1, plan, names, sum(plan.lengths), targets, tuple(packed)),
            fake,
            live,
        )


def step_2(
    config: Config, ranks: int, rank: int, vocabulary: int, plan: Plan
) -> tuple[int, set[str]]:
    """Returns the peak bytes of device tensors on `rank` in the second step of this plan, and where
    the host waited in it."""
    with (
        as_on_gpus(config),
        traced(config, ranks, rank, vocabulary, plan, torch.device("cpu")) as this,
    ):
        for _ in range(2):
            watch = FakeHostWaits(this.fake)
            with this.fake, MadeOnHost(), this.live, watch.watching(iter(())):
                this.live.peak = this.live.now
                this.trainer.step(this.batch)
        return this.live.peak, watch.found
