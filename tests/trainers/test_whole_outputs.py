"""Trainers whose loss needs outputs of whole rows: heads, reward models and own losses are those of
plain training."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments

from longctx.planning.layout import Placement
from longctx.trainers import TrainerError, dynamic_context_parallel, restore
from longctx.trainers.families import AttentionOptions
from longctx.trainers.planned_call import PlannedCall
from longctx.trainers.step import Planning, StepExchange
from longctx.trainers.whole_outputs import PlannedBase
from tests.marks import slow_unless
from tests.trainer_cases import (
    DOCUMENTS,
    LONGEST,
    PROFILE,
    TOKENS_PER_RANK,
    VOCABULARY,
    arguments,
    as_rank,
    documents,
    model,
    pad,
    preferences,
    report,
    select_fsdp_on_cpus,
    tokenizer,
)
from tests.trainers.test_trainers import trainer
from tests.workers import Workers

CLASSES = 3
STEPS = {
    "max_steps": 3,
    "eval_strategy": "no",
    "optim": "sgd",
    "learning_rate": 0.05,
    "max_grad_norm": 0.0,
}
"""All steps are full, so the means over the rows of ranks are those of one process."""


def with_head(kind: str) -> Any:
    """A model named by its family and its head, with the same random weights in every process."""
    import transformers

    family, head = kind.split()
    config = model(family).config
    config.num_labels = 2 if head == "QuestionAnswering" else CLASSES
    config.pad_token_id, config.classifier_dropout = VOCABULARY - 1, 0.0
    config.classifier_pooling = "cls" if head == "MultipleChoice" else "mean"
    torch.manual_seed(0)
    name = {"qwen2": "Qwen2", "bert": "Bert", "roberta": "Roberta", "modernbert": "ModernBert"}[
        family
    ]
    made = getattr(transformers, f"{name}For{head}")(config)
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=0.2) if weight.dim() > 1 else None
    return made


def labelled(rows: list[dict[str, Any]], head: str) -> list[dict[str, Any]]:
    """Rows without the token of padding, with a class a row or for two of three tokens, or with two
    choices."""
    for number, row in enumerate(rows):
        ids = np.array(row["input_ids"]) % (VOCABULARY - 2)
        row["input_ids"] = ids.tolist()
        row["labels"] = {
            "SequenceClassification": number % CLASSES,
            # Of an answer, first and last.
            "QuestionAnswering": (len(ids) // 3, len(ids) - 1 - number % 2),
            "MultipleChoice": number % 2,
            "TokenClassification": np.where(
                np.arange(len(ids)) % 3 == 0, -100, ids % CLASSES
            ).tolist(),
        }.get(head, row["labels"])
        if head == "MultipleChoice":
            row["input_ids"] = [row["input_ids"], row["input_ids"][::-1][: 1 + number % 7]]
    return rows


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pads with the token of padding, by which a head finds the last token of a row."""
    if isinstance(rows[0]["input_ids"][0], list):
        choices = collate(
            [{**row, "input_ids": choice} for row in rows for choice in row["input_ids"]]
        )
        return {
            name: each[::2] if name == "labels" else each.view(len(rows), 2, -1)
            for name, each in choices.items()
        }
    of_rows = not isinstance(rows[0]["labels"], list)
    padded = pad([{**row, "labels": row["input_ids"]} if of_rows else row for row in rows])
    if of_rows:
        padded["labels"] = torch.tensor([row["labels"] for row in rows])
    if padded["labels"].shape[1:] == (2,):
        padded["start_positions"], padded["end_positions"] = padded.pop("labels").unbind(1)
    padded["input_ids"][padded["attention_mask"] == 0] = VOCABULARY - 1
    return padded


def weighed(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A loss that is no sum over tokens: a row weighs by its own loss."""
    losses = F.cross_entropy(
        outputs.logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none"
    ).sum(1)
    return (losses + losses**2 / 100).sum() / num_items_in_batch


def run(folder: Path, kind: str, dynamic: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Trains with `transformers.Trainer`. Options: those of its arguments, `budget`, `predicting`
    and `evaluating`, before.
    """
    from transformers import Trainer, TrainingArguments

    ranks, options = as_rank(), dict(options)
    if "fsdp" in options:
        select_fsdp_on_cpus()
    budget = options.pop("budget", {"tokens_per_rank": TOKENS_PER_RANK if ranks > 1 else LONGEST})
    accumulation, predicting = options.pop("accumulation", 1), options.pop("predicting", False)
    evaluating, rows = options.pop("evaluating", False), options.pop("rows", DOCUMENTS)
    evaluated = 19 if options.pop("uneven", False) else 12

    class Own(Trainer):
        def compute_loss(
            self,
            model: Any,
            inputs: Any,
            return_outputs: bool = False,
            num_items_in_batch: Any = None,
        ) -> Any:
            outputs = model(**inputs)
            loss = F.cross_entropy(outputs.logits[:, 0], inputs["input_ids"][:, 0])
            return (loss, outputs) if return_outputs else loss

    of_tokens = kind in ("function", "subclass")

    def of_kind(read: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return read if of_tokens else labelled(read, kind.split()[1])

    ours = (Own if kind == "subclass" else Trainer)(
        model() if of_tokens else with_head(kind),
        TrainingArguments(**arguments(folder, ranks, accumulation, **{**STEPS, **options})),
        data_collator=pad if of_tokens else collate,
        train_dataset=of_kind(documents()[:rows]),
        eval_dataset=of_kind(documents(evaluated, 1)),
        compute_loss_func=weighed if kind == "function" else None,
    )
    if dynamic:
        dynamic_context_parallel(ours, profile=PROFILE, **budget)
    if evaluating:
        ours.evaluate()
    ours.train()
    return report(ours) | {
        "predictions": ours.predict(of_kind(documents(6, seed=2))).predictions
        if predicting
        else None
    }


def reward(folder: Path, dynamic: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Trains with TRL's RewardTrainer."""
    import datasets
    from trl import RewardConfig, RewardTrainer

    ranks, options = as_rank(), dict(options)
    lora = options.pop("lora", False)
    given = arguments(folder, ranks, 1, **{**STEPS, **options}) | {
        "include_num_input_tokens_seen": "no",
        "max_length": None,
    }
    del given["remove_unused_columns"]
    config = with_head("qwen2 SequenceClassification").config
    config.num_labels = 1
    import transformers
    from peft import LoraConfig

    torch.manual_seed(0)
    adapters = LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], task_type="SEQ_CLS", modules_to_save=["score"]
    )
    trainer = RewardTrainer(
        transformers.Qwen2ForSequenceClassification(config),
        args=RewardConfig(**given, center_rewards_coefficient=0.01),
        train_dataset=datasets.Dataset.from_list(
            [row | {"margin": 0.5} for row in preferences("DPO") + preferences("DPO")]
        ),
        processing_class=tokenizer(),
        peft_config=adapters if lora else None,
    )
    if dynamic:
        dynamic_context_parallel(
            trainer, profile=PROFILE, tokens_per_rank=TOKENS_PER_RANK if ranks > 1 else 120
        )
    trainer.train()
    return report(trainer)


def assert_same(runs: list[dict[str, Any]], expected: dict[str, Any], split: bool = True) -> None:
    """Logs of the first rank and weights of all are those of the plain run, in which weights have
    changed."""
    assert max(runs[0]["degrees"]) >= 2 or not split
    for ours, theirs in zip(runs[0]["log"], expected["log"], strict=True):
        for name in (
            name for name in theirs if not name.endswith(("time", "per_second", "flos", "epoch"))
        ):
            assert ours[name] == pytest.approx(theirs[name], rel=2e-5, abs=1e-6), (
                name,
                ours,
                theirs,
            )
    for run in runs:
        for name, weight in expected["weights"].items():
            assert torch.allclose(run["weights"][name], weight, rtol=0, atol=2e-6), name


CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "rows": (
        2,
        "qwen2 SequenceClassification",
        {"predicting": True, "prediction_loss_only": False},
    ),
    "rows of three": (3, "qwen2 SequenceClassification", {"accumulation": 2}),
    "rows on one": (1, "qwen2 SequenceClassification", {}),
    "first token": (3, "bert SequenceClassification", {}),
    "mean of tokens": (2, "modernbert SequenceClassification", {}),
    "tokens": (
        2,
        "qwen2 TokenClassification",
        {"accumulation": 3, "eval_strategy": "steps", "eval_steps": 2, "evaluating": True},
    ),
    "tokens of an encoder": (3, "roberta TokenClassification", {}),
    "sharded": (
        2,
        "qwen2 SequenceClassification",
        {
            "fsdp": "full_shard auto_wrap",
            "fsdp_config": {
                "fsdp_version": 2,
                "transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"],
            },
        },
    ),
    "function": (
        2,
        "function",
        {"accumulation": 2, "predicting": True, "prediction_loss_only": False},
    ),
    "function of three": (3, "function", {"gradient_checkpointing": True}),
    "function on one": (1, "function", {}),
    "subclass": (2, "subclass", {}),
    "choices": (
        2,
        "bert MultipleChoice",
        {"accumulation": 2, "eval_strategy": "steps", "eval_steps": 2},
    ),
    "choices of three": (
        3,
        "roberta MultipleChoice",
        {"predicting": True, "prediction_loss_only": False},
    ),
    "choices on one": (1, "modernbert MultipleChoice", {}),
    "smoothed": (2, "qwen2 TokenClassification", {"label_smoothing_factor": 0.1}),
}
QUICK = ("rows", "first token", "tokens", "function", "choices")


@pytest.mark.parametrize("case", slow_unless(lambda case: case in QUICK, CASES))
def test_whole_rows(workers: Workers, tmp_path: Path, case: str) -> None:
    ranks, kind, options = CASES[case]
    plain = {
        name: value
        for name, value in options.items()
        if name not in ("accumulation", "fsdp", "fsdp_config")
    }
    (expected,) = workers.run(run, 1, tmp_path / "plain", kind, False, plain)
    runs = workers.run(run, ranks, tmp_path / "ours", kind, True, options)
    assert_same(runs, expected, split=ranks > 1)
    if "predicting" in options:
        kept = np.abs(runs[0]["predictions"]) > 0  # logits of padding are those of hidden states 0
        assert kept.mean() > 0.2 and runs[0]["predictions"].shape == expected["predictions"].shape
        np.testing.assert_allclose(
            runs[0]["predictions"][kept], expected["predictions"][kept], rtol=0, atol=1e-5
        )


SPLIT_BATCHES: dict[str, Any] = {
    "per_device_train_batch_size": 12,
    "per_device_eval_batch_size": 12,
}
SPLIT_BATCHES |= {"accelerator_config": {"split_batches": True}, "eval_strategy": "no"}
UNEVEN: dict[str, tuple[int, str, dict[str, Any]]] = {
    "classes": (
        2,
        "qwen2 SequenceClassification",
        {"predicting": True, "prediction_loss_only": False},
    ),
    "classes of three": (3, "qwen2 SequenceClassification", {"accumulation": 2}),
    "classes on one": (1, "qwen2 SequenceClassification", {"accumulation": 3}),
    "tokens": (2, "roberta TokenClassification", {"accumulation": 3}),
    "answers": (3, "qwen2 QuestionAnswering", {"accumulation": 2}),
    "answers on one": (1, "qwen2 QuestionAnswering", {"accumulation": 4}),
    "choices": (3, "bert MultipleChoice", {}),
    "function": (2, "function", {"accumulation": 2}),
    "smoothed": (3, "qwen2 TokenClassification", {"label_smoothing_factor": 0.1}),
    "one row for three": (3, "qwen2 SequenceClassification", {"rows": 1}),
    "thirteen": (2, "qwen2 SequenceClassification", {"rows": 13, "accumulation": 3}),
    "not averaged": (2, "qwen2 SequenceClassification", {"average_tokens_across_devices": False}),
    "dropped": (2, "qwen2 SequenceClassification", {"dataloader_drop_last": True}),
    "split batches": (2, "qwen2 SequenceClassification", SPLIT_BATCHES),
}


@pytest.mark.parametrize(
    "case", slow_unless(lambda case: case in ("classes", "one row for three"), UNEVEN)
)
def test_every_row_counts_once_at_the_end_of_an_epoch(
    workers: Workers, tmp_path: Path, case: str
) -> None:
    """41 documents in steps of 12, and 19 in evaluations: accelerate fills the last ones with the
    first documents."""
    ranks, kind, options = UNEVEN[case]
    whole: dict[str, Any] = {
        "max_steps": -1,
        "num_train_epochs": 2,
        "eval_strategy": "epoch",
        "uneven": True,
    }
    plain = {
        name: value
        for name, value in options.items()
        if name not in ("accumulation", "accelerator_config")
    }
    if "Answering" in kind:  # plain training looks for answers in padding
        plain, whole["eval_strategy"] = {"accumulation": 12}, "no"
    (expected,) = workers.run(run, 1, tmp_path / "plain", kind, False, whole | plain)
    runs = workers.run(run, ranks, tmp_path / "ours", kind, True, whole | options)
    assert_same(runs, expected, split=False)
    if "predicting" in options:
        assert runs[0]["predictions"].shape == expected["predictions"].shape


def refused_end(folder: Path, attached: bool) -> str:
    """Returns why a trainer whose loss is unknown is refused for 41 rows in steps of 12, when it
    gets a plan or at the end."""
    from transformers import Trainer, TrainingArguments

    class Own(Trainer):
        def compute_loss(
            self,
            model: Any,
            inputs: Any,
            return_outputs: bool = False,
            num_items_in_batch: Any = None,
        ) -> Any:
            loss = model(**inputs).logits[:, 0].sum()
            return (loss, None) if return_outputs else loss

        def get_train_dataloader(self) -> Any:
            self.train_dataset = data
            return super().get_train_dataloader()

    ranks, data = as_rank(), documents()
    args = TrainingArguments(
        **arguments(folder, ranks, 1, **{**STEPS, "max_steps": -1, "num_train_epochs": 1})
    )
    ours = Own(model(), args, pad, data if attached else data[:36])
    try:
        dynamic_context_parallel(ours, profile=PROFILE, tokens_per_rank=TOKENS_PER_RANK)
        assert not attached
        ours.train()
    except TrainerError as error:
        return str(error)
    finally:
        restore(ours)
    return ""


@pytest.mark.parametrize("attached", [True, False])
def test_unknown_losses_of_an_uneven_end_are_refused_on_all_ranks(
    workers: Workers, tmp_path: Path, attached: bool
) -> None:
    """Nothing says whether they are means over rows; some ranks have rows of their own in the last
    batches, and others none."""
    for told in workers.run(refused_end, 2, tmp_path, attached):
        assert ("train_dataset (41 by 12)" in told) == attached
        assert (
            "are not as many on every rank" in told
            and "set dataloader_drop_last=True in TrainingArguments" in told
        )


ANSWERED = [("qwen2", 1), ("qwen2", 2), ("roberta", 3)]


@pytest.mark.parametrize(("family", "ranks"), slow_unless(lambda _, ranks: ranks == 2, ANSWERED))
def test_answers_are_those_of_rows_one_by_one(
    workers: Workers, tmp_path: Path, family: str, ranks: int
) -> None:
    """Plain training looks for them in padding, too, which rows that come one by one do not
    have."""
    kind = f"{family} QuestionAnswering"
    (expected,) = workers.run(run, 1, tmp_path / "plain", kind, False, {"accumulation": 12})
    assert_same(
        workers.run(run, ranks, tmp_path / "ours", kind, True, {}), expected, split=ranks > 1
    )


@pytest.mark.parametrize(
    ("ranks", "options"),
    slow_unless(
        lambda ranks, options: ranks == 2 and not options, [(2, {}), (3, {}), (2, {"lora": True})]
    ),
)
def test_reward_models(
    workers: Workers, tmp_path: Path, ranks: int, options: dict[str, Any]
) -> None:
    """Both answers of a pair, which begin alike, are a tree."""
    (expected,) = workers.run(reward, 1, tmp_path / "plain", False, options)
    runs = workers.run(reward, ranks, tmp_path / "ours", True, options)
    assert runs[0]["trees"] > 0
    assert_same(runs, expected)


def ready(folder: Path, kind: str = "qwen2 SequenceClassification", **options: Any) -> Any:
    rows = labelled(documents(), kind.split()[1])
    ours = trainer(folder, of=with_head(kind), data=rows, **{**STEPS, **options})
    ours.data_collator = collate
    return ours


def test_outside_steps_and_after_restoring_the_model_is_plain(tmp_path: Path) -> None:
    ours, batch = ready(tmp_path), collate(labelled(documents(4), "SequenceClassification"))
    kind, plain = type(ours), ours.model(**batch).logits
    dynamic_context_parallel(ours, tokens_per_rank=200, profile=PROFILE)
    assert torch.equal(ours.model(**batch).logits, plain) and not ours.dynamic.plans
    with ours.outputs.used():
        planned = ours.model(**batch)
    assert torch.allclose(planned.logits, plain, atol=1e-5) and ours.dynamic.plans
    restore(ours)
    assert type(ours) is kind and torch.equal(ours.model(**batch).logits, plain)
    assert (
        isinstance(ours.model.config._attn_implementation, str)
        and ours.model.config._attn_implementation != "longctx"
    )


def test_it_says_that_calls_are_planned_and_what_logits_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = trainer(tmp_path)
    ours.compute_loss_func = weighed
    dynamic_context_parallel(ours, tokens_per_rank=200, profile=PROFILE)
    assert (
        "planned, not steps, and logits take 0.50 MiB per 1,024 tokens of its rows"
        in capsys.readouterr().out
    )


def test_padding_that_the_head_would_not_find_is_refused(tmp_path: Path) -> None:
    ours = ready(tmp_path)
    ours.data_collator = lambda rows: (
        (batch := collate(rows)) | {"input_ids": batch["input_ids"] * batch["attention_mask"]}
    )
    dynamic_context_parallel(ours, tokens_per_rank=200, profile=PROFILE)
    with pytest.raises(
        TrainerError, match=f"other tokens than the config's pad_token_id {VOCABULARY - 1}"
    ):
        ours.train()


def test_arguments_that_would_be_lost_are_refused(tmp_path: Path) -> None:
    ours = ready(tmp_path)
    ours.data_collator = lambda rows: collate(rows) | {"output_hidden_states": True}
    dynamic_context_parallel(ours, tokens_per_rank=200, profile=PROFILE)
    with pytest.raises(
        TrainerError, match="Qwen2Model gets output_hidden_states, which splitting rows would lose"
    ):
        ours.train()


def test_a_head_in_bfloat16_is_tried_as_it_is_trained(tmp_path: Path) -> None:
    """TRL puts the heads beside adapters of a base of 4 bits in bfloat16, which only autocast
    multiplies by float32."""
    ours = ready(tmp_path, bf16=True)
    ours.model.score.to(torch.bfloat16)
    dynamic_context_parallel(ours, tokens_per_rank=200, profile=PROFILE)
    assert ours.train().training_loss > 0


def test_a_head_that_needs_more_than_hidden_states_is_refused(tmp_path: Path) -> None:
    ours = ready(tmp_path)
    own = ours.model.forward

    def forward(**named: Any) -> Any:
        output = own(**named)
        output.logits = (
            output.logits
            + ours.model.model(named["input_ids"], output_hidden_states=True)
            .hidden_states[1]
            .mean()
        )
        return output

    ours.model.forward = forward
    with pytest.raises(
        TrainerError,
        match="head of Qwen2ForSequenceClassification does not run on hidden states alone",
    ):
        dynamic_context_parallel(ours, tokens_per_rank=200, profile=PROFILE)
    assert not hasattr(ours, "dynamic")


def test_heads_whose_answers_in_padding_cannot_be_hidden_are_refused(tmp_path: Path) -> None:
    ours = ready(tmp_path, "bert QuestionAnswering")
    ours.model.other, ours.model.forward = ours.model._modules.pop("qa_outputs"), None
    with pytest.raises(
        TrainerError,
        match="BertForQuestionAnswering has no layer qa_outputs, by which answers in padding",
    ):
        dynamic_context_parallel(ours, tokens_per_rank=200, profile=PROFILE)


def test_a_step_set_on_the_trainer_is_refused(tmp_path: Path) -> None:
    ours = ready(tmp_path)
    ours.training_step = lambda *given, **named: None
    with pytest.raises(
        TrainerError, match=r"training_step is set on the trainer itself.*define it in a subclass"
    ):
        dynamic_context_parallel(ours, tokens_per_rank=200, profile=PROFILE)


def losses_of_a_sick_head(folder: Path, spoil: bool) -> list[float]:
    """Losses logged by a classifier whose head becomes NaN after the first step."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Spoils(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
        def on_step_end(
            self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
        ) -> None:
            if spoil:
                model.score.weight.data[0, 0] = torch.nan

    own = {"max_steps": 2, "eval_strategy": "no", "logging_nan_inf_filter": False}
    settings = arguments(folder, 1, 1, **own)
    made = Trainer(
        with_head("qwen2 SequenceClassification"),
        TrainingArguments(**settings),
        data_collator=collate,
        train_dataset=labelled(documents(DOCUMENTS), "SequenceClassification"),
        callbacks=[Spoils()],
    )
    dynamic_context_parallel(made, tokens_per_rank=LONGEST, profile=PROFILE)
    made.train()
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


def test_a_loss_that_is_nan_is_not_zero(tmp_path: Path) -> None:
    """The mean of a batch without labels is NaN, too, and counts nothing: all others are what they
    are."""
    assert np.isfinite(losses_of_a_sick_head(tmp_path / "well", spoil=False)).all()
    assert np.isnan(losses_of_a_sick_head(tmp_path / "sick", spoil=True)[-1])


def test_logits_of_padding_are_not_computed() -> None:
    """Those of tokens, and gradients, are those of the whole product."""
    torch.manual_seed(0)
    head = torch.nn.Linear(6, 5, bias=False)
    multiplied: list[int] = []

    def own(layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        multiplied.append(hidden.shape[:-1].numel())
        return torch.nn.functional.linear(hidden, layer.weight)

    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 0, 0]])
    unused: Any = None
    planned = PlannedBase(exchange=unused)
    planned.remember(mask)
    hidden = torch.randn(2, 4, 6) * mask[..., None]
    found = []
    for active in (False, True):
        planned.active = active
        given = hidden.clone().requires_grad_()
        head.weight.grad = None
        logits = planned.of_tokens(own, head, given)
        logits.square().sum().backward()
        found.append((logits, given.grad, head.weight.grad))
    for whole, of_tokens in zip(*found, strict=True):
        torch.testing.assert_close(of_tokens, whole)
    assert multiplied == [8, 5]


def recomputed(folder: Path) -> tuple[int, int, int]:
    """Returns the calls of a base model in a step, its micro-batches, and steps."""
    as_rank()
    made = model("qwen2")

    class Own(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
            return super().compute_loss(model, inputs, *more, **named)

    options = {"max_steps": 2, "eval_strategy": "no"}
    trainer = Own(
        made,
        TrainingArguments(**arguments(folder, 1, 1, **options)),
        data_collator=pad,
        train_dataset=documents(24),
    )
    calls = []
    own_layer = made.model.layers[0].forward

    def counting(*given: Any, **named: Any) -> Any:
        calls.append(1)
        return own_layer(*given, **named)

    dynamic_context_parallel(trainer, profile=PROFILE, tokens_per_rank=LONGEST)
    made.model.layers[0].forward = counting
    trainer.train()
    micro_batches = sum(len(plan.micro_batches) for plan in trainer.dynamic.plans)
    return len(calls), micro_batches, len(trainer.dynamic.plans)


def test_the_last_part_of_a_call_is_not_computed_again(workers: Workers, tmp_path: Path) -> None:
    """Its graph is the one that is kept; those before keep their inputs."""
    ((calls, micro_batches, steps),) = workers.run(recomputed, 1, tmp_path)
    assert steps == 2
    assert micro_batches >= 6
    assert calls == 2 * micro_batches - steps


@pytest.mark.parametrize(
    ("limit", "first"), [(39, 3), (79, 3), (80, 2), (119, 2), (120, 1), (199, 1), (200, 0)]
)
def test_graphs_are_kept_of_what_a_rank_holds_together(limit: int, first: int) -> None:
    """From the last micro-batch on, by the fullest of ranks: all must do the same."""
    micro_batches = [(Placement(0, first_rank=0, degree=2),)]
    for number in (1, 2, 3):
        micro_batches.append((Placement(number, first_rank=number % 2, degree=1),))
    plan = SimpleNamespace(lengths=[160, 40, 40, 40], ranks=2, micro_batches=micro_batches)
    call = PlannedCall(
        StepExchange(Planning(PROFILE, limit), AttentionOptions(torch.device("cpu")))
    )
    step: Any = SimpleNamespace(plan=plan, micro_batches=micro_batches)
    assert call._first_kept(step) == first
