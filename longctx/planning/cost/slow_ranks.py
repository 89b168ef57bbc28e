"""Slow ranks: ranks of a domain that take longer than the others for the same work, as a profile
names them. Messages take as long as everywhere."""

import numpy as np
from numpy.typing import NDArray

from longctx.planning.assignment import Integers
from longctx.planning.hardware_profile import HardwareProfile

Floats = NDArray[np.float64]


def slowness(profile: HardwareProfile, ranks: int) -> Floats:
    """Returns the time of every rank relative to a usual one (an array [ranks], each ≥ 1). Every
    rank of the profile must be below `ranks`."""
    result = np.ones(ranks)
    for rank, times in profile.slow_ranks:
        result[rank] = times
    return result


def slowed_ns(profile: HardwareProfile, usual_ns: Integers) -> Integers:
    """Returns the nanoseconds that every rank takes for work which takes a usual one `usual_ns`
    (arrays [.., ranks])."""
    if not profile.slow_ranks:
        return usual_ns
    by_rank = usual_ns * slowness(profile, usual_ns.shape[-1])
    return np.ceil(by_rank).astype(np.int64)


def usual_ns(profile: HardwareProfile, slowed: Integers) -> Integers:
    """Returns the nanoseconds that a usual rank would take for the work of every rank (arrays [..,
    ranks])."""
    if not profile.slow_ranks:
        return slowed
    by_rank = slowed / slowness(profile, slowed.shape[-1])
    return np.floor(by_rank).astype(np.int64)


def even_ns(profile: HardwareProfile, work_ns: int, beside_ns: int, ranks: int) -> int:
    """Returns a lower bound on the time in which the ranks do this work, evenly spread, and what
    takes as long on every rank, `beside_ns`, both summed over ranks in nanoseconds.

    In M nanoseconds a rank that takes f times as long does M / f of work. What it waits for besides
    costs it at least a share 1 / f of that.
    """
    if not profile.slow_ranks:
        return (work_ns + beside_ns) // ranks
    relative = slowness(profile, ranks)
    usual_ranks = float((1 / relative).sum())
    return int((work_ns + beside_ns / float(relative.max())) / usual_ranks * (1 - ROUNDING))


ROUNDING = 1e-12
"""Relative error of sums of reciprocals."""
