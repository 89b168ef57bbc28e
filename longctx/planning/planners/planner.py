"""Planner: makes a checked plan from document lengths, in one of three modes scored by the same
cost model.

`static` gives every document the same degree, `bins` takes degrees from a table, and `auto`
searches over degrees and also scores the other two modes, so it is never worse than either, unless
the profile says that its rates may be wrong (`hedge.py`).
Planning is a pure function: no randomness, and no clock except for `planning_ms`.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from longctx.arguments import (
    Rule,
    anything,
    checked,
    kind,
    mapping_of,
    or_none,
    row_of,
    sequence_of,
    whole,
)
from longctx.planning.assignment import least_degrees
from longctx.planning.check import (
    MOST_TOKENS,
    check_lengths,
    check_plan,
    check_settings,
    check_slow_ranks,
    check_sources,
    check_trees,
)
from longctx.planning.cost.model import StepTimes
from longctx.planning.cost.tower import EncodingTimes, TowerSpeed
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.image_work import Grid, ImageWorks
from longctx.planning.layout import Placement
from longctx.planning.parts import EQUAL_PARTS, PartCosts
from longctx.planning.pipeline import NO_PIPELINE, Pipeline
from longctx.planning.plan import Plan, PlanError
from longctx.planning.planners.bins import bin_degrees, pack_bins, plan_bins
from longctx.planning.planners.few_documents import with_other_degrees
from longctx.planning.planners.hedge import hedged
from longctx.planning.planners.planning_input import Candidate, PlanningInput, fastest
from longctx.planning.planners.search import refine, search
from longctx.planning.planners.static import best_static, plan_static
from longctx.planning.planners.whole import with_more_whole
from longctx.planning.tree import NO_TREES, Tree, Trees

CLOSE = 1.1
"""In a pipeline, token budgets whose first plan is within this factor of the best are searched
further."""


RULES: dict[str, Rule] = {
    "lengths": row_of("document lengths"),
    "profile": kind(
        "a HardwareProfile, such as HardwareProfile.load('h100-nvlink-ib')", HardwareProfile
    ),
    "bins": or_none(mapping_of("lengths to degrees", whole(least=1), keys=whole(least=1))),
    "pipeline": kind("a Pipeline of longctx.planning.pipeline", Pipeline),
    "trees": mapping_of(
        "documents to trees", kind("a Tree of longctx.planning.tree", Tree), keys=anything
    ),
    "sources": sequence_of("tokens of sources", whole(least=1, most=MOST_TOKENS)),
    "parts": kind("PartCosts of longctx.planning.parts", PartCosts),
    "images": or_none(
        mapping_of("documents to their images", row_of("images"), keys=whole(least=0))
    ),
    "tower": or_none(kind("a TowerSpeed of longctx.planning.cost.tower", TowerSpeed)),
}
"""Rules of the arguments that `check_settings` does not check."""


@checked(PlanError, **RULES)
def make_plan(
    lengths: Sequence[int],
    *,
    ranks: int,
    tokens_per_rank: int,
    profile: HardwareProfile,
    mode: str = "auto",
    degree: int | None = None,
    bins: Mapping[int, int] | None = None,
    max_remote_tokens: int | None = None,
    pipeline: Pipeline = NO_PIPELINE,
    trees: Trees = NO_TREES,
    sources: Sequence[int] = (),
    parts: PartCosts = EQUAL_PARTS,
    images: Mapping[int, Sequence[tuple[int, Grid]]] | None = None,
    tower: TowerSpeed | None = None,
) -> Plan:
    """Returns a checked plan of one optimizer step, with micro-batches in descending order of time;
    in a pipeline the longest ones are in the middle.

    Args:
        lengths: tokens of every document, each ≥ 1.
        ranks: size N of the domain.
        tokens_per_rank: maximum number of tokens per rank in a micro-batch.
        profile: the constants of the cost model.
        mode: auto, static or bins.
        degree: degree for mode static; None chooses the best one.
        bins: table {longest document of the bin: degree} for mode bins; None derives it from the
            profile. Mode auto also considers this table, unless a document does not fit it.
        max_remote_tokens: about how many remote tokens a round of the exchange has at most. A rank
            holds K and V of two rounds at once. None: as many rounds as hide the exchange (see
            `rounds`).
        pipeline: pipeline that runs the micro-batches; smaller micro-batches than the budget allows
            are tried as well.
        trees: documents that are trees, by document; see `longctx.planning.tree`.
        sources: for an encoder-decoder, the tokens of every document that its encoder reads, the
            first ones; else empty.
        parts: what tokens of sources and of targets cost.
        images: tokens and grid of each image of documents, by document.
        tower: encoder of images, whose work is planned too; None: it takes no time.

    Raises PlanError for malformed input, or documents that fit at no degree (names the document and
    the remedies).
    """
    began = time.perf_counter()
    check_settings(
        ranks=ranks,
        tokens_per_rank=tokens_per_rank,
        mode=mode,
        degree=degree,
        bins=bins,
        max_remote_tokens=max_remote_tokens,
        pipeline=pipeline,
    )
    check_slow_ranks(profile, ranks)
    sizes = check_lengths(lengths, ranks, tokens_per_rank, profile)
    check_trees(trees, lengths)
    check_sources(sources, sizes.tolist(), trees)
    given = PlanningInput(
        profile=profile,
        lengths=sizes,
        slots=ranks,
        tokens_per_rank=tokens_per_rank,
        degree=degree,
        bins=bins,
        max_remote_tokens=max_remote_tokens,
        pipeline=pipeline,
        trees=trees,
        sources=tuple(sources),
        parts=parts,
        encoding=EncodingTimes(_image_work(images or {}, tower)),
    )
    best = PLANNERS[mode](given) if pipeline.ranks == 1 else _best_in_pipeline(mode, given)
    plan = _plan(mode, given, best, began)
    check_plan(plan)
    return plan


def _image_work(
    images: Mapping[int, Sequence[tuple[int, Grid]]], tower: TowerSpeed | None
) -> ImageWorks:
    """Returns the work of the images of documents, by document; empty if it takes no time."""
    if tower is None:
        return {}
    work = cache(tower.work)  # many images are alike
    works = {}
    for document, its_images in images.items():
        works[document] = [work(tokens, grid) for tokens, grid in its_images]
    return works


def _plan(mode: str, given: PlanningInput, best: Candidate, began: float) -> Plan:
    """Returns the plan of a candidate, which `make_plan` has worked on since `began`."""
    placements, timed = _in_order(best, given.pipeline)
    return Plan(
        mode=mode,
        winner=best.winner,
        ranks=given.ranks,
        tokens_per_rank=given.tokens_per_rank,
        lengths=tuple(given.lengths.tolist()),
        micro_batches=placements,
        profile=given.profile,
        pipeline=given.pipeline,
        cost=given.plan_cost(timed),
        trees=dict(given.trees),
        sources=given.sources,
        parts=given.parts,
        images=given.encoding.works,
        planning_ms=(time.perf_counter() - began) * 1e3,
    )


def _plan_auto(given: PlanningInput) -> Candidate:
    best = or_by_other_modes(given, _with_fewer_splits(given, search(given)))
    return hedged(given, best)


def _with_fewer_splits(given: PlanningInput, best: Candidate) -> Candidate:
    """Returns a plan that takes hardly more time and splits fewer documents, or the given one."""
    whole = with_more_whole(given, best, given.settings)
    return with_other_degrees(given, whole, given.settings)


def or_by_other_modes(given: PlanningInput, best: Candidate) -> Candidate:
    """Returns a faster plan of mode bins or static, or else the given one; lower bounds skip most
    static degrees."""
    # The table may not fit these documents; auto does not need it.
    with contextlib.suppress(PlanError):
        degrees = bin_degrees(given)
        limit = best.makespan_ns
        if given.even_work_bound_ns(degrees) < limit:
            by_bins = given.candidate_below(limit, "bins", pack_bins(given, degrees))
            best = fastest(best, by_bins)
    by_degree = best_static(given, range(1, given.ranks + 1), below=best.makespan_ns)
    return fastest(best, by_degree)


PLANNERS: dict[str, Callable[[PlanningInput], Candidate]] = {
    "auto": _plan_auto,
    "static": plan_static,
    "bins": plan_bins,
}
"""Mode → planner; planners raise PlanError if the documents do not fit."""


def _best_in_pipeline(mode: str, given: PlanningInput) -> Candidate:
    """Returns the best plan including the bubble of the pipeline.

    Mode auto chooses budgets by the first, coarse plans of their searches. It looks for plans of
    the other modes at all budgets, so it is never worse than they are.
    """
    if mode != "auto":
        return fastest(*_by_budget(PLANNERS[mode], given))
    searches: list[Iterator[Candidate]] = []

    def begin(smaller: PlanningInput) -> Candidate:
        searches.append(refine(smaller))
        return next(searches[-1])

    coarse = _by_budget(begin, given)
    limit = CLOSE * min(candidate.makespan_ns for candidate in coarse)
    close = [
        (candidate, search)
        for candidate, search in zip(coarse, searches, strict=True)
        if candidate.makespan_ns <= limit
    ]
    # The last plan of a search is its best.
    refined = [[candidate, *search][-1] for candidate, search in close]
    best = _with_fewer_splits(given, fastest(*refined))
    for smaller in _budgets(given):
        best = or_by_other_modes(smaller, best)
    for smaller in _budgets(given):
        best = hedged(smaller, best)
    return best


def _by_budget(plan: Callable[[PlanningInput], Candidate], given: PlanningInput) -> list[Candidate]:
    """Returns plans in a pipeline by one planner, with ever smaller token budgets.

    More micro-batches mean a smaller bubble: the token budget is halved until more micro-batches do
    not help.
    """
    best = plan(given)
    plans = [best]
    with contextlib.suppress(PlanError):  # a smaller budget may fit no plan
        for smaller in itertools.islice(_budgets(given), 1, None):
            last = plan(smaller)
            plans.append(last)
            if last.makespan_ns < best.makespan_ns:
                best = last
            elif last.assignment.micro_batches > best.assignment.micro_batches:
                break
    return plans


def _budgets(given: PlanningInput) -> Iterator[PlanningInput]:
    """Yields the input with its token budget and with half, a quarter, … of it, while every
    document fits some degree."""
    budget = given.tokens_per_rank
    while budget and least_degrees(given.lengths, given.slots, budget).all():
        yield replace(given, tokens_per_rank=budget)
        budget //= 2


def _in_order(
    best: Candidate, pipeline: Pipeline
) -> tuple[tuple[tuple[Placement, ...], ...], StepTimes]:
    """Returns the non-empty micro-batches and their times: longest first, or in a pipeline with
    rising, then falling times.

    The pipeline then fills and drains with short micro-batches, and concurrent forward and backward
    passes take similar times. In simulations of torch's schedules, 1F1B is 6 to 9 % faster than
    with the longest first, and 17 to 29 % faster than in random order (8 ranks, 32 micro-batches
    with times that vary by 40 %).
    """
    used, row = np.unique(best.assignment.micro_batch, return_inverse=True)
    order = np.argsort(-best.timed.micro_batch_ns[used], kind="stable")
    if pipeline.ranks > 1:
        order = np.concatenate([order[::2][::-1], order[1::2]])
    turn = np.empty(len(used), dtype=np.int64)
    turn[order] = np.arange(len(used))
    rows = used[order]
    timed = replace(best.timed, time=best.timed.time[rows], exposed=best.timed.exposed[rows])
    in_order = replace(best.assignment, micro_batch=turn[row])
    return in_order.placements(best.rounds), timed
