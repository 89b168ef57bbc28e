"""Length mixes: histograms of document lengths in three published corpora, from which comparisons
draw steps.

`mixes/NAME.csv` has one bin per line: low_inclusive, high_exclusive, documents, tokens (empty where
not published). Sources: `wikipedia`: one million articles; `wlb_128k`: the 99,519 documents
published with DistCA for the mix of WLB-LLM (OSDI 2025, 128k context); `magi_192k`: the 13.5
million documents of MagiAttention's benchmark (192k context). Lengths are drawn by choosing a bin
in proportion to its documents, then a length in it log-uniformly, so they match the corpus to a
bin's width.
"""

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from longctx.errors import UserError

FOLDER = Path(__file__).parent / "mixes"
MOST_DOCUMENTS = 10_000_000
LARGEST_SEED = (1 << 32) - 1


@dataclass(frozen=True)
class Mix:
    """A histogram of document lengths: bin i holds `documents[i]` documents of low[i] ≤ length <
    high[i] tokens."""

    name: str
    low: tuple[int, ...]
    high: tuple[int, ...]
    documents: tuple[int, ...]

    @property
    def longest(self) -> int:
        return self.high[-1] - 1

    @property
    def mean(self) -> float:
        """Mean tokens of a document, if lengths are log-uniform in each bin."""
        low = np.array(self.low, dtype=np.float64)
        high = np.array(self.high, dtype=np.float64)
        means = (high - low) / np.log(high / low)
        return float(np.average(means, weights=self.documents))

    def draw(self, documents: int, seed: int) -> list[int]:
        """Draws lengths of `documents` documents; the same for the same seed on every machine.
        Raises UserError."""
        if not 1 <= documents <= MOST_DOCUMENTS:
            raise UserError(
                f"documents is {documents}: must be a whole number in 1..{MOST_DOCUMENTS}"
            )
        if not 0 <= seed <= LARGEST_SEED:
            raise UserError(f"seed is {seed}: must be a whole number in 0..{LARGEST_SEED}")
        random = np.random.RandomState(seed)  # NumPy guarantees its streams not to change (NEP 19)
        upto = np.cumsum(self.documents)
        chosen = np.searchsorted(
            upto, random.randint(0, int(upto[-1]), documents, dtype=np.int64), side="right"
        )
        low = np.array(self.low, dtype=np.float64)[chosen]
        high = np.array(self.high, dtype=np.float64)[chosen]
        lengths = np.floor(low * (high / low) ** random.random_sample(documents)).astype(np.int64)
        result: list[int] = np.clip(
            lengths, low.astype(np.int64), high.astype(np.int64) - 1
        ).tolist()
        return result


def mix_names() -> tuple[str, ...]:
    """Returns the names of all mixes, sorted."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.csv")))


@cache
def load_mix(name: str) -> Mix:
    """Loads a mix by name. Raises UserError that lists the known names."""
    if name not in mix_names():
        raise UserError(f"unknown length mix {name!r}: choose one of {', '.join(mix_names())}")
    with (FOLDER / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if int(row["documents"])]
    columns = ("low_inclusive", "high_exclusive", "documents")
    low, high, documents = (tuple(int(row[column]) for row in rows) for column in columns)
    return Mix(name, low, high, documents)
