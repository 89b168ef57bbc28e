"""`model/` in a run folder: what a checkpoint of transformers has beside its weights, kept so that a run can be exported.

For new weights that is the tokenizer of the store alone; for those of a checkpoint also its config, generation config and chat
template, and the names and dtypes of its tensors. The checkpoint itself may be gone by then. Every later stage of a run has a
folder of its own, `model-2/` and so on, because it may have another RoPE.
"""

import json
import shutil
from pathlib import Path

from longctx.data.store import TOKENIZER, Store
from longctx.model.checkpoint_files import DESCRIBED, small_files
from longctx.model.source import ModelSource

OF_TOKENIZERS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*.jinja",
    "*.model",
    "*.tiktoken",
)
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The template of `longctx.data.chat`."""


def model_folder(run: Path, stage: int) -> Path:
    """Where it is; stages are counted from 0."""
    return run / ("model" if stage == 0 else f"model-{stage + 1}")


def keep_model_files(run: Path, source: ModelSource, store: Store, stage: int) -> None:
    """Writes `model/` of a stage in a run folder, anew if it is there."""
    folder = model_folder(run, stage)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    if source.files is not None:
        source.files.describe(folder)
    kept = {file for pattern in OF_TOKENIZERS for file in folder.glob(pattern)}
    its_own = next((source.path / "tokenizer" for source in store.sources if (source.path / "tokenizer").is_dir()), None)
    if its_own is not None:
        for file in kept:
            file.unlink()
        for file in its_own.iterdir():
            shutil.copyfile(file, folder / file.name)
    elif not kept:
        shutil.copyfile(store.path / TOKENIZER, folder / TOKENIZER)
        (folder / "tokenizer_config.json").write_text(json.dumps(_tokenizer_config(store), indent=2) + "\n", "utf-8")


def _tokenizer_config(store: Store) -> dict[str, object]:
    """For transformers, of a tokenizer.json of ours."""
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": store.tokenizer.end_of_document_token,
    }
    if store.trained_tokens.sum() != store.lengths.sum() - len(store):  # conversations: not every token is a target
        config["chat_template"] = CHATML
    return config


def beside_weights(folder: Path) -> list[Path]:
    """What of `model/` goes into an export."""
    return [file for file in small_files(folder) if file.name != DESCRIBED] if folder.is_dir() else []
