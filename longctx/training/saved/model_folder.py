"""`model/` in a run folder: the files of a transformers checkpoint besides its weights, kept for
export.

For new weights only the tokenizer of the store is kept; for a checkpoint also its config,
generation config, chat template and the names and dtypes of its tensors, as the checkpoint may be
deleted before the export; and the ids of the tokens that the data train as ends, at which
generation stops.
"""

import json
import shutil
from pathlib import Path

import numpy as np

from longctx import tokenizer_files
from longctx.data.records.chat import CHATML, TEMPLATE_FILE
from longctx.data.records.tokenizer import added_tokens
from longctx.data.store.manifest import TOKENIZER, TOKENIZER_FILES, Manifest
from longctx.data.store.store import Store
from longctx.hf.source import ModelSource
from longctx.model.checkpoint_files import DESCRIBED, ENDS, small_files

SAMPLED = 32
"""Documents of a store in which ends are looked for: so many of those with targets everywhere, and
of the others."""


def trained_ends(store: Store) -> list[int]:
    """Returns the special tokens that are the last targets of documents: the end of a turn, or of a
    text."""
    special = np.zeros(store.tokenizer.vocab_size, np.bool_)
    whole = store.trained_tokens >= store.lengths - 1
    special[[*store.tokenizer.special, store.tokenizer.end_of_document]] = True
    ends: set[int] = set()
    for source in store.sources:
        documents = np.arange(source.documents.start, source.documents.stop)
        for kind in (whole[documents], ~whole[documents]):
            for document in documents[kind][:SAMPLED].tolist():
                tokens, trained = store.tokens(document, 0, int(store.lengths[document]))
                last = tokens[special[tokens]][-1:] if trained.all() else tokens[trained][-1:]
                ends.update(last[special[last]].tolist())
    return sorted(ends)


def model_folder(run: Path) -> Path:
    return run / "model"


def keep_model_files(run: Path, source: ModelSource, store: Store) -> None:
    """Writes the model folder of a run, replacing an existing one."""
    folder = model_folder(run)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    if source.files is not None:
        source.files.describe(folder)
    (folder / ENDS).write_text(json.dumps(trained_ends(store)), "utf-8")
    kept = tokenizer_files.find(folder)
    paths = [source.path for source in store.sources]
    # The model was trained with their template.
    chats = [path for path in paths if Manifest.load(path).conversations]
    stored = next(
        (path / TOKENIZER_FILES for path in chats or paths if (path / TOKENIZER_FILES).is_dir()),
        None,
    )
    if stored is not None:
        for file in kept:
            (folder / file).unlink()
        tokenizer_files.copy(tokenizer_files.find(stored, ["**/*"]), stored, folder)
        return
    if not kept:
        store.tokenizer.save(folder / TOKENIZER)
        (folder / "tokenizer_config.json").write_text(
            json.dumps(_tokenizer_config(store), indent=2) + "\n", "utf-8"
        )
    elif (own := folder / TOKENIZER).is_file() and set(added_tokens(store.tokenizer.text)) - set(
        added_tokens(own.read_text())
    ):
        store.tokenizer.save(own)  # has new tokens
    if chats:  # without a checkpoint's tokenizer, conversations are prepared with ChatML
        (folder / TEMPLATE_FILE).write_text(CHATML, "utf-8", newline="")


def _tokenizer_config(store: Store) -> dict[str, object]:
    """Returns tokenizer_config.json for a tokenizer.json made by longctx."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": store.tokenizer.end_of_document_token,
    }


def beside_weights(folder: Path) -> list[Path]:
    """Returns the files of a model folder that are exported, relative to it."""
    if folder.is_dir():
        return [file for file in small_files(folder) if file.name != DESCRIBED]
    return []
