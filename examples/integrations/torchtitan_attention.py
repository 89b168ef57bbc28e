"""Ring attention as the inner attention of torchtitan's decoders, with a degree for every document.

    torchrun --standalone --nproc-per-node 2 examples/integrations/torchtitan_attention.py

Runs in seconds on two CPU cores. torchtitan's own context parallelism has one size for a run, and
refuses the masks of its variable-length attention. Its blocks pass `attention_masks` on to the
inner attention as it is, so here it carries the attention of the micro-batch, and `positions` those
of this rank's tokens. Loss and gradients equal those of one process that runs one document after
another.

Written for torchtitan 0.3.0 (2026-09): decoders with full causal attention, such as Llama 3 and
Qwen 3. Its Trainer would have to plan, and to run the micro-batches of a plan, as
`forward_backward` does; nor were its compilation and sharding tried.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torchtitan.models.llama3 import llama3_configs
from torchtitan.protocols.module import Module

from longctx import HardwareProfile, Plan, RingAttention, make_plan, pack_documents
from longctx.attention import warm_up

LENGTHS, VOCABULARY = (900, 150, 150, 40, 40), 2048


class RingInnerAttention(Module):
    """Calls the attention that the model gets as `attention_masks`; q, k and v are [1, tokens,
    heads, head_dim]."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        attention_masks: RingAttention,
        scale: float | None = None,
        **others: Any,  # enable_gqa: k and v may have fewer heads anyway
    ) -> torch.Tensor:
        if not isinstance(attention_masks, RingAttention) or len(q) != 1:
            raise ValueError(
                f"this model has ring attention, but got {type(attention_masks).__name__} for "
                f"{len(q)} rows of tokens: call it with attention_masks=RingAttention(layout), "
                "and with all documents in one row"
            )
        if scale is not None and scale != q.shape[-1] ** -0.5:
            raise ValueError(f"scale is {scale}: only the square root of 1 / head_dim is supported")
        return attention_masks(q[0], k[0], v[0]).unsqueeze(0)


def use_ring_attention(config: Any) -> Any:
    """Replaces the inner attention of all layers in a decoder's config, before `config.build()`.
    Returns the config."""
    for layer in config.layers:
        layer.attention.inner_attention = RingInnerAttention.Config()
    return config


def read_documents(step: int) -> list[torch.Tensor]:
    """Returns token ids [length] for each of LENGTHS: counts up from a random number, which a model
    can learn."""
    starts = torch.randint(
        VOCABULARY, (len(LENGTHS),), generator=torch.Generator().manual_seed(step)
    ).tolist()
    return [
        (torch.arange(length) + start) % VOCABULARY
        for start, length in zip(starts, LENGTHS, strict=True)
    ]


def forward_backward(model: torch.nn.Module, documents: list[torch.Tensor]) -> tuple[float, Plan]:
    """Returns the loss of a step and its plan, and leaves the gradients in the model; the same on
    every rank."""
    profile = HardwareProfile.load("cpu-2core")  # measure yours: `longctx calibrate`
    lengths = [len(document) for document in documents]
    plan = make_plan(lengths, ranks=dist.get_world_size(), tokens_per_rank=800, profile=profile)
    micro_batches, targets = pack_documents(plan, dist.get_rank(), documents)
    loss = torch.zeros(())
    for batch in micro_batches:  # every rank must run every micro-batch, even without tokens in it
        padding = 0, int(not len(batch.tokens))  # blocks cannot reshape an empty row
        row, positions = (
            F.pad(each, padding).unsqueeze(0) for each in (batch.tokens, batch.positions)
        )
        logits = model(row, positions=positions, attention_masks=RingAttention(batch.layout))[0]
        labels = F.pad(batch.labels, padding, value=-100)  # shifted already
        part = F.cross_entropy(logits, labels, reduction="sum") / targets
        part.backward()
        loss += part.detach()
    for tensor in (loss, *(parameter.grad for parameter in model.parameters())):
        # A sum: each part is already divided by the number of targets of the whole step.
        dist.all_reduce(tensor)
    return loss.item(), plan


def build_model() -> torch.nn.Module:
    """Returns torchtitan's debug model with two layers."""
    torch.manual_seed(0)
    config = llama3_configs["debugmodel"](attn_backend="varlen")
    del config.layers[2:]
    model = use_ring_attention(config).build()
    model.init_states(buffer_device=torch.device("cpu"))
    return model


def main() -> None:
    dist.init_process_group("gloo")
    warm_up(None, "cpu")
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(5):
        loss, plan = forward_backward(model, read_documents(step))
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss:.4f} documents by degree {plan.degrees}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
