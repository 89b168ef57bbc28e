"""Which files of a checkpoint's folder are its tokenizer, its chat templates among them; and copies of them."""

import shutil
from collections.abc import Iterable
from pathlib import Path

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "*.tiktoken",
)


def find(folder: Path, patterns: Iterable[str] = TOKENIZER_FILES) -> list[Path]:
    """The files of a folder that any of the patterns names, relative to it, in order."""
    return sorted({file.relative_to(folder) for pattern in patterns for file in folder.glob(pattern) if file.is_file()})


def copy(files: Iterable[Path], source: Path, target: Path) -> None:
    """Copies these files of a folder, given relative to it, into another one, subfolders kept."""
    for file in files:
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / file, target / file)
