"""Expert parallelism: experts are split over neighbouring ranks, and tokens travel to their experts
by all-to-all and back.

A group of `expert_parallel_size` ranks of the domain, with all their tensor ranks, holds each
expert once; the experts of one rank are sharded over the ranks at the same place in other groups.
Every rank takes part in every exchange, also without tokens. Sizes differ by rank and are known
after a small all-gather of counts, for which the host waits once per layer and pass.

Experts compute at most `most_rows` rows at once. If any rank has more, all ranks of the domain
exchange and compute in turns, each with an even share of the rows between any two ranks, which
backward recomputes: no token is dropped.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from longctx.attention.host_to_device import copy_to
from longctx.model.experts import Experts, Send, SparseMLP, by_expert, in_turns, inverse, take
from longctx.model.protocol import Model
from longctx.parallel.all_to_all import exchange_rows
from longctx.parallel.recompute import unseen


def sparse_layers(model: nn.Module) -> list[SparseMLP]:
    """Returns the mixtures of experts of a model, or of its part on this rank, in order."""
    return [module for module in model.modules() if isinstance(module, SparseMLP)]


def split_experts(model: Model, mesh: DeviceMesh) -> None:
    """Leaves each rank its share of the experts of a model on the meta device, in place, before it
    is sharded.

    `mesh` has the ranks that hold each expert once as its first axis. Their number must divide the
    experts.
    """
    group, *others = mesh.get_all_groups()
    for layer in sparse_layers(model):
        trained = {name: weight.requires_grad for name, weight in layer.experts.named_parameters()}
        products = layer.experts.products
        layer.experts = Experts(layer.gate.shape, layer.gate.shape.num_experts // group.size())
        layer.experts.products = products
        for name, weight in layer.experts.named_parameters():
            weight.requires_grad_(trained[name])
        layer.send = dispatch(group, others)


def shard_experts(layer: SparseMLP, mesh: DeviceMesh, **options: Any) -> None:
    """Shards the experts of this rank over the other axes of `mesh`, before their block; `options`
    are those of FSDP."""
    assert mesh.mesh_dim_names is not None
    fully_shard(layer.experts, mesh=mesh[mesh.mesh_dim_names[1:]], **options)
    for hooks in (layer.experts._forward_pre_hooks, layer.experts._forward_hooks):
        hooks.update({key: unseen(hook) for key, hook in hooks.items()})


def dispatch(group: dist.ProcessGroup, others: Sequence[dist.ProcessGroup] = ()) -> Send:
    """Returns a function that sends tokens to experts that are split over the ranks of `group`.

    The ranks of `others` share the weights of experts, so they must use them equally often.
    """
    ranks = group.size()
    mine = group.rank()

    def send(x: torch.Tensor, chosen: torch.Tensor, mlp: SparseMLP) -> torch.Tensor:
        held = mlp.experts.count
        count = chosen.shape[1]
        order, counts = by_expert(chosen.flatten(), ranks * held)
        known, most = _of_all_ranks(counts, group, others if mlp.most_rows is not None else ())
        rows = known.sum(2)
        # Each gathers weights: the same on all ranks.
        turns = 1 if mlp.most_rows is None else max(1, -(-most // mlp.most_rows))
        back = inverse(order)
        leaving = take(x, order // count, back).split(rows[mine].tolist())

        def turn(number: int, *leaving: torch.Tensor) -> torch.Tensor:
            first = rows * number // turns
            last = rows * (number + 1) // turns
            sent = (last - first)[mine].tolist()
            received = (last - first)[:, mine].tolist()
            arrived = exchange_rows(torch.cat(leaving), sent, received, group)
            expert = _experts(
                _between(known[:, mine], first[:, mine], last[:, mine]), sum(received), x.device
            )
            sorting, of_expert = by_expert(expert, held)
            undo = inverse(sorting)
            out = take(mlp.experts(take(arrived, sorting, undo), of_expert), undo, sorting)
            return exchange_rows(out, received, sent, group)

        places = [
            [part * number // turns for number in range(turns + 1)] for part in rows[mine].tolist()
        ]
        parts = [
            [each[at[n] : at[n + 1]] for each, at in zip(leaving, places, strict=True)]
            for n in range(turns)
        ]
        outs = in_turns(turn, [(number, *part) for number, part in enumerate(parts)])
        split = [
            out.split([len(each) for each in part]) for out, part in zip(outs, parts, strict=True)
        ]
        return take(
            torch.cat([torch.cat(of_rank) for of_rank in zip(*split, strict=True)]), back, order
        )

    return send


def _of_all_ranks(
    counts: torch.Tensor, group: dist.ProcessGroup, others: Sequence[dist.ProcessGroup]
) -> tuple[torch.Tensor, int]:
    """Returns the `counts` [experts] of all ranks, int64 [from, to, experts of that rank], and the
    largest number of rows that arrive at any rank which the groups connect. Both come to the host
    in one copy, for which it waits.
    """
    everyones = counts.new_empty(group.size(), group.size(), len(counts) // group.size())
    dist.all_gather(list(everyones.flatten(1).unbind()), counts, group=group)
    most = everyones.sum((0, 2)).max()
    for other in others:
        dist.all_reduce(most, dist.ReduceOp.MAX, group=other)
    numbers = torch.cat([everyones.flatten(), most.view(1)]).cpu()
    return numbers[:-1].view(everyones.shape), int(numbers[-1])


def _between(counts: torch.Tensor, first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Returns how many of the rows `first` to `last` [ranks] are for each expert; `counts` [ranks,
    experts] are of all rows."""
    ends = counts.cumsum(1)
    after = torch.maximum(ends - counts, first.unsqueeze(1))
    return (torch.minimum(ends, last.unsqueeze(1)) - after).clamp(min=0)


def _experts(counts: torch.Tensor, rows: int, device: torch.device) -> torch.Tensor:
    """Returns the expert of every row that arrived, by rank and expert: `counts` [ranks, experts]
    of them."""
    experts = torch.arange(counts.shape[1], device=device).repeat(len(counts))
    return experts.repeat_interleave(copy_to(counts.flatten(), device), output_size=rows)
