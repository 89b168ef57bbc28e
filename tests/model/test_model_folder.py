"""Files that a run keeps beside its weights: the tokenizer, and the chat template of its store's
conversations."""

import shutil
from pathlib import Path

import pytest
import transformers

from longctx.data.records.sources import open_corpus
from longctx.data.store.prepare import prepare
from longctx.data.store.store import Store
from longctx.hf.model import TransformersSource
from longctx.model.checkpoint_files import CheckpointFiles
from longctx.training.saved.model_folder import keep_model_files
from tests.data_cases import write_jsonl
from tests.template_cases import FAMILIES, chat

# SmolLM2 would add a system turn.
MULTI = {"messages": chat("Grüße, 日本 🦊?", "x = {'a': 1}\n", "And?", "No.")}


@pytest.mark.parametrize("train_on", ["assistant", "all"])
@pytest.mark.parametrize("how", ["no template", "chatml", "tokenizer.json"])
def test_what_became_chatml_is_exported_with_its_template(
    tmp_path: Path, how: str, train_on: str
) -> None:
    """If the checkpoint has no template, ChatML was requested, or only a tokenizer.json was given;
    texts come first."""
    bare = tmp_path / "bare"
    FAMILIES["SmolLM2"].save(bare)
    if how == "no template":
        (bare / "chat_template.jinja").unlink()
    source = open_corpus(str(write_jsonl(tmp_path / "s.jsonl", [MULTI])))
    given = {
        "tokenizer": str(bare / "tokenizer.json" if how == "tokenizer.json" else bare),
        "train_on": train_on,
    }
    prepare(
        source, tmp_path / "store", **given, chat_template="chatml" if how == "chatml" else "auto"
    )
    store = Store.open(tmp_path / "store")
    (bare / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "run").mkdir()
    files = CheckpointFiles(bare, {})
    vars(files)["dtypes"] = {}
    (tmp_path / "texts.txt").write_text("Text has no template.")
    prepare(
        open_corpus(str(tmp_path / "texts.txt")), tmp_path / "texts", tokenizer=given["tokenizer"]
    )
    mixed = Store.join([Store.open(tmp_path / "texts"), store], [1, 1])
    keep_model_files(tmp_path / "run", TransformersSource(files), mixed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    tokens = store.read(0, 0, int(store.lengths[0]))[0].tolist()
    assert tokenizer.apply_chat_template(MULTI["messages"], return_dict=False) == tokens[:-1]
    question = tokenizer.apply_chat_template(
        MULTI["messages"][:-1], add_generation_prompt=True, return_dict=False
    )
    assert question == tokens[: len(question)] and tokenizer.decode(question).endswith(
        "<|im_start|>assistant\n"
    )
    assert (
        store.manifest.template.startswith("ChatML")
        and "differently" not in store.manifest.template
    )


def test_a_tokenizer_whose_chatml_transformers_cannot_write_is_named(tmp_path: Path) -> None:
    """The tokenizer begins every text with a space."""
    checkpoint = FAMILIES["Mistral"].save(tmp_path / "checkpoint")
    source = open_corpus(str(write_jsonl(tmp_path / "s.jsonl", [MULTI])))
    store = prepare(source, tmp_path / "store", tokenizer=str(checkpoint), chat_template="chatml")
    assert store.manifest.template.endswith(
        "transformers encodes its markers differently with this tokenizer"
    )


def test_texts_alone_get_no_template(tmp_path: Path) -> None:
    shutil.copytree(
        FAMILIES["SmolLM2"].save(tmp_path / "full"),
        tmp_path / "bare",
        ignore=shutil.ignore_patterns("*.jinja"),
    )
    (tmp_path / "a.txt").write_text("text")
    prepare(
        open_corpus(str(tmp_path / "a.txt")), tmp_path / "store", tokenizer=str(tmp_path / "bare")
    )
    assert not (tmp_path / "store" / "tokenizer" / "chat_template.jinja").exists()
