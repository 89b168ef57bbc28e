"""`model/` in a run folder: what a checkpoint of transformers has beside its weights, kept so that a run can be exported.

For new weights that is the tokenizer of the store alone; for those of a checkpoint also its config, generation config and chat
template, and the names and dtypes of its tensors. The checkpoint itself may be gone by then. Every later stage of a run has a
folder of its own, `model-2/` and so on, because it may have another RoPE.
"""

import json
import shutil
from pathlib import Path

from longctx import tokenizer_files
from longctx.data.chat import CHATML, TEMPLATE_FILE
from longctx.data.store import TOKENIZER, TOKENIZER_FILES, Manifest, Store
from longctx.model.checkpoint_files import DESCRIBED, small_files
from longctx.model.source import ModelSource


def model_folder(run: Path, stage: int) -> Path:
    """Where it is; stages are counted from 0."""
    return run / ("model" if stage == 0 else f"model-{stage + 1}")


def keep_model_files(run: Path, source: ModelSource, store: Store, stage: int = 0) -> None:
    """Writes `model/` of a stage in a run folder, anew if it is there."""
    folder = model_folder(run, stage)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    if source.files is not None:
        source.files.describe(folder)
    kept = tokenizer_files.find(folder)
    paths = [source.path for source in store.sources]
    chats = [path for path in paths if Manifest.load(path).conversations]  # their template is the one that was learnt
    its_own = next((path / TOKENIZER_FILES for path in chats or paths if (path / TOKENIZER_FILES).is_dir()), None)
    if its_own is not None:
        for file in kept:
            (folder / file).unlink()
        tokenizer_files.copy(tokenizer_files.find(its_own, ["**/*"]), its_own, folder)
        return
    if not kept:
        shutil.copyfile(store.path / TOKENIZER, folder / TOKENIZER)
        (folder / "tokenizer_config.json").write_text(json.dumps(_tokenizer_config(store), indent=2) + "\n", "utf-8")
    if chats:  # without a checkpoint's tokenizer they became ChatML
        (folder / TEMPLATE_FILE).write_text(CHATML, "utf-8", newline="")


def _tokenizer_config(store: Store) -> dict[str, object]:
    """For transformers, of a tokenizer.json of ours."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": store.tokenizer.end_of_document_token,
    }


def beside_weights(folder: Path) -> list[Path]:
    """What of `model/` goes into an export, relative to it."""
    return [file for file in small_files(folder) if file.name != DESCRIBED] if folder.is_dir() else []
