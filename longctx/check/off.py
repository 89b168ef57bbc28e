"""The first part of a layer that is wrong in a step, and a cause of that."""

import re
from typing import NamedTuple

import torch

from .contexts import Sequence
from .probe import Tokens

ATTENTION = re.compile(r"att(?!\w*norm)|mixer")
"""What names of parts have that mix tokens."""


class Cause(NamedTuple):
    """A kind of fault, always the same words, and what shows it."""

    kind: str
    details: str


class Spot(NamedTuple):
    """Where a token is in a step: its rank, and row and column of the batch before it was split."""

    rank: int
    row: int
    column: int


class FirstOff(NamedTuple):
    """The first part of a layer whose output is wrong.

    Attributes:
        part: words for it: its input or output, and its name.
        numbers: of the tokens of the step that have a place in `sequences`.
        found, right: its output in the step and in the reference [tokens, width].
        wrong: which of these tokens have a wrong output.
        sequences: what the tokens should have seen.
        limit: largest relative difference of equal outputs.
    """

    part: str
    numbers: list[int]
    found: torch.Tensor
    right: torch.Tensor
    wrong: list[int]
    sequences: list[Sequence]
    limit: float

    def rows(self, of_sequences: torch.Tensor) -> torch.Tensor:
        """Returns the rows of these tokens, of rows of all tokens of the sequences."""
        held = (number for sequence in self.sequences for number in sequence.numbers)
        place = {number: at for at, number in enumerate(held)}
        return of_sequences[[place[number] for number in self.numbers]]

    def in_words(self, tokens: Tokens) -> str:
        """Returns which tokens are wrong."""
        first = self.numbers[self.wrong[0]]
        count = f"{len(self.wrong)} of {len(self.numbers)} tokens"
        place = f"token {tokens.place[first]} of document {tokens.document[first]}"
        return f"{count}, first {place}, in the {self.part}"
