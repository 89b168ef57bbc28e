"""Tiny encoders of transformers on disk, and one step of the trainer on masked documents over several ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerFast

from longctx.data import IGNORED_LABEL
from longctx.data.masking import Masking
from longctx.data.packing import StepBatch, pack_documents
from longctx.data.tokenizer import byte_vocabulary
from tests.data_cases import placed_plan
from tests.huggingface_cases import LENGTHS, SIZE
from tests.pretrained_cases import PLACEMENTS_OF, _gradient
from tests.pretrained_cases import step as causal_step

KINDS = ("bert", "roberta", "modernbert")
MASK_TOKEN, SPECIAL = 5, 6
"""The first 6 tokens are special."""
MASKED = ["masked.share=0.3"]
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
    """Builds an encoder of a type, with eager attention; its weights are large enough for attention to matter."""
    sizes = {key: value for key, value in SIZE.items() if key not in ("num_key_value_heads", "head_dim")}
    given = {**sizes, "max_position_embeddings": 128, "pad_token_id": 1, **SETTINGS.get(kind, {}), **settings}
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForMaskedLM.from_config(AutoConfig.for_model(kind, **given), attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model.eval()


def save_checkpoint(folder: Path, kind: str) -> Path:
    """Saves a tiny encoder with a tokenizer of bytes that puts [CLS] before a text and [SEP] after it."""
    inner = Tokenizer(models.BPE(vocab=byte_vocabulary(), merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.add_special_tokens(["[PAD]", "[CLS]", "[SEP]", "[MASK]"])
    ends = [(token, inner.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    inner.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    PreTrainedTokenizerFast(tokenizer_object=inner, **names).save_pretrained(folder)
    special = {"pad_token_id": 256, "cls_token_id": 257, "sep_token_id": 258, "bos_token_id": 257, "eos_token_id": 258}
    build_encoder(kind, vocab_size=260, max_position_embeddings=2048, **special).save_pretrained(folder)
    return folder


def masking(seed: int = 0) -> Masking:
    return Masking(seed, 0.3, MASK_TOKEN, np.arange(SPECIAL, SIZE["vocab_size"]))


def masked_documents(lengths: tuple[int, ...] = LENGTHS) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns tokens with masks, and labels, of documents of these lengths. All but the shortest have labels."""
    generator = torch.Generator().manual_seed(1)
    found = [torch.randint(SPECIAL, SIZE["vocab_size"], (length,), generator=generator).numpy() for length in lengths]
    pairs = [masking().mask(tokens, epoch=0, document=document) for document, tokens in enumerate(found)]
    return [torch.from_numpy(tokens) for tokens, _ in pairs], [torch.from_numpy(labels) for _, labels in pairs]


def unpacked(model: PreTrainedModel) -> float:
    """Returns the loss of one process that takes one document at a time, and leaves its gradients in the model."""
    documents, labels = masked_documents()
    targets = sum(int((label != IGNORED_LABEL).sum()) for label in labels)
    loss = torch.zeros(())
    for document, label in zip(documents, labels, strict=True):
        logits = model(input_ids=document[None]).logits[0]
        part = F.cross_entropy(logits, label, ignore_index=IGNORED_LABEL, reduction="sum") / targets
        part.backward()
        loss += part.detach()
    return loss.item()


def reference(folder: Path) -> tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Returns loss, gradients and state of a checkpoint in plain transformers."""
    model: PreTrainedModel = AutoModelForMaskedLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    state = {name: value.clone() for name, value in model.eval().state_dict().items()}
    loss = unpacked(model)
    return loss, {name: _gradient(weight) for name, weight in model.named_parameters()}, state


def make_batch(ranks: int, rank: int) -> StepBatch:
    plan = placed_plan(LENGTHS, ranks, PLACEMENTS_OF[ranks])
    micro_batches, targets = pack_documents(plan, rank, *masked_documents(), shift=False)
    return StepBatch(1, plan, tuple(map(str, range(len(LENGTHS)))), sum(LENGTHS), targets, tuple(micro_batches))


def step(folder: Path, settings: list[str]) -> tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Returns the same from the trainer, on every rank: packed, split and sharded."""
    return causal_step(folder, [*MASKED, *settings], make_batch)
