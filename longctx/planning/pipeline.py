"""Pipeline: the pipeline parallelism that the cost model counts.

Every pipeline rank is assumed to take equally long for a micro-batch (the profile describes one rank's layers). A step then
takes the sum over its micro-batches plus the bubble: while the pipeline fills and drains, each rank waits p - 1 times the time
of the longest micro-batch. Chunks and the zero-bubble schedule divide the bubble (Narayanan et al., 2021, §2.2; Qi et al.,
2023).
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
IN_CHUNKS = ("interleaved", "zero-bubble")
"""Schedules that support several stages per rank."""
ZERO_BUBBLE = 3
"""Divisor of the bubble: forward, input gradients and weight gradients take a third each; weight gradients fill the gaps."""


@dataclass(frozen=True)
class Pipeline:
    """A pipeline of `ranks` p with `chunks` v stages per rank, run by `schedule`; no pipeline by default.

    Stage s runs on rank s mod p.
    """

    ranks: int = 1
    chunks: int = 1
    schedule: str = "1f1b"

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    @property
    def problem(self) -> tuple[str, str] | None:
        """The rule that `chunks` breaks and the fix, or None."""
        if self.chunks > 1 and self.ranks == 1:
            return "several chunks need a pipeline of 2 or more ranks", "use 1 chunk, or 2 or more pipeline ranks"
        if self.chunks > 1 and self.schedule not in IN_CHUNKS:
            return (
                f"schedule {self.schedule} runs one stage per rank",
                f"use 1 chunk, or choose schedule {' or '.join(IN_CHUNKS)}",
            )
        if self.chunks == 1 and self.ranks > 1 and self.schedule == "interleaved":
            return "schedule interleaved needs at least 2 chunks", "use 2 chunks, or choose schedule 1f1b"
        return None

    def runs(self, micro_batches: int) -> int:
        """Returns the number of micro-batches that the schedule runs, including empty ones added to `micro_batches`.

        1f1b needs at least one micro-batch per stage; schedules with chunks run equal rounds of p or more micro-batches.
        """
        if self.ranks == 1 or self.schedule == "gpipe":
            return micro_batches
        if self.schedule == "1f1b":
            return max(micro_batches, self.ranks)
        while micro_batches % max(1, micro_batches // self.ranks):
            micro_batches += 1
        return micro_batches

    @property
    def bubble(self) -> Fraction:
        """Length of the bubble as a multiple of the longest micro-batch."""
        return Fraction(self.ranks - 1, self.chunks * (ZERO_BUBBLE if self.schedule == "zero-bubble" else 1))

    def bubble_ns(self, longest_ns: int) -> int:
        """Returns the bubble in nanoseconds if the longest micro-batch takes `longest_ns` per rank."""
        return math.ceil(self.bubble * longest_ns)


NO_PIPELINE = Pipeline()
