"""Process groups of a trainer, each of all ranks, and how attention uses them."""

import contextlib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from longctx.attention import warm_up
from longctx.parallel.mesh import exchange_groups
from longctx.planning.hardware_profile import HardwareProfile
from longctx.trainers.families import AttentionOptions


class Groups(NamedTuple):
    """Groups of all ranks, each for its own messages; None for one process.

    Attributes:
        rings: K, V and values.
        ids: lengths and token ids, which a thread exchanges between CPUs.
        across: messages of rings between nodes; None on one node.
    """

    rings: dist.ProcessGroup | None = None
    ids: dist.ProcessGroup | None = None
    across: dist.ProcessGroup | None = None

    @classmethod
    def made(cls, args: Any, undo: contextlib.ExitStack) -> "Groups":
        """Makes groups of all ranks, until `undo` is closed. Collective."""
        if args.world_size == 1:
            return cls()
        rings, across = exchange_groups(
            torch.arange(args.world_size)[None], args.ddp_timeout_delta, args.device
        )
        ids = dist.new_group(backend="gloo", timeout=args.ddp_timeout_delta)
        made = [group for group in (rings, ids, across) if group is not None]

        def destroy() -> None:
            for group in made:
                if dist.is_initialized():
                    dist.destroy_process_group(group)

        undo.callback(destroy)
        for group in (rings, across):
            if group is not None:
                warm_up(group, args.device)
        return cls(rings=rings, ids=ids, across=across)

    def attention(
        self, profile: HardwareProfile, device: torch.device, kernel: str
    ) -> AttentionOptions:
        """Returns how attention runs in all micro-batches."""
        if profile.exchange_levels != 2:
            return AttentionOptions(device, kernel, group=self.rings)
        return AttentionOptions(
            device,
            kernel,
            group=self.rings,
            ranks_per_node=profile.ranks_per_node,
            across=self.across,
        )
