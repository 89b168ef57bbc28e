"""OnlineFit: refines the constants of the cost model from measured step times.

Pure, and bitwise identical on ranks with the same times, because the plans of later steps depend on it.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from longctx.planning.assignment import Assignment, spread, tokens_on_ranks
from longctx.planning.calibration.least_squares import nonnegative_least_squares
from longctx.planning.cost.hardware_profile import HardwareProfile
from longctx.planning.cost.model import NANOSECONDS, Floats, attention_ns
from longctx.planning.cost.pipeline import NO_PIPELINE, Pipeline
from longctx.planning.plan import Plan
from longctx.planning.stages import plan_score

STEPS = 32
"""Number of recent steps that the fit uses."""
LEAST_STEPS = 4
"""Minimum number of steps before the profile is refined: the first steps are slower and must not dominate."""
PRIOR_STEPS = 0.01
"""Weight of the given profile in steps: enough to decide what the steps cannot distinguish, such as linear and launch time if
every step has the same number of tokens."""
LEAST_FACTOR = 0.05
"""Lower bound of each constant as a share of the given one: linear and attention time must stay positive."""
ROUNDS = 10
HUBER, LEAST_ERROR = 1.345, 0.01
"""Steps with errors above HUBER typical errors count less; the typical error is at least LEAST_ERROR."""

Factors = tuple[float, float, float]
"""Factors of launch, linear and attention time."""


@dataclass(frozen=True)
class Observation:
    """The measured time of a step and the work of every rank in every micro-batch (arrays [micro-batches, ranks]).

    Attributes:
        seconds: measured time of the step.
        tokens: tokens per rank.
        attention: Σ length² / degree / efficiency per rank, in tokens².
        exposed_s: exchange that attention and queries do not hide, in seconds.
        step_s: fixed cost of a step, in seconds.
        pipeline: pipeline that ran the micro-batches.
    """

    seconds: float
    tokens: Floats
    attention: Floats
    exposed_s: Floats
    step_s: float
    pipeline: Pipeline = NO_PIPELINE

    @classmethod
    def of(cls, plan: Plan, seconds: float) -> "Observation":
        profile, lengths, a = plan.profile, np.array(plan.lengths, dtype=np.int64), Assignment.of(plan)
        shape = a.micro_batches, plan.ranks
        costs = attention_ns(profile, lengths, a.degree)
        attention = spread(costs, a.micro_batch, a.first_rank, a.first_rank + a.degree, shape)
        return cls(
            seconds,
            tokens=tokens_on_ranks(lengths, a, shape).astype(np.float64),
            attention=attention / (profile.attention_s_per_token2 * NANOSECONDS),
            exposed_s=plan_score(plan).exposed / NANOSECONDS,
            step_s=profile.step_s,
            pipeline=plan.pipeline,
        )

    def parts(self, profile: HardwareProfile, factors: Factors) -> tuple[list[float], float]:
        """Returns ([launch, linear, attention], rest) in seconds by `profile`, summed over each micro-batch's slowest rank.

        The slowest rank is determined by the profile scaled with `factors`. In a pipeline, the bubble adds further counts of
        the longest micro-batch.
        """
        _, by_linear, by_attention = factors
        linear, attention = profile.linear_s_per_token * self.tokens, profile.attention_s_per_token2 * self.attention
        modelled = by_linear * linear + by_attention * attention + self.exposed_s
        slowest, bubble = modelled.argmax(axis=1), float(self.pipeline.bubble)
        rows = np.arange(len(slowest))
        times = np.ones(len(rows))
        times[modelled.max(axis=1).argmax()] += bubble
        on_slowest = (math.fsum((part[rows, slowest] * times).tolist()) for part in (linear, attention, self.exposed_s))
        linear_s, attention_s, exposed_s = on_slowest
        launches = self.pipeline.runs(len(rows)) + bubble
        return [profile.launch_s * launches, linear_s, attention_s], exposed_s + self.step_s


def refine(profile: HardwareProfile, observations: Sequence[Observation]) -> HardwareProfile:
    """Scales launch, linear and attention time of the profile to fit modelled to measured step times.

    Least squares of relative errors with factors ≥ LEAST_FACTOR and a prior of weight PRIOR_STEPS at 1; outliers (a stalled
    disk, the first step) count less (Huber, 1964). A constant that is 0 stays 0.
    """
    factors: Factors = (1.0, 1.0, 1.0)
    weights = [1.0] * len(observations)
    prior = PRIOR_STEPS**0.5
    for _ in range(ROUNDS):
        rows, targets = [], []
        for observation in observations:
            parts, rest_s = observation.parts(profile, factors)
            modelled = math.fsum(factor * part for factor, part in zip(factors, parts, strict=True)) + rest_s
            # Relative to the geometric mean: measured or modelled time alone would weigh slow steps too little or too much.
            scale = math.sqrt(observation.seconds * modelled)
            rows.append([part / scale for part in parts])
            # Solve for factor - LEAST_FACTOR, which the solver keeps ≥ 0.
            targets.append((observation.seconds - rest_s) / scale - LEAST_FACTOR * math.fsum(rows[-1]))
        found = nonnegative_least_squares(
            [*rows, (prior, 0.0, 0.0), (0.0, prior, 0.0), (0.0, 0.0, prior)],
            [*targets, *[prior * (1 - LEAST_FACTOR)] * 3],
            [*weights, 1.0, 1.0, 1.0],
        )
        factors = found[0] + LEAST_FACTOR, found[1] + LEAST_FACTOR, found[2] + LEAST_FACTOR
        fitted = (math.fsum(a * x for a, x in zip(row, found, strict=True)) for row in rows)
        errors = [abs(a - b) for a, b in zip(fitted, targets, strict=True)]
        usual = HUBER * max(LEAST_ERROR, 1.4826 * median(errors))
        weights = [min(1.0, usual / max(error, usual)) for error in errors]
    launch, linear, attention = factors
    return replace(
        profile,
        launch_s=profile.launch_s * launch,
        linear_s_per_token=profile.linear_s_per_token * linear,
        attention_s_per_token2=profile.attention_s_per_token2 * attention,
    )


class OnlineFit:
    """A given profile, refined by the last `STEPS` steps."""

    def __init__(self, profile: HardwareProfile) -> None:
        self.given = profile
        self.observations: deque[Observation] = deque(maxlen=STEPS)

    def after(self, plan: Plan, seconds: float) -> HardwareProfile:
        """Records that the step of `plan` took `seconds` and returns the refined profile.

        All ranks get the same profile if they pass the same `seconds`.
        """
        self.observations.append(Observation.of(plan, seconds))
        return self.given if len(self.observations) < LEAST_STEPS else refine(self.given, list(self.observations))
