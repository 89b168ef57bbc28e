"""Writes the weights of a checkpoint of transformers: safetensors files of bounded size and their
index, one file at a time."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from longctx.model.checkpoint_files import INDEX


class CheckpointWriter:
    """Writes the weight files of a checkpoint; a tensor is held until all others of its file are
    there.

    Args:
        tensors: all tensors to be written, without values, in their order in the files.
        max_shard_bytes: maximum bytes of tensors per file, unless a single tensor has more.
    """

    def __init__(
        self, folder: Path, tensors: Mapping[str, torch.Tensor], max_shard_bytes: int
    ) -> None:
        from huggingface_hub import split_torch_state_dict_into_shards

        self.folder = folder
        self.tensors = tensors
        self.held = dict[str, torch.Tensor]()
        split = split_torch_state_dict_into_shards(dict(tensors), max_shard_size=max_shard_bytes)
        self.total = sum(tensor.nbytes for tensor in tensors.values())
        self.files = split.filename_to_tensors
        self.missing = set(split.filename_to_tensors)
        if split.is_sharded:
            index = {
                "metadata": {"total_size": self.total},
                "weight_map": dict(sorted(split.tensor_to_filename.items())),
            }
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes tensors by name, each once, and writes the files that are complete, in the dtypes
        asked for."""
        from safetensors.torch import save_file

        for name, tensor in tensors.items():
            asked = self.tensors[name]
            assert tensor.shape == asked.shape, (name, tensor.shape, asked.shape)
            self.held[name] = tensor.detach().to("cpu", asked.dtype).contiguous()
        for file in [
            file for file in sorted(self.missing) if self.held.keys() >= set(self.files[file])
        ]:
            save_file(
                {name: self.held.pop(name) for name in self.files[file]},
                self.folder / file,
                {"format": "pt"},
            )
            with (self.folder / file).open("rb") as stream:
                os.fsync(stream.fileno())
            self.missing.remove(file)

    def close(self) -> None:
        """Checks that every file was written."""
        assert not self.missing, sorted(self.missing)
