"""Megatron main: the scheduler of Megatron-LM's hybrid context parallelism, unchanged from the `megatron-core` wheel.

Theirs: `BalancedCPScheduler` (0.16: `megatron/core/pipeline_parallel/hybrid_cp_schedule.py`) forms groups of documents between
barriers, with a list of documents per rank that run one after the other. Ours: the list of each ring is packed into
micro-batches, longest first, up to the token budget. Megatron's runtime has no barrier between the documents of a group, so the
packing can make it slower here.

The wheel is an optional dependency (extra `bench`), imported by name, so that planning needs neither the wheel nor torch.
"""

import importlib
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np

from longctx.errors import UserError, install
from longctx.planning.assignment import Assignment, Integers, largest_shards
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.plan import PlanError

MODULE = "megatron.core.pipeline_parallel.hybrid_cp_schedule"


class MissingBaseline(UserError):
    """Raised if the package of a baseline is not installed."""


def place_megatron_main(profile: HardwareProfile, lengths: Integers, ranks: int, tokens_per_rank: int) -> Assignment:
    """Assigns every document. Raises PlanError if the scheduler fails, MissingBaseline without the wheel."""
    groups = scheduled(lengths, ranks, tokens_per_rank)
    shards = largest_shards(lengths, groups.degree)
    over = np.flatnonzero(shards > tokens_per_rank)
    if len(over):
        document = int(over[0])
        raise PlanError(
            f"Megatron main splits document {document} of {lengths[document]} tokens over {groups.degree[document]} ranks, "
            f"which hold {groups.degree[document] * tokens_per_rank}: exceeds the budget of {tokens_per_rank} tokens per rank"
        )
    return _within_budget(groups, shards, tokens_per_rank)


def scheduled(lengths: Integers, ranks: int, tokens_per_rank: int) -> Assignment:
    """Returns the scheduler's result, with its groups as micro-batches; tokens per rank may exceed the budget."""
    process_group = SimpleNamespace(size=lambda: ranks)
    scheduler = load_scheduler()(tokens_per_rank, process_group)
    try:
        _, groups = scheduler.get_groups_and_subsamples(list(enumerate(lengths.tolist())), None)
    except Exception as error:  # any failure inside Megatron: the comparison continues without this baseline
        raise PlanError(f"Megatron main cannot plan this: {type(error).__name__} {error}".rstrip()) from error
    ranks_of: dict[int, list[tuple[int, int]]] = {}
    for row, lists in enumerate(groups):
        for rank, documents in enumerate(lists):
            for document in documents:
                ranks_of.setdefault(document, []).append((row, rank))
    micro_batch, first, degree = (np.zeros(len(lengths), dtype=np.int64) for _ in range(3))
    for document in range(len(lengths)):
        places = ranks_of.get(document, [])
        rows, ring = {row for row, _ in places}, sorted(rank for _, rank in places)
        if len(rows) != 1 or ring != list(range(ring[0], ring[0] + len(ring))):
            raise PlanError(f"Megatron main puts document {document} on {places[:8]}: not consecutive ranks of one group")
        micro_batch[document], first[document], degree[document] = rows.pop(), ring[0], len(ring)
    return Assignment(micro_batch, first, degree, np.zeros(len(lengths), dtype=bool))


def _within_budget(groups: Assignment, shards: Integers, tokens_per_rank: int) -> Assignment:
    """Splits groups into micro-batches: each ring's documents, longest first, fill one micro-batch after the other."""
    rings: dict[tuple[int, int], list[int]] = {}
    for document in np.argsort(-shards * groups.degree, kind="stable").tolist():
        rings.setdefault((int(groups.micro_batch[document]), int(groups.first_rank[document])), []).append(document)
    part = np.zeros_like(shards)
    for documents in rings.values():
        row, tokens = 0, 0
        for document in documents:
            if tokens + shards[document] > tokens_per_rank:
                row, tokens = row + 1, 0
            part[document] = row
            tokens += int(shards[document])
    parts = np.zeros(groups.micro_batches, dtype=np.int64)
    np.maximum.at(parts, groups.micro_batch, part + 1)
    micro_batch = (np.cumsum(parts) - parts)[groups.micro_batch] + part
    return Assignment(micro_batch, groups.first_rank, groups.degree, groups.reversed)


def load_scheduler() -> Any:
    """Imports Megatron's scheduler class. Raises MissingBaseline without the wheel."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about kernels for training, which are not used
            return importlib.import_module(MODULE).BalancedCPScheduler
    except ImportError as error:
        raise MissingBaseline(f"Megatron main needs the package megatron-core ({error}): {install('bench')}") from error
