"""Fit: whether a run fits into the memory of its ranks, and the cheapest change that would make it fit."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from longctx.config import Config, ConfigError, check
from longctx.data.store import Store
from longctx.errors import UserError
from longctx.model.presets import ModelShape
from longctx.training.dry_run import step_lengths
from longctx.training.memory import Load, Memory, estimate, full_load, loads
from longctx.training.setup import make_planner

PLANNED_STEPS = 2
SAVINGS: tuple[tuple[str, Any], ...] = (
    ("parallel.reshard_after", "micro_batch"),
    ("parallel.reshard_after", "block"),
    ("context.keep_kv", False),
    ("train.recompute", "selective"),
    ("parallel.shard_ranks", None),
    ("train.mlp_tile_tokens", 2048),
    ("parallel.reduce_after", "micro_batch"),
    ("train.recompute", "full"),
    ("train.offload_activations", True),
    ("train.offload_optimizer", True),
)
"""What saves memory, the cheapest in time first."""
Choice = tuple[dict[str, Any], Memory]
"""Settings and number of ranks, and the memory of a rank."""


class DoesNotFit(UserError):
    """A run that needs more memory than its ranks have."""


def heaviest(config: Config, store: Store | None, ranks: int) -> Sequence[Load]:
    """What the first steps of a run ask of its ranks; without a store, what a full rank with the longest document asks."""
    if store is None:
        return [full_load(config, ranks)]
    planner = make_planner(config, config.domain(ranks))
    steps = step_lengths(config, store, ranks, min(PLANNED_STEPS, config.train.steps))
    return list(loads(planner(lengths) for lengths in steps))


def changed(config: Config, changes: Iterable[tuple[str, Any]]) -> Config:
    """The settings with some replaced, by dotted name."""
    for name, value in changes:
        section, key = name.split(".")
        part = getattr(config, section).model_copy(update={key: value})
        config = config.model_copy(update={section: part})
    return config


def choices(shape: ModelShape, config: Config, store: Store | None, worlds: Iterable[int], *, fused: bool) -> Iterator[Choice]:
    """Every choice of recomputation, kept K and V and resharding, on so many ranks, as long as the rules allow it."""
    for ranks in worlds:
        try:
            check(config, world_size=ranks)
        except ConfigError:
            continue
        candidates = heaviest(config, store, ranks)
        for recompute in ("none", "selective", "full"):
            for keep_kv in (False, True):
                for reshard_after in ("block", "micro_batch", "step"):
                    values = {
                        "train.recompute": recompute,
                        "context.keep_kv": keep_kv,
                        "parallel.reshard_after": reshard_after,
                    }
                    yield (
                        {**values, "ranks": ranks},
                        estimate(shape, changed(config, values.items()), ranks, candidates, fused=fused),
                    )


def cheapest_change(
    shape: ModelShape, config: Config, ranks: int, candidates: Sequence[Load], available: int, *, fused: bool
) -> list[tuple[str, Any]] | None:
    """The cheapest setting that makes a run fit into `available` bytes a rank; else the fewest of the cheapest; else None."""
    useful = []
    needed = estimate(shape, config, ranks, candidates, fused=fused).total
    for change in SAVINGS:
        total = _total(shape, config, ranks, candidates, [change], fused)
        if total is not None and total < needed:
            useful.append(change)
            if total <= available:
                return [change]
    for count in range(2, len(useful) + 1):
        # A later value of the same setting replaces an earlier one.
        together = list(dict(useful[:count]).items())
        total = _total(shape, config, ranks, candidates, together, fused)
        if total is not None and total <= available:
            return together
    return None


def _total(
    shape: ModelShape, config: Config, ranks: int, candidates: Sequence[Load], changes: Sequence[tuple[str, Any]], fused: bool
) -> int | None:
    """Bytes a rank with these changes; None if the rules do not allow them."""
    tried = changed(config, changes)
    try:
        check(tried, world_size=ranks)
    except ConfigError:
        return None
    return estimate(shape, tried, ranks, candidates, fused=fused).total


def refuse_too_large(
    shape: ModelShape, config: Config, ranks: int, candidates: Sequence[Load], available: int | None, *, fused: bool
) -> Memory:
    """The memory of the fullest rank. Raises DoesNotFit, with the cheapest change that would fit, if it is not `available`."""
    memory = estimate(shape, config, ranks, candidates, fused=fused)
    if available is None or memory.total <= available:
        return memory
    change = cheapest_change(shape, config, ranks, candidates, available, fused=fused)
    if change is None:
        way_out = "no setting for memory is enough: lower batch.tokens_per_rank, start more processes, or take a smaller model"
    else:
        settings = " ".join(f"--{name}={str(value).lower()}" for name, value in change)
        way_out = f"the cheapest change that would fit is {settings}"
    largest = sorted(memory.parts.items(), key=lambda part: -part[1])[:3]
    parts = ", ".join(f"{name.replace('_', ' ')} {gib(size)}" for name, size in largest)
    raise DoesNotFit(
        f"a rank would need {gib(memory.total)} ({parts}, ... at the moment: {memory.moment}) and has {gib(available)}: "
        f"{way_out}. `longctx estimate` shows all choices"
    )


def gib(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB"


def available_bytes(device: torch.device, local_ranks: int) -> int | None:
    """Memory that a rank can use: all of its GPU's, or its share of what is free on this machine; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    free = [line for line in lines if line.startswith("MemAvailable:")]
    return int(free[0].split()[1]) * 1024 // local_ranks if free else None
