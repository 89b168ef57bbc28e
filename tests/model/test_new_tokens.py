"""New tokens: entries added to a checkpoint's vocabulary, on any split of the ranks, in a whole run
and its export."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from longctx.cli import main
from longctx.config import load
from longctx.data.records.pretrained import save_with_tokens
from longctx.data.store.store import Store
from longctx.errors import UserError
from longctx.hf.source import pretrained
from longctx.training.checks import check_model
from longctx.training.data import RunData
from longctx.training.saved.model_folder import keep_model_files
from tests import launched
from tests.huggingface_cases import build_model
from tests.native_cases import build
from tests.new_token_cases import ENTRIES, OLD, reference, step
from tests.pretrained_cases import largest_error
from tests.template_cases import FAMILIES
from tests.workers import Workers


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of a model with tied weights, and of one without."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name in ("Llama 2", "Qwen 2"):
        build(name).save_pretrained(folder / name)
    return {name: folder / name for name in ("Llama 2", "Qwen 2")}


@pytest.mark.parametrize(
    ("name", "ranks", "settings"),
    [
        ("Llama 2", 3, []),
        ("Llama 2", 2, ["parallel.tensor_parallel_size=2"]),
        ("Qwen 2", 2, ["parallel.pipeline_parallel_size=2"]),
    ],
)
def test_a_step_is_that_of_the_extended_checkpoint(
    workers: Workers, checkpoints: dict[str, Path], name: str, ranks: int, settings: list[str]
) -> None:
    """67 entries, which two ranks split unevenly."""
    loss, gradients, weights = reference(checkpoints[name])
    for found_loss, found_gradients, found_weights in workers.run(
        step, ranks, checkpoints[name], settings
    ):
        assert found_weights["model.embed_tokens.weight"].shape[0] == ENTRIES > OLD
        assert all(torch.equal(weights[key], found_weights[key]) for key in found_weights)
        assert found_loss == pytest.approx(loss, rel=1e-5)
        assert largest_error({key: found_gradients[key] for key in gradients}, gradients) < 1e-4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = FAMILIES["SmolLM2"].save(tmp_path_factory.mktemp("checkpoint"))
    entries = len(AutoTokenizer.from_pretrained(folder))
    build_model("llama", "eager", vocab_size=entries).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "notes.jsonl"
    file.write_text(
        "".join(
            json.dumps({"text": "<note>word</note> " * count}) + "\n"
            for count in (3, 5, 80, 11, 40, 14, 6)
        )
    )
    return file


@pytest.mark.slow
def test_finetune_adds_trains_resumes_and_exports(
    checkpoint: Path,
    notes: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Resumed after a checkpoint, a run comes to the same weights, bit by bit."""
    monkeypatch.setattr("longctx.parallel.launch.launch", launched.launch)
    exported = []
    for folder, parts in (("whole", [4]), ("parts", [2, 4])):
        for steps in parts:
            command = [
                "finetune",
                str(checkpoint),
                str(notes),
                "--out",
                str(tmp_path / folder),
                "--processes",
                "2",
            ]
            more = [
                f"--train.steps={steps}",
                "--batch.global_tokens=500",
                "--optimizer.decay_steps=4",
            ]
            more += [
                "--optimizer.warmup_steps=1",
                "--checkpoint.every=2",
                "--log.tensorboard=false",
            ]
            assert (
                main(
                    [
                        *command,
                        *more,
                        "--model.new_tokens=[<note>, </note>]",
                        "--optimizer.learning_rate=0.01",
                    ]
                )
                == 0
            )
        exported.append(AutoModelForCausalLM.from_pretrained(tmp_path / folder / "export"))
    assert (
        "2 entries are added to the embedding and an untied head, each the mean of the others"
        in capfd.readouterr().out
    )
    whole, parts = (model.state_dict() for model in exported)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    tokenizer, old = (
        AutoTokenizer.from_pretrained(folder)
        for folder in (tmp_path / "whole" / "export", checkpoint)
    )
    assert (
        whole["model.embed_tokens.weight"].shape[0]
        == len(tokenizer)
        == len(old) + 2
        == exported[0].config.vocab_size
    )
    assert tokenizer("<note>", add_special_tokens=False).input_ids == [len(old)]
    first = AutoModelForCausalLM.from_pretrained(checkpoint).get_input_embeddings().weight
    for row in whole["model.embed_tokens.weight"][len(old) :]:
        assert 1e-3 < (row - first.mean(0)).abs().max() < 0.1  # moved by four steps
    assert (
        main(["eval", str(tmp_path / "whole"), "--store", str(tmp_path / "whole" / "store")]) == 0
    )


def test_the_tokenizer_is_kept_and_others_are_refused(
    checkpoint: Path, notes: Path, tmp_path: Path
) -> None:
    save_with_tokens(str(checkpoint), ["<note>", "</note>"], tmp_path / "tokenizer")
    store = tmp_path / "store"
    assert (
        main(
            [
                "prepare",
                "--source",
                str(notes),
                "--tokenizer",
                str(tmp_path / "tokenizer"),
                "--out",
                str(store),
            ]
        )
        == 0
    )

    def check(new: str, model: Path = checkpoint) -> None:
        settings = [
            f"model.from_pretrained={model}",
            f"data.store={store}",
            f"model.new_tokens={new}",
        ]
        config = load(None, settings, world_size=1)
        data = RunData.open(config)
        check_model(config, data, config.model_source(data.vocab_size), 1)

    check("[<note>, </note>]")
    bare = tmp_path / "bare"
    file = tmp_path / "tokenizer" / "tokenizer.json"
    assert (
        main(["prepare", "--source", str(notes), "--tokenizer", str(file), "--out", str(bare)]) == 0
    )
    source = pretrained(
        str(checkpoint), (), "auto", split=False, entries=Store.open(bare).tokenizer.vocab_size
    )
    (tmp_path / "run").mkdir()
    keep_model_files(tmp_path / "run", source, Store.open(bare))
    kept = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert len(kept) == source.spec.vocab_size and kept.chat_template, (
        "the new tokenizer.json, beside the checkpoint's files"
    )
    with pytest.raises(
        UserError,
        match=r"adds <note>, </note> to that of .*: set model.new_tokens to \[<note>, </note>\], "
        r"or",
    ):
        check("null")
    with pytest.raises(UserError, match="adds </note> to that of"):
        check("[<note>]")
    with pytest.raises(
        UserError, match=r"model\.new_tokens has <x>, which the tokenizer of .* lacks"
    ):
        check("[<note>, </note>, <x>]")
    build_model("llama", "eager").save_pretrained(FAMILIES["Qwen 3"].save(tmp_path / "qwen"))
    with pytest.raises(UserError, match="was prepared with another tokenizer"):
        check("[<note>, </note>]", tmp_path / "qwen")
