"""Check: planner input, and the guarantees of a plan that training relies on.

`make_plan` checks every plan before it returns it. I1: every document is placed in exactly one
micro-batch, on ranks of the domain. I4: no rank holds more than `tokens_per_rank` tokens in any
micro-batch. Together with the order of micro-batches (I2) and the purity of the layout (I3), these
rule out deadlock and overflow.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from longctx.planning.assignment import (
    Assignment,
    Integers,
    largest_shards,
    least_degrees,
    tokens_on_ranks,
)
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.pipeline import NO_PIPELINE, Pipeline
from longctx.planning.plan import MODES, Plan, PlanError
from longctx.planning.tree import Trees

MOST_RANKS = 1 << 14
"""Largest domain; in planning, time grows with its square."""
LONG = 1 << 20
"""Tokens of a document from which an error does not name the smallest number of ranks for it."""
MOST_TOKENS = 1 << 40
LONGEST_STEP_NS = 1 << 52
"""Sums of nanoseconds run in float64, which is exact below 2⁵³."""


def check_settings(
    ranks: int,
    tokens_per_rank: int,
    mode: str,
    degree: int | None,
    bins: Mapping[int, int] | None,
    max_remote_tokens: int | None,
    pipeline: Pipeline = NO_PIPELINE,
) -> None:
    """Raises PlanError for invalid or contradictory settings."""
    _whole("ranks", ranks, MOST_RANKS)
    _whole("tokens_per_rank", tokens_per_rank, MOST_TOKENS)
    if max_remote_tokens is not None:
        _whole("max_remote_tokens", max_remote_tokens, MOST_TOKENS)
    if mode not in MODES:
        raise PlanError(f"mode is {mode!r}: must be one of {', '.join(MODES)}")
    if degree is not None:
        _whole("degree", degree, ranks)
        if mode != "static":
            raise PlanError(
                f"degree is {degree}, but mode is {mode}: only mode static takes a degree; leave "
                "it out"
            )
    if bins is not None and mode == "static":
        raise PlanError("bins are given, but mode is static: use mode bins, or leave bins out")
    _whole("pipeline ranks", pipeline.ranks, MOST_RANKS)
    _whole("pipeline chunks", pipeline.chunks, MOST_RANKS)
    if pipeline.problem:
        rule, fix = pipeline.problem
        raise PlanError(f"pipeline chunks is {pipeline.chunks}: {rule}; {fix}")


def check_lengths(
    lengths: Sequence[int], ranks: int, tokens_per_rank: int, profile: HardwareProfile
) -> Integers:
    """Returns the lengths as an array [documents]. Raises PlanError if they are empty, invalid, or
    fit no degree."""
    if len(lengths) == 0:
        raise PlanError("lengths are empty: give at least one document length")
    for document, length in enumerate(lengths):
        if not _is_whole(length):
            raise PlanError(
                f"document {document} has length {length!r}: must be a whole number ≥ 1"
            )
        if length > MOST_TOKENS:
            raise PlanError(
                f"document {document} has length {length!r}: the maximum is {MOST_TOKENS} tokens"
            )
    sizes = np.array(lengths, dtype=np.int64)
    unfit = np.flatnonzero(least_degrees(sizes, ranks, tokens_per_rank) == 0)
    if len(unfit):
        raise PlanError(_does_not_fit(unfit, sizes, ranks, tokens_per_rank))
    _check_magnitude(sizes, profile)
    return sizes


def check_slow_ranks(profile: HardwareProfile, ranks: int) -> None:
    """Raises PlanError if the profile names a slow rank that the domain does not have."""
    for rank, _ in profile.slow_ranks:
        if rank >= ranks:
            raise PlanError(
                f"slow_ranks of the profile names rank {rank}, but the domain has ranks 0 to "
                f"{ranks - 1}: leave slow_ranks out, or measure the profile again with `longctx "
                "calibrate` on these ranks"
            )


def check_trees(trees: Trees, lengths: Sequence[int]) -> None:
    """Raises PlanError if trees are not those of documents of these lengths."""
    for document, tree in trees.items():
        if document not in range(len(lengths)) or tree.length != lengths[document]:
            raise PlanError(
                f"document {document} is given as a tree of {tree.length} tokens, but not by the "
                f"{len(lengths)} lengths: give those of all documents, and for a tree the sum of "
                "its nodes"
            )


def check_sources(sources: Sequence[int], lengths: Sequence[int], trees: Trees) -> None:
    """Raises PlanError if sources are not those of documents of these lengths, each with a target
    after it."""
    if sources and (trees or len(sources) != len(lengths)):
        raise PlanError(
            f"there are {len(sources)} sources and {len(trees)} trees, but {len(lengths)} "
            "documents: give one source for each, and no trees"
        )
    for document, (source, length) in enumerate(zip(sources, lengths, strict=False)):
        if not 1 <= source < length:
            raise PlanError(
                f"document {document} has {length} tokens, {source} of the source: needs one or "
                "more of each part"
            )


def _does_not_fit(unfit: Integers, lengths: Integers, ranks: int, tokens_per_rank: int) -> str:
    document = int(unfit[lengths[unfit].argmax()])
    length = lengths[[document]]
    domain = np.arange(1, ranks + 1)
    budget = int(largest_shards(np.broadcast_to(length, domain.shape), domain).min())
    enough = _enough_ranks(length, tokens_per_rank)
    others = f" ({len(unfit) - 1} more documents do not fit)" if len(unfit) > 1 else ""
    held = (
        f"{ranks} ranks of {tokens_per_rank} tokens hold at most {ranks * tokens_per_rank}, in "
        "even shares"
    )
    ways = f"raise tokens_per_rank to {budget}, use {enough} ranks, or split the document"
    return f"document {document} has {length[0]} tokens, but {held}{others}: {ways}"


def _enough_ranks(length: Integers, tokens_per_rank: int) -> int:
    """Returns a number of ranks that hold a document, of lengths [1]: the smallest, unless the
    document is so long that an odd budget makes it slow to find."""
    tokens = int(length[0])
    if tokens <= LONG or tokens_per_rank == 1:
        return int(least_degrees(length, tokens, tokens_per_rank)[0])
    even = tokens_per_rank - tokens_per_rank % 2
    return -(-tokens // even)


def _check_magnitude(lengths: Integers, profile: HardwareProfile) -> None:
    """Raises PlanError for a step so long that sums of nanoseconds would not be exact."""
    s = lengths.astype(np.float64)
    attention = (
        profile.attention_s_per_token2 * float((s * s).sum()) / profile.attention_efficiency[0][1]
    )
    slowest = min(profile.intra_node_bytes_per_s, profile.inter_node_bytes_per_s)
    per_token = profile.linear_s_per_token + profile.kv_bytes_per_token / slowest
    fixed = profile.launch_s + profile.latency_s + profile.step_s
    seconds = attention + per_token * float(s.sum()) + fixed * len(lengths)
    seconds *= max((relative for _, relative in profile.slow_ranks), default=1.0)
    if seconds * 1e9 > LONGEST_STEP_NS:
        raise PlanError(
            f"this step would take up to {seconds / 86_400:.0f} days by the hardware profile, but "
            f"the maximum is {LONGEST_STEP_NS / 86_400e9:.0f} days: take a profile of the devices "
            "of the run (context.profile; for GPUs also train.device), or check its constants"
        )


def _whole(name: str, value: Any, most: int) -> None:
    if not _is_whole(value) or value > most:
        raise PlanError(f"{name} is {value!r}: must be a whole number in 1..{most}")


def check_plan(plan: Plan) -> None:
    """Raises PlanError if a plan breaks a guarantee; names the document, micro-batch and rank."""
    _check_form(plan)
    check_trees(plan.trees, plan.lengths)
    _check_documents(plan)
    _check_tokens(plan)


def _check_form(plan: Plan) -> None:
    if not _is_whole(plan.ranks) or not _is_whole(plan.tokens_per_rank):
        raise PlanError(
            f"ranks {plan.ranks!r} and tokens_per_rank {plan.tokens_per_rank!r} must be whole "
            "numbers ≥ 1"
        )
    for document, length in enumerate(plan.lengths):
        if not _is_whole(length):
            raise PlanError(
                f"document {document} has length {length!r}: must be a whole number ≥ 1"
            )


def _check_documents(plan: Plan) -> None:
    seen: Counter[int] = Counter()
    for micro_batch, placements in enumerate(plan.micro_batches):
        if not placements:
            raise PlanError(f"micro-batch {micro_batch} has no document")
        for p in placements:
            where = f"document {p.document!r} in micro-batch {micro_batch}"
            if (
                not _is_whole(p.degree)
                or not _is_whole(p.first_rank, least=0)
                or not isinstance(p.reversed, bool)
            ):
                raise PlanError(
                    f"{where} is malformed: degree {p.degree!r}, first rank {p.first_rank!r}, "
                    f"reversed {p.reversed!r}"
                )
            if not _is_whole(p.rounds):
                raise PlanError(
                    f"{where} has {p.rounds!r} exchange rounds: must be a whole number ≥ 1"
                )
            if p.first_rank + p.degree > plan.ranks:
                raise PlanError(
                    f"{where} is on ranks {p.first_rank} to {p.first_rank + p.degree - 1}, but the "
                    f"domain has {plan.ranks}"
                )
            if not _is_whole(p.document, least=0) or p.document >= len(plan.lengths):
                raise PlanError(
                    f"{where} does not exist: the plan has {len(plan.lengths)} documents, counted "
                    "from 0"
                )
            seen[p.document] += 1
    if len(seen) < len(plan.lengths):
        missing = next(document for document in range(len(plan.lengths)) if document not in seen)
        raise PlanError(f"document {missing} is in no micro-batch")
    document, times = seen.most_common(1)[0] if seen else (0, 1)
    if times > 1:
        places = [
            k
            for k, placements in enumerate(plan.micro_batches)
            for p in placements
            if p.document == document
        ]
        raise PlanError(
            f"document {document} is placed {times} times, in micro-batches {places}: must be once"
        )


def _check_tokens(plan: Plan) -> None:
    if not plan.lengths:
        return
    assignment = Assignment.of(plan)
    tokens = tokens_on_ranks(
        np.array(plan.lengths, dtype=np.int64), assignment, (len(plan.micro_batches), plan.ranks)
    )
    over = np.argwhere(tokens > plan.tokens_per_rank)
    if len(over):
        micro_batch, rank = over[0].tolist()
        documents = [p.document for p in plan.micro_batches[micro_batch] if rank in p.ring]
        raise PlanError(
            f"rank {rank} holds {tokens[micro_batch, rank]} tokens in micro-batch {micro_batch} "
            f"(documents {documents}), but the budget is {plan.tokens_per_rank} tokens per rank"
        )


def _is_whole(value: Any, least: int = 1) -> bool:
    # A bool is an int by isinstance.
    return (type(value) is int or isinstance(value, np.integer)) and bool(value >= least)
