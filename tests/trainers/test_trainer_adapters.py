"""Adapters in trainers: any that change layers by what a token itself is are exact, and others are
refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch

from longctx.trainers import TrainerError, dynamic_context_parallel
from tests.marks import slow_unless
from tests.trainer_cases import PROFILE, finetune, model
from tests.trainers.test_trainers import trainer
from tests.workers import Workers


def tied(kind: str = "qwen2") -> Any:
    made = model(kind)
    made.config.tie_word_embeddings = True
    made.tie_weights()
    return made


def lora(*targets: str, **more: Any) -> Any:
    return peft.LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=list(targets), **more)


def tokens(**more: Any) -> Any:
    return lora("q_proj", trainable_token_indices=[1, 2, 5], **more)


EMBEDDED: dict[str, tuple[Callable[[], Any], Any]] = {
    "embedding": (model, lora("q_proj", "embed_tokens")),
    "embedding alone": (model, lora("embed_tokens")),
    "embedding and head": (model, lora("embed_tokens", "lm_head")),
    "dora": (model, lora("q_proj", "embed_tokens", use_dora=True)),
    "tied": (tied, lora("q_proj", "embed_tokens")),
    "tied, both": (tied, lora("embed_tokens", "lm_head")),
    "kept tied": (tied, lora("embed_tokens", ensure_weight_tying=True)),
    "tokens": (model, tokens()),
    "tokens, tied": (tied, tokens()),
    "tokens alone": (
        tied,
        peft.TrainableTokensConfig(token_indices=[1, 2, 5], task_type="CAUSAL_LM"),
    ),
    "saved": (tied, lora("q_proj", modules_to_save=["embed_tokens"])),
    "scaled": (lambda: model("gemma3"), lora("q_proj", "embed_tokens")),
    "linear attention": (lambda: model("mamba2"), lora("embeddings")),
    "positions": (
        lambda: model("roberta"),
        peft.LoraConfig(r=4, target_modules=["position_embeddings", "word_embeddings"]),
    ),
}


def losses(
    folder: Path, make: Callable[[], Any], dynamic: bool, steps: int = 3
) -> tuple[list[float], list[torch.Tensor]]:
    """Returns the losses of a training and the weights after it; adapters begin with random
    weights."""
    torch.manual_seed(0)
    made = make()
    for name, weight in made.named_parameters():
        if weight.requires_grad and ("lora" in name or "token_adapter" in name):
            torch.nn.init.normal_(weight, std=0.05)
    ours = trainer(folder, of=made, max_steps=steps, learning_rate=1e-2)
    if dynamic:
        dynamic_context_parallel(ours, tokens_per_rank=200, profile=PROFILE)
    ours.train()
    logged = [entry["loss"] for entry in ours.state.log_history if "loss" in entry]
    return logged, list(made.parameters())


@pytest.mark.parametrize(
    "case", slow_unless(lambda case: case in ("tied, both", "tokens, tied"), EMBEDDED)
)
def test_embeddings_that_adapters_wrap(tmp_path: Path, case: str) -> None:
    make, config = EMBEDDED[case]
    plain, expected = losses(tmp_path, lambda: peft.get_peft_model(make(), config), dynamic=False)
    ours, weights = losses(tmp_path, lambda: peft.get_peft_model(make(), config), dynamic=True)
    assert len(plain) == 3 and ours == pytest.approx(plain, rel=1e-6)
    for weight, same in zip(weights, expected, strict=True):
        assert torch.allclose(weight, same, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_embeddings_that_adapters_wrap_on_several_ranks(
    workers: Workers, tmp_path: Path, ranks: int
) -> None:
    options = {"lora": "embedding", "num_train_epochs": 1}
    (plain,) = workers.run(finetune, 1, tmp_path / "plain", 1, False, options)
    ours = workers.run(finetune, ranks, tmp_path / "ours", 2, True, options)
    logs = [[entry["loss"] for entry in run["log"] if "loss" in entry] for run in (ours[0], plain)]
    assert len(logs[0]) == 4 and np.allclose(*logs, rtol=1e-6)
    for name, weight in plain["weights"].items():
        assert torch.allclose(ours[-1]["weights"][name], weight, rtol=0, atol=1e-5), name


def added() -> Any:
    """A model with adapters that transformers, not peft, has added."""
    made = model()
    made.add_adapter(lora("q_proj"))
    return made


def mixed() -> Any:
    made = peft.get_peft_model(model(), lora("q_proj"), mixed=True)
    made.add_adapter("other", peft.LoHaConfig(target_modules=["v_proj"]))
    made.set_adapter(["default", "other"])
    return made


def of_products() -> Any:
    """A model with adapters that draw numbers for dropouts that are 0."""
    return peft.get_peft_model(
        model(), peft.LoHaConfig(r=4, target_modules=["q_proj"], init_weights=False)
    )


@pytest.mark.parametrize("make", [added, *slow_unless(lambda make: False, [mixed, of_products])])
def test_models_that_hold_adapters_in_other_ways(tmp_path: Path, make: Callable[[], Any]) -> None:
    plain, _ = losses(tmp_path, make, dynamic=False, steps=2)
    ours, _ = losses(tmp_path, make, dynamic=True, steps=2)
    assert ours == pytest.approx(plain, rel=1e-6)


DRAW = (
    "adapters draw random numbers in every call, which would be others on every rank: set their "
    "dropout to 0"
)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            peft.AdaLoraConfig(total_step=20, target_modules=["q_proj"], task_type="CAUSAL_LM"),
            "ADALORA has a forward of its own, whose loss or input would be that of a micro-batch: "
            "use adapters of matrices",
        ),
        (
            peft.PolyConfig(target_modules=["q_proj"], r=4, task_type="CAUSAL_LM"),
            "POLY has a forward of its own",
        ),
        (
            peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
            "is not possible: PROMPT_TUNING adds virtual tokens to every document: use adapters of "
            "matrices, such as LoRA$",
        ),
        (
            lora("q_proj", alora_invocation_tokens=[5]),
            "alora_invocation_tokens switch adapters on from a place in the row",
        ),
        (peft.LoHaConfig(target_modules=["q_proj"], module_dropout=0.5), DRAW),
        (peft.LoKrConfig(target_modules=["q_proj"], rank_dropout=0.5), DRAW),
        (peft.PveraConfig(target_modules=["v_proj"]), DRAW),
    ],
    ids=[
        "own loss",
        "own input",
        "prompt",
        "places",
        "dropped modules",
        "dropped ranks",
        "sampled",
    ],
)
def test_adapters_that_do_more_are_refused(tmp_path: Path, config: Any, message: str) -> None:
    """They trained with other losses, or other masks on other ranks, and nothing was said."""
    ours = trainer(tmp_path, of=peft.get_peft_model(model(), config))
    with pytest.raises(TrainerError, match=message):
        dynamic_context_parallel(ours, tokens_per_rank=200, profile=PROFILE)
    assert not hasattr(ours, "dynamic")
