"""Dynamic context parallelism in trainers of transformers and TRL: what one plain process computes,
on any number of ranks."""

import contextlib
import copy
import functools
import json
import pickle
import re
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate.state import GradientState
from accelerate.utils import DistributedDataParallelKwargs
from torch.utils.checkpoint import checkpoint
from transformers import Trainer, TrainerCallback

from longctx.errors import UserError
from longctx.trainers import TrainerError, dynamic_context_parallel, restore
from longctx.trainers.documents import Document
from longctx.trainers.dynamic import notes_on_sharding
from longctx.trainers.families import AttentionOptions, family_of_model
from longctx.trainers.fused_head import PlannedHead
from longctx.trainers.kinds import Traits
from longctx.trainers.prepared import attention_of, prepared, replaced_method
from longctx.trainers.refusals import notes_on_data
from longctx.trainers.step import Planning, StepExchange
from longctx.trainers.whole_steps import own_rows_of_last_batch
from tests.marks import slow_unless
from tests.trainer_cases import (
    DOCUMENTS,
    LONGEST,
    PROFILE,
    TOKENS_PER_RANK,
    VOCABULARY,
    Batches,
    arguments,
    as_rank,
    as_rank_alone,
    documents,
    finetune,
    model,
    pad,
    prefer,
    share,
    tokenizer,
    train,
)
from tests.workers import Workers

PLAIN: dict[str, dict[str, Any]] = {}
TOLERANCES = {
    "loss": 1e-6,
    "eval_likelihood": 1e-6,
    "eval_loss": 1e-6,
    "grad_norm": 1e-5,
    "learning_rate": 0,
    "num_tokens": 0,
    "entropy": 1e-5,
}
OF_PLANS = {"highest_degree", "split_documents", "balance"}
OF_TOKENS = ("mean_token_accuracy", "eval_mean_token_accuracy")
"""Shares of tokens whose label is the likeliest: rounding decides between two that are equally
likely."""


PROFILES = Path(__file__).resolve().parents[2] / "longctx" / "planning" / "profiles"
WRAPPED = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"]}
PREDICTING = {"predicting": True, "prediction_loss_only": False, "num_train_epochs": 1}
REENTRANT = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": True},
}
FSDP2 = {"fsdp": "full_shard auto_wrap", "fsdp_config": WRAPPED}


def plain(
    workers: Workers, folder: Path, function: Callable[..., Any], *options: Any
) -> dict[str, Any]:
    """The run of one process without longctx."""
    key = repr((function.__name__, options))
    if key not in PLAIN:
        *kind, settings = options
        (PLAIN[key],) = workers.run(function, 1, folder / "plain", *kind, 1, False, settings)
    return PLAIN[key]


def assert_equal(
    runs: list[dict[str, Any]], expected: dict[str, Any], weights: float = 1e-4
) -> None:
    """Logs and counters of the first rank, and weights of all, are those of the plain run."""
    assert len(runs[0]["log"]) == len(expected["log"]) > 4
    for ours, theirs in zip(runs[0]["log"], expected["log"], strict=True):
        assert ours.keys() - OF_PLANS == theirs.keys() - OF_PLANS
        assert not ours.keys() & OF_PLANS or 0 < ours["balance"] <= 1 <= ours[
            "highest_degree"
        ] <= max(runs[0]["degrees"])
        for name in ours.keys() & TOLERANCES.keys():
            assert ours[name] == pytest.approx(theirs[name], rel=TOLERANCES[name]), (
                name,
                ours,
                theirs,
            )
        for name in ours.keys() & set(OF_TOKENS):
            assert ours[name] == pytest.approx(theirs[name], abs=0.01)
    assert runs[0]["tokens"] == expected["tokens"]
    for run in runs:
        assert run["weights"].keys() == expected["weights"].keys()
        error = (
            sum(
                ((run["weights"][name] - weight) ** 2).sum()
                for name, weight in expected["weights"].items()
            )
            ** 0.5
        )
        norm = sum((weight**2).sum() for weight in expected["weights"].values()) ** 0.5
        assert error < weights * norm


@pytest.mark.parametrize(
    ("ranks", "accumulation"), slow_unless(lambda *case: case[0] == 3, [(1, 1), (2, 3), (3, 2)])
)
def test_trainer_computes_what_one_plain_process_computes(
    workers: Workers, tmp_path: Path, ranks: int, accumulation: int
) -> None:
    """Two epochs whose last steps are not full, and evaluations whose last batch is not."""
    runs = workers.run(train, ranks, tmp_path, "qwen2", accumulation, True, {})
    assert_equal(runs, plain(workers, tmp_path, train, "qwen2", {}))
    steps = [entry for entry in runs[0]["log"] if "loss" in entry]
    assert len(steps) == 8 and max(entry["highest_degree"] for entry in steps) == max(
        runs[0]["degrees"]
    )
    assert all((entry["highest_degree"] > 1) == (entry["split_documents"] > 0) for entry in steps)
    assert ranks == 1 or max(runs[0]["degrees"]) >= 2


LOGGED: dict[str, dict[str, Any]] = {
    "in the middle": {"logging_steps": 3, "max_steps": 5},
    "never": {"logging_steps": 500},
    "without a filter": {"logging_steps": 500, "logging_nan_inf_filter": False},
    "evaluated": {"logging_steps": 5, "eval_strategy": "steps", "eval_steps": 2},
}


@pytest.mark.parametrize(
    ("ranks", "accumulation", "case"),
    slow_unless(
        lambda *case: case == (2, 3, "in the middle"),
        [(r, a, case) for r, a in [(2, 3), (3, 2)] for case in LOGGED],
    ),
)
def test_losses_after_the_last_log_are_means_over_ranks(
    workers: Workers, tmp_path: Path, ranks: int, accumulation: int, case: str
) -> None:
    """Transformers adds up those of the first rank, which are of the part of the step that it
    holds."""
    runs = workers.run(train, ranks, tmp_path, "qwen2", accumulation, True, LOGGED[case])
    expected = plain(workers, tmp_path, train, "qwen2", LOGGED[case])
    for run in runs:
        assert run["log"][-1]["train_loss"] == pytest.approx(
            expected["log"][-1]["train_loss"], rel=1e-6
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["DPO", "KTO", "GRPO"])
def test_losses_of_sequences_after_the_last_log(
    workers: Workers, tmp_path: Path, kind: str
) -> None:
    every, never = (
        workers.run(prefer, 2, tmp_path, kind, True, {"logging_steps": steps}) for steps in (1, 500)
    )
    expected = every[0]["log"][-1]["train_loss"]
    for run in never:
        assert run["log"][-1]["train_loss"] == pytest.approx(expected, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_get_the_tokens_that_they_hold_and_no_others(workers: Workers, ranks: int) -> None:
    """Documents of one token, without a label, and longer than a rank holds; batches of different
    sizes, some of them empty."""
    random = np.random.default_rng(ranks)
    for _ in range(4):
        batches = [
            [[drawn(random) for _ in range(random.integers(0, 4))] for _ in range(2)]
            for _ in range(ranks)
        ]
        batches[0][0].append((list(range(ranks * 40)), [-100, *range(1, ranks * 40)]))
        results = workers.run(share, ranks, batches)
        assert all(same for same, _ in results)
        trained = [
            len(ids)
            for rank in batches
            for batch in rank
            for ids, labels in batch
            if set(labels[1:]) - {-100}
        ]
        assert sum(sum(sent) for _, sent in results) == sum(trained), "every token is sent once"


def test_a_step_without_a_target_has_a_micro_batch() -> None:
    """Ranks run the model and its backward, as DDP and FSDP expect, on one of its documents."""
    planning = Planning(PROFILE, tokens_per_rank=200)
    exchange = StepExchange(planning, AttentionOptions(torch.device("cpu")))
    ids = np.arange(5)
    document = Document(ids, np.full(5, -100))
    step = exchange.plan_and_exchange([[document, document], [document]])
    assert step.micro_batches[0].tokens.tolist() == ids.tolist()
    assert (step.targets, step.tokens, step.batches) == (0, 15, 2)
    assert [plan.lengths for plan in exchange.plans] == [(5,)]
    every = exchange.plan_and_exchange([[document, document], [document]], every=True)
    assert every.plan is not None and every.plan.lengths == (5, 5, 5)
    exchange.undo.close()


def drawn(random: np.random.Generator) -> tuple[list[int], list[int]]:
    """A document and its labels, of which none or some count."""
    ids = random.integers(0, 100, random.integers(1, 30)).tolist()
    return ids, [-100 if random.random() < 0.5 else token for token in ids]


@pytest.mark.parametrize("kind", ["gemma3", "gpt_oss", "mamba2", "deepseek_v3", "deepseek_v32"])
def test_windows_sinks_linear_attention_latents_and_indexers(
    workers: Workers, tmp_path: Path, kind: str
) -> None:
    options = {"num_train_epochs": 1}
    runs = workers.run(train, 2, tmp_path, kind, 1, True, options)
    assert_equal(runs, plain(workers, tmp_path, train, kind, options))
    assert max(runs[0]["degrees"]) >= 2


@pytest.mark.parametrize(("kind", "ranks"), [("roberta", 2), ("modernbert", 3)])
def test_encoders_predict_masked_tokens(
    workers: Workers, tmp_path: Path, kind: str, ranks: int
) -> None:
    """Labels in their own places, attention in both directions, positions that begin behind
    padding's, windows; predictions."""
    runs = workers.run(train, ranks, tmp_path, kind, 1, True, PREDICTING)
    expected = plain(workers, tmp_path, train, kind, PREDICTING)
    assert_equal(runs, expected)
    assert max(runs[0]["degrees"]) >= 2
    kept = expected["predictions"].label_ids != -100
    ours, theirs = (run["predictions"].predictions[kept] for run in (runs[0], expected))
    assert np.allclose(ours, theirs, rtol=0, atol=1e-5)


def test_segments_of_encoders_are_refused(tmp_path: Path) -> None:
    """Tokenizers give every token a segment: all 0 is nothing that could be lost."""

    def segments(of: int) -> Any:
        ours = trainer(tmp_path, of=model("bert"), max_steps=1)
        ours.data_collator = lambda rows: (
            (batch := pad(rows)) | {"token_type_ids": of * batch["attention_mask"]}
        )
        dynamic_context_parallel(ours, tokens_per_rank=200, profile=PROFILE)
        return ours.train()

    assert segments(0).training_loss > 1
    with pytest.raises(TrainerError, match="token_type_ids are not all 0"):
        segments(1)


def test_encoders_in_trainers_of_trl_are_refused(tmp_path: Path) -> None:
    ours = trainer(tmp_path, of=model("bert"))
    as_trl("SFTTrainer")(ours)
    with pytest.raises(TrainerError, match="SFTTrainer trains causal models, but the model is an"):
        dynamic_context_parallel(ours, tokens_per_rank=200, profile=PROFILE)


def test_models_without_a_divisor_are_refused(tmp_path: Path) -> None:
    """Their loss is a mean over the tokens of a rank; encoders have one, too, which is summed
    here."""
    for kind, refused in (("qwen2", True), ("bert", False)):
        ours = trainer(tmp_path, of=model(kind))
        ours.model_accepts_loss_kwargs = False
        traits = Traits(ours, False)
        traits.means_of_batches = False
        problems = "; ".join(family_of_model(traits).problems(traits))
        assert ("takes no num_items_in_batch: use a causal model" in problems) == refused


@pytest.mark.parametrize("sampling", ["rebalanced", "of batches"])
def test_samplers_of_batches(workers: Workers, tmp_path: Path, sampling: str) -> None:
    """Transformers' own balance of ranks, and samplers of batches without a sampler of rows."""
    options = {"sampling": sampling, "num_train_epochs": 2, "eval_strategy": "no"}
    expected = plain(workers, tmp_path, train, "qwen2", options)
    assert_equal(workers.run(train, 2, tmp_path, "qwen2", 1, True, options), expected)


def test_batches_whose_repeated_rows_cannot_be_told_are_refused() -> None:
    from accelerate.data_loader import BatchSamplerShard

    def own_rows(sampler: Any, processes: int) -> int:
        loader = torch.utils.data.DataLoader(
            range(41), batch_sampler=BatchSamplerShard(sampler, processes)
        )
        return own_rows_of_last_batch(loader, 1, 6)

    sized = Batches(41, 6)
    assert own_rows(sized, 2) == 0
    sized.batch_size = 6
    with pytest.raises(
        TrainerError,
        match=r"batches of Batches are filled.*give it an attribute `sampler`.*drop_last=True",
    ):
        own_rows(sized, 2)
    sized.drop_last = True
    assert own_rows(sized, 2) == 6


def test_a_data_set_that_is_streamed(workers: Workers, tmp_path: Path) -> None:
    """Its documents per step are those of plain training on as many ranks, also where an epoch
    ends."""
    options = {
        "streamed": True,
        "max_steps": 5,
        "eval_strategy": "no",
        "accelerator_config": {"dispatch_batches": False},
    }
    ours, theirs = (
        workers.run(train, 2, tmp_path, "qwen2", 1, dynamic, options)[0]["log"]
        for dynamic in (True, False)
    )
    for name in ("loss", "grad_norm"):
        logs = [[entry[name] for entry in log if "loss" in entry] for log in (ours, theirs)]
        assert len(logs[0]) == 5 and logs[0] == pytest.approx(logs[1], rel=1e-5)


@pytest.mark.parametrize("ranks", slow_unless(lambda ranks: ranks == 3, [2, 3]))
def test_predictions_come_back_to_the_ranks_of_their_rows(
    workers: Workers, tmp_path: Path, ranks: int
) -> None:
    """`compute_metrics` and `predict` see the logits of whole documents, those without a target
    included."""
    runs = workers.run(train, ranks, tmp_path, "qwen2", 1, True, PREDICTING)
    expected = plain(workers, tmp_path, train, "qwen2", PREDICTING)
    assert "eval_likelihood" in expected["log"][4]
    assert_equal(runs, expected)
    theirs = expected["predictions"]
    kept = np.flatnonzero(theirs.label_ids != -100)
    assert theirs.predictions.shape == (7, LONGEST, VOCABULARY) and len(kept) > 100
    for run in runs:
        predictions, label_ids, metrics = run["predictions"]
        assert np.array_equal(label_ids, theirs.label_ids)
        ours, plain_logits = (
            each.reshape(-1, VOCABULARY)[kept] for each in (predictions, theirs.predictions)
        )
        assert np.allclose(ours, plain_logits, rtol=0, atol=1e-5)
        assert metrics["test_likelihood"] == pytest.approx(
            theirs.metrics["test_likelihood"], rel=1e-6
        )


@pytest.mark.parametrize("kind", slow_unless(lambda kind: kind == "qwen2", ["qwen2", "bert"]))
def test_smoothed_labels(workers: Workers, tmp_path: Path, kind: str) -> None:
    options = {"label_smoothing_factor": 0.1, "num_train_epochs": 1}
    runs = workers.run(train, 2, tmp_path, kind, 1, True, options)
    assert_equal(runs, plain(workers, tmp_path, train, kind, options))
    assert max(runs[0]["degrees"]) >= 2


def test_fully_sharded(workers: Workers, tmp_path: Path) -> None:
    runs = workers.run(train, 2, tmp_path, "qwen2", 1, True, FSDP2)
    assert_equal(runs, plain(workers, tmp_path, train, "qwen2", {}))


SFT: dict[str, tuple[int, int, dict[str, Any]]] = {
    "adapters": (2, 1, {"lora": True, "gradient_checkpointing": True, **PREDICTING}),
    "accumulation": (2, 2, {}),
    "dora": (2, 1, {"lora": "dora"}),
    "dft": (3, 1, {"loss_type": "dft"}),
}


@pytest.mark.parametrize("case", slow_unless(lambda case: case == "adapters", SFT))
def test_sft(workers: Workers, tmp_path: Path, case: str) -> None:
    """Conversations of which only the assistant's turns have a loss; metrics of TRL and own ones
    included."""
    ranks, accumulation, options = SFT[case]
    runs = workers.run(finetune, ranks, tmp_path, accumulation, True, options)
    assert_equal(runs, plain(workers, tmp_path, finetune, options))
    assert max(runs[0]["degrees"]) >= 2


PACKING = {"padding free": {"padding_free": True}}
PACKING["bfd"] = {"packing": True, "packing_strategy": "bfd", "max_length": LONGEST + 8}


@pytest.mark.parametrize("packing", slow_unless(lambda packing: packing == "padding free", PACKING))
def test_rows_that_trl_packs_become_documents_again(
    workers: Workers, tmp_path: Path, packing: str
) -> None:
    """An epoch is one step, whose last rows repeat the first ones: without flash-attn, plain TRL
    attends across documents."""
    options = {"eval_strategy": "no", "per_device_train_batch_size": 24, "num_train_epochs": 1}
    ours, apart = (
        workers.run(finetune, 2, tmp_path, 1, True, {**options, **more})[0]
        for more in (PACKING[packing], {})
    )
    for plans in zip(ours["plans"], apart["plans"], strict=True):
        assert sorted(plans[0]) == sorted(plans[1]) and len(plans[0]) == DOCUMENTS
    for name in ("loss", "grad_norm", "num_tokens"):
        logs = [[entry[name] for entry in run["log"] if "loss" in entry] for run in (ours, apart)]
        assert logs[0] == pytest.approx(logs[1], rel=1e-6)


def test_a_run_resumes_bit_by_bit_and_on_other_ranks(workers: Workers, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 5}
    whole = workers.run(train, 2, tmp_path / "run", "qwen2", 1, True, saving)[0]
    checkpoint = tmp_path / "run" / "checkpoint-5"
    assert "longctx" not in (checkpoint / "config.json").read_text()
    shutil.copytree(checkpoint, tmp_path / "checkpoint-5")
    again = workers.run(
        train,
        2,
        tmp_path / "again",
        "qwen2",
        1,
        True,
        {**saving, "resume": str(tmp_path / "checkpoint-5")},
    )[0]
    assert all(
        torch.equal(again["weights"][name], weight) for name, weight in whole["weights"].items()
    )
    other = workers.run(
        train,
        3,
        tmp_path / "other",
        "qwen2",
        1,
        True,
        {**saving, "resume": str(tmp_path / "checkpoint-5")},
    )
    for ours, theirs in zip(other[0]["log"], whole["log"], strict=True):
        assert ours.get("loss", 0) == pytest.approx(theirs.get("loss", 0), rel=1e-6)


WHOLE_BATCHES = {"tokens_per_rank": 8 * LONGEST, "mode": "static", "degree": 2}
"""A budget with which a call is one micro-batch, whose graph is kept; otherwise there are several,
which are recomputed."""

MIXTURE = {"kind": "qwen3_moe"}
SEQUENCES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "dpo": ("DPO", 3, {}),
    "dpo apart": (
        "DPO",
        2,
        {"budget": {"tokens_per_rank": TOKENS_PER_RANK, "merge_prefixes": False}},
    ),
    "dpo with adapters": ("DPO", 2, {"budget": WHOLE_BATCHES, "lora": True}),
    "dpo fully sharded": ("DPO", 2, FSDP2),
    "dpo with the reference first": (
        "DPO",
        1,
        {"budget": {"tokens_per_rank": 200}, "precompute_ref_log_probs": True},
    ),
    "kto": ("KTO", 2, {}),
    "grpo with kl": ("GRPO", 2, {"beta": 0.04}),
    "grpo on two": ("GRPO", 2, {"budget": WHOLE_BATCHES}),
    "rloo": ("RLOO", 2, {"num_iterations": 2, "num_generations": 4, "steps_per_generation": 2}),
    "dpo of a mixture": ("DPO", 2, MIXTURE),
    "dpo of a mixture with a config that asks alone": (
        "DPO",
        2,
        {**MIXTURE, "asks": True, "router_aux_loss_coef": 0.0},
    ),
    "kto of a mixture": ("KTO", 2, MIXTURE),
    "grpo of a mixture": ("GRPO", 2, {**MIXTURE, "gradient_accumulation_steps": 2, "beta": 0.04}),
    "rloo of a mixture": ("RLOO", 2, MIXTURE),
    "grpo with an engine": ("GRPO", 2, {"use_vllm": True, "lora": True}),
    "grpo of an agent": ("GRPO", 2, {"agent": True, "beta": 0.04}),
    "grpo of an agent with an engine": ("GRPO", 2, {"agent": True, "use_vllm": True}),
    "grpo of an agent, fully sharded": ("GRPO", 2, {"agent": True, **FSDP2}),
    "rloo with an engine": ("RLOO", 2, {"use_vllm": True, "beta": 0.04}),
    "gmpo": ("GMPO", 2, {"beta": 0.04, "num_iterations": 2}),
}
SEQUENCES |= {
    f"{kind} {name}={value}": (kind, 2, {name: value})
    for kind, name, values in [
        (
            "DPO",
            "loss_type",
            [["ipo"], ["bco_pair"], ["aot"], ["discopop"], ["sigmoid_norm"], ["sigmoid", "sft"]],
        ),
        ("DPO", "ld_alpha", [0.5]),
        ("KTO", "loss_type", ["apo_zero_unpaired"]),
        ("GRPO", "loss_type", ["grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"]),
        ("GRPO", "importance_sampling_level", ["sequence"]),
        ("GRPO", "top_entropy_quantile", [0.5]),
        ("RLOO", "normalize_advantages", [True]),
    ]
    for value in values
}
QUICK = (
    "dpo of a mixture",
    "dpo with adapters",
    "dpo with the reference first",
    "kto",
    "grpo on two",
)


@pytest.mark.parametrize("case", slow_unless(lambda case: case in QUICK, SEQUENCES))
def test_trainers_that_need_sequences(workers: Workers, tmp_path: Path, case: str) -> None:
    """The same rows of every rank, completions included, as in plain training on as many ranks."""
    kind, ranks, options = SEQUENCES[case]
    plain_options = {
        name: value for name, value in options.items() if name not in ("budget", *FSDP2)
    }
    theirs = workers.run(prefer, ranks, tmp_path / "plain", kind, False, plain_options)
    ours = workers.run(prefer, ranks, tmp_path / "ours", kind, True, options)
    assert max(ours[0]["degrees"]) >= min(ranks, 2)
    merges = options.get("budget", {}).get("merge_prefixes", True)
    assert all(("tokens_after_merging" in entry) == merges for entry in ours[0]["log"][:-1])
    if kind in ("DPO", "GRPO", "RLOO", "GMPO") and merges:
        assert (
            ours[0]["trees"] > 0
            and min(entry["tokens_after_merging"] for entry in ours[0]["log"][:-1]) < 0.9
        )
    for run, expected in zip(ours, theirs, strict=True):
        for mine, plain_entry in zip(run["log"][:-1], expected["log"][:-1], strict=True):
            assert mine.keys() - {"tokens_after_merging"} == plain_entry.keys()
            for name in (
                name for name in plain_entry if not name.endswith(("time", "per_second", "flos"))
            ):
                assert mine[name] == pytest.approx(plain_entry[name], rel=1e-5, abs=1e-6), name
        assert all(
            torch.allclose(run["weights"][name], each, rtol=0, atol=1e-6)
            for name, each in expected["weights"].items()
        )
    balanced = "kind" in options and options.get("router_aux_loss_coef", 0.5) > 0
    assert balanced == (ours[0]["log"][0].get("aux_loss", 0) > 1)
    first = dict(model(options.get("kind", "qwen2")).named_parameters())
    assert "lora" in options or any(
        not torch.equal(each, first[name]) for name, each in ours[0]["weights"].items()
    )


def test_ranks_stay_alike_after_an_evaluation_before_training(
    workers: Workers, tmp_path: Path
) -> None:
    """Transformers alone would leave DDP out, and each rank would train by itself."""
    first, second = workers.run(prefer, 2, tmp_path, "GRPO", True, {"evaluating": True})
    assert all(
        torch.equal(second["weights"][name], weight) for name, weight in first["weights"].items()
    )


# --- one process, without a group


def trainer(
    folder: Path, of: Any = None, data: Any = None, kind: Any = None, **options: Any
) -> Any:
    from transformers import Trainer, TrainingArguments

    as_rank_alone()
    given = TrainingArguments(**arguments(folder, 1, 1, **{"eval_strategy": "no", **options}))
    return (kind or Trainer)(
        of or model(), given, data_collator=pad, train_dataset=data or documents()
    )


def test_restored_it_is_as_before(tmp_path: Path) -> None:
    ours = trainer(tmp_path, max_steps=1, prediction_loss_only=False)
    kind, attention = type(ours), ours.model.config._attn_implementation
    dynamic_context_parallel(ours, tokens_per_rank=200, profile=PROFILE)
    ours.train()
    ids = torch.tensor([[3, 4, 5]])
    generated = ours.model.generate(ids, max_new_tokens=4, do_sample=False)
    with pytest.raises(TrainerError, match="already has dynamic context parallelism"):
        dynamic_context_parallel(ours, tokens_per_rank=200, profile=PROFILE)
    ours.data_collator.collate = lambda rows: {
        name: each for name, each in pad(rows).items() if name != "labels"
    }
    unlabelled = ours.predict(documents(3))
    assert unlabelled.predictions.shape == (3, LONGEST, VOCABULARY) and unlabelled.label_ids is None
    ours.save_model(str(tmp_path / "saved"))
    assert "longctx" not in json.dumps(json.loads((tmp_path / "saved" / "config.json").read_text()))
    restore(ours)
    assert type(ours) is kind and ours.model.config._attn_implementation == attention
    assert torch.equal(ours.model.generate(ids, max_new_tokens=4, do_sample=False), generated)
    assert ours.model(ids).logits.shape == (1, 3, 128)
    restore(ours)  # does nothing


def left_on(ours: Any) -> dict[str, Any]:
    """Returns what is set on a trainer, and the functions that are set on its parts and on its
    model, all by name."""
    owners = {"accelerator": ours.accelerator, **dict(ours.model.named_modules(prefix="model"))}
    functions = {
        f"{name}.{key}": getattr(value, "__qualname__", "")
        for name, owner in owners.items()
        for key, value in vars(owner).items()
        if callable(value)
    }
    names = {name: type(value).__name__ for name, value in vars(ours).items()}
    return {
        "class": type(ours).__qualname__,
        "names": names,
        "functions": functions,
        "attention": attention_of(ours.model),
    }


def restored(
    folder: Path, kind: str, head: str, options: dict[str, Any], rounds: int
) -> tuple[list[float], dict[str, Any]]:
    """Trains so often with dynamic context parallelism, which fails in the middle of the second
    training, and is restored each time. Returns the losses of a plain training after that, from the
    first weights, and what is left on the trainer.
    """
    from transformers import Trainer, TrainingArguments

    from tests.trainers.test_whole_outputs import collate, labelled, with_head

    ranks, number = as_rank(), 0
    rows = labelled(documents(), head) if head else documents()

    def collated(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        if number == 1 and any(row is rows[20] for row in batch):
            raise KeyError("text")
        return collate(batch) if head else pad(batch)

    made = with_head(f"{kind} {head}") if head else model(kind)
    args = arguments(folder, ranks, 1, eval_strategy="no", num_train_epochs=1, **options)
    ours, begin = (
        Trainer(made, TrainingArguments(**args), collated, rows),
        copy.deepcopy(made.state_dict()),
    )
    for number in range(rounds):
        dynamic_context_parallel(ours, profile=PROFILE, tokens_per_rank=200)
        with (
            pytest.raises((KeyError, TrainerError), match="text")
            if number == 1
            else contextlib.nullcontext()
        ):
            ours.train()
        restore(ours)
    number = rounds
    if not rounds:
        ours.train()
    made.load_state_dict(begin)
    ours.optimizer = ours.lr_scheduler = None
    torch.manual_seed(0)
    ours.train()
    return [entry["loss"] for entry in ours.state.log_history if "loss" in entry], left_on(ours)


RESTORED: dict[str, tuple[int, str, str, dict[str, Any]]] = {
    "steps": (1, "qwen2", "", {}),
    "autocast": (1, "qwen2", "", {"bf16": True}),
    "rows": (1, "qwen2", "SequenceClassification", {}),
    "answers": (1, "roberta", "QuestionAnswering", {}),
    "router": (1, "qwen3_moe", "", {"bf16": True}),
    "linear attention": (1, "mamba2", "", {}),
    "recomputed": (1, "deepseek_v3", "", {"gradient_checkpointing": True}),
    "indexers": (1, "deepseek_v32", "", {"gradient_checkpointing": True}),
    "noise": (1, "qwen2", "", {"neftune_noise_alpha": 5.0}),
    "encoder": (2, "bert", "", {}),
    "two ranks": (2, "qwen2", "", {"bf16": True}),
    "rows on three": (3, "qwen2", "TokenClassification", {}),
}


@pytest.mark.parametrize("case", slow_unless(lambda case: case == "autocast", RESTORED))
def test_it_is_restored_any_number_of_times(workers: Workers, tmp_path: Path, case: str) -> None:
    """Also after an error in the middle; nothing is left, and autocast, which accelerate puts
    around the model, stays."""
    ranks, *kind = RESTORED[case]
    expected = workers.run(restored, ranks, tmp_path, *kind, 0)
    for ours, plain in zip(workers.run(restored, ranks, tmp_path, *kind, 3), expected, strict=True):
        assert len(plain[0]) == 4 and ours == plain


def test_a_restored_trainer_is_pickled(tmp_path: Path) -> None:
    """As a plain one before it has trained: accelerate keeps references to loaders that cannot be
    pickled."""
    GradientState._reset_state()
    ours = trainer(tmp_path)
    dynamic_context_parallel(ours, tokens_per_rank=200, profile=PROFILE)
    restore(ours)
    assert type(pickle.loads(pickle.dumps(ours))) is type(ours)


def test_training_ends_when_the_step_after_the_last_one_is_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks may wait for it; and a second training begins with a step of its own."""
    ours = trainer(tmp_path, max_steps=1)
    plan_and_exchange = StepExchange.plan_and_exchange

    def slow(*given: Any, **named: Any) -> Any:
        time.sleep(1)
        return plan_and_exchange(*given, **named)

    monkeypatch.setattr(StepExchange, "plan_and_exchange", slow)
    dynamic_context_parallel(ours, tokens_per_rank=200, profile=PROFILE)
    for _ in range(2):
        ours.train()
        assert ours._next.step.done()


def groups_made(folder: Path) -> list[int]:
    """Returns the number of process groups with a trainer attached, and after it was restored."""
    from transformers import Trainer, TrainingArguments

    as_rank()
    ours = Trainer(
        model(), TrainingArguments(**arguments(folder, 2, 1, eval_strategy="no")), pad, documents()
    )

    def count() -> int:
        return len(dist.distributed_c10d._world.pg_map)

    before = count()
    dynamic_context_parallel(ours, tokens_per_rank=TOKENS_PER_RANK, profile=PROFILE)
    attached = count()
    restore(ours)
    return [attached - before, count() - before]


def errors_printed(folder: Path, compiled: list[bool], count: int, *given: dict[str, Any]) -> str:
    """Returns what this rank prints of the error that it raises, if it is told to compile, has so
    many documents, or is given this in the place of a profile."""
    import io
    import sys

    from transformers import Trainer, TrainingArguments

    as_rank()
    args = TrainingArguments(
        **arguments(folder, 2, 1, eval_strategy="no"), torch_compile=compiled[dist.get_rank()]
    )
    ours, before = Trainer(model(), args, pad, documents()), sys.excepthook
    at = (
        contextlib.chdir(folder / f"of-rank-{dist.get_rank()}")
        if given
        else contextlib.nullcontext()
    )
    with contextlib.redirect_stderr(io.StringIO()) as printed, at:
        try:
            own = given[dist.get_rank()] if given else {"profile": PROFILE}
            dynamic_context_parallel(ours, **{"tokens_per_rank": count} | own)
            ours.train()
        except UserError as error:
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            sys.excepthook = before
            restore(ours)
    return "".join(line for line in printed.getvalue().splitlines() if "error" in line.lower())


def error_of_data(folder: Path, where: str, loss: Any, evaluates: bool) -> tuple[str, str]:
    """Returns what this rank raises and prints, if data of rank 1 alone cannot be read in the
    second step or evaluation."""
    import io
    import sys

    from transformers import Trainer, TrainingArguments

    as_rank()
    data, calls = documents(), []

    def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        calls.append(1)
        if where == "collator" and dist.get_rank() == 1 and len(calls) == 2:
            raise KeyError("text")
        batch = pad(rows)
        if where == "batch" and dist.get_rank() == 1 and len(calls) == 2:
            batch["attention_mask"][:, 1] = 0
        return batch

    class Data(list[Any]):
        def __getitem__(self, number: Any) -> Any:
            calls.append(1)
            if dist.get_rank() == 1 and len(calls) > 8:
                raise KeyError("text")
            return super().__getitem__(number)

    args = TrainingArguments(**arguments(folder, 2, 1, eval_strategy="no"))
    data = Data(data) if where == "data set" else data
    ours, before = (
        Trainer(model(), args, collate, data, data, compute_loss_func=loss),
        sys.excepthook,
    )
    dynamic_context_parallel(ours, tokens_per_rank=64, profile=PROFILE)
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        try:
            ours.evaluate() if evaluates else ours.train()
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)
            return f"{type(error).__name__}: {error}", printed.getvalue()
        finally:
            sys.excepthook = before
            restore(ours)
    return "", printed.getvalue()


def first_logits(
    outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None
) -> torch.Tensor:
    return outputs.logits[:, 0].sum()


@pytest.mark.parametrize("evaluates", [False, True], ids=["training", "evaluation"])
@pytest.mark.parametrize(
    ("where", "loss"),
    [
        ("collator", None),
        ("data set", None),
        ("batch", None),
        ("collator", first_logits),
        ("batch", first_logits),
    ],
)
def test_data_that_one_rank_cannot_read_end_all(
    workers: Workers, tmp_path: Path, where: str, loss: Any, evaluates: bool
) -> None:
    """Others would wait for it; its own traceback is all that is printed, or the text of what is
    refused."""
    (told, silent), (own, printed) = workers.run(error_of_data, 2, tmp_path, where, loss, evaluates)
    assert (
        told == f"TrainerError: rank 1 cannot train: {own.removeprefix('TrainerError: ')}"
        and silent == ""
    )
    if where == "batch":
        assert (
            printed == f"error: {own.removeprefix('TrainerError: ')}\n"
            and "leaves out tokens between others" in own
        )
    else:
        assert (
            own == "KeyError: 'text'"
            and printed.count("Traceback") == 1
            and printed.endswith("KeyError: 'text'\n")
        )


@pytest.mark.parametrize(
    ("compiled", "tokens", "expected"),
    [
        ([True, True], 64, [r"error: .*torch_compile is True", "$"]),
        ([False, True], 64, ["$", r"error: .*torch_compile is True"]),
        ([False, False], 30, [r"error: .*shorten the documents", "$"]),
    ],
    ids=["both", "one", "in training"],
)
def test_one_rank_prints_an_error_and_all_end(
    workers: Workers, tmp_path: Path, compiled: list[bool], tokens: int, expected: list[str]
) -> None:
    printed = workers.run(errors_printed, 2, tmp_path, compiled, tokens)
    assert all(re.match(pattern, text) for pattern, text in zip(expected, printed, strict=True)), (
        printed
    )


def test_arguments_that_one_rank_cannot_use_end_all(workers: Workers, tmp_path: Path) -> None:
    """A profile that is missing on one machine, or another one there, and other arguments on
    one."""
    for rank in range(2):
        (tmp_path / f"of-rank-{rank}").mkdir()
    (tmp_path / "of-rank-0" / "mine.yaml").write_text((PROFILES / "cpu-2core.yaml").read_text())
    printed = workers.run(
        errors_printed,
        2,
        tmp_path,
        [False, False],
        64,
        *[{"profile": "mine.yaml", "tokens_per_rank": None}] * 2,
    )
    assert printed[0] == "" and re.match("error: .*mine.yaml", printed[1]), printed
    (tmp_path / "of-rank-1" / "mine.yaml").write_text((PROFILES / "h100-pcie.yaml").read_text())
    printed = workers.run(
        errors_printed, 2, tmp_path, [False, False], 64, *[{"profile": "mine.yaml"}] * 2
    )
    assert printed[1] == "" and re.match("error: ranks have different profiles", printed[0]), (
        printed
    )
    printed = workers.run(
        errors_printed, 2, tmp_path, [False, False], 64, {"mode": "static"}, {"mode": "auto"}
    )
    assert printed == [
        "error: mode is 'auto' on one rank and 'static' on another: give all ranks the same",
        "",
    ]


def test_process_groups_end_when_a_trainer_is_restored(workers: Workers, tmp_path: Path) -> None:
    assert workers.run(groups_made, 2, tmp_path) == [[2, 0]] * 2


@pytest.mark.parametrize("kind", ["qwen2", "bert", "mamba2", "deepseek_v32"])
def test_calls_without_a_layout_copies_and_pickles_are_plain(tmp_path: Path, kind: str) -> None:
    """In callbacks, averages of weights, reference models, `torch.save(model)`; before and after
    training."""
    plain, ids = model(kind), torch.tensor([[3, 4, 5, 9], [7, 7, 1, 2]])
    mask, labels = (
        torch.tensor([[1] * 4, [1, 1, 0, 0]]),
        torch.tensor([[3, 4, -100, 9], [7, 7, -100, -100]]),
    )
    ours = trainer(tmp_path, of=model(kind), max_steps=1)
    dynamic_context_parallel(ours, tokens_per_rank=200, profile=PROFILE)

    class Calling(TrainerCallback):
        def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
            self.model, self.found = (
                copy.deepcopy(model),
                model(ids, attention_mask=mask, labels=labels),
            )

    ours.add_callback(calling := Calling())
    ours.train()
    plain.load_state_dict(ours.model.state_dict())
    expected = plain(ids, attention_mask=mask, labels=labels)
    assert torch.equal(calling.found.logits, expected.logits) and torch.equal(
        calling.found.loss, expected.loss
    )
    torch.save(ours.model, tmp_path / "model.pt")
    # It loads where longctx is not installed, but for linear attention, whose layers are replaced.
    assert kind == "mamba2" or b"longctx." not in (tmp_path / "model.pt").read_bytes()
    copies = (
        calling.model,
        copy.deepcopy(ours.model),
        torch.load(tmp_path / "model.pt", weights_only=False),
    )
    torch.nn.init.zeros_(next(ours.model.parameters()))  # copies have weights of their own
    for each in copies:
        assert torch.equal(each(ids, attention_mask=mask).logits, expected.logits)
        assert each.config._attn_implementation == plain.config._attn_implementation
        if kind == "qwen2":
            assert torch.equal(
                each.generate(ids, max_new_tokens=3), plain.generate(ids, max_new_tokens=3)
            )


def test_copies_of_a_model_with_the_head_of_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    """All values of a call travel in one exchange."""
    from trl.trainer.utils import add_fused_lm_head

    ids, ours, plain = torch.tensor([[3, 4, 5, 9], [7, 7, 1, 2]]), model(), model()
    for each in (ours, plain):
        add_fused_lm_head(each, outputs=("log_probs", "entropy"))
    planning = Planning(PROFILE, tokens_per_rank=200)
    head = PlannedHead(StepExchange(planning, AttentionOptions(torch.device("cpu"))))
    exchanged: list[int] = []
    to_owners = StepExchange.to_owners

    def counting(*given: Any, **named: Any) -> torch.Tensor:
        exchanged.append(1)
        return to_owners(*given, **named)

    monkeypatch.setattr(StepExchange, "to_owners", counting)
    with prepared(ours), replaced_method(ours, "forward", head):
        copied, named = (
            copy.deepcopy(ours),
            {"input_ids": ids, "labels": ids, "fused_lm_head": True},
        )
        first = (output := ours(**named)).log_probs
        assert len(exchanged) == 1 and first.is_contiguous(), (
            "fields of other calls must not change how it is summed"
        )
        torch.testing.assert_close(output.entropy, plain(**named).entropy)
        torch.testing.assert_close(first, plain(**named).log_probs)
        for each in (copied, plain):
            torch.nn.init.ones_(next(each.parameters()))
        assert torch.equal(copied(**named).log_probs, plain(**named).log_probs)
        assert torch.equal(copied(ids).logits, plain(ids).logits)
        assert torch.equal(
            copied.generate(ids, max_new_tokens=3), plain.generate(ids, max_new_tokens=3)
        )
        assert torch.equal(ours(**named).log_probs, first)
        # The padding of a row has no value, so its label is no label.
        mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
        assert torch.equal(ours(**named, attention_mask=mask).label_mask, mask[:, 1:].bool())


def test_plans_are_made_by_constants_scaled_to_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = trainer(tmp_path)
    dynamic_context_parallel(ours, tokens_per_rank=200)
    profile = ours.dynamic.planning.profile
    assert profile.kv_bytes_per_token == 3 * 2 * 2 * 2 * 8 * 4, (
        "passes, layers, K and V, heads, size, float32"
    )
    assert profile.query_share == 0 and profile.exchange_levels == 2, (
        "as transformers' own code and its exchange are"
    )
    printed = capsys.readouterr().out
    assert "profile cpu-2core" in printed and "scaled to this run" in printed
    assert (
        "a document is split over 1 rank, of 200 tokens each\nattention on cpu in float32: cpu\n"
        in printed
    )


def test_tokens_per_rank_are_those_that_memory_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def default(available: int, **options: Any) -> int:
        monkeypatch.setattr(
            "longctx.trainers.budget.available_bytes", lambda device, ranks: available
        )
        ours = trainer(tmp_path, **options)
        dynamic_context_parallel(ours, profile=PROFILE)
        tokens: int = ours.dynamic.planning.tokens_per_rank
        restore(ours)
        return tokens

    small, large, recomputed = (
        default(2**28),
        default(2**30),
        default(2**28, gradient_checkpointing=True),
    )
    assert 1024 <= small < recomputed < large / 2 and small % 1024 == 0
    with pytest.raises(
        TrainerError, match=r"1,024 tokens per rank need .* by estimate.*or give tokens_per_rank"
    ):
        default(2**20)


def with_attention_dropout() -> Any:
    made = model()
    made.config.attention_dropout = 0.1
    return made


@pytest.mark.parametrize(
    ("of", "options", "message"),
    [
        (
            with_attention_dropout,
            {},
            r"attention_dropout is 0.1 in the model's config, which no kernel.*set it to 0",
        ),
        (
            model,
            {"accelerator_config": {"even_batches": False}},
            "even_batches is False.*set it to True",
        ),
        (
            model,
            {"accelerator_config": {"dispatch_batches": True}},
            "dispatch_batches is True.*omit it",
        ),
        (model, {"torch_compile": True}, "torch_compile is True"),
    ],
)
def test_what_cannot_be_exact_is_refused(
    tmp_path: Path, of: Callable[[], Any], options: dict[str, Any], message: str
) -> None:
    ours = trainer(tmp_path, of=of(), **options)
    attention = ours.model.config._attn_implementation
    with pytest.raises(TrainerError, match=message):
        dynamic_context_parallel(ours, tokens_per_rank=200, profile=PROFILE)
    assert ours.model.config._attn_implementation == attention


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "Trainer",
            REENTRANT | {"ddp_find_unused_parameters": True},
            "use_reentrant is True, with which DDP sees weights",
        ),
        ("Trainer", {"ddp_static_graph": True}, "ddp_static_graph is True.*omit it"),
        ("RewardTrainer", REENTRANT, "use_reentrant is True.*use_reentrant': False"),
        ("DPOTrainer", REENTRANT, "use_reentrant is True.*use_reentrant': False"),
    ],
)
def test_settings_that_ddp_does_not_bear_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    options: dict[str, Any],
    message: str,
) -> None:
    ours = trainer(tmp_path, **options)
    if name != "Trainer":
        as_trl(name)(ours)
    elif "ddp_find_unused_parameters" in options:
        ours.accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=True)
    monkeypatch.setattr(type(ours.args), "world_size", 2)
    with pytest.raises(TrainerError, match=message):
        dynamic_context_parallel(ours, tokens_per_rank=200, profile=PROFILE)


def recomputing(function: Any) -> Any:
    """A model that calls this function for the layers that it computes again."""
    made = model()
    made._set_gradient_checkpointing(gradient_checkpointing_func=function)
    return made


@functools.wraps(partial(checkpoint, use_reentrant=True), assigned=())
def watched(*given: Any, **named: Any) -> Any:
    """As tools that look at what is computed again."""
    return checkpoint(*given, use_reentrant=True, **named)


@pytest.mark.parametrize(
    ("function", "options", "refused"),
    [
        (partial(checkpoint, use_reentrant=True), {}, True),
        (partial(checkpoint, preserve_rng_state=True), {}, True),
        (checkpoint, {}, True),
        (watched, {}, True),
        (partial(checkpoint, use_reentrant=False), {}, False),
        (partial(checkpoint, use_reentrant=True), {"gradient_checkpointing": True}, False),
        (
            None,
            {
                "gradient_checkpointing": True,
                "gradient_checkpointing_kwargs": {"preserve_rng_state": True},
            },
            True,
        ),
        (
            None,
            {
                "gradient_checkpointing": True,
                "gradient_checkpointing_kwargs": {"every_n_layers": 2},
            },
            False,
        ),
    ],
    ids=[
        "model",
        "default",
        "bare",
        "watched",
        "not reentrant",
        "arguments come later",
        "default of arguments",
        "layers",
    ],
)
def test_reentrant_recomputation_is_found_wherever_it_is_set(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    function: Any,
    options: dict[str, Any],
    refused: bool,
) -> None:
    """DDP would end with `mark a variable ready only once`."""
    ours = trainer(tmp_path, of=model() if function is None else recomputing(function), **options)
    as_trl("DPOTrainer")(ours)
    traits = Traits(ours, False)
    assert traits.recomputes and traits.reentrant == refused
    monkeypatch.setattr(type(ours.args), "world_size", 2)
    message = "use_reentrant is True, with which DDP takes one call" if refused else "^$"
    if refused:
        with pytest.raises(TrainerError, match=message):
            dynamic_context_parallel(ours, tokens_per_rank=200, profile=PROFILE)


def test_a_trainer_that_asks_for_means_of_batches_gets_those_of_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As Axolotl's, and one that says that its loss is to be divided by the number of batches."""
    from transformers import Trainer

    class Means(Trainer):
        loss_is_scaled_for_ga = False

        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            self.model_accepts_loss_kwargs = False

    plain, ours = (
        trainer(tmp_path, max_steps=2),
        trainer(tmp_path, kind=Means, max_steps=2, gradient_accumulation_steps=3),
    )
    ours._train_batch_size = ours.args.per_device_train_batch_size = 4
    dynamic_context_parallel(ours, tokens_per_rank=200, profile=PROFILE)
    assert (
        "mean over the tokens of a step; that of Means would be a mean of means of batches"
        in capsys.readouterr().out
    )
    assert ours.train().training_loss == pytest.approx(plain.train().training_loss, rel=1e-6)
    restore(ours)
    assert not ours.model_accepts_loss_kwargs and not ours.loss_is_scaled_for_ga


def test_devices_without_kernels_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of transformers' choice on a laptop."""
    ours = trainer(tmp_path)
    monkeypatch.setattr(type(ours.args), "device", torch.device("mps"))
    with pytest.raises(
        TrainerError,
        match="the trainer is on mps, for which there are no kernels: set use_cpu=True",
    ):
        dynamic_context_parallel(ours, tokens_per_rank=200, profile=PROFILE)


OF_TRL = {"__module__": "trl.experimental.tpo"}


def as_trl(name: str) -> Callable[[Any], None]:
    """Makes a trainer one of TRL's, by its class alone."""

    def change(ours: Any) -> None:
        import trl

        module = f"trl.trainer.{name.removesuffix('Trainer').lower()}_trainer"
        ours.__class__ = type(name, (getattr(trl, name),), {"__module__": module})

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ours: setattr(ours.args, "use_liger_kernel", True), "use_liger_kernel is True"),
        (
            lambda ours: setattr(ours.args, "_n_gpu", 2),
            "one process uses 2 GPUs: start a process per GPU",
        ),
        (
            lambda ours: setattr(ours, "is_deepspeed_enabled", True),
            "DeepSpeed is not supported: use FSDP2 or DDP",
        ),
        (lambda ours: setattr(ours, "get_cp_size", lambda: 2), "cp_size is 2: leave it at 1"),
        (lambda ours: setattr(ours, "get_sp_size", lambda: 4), "sp_size is 4: leave it at 1"),
        (lambda ours: setattr(ours, "get_tp_size", lambda: 8), "tp_size is 8: leave it at 1"),
        (
            lambda ours: setattr(ours, "model_init", model),
            "model_init builds another model.*pass model=model_init",
        ),
        (
            lambda ours: setattr(ours, "__class__", type("TPOTrainer", (Trainer,), OF_TRL)),
            "TPOTrainer is not supported: use transformers.Trainer, SFTTrainer",
        ),
        (
            lambda ours: (
                as_trl("SFTTrainer")(ours),
                setattr(ours.args, "label_smoothing_factor", 0.1),
            ),
            "label_smoothing_factor is 0.1, which is not supported: omit it",
        ),
    ],
    ids=[
        "liger",
        "DataParallel",
        "DeepSpeed",
        "cp",
        "sp",
        "tp",
        "model_init",
        "other of TRL",
        "smoothing in TRL",
    ],
)
def test_settings_that_are_refused(
    tmp_path: Path, change: Callable[[Any], None], message: str
) -> None:
    ours = trainer(tmp_path)
    change(ours)
    with pytest.raises(TrainerError, match=message):
        dynamic_context_parallel(ours, tokens_per_rank=200, profile=PROFILE)


def test_processes_that_would_each_train_alone_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CPUs, transformers ignores what torchrun has started unless `use_cpu` is set, and says
    nothing."""
    ours = trainer(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        TrainerError,
        match=r"2 processes were started, but the trainer sees 1, so each.*set use_cpu=True in "
        r"Training",
    ):
        dynamic_context_parallel(ours, tokens_per_rank=200, profile=PROFILE)


def test_prompt_learning_is_refused(tmp_path: Path) -> None:
    import peft

    tuned = peft.get_peft_model(
        model(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    )
    with pytest.raises(
        TrainerError,
        match="PROMPT_TUNING adds virtual tokens to every document: use adapters of matrices",
    ):
        dynamic_context_parallel(trainer(tmp_path, of=tuned), tokens_per_rank=200, profile=PROFILE)


def test_losses_of_subclasses_that_are_sums_over_tokens(tmp_path: Path) -> None:
    from transformers import Trainer

    class Own(Trainer):
        def compute_loss(self, *given: Any, **named: Any) -> Any:
            return super().compute_loss(*given, **named)

    own = trainer(tmp_path, kind=Own)
    dynamic_context_parallel(own, tokens_per_rank=200, profile=PROFILE)
    assert hasattr(own, "outputs"), "whole rows suit any loss"
    restore(own)
    dynamic_context_parallel(
        own, tokens_per_rank=200, profile=PROFILE, own_loss_is_a_token_sum=True
    )
    assert not hasattr(own, "outputs")
    restore(own)
    as_trl("SFTTrainer")(own)
    own.compute_loss_func = lambda *given, **named: 0
    with pytest.raises(
        TrainerError,
        match=r"compute_loss_func sees only this rank's tokens: omit it, or use transformers.Tra",
    ):
        dynamic_context_parallel(own, tokens_per_rank=200, profile=PROFILE)
    with pytest.raises(UserError, match="mode is 'dynamic': must be one of"):
        dynamic_context_parallel(trainer(tmp_path), tokens_per_rank=200, mode="dynamic")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *(
            (
                name,
                f"Own.{name} would not be called for the batches of the data collator: edit them "
                "there",
            )
            for name in (
                "prediction_step",
                "get_batch_samples",
                "_prepare_inputs",
                "_get_num_items_in_batch",
                "_rows",
            )
        ),
    ],
)
def test_methods_that_would_be_hidden_are_refused(tmp_path: Path, name: str, message: str) -> None:
    from transformers import Trainer

    own = type("Own", (Trainer,), {name: lambda *given, **named: None})
    with pytest.raises(TrainerError, match=message):
        dynamic_context_parallel(trainer(tmp_path, kind=own), tokens_per_rank=200, profile=PROFILE)
    ours = trainer(tmp_path)
    setattr(ours, name, lambda *given, **named: None)
    with pytest.raises(
        TrainerError, match=f"{name} is set on the trainer itself.*define it in a subclass"
    ):
        dynamic_context_parallel(ours, tokens_per_rank=200, profile=PROFILE)


def test_documents_that_do_not_fit_are_refused_before_the_first_step(tmp_path: Path) -> None:
    import datasets

    ours = trainer(tmp_path, data=datasets.Dataset.from_list(documents()))
    with pytest.raises(
        TrainerError,
        match=f"train_dataset has a document of {LONGEST} tokens, but 1 ranks hold "
        f"{TOKENS_PER_RANK}",
    ):
        dynamic_context_parallel(ours, tokens_per_rank=TOKENS_PER_RANK, profile=PROFILE)
    packed = {"input_ids": [[1] * 150], "labels": [[1] * 150], "seq_lengths": [[60, 40, 50]]}
    dynamic_context_parallel(
        trainer(tmp_path, data=datasets.Dataset.from_dict(packed)),
        tokens_per_rank=60,
        profile=PROFILE,
    )
    streamed = trainer(tmp_path)
    dynamic_context_parallel(streamed, tokens_per_rank=TOKENS_PER_RANK, profile=PROFILE)
    with pytest.raises(
        TrainerError, match=r"has 90 tokens.*shorten the documents, as max_length does"
    ):
        streamed.train()


class Unbuilt(Trainer):
    def __init__(self) -> None:
        """Forgets to call that of `Trainer`."""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "trainer is an object of NoneType: give the transformers.Trainer"),
        (Trainer, "trainer is the class Trainer: give the transformers.Trainer"),
        ({}, "trainer is an object of dict"),
        (torch.nn.Linear(2, 2), r"trainer is an object of Linear.*own calls prepare\(model\)"),
        (
            Unbuilt(),
            "trainer is an object of Unbuilt without args: its __init__ must call that of Trainer "
            "first",
        ),
    ],
)
def test_what_is_no_trainer_is_refused(given: Any, message: str) -> None:
    with pytest.raises(TrainerError, match=message):
        dynamic_context_parallel(given)


def not_of_tokens() -> Any:
    import transformers

    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=16)
    return transformers.ViTForImageClassification(config)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: torch.nn.Sequential(torch.nn.Embedding(8, 8)),
            "model of Trainer is a Sequential, no PreTrainedModel",
        ),
        (
            not_of_tokens,
            "ViTForImageClassification has no embedding of tokens and blocks of attention",
        ),
        (lambda: model().model, "Qwen2Model has no head, and so no loss"),
    ],
    ids=["as that of sentence-transformers", "images", "bare"],
)
def test_models_without_tokens_or_a_loss_are_refused(
    tmp_path: Path, make: Callable[[], Any], message: str
) -> None:
    with pytest.raises(TrainerError, match=message):
        dynamic_context_parallel(trainer(tmp_path, of=make()), tokens_per_rank=200, profile=PROFILE)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tokens_per_rank", 0, "tokens_per_rank is 0: must be a whole number"),
        ("profile", {}, r"profile is \{\}: must be a HardwareProfile"),
        ("profile", "", "profile is '': must be a HardwareProfile"),
        ("profile", 3, "profile is 3: must be a HardwareProfile"),
        ("merge_prefixes", "no", "merge_prefixes is 'no': must be True or False"),
        ("own_loss_is_a_token_sum", 1, "own_loss_is_a_token_sum is 1: must be True or False"),
    ],
)
def test_arguments_that_would_be_taken_for_others_are_refused(
    tmp_path: Path, name: str, value: Any, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        dynamic_context_parallel(
            trainer(tmp_path), **{"tokens_per_rank": 200, "profile": PROFILE, name: value}
        )


def flattened(rows: list[Any]) -> dict[str, torch.Tensor]:
    """A data collator of examples, or lists of them, which it joins."""
    examples = [each for row in rows for each in (row if isinstance(row, list) else [row])]
    names = "input_ids", "labels"
    joined = {
        name: torch.tensor([[token for each in examples for token in each[name]]]) for name in names
    }
    places = [place for each in examples for place in range(len(each["input_ids"]))]
    return joined | {"position_ids": torch.tensor([places])}


def test_rows_that_are_lists_of_examples(tmp_path: Path) -> None:
    """As ms-swift packs: every document is trained once, and those that fill the last batch are not
    repeated."""
    rows = documents()
    packed = [rows[start : start + 3] for start in range(0, 39, 3)]
    ours = trainer(tmp_path, data=packed, per_device_train_batch_size=4, num_train_epochs=1)
    ours.data_collator = flattened
    dynamic_context_parallel(ours, tokens_per_rank=600, profile=PROFILE)
    ours.train()
    trained = sorted(length for plan in ours.dynamic.plans for length in plan.lengths)
    kept = [len(row["input_ids"]) for row in rows[:39] if set(row["labels"][1:]) != {-100}]
    assert trained == sorted(kept)


def test_a_version_without_a_method_that_is_replaced_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Trainer

    ours = trainer(tmp_path)
    monkeypatch.delattr(Trainer, "get_batch_samples")
    with pytest.raises(
        TrainerError,
        match=r"has no Trainer.get_batch_samples, which longctx replaces: install 5.6 to 5.24",
    ):
        dynamic_context_parallel(ours, tokens_per_rank=200, profile=PROFILE)


def test_documents_that_trl_has_cut_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import datasets
    from trl import SFTConfig, SFTTrainer

    as_rank_alone()
    args = SFTConfig(
        **{**arguments(tmp_path, 1, 1, eval_strategy="no"), "remove_unused_columns": True},
        max_length=40,
    )
    data = datasets.Dataset.from_list([{"input_ids": row["input_ids"]} for row in documents()])
    ours = SFTTrainer(model(), args=args, train_dataset=data, processing_class=tokenizer())
    dynamic_context_parallel(ours, tokens_per_rank=200, profile=PROFILE)
    longer = sum(len(row["input_ids"]) >= 40 for row in documents())
    assert (
        f"note: {longer} of {DOCUMENTS} documents of train_dataset have exactly max_length=40 "
        "tokens" in capsys.readouterr().out
    )
    restore(ours)


def test_what_plain_training_would_count_otherwise_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labels on padding, and those after it; an argument that changes nothing."""
    batches: list[dict[str, torch.Tensor]] = []

    def padded(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        batches.append({name: each.flip(1) for name, each in pad(rows).items()})  # on the left
        batches[-1]["labels"] = batches[-1]["input_ids"].clone()
        return batches[-1]

    ours = trainer(tmp_path, max_steps=1, average_tokens_across_devices=False)
    ours.data_collator = padded
    dynamic_context_parallel(ours, tokens_per_rank=200, profile=PROFILE)
    ours.train()
    lost = batches[0]["labels"][:, 1:].numel() - sum(
        int(row.sum()) - 1 for row in batches[0]["attention_mask"]
    )
    printed = capsys.readouterr().out
    assert (
        printed.count("note:") == 1
        and f"note: {lost} labels of a batch are on padding, or follow it" in printed
    )
    restore(ours)
    monkeypatch.setattr(type(ours.args), "world_size", 2)
    assert "average_tokens_across_devices=False changes nothing" in next(
        notes_on_data(Traits(ours, False), 200)
    )


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "attention_mask",
            lambda n: torch.ones(1, n, n),
            "attention_mask has 4 axes: return one of",
        ),
        (
            "attention_mask",
            lambda n: 1 + torch.arange(n) // 9,
            "attention_mask has 2, but must be 1 for tokens and 0 for",
        ),
        ("attention_mask", lambda n: torch.ones(n - 1), "attention_mask has the shape"),
        ("labels", lambda n: torch.ones(n), "labels is of float32: return whole numbers"),
        (
            "token_type_ids",
            0,
            "the data collator returns token_type_ids, which splitting documents would lose",
        ),
        (
            "attention_mask",
            lambda n: torch.arange(n) != 3,
            "attention_mask leaves out tokens between others in row 0",
        ),
        (
            "position_ids",
            lambda n: torch.arange(n) + 2,
            "position_ids of row 0 have 2 first, but documents count 0, 1, 2",
        ),
        (
            "position_ids",
            lambda n: torch.arange(n) + 7 * (torch.arange(n) > 4),
            "position_ids of row 0 have 12 after 4",
        ),
        (
            "position_ids",
            lambda n: torch.arange(n).clamp(max=2),
            "position_ids of row 0 have 2 after 2",
        ),
        (
            "seq_idx",
            lambda n: torch.arange(n) > 4,
            "returns seq_idx, but no position_ids, by which rows are cut",
        ),
    ],
    ids=[
        "axes",
        "numbers of documents",
        "short",
        "floats",
        "segments",
        "holes",
        "offset",
        "skipped positions",
        "repeated positions",
        "packed without positions",
    ],
)
def test_what_would_be_lost_of_a_batch_is_refused(
    tmp_path: Path, name: str, value: Any, message: str
) -> None:
    ours = trainer(tmp_path)
    collate = ours.data_collator
    ours.data_collator = lambda rows: {
        **(batch := collate(rows)),
        name: (value or torch.ones)(batch["labels"].shape[1])[None].repeat_interleave(
            len(rows), dim=0
        ),
    }
    dynamic_context_parallel(ours, tokens_per_rank=200, profile=PROFILE)
    with pytest.raises(TrainerError, match=message):
        ours.train()


@pytest.mark.parametrize(
    ("fsdp", "uses_ddp", "notes"), [(True, True, 1), (True, False, 0), (None, True, 0)]
)
def test_sharding_that_accelerate_leaves_out_is_said(
    fsdp: bool | None, uses_ddp: bool, notes: int
) -> None:
    traits: Any = SimpleNamespace(args=SimpleNamespace(fsdp=fsdp), uses_ddp=uses_ddp)
    said = list(notes_on_sharding(traits))
    assert len(said) == notes
    assert all("every process keeps all weights" in note for note in said)
