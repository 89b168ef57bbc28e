"""A loop with context parallelism, each rank with a slice of every row: longctx check-step FILE
--processes 2."""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import AttentionInterface

from longctx.check import Probe, Step, record
from longctx.check.loop import packed_batches, place, targets_of


def make(probe: Probe) -> Step:
    rank, ranks = place()

    # PUT YOURS HERE: rows before they are split, the same on every rank.
    rows = packed_batches(probe, length=64 * ranks, shared=True)

    # PUT YOURS HERE: a rank's part of each row. Labels are shifted before.
    parts = []
    for row in rows:
        parts.append({name: values.chunk(ranks, dim=1)[rank] for name, values in row.items()})

    # PUT YOURS HERE: a small model of your type with your attention, which is below.
    model = probe.model("llama")
    AttentionInterface.register("mine", attention)

    with record(model) as seen:  # before attention is replaced, and before anything wraps the model
        model.set_attn_implementation("mine")
        targets = targets_of(parts, shifted=True)
        for row, part in zip(rows, parts, strict=True):
            logits = model(
                input_ids=part["input_ids"],
                position_ids=part["positions"],
                documents=row["documents"],
                use_cache=False,
            ).logits
            losses = cross_entropy(logits.flatten(0, 1), part["labels"].flatten(), reduction="sum")
            loss = losses / targets
            loss.backward()
        if ranks > 1:
            for weight in model.parameters():
                dist.all_reduce(weight.grad)
        return seen.step(rows=[row["input_ids"] for row in rows])


def attention(
    module: Any,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    attention_mask: Any,
    *,
    documents: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Returns attention of this rank's queries to keys of all ranks, [rows, tokens, heads, width];
    queries, keys and values are [rows, heads, tokens, width], `documents` of whole rows."""
    rank, ranks = place()
    all_keys = torch.cat(gathered(keys), dim=2)
    all_values = torch.cat(gathered(values), dim=2)
    places = torch.arange(documents.shape[1])
    mine = places.chunk(ranks)[rank]
    earlier = places <= mine[:, None]
    same = documents[:, None] == documents[:, mine, None]
    mask = (same & earlier)[:, None]
    seen = scaled_dot_product_attention(
        queries, all_keys, all_values, attn_mask=mask, enable_gqa=True
    )
    return seen.transpose(1, 2), None


def gathered(own: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns what each rank has, with gradients."""
    _, ranks = place()
    if ranks == 1:
        return (own,)
    shares: torch.Tensor = Gather.apply(own)  # type: ignore[no-untyped-call]
    return shares.unbind()


class Gather(torch.autograd.Function):
    """Shares of all ranks, [ranks, ..]; a share's gradient is the sum of those of all ranks."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor) -> torch.Tensor:
        _, ranks = place()
        shares = [torch.empty_like(own) for _ in range(ranks)]
        dist.all_gather(shares, own.contiguous())
        return torch.stack(shares)

    @staticmethod
    def backward(ctx: Any, gradients: torch.Tensor) -> torch.Tensor:
        rank, _ = place()
        total = gradients.contiguous()
        dist.all_reduce(total)
        return total[rank]
