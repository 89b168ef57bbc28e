"""New tokens: adds them to the tokenizer of a checkpoint, and compares tokenizers apart from them."""

import json
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from longctx.data.records.pretrained import Pretrained

ENDS = "generation_config.json"
"""File of a checkpoint that lists its end-of-text tokens."""


def save_with_tokens(name: str, tokens: Sequence[str], folder: Path) -> None:
    """Writes the tokenizer of the checkpoint `name` with `tokens` added, for `longctx prepare --tokenizer FOLDER`.

    New tokens are found in any text, as they are not special. Raises TokenizerError if the checkpoint's cannot be read.
    """
    from transformers import AutoTokenizer

    source = Pretrained.load(name).folder
    loaded = AutoTokenizer.from_pretrained(str(source), trust_remote_code=False)
    loaded.add_tokens(list(tokens))
    loaded.save_pretrained(folder)
    if (source / ENDS).is_file():
        shutil.copy(source / ENDS, folder / ENDS)


def added_tokens(text: str) -> dict[str, int]:
    """Returns the added tokens of a tokenizer.json, special ones included, with their ids."""
    return {token["content"]: token["id"] for token in json.loads(text).get("added_tokens") or ()}


def without_added(text: str, tokens: Collection[str]) -> str:
    """Returns a tokenizer.json without these added tokens."""
    content = json.loads(text)
    kept = [token for token in content.get("added_tokens") or () if token["content"] not in tokens]
    return json.dumps({**content, "added_tokens": kept})
