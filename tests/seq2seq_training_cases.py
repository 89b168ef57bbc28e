"""Tiny T5Gemma checkpoints with a tokenizer of bytes, records of a source and a target, and the trainer on them."""

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from string import ascii_lowercase
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel, PreTrainedTokenizerFast

from longctx.config import load
from longctx.data.packing import StepBatch, pack_seq2seq
from longctx.data.tokenizer import byte_vocabulary
from longctx.model.huggingface import OURS
from longctx.model.lora import AdaptedModel, B
from longctx.model.protocol import generator_of
from longctx.parallel.mesh import make_groups
from longctx.training.assembly import assemble
from longctx.training.build import sizes_of_groups
from longctx.training.optimizer import learning_rate
from longctx.training.run import Run
from longctx.training.saved import checkpoint
from longctx.training.trainer import Trainer
from tests.data_cases import placed_plan
from tests.memory_cases import peak_of_second_step
from tests.pretrained_cases import SETTINGS, Step, _gradient
from tests.pretrained_cases import step as causal_step
from tests.seq2seq_cases import PLACEMENTS_OF, SOURCES, START, TARGETS, build_seq2seq, documents, unpacked

BOS, EOS = 257, 258
LENGTHS = ((300, 20), (3, 200), (40, 41), (1, 1), (150, 2), (700, 90), (12, 5))
"""Bytes of the source and of the target of each record."""


def save_checkpoint(folder: Path, kind: str = "t5gemma", **sizes: Any) -> Path:
    """Saves a tiny T5Gemma with a tokenizer of bytes; its decoder begins with [BOS]."""
    inner = Tokenizer(models.BPE(vocab=byte_vocabulary(), merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.add_special_tokens(["[PAD]", "[BOS]", "[EOS]"])
    names = {"pad_token": "[PAD]", "bos_token": "[BOS]", "eos_token": "[EOS]"}
    PreTrainedTokenizerFast(tokenizer_object=inner, **names).save_pretrained(folder)
    special = {"pad_token_id": 256, "bos_token_id": BOS, "eos_token_id": EOS, "vocab_size": 259}
    build_seq2seq(kind, parts={**special, **sizes}, **special).save_pretrained(folder)
    return folder


Pairs = Sequence[tuple[int, int]]


def records(lengths: Pairs | None = None) -> list[dict[str, str]]:
    """Returns records with texts of these lengths, all different."""
    random = Random(0)
    texts = [["".join(random.choices(ascii_lowercase, k=length)) for length in pair] for pair in lengths or LENGTHS]
    return [dict(zip(("source", "target"), pair, strict=True)) for pair in texts]


def write_records(path: Path, lengths: Pairs | None = None) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records(lengths)), "utf-8")
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


def adapted_reference(folder: Path, state: dict[str, torch.Tensor]) -> Step:
    """Returns the same with peft's adapters, whose values are in `state`."""
    base = AutoModelForSeq2SeqLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    model = get_peft_model(base, lora).base_model.model.eval()
    model.load_state_dict(state)
    return unpacked(model, *documents()), {name: _gradient(weight) for name, weight in model.named_parameters()}, state


def make_batch(ranks: int, rank: int) -> StepBatch:
    lengths = [source + target for source, target in zip(SOURCES, TARGETS, strict=True)]
    plan = placed_plan(lengths, ranks, PLACEMENTS_OF[ranks])
    read, written, labels = documents()
    micro_batches, targets = pack_seq2seq(plan, rank, read, written, start_token=START, labels=labels)
    return StepBatch(1, plan, tuple(map(str, range(len(lengths)))), sum(lengths), targets, tuple(micro_batches))


def step(folder: Path, settings: list[str]) -> Step:
    """Returns the same from the trainer, on every rank: packed, split and sharded."""
    return causal_step(folder, settings, make_batch)


def adapted_step(folder: Path, settings: list[str]) -> Step:
    """Returns it with adapters that have an effect."""
    original = AdaptedModel.initial_value

    def drawn(self: AdaptedModel, name: str, parameter: torch.Tensor, seed: int) -> torch.Tensor:
        value = original(self, name, parameter, seed)
        return 0.1 * torch.randn(value.shape, generator=generator_of(name, 1, value.device)) if name.endswith(B) else value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AdaptedModel, "initial_value", drawn)
        return step(folder, ["lora.rank=4", "lora.alpha=8", *settings])


def settings_of(base: Path, store: Path, run: Path, ranks: int) -> list[str]:
    """Returns settings of a run whose steps have all records, on as few tokens per rank as hold them."""
    tokens = sum(sum(pair) + 2 for pair in LENGTHS)
    return [
        *SETTINGS,
        f"model.from_pretrained={base}",
        f"data.store={store}",
        f"train.run_dir={run}",
        f"eval.store={store}",
        "eval.every=2",
        f"batch.global_tokens={tokens}",
        f"batch.tokens_per_rank={800 // ranks + 20}",
        "optimizer.learning_rate=0.01",
        "optimizer.weight_decay=0",
        "train.steps=4",
        "checkpoint.every=2",
        "log.tensorboard=false",
    ]


def begin(base: Path, store: Path, run: Path, *others: str, resume: bool = False) -> Trainer:
    config = load(None, [*settings_of(base, store, run, dist.get_world_size()), *others], world_size=dist.get_world_size())
    run.mkdir(parents=True, exist_ok=True)
    mesh = make_groups(torch.device("cpu"), timeout_s=60.0, **sizes_of_groups(config))
    return assemble(Run.open(config, checkpoint=checkpoint.newest(run)[0] if resume else None), mesh)


def first_step(base: Path, store: Path, run: Path) -> tuple[float, dict[str, torch.Tensor], dict[int, int], float]:
    """Returns loss, gradients, degrees and validation loss before the first update."""
    trainer = begin(base, store, run)
    assert trainer.loader is not None and trainer.validator is not None
    with trainer.loader:
        batch = next(trainer.loader)
    validation = trainer.validator.validate().validation_loss
    total = trainer.passes.forward_backward(batch, trainer.passes.weigh(batch, trainer.objective)).sum().double()
    dist.all_reduce(total)
    gradients = {name.removeprefix(OURS): _gradient(weight) for name, weight in trainer.model.named_parameters()}
    return total.item(), gradients, batch.plan.degrees, validation


def losses(base: Path, store: Path, run: Path, others: list[str], *ends: int) -> list[float]:
    """Returns the losses of a run that stops, with a checkpoint, after each of these steps, and is resumed."""
    found = []
    for number, end in enumerate(ends):
        trainer = begin(base, store, run, *others, resume=number > 0)
        with trainer.loader:
            found += [trainer.step().loss for _ in range(trainer.steps_done, end)]
            trainer.save()
    return found


def peak_of_run(base: Path, store: Path, run: Path, options: list[str]) -> int:
    return peak_of_second_step(lambda: begin(base, store, run, *options))


def trained_by_transformers(folder: Path, steps: int) -> PreTrainedModel:
    """Returns the model after steps on all records, one by one, with the optimizer of `settings_of`."""
    model: PreTrainedModel = AutoModelForSeq2SeqLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    sources, targets = pairs_of(records())
    section = load(None, settings_of(folder, folder, folder, 1)).optimizer
    optimizer = torch.optim.AdamW(model.eval().parameters(), betas=section.betas, eps=section.eps, weight_decay=0)
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = learning_rate(step, steps, section)
        unpacked(model, sources, targets, targets, start=BOS)
        torch.nn.utils.clip_grad_norm_(model.parameters(), section.clip_grad_norm or 1e9)
        optimizer.step()
        optimizer.zero_grad()
    return model


@torch.no_grad()
def answer(model: PreTrainedModel, source: torch.Tensor) -> list[int]:
    ones = torch.ones(1, len(source), dtype=torch.int64)
    found = model.generate(source[None], attention_mask=ones, do_sample=False, max_new_tokens=12, decoder_start_token_id=BOS)
    return list(found[0].tolist())
