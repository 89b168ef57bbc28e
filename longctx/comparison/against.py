"""What longctx gains over the ways to train that people have today, on the same documents, by the
cost model.

Every way gets the documents of the same steps, and steps of as many tokens. Times are those of
every rank in every micro-batch; ways differ in who waits for whom: under FSDP2 all ranks for the
slowest in each micro-batch, as its gathers do, under DDP only at the end of a step. Packing and
padding draw their rows at random, so that their times are means over many steps.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from longctx.comparison.baselines import Place, best_single_degree, plan_fixed_static, plan_placed
from longctx.comparison.room import Room
from longctx.comparison.ways import Way
from longctx.comparison.whole import (
    StepShape,
    deal,
    epochs,
    pack_as_trl,
    padded_ns,
    place_balanced,
    row_ns,
)
from longctx.planning.assignment import Assignment, Integers, tokens_on_ranks
from longctx.planning.cost.model import NANOSECONDS, fixed_ns
from longctx.planning.cost.rounds import plan_score
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.plan import Plan, PlanError
from longctx.planning.planners.planner import make_plan

DEALT_STEPS = 1000
DEALT_ROWS = 1 << 20
"""Steps whose rows are drawn at random, and rows in all of them: at most so many."""
OURS = "longctx"


@dataclass(frozen=True)
class Job:
    """Steps of documents, and the ranks that train a model on them.

    Attributes:
        steps: lengths of the documents of every step, in the order in which they were drawn.
        longest: tokens of the longest document of the data set, which a run must hold.
        profile: that of ranks that share weights, as of ours.
        whole_profile: that of ranks that keep all weights, which they never gather.
        room: memory that the model needs; None: not known.
        single_degree: degree with which fixed static takes least time; None: not known.
    """

    steps: tuple[tuple[int, ...], ...]
    longest: int
    ranks: int
    tokens_per_rank: int
    profile: HardwareProfile
    whole_profile: HardwareProfile
    room: Room | None = None
    single_degree: int | None = None
    seed: int = 0

    @property
    def all(self) -> Integers:
        """Lengths of the documents of all steps."""
        return np.concatenate([np.array(step, dtype=np.int64) for step in self.steps])

    @property
    def step_tokens(self) -> int:
        """Tokens of a step, in the mean."""
        return round(int(self.all.sum()) / len(self.steps))

    @property
    def whole_tokens(self) -> int:
        """Tokens of a rank that holds every document whole."""
        return max(self.tokens_per_rank, self.longest)


@dataclass(frozen=True)
class RankTimes:
    """Times of ranks in the steps of a way.

    Attributes:
        steps: nanoseconds of every rank in every micro-batch, without launches; for each step
            [micro-batches, ranks].
        tokens: tokens that are trained in all steps.
        rows: rows that were dealt; 0 of plans.
        padding: tokens that are computed beside these.
        most_tokens: most tokens of a rank in a micro-batch.
    """

    steps: Sequence[Integers]
    tokens: int
    most_tokens: int
    padding: int = 0
    rows: int = 0


@dataclass(frozen=True)
class AgainstRow:
    """What a way takes for the same documents. Shares are fractions of 1.

    Attributes:
        way: as on the command line, with its number, given or chosen.
        sharing: `FSDP2` or `DDP`, if a way is compared under both.
        seconds_per_million: seconds per million tokens that are trained; None if it has no plan.
        speedup: that of this way relative to longctx: how many times as fast longctx is.
        waiting: share of the time of all ranks in which they wait for slower ones.
        padding: share of padding among the tokens that are computed.
        micro_batches, step_tokens: of a step, in the mean.
        most_tokens: most tokens of a rank in a micro-batch.
        least_bytes: least peak memory of the fullest rank; None if it is not known.
        available_bytes: memory of a rank by its data sheet; None if it is not known.
        remark: what a reader must know beside; the reason if there is no plan.
    """

    way: str
    title: str
    ranks: int
    sharing: str = ""
    seconds_per_million: float | None = None
    speedup: float | None = None
    waiting: float | None = None
    padding: float | None = None
    micro_batches: float | None = None
    step_tokens: float | None = None
    most_tokens: int | None = None
    least_bytes: int | None = None
    available_bytes: int | None = None
    remark: str = ""

    @property
    def fits(self) -> bool:
        """Whether the way has a plan, and as far as is known the memory that it needs."""
        if self.seconds_per_million is None:
            return False
        if self.least_bytes is None or self.available_bytes is None:
            return True
        return self.least_bytes <= self.available_bytes


def compare_with(ways: Sequence[Way], job: Job) -> list[AgainstRow]:
    """Returns the row of longctx, and those of the ways, each relative to it.

    Raises PlanError if no degree holds the documents.
    """
    ours = _ours(job)
    rows = [ours]
    for way in ways:
        try:
            rows += ROWS_OF[way.kind](way, job)
        except PlanError as error:
            name = _name(way)
            rows.append(AgainstRow(name, TITLES[way.kind], job.ranks, remark=str(error)))
    return [_relative(row, ours) for row in rows]


def _relative(row: AgainstRow, ours: AgainstRow) -> AgainstRow:
    if row.seconds_per_million is None or ours.seconds_per_million is None:
        return row
    return replace(row, speedup=row.seconds_per_million / ours.seconds_per_million)


def _name(way: Way) -> str:
    if way.size is None:
        return way.kind
    return f"{way.kind}:{way.size}"


TITLES = {
    "trl-packing": "TRL's packing",
    "batch-rebalance": "balanced whole documents",
    "padding": "padded batches",
    "megatron": "Megatron",
    "cp": "one degree for all",
}


def _ours(job: Job) -> AgainstRow:
    plans = [
        make_plan(
            lengths,
            ranks=job.ranks,
            tokens_per_rank=job.tokens_per_rank,
            profile=job.profile,
        )
        for lengths in job.steps
    ]
    return _row_of_plans(OURS, OURS, plans=plans, job=job)


def packed(job: Job, row_tokens: int) -> tuple[RankTimes, StepShape]:
    """Returns the times of TRL's packing into rows of `row_tokens` tokens, and the shape of its
    steps."""
    lengths = np.minimum(job.all, row_tokens)
    rows = pack_as_trl(lengths.tolist(), row_tokens)
    time = row_ns(job.profile, lengths, rows)
    tokens = np.array([lengths[row].sum() for row in rows])
    rows_per_rank = max(1, job.tokens_per_rank // row_tokens)
    shape = StepShape.nearest(
        job.step_tokens, float(tokens.mean()), ranks=job.ranks, rows_per_rank=rows_per_rank
    )
    dealt = _dealt(len(rows), shape, job.seed)
    of_ranks = tokens[dealt].sum(axis=-1)
    times = RankTimes(
        steps=list(time[dealt].sum(axis=-1)),
        tokens=int(of_ranks.sum()),
        most_tokens=int(of_ranks.max()),
        rows=dealt.size,
    )
    return times, shape


def _dealt(rows: int, shape: StepShape, seed: int) -> Integers:
    """Returns the rows of many steps, drawn in epochs."""
    steps = min(DEALT_STEPS, max(1, DEALT_ROWS // shape.rows))
    order = epochs(rows, steps * shape.rows, seed)
    return deal(order[: steps * shape.rows], shape)


def _trl_rows(way: Way, job: Job) -> Iterator[AgainstRow]:
    """Yields the rows of TRL's packing under FSDP2 and under DDP."""
    row_tokens = job.longest
    title = TITLES[way.kind]
    if way.size is not None:
        row_tokens = way.size
        title += f" to {row_tokens:,}"
    times, shape = packed(job, row_tokens)
    remark = "; ".join(_said_of_rows(job, row_tokens, times, shape))
    for shards, words in ((True, "FSDP2"), (False, "DDP")):
        row = row_of_times(
            f"trl-packing:{row_tokens}",
            f"{title} ({words})",
            times=times,
            job=job,
            meets=shards,
        )
        least = None
        if job.room is not None:
            least = job.room.of_whole(times.most_tokens, shape.micro_batches, shards=shards)
        yield replace(row, sharing=words, least_bytes=least, remark=remark)


def _said_of_rows(job: Job, row_tokens: int, times: RankTimes, shape: StepShape) -> Iterator[str]:
    """Yields what a reader must know about packed rows."""
    yield (
        f"rows of {row_tokens:,} tokens, {shape.rows_per_rank} a rank and micro-batch, "
        f"{_micro_batches(shape.micro_batches)}"
    )
    lengths = job.all
    beyond = lengths - row_tokens
    cut = int((beyond > 0).sum())
    if cut:
        plural = "s" if cut > 1 else ""
        lost = int(beyond[beyond > 0].sum()) / int(lengths.sum())
        yield (
            f"TRL cuts {cut:,} document{plural} of more, {lost:.1%} of all tokens are not trained: "
            "times are for the others"
        )
    step = times.tokens / len(times.steps)
    if step > 1.25 * job.step_tokens:
        yield (
            f"a row for each rank is {step / 1e6:.2f}M tokens a step, not "
            f"{job.step_tokens / 1e6:.2f}M as yours"
        )


def _micro_batches(count: int) -> str:
    plural = "es" if count > 1 else ""
    return f"{count} micro-batch{plural} a step"


def padded(job: Job, per_rank: int) -> tuple[RankTimes, StepShape]:
    """Returns the times of batches of `per_rank` documents of each rank, padded to their longest
    one, and the shape of their steps."""
    lengths = job.all
    shape = StepShape.nearest(
        job.step_tokens, float(lengths.mean()), ranks=job.ranks, rows_per_rank=per_rank
    )
    of_documents = lengths[_dealt(len(lengths), shape, job.seed)]
    longest = of_documents.max(axis=-1)
    tokens = int(of_documents.sum())
    times = RankTimes(
        steps=list(padded_ns(job.profile, longest, per_rank)),
        tokens=tokens,
        most_tokens=per_rank * int(longest.max()),
        padding=per_rank * int(longest.sum()) - tokens,
    )
    return times, shape


def _padding_rows(way: Way, job: Job) -> Iterator[AgainstRow]:
    per_rank = way.size
    if per_rank is None:
        per_rank = max(1, job.tokens_per_rank // job.longest)
    times, shape = padded(job, per_rank)
    row = row_of_times(
        f"padding:{per_rank}", f"padded batches of {per_rank}", times=times, job=job, meets=True
    )
    least = None
    if job.room is not None:
        longest = per_rank * job.longest
        least = job.room.of_whole(longest, shape.micro_batches, shards=True)
    plural = "s" if per_rank > 1 else ""
    remark = (
        f"{per_rank} document{plural} a rank and micro-batch, {_micro_batches(shape.micro_batches)}"
    )
    if per_rank == 1:
        remark += ": one document is not padded (padding:4: with four)"
    yield replace(row, least_bytes=least, remark=remark)


def _balanced_rows(way: Way, job: Job) -> Iterator[AgainstRow]:
    place: Place = place_balanced
    plans = [
        plan_placed(
            way.kind,
            place,
            lengths,
            ranks=job.ranks,
            tokens_per_rank=job.whole_tokens,
            profile=job.profile,
        )
        for lengths in job.steps
    ]
    row = _row_of_plans(way.kind, TITLES[way.kind], plans=plans, job=job)
    remark = "the documents of a step over ranks by predicted time, none split"
    if job.longest > job.tokens_per_rank:
        remark += (
            f"; the longest fits on no rank of {job.tokens_per_rank:,} tokens: ranks have "
            f"{job.longest:,} here"
        )
    yield replace(row, remark=remark)


def _static_plans(job: Job, degree: int) -> list[Plan]:
    return [
        plan_fixed_static(
            lengths,
            ranks=job.ranks,
            tokens_per_rank=job.tokens_per_rank,
            profile=job.profile,
            degree=degree,
        )
        for lengths in job.steps
    ]


def _degree_rows(way: Way, job: Job) -> Iterator[AgainstRow]:
    degree = way.size or job.ranks
    plans = _static_plans(job, degree)
    row = _row_of_plans(_name(way), f"degree {degree} for all", plans=plans, job=job)
    yield replace(row, remark="packed as they come, under FSDP2")


def _megatron_rows(way: Way, job: Job) -> Iterator[AgainstRow]:
    """Yields the row of the best single degree, whose groups of ranks keep all weights and meet
    only at the end of a step."""
    degree = job.single_degree
    if degree is None:
        degree = best_single_degree(
            job.steps,
            job.longest,
            ranks=job.ranks,
            tokens_per_rank=job.tokens_per_rank,
            profile=job.profile,
        )
    plans = _static_plans(job, degree)
    title = f"Megatron at degree {degree}"
    row = _row_of_plans(way.kind, title, plans=plans, job=job, keeps_weights=True)
    yield replace(
        row,
        remark="context parallelism alone, at its best single degree; with tensor and pipeline "
        f"splits: bench/split.py --gpus {job.ranks}",
    )


def _row_of_plans(
    way: str,
    title: str,
    plans: Sequence[Plan],
    job: Job,
    *,
    keeps_weights: bool = False,
) -> AgainstRow:
    """Returns the row of plans; with `keeps_weights` ranks have no gathers that make them wait for
    each other."""
    times = times_of_plans(plans)
    row = row_of_times(way, title, times=times, job=job, meets=not keeps_weights)
    least = None
    if job.room is not None:
        least = job.room.of_plans(plans, keeps_weights=keeps_weights)
    return replace(row, least_bytes=least)


def times_of_plans(plans: Sequence[Plan]) -> RankTimes:
    """Returns the times of ranks in the steps of plans."""
    return RankTimes(
        steps=[plan_score(plan).time for plan in plans],
        tokens=sum(sum(plan.lengths) for plan in plans),
        most_tokens=max(_most_tokens(plan) for plan in plans),
    )


def _most_tokens(plan: Plan) -> int:
    lengths = np.array(plan.lengths, dtype=np.int64)
    shape = (len(plan.micro_batches), plan.ranks)
    return int(tokens_on_ranks(lengths, Assignment.of(plan), shape).max())


def row_of_times(way: str, title: str, times: RankTimes, job: Job, *, meets: bool) -> AgainstRow:
    """Returns the row of a way without the memory that it needs; with `meets` ranks wait for the
    slowest in every micro-batch, else at the end of the step, and keep all weights."""
    if meets:
        profile = job.profile
        slowest = sum(int(step.max(axis=1).sum()) for step in times.steps)
    else:
        profile = job.whole_profile
        slowest = sum(int(step.sum(axis=0).max()) for step in times.steps)
    launches = sum(fixed_ns(profile, len(step)) for step in times.steps)
    worked = sum(int(step.sum()) for step in times.steps) / job.ranks
    makespan = launches + slowest
    steps = len(times.steps)
    available = None
    if job.room is not None:
        available = job.room.available
    return AgainstRow(
        way=way,
        title=title,
        ranks=job.ranks,
        seconds_per_million=makespan / NANOSECONDS / times.tokens * 1e6,
        waiting=(slowest - worked) / makespan,
        padding=times.padding / (times.tokens + times.padding),
        micro_batches=sum(len(step) for step in times.steps) / steps,
        step_tokens=times.tokens / steps,
        most_tokens=times.most_tokens,
        available_bytes=available,
    )


ROWS_OF: dict[str, Callable[[Way, Job], Iterator[AgainstRow]]] = {
    "trl-packing": _trl_rows,
    "batch-rebalance": _balanced_rows,
    "padding": _padding_rows,
    "megatron": _megatron_rows,
    "cp": _degree_rows,
}
