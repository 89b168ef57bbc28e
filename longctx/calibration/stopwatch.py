"""Stopwatch: times the same work on all ranks at once; as in a training step, the slowest rank counts."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from longctx.parallel.mesh import Mesh
from longctx.parallel.timing import finish

LEAST_REPEATS, MOST_REPEATS = 3, 15


@dataclass(frozen=True)
class Timing:
    """A timing over several repeats.

    Attributes:
        seconds: median over repeats of the slowest rank's time; infinite if out of memory.
        spread: median absolute deviation, relative to `seconds`.
    """

    seconds: float
    spread: float


class Stopwatch:
    """Times work that all ranks run in the same order.

    `longest_s` is the approximate total time of the repeats of one piece of work, beyond LEAST_REPEATS.
    """

    def __init__(self, mesh: Mesh, longest_s: float) -> None:
        self.mesh, self.longest_s = mesh, longest_s

    def __call__(self, *works: Callable[[], object]) -> list[Timing]:
        """Times several pieces of work; returns one timing for each.

        Runs each once to warm up, then all of them in turn 3 to 15 times, so that they see the same disturbances. Work that
        runs out of GPU memory gets an infinite time.
        """
        first = self._slowest([self._once(work) for work in works])
        fitting = [work for work, seconds in zip(works, first, strict=True) if math.isfinite(seconds)]
        # The slowest rank's time decides, so that all ranks repeat equally often.
        mean = math.fsum(filter(math.isfinite, first)) / max(1, len(fitting))
        repeats = min(MOST_REPEATS, max(LEAST_REPEATS, int(self.longest_s / max(mean, 1e-9))))
        rounds = [self._slowest([self._once(work) for work in fitting]) for _ in range(repeats)]
        timings = iter(map(_timing, zip(*rounds, strict=True)))
        return [next(timings) if math.isfinite(seconds) else Timing(math.inf, 0.0) for seconds in first]

    def _once(self, work: Callable[[], object]) -> float:
        self.mesh.gather([0.0])  # all ranks start together
        finish(self.mesh.device)
        began = time.perf_counter()
        try:
            work()
            finish(self.mesh.device)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return math.inf
        return time.perf_counter() - began

    def _slowest(self, times: list[float]) -> list[float]:
        slowest: list[float] = self.mesh.gather(times).max(dim=0).values.tolist()
        return slowest


def _timing(times: tuple[float, ...]) -> Timing:
    middle = statistics.median(times)
    return Timing(middle, statistics.median(abs(seconds - middle) for seconds in times) / middle)
