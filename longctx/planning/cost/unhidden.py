"""Unhidden exchange: what exchange across nodes costs at least, whatever the plan.

The gradients of the last of n rounds return while nothing but the queries' backward runs, of at
most a token budget; each further round has its price (`rounds`). A document that no node holds pays
that on every rank of its ring.

The least over all degrees and rounds is taken on a grid: a length counts as the next lower one of
the grid, and degrees from a to b - 1 as a, with the messages of a and the price at b.
"""

import math
from dataclasses import dataclass

import numpy as np

from longctx.planning.assignment import Integers
from longctx.planning.cost.model import NANOSECONDS, linear_ns, mate_ns
from longctx.planning.cost.rounds import CHOICES, FORWARD_LINEAR, PASSES, PRICE
from longctx.planning.cost.work_overrides import NO_OVERRIDES, Floats, WorkOverrides
from longctx.planning.hardware_profile import HardwareProfile

GRID = 0.01
"""Distance of the logarithms of neighbouring lengths, and degrees, on the grid."""
ROUNDING = 4.0
"""Nanoseconds by which the times of a rank's messages may be rounded."""


def unhidden_exchange_ns(
    profile: HardwareProfile,
    lengths: Integers,
    ranks: int,
    tokens_per_rank: int,
    overrides: WorkOverrides = NO_OVERRIDES,
) -> int:
    """Returns the least time in nanoseconds, summed over ranks, that exchange across nodes costs;
    0 where lengths do not tell what documents exchange and compute."""
    over_nodes = lengths > profile.ranks_per_node * tokens_per_rank
    if overrides.products is not None or overrides.keys is not None or not over_nodes.any():
        return 0
    degrees = _Degrees.up_to(ranks, node=profile.ranks_per_node)
    if len(degrees.first) == 0:
        return 0
    on_grid = np.floor(np.log(lengths[over_nodes]) / GRID)
    exponent, count = np.unique(on_grid, return_counts=True)
    length = np.floor(np.exp(exponent * GRID)) - 1
    waits = _least_waits(profile, length[:, None], degrees, tokens_per_rank)
    fewest = np.ceil(length / tokens_per_rank)[:, None]
    holds = degrees.stop > fewest
    of_ring = np.maximum(degrees.first, fewest) * np.maximum(0.0, waits - ROUNDING)
    of_document = np.where(holds, of_ring, np.inf).min(axis=1)
    fits = np.isfinite(of_document)
    return int((count[fits] * of_document[fits]).sum())


@dataclass(frozen=True)
class _Degrees:
    """Intervals of degrees from `first` to `stop` - 1 (arrays [intervals])."""

    first: Integers
    stop: Integers

    @classmethod
    def up_to(cls, ranks: int, node: int) -> "_Degrees":
        """Returns intervals on the grid of the degrees above a node's ranks."""
        exponents = np.arange(1 + math.ceil(math.log(ranks) / GRID))
        on_grid = np.floor(np.exp(exponents * GRID)).astype(np.int64)
        first = np.unique(np.append(np.minimum(ranks, on_grid), node + 1))
        first = first[(first > node) & (first <= ranks)]
        return cls(first, np.append(first[1:], ranks + 1))


def _least_waits(
    profile: HardwareProfile, length: Floats, degrees: _Degrees, tokens_per_rank: int
) -> Floats:
    """Returns the least time that a rank of a ring waits for its last messages and pays for rounds
    [lengths, intervals]."""
    node = profile.ranks_per_node
    in_two_levels = profile.exchange_levels == 2 and node > 1
    senders = node if in_two_levels else 1
    _, inter_ns = mate_ns(profile, length, degrees.first)
    messages = (degrees.first - node) * (inter_ns - 1) / senders / PASSES
    hides = (1 - FORWARD_LINEAR) * profile.query_share * profile.overlap
    queries = hides * float(linear_ns(profile, np.array([tokens_per_rank]))[0])
    price = PRICE * profile.linear_s_per_token * NANOSECONDS * length / degrees.stop
    least = np.full(messages.shape, np.inf)
    for rounds in CHOICES:
        # In two levels, the second messages return with the first ones.
        returning = 2 if in_two_levels and rounds > 1 else 1
        waits = np.maximum(0.0, returning * messages / rounds - queries)
        least = np.minimum(least, waits + price * (rounds - 1))
    return least
