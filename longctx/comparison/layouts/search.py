"""Search for the best split of GPUs into tensor, pipeline and domain ranks, by the cost model and the memory model.

Tried are schedules with 1, 2 or 4 stages a rank, three kinds of recomputation, weights gathered once a step or by blocks and
sharded over the whole domain, and tokens a rank that are powers of two.

Every such split has a bound: no plan of these documents can be faster under its profile. Splits are looked at in the order of
their bounds: one that fits into memory is planned, as a run would plan its steps, until no bound is below the time of the last
one that is asked for. So the answer is that of planning all of them.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import numpy as np

from longctx.comparison.layouts.cost import Machine, Split, profile_of
from longctx.config import Config
from longctx.errors import UserError
from longctx.memory.advisor import changed
from longctx.memory.loads import full_loads
from longctx.memory.model import Memory, estimate
from longctx.model.spec import ModelSpec
from longctx.planning.assignment import Integers, least_degrees
from longctx.planning.cost.bounds import lower_bound_ns
from longctx.planning.cost.hardware_profile import HardwareProfile
from longctx.planning.cost.model import NANOSECONDS
from longctx.planning.cost.pipeline import IN_CHUNKS, NO_PIPELINE, Pipeline
from longctx.planning.plan import Plan
from longctx.planning.planner import make_plan
from longctx.training.utilisation import model_flops

BUDGETS = tuple(1024 << power for power in range(9))
"""Tokens a rank that are tried: 1,024 to 262,144."""
CHUNKS = (1, 2, 4)
RECOMPUTE = ("none", "selective", "full")
WEIGHTS = (("step", "step"), ("block", "step"), ("block", "micro_batch"))
"""reshard_after and reduce_after: the most memory and the fewest messages first."""
TOO_LONG = "cannot hold the longest document"
TOO_LARGE = "need more memory than a GPU has"


@dataclass(frozen=True)
class Found:
    """A split that fits, and what is predicted of it.

    Attributes:
        step_s: mean time of a step.
        tokens_per_s_per_gpu: tokens of all documents.
        mfu: operations of the model, as a share of what the GPUs could do at their peak.
        bubble_share: mean share of a step in which a pipeline fills and drains.
        memory: of a rank that holds all the tokens that it may hold, of a ring of the longest document.
    """

    split: Split
    step_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    bubble_share: float
    memory: Memory


@dataclass
class SearchResult:
    """What a search found.

    Attributes:
        best: the fastest split of each tp, pp and recomputation, the fastest first.
        possible: splits that are tried.
        planned: those of them that were planned.
        refused: how many were left out, by reason.
        least_bytes: what the smallest of those that need too much memory needs.
    """

    possible: int
    best: list[Found] = field(default_factory=list)
    planned: int = 0
    refused: dict[str, int] = field(default_factory=lambda: {TOO_LONG: 0, TOO_LARGE: 0})
    least_bytes: int | None = None

    @property
    def slower(self) -> int:
        """Splits that were not looked at, as their bounds are slower than what was found."""
        return self.possible - self.planned - sum(self.refused.values())


def possible_splits(spec: ModelSpec, gpus: int, gpus_per_node: int, budgets: Sequence[int] = BUDGETS) -> Iterator[Split]:
    """The splits that are tried, all as the rules of a run allow: tp within a node and dividing kv heads, a layer a stage.

    8 GPUs in a node, 8 kv heads: tensor 1, 2, 4, 8; for tensor 2, pipelines of 1, 2, 4 ranks on a domain of 4, 2, 1.
    """
    kv_heads = spec.largest_layer.num_key_value_heads
    for tensor in _divisors(math.gcd(gpus, gpus_per_node, kv_heads)):
        held = [budget for budget in budgets if budget % tensor == 0]
        for ranks in _divisors(gpus // tensor):
            domain = gpus // tensor // ranks
            choices = itertools.product(_pipelines(ranks, len(spec.layers)), RECOMPUTE, WEIGHTS, held)
            for pipeline, recompute, (reshard_after, reduce_after), budget in choices:
                if _runs(pipeline, recompute, reshard_after, reduce_after):
                    yield Split(tensor, pipeline, domain, recompute, reshard_after, reduce_after, budget)


def _runs(pipeline: Pipeline, recompute: str, reshard_after: str, reduce_after: str) -> bool:
    """Whether a pipeline can run with these settings: it reduces once a step, and zero-bubble keeps everything gathered."""
    if pipeline.schedule == "zero-bubble" and (recompute != "none" or reshard_after == "block"):
        return False
    return pipeline.ranks == 1 or reduce_after != "micro_batch"


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _pipelines(ranks: int, layers: int) -> Iterator[Pipeline]:
    if ranks == 1:
        yield NO_PIPELINE
        return
    for chunks in CHUNKS:
        if ranks * chunks <= layers:
            yield from (Pipeline(ranks, chunks, schedule) for schedule in IN_CHUNKS if schedule != "interleaved" or chunks > 1)
            if chunks == 1:
                yield Pipeline(ranks)


def search(
    machine: Machine,
    spec: ModelSpec,
    steps: Sequence[Sequence[int]],
    gpus: int,
    *,
    budgets: Sequence[int] = BUDGETS,
    best: int = 10,
    progress: Callable[[str, int, int], None] = lambda doing, done, of: None,
) -> SearchResult:
    """The `best` splits for the documents of these steps.

    Args:
        machine: the GPUs.
        spec: the model, with its vocabulary.
        steps: lengths of the documents of every step.
        gpus: how many there are, in nodes as large as the machine's profile says.
        budgets: tokens_per_rank that are tried.
        progress: told what is done, how many of how many splits.

    Raises:
        UserError: if no split fits, with the least that one needs.
    """
    splits = list(possible_splits(spec, gpus, machine.profile.ranks_per_node, budgets))
    outcome = SearchResult(len(splits))
    sizes = [np.array(lengths, dtype=np.int64) for lengths in steps]
    longest = np.array([max(int(lengths.max()) for lengths in sizes)])
    queue = []
    for number, split in enumerate(splits):
        progress("bounds", number, len(splits))
        if least_degrees(longest, split.domain, split.tokens_per_rank).all():
            queue.append((fmean(_bounds_s(profile_of(machine, spec, split), split, sizes)), number))
        else:
            outcome.refused[TOO_LONG] += 1
    fastest: dict[tuple[int, int, str], Found] = {}
    for done, (bound, number) in enumerate(sorted(queue)):
        progress("plans", done, len(queue))
        times = sorted(found.step_s for found in fastest.values())
        limit = times[best - 1] if len(times) >= best else math.inf
        if bound >= limit:
            break
        split = splits[number]
        key = split.tensor, split.pipeline.ranks, split.recompute
        if key in fastest:
            limit = min(limit, fastest[key].step_s)
        if bound >= limit:
            continue
        found = _plan(machine, spec, split, sizes, limit, outcome)
        if found is not None and found.step_s < limit:
            fastest[key] = found
    outcome.best = sorted(fastest.values(), key=lambda found: found.step_s)[:best]
    if not outcome.best:
        raise UserError(_nothing_fits(outcome, gpus, machine.memory_bytes))
    return outcome


def _bounds_s(profile: HardwareProfile, split: Split, steps: Sequence[Integers]) -> list[float]:
    """Times of the steps that no plan can beat."""
    bounds = (lower_bound_ns(profile, lengths, split.domain, split.tokens_per_rank, split.pipeline) for lengths in steps)
    return [bound / NANOSECONDS for bound in bounds]


def _plan(
    machine: Machine, spec: ModelSpec, split: Split, steps: Sequence[Integers], limit_s: float, outcome: SearchResult
) -> Found | None:
    """What is predicted of a split; None if it needs too much memory, which is counted, or longer than the limit."""
    tokens = max(int(lengths.sum()) for lengths in steps)
    longest = max(int(lengths.max()) for lengths in steps)
    fewest = -(-tokens // (split.domain * split.tokens_per_rank))
    memory = memory_of(machine, spec, split, longest, fewest)
    plans: list[Plan] = []
    if memory.total <= machine.memory_bytes:
        plans = _plans(machine, spec, split, steps, limit_s)
        memory = memory_of(machine, spec, split, longest, max(len(plan.micro_batches) for plan in plans))
    if memory.total > machine.memory_bytes:
        outcome.refused[TOO_LARGE] += 1
        outcome.least_bytes = min(memory.total, outcome.least_bytes or memory.total)
        return None
    outcome.planned += 1
    if len(plans) < len(steps):
        return None
    step_s = fmean([plan.makespan_s for plan in plans])
    flops = fmean([model_flops(spec, lengths.tolist()) for lengths in steps])
    return Found(
        split=split,
        step_s=step_s,
        tokens_per_s_per_gpu=fmean([int(lengths.sum()) for lengths in steps]) / step_s / split.gpus,
        mfu=flops / (step_s * split.gpus * machine.peak_flops_per_s),
        bubble_share=fmean([plan.bubble_share for plan in plans]),
        memory=memory,
    )


def _plans(machine: Machine, spec: ModelSpec, split: Split, steps: Sequence[Integers], limit_s: float) -> list[Plan]:
    """The steps as a run would plan them; no more of them once the mean must be above the limit."""
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
                max_remote_tokens=split.tokens_per_rank,
            )
        )
        bounds[number] = plans[-1].makespan_s
        if fmean(bounds) > limit_s:
            break
    return plans


def memory_of(machine: Machine, spec: ModelSpec, split: Split, longest: int, micro_batches: int) -> Memory:
    """Bytes of a full rank that shares the longest document with as few others as hold it."""
    profile = profile_of(machine, spec, split)
    documents = {"context.two_level_exchange": profile.exchange_levels == 2, "data.max_length": longest}
    config = changed(Config(), (split.settings | documents).items())
    found = (replace(load, micro_batches=micro_batches) for load in full_loads(config, split.gpus, profile))
    return estimate(spec, config, split.gpus, list(found), fused=True)


def _nothing_fits(outcome: SearchResult, gpus: int, memory_bytes: int) -> str:
    reasons = [f"{count:,} {reason}" for reason, count in outcome.refused.items() if count]
    least = ""
    if outcome.least_bytes is not None:
        least = f" ({memory_bytes / 2**30:,.1f} GiB; the least that one needs are {outcome.least_bytes / 2**30:,.1f} GiB)"
    return (
        f"no split of {gpus} GPUs holds this model and these documents: of {outcome.possible:,}, "
        f"{' and '.join(reasons)}{least}: "
        "take more GPUs or more tokens a rank, cut the documents, or take a smaller model"
    )
