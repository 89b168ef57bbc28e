"""Writes the weights of a checkpoint of transformers: safetensors files of bounded size and their index, tensor by tensor.

Names, shapes and dtypes are known in advance, so every tensor has its place in a file from the start, and none is buffered.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from longctx.model.checkpoint_files import DTYPES, INDEX, CheckpointFiles

NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Planned:
    """A tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def planned(
    tensors: Mapping[str, torch.Tensor], source: CheckpointFiles | None, dtype: torch.dtype | None = None
) -> list[Planned]:
    """Returns how converted tensors are written: in `dtype`, by default as in the checkpoint `source`; None: as they are."""
    plan = []
    for name, tensor in tensors.items():
        stored = tensor.dtype if source is None else source.dtype_of(name)
        written = dtype if dtype is not None and stored.is_floating_point else stored
        plan.append(Planned(name, tuple(tensor.shape), written))
    return plan


@dataclass(frozen=True)
class _Place:
    file: Path
    start: int
    tensor: Planned


class CheckpointWriter:
    """Writes the weight files of a checkpoint.

    Args:
        folder: existing folder of the checkpoint.
        tensors: all tensors to be written, in their order in the files.
        max_shard_bytes: maximum bytes of tensors per file, unless a single tensor has more.
    """

    def __init__(self, folder: Path, tensors: Iterable[Planned], max_shard_bytes: int) -> None:
        self.folder = folder
        shards = _shards(tensors, max_shard_bytes)
        self.files = [folder / "model.safetensors"]
        if len(shards) > 1:
            self.files = [folder / f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
        self.total = sum(tensor.bytes for shard in shards for tensor in shard)
        self.places: dict[str, _Place] = {}
        for file, shard in zip(self.files, shards, strict=True):
            self._begin(file, shard)
        self.missing = set(self.places)

    def _begin(self, file: Path, shard: list[Planned]) -> None:
        """Writes the header of a file, in the order of safetensors: larger dtypes first, so that all tensors are aligned."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for tensor in sorted(shard, key=lambda tensor: (-tensor.dtype.itemsize, NAMES[tensor.dtype], tensor.name)):
            offsets = [at, at + tensor.bytes]
            header[tensor.name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
            self.places[tensor.name] = _Place(file, at, tensor)
            at += tensor.bytes
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        for name in header.keys() - {"__metadata__"}:
            place = self.places[name]
            self.places[name] = _Place(file, 8 + len(text) + place.start, place.tensor)
        with file.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + at)

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Writes tensors by name, each once, in their planned dtypes."""
        for name, tensor in tensors.items():
            place = self.places[name]
            assert tuple(tensor.shape) == place.tensor.shape, (name, tensor.shape, place.tensor.shape)
            self.missing.remove(name)
            stored = tensor.detach().to("cpu", place.tensor.dtype).contiguous()
            with place.file.open("r+b") as stream:
                stream.seek(place.start)
                stream.write(stored.flatten().view(torch.uint8).numpy().data)

    def close(self) -> None:
        """Writes the index if there are several files, checks that all tensors were written, and syncs the files to disk."""
        assert not self.missing, sorted(self.missing)
        if len(self.files) > 1:
            files = {name: place.file.name for name, place in sorted(self.places.items())}
            index = {"metadata": {"total_size": self.total}, "weight_map": files}
            (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")
        for file in self.files:
            with file.open("rb") as stream:
                os.fsync(stream.fileno())


def _shards(tensors: Iterable[Planned], max_bytes: int) -> list[list[Planned]]:
    shards: list[list[Planned]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.bytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.bytes
    return shards
