"""Pipeline: what a plan has to know of the pipeline that its micro-batches go through.

Every rank takes as long as any other for a micro-batch (the profile's constants are those of one rank's layers). Then a step
takes the sum over micro-batches, and in addition the bubble: while the pipeline fills and drains, a rank waits for as long as
the longest micro-batch takes on p - 1 others. Chunks and the zero-bubble schedule divide that (Narayanan et al., 2021, §2.2; Qi
et al., 2023).
"""

import math
from dataclasses import dataclass
from fractions import Fraction

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
IN_CHUNKS = ("interleaved", "zero-bubble")
"""The schedules that can give a rank several stages."""
ZERO_BUBBLE = 3
"""Forward, gradients of inputs and gradients of weights take a third each, and weights fill what the other two leave."""


@dataclass(frozen=True)
class Pipeline:
    """`ranks` p, each with `chunks` v stages, run by `schedule`; by default no pipeline at all.

    Stage s is on rank s mod p.
    """

    ranks: int = 1
    chunks: int = 1
    schedule: str = "1f1b"

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    @property
    def problem(self) -> tuple[str, str] | None:
        """The rule that its chunks break, and a way out."""
        if self.chunks > 1 and self.ranks == 1:
            return "only a pipeline has stages, and this one has 1 rank", "give 1, or 2 or more pipeline ranks"
        if self.chunks > 1 and self.schedule not in IN_CHUNKS:
            return (
                f"schedule {self.schedule} runs one stage on every rank",
                f"give 1, or choose schedule {' or '.join(IN_CHUNKS)}",
            )
        if self.chunks == 1 and self.ranks > 1 and self.schedule == "interleaved":
            return "interleaving takes 2 chunks at least", "give 2, or choose schedule 1f1b"
        return None

    def runs(self, micro_batches: int) -> int:
        """How many micro-batches the schedule runs for so many real ones: the others are empty.

        1f1b has one in each stage at least; chunks are run in rounds of p or more, each of as many.
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
        """How many times as long as the longest micro-batch the bubble is."""
        return Fraction(self.ranks - 1, self.chunks * (ZERO_BUBBLE if self.schedule == "zero-bubble" else 1))

    def bubble_ns(self, longest_ns: int) -> int:
        """What the pipeline adds to the sum over micro-batches, of which the longest takes a rank `longest_ns`."""
        return math.ceil(self.bubble * longest_ns)


NO_PIPELINE = Pipeline()
