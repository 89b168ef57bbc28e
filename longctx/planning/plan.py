"""Plan: the micro-batches of one optimizer step and the placement of every document in them.

A plan is a pure function of (lengths, domain size, token budget, hardware profile, mode): every
rank computes the same plan, and ranks compare its hash. Costs are integer nanoseconds, so plans
agree bit by bit.
"""

import hashlib
import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

from longctx.arguments import is_whole
from longctx.errors import UserError
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.image_work import ImageWorks
from longctx.planning.layout import CrossLayout, Layout, Placement
from longctx.planning.parts import EQUAL_PARTS, PartCosts
from longctx.planning.pipeline import NO_PIPELINE, Pipeline
from longctx.planning.tree import Trees

VERSION = 3
Mode = Literal["auto", "static", "bins"]
MODES: tuple[Mode, ...] = get_args(Mode)


class PlanError(UserError):
    """Lengths or settings that cannot be planned, or a plan that breaks a guarantee (I1, I4)."""


@dataclass(frozen=True)
class PlanCost:
    """The cost of a plan under the cost model.

    Attributes:
        exposed_share: share of the makespan in which the slowest ranks wait for K and V.
        idle_share: share of all ranks' time spent waiting for the slowest rank of the micro-batch.
        bubble_share: share of the makespan in which a pipeline fills and drains, including empty
            micro-batches.
    """

    makespan_s: float
    lower_bound_s: float
    exposed_share: float
    idle_share: float
    bubble_share: float = 0.0

    @property
    def gap(self) -> float:
        """Relative distance of the makespan from the lower bound: 0.02 means 2 %."""
        return self.makespan_s / self.lower_bound_s - 1 if self.lower_bound_s > 0 else 0.0


@dataclass(frozen=True)
class Plan:
    """The micro-batches of one step, in the order in which every rank runs them.

    Attributes:
        winner: chosen plan under that mode, `static:8`, `bins`, `search` or `hedged search`.
        ranks: size N of the domain.
        micro_batches: placements of each micro-batch; every document is placed exactly once.
        cost: modelled cost; None if the plan was not scored.
        planning_ms: planning time in milliseconds; not part of the hash.
        sources: for an encoder-decoder, the tokens of every document that its encoder reads, the
            first ones; else empty.
        parts: what tokens of sources and of targets cost.
        images: work of the images of documents, by document, if the planner knows their encoder.
    """

    mode: str
    winner: str
    ranks: int
    tokens_per_rank: int
    lengths: tuple[int, ...]
    micro_batches: tuple[tuple[Placement, ...], ...]
    profile: HardwareProfile
    pipeline: Pipeline = NO_PIPELINE
    cost: PlanCost | None = None
    planning_ms: float = 0.0
    trees: Trees = field(default_factory=dict, hash=False)
    sources: tuple[int, ...] = ()
    parts: PartCosts = EQUAL_PARTS
    images: ImageWorks = field(default_factory=dict, hash=False)

    @property
    def score(self) -> PlanCost:
        """The cost. Raises PlanError if the plan was not scored."""
        if self.cost is None:
            raise PlanError(
                "this plan has no cost because it was not scored: use a plan made by make_plan"
            )
        return self.cost

    @property
    def makespan_s(self) -> float:
        return self.score.makespan_s

    @property
    def lower_bound_s(self) -> float:
        return self.score.lower_bound_s

    @property
    def exposed_share(self) -> float:
        return self.score.exposed_share

    @property
    def idle_share(self) -> float:
        return self.score.idle_share

    @property
    def bubble_share(self) -> float:
        return self.score.bubble_share

    @property
    def gap(self) -> float:
        return self.score.gap

    @property
    def degrees(self) -> dict[int, int]:
        """Number of documents at each degree, ascending."""
        return dict(sorted(Counter(p.degree for mb in self.micro_batches for p in mb).items()))

    @cached_property
    def hash(self) -> str:
        """SHA-256 (hex) of everything except `planning_ms`; equal on all ranks that made the same
        plan."""
        content = {key: value for key, value in self._content().items() if key != "planning_ms"}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def layout(self, micro_batch: int, rank: int) -> Layout:
        """Returns the tokens of `rank` in `micro_batch`, in buffer order. Raises PlanError if
        either is out of range."""
        self._check_place(micro_batch, rank)
        placements = self.micro_batches[micro_batch]
        return Layout.of(placements, self.lengths, micro_batch, rank, trees=self.trees)

    def cross_layout(self, micro_batch: int, rank: int) -> CrossLayout:
        """Returns the tokens of `rank` in sources and in targets, each cut by its own length at the
        document's degree.

        So a rank may hold a few tokens more than in the plan, by rounding: fewer than four per
        split document.
        """
        self._check_place(micro_batch, rank)
        if not self.sources:
            raise PlanError(
                "this plan has no sources, so there is no layout across: give make_plan sources, "
                "or use layout"
            )
        placements = self.micro_batches[micro_batch]
        targets = [
            length - source for length, source in zip(self.lengths, self.sources, strict=True)
        ]
        return CrossLayout.of(
            targets=placements,
            target_lengths=targets,
            sources=placements,
            source_lengths=self.sources,
            micro_batch=micro_batch,
            rank=rank,
        )

    def _check_place(self, micro_batch: int, rank: int) -> None:
        if not is_whole(micro_batch, 0, len(self.micro_batches) - 1):
            count = len(self.micro_batches)
            raise PlanError(
                f"micro-batch {micro_batch!r} is not in this plan: it has {count}, counted from 0"
            )
        if not is_whole(rank, 0, self.ranks - 1):
            raise PlanError(
                f"rank {rank!r} is not in this plan's domain of {self.ranks} ranks, counted from 0"
            )

    def to_json(self) -> dict[str, Any]:
        content = self._content()
        if self.cost is not None:
            content["gap"] = self.gap
        return {**content, "hash": self.hash}

    def _content(self) -> dict[str, Any]:
        content: dict[str, Any] = {
            "version": VERSION,
            "mode": self.mode,
            "winner": self.winner,
            "ranks": self.ranks,
            "tokens_per_rank": self.tokens_per_rank,
            "lengths": list(self.lengths),
            "micro_batches": [list(map(asdict, placed)) for placed in self.micro_batches],
            "profile": self.profile.to_dict(),
        }
        if self.cost is not None:
            content |= asdict(self.cost)
        content |= {"pipeline": asdict(self.pipeline), "planning_ms": self.planning_ms}
        if self.trees:
            content["trees"] = {str(number): asdict(tree) for number, tree in self.trees.items()}
        if self.sources:
            content["sources"] = list(self.sources)
            content["parts"] = self.parts._asdict()
        if self.images:
            content["images"] = {str(number): list(works) for number, works in self.images.items()}
        return content
