"""Checkpoints of transformers: a folder of config.json, safetensors files and a tokenizer, read
tensor by tensor."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from longctx import tokenizer_files
from longctx.errors import UserError, brief, first_line, install, shell
from longctx.model.published import PUBLISHED, is_config_alone, write_published
from longctx.own_files import LIST
from longctx.paths import expanded, is_hub_name
from longctx.pointers import complaint
from longctx.tokenizer_files import TOKENIZER_FILES

INDEX = "model.safetensors.index.json"
BESIDE_WEIGHTS = ("*.json", "*.jinja", "*.txt", *TOKENIZER_FILES)
"""Files of a checkpoint other than weights: config, tokenizer, chat template."""
DESCRIBED = "tensors.json"
"""File with the name and dtype of every tensor, in a checkpoint without its weights."""
ENDS = "ends.json"
"""File with the ids of the tokens that a run trains as ends."""
OF_WEIGHTS = {INDEX, DESCRIBED, ENDS, LIST, "pytorch_model.bin.index.json", "trainer_state.json"}
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""Torch dtypes by their names in safetensors."""


class PretrainedError(UserError):
    """A checkpoint that cannot be read, or cannot be trained as it is."""


@dataclass(frozen=True)
class CheckpointFiles:
    """A checkpoint on disk.

    Attributes:
        files: file of each tensor, by the tensor's name.
        rope: RoPE settings that replace those of config.json, see `context_extension`.
        untied: whether tied weights of config.json are not tied, as the files have different values
            for them.
        added: number of entries of the vocabulary that the files lack; their rows are the mean of
            the others.
        vocabulary: names of the tensors with a row for every entry, if entries are added.
        remark: where its config comes from, if not from the checkpoint; empty otherwise.
    """

    folder: Path
    files: Mapping[str, Path]
    rope: tuple[tuple[str, Any], ...] = ()
    untied: bool = False
    added: int = 0
    vocabulary: frozenset[str] = frozenset()
    remark: str = ""

    @classmethod
    def open(cls, source: str) -> "CheckpointFiles":
        """Finds a checkpoint in a folder, or by its name on the hub. Raises PretrainedError if it
        is missing or damaged."""
        source = expanded(source)
        check_name(source)
        folder, remark = _folder(source)
        if said := complaint(sorted(folder.iterdir())):
            raise PretrainedError(f"{source}: {said}")
        if (folder / DESCRIBED).is_file():
            return cls(
                folder,
                dict.fromkeys(
                    json.loads((folder / DESCRIBED).read_text("utf-8")), folder / "weights"
                ),
            )
        return cls(folder, _index(folder), remark=remark)

    @property
    def has_values(self) -> bool:
        """Whether weights can be read: not of a config alone, and not of what `describe` has
        written."""
        return bool(self.files) and not (self.folder / DESCRIBED).is_file()

    def require_weights(self) -> None:
        """Raises PretrainedError if there is a config alone, which estimates and plans need no more
        than."""
        if not self.files:
            raise PretrainedError(
                f"{self.folder} has no .safetensors files: save the model with transformers' "
                "save_pretrained, which writes them"
            )

    @cached_property
    def config(self) -> Any:
        """Config as transformers loads it, changed by `rope`, `untied` and `added`. Raises
        PretrainedError if it is damaged."""
        try:
            from transformers import AutoConfig
        except ImportError as error:
            raise PretrainedError(
                f"reading a checkpoint needs transformers, which cannot be imported ({error}): "
                f"{install('huggingface')}"
            ) from error
        try:
            config = AutoConfig.from_pretrained(self.folder, trust_remote_code=False)
        except (ValueError, KeyError, OSError) as error:
            raise PretrainedError(
                f"{self.folder}/config.json cannot be used: {brief(error)}"
            ) from error
        if self.rope:
            from longctx.model.context_extension import with_rope

            with_rope(config, dict(self.rope))
        if self.untied:
            config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
        config.get_text_config().vocab_size += self.added
        return config

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        if (self.folder / DESCRIBED).is_file():
            described = json.loads((self.folder / DESCRIBED).read_text("utf-8"))
            return {name: getattr(torch, dtype) for name, dtype in described.items()}
        dtypes_by_name: dict[str, torch.dtype] = {}
        for file in sorted(set(self.files.values())):
            with file.open("rb") as stream:  # safetensors has already checked the header
                header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
            dtypes_by_name |= {
                name: DTYPES[tensor["dtype"]]
                for name, tensor in header.items()
                if name != "__metadata__"
            }
        return dtypes_by_name

    @cached_property
    def fingerprint(self) -> str:
        """Hash that identifies the weights by every tensor's name, shape and first row, whatever
        its file and dtype."""
        from safetensors import safe_open

        digest = hashlib.sha256()
        opened: dict[Path, Any] = {
            file: safe_open(str(file), framework="pt") for file in set(self.files.values())
        }
        for name, file in sorted(self.files.items()):
            part = opened[file].get_slice(name)
            shape = part.get_shape()
            first = part[:1] if shape else opened[file].get_tensor(name)
            digest.update(f"{name} {shape}".encode())
            digest.update(first.float().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    def dtype_of(self, name: str) -> torch.dtype:
        """Returns the dtype of a tensor by its name in transformers; if the files lack this name,
        the most common dtype."""
        bare = name.partition(".")[2]  # its name in a base model that was saved alone
        for known in (name, bare):
            if known in self.dtypes:
                return self.dtypes[known]
        return Counter(self.dtypes.values()).most_common(1)[0][0]

    def describe(self, folder: Path) -> None:
        """Copies all files but the weights to `folder`, which `open` accepts as a checkpoint whose
        weights cannot be read."""
        tokenizer_files.copy(small_files(self.folder), self.folder, folder)
        if self.rope or self.untied or self.added:
            self.config.save_pretrained(folder)
        dtypes = {name: str(dtype).removeprefix("torch.") for name, dtype in self.dtypes.items()}
        (folder / DESCRIBED).write_text(json.dumps(dtypes, indent=0), "utf-8")

    def read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """Reads a tensor, or rows of it, to the CPU, as a copy: safetensors may return a view of
        the file.

        Raises PretrainedError for NaN and infinity, with which every loss would be NaN.
        """
        with self._opened(name) as tensors:
            tensor: torch.Tensor = (
                tensors.get_tensor(name) if rows is None else tensors.get_slice(name)[rows]
            )
            if found := not_finite(tensor):
                raise PretrainedError(
                    f"{self.files[name]} is damaged: {name} has {found}; download or copy the "
                    "checkpoint again, or use one that was saved before the loss of its run was "
                    "NaN"
                )
            if name in self.vocabulary:
                mean = tensor.mean(0, keepdim=True, dtype=torch.float32).to(tensor.dtype)
                return torch.cat([tensor, mean.expand(self.added, *tensor.shape[1:])])
            return tensor.clone()

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor, with the rows of added entries."""
        with self._opened(name) as tensors:
            shape = tuple(tensors.get_slice(name).get_shape())
        if name in self.vocabulary:
            return (shape[0] + self.added, *shape[1:])
        return shape

    @contextmanager
    def _opened(self, name: str) -> Iterator[Any]:
        """Opens the file of a tensor. Raises PretrainedError if it cannot be read."""
        from safetensors import SafetensorError, safe_open

        self.require_weights()
        file = self.files[name]
        try:
            with safe_open(str(file), framework="pt") as tensors:
                yield tensors
        except (SafetensorError, OSError) as error:
            raise PretrainedError(
                f"{file} is damaged: {error}; download or copy the checkpoint again"
            ) from error


def not_finite(tensor: torch.Tensor) -> str:
    """Returns how many numbers of a tensor are NaN or infinite, in words; nothing if none are."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return ""
    # Torch has no such function for 8 bits.
    wide = tensor.float() if tensor.itemsize == 1 else tensor
    finite = torch.isfinite(wide)
    if bool(finite.all()):
        return ""
    count = int((~finite).sum())
    first = (~finite).nonzero()[0].tolist()
    return (
        f"{count:,} of {tensor.numel():,} numbers that are NaN or infinite (the first at {first})"
    )


def small_files(folder: Path) -> list[Path]:
    """Returns the files of a checkpoint that neither contain nor describe weights, relative to its
    folder."""
    return [
        file for file in tokenizer_files.find(folder, BESIDE_WEIGHTS) if file.name not in OF_WEIGHTS
    ]


def check_name(source: str) -> None:
    """Raises PretrainedError unless `source` is the folder of a checkpoint, or may be a name on the
    hub."""
    folder = Path(source)
    if not folder.is_dir() and not is_hub_name(source):
        raise PretrainedError(
            f"there is no folder {source}: give the folder of a checkpoint, or its name on the hub "
            "as OWNER/NAME"
        )
    if not folder.is_dir() or (folder / "config.json").is_file():
        return
    if (folder / "config.yaml").is_file():
        raise PretrainedError(
            f"{source} is the folder of a run, whose checkpoints only longctx reads: export it "
            f"first (longctx export {shell(source)} OUT), and give OUT"
        )
    if (folder / "adapter_config.json").is_file():
        raise PretrainedError(
            f"{source} has adapters, but no model: merge them with longctx export RUN OUT --merge, "
            "and give OUT"
        )
    content = ", ".join(sorted(file.name for file in folder.iterdir())[:5]) or "nothing"
    raise PretrainedError(
        f"{source} has no config.json: give the folder of a checkpoint as transformers saves it "
        f"(this one contains {content})"
    )


def _folder(source: str) -> tuple[Path, str]:
    """Returns the folder of a checkpoint, downloaded from the hub if it is not a local folder, and
    a remark where only its sizes are known."""
    if Path(source).is_dir():
        return Path(source), ""
    check_name(source)
    if is_config_alone():
        wanted = ["config.json"]
    else:
        wanted = [*BESIDE_WEIGHTS, "*.safetensors"]
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(source, allow_patterns=wanted)), ""
    except Exception as error:  # network, hub and file system may raise anything
        if is_config_alone() and source in PUBLISHED:
            why = f"its config cannot be downloaded ({type(error).__name__})"
            return Path(_published_folder(source).name), f"its published sizes, as {why}"
        raise PretrainedError(
            f"{source} is not a local folder, and cannot be downloaded from the hub "
            f"({type(error).__name__}: {first_line(error)}): check the name, or run `hf download "
            f"{source} --local-dir FOLDER` where the hub can be reached, and give FOLDER"
        ) from error


@cache
def _published_folder(name: str) -> TemporaryDirectory[str]:
    """Makes a folder with the published config of a checkpoint, which is removed when Python
    ends."""
    folder: TemporaryDirectory[str] = TemporaryDirectory()
    write_published(name, Path(folder.name))
    return folder


def _index(folder: Path) -> dict[str, Path]:
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors"))
    if (folder / INDEX).is_file():
        try:
            by_tensor = json.loads((folder / INDEX).read_text("utf-8"))["weight_map"]
        except (ValueError, KeyError) as error:
            raise PretrainedError(
                f"{folder / INDEX} is damaged: {error}; download or copy the checkpoint again"
            ) from error
        files = sorted({folder / file for file in by_tensor.values()})
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise PretrainedError(
                f"{folder} lacks {', '.join(missing[:3])}, which its index lists: download or copy "
                "it again"
            )
    names: dict[str, Path] = {}
    for file in files:
        try:
            with safe_open(str(file), framework="pt") as tensors:
                names |= dict.fromkeys(tensors.keys(), file)
        except (SafetensorError, OSError) as error:
            raise PretrainedError(
                f"{file} is damaged: {error}; download or copy the checkpoint again"
            ) from error
    return names
