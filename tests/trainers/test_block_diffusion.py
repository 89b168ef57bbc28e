"""Block diffusion in `transformers.Trainer`: what a trainer computes that runs every document alone
with a dense mask, on any number of ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Trainer, TrainingArguments

from longctx.data.diffusion import Noise
from longctx.trainers import TrainerError, dynamic_context_parallel, restore
from longctx.trainers.diffusion import BlockDiffusionCollator, for_evaluation, with_noise
from longctx.trainers.documents import Document
from tests.diffusion_cases import alone
from tests.marks import slow_unless
from tests.trainer_cases import (
    PROFILE,
    adapters,
    arguments,
    as_rank,
    as_rank_alone,
    documents,
    likelihood,
    model,
    pad,
    report,
    select_fsdp_on_cpus,
)
from tests.trainers.test_trainers import FSDP2, assert_equal
from tests.workers import Workers

NOISE = Noise(mask_token=3, block=7, seed=5, least=0.2)
PLAIN: dict[str, Any] = {}


class Alone(Trainer):
    """Computes every document alone."""

    noise: Noise

    def compute_loss(self, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        training = model.training
        noise = self.noise if training else for_evaluation(self.noise)
        epoch = int(self.state.epoch or 0) if training else 0
        total = torch.zeros((), dtype=torch.float64)
        divisor = 0
        for row, mask in enumerate(inputs["attention_mask"].bool()):
            ids = inputs["input_ids"][row][mask]
            labels = inputs["labels"][row][mask]
            document = with_noise(Document(ids.numpy(), labels.numpy()), noise, epoch)
            total += alone(model, document, ids, block=noise.block, noise=noise)
            divisor += int((labels[1:] != -100).sum())
        return (total / divisor).float()

    def prediction_step(self, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        with torch.no_grad():
            return self.compute_loss(model, inputs), None, None


def diffuse(
    folder: Path, accumulation: int, dynamic: bool, options: dict[str, Any]
) -> dict[str, Any]:
    """Trains with the collator; `lora` of the options adds adapters."""
    ranks, options = as_rank(), dict(options)
    if "fsdp" in options:
        select_fsdp_on_cpus()
    made = model()
    if lora := options.pop("lora", None):
        import peft

        made = peft.get_peft_model(made, adapters(lora))
    kind = Trainer if dynamic else Alone
    trainer = kind(
        made,
        TrainingArguments(**arguments(folder, ranks, accumulation, **options)),
        data_collator=BlockDiffusionCollator(pad, NOISE) if dynamic else pad,
        train_dataset=documents(),
        eval_dataset=documents(19, seed=1),
    )
    if dynamic:
        dynamic_context_parallel(trainer, profile=PROFILE, tokens_per_rank=200 // ranks)
    else:
        trainer.noise = NOISE
    trainer.train()
    return report(trainer)


CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "one": (1, 3, {}),
    "two": (2, 1, {}),
    "three, recomputed": (
        3,
        2,
        {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": False},
        },
    ),
    "adapters": (2, 1, {"lora": True}),
    "FSDP2": (2, 1, FSDP2),
}


@pytest.mark.parametrize("name", slow_unless(lambda name: name == "two", CASES))
def test_equal_to_every_document_alone(workers: Workers, tmp_path: Path, name: str) -> None:
    """Two epochs with other noise, and evaluations."""
    ranks, accumulation, options = CASES[name]
    runs = workers.run(diffuse, ranks, tmp_path, accumulation, True, options)
    lora = {"lora": True} if "lora" in options else {}
    key = str(lora)
    if key not in PLAIN:
        (PLAIN[key],) = workers.run(diffuse, 1, tmp_path / "plain", 1, False, lora)
    assert ranks == 1 or max(runs[0]["degrees"]) >= 2
    assert runs[0]["trees"] > 0
    assert_equal(runs, PLAIN[key])


def test_noise_depends_on_the_document_and_the_epoch() -> None:
    ids = np.arange(40)
    document = Document(ids, ids)
    first = with_noise(document, NOISE, 0)
    assert first.targets == 39
    assert first.tokens.tolist() == with_noise(document, NOISE, 0).tokens.tolist()
    others = [with_noise(document, NOISE, 1), with_noise(Document(ids + 1, ids + 1), NOISE, 0)]
    for other in others:
        assert other.tree != first.tree


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("deepseek_v32", {}, "no causal model of text that sees all keys"),
        ("bert", {}, "no causal model of text that sees all keys"),
        ("qwen3_moe", {}, "router_aux_loss_coef|output_router_logits"),
        ("qwen2", {"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ("qwen2", {"neftune_noise_alpha": 5.0}, "dropout and NEFTune go by the place of a token"),
    ],
)
def test_refusals(tmp_path: Path, kind: str, options: dict[str, Any], message: str) -> None:
    as_rank_alone()
    trainer = Trainer(
        model(kind),
        TrainingArguments(**arguments(tmp_path, 1, 1, **options)),
        data_collator=BlockDiffusionCollator(pad, NOISE),
        train_dataset=documents(),
        eval_dataset=documents(19, seed=1),
    )
    with pytest.raises(TrainerError, match=message):
        dynamic_context_parallel(trainer, profile=PROFILE, tokens_per_rank=200)


def test_predictions_are_refused(tmp_path: Path) -> None:
    as_rank_alone()
    trainer = Trainer(
        model(),
        TrainingArguments(**arguments(tmp_path, 1, 1, prediction_loss_only=False)),
        data_collator=BlockDiffusionCollator(pad, NOISE),
        eval_dataset=documents(19, seed=1),
        compute_metrics=likelihood,
    )
    dynamic_context_parallel(trainer, profile=PROFILE, tokens_per_rank=200)
    assert not trainer.dynamic.riders, "memory counts with logits, as the loss has them"
    with pytest.raises(TrainerError, match="rows with noise have no predictions"):
        trainer.evaluate()
    restore(trainer)


def test_the_collator_needs_dynamic_context_parallelism() -> None:
    with pytest.raises(TrainerError, match=r"call dynamic_context_parallel\(trainer\) first"):
        BlockDiffusionCollator(pad, NOISE)(documents())
