"""Request: what can be planned at all, and clear words about what cannot."""

from collections.abc import Mapping, Sequence

import numpy as np

from longctx.planning.assignment import Integers, largest_shards
from longctx.planning.pipeline import NO_PIPELINE, SCHEDULES, Pipeline
from longctx.planning.plan import PlanError
from longctx.planning.profile import HardwareProfile

MODES = ("auto", "static", "bins")
MOST_RANKS = 1 << 20
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
    """Raises PlanError for settings that are malformed or contradict each other."""
    _whole("ranks", ranks, MOST_RANKS)
    _whole("tokens_per_rank", tokens_per_rank, MOST_TOKENS)
    if max_remote_tokens is not None:
        _whole("max_remote_tokens", max_remote_tokens, MOST_TOKENS)
    if mode not in MODES:
        raise PlanError(f"mode is {mode!r}: must be one of {', '.join(MODES)}")
    if degree is not None:
        _whole("degree", degree, ranks)
        if mode != "static":
            raise PlanError(f"degree is {degree} with mode {mode}: a degree belongs to mode static; leave it out")
    if bins is not None and mode == "static":
        raise PlanError("bins are given with mode static: take mode bins, or leave them out")
    _whole("pipeline ranks", pipeline.ranks, MOST_RANKS)
    _whole("pipeline chunks", pipeline.chunks, MOST_RANKS)
    if pipeline.schedule not in SCHEDULES:
        raise PlanError(f"the pipeline's schedule is {pipeline.schedule!r}: must be one of {', '.join(SCHEDULES)}")
    if pipeline.problem:
        rule, fix = pipeline.problem
        raise PlanError(f"the pipeline has {pipeline.chunks} chunks: {rule}; {fix}")


def check_lengths(lengths: Sequence[int], ranks: int, tokens_per_rank: int, profile: HardwareProfile) -> Integers:
    """The lengths as an array [documents]. Raises PlanError if they are none, malformed, or fit no degree."""
    if len(lengths) == 0:
        raise PlanError("there are no documents to plan: give at least one length")
    for document, length in enumerate(lengths):
        if not isinstance(length, (int, np.integer)) or isinstance(length, bool) or length < 1:
            raise PlanError(f"document {document} has length {length!r}: must be a whole number ≥ 1")
        if length > MOST_TOKENS:
            raise PlanError(f"document {document} has length {length!r}: at most {MOST_TOKENS} tokens can be planned")
    sizes = np.array(lengths, dtype=np.int64)
    unfit = np.flatnonzero(least_degrees(sizes, ranks, tokens_per_rank) == 0)
    if len(unfit):
        raise PlanError(_does_not_fit(unfit, sizes, ranks, tokens_per_rank))
    _check_magnitude(sizes, profile)
    return sizes


def least_degrees(lengths: Integers, ranks: int, tokens_per_rank: int) -> Integers:
    """The smallest degree at which each document fits the token budget; 0 where none up to `ranks` does."""
    least = -(-lengths // tokens_per_rank)
    pending = np.arange(len(lengths))
    while len(pending):  # an odd budget may ask for a degree or two more than the quotient
        fits = largest_shards(lengths[pending], least[pending]) <= tokens_per_rank
        pending = pending[~fits & (least[pending] < ranks)]
        least[pending] += 1
    return np.where((least <= ranks) & (largest_shards(lengths, least) <= tokens_per_rank), least, 0)


def _does_not_fit(unfit: Integers, lengths: Integers, ranks: int, tokens_per_rank: int) -> str:
    document = int(unfit[lengths[unfit].argmax()])
    length = lengths[[document]]
    domain = np.arange(1, ranks + 1)
    budget = int(largest_shards(np.broadcast_to(length, domain.shape), domain).min())
    enough = int(least_degrees(length, int(length[0]), tokens_per_rank)[0])
    others = f"; {len(unfit) - 1} more do not fit either" if len(unfit) > 1 else ""
    held = f"{ranks} ranks of {tokens_per_rank} hold at most {ranks * tokens_per_rank}, in even shares"
    ways = f"raise tokens_per_rank to {budget}, take {enough} ranks, or split the document"
    return f"document {document} has {length[0]} tokens: {held}; {ways}{others}"


def _check_magnitude(lengths: Integers, profile: HardwareProfile) -> None:
    """Keeps all sums of nanoseconds within what is exact."""
    s = lengths.astype(np.float64)
    attention = profile.attention_s_per_token2 * float((s * s).sum()) / profile.attention_efficiency[0][1]
    slowest = min(profile.intra_node_bytes_per_s, profile.inter_node_bytes_per_s)
    per_token = profile.linear_s_per_token + profile.kv_bytes_per_token / slowest
    fixed = profile.launch_s + profile.latency_s + profile.step_s
    seconds = attention + per_token * float(s.sum()) + fixed * len(lengths)
    if seconds * 1e9 > LONGEST_STEP_NS:
        raise PlanError(
            f"this step would take up to {seconds / 86_400:.0f} days by the hardware profile: at most "
            f"{LONGEST_STEP_NS / 86_400e9:.0f} can be planned; check the profile's constants"
        )


def _whole(name: str, value: object, most: int) -> None:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or not 1 <= value <= most:
        raise PlanError(f"{name} is {value!r}: must be a whole number in 1..{most}")
