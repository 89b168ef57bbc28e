"""Verdict: what is predicted of a run that would start, and the line that says it.

`longctx estimate` and dry runs, also of other trainers, begin with this line.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from longctx.config import Config
from longctx.data.store.store import Lengths, Store
from longctx.memory.changes import changes_between
from longctx.memory.fitting import RunMemory
from longctx.memory.loads import loads
from longctx.memory.model import Memory, estimate
from longctx.planning.plan import Plan
from longctx.training.data import first_plans
from longctx.training.metrics import peak_flops, step_flops
from longctx.units import format_bytes, format_duration, three_digits

STEPS = 5
"""Steps that are planned, at most."""


@dataclass(frozen=True)
class Verdict:
    """What is predicted of a run.

    Attributes:
        needed: bytes of the fullest rank.
        available: bytes that each rank has; None if they are not known.
        of: what has them, such as `H100`.
        chosen: what saves memory, and the degrees of documents, in words.
        step_s: seconds of a step.
        step_tokens: tokens of a step.
        steps: steps of the run; None if they are not known.
        ranks: number of ranks.
        rank: what a rank is: `GPU` or `process`.
        mfu: model FLOP utilisation; None if the peak of a rank is not known.
    """

    needed: int
    available: int | None
    of: str
    chosen: str
    step_s: float
    step_tokens: float
    steps: int | None
    ranks: int
    rank: str
    mfu: float | None

    @property
    def fits(self) -> bool:
        """Whether a rank has the bytes; so it is said where they are not known."""
        return self.available is None or self.needed <= self.available

    @property
    def hours_per_billion_tokens(self) -> float:
        """Hours of all ranks together."""
        return self.step_s * self.ranks / 3600 * 1e9 / self.step_tokens

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second and rank."""
        return self.step_tokens / (self.step_s * self.ranks)

    def line(self) -> str:
        """Returns the verdict, such as `fits: 50.35 GiB of 74.51 GiB per H100 (recompute none,
        degrees 1 to 16); 8.97 s a step, 7,350 tokens/s per GPU, MFU 42%, 24.9 hours for 10,000
        steps, 37.8 GPU hours per billion tokens`."""
        speed = three_digits(self.tokens_per_s)
        times = [f"{three_digits(self.step_s)} s a step", f"{speed} tokens/s per {self.rank}"]
        if self.mfu is not None:
            times.append(f"MFU {self.mfu:.0%}")
        if self.steps is not None:
            duration = format_duration(self.steps * self.step_s)
            times.append(f"{duration} for {self.steps:,} steps")
        hours = three_digits(self.hours_per_billion_tokens)
        times.append(f"{hours} {self.rank} hours per billion tokens")
        return f"{self._memory()} ({self.chosen}); {', '.join(times)}"

    def _memory(self) -> str:
        needed = format_bytes(self.needed)
        if self.available is None:
            return f"needs {needed} per {self.of}, whose memory is not known"
        word = "fits" if self.fits else "does not fit"
        return f"{word}: {needed} of {format_bytes(self.available)} per {self.of}"


@dataclass(frozen=True)
class PredictedRun:
    """A run of `longctx train` as it would start.

    Attributes:
        config: its settings, with those that `train.fit_memory` changes.
        plans: plans of its first steps.
        memory: peak memory of the fullest rank.
        verdict: the sum of it.
        remark: what `train.fit_memory` changes, or what would make the run fit; empty if neither.
    """

    config: Config
    plans: Sequence[Plan]
    memory: Memory
    verdict: Verdict
    remark: str

    def lines(self) -> list[str]:
        """Returns the verdict and the remark, which every command says first."""
        return [self.verdict.line(), *filter(None, [self.remark])]


def predict(given: Config, of_run: RunMemory, documents: Store) -> PredictedRun:
    """Predicts a run with the settings `given`, on `documents`, which stand in for the store where
    `of_run` has none: its memory is then that of full ranks."""
    config = of_run.as_fitted(given)
    if of_run.store is None:
        steps = min(STEPS, config.train.steps)
        plans = list(first_plans(config, documents, of_run.ranks, steps))
        memory = of_run.peak(config)
    else:
        plans = of_run.plans(config, STEPS)
        found = list(loads(plans, config))
        memory = estimate(of_run.spec, config, of_run.ranks, found, fused=of_run.fused)
    words = chosen(config, plans)
    verdict = verdict_of(config, of_run, plans=plans, needed=memory.total, chosen=words)
    available = verdict.available
    remark = changes_between(given, config)
    if remark:
        remark += ", by itself"
    elif available is not None and not verdict.fits:
        remark = of_run.way_out(config, available)
    return PredictedRun(config, plans, memory=memory, verdict=verdict, remark=remark)


def verdict_of(
    config: Config, of_run: RunMemory, plans: Sequence[Plan], needed: int, chosen: str
) -> Verdict:
    """Returns the verdict on a run whose fullest rank needs so many bytes, by its first plans."""
    available, of = of_run.available(config)
    step_s = sum(plan.makespan_s for plan in plans) / len(plans)
    peak = peak_flops(of, config.dtype)
    mfu = None
    if peak is not None:
        flops = [step_flops(of_run.spec, plan) for plan in plans]
        mfu = sum(flops) / len(plans) / (step_s * peak * of_run.ranks)
    return Verdict(
        needed=needed,
        available=available,
        of=of,
        chosen=chosen,
        step_s=step_s,
        step_tokens=sum(sum(plan.lengths) for plan in plans) / len(plans),
        steps=None if config.train.epochs else config.train.steps,
        ranks=of_run.ranks,
        rank="GPU" if of_run.fused else "process",
        mfu=mfu,
    )


def chosen(config: Config, plans: Sequence[Plan]) -> str:
    """Returns what saves memory in a run, and the degrees of the documents of its steps, in
    words."""
    words = [f"recompute {config.train.recompute}"]
    if config.train.offload_activations:
        words.append("activations offloaded")
    if config.train.offload_optimizer:
        words.append("optimizer offloaded")
    return ", ".join([*words, degrees_of(plans)])


def degrees_of(plans: Sequence[Plan]) -> str:
    """Returns the degrees of the documents of plans, in words."""
    degrees = {degree for plan in plans for degree in plan.degrees}
    if len(degrees) == 1:
        return f"degree {min(degrees)}"
    return f"degrees {min(degrees)} to {max(degrees)}"


def longest_documents(config: Config, ranks: int, vocab_size: int) -> Lengths:
    """Returns documents of the maximum length that make STEPS steps, for runs whose documents are
    not known."""
    longest = config.max_length(ranks)
    count = STEPS * -(-config.batch.global_tokens // longest)
    return Lengths([longest] * count, f"documents of {longest:,} tokens", vocab_size)
