"""Tiny T5Gemma checkpoints with a tokenizer of bytes, records of a source and a target, and the trainer on them."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel, PreTrainedTokenizerFast

from longctx.data.packing import StepBatch, pack_seq2seq
from longctx.data.tokenizer import byte_vocabulary
from tests.data_cases import placed_plan
from tests.pretrained_cases import Step, _gradient
from tests.pretrained_cases import step as causal_step
from tests.seq2seq_cases import PLACEMENTS_OF, SOURCES, START, TARGETS, build_seq2seq, documents, unpacked

BOS, EOS = 257, 258
LENGTHS = ((300, 20), (3, 200), (40, 41), (1, 1), (150, 2), (700, 90), (12, 5))
"""Bytes of the source and of the target of each record."""


def save_checkpoint(folder: Path, kind: str = "t5gemma") -> Path:
    """Saves a tiny T5Gemma with a tokenizer of bytes; its decoder begins with [BOS]."""
    inner = Tokenizer(models.BPE(vocab=byte_vocabulary(), merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.add_special_tokens(["[PAD]", "[BOS]", "[EOS]"])
    names = {"pad_token": "[PAD]", "bos_token": "[BOS]", "eos_token": "[EOS]"}
    PreTrainedTokenizerFast(tokenizer_object=inner, **names).save_pretrained(folder)
    special = {"pad_token_id": 256, "bos_token_id": BOS, "eos_token_id": EOS, "vocab_size": 259}
    build_seq2seq(kind, parts=special, **special).save_pretrained(folder)
    return folder


def records() -> list[dict[str, str]]:
    """Returns records whose texts differ, by one key and the other."""
    texts = [
        ("".join(chr(97 + (7 * i * i + 3 * n) % 26) for i in range(length)) for length in pair)
        for n, pair in enumerate(LENGTHS)
    ]
    return [dict(zip(("source", "target"), pair, strict=True)) for pair in texts]


def write_records(path: Path) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records()), "utf-8")
    return path


def pairs_of(found: list[dict[str, str]]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns tokens of sources and of targets with their end, as the tokenizer of bytes makes them of ASCII."""
    return [ids(record["source"]) for record in found], [torch.cat([ids(r["target"]), torch.tensor([EOS])]) for r in found]


def ids(text: str) -> torch.Tensor:
    vocabulary = byte_vocabulary()
    return torch.tensor([vocabulary[character] for character in text])


def reference(folder: Path, *given: Any, start: int = START) -> Step:
    """Returns the loss over single documents, gradients and state of a checkpoint in plain transformers."""
    model: PreTrainedModel = AutoModelForSeq2SeqLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    state = {name: value.clone() for name, value in model.eval().state_dict().items()}
    loss = unpacked(model, *(given or documents()), start=start)
    return loss, {name: _gradient(weight) for name, weight in model.named_parameters()}, state


def make_batch(ranks: int, rank: int) -> StepBatch:
    lengths = [source + target for source, target in zip(SOURCES, TARGETS, strict=True)]
    plan = placed_plan(lengths, ranks, PLACEMENTS_OF[ranks])
    read, written, labels = documents()
    micro_batches, targets = pack_seq2seq(plan, rank, read, written, start_token=START, labels=labels)
    return StepBatch(1, plan, tuple(map(str, range(len(lengths)))), sum(lengths), targets, tuple(micro_batches))


def step(folder: Path, settings: list[str]) -> Step:
    """Returns the same from the trainer, on every rank: packed, split and sharded."""
    return causal_step(folder, settings, make_batch)
