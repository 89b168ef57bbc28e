"""Every model for masked tokens of the installed transformers, tiny: compares a step on two ranks
with one unpacked process."""

import warnings
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import AutoModelForMaskedLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from longctx.data import IGNORED_LABEL
from longctx.data.packing import pack_documents
from longctx.hf.attention import HuggingFaceError, model_inputs, prepare
from tests.data_cases import placed_plan
from tests.family_cases import (
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    VOCABULARY,
    Finding,
    _text,
    largest_error,
    make_config,
    summed_step,
)
from tests.huggingface_cases import LENGTHS, PLACEMENTS, gradients, make_documents

FAMILIES: dict[str, str] = dict(MODEL_FOR_MASKED_LM_MAPPING_NAMES)
"""Model type → class."""
SPECIAL: dict[str, dict[str, Any]] = {
    "esm": {
        "vocab_size": VOCABULARY,
        "pad_token_id": 65,
        "mask_token_id": 66,
        "position_embedding_type": "rotary",
    },
    "perceiver": {
        "num_latents": 4,
        "d_latents": 32,
        "num_blocks": 1,
        "num_self_attends_per_block": 1,
    },
}
"""Additional settings that single model types need to be consistent when small."""


def build(kind: str, **settings: Any) -> PreTrainedModel:
    """Builds a model of a type in float64, with weights large enough for attention to matter, in
    evaluation mode.

    In float32 the gradient of a bias of keys, which is 0, is rounding, and in a tiny DistilBERT
    larger than the tolerance.
    """
    config = make_config(kind)
    for name, value in {"is_decoder": False, **SPECIAL.get(kind, {}), **settings}.items():
        if hasattr(config, name):
            setattr(config, name, value)
    torch.manual_seed(0)
    try:
        model: PreTrainedModel = AutoModelForMaskedLM.from_config(
            config, attn_implementation="eager"
        ).float()
    except ValueError:
        model = AutoModelForMaskedLM.from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model.double().eval()


def masked_documents(model: PreTrainedModel) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns tokens, some of them masked, and labels; every third token is masked, and one is in a
    document of one token."""
    mask = getattr(model.config, "mask_token_id", None) or 63
    documents = make_documents()
    masked = [torch.arange(len(document)) % 3 == 0 for document in documents]
    tokens = [
        document.masked_fill(here, mask) for document, here in zip(documents, masked, strict=True)
    ]
    return tokens, [
        document.where(here, IGNORED_LABEL)
        for document, here in zip(documents, masked, strict=True)
    ]


def part_of_loss(logits: torch.Tensor, labels: torch.Tensor, targets: int) -> torch.Tensor:
    return (
        F.cross_entropy(logits[: len(labels)], labels, ignore_index=IGNORED_LABEL, reduction="sum")
        / targets
    )


def unpacked(model: PreTrainedModel) -> tuple[float, list[torch.Tensor]]:
    """Returns loss and gradients of one process that takes one document at a time."""
    model.zero_grad()
    documents, labels = masked_documents(model)
    targets, loss = (
        sum(int((label >= 0).sum()) for label in labels),
        torch.zeros((), dtype=torch.float64),
    )
    for document, label in zip(documents, labels, strict=True):
        part = part_of_loss(model(input_ids=document[None]).logits[0], label, targets)
        part.backward()
        loss += part.detach()
    return loss.item(), [gradient.clone() for gradient in gradients(model)]


def unseparated(model: PreTrainedModel) -> list[torch.Tensor]:
    """Returns the gradients if all documents are one."""
    model.zero_grad()
    documents, labels = (torch.cat(parts) for parts in masked_documents(model))
    part_of_loss(
        model(input_ids=documents[None]).logits[0], labels, int((labels >= 0).sum())
    ).backward()
    return gradients(model)


def classify(kind: str) -> dict[str, Any]:
    """Runs on each rank: returns the outcome of a model type."""
    warnings.filterwarnings("ignore")
    return asdict(_classify(kind))


def _classify(kind: str) -> Finding:
    try:
        model = build(kind)
        loss, expected = unpacked(model)
        mixing = largest_error(unseparated(model), expected)
    except Exception as error:  # any error of a model that is unrelated to longctx
        return Finding("not buildable", _text(error))
    model.zero_grad()
    try:
        prepare(model, causal=False)
        found = ring_step(model)
    except HuggingFaceError as error:
        return Finding("refused", str(error))
    loss_error, gradient_error = (
        abs(found - loss) / abs(loss),
        largest_error(gradients(model), expected),
    )
    exact = loss_error <= LOSS_TOLERANCE and gradient_error <= GRADIENT_TOLERANCE
    return Finding("exact" if exact else "WRONG", "", loss_error, gradient_error, mixing)


def ring_step(model: PreTrainedModel) -> float:
    """Returns the loss of a step over all ranks and leaves its gradients in the model."""
    plan = placed_plan(LENGTHS, dist.get_world_size(), PLACEMENTS)
    micro_batches, targets = pack_documents(
        plan, dist.get_rank(), *masked_documents(model), shift=False
    )
    every = (
        (batch.labels, model(**model_inputs(model, batch)).logits[0]) for batch in micro_batches
    )
    return summed_step(model, (part_of_loss(logits, labels, targets) for labels, logits in every))
