"""Megatron: documents of token ids in the two files of Megatron-LM's indexed data sets, NAME.bin
and NAME.idx.

The .bin file is all tokens; the .idx file says where sequences and documents are, in little-endian
numbers:

    "MMIDIDX" and two zero bytes, version 1 (uint64), code of the tokens' type (uint8), number of
    sequences (uint64), number of document indices (uint64), tokens of every sequence (int32), first
    byte of every sequence (int64), document indices (int64)

Document indices are the first sequence of every document, and the number of sequences. A mode of
every sequence (int8), which multimodal data sets have, may follow (Megatron-LM,
megatron/core/datasets/indexed_dataset.py).
"""

import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

MAGIC = b"MMIDIDX\x00\x00"
HEAD = struct.Struct("<9sQBQQ")
TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Types of tokens by code; 6 and 7 are floating point."""


class MegatronIndex(NamedTuple):
    """What an .idx file says.

    Attributes:
        kind: type of the tokens in the .bin file.
        lengths: int32 [sequences], tokens of every sequence.
        starts: int64 [sequences], its first byte in the .bin file.
        firsts: int64 [documents + 1], first sequence of every document, and number of sequences.
    """

    kind: np.dtype[Any]
    lengths: npt.NDArray[Any]
    starts: npt.NDArray[Any]
    firsts: npt.NDArray[Any]

    @classmethod
    def of(cls, index: Path) -> "MegatronIndex":
        """Reads an .idx file. Raises ValueError if it, or the .bin file beside it, is not what it
        should be."""
        content = index.read_bytes()
        tokens = index.with_suffix(".bin")
        if len(content) < HEAD.size or not content.startswith(MAGIC):
            raise ValueError("it does not begin as Megatron's .idx files")
        _, version, code, sequences, documents = HEAD.unpack_from(content)
        if version != 1 or code not in TYPES:
            raise ValueError(
                f"it has version {version} and type {code} of tokens; only version 1 and whole "
                "numbers can be read"
            )
        kind = np.dtype(TYPES[code])
        of_sequences = sequences * np.array([0, 4, 12, 13])
        sizes = HEAD.size + of_sequences + documents * np.array([0, 0, 8, 8])
        if len(content) == sizes[3] != sizes[2]:
            raise ValueError("its sequences have modes: only text is supported")
        if len(content) != sizes[2]:
            raise ValueError(
                f"it has {len(content):,} bytes, but {sequences:,} sequences and {documents:,} "
                f"indices need {sizes[2]:,}"
            )
        lengths = np.frombuffer(content, "<i4", sequences, HEAD.size)
        starts = np.frombuffer(content, "<i8", sequences, int(sizes[1]))
        firsts = np.frombuffer(content, "<i8", documents, HEAD.size + 12 * sequences)
        in_order = len(firsts) and firsts[0] == 0 and firsts[-1] == sequences
        if in_order:
            in_order = (np.diff(firsts) >= 0).all()
        size = tokens.stat().st_size
        ends = starts + lengths.astype(np.int64) * kind.itemsize
        if not in_order or (lengths < 0).any() or (starts < 0).any() or (ends > size).any():
            raise ValueError(
                f"its documents are not in order, or end after the {size:,} bytes of {tokens.name}"
            )
        return cls(kind, lengths, starts, firsts)


def read_megatron(index: Path) -> Iterator[npt.NDArray[Any]]:
    """Yields the tokens of every document. Raises ValueError if the files are not what they should
    be."""
    known = MegatronIndex.of(index)
    with index.with_suffix(".bin").open("rb") as stream:
        for first, stop in pairwise(known.firsts.tolist()):
            parts = [np.zeros(0, known.kind)]
            for place in range(first, stop):
                start = int(known.starts[place])
                count = int(known.lengths[place])
                stream.seek(start)
                content = stream.read(count * known.kind.itemsize)
                parts.append(np.frombuffer(content, known.kind))
            yield np.concatenate(parts)
