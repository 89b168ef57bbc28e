"""Retrieval: tests whether a model finds one fact in a long document, at any depth and among similar facts.

A document is filler with facts such as "Code amber 57.", and ends by repeating one of them. Its answer is right if each of its
tokens is the most likely one after all tokens before it. That is the case exactly if greedy decoding would write the answer,
but takes one forward pass and no cache. A small model can be trained on the same facts and filler
(`examples/retrieval_documents.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from longctx.data import IGNORED_LABEL
from longctx.data.loader import Planner
from longctx.data.packing import StepBatch, pack_documents
from longctx.data.tokenizer import Tokenizer
from longctx.errors import UserError
from longctx.parallel.mesh import Mesh
from longctx.training.objectives.loss import greedy_choices
from longctx.training.objectives.objective import document_sums
from longctx.training.passes import Look

_WORDS = """
amber anchor apple arrow autumn badger bamboo barrel basil beacon berry birch bottle bramble bridge bronze
butter cactus candle canyon castle cedar cherry clover cobalt copper coral cotton crystal daisy desert dragon
eagle ember falcon feather fern forest fox garden ginger glacier granite harbor hazel honey iris island ivory
jade jasmine jungle kettle lagoon lantern lemon lilac lotus maple marble meadow mint
"""
KEYS = tuple(_WORDS.split())
NOISE = (
    " The grass is green.",
    " The sky is blue.",
    " The sun is yellow.",
    " Here we go.",
    " There and back again.",
    " The river runs to the sea.",
    " Birds sing in the morning.",
    " Nothing of note happened that day.",
)
VALUES = range(10, 100)

Ids = npt.NDArray[np.int64]


def ask(key: str) -> str:
    return f" Code {key}"


def answer(value: int) -> str:
    return f" {value}"


@dataclass(frozen=True)
class Cell:
    """One cell of the grid.

    Attributes:
        length: tokens per document, including the answer.
        depth: place of the fact: 0 is the start of the document, 1 is right before the question.
        samples, right: number of documents, and number of those in which all tokens of the answer are right.
    """

    length: int
    depth: float
    samples: int
    right: int = 0

    @property
    def share(self) -> float:
        return self.right / self.samples


@dataclass(frozen=True)
class Grid:
    """A retrieval test.

    Attributes:
        lengths, depths: lengths in tokens and depths of the cells.
        keys: facts per document; the question is about one of them, the others are similar facts with other keys.
        samples: documents per cell.
        seed: seed of all random choices.
        prefix: text before every document, in which special tokens are encoded as such.
    """

    lengths: Sequence[int]
    depths: Sequence[float]
    keys: int = 1
    samples: int = 8
    seed: int = 0
    prefix: str = ""

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise UserError(f"lengths are {list(self.lengths)}: give one or more, each of one token or more")
        if not self.depths or not all(0 <= depth <= 1 for depth in self.depths):
            raise UserError(f"depths are {list(self.depths)}: give one or more, from 0 (the start) to 1 (the end)")
        if not 1 <= self.keys <= len(KEYS):
            raise UserError(f"keys is {self.keys}: it must be from 1 to {len(KEYS)}")
        if self.samples < 1:
            raise UserError(f"samples is {self.samples}: it must be at least 1")

    @property
    def cells(self) -> list[Cell]:
        return [Cell(length, depth, self.samples) for length in self.lengths for depth in self.depths]


@dataclass(frozen=True)
class Question:
    """A document: token ids [length], the last `answered` of which are the answer."""

    tokens: Ids
    answered: int

    @property
    def labels(self) -> Ids:
        labels = np.full(len(self.tokens), IGNORED_LABEL)
        labels[-self.answered :] = self.tokens[-self.answered :]
        return labels


class TaskWriter:
    """Writes documents of an exact number of tokens, for any tokenizer."""

    def __init__(self, tokenizer: Tokenizer, grid: Grid) -> None:
        self.tokenizer, self.grid = tokenizer, grid
        self._stop = self._ids(".")
        self._prefix = tokenizer.encode_markup(grid.prefix).astype(np.int64) if grid.prefix else self._ids("")

    def write(self, cell: Cell, sample: int) -> Question:
        """Returns one of the documents of a cell. Raises UserError if it has no room for the facts."""
        grid = self.grid
        random = Random(f"{grid.seed} {cell.length} {cell.depth} {sample}")
        asked, *others = random.sample(KEYS, grid.keys)
        question, value = self._ids(ask(asked)), self._ids(answer(random.choice(VALUES)))
        needle = np.concatenate([question, value, self._stop])
        distractors = [self._ids(f"{ask(key)}{answer(random.choice(VALUES))}.") for key in others]
        facts = len(needle) + sum(map(len, distractors))
        room = cell.length - len(self._prefix) - facts - len(question) - len(value)
        if room < 0:
            raise UserError(
                f"a document of {cell.length} tokens has no room for {grid.keys} facts: they and the question need "
                f"{cell.length - room}; give a larger length, or fewer keys"
            )
        sentences = self._filler(room, random)
        place = _nearest_end(sentences, cell.depth * room)
        for distractor in distractors:
            at = random.randint(0, len(sentences))
            sentences.insert(at, distractor)
            place += at < place or (at == place and random.random() < 0.5)
        sentences.insert(place, needle)
        return Question(np.concatenate([self._prefix, *sentences, question, value]), len(value))

    def _filler(self, tokens: int, random: Random) -> list[Ids]:
        """Returns sentences of `tokens` tokens in total; the first one is cut at its beginning to fit."""
        sentences: list[Ids] = []
        held = 0
        while held < tokens:
            sentences.append(random.choice(self._noise))
            held += len(sentences[-1])
        return [sentences[-1][held - tokens :], *sentences[:-1]] if sentences else []

    @cached_property
    def _noise(self) -> list[Ids]:
        return [self._ids(sentence) for sentence in NOISE]

    def _ids(self, text: str) -> Ids:
        return self.tokenizer.encode(text).astype(np.int64)


def _nearest_end(sentences: Sequence[Ids], tokens: float) -> int:
    """Returns the number of sentences whose total length is nearest to `tokens`."""
    ends = np.cumsum([0, *map(len, sentences)])
    return int(np.abs(ends - tokens).argmin())


def retrieve(grid: Grid, tokenizer: Tokenizer, look: Look, planner: Planner, mesh: Mesh, step_tokens: int) -> list[Cell]:
    """Returns the cells of the grid with their numbers of right answers. All ranks must call it and get the same result.

    Documents are planned together until they have `step_tokens` tokens.
    """
    writer = TaskWriter(tokenizer, grid)
    cells = grid.cells
    right = np.zeros(len(cells), np.int64)
    waiting: list[tuple[int, Question]] = []
    for index, cell in enumerate(cells):
        for sample in range(cell.samples):
            waiting.append((index, writer.write(cell, sample)))
            last = index == len(cells) - 1 and sample == cell.samples - 1
            if last or sum(len(question.tokens) for _, question in waiting) >= step_tokens:
                np.add.at(right, [index for index, _ in waiting], _right([q for _, q in waiting], look, planner, mesh))
                waiting = []
    return [Cell(cell.length, cell.depth, cell.samples, int(count)) for cell, count in zip(cells, right, strict=True)]


def _right(questions: Sequence[Question], look: Look, planner: Planner, mesh: Mesh) -> npt.NDArray[np.int64]:
    """Returns 1 for each question with a right answer, else 0."""
    documents = [question.tokens for question in questions]
    plan = planner([len(document) for document in documents])
    mesh.agree(plan.hash, "the plan of the questions")
    multiple = mesh.tensor.size()
    labels = [question.labels for question in questions]
    micro_batches, targets = pack_documents(plan, mesh.rank, documents, labels, pad_to_multiple_of=multiple)
    names = tuple(f"question {number}" for number in range(len(documents)))
    batch = StepBatch(1, plan, names, sum(plan.lengths), targets, tuple(micro_batches))
    right_tokens = document_sums(batch, look(batch, greedy_choices), mesh).round().long().numpy()
    return np.asarray(right_tokens == [question.answered for question in questions], np.int64)


def as_json(grid: Grid, cells: Sequence[Cell]) -> dict[str, Any]:
    return {
        "keys": grid.keys,
        "samples": grid.samples,
        "seed": grid.seed,
        "right": sum(cell.right for cell in cells) / sum(cell.samples for cell in cells),
        "cells": [{"length": cell.length, "depth": cell.depth, "samples": cell.samples, "right": cell.right} for cell in cells],
    }
