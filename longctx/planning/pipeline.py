"""Pipeline: the pipeline parallelism that the cost model counts.

Every pipeline rank is assumed to take equally long for a micro-batch (the profile describes one
rank's layers). A step then takes the sum over its micro-batches plus the bubble: while the pipeline
fills and drains, each rank waits p - 1 times the time of the longest micro-batch. Chunks divide the
bubble (Narayanan et al., 2021, §2.2).
"""

import math
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Pipeline:
    """A pipeline of `ranks` p with `chunks` v stages per rank; no pipeline by default. Stage s runs
    on rank s mod p.

    The schedule is 1F1B with one stage per rank, and interleaved 1F1B with several.
    """

    ranks: int = 1
    chunks: int = 1

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    @property
    def problem(self) -> tuple[str, str] | None:
        """The rule that `chunks` breaks and the fix, or None."""
        if self.chunks > 1 and self.ranks == 1:
            return (
                "several chunks need a pipeline of 2 or more ranks",
                "use 1 chunk, or 2 or more pipeline ranks",
            )
        return None

    def runs(self, micro_batches: int) -> int:
        """Returns the number of micro-batches that the schedule runs, including empty ones added to
        `micro_batches`.

        One stage per rank needs a micro-batch for each; chunks run in equal rounds of p or more
        micro-batches.
        """
        if self.ranks == 1:
            return micro_batches
        if self.chunks == 1:
            return max(micro_batches, self.ranks)
        while micro_batches % max(1, micro_batches // self.ranks):
            micro_batches += 1
        return micro_batches

    @property
    def bubble(self) -> Fraction:
        """Length of the bubble as a multiple of the longest micro-batch."""
        return Fraction(self.ranks - 1, self.chunks)

    def bubble_ns(self, longest_ns: int) -> int:
        """Returns the bubble in nanoseconds if the longest micro-batch takes `longest_ns` per
        rank."""
        return math.ceil(self.bubble * longest_ns)


NO_PIPELINE = Pipeline()
