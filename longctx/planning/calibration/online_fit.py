"""OnlineFit: constants of the cost model from the measured times of training steps. Pure, and bit for bit the same on ranks
that are given the same times, because the plans of later steps follow from it.
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
from longctx.planning.cost.model import NANOSECONDS, Floats, attention_ns, score
from longctx.planning.cost.pipeline import NO_PIPELINE, Pipeline
from longctx.planning.plan import Plan

STEPS = 32
"""Steps that are looked back on."""
LEAST_STEPS = 4
"""Before so many steps nothing is refined: the first ones are slower than the rest, and must be few."""
PRIOR_STEPS = 0.01
"""How many steps the given profile counts for: enough to settle what the steps do not tell apart, such as linear and launch
time where every step has as many tokens."""
LEAST_FACTOR = 0.05
"""No constant shrinks below this part of the given one: linear and attention time must stay positive."""
ROUNDS = 10
HUBER, LEAST_ERROR = 1.345, 0.01
"""Steps count less from so many usual errors on, and no smaller error is usual."""

Factors = tuple[float, float, float]
"""Of launch, linear and attention time."""


@dataclass(frozen=True)
class Observation:
    """What a step took, and the work of every rank in every micro-batch, as arrays [micro-batches, ranks].

    Attributes:
        seconds: measured time of the step.
        tokens: tokens that a rank holds.
        attention: Σ length² / degree / efficiency, in tokens².
        exposed_s: exchange that attention does not hide, in seconds.
        step_s: the fixed cost of a step.
        pipeline: what the micro-batches went through.
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
            exposed_s=score(profile, lengths, a, plan.ranks).exposed / NANOSECONDS,
            step_s=profile.step_s,
            pipeline=plan.pipeline,
        )

    def parts(self, profile: HardwareProfile, factors: Factors) -> tuple[list[float], float]:
        """([launch, linear, attention] of the given profile, the rest) in seconds, on the slowest rank of every micro-batch.

        Which rank is the slowest follows from the profile scaled by `factors`. The longest micro-batch counts as often as the
        bubble of a pipeline makes others wait for it.
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
    """The profile with launch, linear and attention time scaled so that the modelled times of the steps meet the measured ones.

    Least squares of relative errors, factors ≥ LEAST_FACTOR, drawn to 1 by PRIOR_STEPS; single steps that are far off (a
    stalled disk, the first step) count less (Huber, 1964). A constant that is 0 stays 0.
    """
    factors: Factors = (1.0, 1.0, 1.0)
    weights = [1.0] * len(observations)
    prior = PRIOR_STEPS**0.5
    for _ in range(ROUNDS):
        rows, targets = [], []
        for observation in observations:
            parts, rest_s = observation.parts(profile, factors)
            modelled = math.fsum(factor * part for factor, part in zip(factors, parts, strict=True)) + rest_s
            # Relative to the mean of measured and modelled time: to either alone, slow steps count too little or too much.
            scale = math.sqrt(observation.seconds * modelled)
            rows.append([part / scale for part in parts])
            # The unknowns are factors - LEAST_FACTOR, so that they are not negative.
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
    """The given profile, refined by the last `STEPS` steps."""

    def __init__(self, profile: HardwareProfile) -> None:
        self.given = profile
        self.observations: deque[Observation] = deque(maxlen=STEPS)

    def after(self, plan: Plan, seconds: float) -> HardwareProfile:
        """The profile after one more step, whose plan took `seconds`: the same on all ranks if `seconds` is."""
        self.observations.append(Observation.of(plan, seconds))
        return self.given if len(self.observations) < LEAST_STEPS else refine(self.given, list(self.observations))
