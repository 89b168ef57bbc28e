"""Finds and copies the tokenizer files of a checkpoint, including chat templates, and tells its decoder's first token."""

import json
import shutil
from collections.abc import Iterable, Mapping
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
    """Returns the files of a folder that match any of the patterns, relative to the folder, sorted."""
    return sorted({file.relative_to(folder) for pattern in patterns for file in folder.glob(pattern) if file.is_file()})


def copy(files: Iterable[Path], source: Path, target: Path) -> None:
    """Copies `files`, relative to the folder `source`, to the same relative paths in the folder `target`."""
    for file in files:
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / file, target / file)


def read_json(file: Path) -> dict[str, Any]:
    """Returns the content of a JSON file of a checkpoint, {} if there is none. Raises UserError if it is damaged."""
    try:
        return dict(json.loads(file.read_text("utf-8"))) if file.is_file() else {}
    except (ValueError, TypeError) as error:
        raise UserError(f"{file} is damaged: {error}; download it again, or remove it") from error


def is_seq2seq(config: Mapping[str, Any]) -> bool:
    """Returns whether a config of transformers is of an encoder-decoder."""
    causal = any(name.endswith("ForCausalLM") for name in config.get("architectures") or ())
    return bool(config.get("is_encoder_decoder")) and not causal


def start_token(config: Mapping[str, Any]) -> int | None:
    """Returns the token that the decoder of an encoder-decoder reads first; None for other models, or without one."""
    if not is_seq2seq(config):
        return None
    decoder = config.get("decoder") or {}
    known = config.get("decoder_start_token_id"), decoder.get("bos_token_id"), config.get("bos_token_id")
    return next((int(token) for token in known if token is not None), None)
