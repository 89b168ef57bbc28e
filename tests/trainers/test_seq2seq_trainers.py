"""Encoder-decoders in trainers of transformers: what one plain process computes, on any number of
ranks."""

import json
from pathlib import Path
from random import Random
from string import ascii_lowercase
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from longctx.data.records.tokenizer import byte_vocabulary
from longctx.hf.spec import spec_of_seq2seq
from longctx.planning.parts import EQUAL_PARTS
from longctx.trainers import TrainerError, dynamic_context_parallel, restore
from longctx.trainers.pairs import TARGETS, rows_of_pairs
from tests.marks import slow_unless
from tests.seq2seq_cases import START, VOCABULARY, build_seq2seq
from tests.trainer_cases import (
    DOCUMENTS,
    PROFILE,
    TOKENS_PER_RANK,
    arguments,
    as_rank,
    as_rank_alone,
    report,
    select_fsdp_on_cpus,
    tokenizer,
)
from tests.trainers.test_trainers import assert_equal
from tests.workers import Workers

LENGTHS = [(67, 53), (1, 1), (2, 43), (41, 1)]
"""Tokens of the source and of the target of the first records; the first does not fit one of
several ranks."""
ONE_STEP = {
    "optim": "sgd",
    "learning_rate": 1.0,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "max_steps": 1,
}
"""A step that changes weights by their gradient."""


def records(
    count: int = DOCUMENTS, seed: int = 0, untrained: bool = True
) -> list[dict[str, list[int]]]:
    """Records, of which every third has masked labels: the first ones, some in the middle and the
    last one."""
    random = np.random.default_rng(seed)
    made = []
    for number in range(count):
        source, target = LENGTHS[number] if number < len(LENGTHS) else random.integers(1, 23, 2)
        labels = random.integers(1, VOCABULARY, target)
        if number % 3 == 0 and target > 6:
            labels[[0, 1, 4, -1]] = -100
        made.append(
            {
                "input_ids": random.integers(1, VOCABULARY, source).tolist(),
                "labels": labels.tolist(),
            }
        )
    if untrained:
        made[5]["labels"] = [-100] * 3
    return made


def collator(side: str = "right", model: Any = None) -> Any:
    """The collator of transformers, which pads sources and labels on a side; with a model, it makes
    decoder_input_ids."""
    from transformers import DataCollatorForSeq2Seq

    made = tokenizer()
    made.padding_side = side
    return DataCollatorForSeq2Seq(made, model=model)


def make(folder: Path, ranks: int, options: dict[str, Any]) -> Any:
    """Returns a trainer. Options: arguments, `plainest` for transformers.Trainer, `lora`, `side`
    and `makes_inputs` of the collator, `metrics`, what they see of logits (`seen`), `accumulation`,
    `untrained` for a record without a label, the numbers of `only` some records, and `of` the
    model."""
    from peft import LoraConfig, get_peft_model
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments

    options = dict(options)
    kinds = (
        (Trainer, TrainingArguments)
        if options.pop("plainest", False)
        else (Seq2SeqTrainer, Seq2SeqTrainingArguments)
    )
    side, makes, metrics = (
        options.pop("side", "right"),
        options.pop("makes_inputs", False),
        options.pop("metrics", None),
    )
    accumulation, untrained = options.pop("accumulation", 1), options.pop("untrained", False)
    model = options.pop("of", None) or build_seq2seq()
    if options.get("predict_with_generate"):
        model.generation_config.no_repeat_ngram_size = 1  # or this model repeats one token
    only, seen = options.pop("only", None), options.pop("seen", None)
    collate = collator(side, model if makes else None)
    if options.pop("lora", False):
        torch.manual_seed(0)
        adapters = LoraConfig(
            r=4,
            target_modules=["q_proj", "v_proj"],
            task_type="SEQ_2_SEQ_LM",
            init_lora_weights=False,
        )
        model = get_peft_model(model, adapters)
    if "fsdp" in options:
        select_fsdp_on_cpus()
    return kinds[0](
        model,
        kinds[1](**arguments(folder, ranks, accumulation, **options)),
        data_collator=collate,
        train_dataset=[
            row
            for number, row in enumerate(records(untrained=untrained))
            if only is None or number in only
        ],
        eval_dataset=records(19, seed=1),
        processing_class=tokenizer(),
        compute_metrics=metrics,
        preprocess_logits_for_metrics=seen,
    )


def train(folder: Path, dynamic: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Trains, and predicts if `options` has `predicting`, with `context` for the planner;
    `evaluating` first.

    Steps have the same records on any number of ranks.
    """
    from longctx.trainers import dynamic_context_parallel

    ranks, options = as_rank(), dict(options)
    predicting, resume = options.pop("predicting", None), options.pop("resume", None)
    context, evaluating = options.pop("context", {}), options.pop("evaluating", False)
    trainer = make(folder, ranks, options | ({"metrics": predicting} if predicting else {}))
    before = report(trainer)["weights"]
    if dynamic:
        dynamic_context_parallel(
            trainer,
            tokens_per_rank=TOKENS_PER_RANK if ranks > 1 else 128,
            profile=PROFILE,
            **context,
        )
    if evaluating:
        trainer.evaluate()
    trainer.train(resume_from_checkpoint=resume)
    found = report(trainer)
    found["changes"] = {name: before[name] - weight for name, weight in found["weights"].items()}
    found["predictions"] = trainer.predict(records(7, seed=2)) if predicting else None
    return found


def likelihood(prediction: Any) -> dict[str, float]:
    """A metric of logits and labels, which are not shifted."""
    logits = (
        prediction.predictions[0]
        if isinstance(prediction.predictions, tuple)
        else prediction.predictions
    )
    labels = torch.tensor(prediction.label_ids)
    likelihoods = torch.log_softmax(torch.tensor(logits), -1)
    chosen = likelihoods.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return {"likelihood": chosen[labels != -100].mean().item()}


def mean_token(prediction: Any) -> dict[str, float]:
    """A metric of generated tokens and labels."""
    labels = prediction.label_ids
    return {
        "mean_token": float(np.maximum(prediction.predictions, 0).mean()),
        "labels": float(labels[labels > 0].mean()),
    }


def best_logits(logits: Any, labels: torch.Tensor) -> torch.Tensor:
    """What metrics see of logits: a value per row."""
    best = (logits[0] if isinstance(logits, tuple) else logits).amax(-1)
    return best.masked_fill(labels == -100, 0).sum(-1)


def mean_row(prediction: Any) -> dict[str, float]:
    """A metric of values of rows."""
    return {"mean_row": float(prediction.predictions.mean()), "rows": len(prediction.predictions)}


def save_checkpoint(folder: Path) -> Path:
    """Saves a tiny T5Gemma with a tokenizer of bytes; its decoder begins with [BOS]."""
    inner = Tokenizer(models.BPE(vocab=byte_vocabulary(), merges=[]))
    inner.pre_tokenizer, inner.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    inner.add_special_tokens(["[PAD]", "[BOS]", "[EOS]"])
    names = {"pad_token": "[PAD]", "bos_token": "[BOS]", "eos_token": "[EOS]"}
    PreTrainedTokenizerFast(tokenizer_object=inner, **names).save_pretrained(folder)
    special = {"pad_token_id": 256, "bos_token_id": 257, "eos_token_id": 258, "vocab_size": 259}
    build_seq2seq(parts=special, **special).save_pretrained(folder)
    return folder


def texts() -> list[dict[str, str]]:
    """Returns records of texts, all different."""
    random = Random(0)
    lengths = ((300, 20), (3, 200), (40, 41), (1, 1), (150, 2), (700, 90), (12, 5))
    pairs = [
        ["".join(random.choices(ascii_lowercase, k=length)) for length in pair] for pair in lengths
    ]
    return [dict(zip(("source", "target"), pair, strict=True)) for pair in pairs]


# --- tests

PLAIN: dict[str, dict[str, Any]] = {}
OURS = (
    "context",
    "side",
    "makes_inputs",
    "accumulation",
    "fsdp",
    "fsdp_config",
    "gradient_checkpointing",
    "gradient_checkpointing_kwargs",
)
"""Options that change nothing in the result."""


def plain(workers: Workers, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """The run of one process without longctx, whose batches are padded on the right."""
    options = {name: value for name, value in options.items() if name not in OURS}
    if (key := repr(options)) not in PLAIN:
        (PLAIN[key],) = workers.run(train, 1, folder / "plain", False, options)
    return PLAIN[key]


def assert_step(runs: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Loss of a step, and gradients on all ranks."""
    assert runs[0]["log"][0]["loss"] == pytest.approx(expected["log"][0]["loss"], rel=1e-5)
    for run in runs:
        assert run["changes"].keys() == expected["changes"].keys()
        for name, gradient in expected["changes"].items():
            error = float((run["changes"][name] - gradient).norm())
            assert error <= 1e-4 * float(gradient.norm()) + 1e-6, (
                name,
                error,
                float(gradient.norm()),
            )


WRAPPED = {
    "fsdp_version": 2,
    "transformer_layer_cls_to_wrap": ["T5GemmaEncoderLayer", "T5GemmaDecoderLayer"],
}
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "Trainer": (3, {"plainest": True}),
    "padded on the left": (2, {"side": "left", "accumulation": 2}),
    "inputs from the collator": (1, {"makes_inputs": True, "side": "left"}),
    "all split": (3, {"context": {"mode": "static", "degree": 3}}),
    "adapters": (2, {"lora": True}),
    "recomputed": (3, {"gradient_checkpointing": True}),
    "fully sharded": (2, {"fsdp": "full_shard auto_wrap", "fsdp_config": WRAPPED}),
}


@pytest.mark.parametrize(
    "way", slow_unless(lambda way: way not in ("recomputed", "fully sharded"), WAYS)
)
def test_a_step_is_that_of_one_plain_process(workers: Workers, tmp_path: Path, way: str) -> None:
    ranks, more = WAYS[way]
    options = {**ONE_STEP, "eval_strategy": "no", "untrained": True, **more}
    runs = workers.run(train, ranks, tmp_path, True, options)
    assert_step(runs, plain(workers, tmp_path, options))
    assert max(runs[0]["degrees"]) >= min(ranks, 3 if way == "all split" else 2)


@pytest.mark.parametrize("number", [1, 3])
def test_ranks_without_a_token(workers: Workers, tmp_path: Path, number: int) -> None:
    """The step has a single record: of one token each, or with a target of one token."""
    options = {**ONE_STEP, "eval_strategy": "no", "only": [number]}
    runs = workers.run(train, 3, tmp_path, True, options)
    assert_step(runs, plain(workers, tmp_path, options))
    assert [sum(lengths) for lengths in runs[0]["plans"]] == [sum(LENGTHS[number])]


PREDICTING = {"predicting": likelihood, "prediction_loss_only": False}


@pytest.mark.parametrize(
    ("ranks", "accumulation", "side"),
    slow_unless(
        lambda *case: case[0] == 3,
        [(1, 1, "right"), (2, 3, "right"), (2, 1, "left"), (3, 2, "left")],
    ),
)
def test_epochs_evaluations_and_predictions(
    workers: Workers, tmp_path: Path, ranks: int, accumulation: int, side: str
) -> None:
    """Two epochs whose last steps are not full, evaluations whose last batch is not, and logits of
    whole targets."""
    options = {**PREDICTING, "accumulation": accumulation, "side": side}
    runs, expected = (
        workers.run(train, ranks, tmp_path, True, options),
        plain(workers, tmp_path, options),
    )
    assert_equal(runs, expected)
    assert_predictions(runs, expected)


def assert_predictions(runs: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Logits of labels, wherever their rows are padded; the others may be 0."""
    logits, labels = expected["predictions"].predictions[0], expected["predictions"].label_ids
    for run in runs:
        ours = run["predictions"]
        kept, wanted = ours.label_ids != -100, labels != -100
        assert (
            np.array_equal(ours.label_ids[kept], labels[wanted])
            and ours.predictions.shape == logits.shape
        )
        np.testing.assert_allclose(ours.predictions[kept], logits[wanted], rtol=1e-3, atol=1e-3)
        assert ours.metrics["test_likelihood"] == pytest.approx(
            expected["predictions"].metrics["test_likelihood"], rel=1e-5
        )


def test_an_evaluation_before_training_and_values_of_rows(workers: Workers, tmp_path: Path) -> None:
    """An evaluation prepares the model without DDP; of the rows that fill the last batch metrics
    see no value."""
    options = {
        **ONE_STEP,
        "predicting": mean_row,
        "seen": best_logits,
        "prediction_loss_only": False,
        "evaluating": True,
    }
    runs, expected = (
        workers.run(train, 2, tmp_path, True, options),
        plain(workers, tmp_path, options),
    )
    assert_step(runs, expected)
    for run in runs:
        theirs, ours = expected["predictions"], run["predictions"]
        np.testing.assert_allclose(ours.predictions, theirs.predictions, rtol=1e-4)
        for name in ("test_loss", "test_mean_row", "test_rows"):
            assert ours.metrics[name] == pytest.approx(theirs.metrics[name], rel=1e-5)


@pytest.mark.parametrize("ranks", slow_unless(lambda ranks: ranks == 3, [1, 2, 3]))
def test_generation_in_evaluations(workers: Workers, tmp_path: Path, ranks: int) -> None:
    """Tokens are those of the model's own attention, and the loss is that of an evaluation."""
    options = {**PREDICTING, **ONE_STEP, "learning_rate": 0.01, "predicting": mean_token}
    options |= {
        "predict_with_generate": True,
        "generation_max_length": 11,
        "eval_strategy": "steps",
        "eval_steps": 1,
    }
    runs, expected = (
        workers.run(train, ranks, tmp_path, True, options),
        plain(workers, tmp_path, options),
    )
    theirs = expected["predictions"]
    assert len(set(theirs.predictions.flatten().tolist())) > 5
    for run in runs:
        assert np.array_equal(run["predictions"].predictions, theirs.predictions)
        assert np.array_equal(run["predictions"].label_ids, theirs.label_ids)
        assert run["predictions"].metrics["test_loss"] == pytest.approx(
            theirs.metrics["test_loss"], rel=1e-5
        )
    for name in ("eval_loss", "eval_mean_token", "eval_labels"):
        assert runs[0]["log"][1][name] == pytest.approx(expected["log"][1][name], rel=1e-5)


# --- one process, without a group


def attached(folder: Path, **options: Any) -> Any:
    as_rank_alone()
    ours = make(folder, 1, {"eval_strategy": "no", **options})
    dynamic_context_parallel(ours, tokens_per_rank=128, profile=PROFILE)
    return ours


def test_restored_it_is_as_before(tmp_path: Path) -> None:
    as_rank_alone()
    ours = make(tmp_path, 1, {"eval_strategy": "no", "max_steps": 1})
    kind, collate, model = type(ours), ours.data_collator, ours.model
    attention, embedding = model.config._attn_implementation, model.get_input_embeddings()
    dynamic_context_parallel(ours, tokens_per_rank=128, profile=PROFILE)
    ours.train()
    ids = torch.tensor([[3, 4, 5]])
    generated = model.generate(ids, max_new_tokens=5, do_sample=False)
    loss = ours.evaluate()["eval_loss"]
    ours.save_model(str(tmp_path / "saved"))
    assert "longctx" not in json.dumps(json.loads((tmp_path / "saved" / "config.json").read_text()))
    restore(ours)
    assert (
        type(ours) is kind
        and ours.data_collator is collate
        and model.get_input_embeddings() is embedding
    )
    parts = (model.config, model.config.encoder, model.config.decoder)
    assert all(part._attn_implementation == attention for part in parts)
    assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), generated)
    assert ours.evaluate()["eval_loss"] == pytest.approx(loss, rel=1e-5)
    own = type(model).from_pretrained(tmp_path / "saved", attn_implementation="eager")
    inputs = {"input_ids": ids, "labels": torch.tensor([[7, 9, 11, 13]])}
    assert torch.equal(own(**inputs).loss, model(**inputs).loss)


def stacked(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


def test_predictions_without_labels(tmp_path: Path) -> None:
    """They need what the decoder reads; logits are in its columns."""
    as_rank_alone()
    ours = make(tmp_path, 1, {"eval_strategy": "no", "prediction_loss_only": False})
    ours.data_collator = stacked
    row = {"input_ids": [5, 6, 7], "decoder_input_ids": [START, 0, 9, 0]}
    with torch.no_grad():
        expected = ours.model(**stacked([row]), attention_mask=torch.ones(1, 3)).logits
    dynamic_context_parallel(ours, tokens_per_rank=128, profile=PROFILE)
    found = ours.predict([row])
    np.testing.assert_allclose(found.predictions, expected.numpy(), rtol=1e-4, atol=1e-4)
    assert found.label_ids is None
    with pytest.raises(TrainerError, match="returns no input_ids, or no labels"):
        ours.predict([{"input_ids": [5, 6, 7]}])


def test_plans_count_sources_and_the_attention_of_the_encoder(tmp_path: Path) -> None:
    ours = attached(tmp_path, of=build_seq2seq("unbalanced"), max_steps=1)
    told = ours.dynamic.family.costs([])  # of make_plan
    assert told["parts"] == spec_of_seq2seq(ours.model).parts != EQUAL_PARTS
    ours.train()
    plan = ours.dynamic.plans[0]
    pairs = {
        (len(row["input_ids"]) + len(row["labels"]), len(row["input_ids"]))
        for row in records(untrained=False)
    }
    # A masked label at the end is left out.
    cut = {(length - 1, source) for length, source in pairs}
    assert (
        len(plan.sources) == 12 and set(zip(plan.lengths, plan.sources, strict=True)) <= pairs | cut
    )


@pytest.fixture(scope="module")
def model() -> Any:
    return build_seq2seq()


def batch(**changed: Any) -> dict[str, Any]:
    """Two records: a source of 2 tokens padded on the left and a target of 3, and a source of 3 and
    a target of 4."""
    made = {
        "input_ids": torch.tensor([[0, 5, 6], [7, 0, 9]]),
        "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]]),
        "labels": torch.tensor([[-100, 11, 12, 13], [-100, 15, -100, 17]]),
        TARGETS: torch.tensor([[1, 4], [0, 4]]),
    }
    return {**made, **changed}


def test_records_are_read_without_padding(model: Any) -> None:
    (first,), (second,) = rows_of_pairs(batch(), model)
    assert first.source is not None and second.source is not None
    assert first.source.tolist() == [5, 6] and second.source.tolist() == [7, 0, 9]
    assert first.tokens.tolist() == [START, 11, 12] and second.tokens.tolist() == [START, 0, 15, 0]
    assert first.labels.tolist() == [11, 12, 13] and second.labels.tolist() == [-100, 15, -100, 17]
    assert (first.column, first.hidden) == (1, ()) and (second.column, second.hidden) == (
        0,
        ((1, 2), (3, 4)),
    )
    whole = rows_of_pairs(batch(**{TARGETS: None}), model)[0][0]
    assert whole.tokens.tolist() == [START, 0, 11, 12] and whole.hidden == ((1, 2),), (
        "columns are not known: as the model has it"
    )
    shown = batch(decoder_attention_mask=torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]))
    assert [row[0].hidden for row in rows_of_pairs(shown, model)] == [(), ()]
    own = rows_of_pairs(
        batch(decoder_input_ids=torch.tensor([[0, 21, 22, 23], [24, 25, 26, 27]])), model
    )
    assert [row[0].tokens.tolist() for row in own] == [[21, 22, 23], [24, 25, 26, 27]]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"labels": None}, "returns no input_ids, or no labels"),
        (
            {"attention_mask": torch.tensor([[0, 1, 1], [1, 0, 1]])},
            "attention_mask leaves out tokens between others in row 1",
        ),
        (
            {"attention_mask": torch.tensor([[0, 0, 0], [1, 1, 1]])},
            "row 0 of a batch has no token of a source",
        ),
        (
            {"attention_mask": None},
            "sources have padding, but the data collator returns no attention_mask",
        ),
        (
            {"token_type_ids": torch.zeros(2, 3)},
            "returns token_type_ids, which splitting documents would lose",
        ),
        (
            {"decoder_input_ids": torch.tensor([[0, 0, 22, 23], [24, 25, 26, 27]])},
            "decoder reads only padding in a window of row 0",
        ),
    ],
)
def test_records_that_are_refused(model: Any, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainerError, match=message):
        rows_of_pairs(batch(**changed), model)


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {
        "d_model": 32,
        "d_ff": 48,
        "num_layers": 1,
        "num_heads": 4,
        "d_kv": 8,
        "vocab_size": 64,
        "dropout_rate": 0.0,
    }
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))


def with_dropout() -> Any:
    made = build_seq2seq()
    made.config.encoder.attention_dropout = 0.1
    return made


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"of": t5},
            "adds a bias by relative position to the scores.*use an encoder-decoder with rotary "
            "positions",
        ),
        ({"of": with_dropout}, "attention_dropout is 0.1 in the model's config"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor is 0.1"),
        (
            {"neftune_noise_alpha": 5.0},
            "an encoder-decoder, whose dropout and NEFTune would depend on how documents are split",
        ),
        (
            {"plainest": True, "as_trl": True},
            "SFTTrainer makes batches without sources.*use Seq2SeqTrainer",
        ),
        (
            {"predict_with_generate": True, "sharded": True},
            "predict_with_generate calls parts of the model.*FSDP",
        ),
    ],
    ids=["bias", "attention dropout", "label smoothing", "noise", "TRL", "generation under FSDP"],
)
def test_what_cannot_be_exact_is_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    as_rank_alone()
    options = {name: value() if name == "of" else value for name, value in options.items()}
    of_trl, sharded = options.pop("as_trl", False), options.pop("sharded", False)
    ours = make(tmp_path, 1, {"eval_strategy": "no", **options})
    if of_trl:
        from trl import SFTTrainer

        ours.__class__ = type("Own", (SFTTrainer,), {})
    ours.is_fsdp_enabled = sharded
    attention = ours.model.config._attn_implementation
    with pytest.raises(TrainerError, match=message):
        dynamic_context_parallel(ours, tokens_per_rank=128, profile=PROFILE)
    assert ours.model.config._attn_implementation == attention and not hasattr(ours, "dynamic")


def test_records_that_do_not_fit_are_refused_before_the_first_step(tmp_path: Path) -> None:
    import datasets

    as_rank_alone()
    ours = make(tmp_path, 1, {"eval_strategy": "no"})
    ours.train_dataset = datasets.Dataset.from_list(records())
    with pytest.raises(
        TrainerError, match="train_dataset has a document of 120 tokens, but 1 ranks hold 100"
    ):
        dynamic_context_parallel(ours, tokens_per_rank=100, profile=PROFILE)


@pytest.mark.slow
def test_the_example_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tiny checkpoint, in float32, on a CPU."""
    import datasets
    import transformers

    page = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text("utf-8")
    (block,) = [part for part in page.split("```")[1::2] if "DataCollatorForSeq2Seq(" in part]
    checkpoint, pairs = (
        save_checkpoint(tmp_path / "tiny"),
        [(pair["source"], pair["target"]) for pair in texts()],
    )
    lines = [json.dumps({"document": source, "summary": target}) + "\n" for source, target in pairs]
    (tmp_path / "papers.jsonl").write_text("".join(lines), "utf-8")
    monkeypatch.chdir(tmp_path)
    as_rank_alone()

    def arguments(**given: Any) -> Any:
        less = {
            "bf16": False,
            "use_cpu": True,
            "max_steps": 2,
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
        }
        return transformers.Seq2SeqTrainingArguments(
            **{**given, **less, "output_dir": str(tmp_path)}
        )

    names = {
        name: getattr(transformers, name)
        for name in ("AutoTokenizer", "AutoModelForSeq2SeqLM", "Seq2SeqTrainer")
    }
    names |= {
        "DataCollatorForSeq2Seq": transformers.DataCollatorForSeq2Seq,
        "Seq2SeqTrainingArguments": arguments,
    }
    names |= {
        "load_dataset": datasets.load_dataset,
        "dynamic_context_parallel": dynamic_context_parallel,
        "torch": torch,
    }
    code = (
        block.removeprefix("python")
        .replace("google/t5gemma-2b-2b-ul2", str(checkpoint))
        .replace("bfloat16", "float32")
    )
    exec(code, names)
    trainer: Any = names["trainer"]
    plan, lengths = (
        trainer.dynamic.plans[0],
        {(len(source), len(target) + 1) for source, target in pairs},
    )
    assert plan.sources and all(
        (s, n - s) in lengths for s, n in zip(plan.sources, plan.lengths, strict=True)
    )
    assert trainer.dynamic.planning.tokens_per_rank >= 1024 and trainer.state.global_step == 2
