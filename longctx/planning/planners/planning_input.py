"""Step and Candidate: the input and the result of every planner."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from longctx.planning.assignment import Assignment, Integers, largest_shards
from longctx.planning.cost.amounts import Amounts
from longctx.planning.cost.model import StepTimes, alone_ns, score
from longctx.planning.cost.rounds import choose_rounds
from longctx.planning.cost.tower import NO_ENCODING, EncodingTimes
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.parts import EQUAL_PARTS, PartCosts
from longctx.planning.pipeline import NO_PIPELINE, Pipeline
from longctx.planning.tree import Trees


@dataclass(frozen=True)
class Step:
    """A step to plan: the arguments of `make_plan`, with `lengths` as an array [documents] that all
    fit some degree.

    Attributes:
        places: number of places for a document of degree 1: ranks, or blocks of them; `on_ranks`
        makes ranks of places. max_remote_tokens: see `make_plan`. round_price: what `score` and
        `alone_ns` count for a round of the exchange; see `cost.model.exposed_ns`. block: ranks of a
        place. In blocks of 4, 16 places are 64 ranks, and a document of degree 3 is on 12 of them.
    """

    profile: HardwareProfile
    lengths: Integers
    places: int
    tokens_per_rank: int
    degree: int | None = None
    bins: Mapping[int, int] | None = None
    max_remote_tokens: int | None = None
    round_price: float = 0.0
    block: int = 1
    pipeline: Pipeline = NO_PIPELINE
    trees: Trees = field(default_factory=dict)
    sources: tuple[int, ...] = ()
    parts: PartCosts = EQUAL_PARTS
    encoding: EncodingTimes = NO_ENCODING

    @cached_property
    def amounts(self) -> Amounts:
        """What documents cost where their lengths do not say it."""
        return Amounts.of(self.lengths, self.trees, self.sources, self.parts)

    @property
    def whole(self) -> tuple[Amounts, int]:
        """Amounts, and the nanoseconds of all images, from which lower bounds are computed."""
        return self.amounts, self.encoding.whole_ns

    @cached_property
    def single_ns(self) -> Integers:
        """Time of each document alone in one place, in nanoseconds."""
        return self.alone_ns(np.arange(len(self.lengths)), np.ones_like(self.lengths))

    @cached_property
    def single_tokens(self) -> Integers:
        """Tokens of each document per rank of one place."""
        return self.shards(self.lengths, np.ones_like(self.lengths))

    @property
    def fewest_micro_batches(self) -> int:
        """Minimum number of micro-batches: all tokens divided by the budgets of all ranks."""
        return -(-int(self.lengths.sum()) // (self.places * self.block * self.tokens_per_rank))

    def alone_ns(
        self, documents: Integers, degrees: Integers, first_rank: Integers | None = None
    ) -> Integers:
        """Returns the time of documents alone on their ring; see `cost.model.alone_ns`."""
        offset = (
            None if first_rank is None else first_rank * self.block % self.profile.ranks_per_node
        )
        lengths, amounts, degrees = (
            self.lengths[documents],
            self.amounts[documents],
            degrees * self.block,
        )
        images, price = self.encoding.ring_ns(documents, degrees), self.round_price
        return alone_ns(
            self.profile,
            lengths,
            degrees,
            offset,
            round_price=price,
            amounts=amounts,
            encoding=images,
        )

    def shards(self, lengths: Integers, degrees: Integers) -> Integers:
        return largest_shards(lengths, degrees * self.block)

    def score(self, assignment: Assignment) -> StepTimes:
        """Returns the times of an assignment to ranks by `cost.model.score`."""
        step = self.profile, self.lengths, assignment, self.places * self.block, self.pipeline
        return score(
            *step, round_price=self.round_price, amounts=self.amounts, encoding=self.encoding
        )

    def candidate(
        self, winner: str, assignment: Assignment, scored: StepTimes | None = None
    ) -> "Candidate":
        """Returns an assignment to ranks with its exchange rounds and predicted times; `scored` is
        its `score` if known."""
        scored = scored or self.score(assignment)
        rounds, timed = choose_rounds(
            self.profile, self.lengths, assignment, scored, self.max_remote_tokens, self.amounts
        )
        return Candidate(timed.makespan_ns, winner, assignment, rounds, timed)

    def candidate_below(
        self, limit: int, winner: str, assignment: Assignment
    ) -> "Candidate | None":
        """Returns the `candidate` of an assignment; None if a lower bound of its makespan reaches
        the limit."""
        scored = self.score(assignment)
        return None if scored.makespan_ns >= limit else self.candidate(winner, assignment, scored)

    def on_ranks(self, places: Assignment) -> Assignment:
        """Returns first ranks and degrees in ranks, of which a place has `block`."""
        if self.block == 1:
            return places
        return Assignment(
            places.micro_batch,
            places.first_rank * self.block,
            places.degree * self.block,
            places.reversed,
        )

    def with_degrees(self, degrees: Integers) -> "Degrees":
        time, tokens = self.single_ns.copy(), self.single_tokens.copy()
        rings = np.flatnonzero(degrees > 1)
        time[rings] = self.alone_ns(rings, degrees[rings])
        tokens[rings] = self.shards(self.lengths[rings], degrees[rings])
        return Degrees(degrees, time, tokens)


@dataclass(frozen=True)
class Degrees:
    """Degree in places, and nanoseconds and maximum tokens in each of them, of every document
    (arrays [documents])."""

    degree: Integers
    time: Integers
    tokens: Integers

    @cached_property
    def work(self) -> int:
        """Time summed over all documents and their places, in nanoseconds."""
        return int((self.degree * self.time).sum())


class Candidate(NamedTuple):
    """A possible plan, with the exchange rounds of every document; `winner` becomes `Plan.winner`
    if it is chosen."""

    makespan_ns: int
    winner: str
    assignment: Assignment
    rounds: Integers
    timed: StepTimes


def fastest(*candidates: Candidate | None) -> Candidate:
    """Returns the candidate with the smallest makespan, the first of equals. At least one must not
    be None."""
    return min(
        (candidate for candidate in candidates if candidate is not None),
        key=lambda candidate: candidate.makespan_ns,
    )
