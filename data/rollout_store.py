"""Rollout store: the rollouts of a file in memory, as the documents of a run."""

import hashlib
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow

from longctx.data.corpus import open_corpus
from longctx.data.packing import StepBatch
from longctx.data.rollout_records import RolloutReader
from longctx.data.rollouts import RolloutBatch, Rollouts
from longctx.data.sampler import Piece
from longctx.data.store import Int64Array, Source, Store
from longctx.data.tokenizer import Tokenizer


class RolloutStore(Store):
    """Rollouts, each of which is a document.

    Attributes:
        rollouts: all rollouts; their advantages are computed over whole groups.
        groups: number of each rollout's group.
        unused: number of records with each key that is not used.
    """

    def __init__(
        self, path: Path, tokenizer: Tokenizer, read: tuple[Rollouts, list[str], dict[str, int]], scaled: bool
    ) -> None:
        """`read`: what `RolloutReader.read` returns; `scaled`: as in `Rollouts.advantages_of_tokens`."""
        rollouts, names, self.unused = read
        lengths = [len(p) + len(c) for p, c in zip(rollouts.prompts, rollouts.completions, strict=True)]
        # By content: the same rollouts in another file or format are the same documents.
        content = hashlib.sha256(f"{rollouts.digest}\n{tokenizer.fingerprint}".encode()).hexdigest()
        columns = {"name": names, "length": lengths, "trained_tokens": rollouts.counts, "weight": np.ones(len(lengths))}
        super().__init__(path, None, tokenizer, pyarrow.table(columns), (), [Source(path, content, range(len(lengths)))])
        if rollouts.advantages is None:
            first = np.cumsum([0, *map(len, rollouts.completions[:-1])])
            rollouts = replace(rollouts, advantages=rollouts.advantages_of_tokens(scaled)[first].tolist())
        self.rollouts = rollouts
        self.groups: Int64Array = np.array(rollouts.groups, np.int64)

    @classmethod
    def read_from(cls, path: Path, reader: RolloutReader, *, scaled: bool) -> "RolloutStore":
        """Reads a file or folder of rollouts. Raises UserError naming the place, the key and the rule."""
        return cls(path, reader.tokenizer, reader.read(open_corpus(str(path))), scaled)

    @property
    def largest_token(self) -> int:
        return max(int(np.max(tokens)) for tokens in (*self.rollouts.prompts, *self.rollouts.completions))

    def completed(self, batch: StepBatch, pieces: Sequence[Piece]) -> RolloutBatch:
        """Returns a batch over `pieces` with their rollouts."""
        return RolloutBatch(**vars(batch), rollouts=self.rollouts_of(pieces))

    def rollouts_of(self, pieces: Sequence[Piece]) -> Rollouts:
        """Returns the rollouts of a step."""
        columns: dict[str, Any] = {field.name: getattr(self.rollouts, field.name) for field in fields(Rollouts)}
        chosen = [piece.document for piece in pieces]
        return Rollouts(**{key: values and [values[each] for each in chosen] for key, values in columns.items()})

    def _read(self, document: int, start: int, stop: int) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
        prompt = np.asarray(self.rollouts.prompts[document], np.int64)
        tokens = np.concatenate([prompt, self.rollouts.completions[document]])
        trained = np.concatenate([np.zeros(len(prompt), np.bool_), self.rollouts.learned[document]])
        return tokens[start:stop], trained[start:stop]
