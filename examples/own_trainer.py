"""Ring attention in your own training loop and model, in plain PyTorch.

    torchrun --standalone --nproc-per-node 2 examples/own_trainer.py [--fsdp]

Runs in less than a minute on two CPU cores. The model takes packed tokens [tokens, ..] without a
batch axis, takes positions beside them, and calls attention as a function; every other layer works
on single tokens anyway. With --fsdp, FSDP2 shards parameters, gradients and optimizer state. Loss
and gradients equal those of one process that runs one document after another.
"""

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from sample_documents import LENGTHS, read_documents, report
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from longctx import HardwareProfile, Plan, RingAttention, make_plan, pack_documents
from longctx.attention import warm_up

WIDTH, HEADS, LAYERS = 64, 4, 2
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""q, k, v [tokens, heads, head_dim] → out [tokens, heads, head_dim]."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor, attention: Attention) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).view(len(x), 3, HEADS, WIDTH // HEADS).unbind(1)
        x = x + self.out(attention(q, k, v).flatten(1))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """A byte-level transformer: tokens and positions [tokens] → logits [tokens, 256]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(256, WIDTH), nn.Embedding(max(LENGTHS), WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 256)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        x = self.embed(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x, attention)
        return self.head(x)


def shard(model: Model) -> None:
    """Shards the model over all ranks with FSDP2, which then sums gradients instead of averaging
    them."""
    for module in (*model.blocks, model):
        fully_shard(module)
    # Neither setting reaches the modules inside, and gloo and NCCL need both.
    for module in (*model.blocks, model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def forward_backward(model: Model, documents: list[torch.Tensor]) -> tuple[float, Plan]:
    """Returns the loss of a step and its plan, and leaves the gradients in the model; the same on
    every rank."""
    profile = HardwareProfile.load("cpu-2core")  # measure yours: `longctx calibrate`
    lengths = [len(document) for document in documents]
    plan = make_plan(lengths, ranks=dist.get_world_size(), tokens_per_rank=2048, profile=profile)
    micro_batches, targets = pack_documents(plan, dist.get_rank(), documents)
    loss = torch.zeros(())
    for batch in micro_batches:  # every rank must run every micro-batch, even without tokens in it
        logits = model(batch.tokens, batch.positions, RingAttention(batch.layout))
        # Labels are shifted already.
        part = F.cross_entropy(logits, batch.labels, reduction="sum") / targets
        part.backward()
        loss += part.detach()
    # all, or none.
    unreduced = (
        parameter.grad for parameter in model.parameters() if not isinstance(parameter, DTensor)
    )
    for tensor in (loss, *unreduced):
        # A sum: each part is already divided by the number of targets of the whole step.
        dist.all_reduce(tensor)
    return loss.item(), plan


def main() -> None:
    dist.init_process_group("gloo")
    # Connects all ranks, as the first messages may concern only some; on GPUs give the rank's
    # device.
    warm_up(None, "cpu")
    torch.manual_seed(0)
    model = Model()
    if "--fsdp" in sys.argv[1:]:
        shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(10):
        loss, plan = forward_backward(model, read_documents(step))
        optimizer.step()
        optimizer.zero_grad()
        report(step, loss, plan)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
