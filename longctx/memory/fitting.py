"""Checks whether a run fits into the memory of its ranks, and finds the cheapest change of settings
that would make it fit.

The estimate is compared with all available memory, without a margin for what it does not count (see
`model`): a run that is refused could not work, but a run that barely fits may still run out of
memory.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import torch

from longctx.config import Config
from longctx.config.rules import broken_rules
from longctx.data.store.store import Store
from longctx.errors import UserError
from longctx.memory.changes import Settings, as_override, changes_between, savings, sets_of
from longctx.memory.host import host_need
from longctx.memory.loads import Load, full_loads, loads
from longctx.memory.model import Memory, estimate, fits
from longctx.parallel.host_memory import free_bytes
from longctx.parallel.mesh import Mesh
from longctx.planning.cost.spec import RECOMPUTE_MODES, ModelSpec
from longctx.planning.plan import Plan
from longctx.training.data import first_plans
from longctx.training.described import read_described
from longctx.training.run import Run
from longctx.training.run_profile import default_profile, own_device
from longctx.units import format_bytes

PLANNED_STEPS = 2
ROOM = 0.9
"""Share of the available memory that `train.fit_memory` fills by estimate, which does not count
everything."""


class DoesNotFit(UserError):
    """A run that needs more memory than its ranks have available."""


@dataclass
class PlannedSteps:
    """Plans of a run's first steps, each made once, when it is first asked for."""

    coming: Iterator[Plan]
    made: list[Plan] = field(default_factory=list)

    def first(self, steps: int) -> list[Plan]:
        missing = max(0, steps - len(self.made))
        self.made += islice(self.coming, missing)
        return self.made[:steps]


@dataclass(frozen=True)
class RunMemory:
    """Peak memory of a run on `ranks` processes, by its settings.

    Attributes:
        spec: sizes of the model.
        store: its documents, of which the first steps count; None: a full rank with the longest
            document.
        fused: whether ranks are GPUs, with fused operations.
    """

    spec: ModelSpec
    store: Store | None
    ranks: int
    fused: bool
    _planned: dict[str, PlannedSteps] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def of(cls, run: Run) -> "RunMemory":
        return cls(run.source.spec, run.data.store, run.launch.world_size, run.on_gpu)

    def loads(self, config: Config) -> Sequence[Load]:
        """Returns the loads of the ranks."""
        if self.store is None:
            return list(full_loads(config, self.ranks))
        return list(loads(self.plans(config, PLANNED_STEPS), config))

    def plans(self, config: Config, steps: int) -> list[Plan]:
        """Returns the plans of the run's first `steps` steps, or of all if it has fewer. Each is
        made once for the same settings, with kept K and V by default as without them."""
        assert self.store is not None
        keep_kv = bool(config.context.keep_kv)
        settings = config.changed({"context.keep_kv": keep_kv}).to_yaml()
        planned = self._planned.get(settings)
        if planned is None:
            coming = first_plans(config, self.store, self.ranks, config.train.steps)
            planned = PlannedSteps(coming)
        plans = planned.first(steps)  # may raise, and would have no more plans then
        self._planned[settings] = planned
        return plans

    def peak(self, config: Config) -> Memory:
        """Returns the peak memory of the fullest rank."""
        return estimate(self.spec, config, self.ranks, self.loads(config), fused=self.fused)

    def fits(self, config: Config, available: int, loads: Sequence[Load]) -> bool:
        """Returns whether a rank needs at most `available` bytes, and the host has room for what is
        offloaded to it."""
        host = host_need(self.spec, config, self.ranks, loads)
        if host is not None and host.needed > host.free:
            return False
        return fits(
            self.spec,
            config,
            ranks=self.ranks,
            candidates=loads,
            available=available,
            fused=self.fused,
        )

    def available(self, config: Config) -> tuple[int | None, str]:
        """Returns the bytes that each rank has, None if unknown, and of what; GPUs that are not
        here are the profile's."""
        device, gpu = own_device(config)
        if device.type == "cuda" and gpu is None:
            _, described = read_described(
                config.context.profile or default_profile(device.type, gpu)
            )
            if described is None or described.memory_gb is None:
                known = None
            else:
                known = int(1e9 * described.memory_gb)
            return known, (described and described.gpu) or "GPU"
        return available_bytes(device, self.ranks), gpu or "rank, if all are on this machine"

    def may_change(self, config: Config) -> bool:
        """Returns whether settings may be changed so that the run fits: `train.fit_memory`, or else
        its default."""
        if config.train.fit_memory is None:
            return self.fused
        return config.train.fit_memory

    def fitted(self, config: Config, available: int) -> Config:
        """Returns settings with which the run fits at the least cost in time, for
        `train.fit_memory`.

        They need at most ROOM of `available` bytes per rank by estimate, or else at most all of it;
        if none do, nothing changes. Received K and V are kept if that fits, unless the settings say
        otherwise.
        """
        keeping = config.changed({"context.keep_kv": True})
        room = int(ROOM * available)
        if config.context.keep_kv is None and self.fits(keeping, room, self.loads(keeping)):
            return keeping
        if self.fits(config, room, self.loads(config)):
            return config
        # The ranks that share weights have joined already when all ranks agree on the changes.
        keep = ("parallel.shard_ranks",)
        for limit in (room, available):
            change = self.cheapest_change(config, limit, keep)
            if change is not None:
                return config.changed(change)
        return config

    def as_fitted(self, config: Config) -> Config:
        """Returns the settings that a run with known memory would have by `train.fit_memory`; the
        same if that is off."""
        available = self.available(config)[0]
        if available is not None and self.may_change(config):
            return self.fitted(config, available)
        return config

    def choices(self, config: Config) -> Iterator[tuple[Settings, Memory]]:
        """Yields every valid combination of recomputation, kept K and V and resharding with its
        peak, fastest first."""
        for recompute in RECOMPUTE_MODES:
            for keep_kv in (True, False):
                times = {"train.recompute": recompute, "context.keep_kv": keep_kv}
                candidates = self.loads(config.changed(times))
                for reshard_after in ("step", "micro_batch", "block"):
                    values = {**times, "parallel.reshard_after": reshard_after}
                    tried = config.changed(values)
                    if not broken_rules(tried, self.ranks):
                        yield (
                            values,
                            estimate(self.spec, tried, self.ranks, candidates, fused=self.fused),
                        )

    def cheapest_change(
        self, config: Config, available: int, keep: Sequence[str] = ()
    ) -> Settings | None:
        """Returns the cheapest valid change that makes the run fit into `available` bytes per rank,
        or None.

        Settings named in `keep` do not change.

        This is the cheapest single change that is enough; otherwise the set with the cheapest worst
        change, ties by the next-worst. None of its changes could be left out.
        """
        planned: dict[tuple[object, ...], Sequence[Load]] = {}
        for change in sets_of([saving for saving in savings(config) if saving[0] not in keep]):
            tried = config.changed(change)
            context = tried.context
            # Loads depend on no other setting that changes; the last two change modelled times, and
            # so the plans.
            key = (
                context.max_remote_tokens,
                context.two_level_exchange,
                context.keep_kv,
                tried.train.recompute,
            )
            if key not in planned:
                planned[key] = self.loads(tried)
            if self.fits(tried, available, planned[key]) and not broken_rules(tried, self.ranks):
                return change
        return None

    def refuse_too_large(self, config: Config, available: int | None) -> None:
        """Raises DoesNotFit, with the cheapest change that would fit, if the peak exceeds
        `available` bytes (None: unknown)."""
        self._refuse_too_little_host_memory(config)
        if available is None or (memory := self.peak(config)).total <= available:
            return
        largest = sorted(memory.parts.items(), key=lambda part: -part[1])[:3]
        parts = ", ".join(
            f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in largest
        )
        raise DoesNotFit(
            f"peak memory would be {format_bytes(memory.total)} per rank (at: {memory.moment}; "
            f"largest parts: {parts}), but only {format_bytes(available)} is available: "
            f"{self.way_out(config, available)}. `longctx estimate --all` shows all choices; "
            "leave room for what it does not count: libraries and fragmentation"
        )

    def _refuse_too_little_host_memory(self, config: Config) -> None:
        """Raises DoesNotFit if offloaded activations need more host memory than is free."""
        host = host_need(self.spec, config, self.ranks, self.loads(config))
        if host is not None and host.needed > host.free:
            raise DoesNotFit(
                f"train.offload_activations needs {format_bytes(host.needed)} of this machine's "
                f"memory for each GPU, but only {format_bytes(host.free)} are free: set it to "
                "false, set train.recompute to full, which offloads less, or lower "
                "batch.tokens_per_rank"
            )

    def way_out(self, config: Config, available: int) -> str:
        """Returns the cheapest change that would fit into `available` bytes per rank, or that there
        is none, in words."""
        change = self.cheapest_change(config, available)
        if change is None:
            return (
                "no memory setting saves enough: lower batch.tokens_per_rank, start more "
                "processes, or use a smaller model"
            )
        return (
            "the cheapest change that would fit is "
            f"{' '.join(as_override(name, value) for name, value in change.items())}"
        )


def check_memory(run: Run) -> None:
    """Raises DoesNotFit for a run whose settings may not change; those of others are known when all
    ranks have joined."""
    memory = RunMemory.of(run)
    if not memory.may_change(run.config):
        memory.refuse_too_large(
            run.config, available_bytes(run.device, run.launch.local_world_size)
        )


def fitted_run(run: Run, mesh: Mesh) -> Run:
    """Returns the run with settings that fit into the memory of every rank, if they may change.

    Collective: raises DoesNotFit on every rank.
    """
    memory = RunMemory.of(run)
    if not memory.may_change(run.config):
        return run
    available = available_bytes(run.device, run.launch.local_world_size)
    # All ranks decide the same.
    least = min(mesh.gather_objects(math.inf if available is None else available))
    if math.isinf(least):
        return run
    config = memory.fitted(run.config, int(least))
    memory.refuse_too_large(config, int(least))
    return replace(run, config=config, changes=changes_between(run.config, config))


def available_bytes(device: torch.device, local_ranks: int) -> int | None:
    """Returns the memory that a rank can use: all of its GPU, or its share of the machine's free
    memory; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    free = free_bytes()
    if free is None:
        return None
    return free // local_ranks
