"""Pairs of completions, runs that prefer the chosen ones, and the same by TRL's formula over unpacked documents in float64."""

import copy
import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from longctx.config import Config, load
from longctx.data.corpus import open_corpus
from longctx.data.prepare import prepare
from longctx.data.sampler import Sampler
from longctx.data.store import Store
from longctx.model.checkpoint_files import CheckpointFiles
from longctx.training.optimizer import learning_rate
from longctx.training.reference import Reference
from tests.data_cases import text_of, write_jsonl
from tests.lora_cases import ALPHA, RANK, Tensors, weights_of, whole
from tests.training_cases import SMALL, start

STEPS = 4
SETTINGS = [
    *(f"model.{name}=null" for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")),
    "model.head_dim=null",
    "dpo.beta=0.3",
    "dpo.label_smoothing=0.1",
    "data.max_length=400",
    "batch.global_tokens=900",
    "train.steps=4",
    "checkpoint.every=2",
    "optimizer.warmup_steps=0",
    "optimizer.learning_rate=0.002",
    "optimizer.clip_grad_norm=null",
    "optimizer.weight_decay=0",
    "optimizer.eps=1e-3",  # else the first steps go by the sign alone of gradients that are rounding errors
]
LENGTHS = ((20, 30, 60), (140, 40, 5), (10, 1, 90), (200, 60, 110), (33, 44, 55), (7, 130, 20), (60, 10, 10))
"""Characters of prompt, chosen and rejected completion."""


def make_pairs(folder: Path, lengths: tuple[tuple[int, int, int], ...] = LENGTHS) -> Path:
    """A byte-level store of pairs, some of which count more."""
    records = [
        {"prompt": text_of(p, i), "chosen": text_of(c, 100 + i), "rejected": text_of(r, 200 + i), "weight": 1 + i % 3}
        for i, (p, c, r) in enumerate(lengths)
    ]
    source = write_jsonl(folder / "pairs.jsonl", records)
    prepare(open_corpus(str(source)), folder / "store", tokenizer="bytes")
    return folder / "store"


def baseless(*arguments: Any) -> dict[str, Any]:
    """`run` of a version that does not compare the checkpoint that a run began from."""
    with mock.patch.object(CheckpointFiles, "fingerprint", "the same"):
        return run(*arguments)


def baseless_fails(*arguments: Any) -> str:
    with mock.patch.object(CheckpointFiles, "fingerprint", "the same"):
        return run_fails(*arguments)


def run(store: Path, folder: Path, settings: list[str], resume: bool = False) -> dict[str, Any]:
    """On each rank: the whole loop, with what it logs, the gradients of the last step, and how often documents were split."""
    computed = []
    original, said = Reference._compute, io.StringIO()
    Reference._compute = lambda *arguments: computed.append(True) or original(*arguments)
    try:
        with redirect_stdout(said):
            trainer = start(store, folder, [*SETTINGS, *settings], resume=resume)
    finally:
        Reference._compute = original
    first, gradients = weights_of(trainer)[0], {}

    def look(*_: Any) -> None:
        held = ((name.split("hf.", 1)[-1], weight) for name, weight in trainer.model.named_parameters())
        gradients.update({name: whole(weight.grad) for name, weight in held if weight.grad is not None})

    trainer.optimizer.register_step_pre_hook(look)
    trainer.train()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "rows": rows,
        "first": first,
        "last": weights_of(trainer)[0],
        "gradients": gradients,
        "computed": bool(computed),
        "said": said.getvalue(),
        "split": any(int(degree) > 1 for row in rows for degree in row["degrees"]),
    }


def run_fails(store: Path, folder: Path, settings: list[str], resume: bool) -> str:
    try:
        start(store, folder, [*SETTINGS, *settings], resume=resume)
    except ValueError as error:
        return str(error)
    raise AssertionError("nothing was refused")


class Plain:
    """DPO as TRL writes it (`DPOTrainer.dpo_loss`, sigmoid), over one document after the other, in float64."""

    def __init__(self, checkpoint: Path, store: Path, settings: list[str], adapters: Tensors | None = None) -> None:
        self.config: Config = load(None, [*SMALL, *SETTINGS, *settings, f"data.store={store}"])
        self.store = Store.open(store)
        model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager", dtype=torch.float64).eval()
        self.reference = copy.deepcopy(model)
        if adapters is not None:
            model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", lora_dropout=0.0))
            model = model.double().eval()
            for name, weight in model.named_parameters():
                if weight.requires_grad:
                    weight.data.copy_(adapters[name.removeprefix("base_model.model.")])
        self.model = model
        self.trained = {name.removeprefix("base_model.model."): p for name, p in model.named_parameters() if p.requires_grad}

    def log_probability(self, model: Any, document: int) -> torch.Tensor:
        tokens, labels = map(torch.from_numpy, self.store.read(document, 0, int(self.store.lengths[document])))
        logits = model(input_ids=tokens[None], use_cache=False).logits[0]
        return -F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")

    def loss(self, pairs: list[int]) -> tuple[torch.Tensor, float, float]:
        """Loss, accuracy and margin of pairs, given by their chosen documents."""
        beta, smoothing, parts = self.config.dpo.beta, self.config.dpo.label_smoothing, []
        assert beta is not None
        for chosen in pairs:
            rejected = chosen + 1
            policy_chosen, policy_rejected = (self.log_probability(self.model, one) for one in (chosen, rejected))
            with torch.no_grad():
                ref_chosen, ref_rejected = (self.log_probability(self.reference, one) for one in (chosen, rejected))
            logits = (policy_chosen - policy_rejected) - (ref_chosen - ref_rejected)
            losses = -F.logsigmoid(beta * logits) * (1 - smoothing) - F.logsigmoid(-beta * logits) * smoothing
            rewards = beta * (policy_chosen - ref_chosen).detach(), beta * (policy_rejected - ref_rejected).detach()
            parts.append(torch.stack([losses, (rewards[0] > rewards[1]).double(), rewards[0] - rewards[1]]))
        weights = torch.from_numpy(self.store.weights[pairs])
        loss, accuracy, margin = (torch.stack(parts) * weights[:, None]).sum(0) / weights.sum()
        return loss, accuracy.item(), margin.item()

    def steps(self) -> list[list[int]]:
        """The chosen documents of every step."""
        config = self.config
        sampler = Sampler(
            self.store.lengths,
            global_tokens=config.batch.global_tokens,
            seed=config.train.seed,
            max_length=400,
            pairs=True,
        )
        found, cursor = [], 0
        for _ in range(STEPS):
            pieces, cursor = sampler.step(cursor)
            found.append([piece.document for piece in pieces[::2]])
            rejected = [(piece.document, piece.start, piece.stop) for piece in pieces[1::2]]
            assert rejected == [(one + 1, 0, int(self.store.lengths[one + 1])) for one in found[-1]]
        return found

    def train(self) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
        """What every step reports, and the gradients of the last one."""
        given, rows = self.config.optimizer, []
        optimizer = torch.optim.AdamW(self.trained.values(), betas=given.betas, eps=given.eps, weight_decay=given.weight_decay)
        for step, pairs in enumerate(self.steps(), start=1):
            optimizer.zero_grad()
            loss, accuracy, margin = self.loss(pairs)
            loss.backward()
            norm = sum(float(weight.grad.square().sum()) for weight in self.trained.values() if weight.grad is not None) ** 0.5
            rows.append({"loss": loss.item(), "reward_accuracy": accuracy, "reward_margin": margin, "grad_norm": norm})
            optimizer.param_groups[0]["lr"] = learning_rate(step, self.config.train.steps, given)
            optimizer.step()
        return rows, {name: weight.grad for name, weight in self.trained.items() if weight.grad is not None}

    def after(self, weights: Tensors, pairs: list[int]) -> tuple[float, float]:
        """Loss and accuracy of pairs with these weights in place of the first ones."""
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                weight.copy_(weights[name])
            loss, accuracy, _ = self.loss(pairs)
        return loss.item(), accuracy
