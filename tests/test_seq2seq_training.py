"""Encoder-decoders of transformers in the commands: packed, split over ranks and sharded, against transformers alone."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForSeq2SeqLM
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForSeq2SeqLM

from longctx.attention.huggingface import HuggingFaceError
from longctx.cli import main
from longctx.config import ConfigError, load
from longctx.data.corpus import open_corpus
from longctx.data.formats import parse_record
from longctx.data.manifest import StoreError
from longctx.data.prepare import prepare
from longctx.data.sampler import SamplerError
from longctx.data.store import Store
from longctx.errors import UserError
from longctx.memory.loads import loads
from longctx.memory.model import estimate
from longctx.model.source import pretrained
from longctx.planning.parts import EQUAL_PARTS
from longctx.tokenizer_files import copy, find
from longctx.training.checks import check_model
from longctx.training.data import RunData, first_plans
from longctx.training.validation import Documents
from tests.data_cases import written
from tests.huggingface_cases import build_model
from tests.marks import slow_unless
from tests.pretrained_cases import assert_step, largest_error
from tests.seq2seq_cases import SETTINGS, build_seq2seq
from tests.seq2seq_training_cases import (
    BOS,
    adapted_reference,
    adapted_step,
    answer,
    first_step,
    losses,
    pairs_of,
    peak_of_run,
    records,
    reference,
    save_checkpoint,
    settings_of,
    step,
    trained_by_transformers,
    write_records,
)
from tests.test_seq2seq import small
from tests.workers import Workers


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("seq2seq")
    for kind in SETTINGS:
        build_seq2seq(kind).save_pretrained(folder / kind)
    return {kind: folder / kind for kind in SETTINGS}


STEPS = slow_unless(lambda kind, ranks: ranks == (4 if kind == "t5gemma" else 3), product(SETTINGS, (1, 2, 3, 4)))


@pytest.mark.parametrize(("kind", "ranks"), STEPS)
def test_a_step_is_that_of_transformers(workers: Workers, checkpoints: dict[str, Path], kind: str, ranks: int) -> None:
    """Degrees 1 to 4, sources and targets from 1 token, ranks without tokens of one of them or of both."""
    assert_step(workers.run(step, ranks, checkpoints[kind], []), reference(checkpoints[kind]))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tokenizer."""
    return save_checkpoint(tmp_path_factory.mktemp("base") / "checkpoint")


@pytest.fixture(scope="module")
def store(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("store")
    prepare(write_records(folder / "records.jsonl"), folder / "store", tokenizer=str(base))
    return Store.open(folder / "store")


def test_a_record_is_a_source_and_a_target_that_begins_with_the_start_token(store: Store) -> None:
    assert store.source_lengths is not None and store.start_token == BOS
    for document, (source, target) in enumerate(zip(*pairs_of(records()), strict=True)):
        tokens, trained = store.tokens(document, 0, store.lengths[document])
        assert tokens.tolist() == [*source, BOS, *target]
        assert store.source_lengths[document] == len(source)
        assert trained.tolist() == [False] * (len(source) + 1) + [True] * len(target)
        assert store.trained_tokens[document] == len(target)


def test_the_weight_of_an_answer_is_that_of_its_target(base: Path, tmp_path: Path) -> None:
    asked, answer = {"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d", "weight": 0.5}
    (tmp_path / "records.jsonl").write_text(json.dumps({"messages": [asked, answer]}))
    prepare(open_corpus(str(tmp_path / "records.jsonl")), tmp_path / "store", tokenizer=str(base))
    store = Store.open(tmp_path / "store")
    assert store.source_lengths is not None and store.weighted
    weights, source = store.token_weights(0, 0, int(store.lengths[0])), int(store.source_lengths[0])
    assert weights is not None and weights.tolist() == [0.0] * (source + 1) + [0.5] * (len(weights) - source - 1)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_step_of_a_run_is_that_of_transformers(
    workers: Workers, base: Path, store: Store, ranks: int, tmp_path: Path
) -> None:
    """All records in one step, by the plan of the run; validation has the same loss."""
    sources, targets = pairs_of(records())
    expected = reference(base, sources, targets, targets, start=BOS)
    found = workers.run(first_step, ranks, base, store.path, tmp_path)
    for loss, gradients, degrees, validation in found:
        assert loss == pytest.approx(expected[0], rel=1e-5)
        assert validation == pytest.approx(expected[0], rel=1e-5)
        assert largest_error(gradients, expected[1]) < 1e-4
        assert (max(degrees) > 1) == (ranks > 1)


OPTIONS = {
    "recompute": ["train.recompute=full", "parallel.reshard_after=step"],
    "recompute, attention kept": ["train.recompute=selective", "parallel.reduce_after=micro_batch"],
    "recompute of the MLP": ["train.recompute=mlp", "train.mlp_tile_tokens=16"],
    "exchange in stages, copies": ["context.max_remote_tokens=8", "context.keep_kv=true", "parallel.shard_ranks=1"],
    "padding": ["batch.pad_to_multiple_of=12", "context.deterministic=true"],
}


@pytest.mark.parametrize("name", slow_unless(lambda name: name == "recompute, attention kept", [(name,) for name in OPTIONS]))
def test_settings_change_nothing(workers: Workers, checkpoints: dict[str, Path], name: str) -> None:
    assert_step(workers.run(step, 2, checkpoints["t5gemma"], OPTIONS[name]), reference(checkpoints["t5gemma"]))


@pytest.mark.parametrize(
    ("ranks", "settings"), [(1, []), (2, ["train.recompute=selective"]), (3, ["parallel.reshard_after=step"])]
)
def test_adapters_have_the_gradients_of_peft(
    workers: Workers, checkpoints: dict[str, Path], ranks: int, settings: list[str]
) -> None:
    folder = checkpoints["unbalanced"]
    found = workers.run(adapted_step, ranks, folder, settings)
    expected = adapted_reference(folder, found[0][2])
    assert_step(found, expected)
    trained = [name for name, gradient in expected[1].items() if gradient.norm() > 0]
    assert len(trained) == 2 * (7 * 3 + 11 * 1)


def test_a_run_of_adapters_resumes_bit_by_bit_and_is_exported(
    workers: Workers, base: Path, store: Store, tmp_path: Path
) -> None:
    whole = workers.run(losses, 2, base, store.path, tmp_path / "run", ["lora.rank=4"], 4)
    assert whole == workers.run(losses, 2, base, store.path, tmp_path / "resumed", ["lora.rank=4"], 2, 4)
    assert whole[0][-1] < whole[0][0]
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "export")]) == 0
    exported, first = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "export"), AutoModelForSeq2SeqLM.from_pretrained(base)
    sources, _ = pairs_of(records())
    answers = [[answer(model, source) for source in sources] for model in (exported, first)]
    assert answers[0] != answers[1]
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "merged"), "--merge"]) == 0
    exported = AutoPeftModelForSeq2SeqLM.from_pretrained(tmp_path / "export").merge_and_unload()
    first = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "merged")
    for name, weight in exported.named_parameters():
        assert torch.equal(weight, first.get_parameter(name)), name


def test_a_run_resumes_bit_by_bit_and_its_export_answers_alike(
    workers: Workers, base: Path, store: Store, tmp_path: Path
) -> None:
    """A run of 4 steps, and one of 2 that is resumed; the exported model answers greedily as one that transformers trained."""
    run, resumed = tmp_path / "run", tmp_path / "resumed"
    whole = workers.run(losses, 2, base, store.path, run, [], 4)
    assert whole == workers.run(losses, 2, base, store.path, resumed, [], 2, 4)
    assert whole[0][-1] < whole[0][0]
    assert main(["export", str(run), str(tmp_path / "export")]) == 0
    trained, exported = trained_by_transformers(base, 4), AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "export")
    first = AutoModelForSeq2SeqLM.from_pretrained(base)
    sources, _ = pairs_of(records())
    answers = [[answer(model, source) for source in sources] for model in (trained, exported, first)]
    assert answers[0] == answers[1] != answers[2]


def test_eval_has_the_loss_of_transformers(base: Path, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    sources, targets = pairs_of(records())
    expected = reference(base, sources, targets, targets, start=BOS)[0]
    assert main(["eval", str(base), "--store", str(store.path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["overall"]["loss"] == pytest.approx(expected, rel=1e-5)
    assert report["overall"]["tokens"] == sum(map(len, targets))


CONVERSATION = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_conversations_are_cut_before_the_last_answer(base: Path, tmp_path: Path) -> None:
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    source = written(tmp_path, [{"messages": [*CONVERSATION, {"role": "user", "content": "d"}, CONVERSATION[1]]}])
    prepare(source, tmp_path / "store", tokenizer=str(base), chat_template=str(tmp_path / "template.jinja"))
    made = Store.open(tmp_path / "store")
    tokens, trained = made.tokens(0, 0, made.lengths[0])
    assert made.source_lengths is not None
    cut = int(made.source_lengths[0])
    assert tokens[cut] == BOS and not trained[: cut + 1].any()
    assert made.tokenizer.decode(tokens[:cut]) == "<user>ab</s>\n<assistant>c</s>\n<user>d</s>\n<assistant>"
    assert made.tokenizer.decode(tokens[trained]) == "c</s>"


@pytest.mark.parametrize(
    ("record", "options", "message"),
    [
        (
            {"text": "abc"},
            {},
            "is of format text, but an encoder-decoder learns pairs: give records with `source` and `target`",
        ),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, {}, "format chosen-rejected"),
        ({"messages": [*CONVERSATION, *CONVERSATION]}, {}, "has no chat template: give one source and one target"),
        ({"messages": CONVERSATION[::-1]}, {}, "end with an answer"),
        ({"source": "a", "target": "b"}, {"train_on": "all"}, "whose target is the last answer alone"),
        ({"source": "a" * 9, "target": "b"}, {"max_length": 5, "long_documents": "truncate_left"}, "--long-documents drop"),
    ],
)
def test_records_without_source_and_target_are_refused(
    base: Path, tmp_path: Path, record: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        prepare(written(tmp_path, [record]), tmp_path / "store", tokenizer=str(base), **options)


def test_sources_and_summaries_are_prompts_of_causal_models(tmp_path: Path) -> None:
    made_of = [read_record(record) for record in ({"source": "a", "target": "b"}, {"summary": "b", "document": "a"})]
    assert made_of[0] == made_of[1] == read_record({"prompt": "a", "completion": "b"})
    assert read_record({"text": "t", "source": "a", "target": "b"})[0] == "t"


def read_record(record: dict[str, Any]) -> tuple[Any, ...]:
    (document,) = parse_record(record, "name", 1.0, None)
    return document.text, document.messages, document.first_trained


def test_operations_are_those_that_torch_counts(base: Path) -> None:
    config = load(None, [f"model.from_pretrained={base}"])
    spec, model = config.model_source().spec, AutoModelForSeq2SeqLM.from_pretrained(base, attn_implementation="eager")
    assert spec.parameters == sum(weight.numel() for weight in model.parameters())
    wide = replace(spec, layers=tuple(replace(layer, window=None) for layer in spec.layers))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.ones(1, 40, dtype=torch.int64), decoder_input_ids=torch.ones(1, 24, dtype=torch.int64))
    masked = sum(layer.attention_flops(24) for layer in wide.layers[2:])  # eager attention computes them, too
    assert wide.flops([64], sources=[40]) + masked == counter.get_total_flops()


def test_operations_of_frozen_weights_are_counted_without_their_gradients(base: Path) -> None:
    spec, adapted = (
        load(None, [f"model.from_pretrained={base}", *settings]).model_source().spec for settings in ([], ["lora.rank=4"])
    )
    encoder, decoder = (sum(layer.matrix_parameters for layer in part) for part in (spec.layers[:2], spec.layers[2:]))
    crossed = sum(layer.source_parameters for layer in spec.layers)
    of_encoder, of_decoder = encoder * 40, crossed * 40 + (decoder - crossed) * 24
    assert adapted.frozen_products([64], [40]) == of_encoder + of_decoder + spec.head_parameters * 24


@pytest.mark.parametrize(
    ("pair", "recompute", "others"),
    [
        ((1000, 1000), "full", []),
        ((200, 1800), "none", []),
        ((1000, 1000), "none", ["lora.rank=4"]),
    ],
)
def test_the_memory_estimate_is_within_20_percent(
    workers: Workers, tmp_path: Path, pair: tuple[int, int], recompute: str, others: list[str]
) -> None:
    folder = save_checkpoint(
        tmp_path / "wide", "without windows and soft caps", hidden_size=128, intermediate_size=384, head_dim=32
    )
    prepare(write_records(tmp_path / "records.jsonl", (pair,) * 4), tmp_path / "store", tokenizer=str(folder))
    options = [f"train.recompute={recompute}", "batch.tokens_per_rank=2100", "eval.every=null", "eval.store=null", *others]
    (peak,) = workers.run(peak_of_run, 1, folder, tmp_path / "store", tmp_path / "run", options)
    made = Store.open(tmp_path / "store")
    config = load(None, [*settings_of(folder, tmp_path / "store", tmp_path / "run", 1), *options], world_size=1)
    spec = config.model_source(made.tokenizer.vocab_size).spec
    plans = list(first_plans(config, made, 1, 2))
    assert {plan.parts for plan in plans} == {spec.parts} != {EQUAL_PARTS}
    memory = estimate(spec, config, 1, list(loads(plans, config)), fused=False)
    assert memory.total == pytest.approx(peak, rel=0.2)


def test_models_and_stores_that_do_not_fit_are_refused(base: Path, store: Store, tmp_path: Path) -> None:
    causal = build_model("llama", "eager", vocab_size=259)
    causal.save_pretrained(tmp_path / "causal")
    copy(find(base), base, tmp_path / "causal")
    pairs = written(tmp_path, [{"prompt": "a", "completion": "b"}])
    prepare(pairs, tmp_path / "plain", tokenizer=str(tmp_path / "causal"))
    for model, data, message in (
        (
            base,
            tmp_path / "plain",
            f"has documents without sources, but the model needs sources and targets that begin with token {BOS}",
        ),
        (
            tmp_path / "causal",
            store.path,
            f"has sources and targets that begin with token {BOS}, but the model needs documents without sources",
        ),
    ):
        config = load(None, [f"model.from_pretrained={model}", f"data.store={data}"])
        with pytest.raises(UserError, match=message):
            check_model(config, RunData.open(config), config.model_source(259), 1)
    with pytest.raises(StoreError, match="for encoder-decoders, or they begin targets with other tokens"):
        Store.join([store, Store.open(tmp_path / "plain")], [1, 1])
    with pytest.raises(SamplerError, match=r"sources with their targets, such as .* never split or cut"):
        Documents.choose(load(None, [f"data.store={store.path}"]), store, 100)


@pytest.mark.parametrize(
    ("kind", "message"),
    [("t5", "T5Attention adds a bias by relative position"), ("bart", "takes no decoder_position_ids and counts positions")],
)
def test_other_families_are_refused_before_anything_starts(kind: str, message: str, tmp_path: Path) -> None:
    small(kind).save_pretrained(tmp_path)
    with pytest.raises(HuggingFaceError, match=message):
        _ = pretrained(str(tmp_path), (), "auto", False).spec


def test_what_is_not_tested_is_refused(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for setting, message in (
        ("train.compile=true", "torch.compile breaks graphs where blocks make their attention"),
        ("parallel.tensor_parallel_size=2", "the native decoder cannot run"),
        ("parallel.pipeline_parallel_size=2", "the native decoder cannot run"),
        ("context.ulysses_degree=2", "cross-attention has no Ulysses"),
        ("masked.share=0.3", "masked tokens"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(None, [f"model.from_pretrained={base}", "data.store=store", setting])
    for command, message in (
        (["generate", str(base), "--prompt", "a"], "use generate() of transformers' AutoModelForSeq2SeqLM"),
        (["eval", str(base), "--needle"], "--needle is for causal models"),
    ):
        assert main(command) == 2
        assert message in capsys.readouterr().err
