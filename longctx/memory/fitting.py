"""Checks whether a run fits into the memory of its ranks, and finds the cheapest change of settings that would make it fit.

The estimate is compared with all available memory, without a margin for what it does not count (see `model`): a run that is
refused could not work, but a run that barely fits may still run out of memory.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from longctx.config import Config
from longctx.config.problems import yaml_text
from longctx.config.rules import broken_rules
from longctx.data.store.store import Store
from longctx.errors import UserError
from longctx.memory.loads import Load, full_loads, loads
from longctx.memory.model import Memory, estimate, fits
from longctx.parallel.device import choose_device
from longctx.parallel.host_memory import free_bytes
from longctx.planning.cost.spec import RECOMPUTE_MODES, ModelSpec
from longctx.training.data import first_plans
from longctx.training.run_profile import read_described, run_profile
from longctx.units import format_bytes

PLANNED_STEPS = 2
ROOM = 0.9
"""Share of the available memory that `train.fit_memory` fills by estimate, which does not count everything."""
Settings = dict[str, Any]
"""New values by dotted name."""
Choice = tuple[Settings, Memory]
"""Settings and the peak memory per rank."""


class DoesNotFit(UserError):
    """A run that needs more memory than its ranks have available."""


def savings(config: Config) -> list[tuple[str, Any]]:
    """Returns the changes of a setting that save memory, in ascending order of cost in time."""
    known = (
        ("parallel.reshard_after", "micro_batch"),
        ("parallel.reshard_after", "block"),
        ("context.keep_kv", False),
        ("context.max_remote_tokens", config.batch.tokens_per_rank),
        ("train.recompute", "norms"),
        ("train.recompute", "mlp"),
        ("train.recompute", "selective"),
        ("parallel.shard_ranks", None),
        ("train.mlp_tile_tokens", 2048),
        ("parallel.reduce_after", "micro_batch"),
        ("context.two_level_exchange", False),
        ("train.recompute", "full"),
        ("train.offload_activations", True),
        ("train.offload_optimizer", True),
    )
    config = config.changed({"context.keep_kv": bool(config.context.keep_kv)})
    present = {change[0]: place for place, change in enumerate(known) if config.changed({change[0]: change[1]}) == config}
    return [change for place, change in enumerate(known) if place > present.get(change[0], -1)]


def heaviest(config: Config, store: Store | None, ranks: int) -> Sequence[Load]:
    """Returns the loads of the first steps of a run; without a store, the load of a full rank with the longest document."""
    if store is None:
        return list(full_loads(config, ranks))
    return list(loads(first_plans(config, store, ranks, min(PLANNED_STEPS, config.train.steps)), config))


def as_override(name: str, value: object) -> str:
    """Formats a setting as a command-line override."""
    return f"--{name}={yaml_text(value)}"


def fitted(spec: ModelSpec, config: Config, store: Store | None, ranks: int, available: int, *, fused: bool) -> Config:
    """Returns settings with which a run fits at the least cost in time, for `train.fit_memory`.

    They need at most ROOM of `available` bytes per rank by estimate, or else at most all of it; if none do, nothing changes.
    Received K and V are kept if that fits, unless the settings say otherwise.
    """

    def has_room(config: Config) -> bool:
        return fits(spec, config, ranks, heaviest(config, store, ranks), int(ROOM * available), fused=fused)

    keeping = config.changed({"context.keep_kv": True})
    if config.context.keep_kv is None and has_room(keeping):
        return keeping
    if has_room(config):
        return config
    # The ranks that share weights have joined already when all ranks agree on the changes.
    keep = ("parallel.shard_ranks",)
    for limit in (int(ROOM * available), available):
        change = cheapest_change(spec, config, store, ranks, limit, fused=fused, keep=keep)
        if change is not None:
            return config.changed(change)
    return config


def as_fitted(spec: ModelSpec, config: Config, store: Store | None, ranks: int, *, fused: bool) -> Config:
    """Returns the settings that a run with known memory would have by `train.fit_memory`; the same if that is off."""
    fit, available = config.train.fit_memory, memory_of_ranks(config, ranks)[0]
    if available is None or not (fused if fit is None else fit):
        return config
    return fitted(spec, config, store, ranks, available, fused=fused)


def changes_between(before: Config, after: Config) -> str:
    """Returns a line on the settings that `fitted` changed, as overrides; empty if there are none."""
    old, new = before.model_dump(), after.model_dump()
    changes = [
        as_override(f"{section}.{key}", value)
        for section in ("context", "parallel", "train")
        for key, value in new[section].items()
        if value != old[section][key]
    ]
    return f"train.fit_memory: {' '.join(changes)}" if changes else ""


def choices(spec: ModelSpec, config: Config, store: Store | None, ranks: int, *, fused: bool) -> Iterator[Choice]:
    """Yields every valid combination of recomputation, kept K and V and resharding with its peak memory, fastest first."""
    for recompute in RECOMPUTE_MODES:
        for keep_kv in (True, False):
            times = {"train.recompute": recompute, "context.keep_kv": keep_kv}
            candidates = heaviest(config.changed(times), store, ranks)
            for reshard_after in ("step", "micro_batch", "block"):
                values = {**times, "parallel.reshard_after": reshard_after}
                tried = config.changed(values)
                if not broken_rules(tried, ranks):
                    yield values, estimate(spec, tried, ranks, candidates, fused=fused)


def cheapest_change(
    spec: ModelSpec, config: Config, store: Store | None, ranks: int, available: int, *, fused: bool, keep: Sequence[str] = ()
) -> Settings | None:
    """Returns the cheapest valid change that makes a run fit into `available` bytes per rank, or None.

    Settings named in `keep` do not change.

    This is the cheapest single change that is enough. Otherwise it is the set whose most expensive change is cheapest, then
    whose second most expensive one is, and so on; none of its changes could be left out.
    """
    planned: dict[tuple[object, ...], Sequence[Load]] = {}
    for change in _sets([saving for saving in savings(config) if saving[0] not in keep]):
        tried = config.changed(change)
        context = tried.context
        # Loads depend on no other setting that changes; the last two change modelled times, and so the plans.
        key = context.max_remote_tokens, context.two_level_exchange, context.keep_kv, tried.train.recompute
        if key not in planned:
            planned[key] = heaviest(tried, store, ranks)
        if fits(spec, tried, ranks, planned[key], available, fused=fused) and not broken_rules(tried, ranks):
            return change
    return None


def _sets(known: Sequence[tuple[str, Any]]) -> Iterator[Settings]:
    """Yields every change alone, then every set, as binary numbers whose highest digit is the most expensive change."""
    yield from ({name: value} for name, value in known)
    for number in range(1, 1 << len(known)):
        chosen = [change for digit, change in enumerate(known) if number >> digit & 1]
        together = dict(chosen)
        if 1 < len(chosen) == len(together):  # skips sets with two values of one setting
            yield together


def refuse_too_large(
    spec: ModelSpec, config: Config, store: Store | None, ranks: int, available: int | None, *, fused: bool
) -> Memory:
    """Returns the peak memory of the fullest rank.

    Raises DoesNotFit, with the cheapest change that would fit, if it exceeds `available` bytes (None: unknown).
    """
    memory = estimate(spec, config, ranks, heaviest(config, store, ranks), fused=fused)
    if available is None or memory.total <= available:
        return memory
    out = way_out(spec, config, store, ranks, available, fused=fused)
    largest = sorted(memory.parts.items(), key=lambda part: -part[1])[:3]
    parts = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in largest)
    raise DoesNotFit(
        f"peak memory would be {format_bytes(memory.total)} per rank (at: {memory.moment}; largest parts: {parts}), but only "
        f"{format_bytes(available)} is available: {out}. `longctx estimate --all` shows all choices; leave room for what it "
        "does not count: libraries and fragmentation"
    )


def way_out(spec: ModelSpec, config: Config, store: Store | None, ranks: int, available: int, *, fused: bool) -> str:
    """Returns the cheapest change that would fit into `available` bytes per rank, or that there is none, in words."""
    change = cheapest_change(spec, config, store, ranks, available, fused=fused)
    if change is None:
        return "no memory setting saves enough: lower batch.tokens_per_rank, start more processes, or use a smaller model"
    return f"the cheapest change that would fit is {' '.join(as_override(*setting) for setting in change.items())}"


def memory_of_ranks(config: Config, ranks: int) -> tuple[int | None, str]:
    """Returns the bytes that each rank of a run has, None if unknown, and of what; GPUs that are not here are the profile's."""
    device, (_, profile) = choose_device(config.train.device, 0), read_described(run_profile(config, ranks).name)
    if device.type == "cuda" and not torch.cuda.is_available():
        known = None if profile is None or profile.memory_gb is None else int(1e9 * profile.memory_gb)
        return known, (profile and profile.gpu) or "GPU"
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else "rank, if all are on this machine"
    return available_bytes(device, ranks), gpu


def verdict(
    spec: ModelSpec, config: Config, changes: str, store: Store | None, ranks: int, memory: Memory, *, fused: bool
) -> list[str]:
    """Returns whether a peak fits, such as `fits: 50.35 GiB of 74.51 GiB per H100 (at: loss)`, and the `changes` that the run
    makes by `train.fit_memory`, or those that it needs."""
    available, of = memory_of_ranks(config, ranks)
    peak, at = format_bytes(memory.total), f"(at: {memory.moment})"
    if available is None:
        return [f"needs {peak} per {of}, whose memory is not known {at}"]
    fits = memory.total <= available
    if not fits and not changes:
        changes = way_out(spec, config, store, ranks, available, fused=fused)
    said = f"{'fits' if fits else 'does not fit'}: {peak} of {format_bytes(available)} per {of} {at}"
    return [said, *([changes] if changes else [])]


def available_bytes(device: torch.device, local_ranks: int) -> int | None:
    """Returns the memory that a rank can use: all of its GPU, or its share of the machine's free memory; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    free = free_bytes()
    return None if free is None else free // local_ranks
