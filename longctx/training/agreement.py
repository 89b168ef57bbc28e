"""Agreement: before the first step and now and then after it, all ranks check that they train one
model on the same data.

Ranks that differ usually keep training without an error, and produce a wrong model.
"""

from collections.abc import Iterable, Mapping
from importlib.metadata import version
from importlib.util import find_spec

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import longctx
from longctx.config import Config
from longctx.config.problems import yaml_text
from longctx.errors import UserError
from longctx.model.protocol import Model
from longctx.parallel.mesh import NO_DIGEST, Mesh, gather_objects, number_of
from longctx.training.saved.checkpoint import Checkpoint
from longctx.units import format_ranks

EVERY = 100
"""Steps between checks of copies."""
MOST = 20
"""Differences that a message lists."""


class PlanAgreement:
    """Whether all ranks have made the same plan of the next step.

    A rank tells its plan with the numbers of the step before, if it has made it by then. The ranks
    compare a plan that not all have told when its step begins.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._agreed: int | None = None

    def hear(self, told: torch.Tensor) -> None:
        """Takes the numbers of the digests that all ranks have told, int64 [world size]."""
        first = int(told[0])
        agrees = first != NO_DIGEST and bool((told == first).all())
        self._agreed = first if agrees else None

    def require(self, plan_hash: str, step: int) -> None:
        """Raises RuntimeError on every rank unless all ranks have the same plan of a step.
        Collective unless all have told it."""
        if self._agreed != number_of(plan_hash):
            self._mesh.agree(plan_hash, f"the plan of step {step}")


class RanksDiffer(UserError):
    """Raised on all ranks if settings, data, checkpoint or versions differ between ranks."""


def identity(
    config: Config, fingerprints: Iterable[str], saved: Checkpoint | None
) -> dict[str, str]:
    """Returns what must be the same on all ranks, by name; the run folder may differ.

    `fingerprints` are of the stores for training, `saved` is the checkpoint to continue from.
    """
    settings: dict[str, str] = {}
    for section, content in config.model_dump(mode="json").items():
        for key, value in content.items() if isinstance(content, dict) else [("", content)]:
            settings[f"{section}.{key}".rstrip(".")] = yaml_text(value)
    del settings["train.run_dir"]
    return {
        **settings,
        "fingerprint of the data": ", ".join(fingerprints),
        "checkpoint": "none" if saved is None else f"step {saved.step}",
        "version of longctx": longctx.__version__,
        "version of torch": torch.__version__,
        "version of numpy": np.__version__,
        "version of transformers": version("transformers") if find_spec("transformers") else "none",
    }


def require_same(mine: Mapping[str, str], control: dist.ProcessGroup) -> None:
    """Raises RanksDiffer on every rank of `control`, a gloo group, unless all have the same values.
    Collective."""
    every = gather_objects(dict(mine), control)
    different: list[str] = []
    for name in dict.fromkeys(name for values in every for name in values):
        ranks: dict[str, list[int]] = {}
        for rank, values in enumerate(every):
            ranks.setdefault(values.get(name, "nothing"), []).append(rank)
        if len(ranks) > 1:
            different.append(
                f"  {name}: "
                + "; ".join(f"{value} on {format_ranks(held)}" for value, held in ranks.items())
            )
    if different:
        more = [f"  and {len(different) - MOST} more"] * (len(different) > MOST)
        raise RanksDiffer(
            "\n".join(
                [
                    "ranks differ, and would train something else than one of them alone:",
                    *different[:MOST],
                    *more,
                ]
            )
            + "\nStart all ranks with the same settings, data and versions"
        )


@torch.no_grad()
def require_same_copies(model: Model, step: int, control: dist.ProcessGroup) -> None:
    """Raises RuntimeError on every rank, naming a weight, unless all copies of every weight have
    the same checksum.

    Collective. There are copies of norms with tensor parallelism, and of all weights if several
    groups of ranks each hold the model (`parallel.shard_ranks`). `control` is a gloo group of all
    ranks.
    """
    copies: dict[dist.ProcessGroup, dict[str, torch.Tensor]] = {}
    for name, weight in model.named_parameters():
        if not isinstance(weight, DTensor):
            continue
        for axis, placement in enumerate(weight.placements):
            if placement.is_replicate() and weight.device_mesh.size(axis) > 1:
                copies.setdefault(weight.device_mesh.get_group(axis), {})[name] = _checksum(
                    weight.to_local()
                )
    differences: dict[str, list[int]] = {}  # weight -> ranks whose copies differ
    for group, checksums in copies.items():
        local = torch.stack([*checksums.values()])
        if dist.get_backend(group) == "nccl":
            local = local.cuda()  # weights may be in host memory
        every = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
        dist.all_gather(every, local, group=group)
        different = (torch.stack(every) != local).any(0).tolist()
        ranks = dist.get_process_group_ranks(group)
        differences |= {
            name: ranks for name, differs in zip(checksums, different, strict=True) if differs
        }
    gathered = gather_objects(differences, control)  # so that all ranks raise together
    wrong = next((each for each in gathered if each), None)
    if wrong is not None:
        name, ranks = next(iter(wrong.items()))
        raise RuntimeError(
            f"after step {step} the copies of {len(wrong)} weights, such as {name}, differ "
            f"between {format_ranks(ranks)}: memory or a message was damaged, or ranks run "
            "different code; go on from the newest checkpoint, before which copies were the same"
        )


def _checksum(weight: torch.Tensor) -> torch.Tensor:
    """Returns a sum of the bits that knows their places, int64; in parts, as it needs several times
    their memory."""
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
    total = torch.zeros((), dtype=torch.int64, device=weight.device)
    for number, part in enumerate(
        weight.contiguous().view(integer).flatten().split(1 << 20), start=1
    ):
        order = torch.arange(1, len(part) + 1, device=part.device)
        total += number * (part.to(torch.int64) * order).sum()
    return total
