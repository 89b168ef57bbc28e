"""Measured comparison: trains steps on the same documents under several modes of planning, and
times them.

Every mode has its own trainer, from the same seed, on one mesh. The trainers take turns, a step
each on the same documents, so that disturbances of the machine affect all modes alike. Losses must
stay equal, which is checked. Each mode holds weights, gradients and optimizer state, so a model
that fills a GPU needs more ranks than in training.
"""

import math
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from longctx.config import Config, ConfigError, check
from longctx.data.store.store import Store
from longctx.errors import UserError
from longctx.parallel.mesh import Mesh
from longctx.parallel.timing import finish
from longctx.training.data import build_loader
from longctx.training.stop_signal import StopSignal
from longctx.training.trainer import Trainer
from longctx.units import largest

LOSS_TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
"""Maximum relative difference of losses due to rounding, by train.dtype."""

_MODE = re.compile(r"auto|bins|static(:[1-9][0-9]*)?")


MeasuredStep = Mapping[str, Any]
"""Metrics of a step (`StepMetrics`), and `seconds`: from the common start of all ranks to the end
of the slowest one, including its wait for data."""


@dataclass(frozen=True)
class MeasuredMode:
    """The measured steps of one mode, without warm-up."""

    mode: str
    steps: tuple[MeasuredStep, ...]

    def column(self, name: str) -> list[float]:
        """Returns a value of every step, by its name."""
        return [float(step[name]) for step in self.steps]

    @property
    def median_s(self) -> float:
        return statistics.median(self.column("seconds"))

    @property
    def total_s(self) -> float:
        return math.fsum(self.column("seconds"))

    @property
    def predicted_s(self) -> float:
        return math.fsum(self.column("predicted_s"))

    @property
    def prediction_error(self) -> float:
        """Total predicted time / total measured time - 1; below 0 if the steps took longer than
        predicted."""
        return self.predicted_s / self.total_s - 1

    def times_as_fast_as(self, other: "MeasuredMode", by: str = "seconds") -> float:
        """Returns the speedup over another mode: its time / this mode's time on the same documents,
        median over steps.

        `by`: seconds, or predicted_s for the speedup that the plans predict.
        """
        return statistics.median(
            a / b for a, b in zip(other.column(by), self.column(by), strict=True)
        )


@dataclass(frozen=True)
class MeasuredComparison:
    """Result of `train_in_turn`.

    Attributes:
        warmup: number of warm-up steps, which count only for the comparison of losses.
        loss_difference: maximum relative difference of a mode's loss from the first mode's, over
            all steps.
        loss_tolerance: maximum `loss_difference` due to rounding.
    """

    modes: tuple[MeasuredMode, ...]
    ranks: int
    tokens_per_rank: int
    warmup: int
    loss_difference: float
    loss_tolerance: float
    ended_early: bool

    @property
    def losses_equal(self) -> bool:
        """Whether all modes had the same losses, to the tolerance of the dtype."""
        return self.loss_difference <= self.loss_tolerance

    @property
    def baseline(self) -> MeasuredMode:
        """Baseline of speedups: the fastest static:DEGREE by total measured time, otherwise
        `static`, otherwise the first mode.

        `static` is only the second choice because it changes its degree every step, which a static
        run cannot.
        """
        single = [mode for mode in self.modes if mode.mode.startswith("static:")]
        oracle = [mode for mode in self.modes if mode.mode == "static"]
        return min(single or oracle or self.modes[:1], key=lambda mode: mode.total_s)

    def to_json(self) -> dict[str, Any]:
        """Returns plain data: summary and steps of every mode."""
        baseline = self.baseline
        known = {name: value for name, value in vars(self).items() if name != "modes"}
        names = ("mode", "median_s", "total_s", "predicted_s", "prediction_error")
        modes = [
            {
                **{name: getattr(mode, name) for name in names},
                "speedup": mode.times_as_fast_as(baseline),
                "predicted_speedup": mode.times_as_fast_as(baseline, "predicted_s"),
                "steps": list(mode.steps),
            }
            for mode in self.modes
        ]
        return {
            "version": 1,
            **known,
            "losses_equal": self.losses_equal,
            "baseline": baseline.mode,
            "modes": modes,
        }


def train_in_turn(
    config: Config,
    mesh: Mesh,
    store: Store,
    *,
    modes: Sequence[str],
    steps: int,
    warmup: int,
    tell: Callable[[str], None] = lambda line: None,
) -> MeasuredComparison:
    """Trains `warmup` + `steps` steps under every mode in turn. Collective over the mesh; writes
    nothing.

    Args:
        config: settings of the run; `context.mode` and `context.degree` are replaced,
            `context.bins` applies to mode bins only.
        modes: two or more of auto, bins, static (the best degree of every step by the cost model)
            and static:DEGREE.
        steps, warmup: number of measured steps, and of steps before them.

    Raises UserError for unknown or repeated modes, ConfigError for modes that the settings do not
    allow.
    """
    _refuse(modes, steps, warmup)
    configs = mode_configs(config, modes, mesh.world_size, warmup + steps)
    with ExitStack() as loaders:
        stop = loaders.enter_context(StopSignal.installed())
        trainers = []
        for each in configs:
            loader = loaders.enter_context(
                build_loader(store, each, mesh, each.max_length(mesh.world_size))
            )
            source = each.model_source(store.tokenizer.vocab_size)
            trainers.append(Trainer.of(each, mesh, source, loader, stop=stop))
        rounds: list[list[MeasuredStep]] = []
        while len(rounds) < warmup + steps and not any(trainer.stopping for trainer in trainers):
            rounds.append([_step(trainer) for trainer in trainers])
            tell(_line(modes, rounds[-1], of=warmup + steps))
    difference = largest(
        (abs(step["loss"] / row[0]["loss"] - 1) for row in rounds for step in row), default=math.inf
    )
    measured = rounds[warmup:]
    if not measured:
        raise UserError(
            f"stopped after {len(rounds)} steps, {warmup} of them warm-up: nothing was measured"
        )
    return MeasuredComparison(
        modes=tuple(
            MeasuredMode(mode, column)
            for mode, column in zip(modes, zip(*measured, strict=True), strict=True)
        ),
        ranks=mesh.ranks,
        tokens_per_rank=config.batch.tokens_per_rank,
        warmup=warmup,
        loss_difference=difference,
        loss_tolerance=LOSS_TOLERANCE[config.dtype],
        ended_early=len(rounds) < warmup + steps,
    )


def mode_configs(config: Config, modes: Sequence[str], world_size: int, steps: int) -> list[Config]:
    """Returns the settings of every mode, with the same maximum document length, the largest that
    all modes can hold.

    Raises ConfigError if a mode cannot hold `data.max_length`, or breaks another rule.
    """
    configs = []
    for mode in modes:
        name, _, degree = mode.partition(":")
        bins = config.context.bins if name == "bins" else None
        changes = {
            "context.mode": name,
            "context.degree": int(degree) if degree else None,
            "context.bins": bins,
        }
        configs.append(config.changed({**changes, "train.steps": max(config.train.steps, steps)}))
    longest = min(each.max_length(world_size) for each in configs)
    configs = [each.changed({"data.max_length": longest}) for each in configs]
    for mode, each in zip(modes, configs, strict=True):
        try:
            check(each, world_size=world_size)
        except ConfigError as error:
            raise ConfigError(f"mode {mode} is not possible: {error}") from error
    return configs


def _refuse(modes: Sequence[str], steps: int, warmup: int) -> None:
    unknown = [mode for mode in modes if not _MODE.fullmatch(mode)]
    if unknown:
        raise UserError(
            f"unknown mode {', '.join(map(repr, unknown))}: choose from auto, bins, static and "
            "static:DEGREE"
        )
    if len(set(modes)) < len(modes) or len(modes) < 2:
        raise UserError(
            f"modes are {', '.join(modes)}: give at least two different modes, such as auto,static"
        )
    if steps < 1 or warmup < 0:
        raise UserError(
            f"steps is {steps} and warmup is {warmup}: steps must be at least 1, warmup at least 0"
        )


def _step(trainer: Trainer) -> MeasuredStep:
    mesh = trainer.mesh
    finish(mesh.device)
    mesh.gather([0.0])  # all ranks start together
    began = time.perf_counter()
    metrics = trainer.step()
    finish(mesh.device)
    seconds = float(mesh.gather([time.perf_counter() - began]).max())
    return {**asdict(metrics), "seconds": seconds}


def _line(modes: Sequence[str], row: Sequence[MeasuredStep], of: int) -> str:
    times = ", ".join(
        f"{mode} {step['seconds']:.3f} s (predicted {step['predicted_s']:.3f})"
        for mode, step in zip(modes, row, strict=True)
    )
    step = row[0]
    return (
        f"step {step['step']}/{of}, {step['documents']} documents, {step['tokens']:,} tokens, "
        f"loss {step['loss']:.5f}: {times}"
    )
