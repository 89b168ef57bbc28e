"""Planning input and candidates: what every planner is given, and what it returns."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from longctx.planning.assignment import Assignment, Integers, largest_shards
from longctx.planning.cost import bounds
from longctx.planning.cost.model import StepTimes, alone_ns, score
from longctx.planning.cost.rounds import choose_rounds
from longctx.planning.cost.slow_ranks import Floats, slowness
from longctx.planning.cost.tower import NO_ENCODING, EncodingTimes
from longctx.planning.cost.work_overrides import WorkOverrides
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.parts import EQUAL_PARTS, PartCosts
from longctx.planning.pipeline import NO_PIPELINE, Pipeline
from longctx.planning.plan import PlanCost
from longctx.planning.planners.settings import SearchSettings, settings_for
from longctx.planning.tree import Trees


@dataclass(frozen=True)
class PlanningInput:
    """The arguments of `make_plan`, with `lengths` as an array [documents] that all fit some
    degree.

    Attributes:
        slots: slots of a micro-batch, each for documents of degree 1: ranks, or blocks of them;
            `on_ranks` makes ranks of slots.
        max_remote_tokens: see `make_plan`.
        round_price: what `score` and `alone_ns` count for a round of the exchange; see
            `cost.model.exposed_ns`.
        block: ranks of a slot. In blocks of 4, 16 slots are 64 ranks, and a document of degree 3 is
            on 12 of them.
        left_over: ranks that are in no slot, as they are less than a block.
    """

    profile: HardwareProfile
    lengths: Integers
    slots: int
    tokens_per_rank: int
    degree: int | None = None
    bins: Mapping[int, int] | None = None
    max_remote_tokens: int | None = None
    round_price: float = 0.0
    block: int = 1
    left_over: int = 0
    pipeline: Pipeline = NO_PIPELINE
    trees: Trees = field(default_factory=dict)
    sources: tuple[int, ...] = ()
    parts: PartCosts = EQUAL_PARTS
    encoding: EncodingTimes = NO_ENCODING

    @property
    def ranks(self) -> int:
        """Ranks of the domain."""
        return self.slots * self.block + self.left_over

    @property
    def settings(self) -> SearchSettings:
        """Settings of the search for this step."""
        return settings_for(len(self.lengths), self.ranks, pipelined=self.pipeline.ranks > 1)

    def in_blocks(self, block: int) -> "PlanningInput":
        """Returns the same with slots of `block` ranks."""
        slots, left_over = divmod(self.ranks, block)
        return replace(self, slots=slots, block=block, left_over=left_over)

    @cached_property
    def overrides(self) -> WorkOverrides:
        """What documents cost where their lengths do not say it."""
        return WorkOverrides.of(self.lengths, self.trees, self.sources, self.parts)

    @cached_property
    def slowness(self) -> Floats:
        """Time of each slot relative to a usual one, as its slowest rank has (an array
        [slots])."""
        by_rank = slowness(self.profile, self.ranks)
        in_slots = by_rank[: self.slots * self.block].reshape(self.slots, self.block)
        slowest: Floats = in_slots.max(axis=1)
        return slowest

    @cached_property
    def single_ns(self) -> Integers:
        """Time of each document alone in one slot, in nanoseconds."""
        return self.alone_ns(np.arange(len(self.lengths)), np.ones_like(self.lengths))

    @cached_property
    def single_tokens(self) -> Integers:
        """Tokens of each document per rank of one slot."""
        return self.shards(self.lengths, np.ones_like(self.lengths))

    @property
    def fewest_micro_batches(self) -> int:
        """Minimum number of micro-batches; see `cost.bounds.fewest_micro_batches`."""
        return bounds.fewest_micro_batches(self.lengths, self.ranks, self.tokens_per_rank)

    def alone_ns(
        self, documents: Integers, degrees: Integers, first_slot: Integers | None = None
    ) -> Integers:
        """Returns the time of documents alone on their ring, at degrees in slots; see
        `cost.model.alone_ns`."""
        ranks = degrees * self.block
        offset = None
        if first_slot is not None:
            offset = first_slot * self.block % self.profile.ranks_per_node
        return alone_ns(
            self.profile,
            self.lengths[documents],
            ranks,
            offset=offset,
            round_price=self.round_price,
            overrides=self.overrides[documents],
            encoding=self.encoding.ring_ns(documents, ranks),
        )

    def shards(self, lengths: Integers, degrees: Integers) -> Integers:
        """Returns the tokens on the fullest rank of documents of `lengths`, at degrees in slots."""
        return largest_shards(lengths, degrees * self.block)

    def score(self, assignment: Assignment) -> StepTimes:
        """Returns the times of an assignment to ranks by `cost.model.score`."""
        return score(
            self.profile,
            self.lengths,
            assignment,
            ranks=self.ranks,
            pipeline=self.pipeline,
            round_price=self.round_price,
            overrides=self.overrides,
            encoding=self.encoding,
        )

    def step_bound_ns(self) -> int:
        """Returns a lower bound on the time of any plan; see `cost.bounds.step_bound_ns`."""
        return bounds.step_bound_ns(
            self.profile,
            self.lengths,
            ranks=self.ranks,
            tokens_per_rank=self.tokens_per_rank,
            pipeline=self.pipeline,
            overrides=self.overrides,
            encoding_ns=self.encoding.whole_ns,
        )

    def even_work_bound_ns(self, degrees: Integers) -> int:
        """Returns a lower bound on the time of plans with at least these degrees, in ranks; see
        `cost.bounds.even_work_bound_ns`."""
        return bounds.even_work_bound_ns(
            self.profile,
            self.lengths,
            degrees,
            ranks=self.ranks,
            tokens_per_rank=self.tokens_per_rank,
            overrides=self.overrides,
            encoding_ns=self.encoding.whole_ns,
        )

    def with_bubble_ns(self, bound: int, micro_batches: int) -> int:
        """Returns a lower bound that has the launches of so many micro-batches, with the least that
        the pipeline adds."""
        return bound + bounds.bubble_bound_ns(
            self.profile,
            self.pipeline,
            bound,
            launches=micro_batches,
            most=len(self.lengths),
        )

    def plan_cost(self, timed: StepTimes) -> PlanCost:
        """Returns the cost of a plan with these times, with its lower bound."""
        return bounds.plan_cost(
            timed,
            self.profile,
            self.lengths,
            tokens_per_rank=self.tokens_per_rank,
            pipeline=self.pipeline,
            overrides=self.overrides,
            encoding_ns=self.encoding.whole_ns,
        )

    def candidate(
        self, winner: str, assignment: Assignment, scored: StepTimes | None = None
    ) -> "Candidate":
        """Returns an assignment to ranks with its exchange rounds and predicted times; `scored` is
        its `score` if known."""
        rounds, timed = choose_rounds(
            self.profile,
            self.lengths,
            assignment,
            scored or self.score(assignment),
            max_remote_tokens=self.max_remote_tokens,
            overrides=self.overrides,
        )
        return Candidate(
            makespan_ns=timed.makespan_ns,
            winner=winner,
            assignment=assignment,
            rounds=rounds,
            timed=timed,
        )

    def candidate_below(
        self, limit: int, winner: str, assignment: Assignment
    ) -> "Candidate | None":
        """Returns the `candidate` of an assignment; None if a lower bound of its makespan reaches
        the limit."""
        scored = self.score(assignment)
        if scored.makespan_ns >= limit:
            return None
        return self.candidate(winner, assignment, scored)

    def on_ranks(self, on_slots: Assignment) -> Assignment:
        """Returns first ranks and degrees in ranks, of which a slot has `block`."""
        if self.block == 1:
            return on_slots
        return Assignment(
            micro_batch=on_slots.micro_batch,
            first_rank=on_slots.first_rank * self.block,
            degree=on_slots.degree * self.block,
            reversed=on_slots.reversed,
        )

    def with_degrees(self, degrees: Integers) -> "Degrees":
        """Returns the times and tokens of all documents at these degrees, in slots."""
        time = self.single_ns.copy()
        tokens = self.single_tokens.copy()
        rings = np.flatnonzero(degrees > 1)
        time[rings] = self.alone_ns(rings, degrees[rings])
        tokens[rings] = self.shards(self.lengths[rings], degrees[rings])
        return Degrees(degrees, time, tokens)


@dataclass(frozen=True)
class Degrees:
    """Degree in slots, and nanoseconds and maximum tokens in each of them, of every document
    (arrays [documents])."""

    degree: Integers
    time: Integers
    tokens: Integers

    @cached_property
    def work(self) -> int:
        """Time summed over all documents and their slots, in nanoseconds."""
        return int((self.degree * self.time).sum())


class Candidate(NamedTuple):
    """A possible plan, with the exchange rounds of every document; `winner` becomes `Plan.winner`
    if it is chosen."""

    makespan_ns: int
    winner: str
    assignment: Assignment
    rounds: Integers
    timed: StepTimes

    @property
    def splits(self) -> int:
        """Ranks of all documents that are split."""
        degree = self.assignment.degree
        return int(degree[degree > 1].sum())

    @property
    def split_documents(self) -> int:
        return int((self.assignment.degree > 1).sum())


def fastest(*candidates: Candidate | None) -> Candidate:
    """Returns the candidate with the smallest makespan, the first of equals. At least one must not
    be None."""
    return min(
        (candidate for candidate in candidates if candidate is not None),
        key=lambda candidate: candidate.makespan_ns,
    )
