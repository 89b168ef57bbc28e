"""OpenRLHF's supervised step, for `bench.check_stacks`, with the stand-in of extras/flash_attn_cpu.

Its Actor, losses and windows of accumulation are its own; DeepSpeed, which would divide and reduce
gradients, is a few lines here.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from bench.check_stacks import Make, ranks, without
from bench.check_stacks_rings import connect, substitute
from longctx.check import Probe, Step, record

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Token ids, attention mask, mask of the loss as OpenRLHF's SFTDataset makes it: [rows, tokens]."""


def padded(probe: Probe, documents: list[int]) -> Batch:
    """Returns documents padded at the right: a token counts if the one after it is trained."""
    longest = max(probe.lengths[number] for number in documents)
    shape = (len(documents), longest)
    ids = torch.full(shape, probe.pad)
    mask = torch.zeros(shape, dtype=torch.long)
    counts = torch.zeros(shape)
    for row, number in enumerate(documents):
        length = probe.lengths[number]
        ids[row, :length] = torch.tensor(probe.documents[number])
        mask[row, :length] = 1
        trained = [probe.trained(number, place) for place in range(1, length)]
        counts[row, : length - 1] = torch.tensor(trained, dtype=torch.float32)
    return ids, mask, counts


def batches(probe: Probe, rank: int, ranks: int) -> Iterator[Batch]:
    """Yields a rank's micro-batches."""
    for first in range(probe.micro_batches):
        numbers = list(range(first, len(probe.rows), probe.micro_batches))
        yield padded(probe, numbers[rank::ranks])


def counted(batch: Batch) -> torch.Tensor:
    """Returns the mask of the loss, as `SFTTrainer.fit` shifts it."""
    return batch[2][:, :-1]


def openrlhf(*, packing: bool, ring: bool = False) -> Make:
    """A step as `SFTTrainer.fit` makes one: `packing_samples`, and `ring_attn_size` of all ranks."""

    def make(probe: Probe) -> Step:
        without("deepspeed")
        from flash_attn.transformers_on_cpu import allow
        from openrlhf.models import Actor, SFTLoss
        from openrlhf.utils.loss_utils import iter_grad_accum_global_norm

        rank, everyone = connect()
        allow()
        group = None
        alone = None
        if ring:
            group = dist.group.WORLD
            alone = _groups_of_one()
            substitute()
            _give_ring_group(group)
        model = probe.model("llama")
        model.set_attn_implementation("flash_attention_2" if packing else "sdpa")
        actor = Actor(model)
        actor.packing_samples = packing
        window = list(batches(probe, 0, 1) if ring else batches(probe, rank, everyone))
        strategy = SimpleNamespace(ds_device_mesh=alone)
        objective = SFTLoss()
        with record(model) as seen:
            normalized = iter_grad_accum_global_norm(window, strategy, len(window), counted)
            for batch, numbers in normalized:
                ids, mask, counts = batch
                log_probs, _ = actor(
                    ids,
                    attention_mask=mask,
                    return_output=True,
                    return_logprobs=True,
                    ring_attn_group=group,
                )
                loss = objective(log_probs, counts[:, :-1], **numbers)
                (loss / len(window)).backward()
            for weight in model.parameters():
                if everyone > 1:
                    dist.all_reduce(weight.grad)
                weight.grad /= everyone
            return seen.step(rows=[_packed(ids, mask) for ids, mask, _ in window] if ring else ())

    return make


def _packed(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return ids[mask.bool()]


def _give_ring_group(group: Any) -> None:
    from openrlhf.models.ring_attn_utils import set_ring_attn_group

    set_ring_attn_group(group)


def _groups_of_one() -> Any:
    """Returns a mesh in which each rank is alone in `dp`."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "sp"))


OPENRLHF: dict[str, Make] = {
    "OpenRLHF, `SFTLoss`, padded": openrlhf(packing=False),
    "OpenRLHF, `SFTLoss`, `packing_samples`": openrlhf(packing=True),
}
if ranks() > 1:  # the last one: flash attention stays replaced
    OPENRLHF["OpenRLHF, `packing_samples`, `ring_attn_size=2`"] = openrlhf(packing=True, ring=True)
