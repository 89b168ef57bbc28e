"""Tiny encoders of transformers, and one step on masked documents in a loop of one's own, over
several ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForMaskedLM, PreTrainedModel

from longctx.data import IGNORED_LABEL
from longctx.data.packing import MicroBatch, pack_documents
from longctx.hf.attention import model_inputs, prepare
from tests.data_cases import placed_plan
from tests.huggingface_cases import LENGTHS, SIZE
from tests.pretrained_cases import PLACEMENTS_OF

KINDS = ("bert", "roberta", "modernbert")
SPECIAL = 6
"""The first tokens are special."""
SETTINGS: dict[str, dict[str, Any]] = {
    "modernbert": {
        "global_attn_every_n_layers": 2,
        "local_attention": 16,
        "num_hidden_layers": 4,
        "cls_token_id": 2,
        "sep_token_id": 3,
        "bos_token_id": 2,
        "eos_token_id": 3,
    }
}


def build_encoder(kind: str, **settings: Any) -> PreTrainedModel:
    """Builds an encoder of a type, with eager attention; its weights are large enough for attention
    to matter."""
    sizes = {
        key: value for key, value in SIZE.items() if key not in ("num_key_value_heads", "head_dim")
    }
    given = {
        **sizes,
        "max_position_embeddings": 128,
        "pad_token_id": 1,
        **SETTINGS.get(kind, {}),
        **settings,
    }
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForMaskedLM.from_config(
        AutoConfig.for_model(kind, **given), attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model.eval()


def masked_documents() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns tokens, a third of which are masked, and labels of these."""
    generator = torch.Generator().manual_seed(1)
    found = [
        torch.randint(SPECIAL, SIZE["vocab_size"], (length,), generator=generator)
        for length in LENGTHS
    ]
    masks = [torch.rand(length, generator=generator) < 0.3 for length in LENGTHS]
    pairs = list(zip(found, masks, strict=True))
    return [tokens.masked_fill(mask, 5) for tokens, mask in pairs], [
        tokens.where(mask, -100) for tokens, mask in pairs
    ]


def reference(kind: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Returns loss and gradients of one process that takes one document at a time."""
    model, (documents, labels) = build_encoder(kind), masked_documents()
    targets = sum(int((label != IGNORED_LABEL).sum()) for label in labels)
    loss = torch.zeros(())
    for document, label in zip(documents, labels, strict=True):
        part = (
            F.cross_entropy(model(input_ids=document[None]).logits[0], label, reduction="sum")
            / targets
        )
        part.backward()
        loss += part.detach()
    return loss.item(), {name: weight.grad for name, weight in model.named_parameters()}


def batches(ranks: int, rank: int) -> tuple[list[MicroBatch], int]:
    """Returns a rank's micro-batches, with documents of degrees 1 to 3, and the number of targets
    of all ranks."""
    return pack_documents(
        placed_plan(LENGTHS, ranks, PLACEMENTS_OF[ranks]), rank, *masked_documents(), shift=False
    )


def step(kind: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Returns the same from packed and split documents, summed over ranks."""
    model = build_encoder(kind)
    prepare(model, causal=False)
    micro_batches, targets = batches(dist.get_world_size(), dist.get_rank())
    loss = torch.zeros(())
    for batch in micro_batches:
        logits = model(**model_inputs(model, batch)).logits[0, : len(batch.labels)]
        part = F.cross_entropy(logits, batch.labels, reduction="sum") / targets
        part.backward()
        loss += part.detach()
    for tensor in (loss, *(weight.grad for weight in model.parameters())):
        dist.all_reduce(tensor)
    return loss.item(), {name: weight.grad for name, weight in model.named_parameters()}
