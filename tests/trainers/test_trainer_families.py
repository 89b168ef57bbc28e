"""Every model type that docs/families.md calls exact, in `transformers.Trainer`: two steps are
those of one plain process."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from longctx.trainers import dynamic_context_parallel
from tests.family_cases import build
from tests.trainer_cases import PROFILE, TOKENS_PER_RANK, arguments, as_rank, documents, pad, report
from tests.workers import Workers

pytestmark = pytest.mark.slow
TABLE = Path(__file__).resolve().parents[2] / "docs" / "families.md"
EXACT = re.findall(r"^\| ([\w-]+) \| \w+ \| exact \|", TABLE.read_text("utf-8"), re.MULTILINE)
OTHER = {
    "mllama": "its head does not run on hidden states alone, so the trainer is refused",
    "phimoe": "its routing is random in training",
}


def steps(folder: Path, kind: str, dynamic: bool) -> dict[str, Any]:
    """Trains on twelve documents a step. The plain way takes them one by one, as transformers would
    pad some models wrongly."""
    from transformers import Trainer, TrainingArguments

    ranks, alone = (
        as_rank(),
        {} if dynamic else {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 12},
    )
    rows = [
        {name: [each % 64 if each >= 0 else each for each in ids] for name, ids in row.items()}
        for row in documents(12)
    ]
    for row in rows:
        # Some models of transformers divide by labels that nothing predicts.
        row["labels"][0] = -100
    model = build(kind, "eager")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    given = {
        "max_steps": 2,
        "eval_strategy": "no",
        "learning_rate": 1e-2,
        "optim": "sgd",
        "max_grad_norm": 0.0,
    }
    trainer = Trainer(
        model,
        TrainingArguments(**arguments(folder, ranks, 1, **given) | alone),
        data_collator=pad,
        train_dataset=rows,
    )
    trainer.model_accepts_loss_kwargs = True
    if dynamic:
        dynamic_context_parallel(trainer, profile=PROFILE, tokens_per_rank=TOKENS_PER_RANK)
    trainer.train()
    return report(trainer)


@pytest.mark.parametrize("kind", [kind for kind in EXACT if kind not in OTHER])
def test_a_trainer_computes_what_one_plain_process_computes(
    workers: Workers, tmp_path: Path, kind: str
) -> None:
    (expected,) = workers.run(steps, 1, tmp_path, kind, False)
    ours, _ = workers.run(steps, 2, tmp_path, kind, True)
    assert max(ours["degrees"]) == 2
    for mine, plain in zip(ours["log"][:2], expected["log"][:2], strict=True):
        assert mine["loss"] == pytest.approx(plain["loss"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4)
