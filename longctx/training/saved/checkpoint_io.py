"""Files of a checkpoint: written with checksums, and read without executing anything, by
`torch.distributed.checkpoint`.

Its description of the tensors, `.metadata`, is a pickle, and a crafted pickle runs code when it is
loaded. So only the classes that a description consists of are loaded, and of the other files only
tensors.
"""

import errno
import io
import pickle
from collections.abc import Generator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path, PurePosixPath
from typing import Any, cast

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from longctx.checksums import SummedFile, inside, persistent
from longctx.errors import UserError

CLASSES = {
    (cls.__module__, cls.__qualname__)
    for cls in (
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.TensorStorageMetadata,
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.TensorProperties,
        metadata.StorageMeta,
        metadata._MEM_FORMAT_ENCODING,
        _StorageInfo,
    )
} | {("torch", "Size"), ("torch.serialization", "_get_layout")}
"""Names that `.metadata` may contain, besides dtypes and the path it was written to."""


class CheckpointError(UserError):
    """Raised if a checkpoint cannot be written, found or used."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        # Its module depends on the version of Python.
        if name == "PosixPath" and module.split(".")[0] == "pathlib":
            return PurePosixPath
        if (module, name) in CLASSES or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which no checkpoint needs and which is not loaded"
        )


class TensorReader(FileSystemReader):
    """Reads a checkpoint in a folder. Raises CheckpointError for a damaged or crafted description
    of its tensors."""

    def read_metadata(self, *arguments: Any, **named: Any) -> Metadata:
        path = Path(self.path, ".metadata")
        data = persistent(path.read_bytes)
        try:
            content = _Unpickler(io.BytesIO(data)).load()
            for stored in content.storage_data.values():
                inside(path.parent, stored.relative_path)
            content.storage_meta = metadata.StorageMeta(load_id=self.load_id)
        except Exception as error:  # damaged bytes may raise anything
            raise CheckpointError(
                f"{path.name} is damaged: {error or type(error).__name__}"
            ) from error
        return cast(Metadata, content)


class TensorPlanner(DefaultLoadPlanner):
    """Loads tensors only: torch unpickles everything else without limits."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn} is not a tensor in this checkpoint")


class SummingFiles(FileSystem):
    """Writes files of a checkpoint; `checksums` has the checksums of each file, by its name."""

    def __init__(self, checksums: dict[str, str]) -> None:
        self.checksums = checksums

    @contextmanager
    def create_stream(
        self, path: str | PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        if mode != "wb":
            raise OSError(errno.EINVAL, "a checkpoint is only written", str(path))
        with SummedFile(Path(path)) as stream:
            yield stream
        self.checksums[Path(path).name] = stream.checksums

    def rename(self, path: str | PathLike[str], new_path: str | PathLike[str]) -> None:
        super().rename(path, new_path)
        self.checksums[Path(new_path).name] = self.checksums.pop(Path(path).name)


def cause(error: BaseException) -> str:
    """Returns the error of the first failed rank, without the tracebacks of CheckpointException."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (exception, _) = min(error.failures.items(), key=lambda failure: failure[0])
        return f"rank {rank}: {exception}"
    return str(error)
