"""Search for the best split of GPUs into tensor, pipeline and domain ranks, by the cost model and
the memory model.

The search space: pipelines with 1, 2 or 4 stages per rank, three kinds of recomputation, weights
gathered once per step or per block and sharded over the whole domain, and tokens per rank in powers
of two.

Every split has a lower bound on the time of any plan under its profile. Splits are visited in
ascending order of their bounds; those that fit in memory are planned as a run would plan its steps.
The search ends when the next bound exceeds the time of the last split to return, so the search
returns what planning all splits would return.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import fmean

import numpy as np

from longctx.config import Config
from longctx.config.combinations import ROWS
from longctx.errors import UserError
from longctx.memory.loads import full_loads
from longctx.memory.model import Memory, estimate
from longctx.planning.assignment import Integers, least_degrees
from longctx.planning.cost.bounds import step_bound_ns
from longctx.planning.cost.model import NANOSECONDS
from longctx.planning.cost.spec import ModelSpec, Recompute
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.layout import divisors
from longctx.planning.pipeline import NO_PIPELINE, Pipeline
from longctx.planning.plan import Plan
from longctx.planning.planners.planner import make_plan
from longctx.training.metrics import model_flops
from split_cost import Machine, Split, profile_of

BUDGETS = tuple(1024 << power for power in range(9))
"""Tokens per rank in the search: 1,024 to 262,144."""
CHUNKS = (1, 2, 4)
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
WEIGHTS = (("step", "step"), ("block", "step"), ("block", "micro_batch"))
"""reshard_after and reduce_after, from most memory and fewest messages to least memory."""
TOO_LONG = "cannot hold the longest document"
TOO_LARGE = "need more memory than a GPU has"


@dataclass(frozen=True)
class PlannedSplit:
    """A split that fits, and its predictions.

    Attributes:
        split: the split.
        step_s: mean time per step.
        tokens_per_s_per_gpu: throughput per GPU.
        mfu: model FLOP utilization.
        bubble_share: mean share of a step in which the pipeline fills and drains.
        memory: peak memory of a rank with all tokens of its budget, in a ring of the longest
            document.
    """

    split: Split
    step_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    bubble_share: float
    memory: Memory


@dataclass
class SearchResult:
    """Result of a search.

    Attributes:
        possible: number of splits in the search space.
        best: the fastest split of each tp, pp and recomputation, the fastest first.
        planned: number of splits that were planned.
        refused: number of splits that do not fit, by reason.
        least_bytes: smallest peak memory of the splits that need too much memory.
    """

    possible: int
    best: list[PlannedSplit] = field(default_factory=list)
    planned: int = 0
    refused: dict[str, int] = field(default_factory=lambda: {TOO_LONG: 0, TOO_LARGE: 0})
    least_bytes: int | None = None

    @property
    def slower(self) -> int:
        """Number of splits not visited, because their lower bounds exceed those of the best."""
        return self.possible - self.planned - sum(self.refused.values())


def possible_splits(
    spec: ModelSpec, gpus: int, gpus_per_node: int, budgets: Sequence[int] = BUDGETS
) -> Iterator[Split]:
    """Yields the search space that the rules of a run allow: tp within a node and dividing the KV
    heads, a layer per stage.

    With 8 GPUs per node and 8 KV heads: tp 1, 2, 4, 8; for tp 2, pipelines of 1, 2, 4 ranks with a
    domain of 4, 2, 1.
    """
    kv_heads = spec.largest_layer.num_key_value_heads
    experts = spec.experts
    for tensor in divisors(math.gcd(gpus, gpus_per_node, kv_heads)):
        held = [budget for budget in budgets if budget % tensor == 0]
        for ranks in divisors(gpus // tensor):
            domain = gpus // tensor // ranks
            sizes = [
                size
                for size in divisors(domain)
                if size == 1 or (experts and experts % (size * tensor) == 0)
            ]
            choices = itertools.product(
                _pipelines(ranks, len(spec.layers)), RECOMPUTE, WEIGHTS, held, sizes
            )
            for pipeline, recompute, (reshard_after, reduce_after), budget, expert in choices:
                if _goes_together(pipeline, recompute, reshard_after, reduce_after):
                    yield Split(
                        tensor,
                        pipeline,
                        domain,
                        recompute,
                        reshard_after,
                        reduce_after,
                        budget,
                        expert,
                    )


@cache
def _goes_together(
    pipeline: Pipeline, recompute: Recompute, reshard_after: str, reduce_after: str
) -> bool:
    """Returns whether the table of combinations allows a run with these settings."""
    split = Split(1, pipeline, 1, recompute, reshard_after, reduce_after, tokens_per_rank=1)
    config = Config().changed(split.settings)
    return not any(row.problem(config, None) for row in ROWS if row.key in split.settings)


def _pipelines(ranks: int, layers: int) -> Iterator[Pipeline]:
    if ranks == 1:
        yield NO_PIPELINE
        return
    for chunks in CHUNKS:
        if ranks * chunks <= layers:
            yield Pipeline(ranks, chunks)


def search(
    machine: Machine,
    spec: ModelSpec,
    steps: Sequence[Sequence[int]],
    gpus: int,
    *,
    longest: int | None = None,
    budgets: Sequence[int] = BUDGETS,
    best: int = 10,
    progress: Callable[[str, int, int], None] = lambda doing, done, of: None,
) -> SearchResult:
    """Searches for the `best` splits for the documents of the steps.

    Args:
        machine: the GPUs.
        spec: the model, with its vocabulary.
        steps: document lengths of every step.
        gpus: number of GPUs, in nodes of the size in the machine's profile.
        longest: tokens of the longest document of the data set, which every split must hold (None:
            of the steps).
        budgets: values of tokens_per_rank to try.
        best: number of splits to return.
        progress: called with the current phase, the number of splits done and their total.

    Raises:
        UserError: if no split fits, with the smallest memory that a split needs.
    """
    splits = list(possible_splits(spec, gpus, machine.profile.ranks_per_node, budgets))
    outcome = SearchResult(len(splits))
    sizes = [np.array(lengths, dtype=np.int64) for lengths in steps]
    longest = longest or max(int(lengths.max()) for lengths in sizes)
    queue = []
    for number, split in enumerate(splits):
        progress("bounds", number, len(splits))
        if least_degrees(np.array([longest]), split.domain, split.tokens_per_rank).all():
            queue.append((fmean(_bounds_s(profile_of(machine, spec, split), split, sizes)), number))
        else:
            outcome.refused[TOO_LONG] += 1
    fastest: dict[tuple[int, int, str], PlannedSplit] = {}
    for done, (bound, number) in enumerate(sorted(queue)):
        progress("plans", done, len(queue))
        times = sorted(planned.step_s for planned in fastest.values())
        limit = times[best - 1] if len(times) >= best else math.inf
        if bound >= limit:
            break
        split = splits[number]
        key = split.tensor, split.pipeline.ranks, split.recompute
        limit = min(limit, fastest[key].step_s) if key in fastest else limit
        planned = (
            None if bound >= limit else _plan(machine, spec, split, sizes, longest, limit, outcome)
        )
        if planned is not None and planned.step_s < limit:
            fastest[key] = planned
    outcome.best = sorted(fastest.values(), key=lambda planned: planned.step_s)[:best]
    if not outcome.best:
        raise UserError(_nothing_fits(outcome, gpus, machine.memory_bytes))
    return outcome


def _bounds_s(profile: HardwareProfile, split: Split, steps: Sequence[Integers]) -> list[float]:
    """Returns lower bounds on the times of the steps."""
    bounds = (
        step_bound_ns(profile, lengths, split.domain, split.tokens_per_rank, split.pipeline)
        for lengths in steps
    )
    return [bound / NANOSECONDS for bound in bounds]


def _plan(
    machine: Machine,
    spec: ModelSpec,
    split: Split,
    steps: Sequence[Integers],
    longest: int,
    limit_s: float,
    outcome: SearchResult,
) -> PlannedSplit | None:
    """Returns the predictions of a split; None if it needs too much memory (counted in `outcome`)
    or exceeds the limit."""
    tokens = max(int(lengths.sum()) for lengths in steps)
    fewest = -(-tokens // (split.domain * split.tokens_per_rank))
    memory = memory_of(machine, spec, split, longest, fewest)
    plans: list[Plan] = []
    if memory.total <= machine.memory_bytes:
        plans = _plans(machine, spec, split, steps, limit_s)
        memory = memory_of(
            machine, spec, split, longest, max(len(plan.micro_batches) for plan in plans)
        )
    if memory.total > machine.memory_bytes:
        outcome.refused[TOO_LARGE] += 1
        outcome.least_bytes = min(memory.total, outcome.least_bytes or memory.total)
        return None
    outcome.planned += 1
    if len(plans) < len(steps):
        return None
    step_s = fmean([plan.makespan_s for plan in plans])
    flops = fmean([model_flops(spec, lengths.tolist()) for lengths in steps])
    return PlannedSplit(
        split=split,
        step_s=step_s,
        tokens_per_s_per_gpu=fmean([int(lengths.sum()) for lengths in steps]) / step_s / split.gpus,
        mfu=flops / (step_s * split.gpus * machine.peak_flops_per_s),
        bubble_share=fmean([plan.bubble_share for plan in plans]),
        memory=memory,
    )


def _plans(
    machine: Machine, spec: ModelSpec, split: Split, steps: Sequence[Integers], limit_s: float
) -> list[Plan]:
    """Plans the steps as a run would; stops as soon as their mean time must exceed the limit."""
    profile = profile_of(machine, spec, split)
    bounds = _bounds_s(profile, split, steps)
    plans: list[Plan] = []
    for number, lengths in enumerate(steps):
        plans.append(
            make_plan(
                lengths.tolist(),
                ranks=split.domain,
                tokens_per_rank=split.tokens_per_rank,
                profile=profile,
                pipeline=split.pipeline,
                max_remote_tokens=split.max_remote_tokens,
            )
        )
        bounds[number] = plans[-1].makespan_s
        if fmean(bounds) > limit_s:
            break
    return plans


def memory_of(
    machine: Machine, spec: ModelSpec, split: Split, longest: int, micro_batches: int
) -> Memory:
    """Returns the peak memory of a full rank whose ring for the longest document is as small as
    possible."""
    profile = profile_of(machine, spec, split)
    documents = {
        "context.two_level_exchange": profile.exchange_levels == 2,
        "data.max_length": longest,
    }
    config = Config().changed(split.settings | documents)
    loads = [
        replace(load, micro_batches=micro_batches)
        for load in full_loads(config, split.gpus, profile)
    ]
    return estimate(spec, config, split.gpus, loads, fused=True)


def _nothing_fits(outcome: SearchResult, gpus: int, memory_bytes: int) -> str:
    reasons = [f"{count:,} {reason}" for reason, count in outcome.refused.items() if count]
    least = ""
    if outcome.least_bytes is not None:
        least = (
            f" ({memory_bytes / 2**30:,.1f} GiB; the smallest needs "
            f"{outcome.least_bytes / 2**30:,.1f} GiB)"
        )
    return (
        f"no split of {gpus} GPUs can hold this model and these documents: of "
        f"{outcome.possible:,} splits, {' and '.join(reasons)}{least}: use more GPUs, more tokens "
        "per rank, a smaller --max-length of documents, or a smaller model"
    )
