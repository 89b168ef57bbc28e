"""Runs `longctx` on a modelled device: everything is real but matrix work and attention kernels,
which sleep.

    python -m bench.modelled DEVICE.json measure run.yaml --modes auto,static:8

Loader, planner, layouts, schedules, exchange, FSDP's collectives and the bytes on the links are
those of any run. The model is tiny, so that its own arithmetic costs next to nothing. Instead of it

- the MLP and the projection of queries of every block sleep for the linear work of a rank's tokens,
  a third of it forward;
- every kernel call sleeps for its share, by visible pairs of query and key, of the attention that
  the cost model gives to the rank's documents at their lengths and degrees, 1 / 3.5 of it forward,
  and of the price of exchange rounds; its results are zeros, so losses do not depend on plans;
- the first block sleeps for the fixed cost of a micro-batch, and the optimizer for that of a step;
- every block has `ballast`, a weight that nothing uses, so that FSDP gathers and reduces as many
  bytes as the links' rates ask.

One process makes each plan for all, as they share a few cores: ranks of a cluster have their own.

All times are those of a hardware profile, multiplied by `dilation`. Fixed static (`static:DEGREE`)
packs documents in the order in which they are drawn, as trainers do, and `bins` stands for the
planner of `rival`, if one is given.
"""

import ctypes
import json
import os
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroupGloo, distributed_c10d

from longctx.attention import ring_pass
from longctx.attention.kernels import KERNELS
from longctx.attention.kernels.contract import Gradients, KernelRequest, Options
from longctx.attention.segments import Segment, Segments
from longctx.cli import main
from longctx.comparison import measured
from longctx.comparison.baselines import place_fixed_static
from longctx.model import decoder
from longctx.planning.cost.model import NANOSECONDS, attention_ns
from longctx.planning.cost.rounds import PRICE
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.plan import Plan
from longctx.planning.planners.planner import PLANNERS
from longctx.planning.planners.planning_input import Candidate, PlanningInput
from longctx.training import data, optimizer
from longctx.training.trainer import Trainer

FORWARD, LINEAR_FORWARD = 1 / 3.5, 1 / 3


@dataclass
class Device:
    """A device of a profile's speed, `dilation` times slower; one for each process.

    Attributes:
        profile: hardware profile before dilation.
        dilation: factor of all times.
        layers: blocks of the tiny model.
        ballast: unused weights of each block.
        step_s: sleep of the optimizer before dilation.
        rival: baseline that mode bins stands for; empty: bins.
        work: file for the work of every step, in the order of steps and modes (see `_count_work`).
        s_per_pair: time of attention per visible pair in the current pass of a layer.
        slept_s: time slept so far.
    """

    profile: HardwareProfile
    dilation: float
    layers: int
    ballast: int
    step_s: float
    rival: str
    work: str
    s_per_pair: float = 0.0
    slept_s: float = 0.0

    def sleep(self, seconds: float) -> None:
        """Sleeps for work of the profile's device."""
        began = time.perf_counter()
        time.sleep(max(0.0, seconds * self.dilation))
        self.slept_s += time.perf_counter() - began

    def install(self) -> None:
        """Replaces matrix work, attention kernels and some planners of this process."""
        KERNELS["cpu"] = ModelledKernel(self)
        distributed_c10d.ProcessGroupGloo = SharedLoop  # type: ignore[misc]
        _watch_passes(self)
        _slow_blocks(self)
        _slow_optimizer(self)
        _count_work(self)
        data.make_plan = partial(plan_once, data.make_plan, Path(self.work).parent)
        PLANNERS["static"] = partial(_static, plain=PLANNERS["static"])
        if self.rival:
            PLANNERS["bins"] = partial(_rival, name=self.rival)


class ModelledKernel:
    """Attention that takes the time of the current pass for its pairs, and gives zeros."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def refusal(self, request: KernelRequest) -> str | None:
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, options: Options
    ) -> tuple[Tensor, Tensor]:
        self.device.sleep(self.device.s_per_pair * FORWARD * pairs(segments))
        return q.new_zeros(*q.shape[:2], v.shape[2], dtype=torch.float32), q.new_zeros(
            q.shape[:2], dtype=torch.float32
        )

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        segments: Segments,
        options: Options,
    ) -> Gradients:
        self.device.sleep(self.device.s_per_pair * (1 - FORWARD) * pairs(segments))
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


class SharedLoop(ProcessGroupGloo):
    """Gloo whose groups share the thread that waits for messages, and let it sleep until there are
    some.

    Gloo wakes such a thread 100 times a second. It gets a timer slack of a second: messages wake it
    at once, its timer late.
    """

    device: Any = None

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        if SharedLoop.device is None:
            # PR_SET_TIMERSLACK of <linux/prctl.h>; threads inherit it.
            set_slack = partial(ctypes.CDLL(None).prctl, 29)
            set_slack(ctypes.c_ulong(1_000_000_000))
            SharedLoop.device = ProcessGroupGloo.create_device(
                interface=os.environ["GLOO_SOCKET_IFNAME"]
            )
            set_slack(ctypes.c_ulong(50_000))
        options = ProcessGroupGloo._Options()
        options._timeout, options._devices, options._threads = timeout, [SharedLoop.device], 2
        super().__init__(store, rank, size, options)


def pairs(segments: Sequence[Segment]) -> int:
    """Returns the visible pairs of queries and keys; segments must have no lower limit."""
    total = 0
    for segment in segments:
        queries, keys = segment.q_stop - segment.q_start, segment.k_stop - segment.k_start
        hi = keys if segment.hi is None else segment.hi
        # Query i sees clamp(i + hi + 1, 0, keys) keys.
        total += (
            _triangle(queries + hi)
            - _triangle(hi)
            - _triangle(queries + hi - keys)
            + _triangle(hi - keys)
        )
    return total


def _triangle(n: int) -> int:
    return n * (n + 1) // 2 if n > 0 else 0


def _watch_passes(device: Device) -> None:
    """Sets the time per pair at the begin of every pass, from the documents of the rank."""
    # The last schedule: by its id alone, a new one at the same address would be taken for it.
    known: Any = None
    begin = ring_pass.RingPass.__init__

    def begun(this: Any, call: Any, *arguments: Any) -> None:
        nonlocal known
        begin(this, call, *arguments)
        if call.schedule is not known:
            known = schedule = call.schedule
            shards = schedule.layout.shards
            lengths, degrees = (
                np.array([getattr(shard, name) for shard in shards])
                for name in ("length", "degree")
            )
            seconds = (
                attention_ns(device.profile, lengths, degrees).sum() / NANOSECONDS
                if len(shards)
                else 0.0
            )
            rows = sum((shard.rounds - 1) * shard.tokens for shard in shards)
            seconds += PRICE * device.profile.linear_s_per_token * rows
            device.s_per_pair = (
                seconds
                / device.layers
                / max(1.0, sum(pairs(part.segments) for part in schedule.calls))
            )

    ring_pass.RingPass.__init__ = begun  # type: ignore[method-assign]


class _Work(torch.autograd.Function):
    """Identity that takes time in both passes, and gives `ballast` a gradient of zeros."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, ballast: Tensor | None, device: Device, seconds: float
    ) -> Tensor:  # type: ignore[override]  # torch has any arguments here
        ctx.device, ctx.seconds, ctx.ballast = device, seconds, ballast
        device.sleep(LINEAR_FORWARD * seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        ctx.device.sleep((1 - LINEAR_FORWARD) * ctx.seconds)
        return gradient, None if ctx.ballast is None else torch.zeros_like(ctx.ballast), None, None


def _slow_blocks(device: Device) -> None:
    """Gives blocks their ballast, and the time of the linear work."""
    profile = device.profile
    made = decoder.Block.__init__

    def make(this: Any, shape: Any, layer: int) -> None:
        made(this, shape, layer)
        this.ballast = nn.Parameter(torch.empty(device.ballast))
        for name, share in (
            ("mlp", 1 - profile.query_share),
            ("self_attn.q_proj", profile.query_share),
        ):
            this.get_submodule(name).register_forward_hook(
                partial(linear, share, this if name == "mlp" else None)
            )

    def linear(share: float, block: Any, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        seconds = share * profile.linear_s_per_token * len(output) / device.layers
        if block is not None and block.layer == 0:
            seconds += profile.launch_s
        return _Work.apply(output, None if block is None else block.ballast, device, seconds)

    decoder.Block.__init__ = make  # type: ignore[method-assign]


def _slow_optimizer(device: Device) -> None:
    step = optimizer.torch.optim.AdamW.step

    def slow(this: Any, *arguments: Any, **more: Any) -> Any:
        device.sleep(device.step_s)
        return step(this, *arguments, **more)

    optimizer.torch.optim.AdamW.step = slow  # type: ignore[method-assign]


def _count_work(device: Device) -> None:
    """Writes a row for every step, in seconds: processor time of all ranks; what of it they would
    need while asleep; and the mean and most of what ranks slept.
    """
    measure = measured._step
    idle: list[float] = []

    def counted(trainer: Trainer) -> measured.MeasuredStep:
        if not idle:
            idle.append(_idle_share(trainer))
        began, busy, slept = time.perf_counter(), time.process_time(), device.slept_s
        step = measure(trainer)
        used = [
            time.process_time() - busy,
            idle[0] * (time.perf_counter() - began),
            device.slept_s - slept,
        ]
        rows = trainer.mesh.gather(used)
        if dist.get_rank() == 0:
            (host_s, idle_s, _), mean_s, most_s = (
                rows.sum(axis=0),
                rows[:, 2].mean(),
                rows[:, 2].max(),
            )
            row = {"host_s": host_s, "idle_s": idle_s, "slept_s": mean_s, "slept_most_s": most_s}
            with Path(device.work).open("a", encoding="utf-8") as file:
                print(json.dumps({name: float(value) for name, value in row.items()}), file=file)
        return step

    measured._step = counted


def plan_once(
    plan: Callable[..., Plan], folder: Path, lengths: Sequence[int], **settings: Any
) -> Plan:
    """Returns the plan of a step, which the first process to ask makes for all: here all ranks
    share a few cores.

    Processes exchange plans by files in `folder`.
    """
    key = sha256(repr((tuple(lengths), settings)).encode()).hexdigest()
    file, claim = folder / f"{key}.plan", folder / f"{key}.claim"
    while not file.exists():
        try:
            claim.touch(exist_ok=False)
        except FileExistsError:
            time.sleep(0.05)
            continue
        try:
            whole = file.with_suffix(".part")
            whole.write_bytes(pickle.dumps(plan(lengths, **settings)))
            whole.rename(file)
        finally:
            claim.unlink()
    found: Plan = pickle.loads(file.read_bytes())
    return found


def _idle_share(trainer: Trainer, seconds: float = 5.0) -> float:
    """Returns the share of a core that this process needs while all ranks sleep."""
    trainer.mesh.gather([0.0])
    busy = time.process_time()
    time.sleep(seconds)
    return (time.process_time() - busy) / seconds


def _static(given: PlanningInput, plain: Any) -> Candidate:
    if given.degree is None:
        found: Candidate = plain(given)
        return found
    assignment = place_fixed_static(
        given.profile, given.lengths, given.ranks, given.tokens_per_rank, given.degree
    )
    return given.candidate(f"static:{given.degree}", assignment)


def _rival(given: PlanningInput, name: str) -> Candidate:
    from bench.rivals import RIVALS  # runs as a module, as this file does

    assignment = RIVALS[name](given.profile, given.lengths, given.ranks, given.tokens_per_rank)
    return given.candidate(name, assignment)


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    Device(HardwareProfile.load(given.pop("profile")), **given).install()
    status = main(sys.argv[2:])
    sys.exit(status)
