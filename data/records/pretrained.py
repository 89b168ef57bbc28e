"""Pretrained: tokenizer, end-of-text tokens and chat template of a Hugging Face checkpoint, from a
folder or the hub.

`transformers` loads the tokenizer here. The files themselves are copied into the store, so that an
export can put them beside the weights.
"""

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from longctx.data.records.tokenizer import TokenArray, Tokenizer, TokenizerError
from longctx.errors import first_line, install
from longctx.paths import expanded
from longctx.pointers import complaint
from longctx.tokenizer_files import TOKENIZER_FILES, find, read_json

ENDS = "generation_config.json"
"""File of a checkpoint that lists its end-of-text tokens."""
FILES = (*TOKENIZER_FILES, ENDS)
"""Files that a store keeps. `config.json` is needed to load them, but not copied."""
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class Pretrained:
    """A checkpoint's tokenizer.

    Attributes:
        name: folder or hub name, as given.
        tokenizer: tokenizer of texts; its end-of-document token is the checkpoint's end-of-text
            token.
        begin: tokens that the tokenizer puts before every text.
        templates: Jinja templates of conversations without tools (False) and with tools (True);
            None without templates.
        variables: variables of the templates: the special tokens by role.
        ends: all end-of-text and end-of-turn tokens.
        folder, files: files that an export needs, relative to the folder.
    """

    name: str
    tokenizer: Tokenizer
    begin: TokenArray
    templates: Mapping[bool, str] | None
    variables: Mapping[str, Any]
    ends: Sequence[str]
    folder: Path
    files: Sequence[Path]

    @classmethod
    def load(cls, name: str, end_of_document: str | None = None) -> "Pretrained":
        """Reads a folder, or downloads the tokenizer's files from the hub.

        `end_of_document` is the token that ends a text; None: the one in tokenizer_config.json or
        generation_config.json. Raises TokenizerError naming what is missing or wrong, and the way
        out.
        """
        name = expanded(name)
        folder = Path(name) if Path(name).is_dir() else _from_hub(name)
        if said := complaint(folder / file for file in find(folder, (*FILES, "config.json"))):
            raise TokenizerError(f"{name}: {said}")
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise TokenizerError(
                f"reading a checkpoint's tokenizer needs transformers: {install('huggingface')}, "
                "or give the path of its tokenizer.json"
            ) from error
        try:
            loaded = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        except Exception as error:  # a damaged file may raise anything
            has_files = any(file.suffix != ".jinja" for file in find(folder))
            why = f"transformers cannot load a tokenizer from {name}: {first_line(error)}"
            why = why if has_files else f"there is no tokenizer in {name}"
            content = ", ".join(sorted(file.name for file in folder.iterdir())[:10]) or "nothing"
            raise TokenizerError(
                f"{why}; the folder must contain tokenizer.json and tokenizer_config.json, but "
                f"contains {content}"
            ) from error
        backend = getattr(loaded, "backend_tokenizer", None)
        if backend is None:
            raise TokenizerError(
                f"the tokenizer of {name} ({type(loaded).__name__}) does not use the `tokenizers` "
                "library: give a checkpoint with a tokenizer.json"
            )
        if loaded.split_special_tokens:
            raise TokenizerError(
                f"the tokenizer of {name} has split_special_tokens, by which transformers reads "
                "marks of its chat template as characters: remove it from tokenizer_config.json; "
                "--special-tokens-as-text is for special tokens in texts"
            )
        backend.no_padding()  # which a tokenizer.json may ask for
        backend.no_truncation()
        ends = _generation_ends(folder, loaded)
        end = end_of_document or loaded.eos_token or next(iter(ends), None)
        try:
            tokenizer = Tokenizer(backend.to_str(), end)
        except TokenizerError as error:
            raise TokenizerError(f"{name}: {error}") from error
        return cls(
            name,
            tokenizer,
            begin=np.array(_begin(backend), tokenizer.dtype),
            templates=_templates(name, loaded, folder),
            variables=dict(loaded.special_tokens_map),
            ends=tuple(dict.fromkeys(filter(None, [loaded.eos_token, *ends]))),
            folder=folder,
            files=find(folder, FILES),
        )


def save_with_tokens(name: str, tokens: Sequence[str], folder: Path) -> None:
    """Writes the tokenizer of the checkpoint `name` with `tokens` added, for `longctx prepare
    --tokenizer FOLDER`.

    New tokens are found in any text, as they are not special. Raises TokenizerError if the
    checkpoint's cannot be read.
    """
    from transformers import AutoTokenizer

    source = Pretrained.load(name).folder
    loaded = AutoTokenizer.from_pretrained(str(source), trust_remote_code=False)
    loaded.add_tokens(list(tokens))
    loaded.save_pretrained(folder)
    if (source / ENDS).is_file():
        shutil.copy(source / ENDS, folder / ENDS)


def _from_hub(name: str) -> Path:
    if not _HUB_NAME.fullmatch(name):
        raise TokenizerError(
            f"tokenizer {name!r} is neither a file, nor a folder, nor a name on the hub: give "
            "bpe, bytes, the path of a tokenizer.json, or the folder of a checkpoint"
        )
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, allow_patterns=[*FILES, "config.json"]))
    except Exception as error:  # from the network, the hub, or a missing package
        raise TokenizerError(
            f"tokenizer {name!r} is not a local file or folder, and cannot be downloaded from the "
            f"hub: {first_line(error)}; give the folder of a checkpoint"
        ) from error


def _generation_ends(folder: Path, loaded: Any) -> list[str]:
    """Returns the end-of-text tokens that generation_config.json lists."""
    ids = read_json(folder / ENDS).get("eos_token_id")
    return [
        loaded.convert_ids_to_tokens(number)
        for number in (ids if isinstance(ids, list) else [ids])
        if number is not None
    ]


def _begin(backend: Any) -> list[int]:
    """Returns the special tokens that the tokenizer puts before a text."""
    text = "a"
    plain, framed = (
        backend.encode(text, add_special_tokens=special).ids for special in (False, True)
    )
    for start in range(len(framed) - len(plain) + 1):
        if framed[start : start + len(plain)] == plain:
            return list(framed[:start])
    return []


def _templates(name: str, loaded: Any, folder: Path) -> Mapping[bool, str] | None:
    # Of a processor; older checkpoints have it alone.
    beside = read_json(folder / "chat_template.json").get("chat_template")
    if not loaded.chat_template and beside:
        return dict.fromkeys((False, True), str(beside))
    if not loaded.chat_template:
        return None
    try:
        return {
            False: loaded.get_chat_template(None, None),
            True: loaded.get_chat_template(None, [{}]),
        }
    except ValueError as error:
        raise TokenizerError(
            f"{name} has several chat templates and no default: {error}; give --chat-template FILE"
        ) from error
