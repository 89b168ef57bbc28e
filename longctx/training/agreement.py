"""Agreement: before the first step and now and then after it, all ranks check that they train one model on the same data.

What differs between ranks mostly trains on without an error, and gives a wrong model.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import longctx
from longctx.config import Config
from longctx.config.problems import yaml_text
from longctx.errors import UserError
from longctx.model.protocol import Model
from longctx.training.checkpoint import Checkpoint
from longctx.units import format_ranks

EVERY = 100
"""Steps between checks of copies."""
MOST = 20
"""Differences that a message lists."""


class RanksDiffer(UserError):
    """Raised on all ranks if settings, data, checkpoint or versions differ between ranks."""


def identity(config: Config, fingerprints: Iterable[str], found: Checkpoint | None) -> dict[str, str]:
    """Returns what must be the same on all ranks, by name; the run folder may differ.

    `fingerprints` are those of the stores of all stages, `found` is the checkpoint to continue from.
    """
    settings: dict[str, str] = {}
    for section, content in config.model_dump(mode="json").items():
        for key, value in content.items() if isinstance(content, dict) else [("", content)]:
            settings[f"{section}.{key}".rstrip(".")] = yaml_text(value)
    del settings["train.run_dir"]
    return {
        **settings,
        "fingerprint of the data": ", ".join(fingerprints),
        "checkpoint": "none" if found is None else f"step {found.step}",
        "version of longctx": longctx.__version__,
        "version of torch": torch.__version__,
        "version of numpy": np.__version__,
    }


def require_same(mine: Mapping[str, str], control: dist.ProcessGroup) -> None:
    """Raises RanksDiffer on every rank of `control`, a gloo group, unless all have the same values. Collective."""
    every: list[Any] = [None] * dist.get_world_size(control)
    dist.all_gather_object(every, dict(mine), group=control)
    different: list[str] = []
    for name in dict.fromkeys(name for values in every for name in values):
        ranks: dict[str, list[int]] = {}
        for rank, values in enumerate(every):
            ranks.setdefault(values.get(name, "nothing"), []).append(rank)
        if len(ranks) > 1:
            different.append(f"  {name}: " + "; ".join(f"{value} on {format_ranks(held)}" for value, held in ranks.items()))
    if different:
        more = [f"  and {len(different) - MOST} more"] * (len(different) > MOST)
        raise RanksDiffer(
            "\n".join(["ranks differ, and would train something else than one of them alone:", *different[:MOST], *more])
            + "\nStart all ranks with the same settings, data and versions"
        )


@torch.no_grad()
def require_same_copies(model: Model, step: int) -> None:
    """Raises RuntimeError, naming the weight, unless all copies of every weight are the same, bit by bit. Collective.

    Copies exist with tensor parallelism, of norms, and if groups of ranks (`parallel.shard_ranks`) each hold the model.
    """
    held: dict[dist.ProcessGroup, dict[str, torch.Tensor]] = {}
    for name, weight in model.named_parameters():
        if not isinstance(weight, DTensor):
            continue
        for axis, placement in enumerate(weight.placements):
            if placement.is_replicate() and weight.device_mesh.size(axis) > 1:
                bits = weight.to_local().contiguous().view(torch.int32)
                order = torch.arange(1, bits.numel() + 1, device=bits.device)
                total = (bits.flatten().to(torch.int64) * order).sum()  # which knows equal bits in another order
                held.setdefault(weight.device_mesh.get_group(axis), {})[name] = total
    for group, sums in held.items():
        mine = torch.stack(list(sums.values()))
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(every, mine, group=group)
        same = (torch.stack(every) == mine).all(0).tolist()
        wrong = [name for name, equal in zip(sums, same, strict=True) if not equal]
        if wrong:
            ranks = format_ranks(dist.get_process_group_ranks(group))
            raise RuntimeError(
                f"after step {step} the copies of {len(wrong)} weights, such as {wrong[0]}, differ between {ranks}: memory or "
                "a message was damaged, or ranks run different code; go on from a checkpoint before it"
            )
