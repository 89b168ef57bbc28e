"""Finds and copies the tokenizer files of a checkpoint, including chat templates."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from longctx.errors import UserError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "*.tiktoken",
)


def find(folder: Path, patterns: Iterable[str] = TOKENIZER_FILES) -> list[Path]:
    """Returns the files of a folder that match any of the patterns, relative to the folder,
    sorted."""
    return sorted(
        {
            file.relative_to(folder)
            for pattern in patterns
            for file in folder.glob(pattern)
            if file.is_file()
        }
    )


def copy(files: Iterable[Path], source: Path, target: Path) -> None:
    """Copies `files`, relative to the folder `source`, to the same relative paths in the folder
    `target`."""
    for file in files:
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        (target / file).write_bytes((source / file).read_bytes())


def read_json(file: Path) -> dict[str, Any]:
    """Returns the content of a JSON file of a checkpoint, {} if there is none. Raises UserError if
    it is damaged."""
    try:
        if file.is_file():
            return dict(json.loads(file.read_text("utf-8")))
        return {}
    except (ValueError, TypeError) as error:
        raise UserError(f"{file} is damaged: {error}; download it again, or remove it") from error
