"""Measures a hardware profile: the constants of the cost model on this machine, with the trainer's
own step.

Measured are matrices, memory, launch and optimizer, attention on whole documents of three lengths,
and with several ranks the links and which ranks are slow. Overlap, the penalty of splitting and
links that these ranks do not have are those of another profile, scaled to the model. Work is timed
on all ranks at once; as in a training step, the slowest rank counts.
"""

import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import yaml

import longctx
from longctx.attention.exchange import Exchange
from longctx.attention.inputs import Queries
from longctx.config import Config
from longctx.data.packing import MicroBatch, StepBatch
from longctx.errors import UserError
from longctx.hf.source import NewDecoder
from longctx.model.presets import ModelShape
from longctx.model.protocol import Attention
from longctx.parallel.mesh import Mesh
from longctx.parallel.timing import finish
from longctx.planning.cost.scaling import query_share
from longctx.planning.hardware_profile import NO_LIMIT, EfficiencyTable, HardwareProfile, SlowRanks
from longctx.planning.layout import Layout, Placement
from longctx.planning.plan import Plan, PlanCost
from longctx.planning.planners.planner import make_plan
from longctx.training.build import make_attention
from longctx.training.described import Described
from longctx.training.objectives.objective import StepWeights
from longctx.training.run_profile import run_profile
from longctx.training.trainer import Trainer

LENGTHS = (128, 1024, 8192)
"""Tokens of the documents that attention is measured on; batch.tokens_per_rank where that is
less."""
DOCUMENTS = 64
"""Maximum number of documents that share a call of attention, and so its fixed cost."""
REPEATS = 5
SLOW = 1.05
"""Time relative to a usual rank's from which a rank is slow, if it took longer in every repeat."""
LEAST_TOKENS = 64
SHORTEST_DOCUMENT = 16
SPLIT_TOKENS = 16
"""Tokens of a split document on each rank, so few that they take hardly any time."""
FEW_SPLIT = 2
MANY_SPLIT = 34
"""Numbers of split documents that are compared."""
LEAST_BYTES = 1 << 20
"""Minimum size of the largest message; times of smaller messages say little about bandwidth."""
COPIED_BYTES = 1 << 28
"""Size of a copy, several times that of a GPU's caches."""
MESSAGES, PEERS = 5, 7
"""Number of consecutive messages timed together, and maximum number of peers that a rank exchanges
with at once."""
BY_MODEL = (
    "kv_bytes_per_token",
    "query_share",
    "state_bytes",
    "split_s_per_token",
    "received_s_per_token",
    "exchange_levels",
)
"""Constants that follow from model and settings by arithmetic."""


@dataclass(frozen=True)
class Measured:
    """A measured profile: `how` tells what was timed for a constant; the others are `BY_MODEL`, or
    those of the profile `base`.

    `run` has machine and settings of the measurement, `check` a step as predicted by the profile
    and as measured.
    """

    profile: HardwareProfile
    about: str
    how: dict[str, str]
    base: str
    run: dict[str, Any]
    check: dict[str, Any]

    @property
    def sources(self) -> dict[str, str]:
        others = dict.fromkeys(self.profile.to_dict(), f"taken from {self.base}")
        return others | dict.fromkeys(BY_MODEL, "model and settings") | self.how

    def to_yaml(self) -> str:
        taken = {
            name: source
            for name, source in self.sources.items()
            if name not in (*self.how, *BY_MODEL)
        }
        measured = {**self.run, "not_measured": taken, "check": self.check}
        content = {"about": self.about, **self.profile.to_dict(), "measured": measured}
        return yaml.safe_dump(
            content, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True
        )


def measure_profile(
    config: Config,
    mesh: Mesh,
    shape: ModelShape,
    *,
    base: str,
    local_rank: int,
    tell: Callable[[str], None] = lambda part: None,
) -> Measured:
    """Measures the constants that this machine and number of ranks allow; the others are those of
    the profile named `base`.

    Collective. `shape` has the size of the vocabulary, `local_rank` is that on the node, `tell` is
    called before each part. No data is read. Plain rings are measured, without windows. Raises
    UserError for a token budget that is too small, nodes with different numbers of ranks, or too
    little memory.
    """
    tokens = config.batch.tokens_per_rank
    _require_tokens(tokens)
    config = config.changed({"context.ulysses_degree": 1, "context.profile": base})
    per_node = ranks_per_node(mesh, local_rank)
    described = _describe(config, mesh, shape)
    how = dict[str, str]()
    profile = run_profile(config, mesh.world_size, shape.vocab_size).profile
    profile = replace(profile, kv_bytes_per_token=described.work.kv_bytes)

    def add(description: str, **constants: Any) -> None:
        nonlocal profile
        profile = replace(profile, **{name: _short(value) for name, value in constants.items()})
        how.update(dict.fromkeys(constants, description))

    if per_node < mesh.ranks:
        add("launcher", ranks_per_node=per_node)
    else:  # the other profile says how large nodes are
        profile = replace(profile, ranks_per_node=max(per_node, profile.ranks_per_node))
    tell("building the model")
    run = TimedRun(config, mesh, shape, profile)
    tell("everything except attention")
    launch_s, linear_s_per_token, step_s = _matrices(run)
    add("model without attention", linear_s_per_token=linear_s_per_token, launch_s=launch_s)
    add("a step of an empty micro-batch", step_s=step_s)
    rate, memory = _memory(run)
    add(memory, memory_bytes_per_s=rate)
    profile = replace(profile, query_share=_short(query_share(profile, described.work)))
    tell("attention")
    lengths = sorted({min(length, tokens) for length in LENGTHS})
    said_lengths = ", ".join(map(str, lengths))
    add(f"documents of {said_lengths} tokens", **_attention_constants(run, lengths))
    add("rates that are measured", rate_error=0.0)
    if mesh.ranks > 1:
        tell("exchange")
        measured = _exchange_constants(run, per_node, described.work.kv_bytes)
        for description, constants in measured:
            add(description, **constants)
    tell("every rank alone")
    profile = _of_usual_ranks(profile, _slow_ranks(run, max(lengths)))
    how["slow_ranks"] = "attention of every rank alone"
    tell("a step, to compare with its prediction")
    about = f"{described}, {mesh.ranks} rank{'s' * (mesh.ranks > 1)}, by `longctx calibrate`."
    conditions = _conditions(config, mesh, per_node) | described.model_dump()
    return Measured(profile, about, how=how, base=base, run=conditions, check=_check(run, profile))


def _require_tokens(tokens: int) -> None:
    """Raises UserError for a token budget that is too small to measure anything."""
    if tokens < LEAST_TOKENS:
        raise UserError(
            f"batch.tokens_per_rank is {tokens}: measuring needs at least {LEAST_TOKENS} tokens "
            "per rank"
        )


def _conditions(config: Config, mesh: Mesh, per_node: int) -> dict[str, Any]:
    """Returns what the constants were measured with, besides model and machine."""
    return {
        "versions": {
            "longctx": longctx.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        "date": datetime.now(UTC).date().isoformat(),
        "threads_per_rank": torch.get_num_threads(),
        "ranks": mesh.ranks,
        "nodes": mesh.ranks // per_node,
        "kernel": config.context.kernel,
        "tokens_per_rank": config.batch.tokens_per_rank,
    }


def _describe(config: Config, mesh: Mesh, shape: ModelShape) -> Described:
    """Returns the model, settings and machine that the constants are for."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return Described.model_validate(
        {
            "model": shape,
            "dtype": config.dtype,
            "device": mesh.device.type,
            "gpu": torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else None,
            "cpu": names[0] if names else platform.processor() or platform.machine(),
            "recompute": config.train.recompute,
            "keep_kv": bool(config.context.keep_kv),
            "tensor_parallel_size": config.parallel.tensor_parallel_size,
            "expert_parallel_size": config.parallel.expert_parallel_size,
            "optimizer": config.optimizer.name,
            "compiled": config.compiles(mesh.device.type, shape.spec),
        }
    )


def ranks_per_node(mesh: Mesh, local_rank: int) -> int:
    """Returns the domain's ranks per node, from every rank's `local_rank`. Raises UserError if
    nodes have different numbers."""
    starts = (mesh.gather([float(local_rank)])[:, 0] == 0).cumsum(0).tolist()
    node = [starts[dist.get_global_rank(mesh.exchange, rank)] for rank in range(mesh.ranks)]
    held = sorted({node.count(number) for number in node})
    if len(held) > 1:
        raise UserError(
            f"nodes have {', '.join(map(str, held))} ranks, but the cost model supports only one "
            "number: start the same number of processes on every node"
        )
    return held[0]


def peers(rank: int, among: Sequence[int]) -> list[tuple[int, int]]:
    """Returns up to PEERS pairs of other ranks `among` these (to send to, to receive from); all of
    them exchange at once."""
    place = among.index(rank)
    count = len(among)
    return [
        (among[(place + i) % count], among[(place - i) % count])
        for i in range(1, min(PEERS, count - 1) + 1)
    ]


class TimedRun:
    """A trainer with the run's model and optimizer, whose work on random tokens is timed."""

    def __init__(
        self, config: Config, mesh: Mesh, shape: ModelShape, profile: HardwareProfile
    ) -> None:
        self.config = config
        self.mesh = mesh
        self.spec = shape.spec
        self.trainer = Trainer.of(config, mesh, NewDecoder(shape))
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.layer = shape.spec.largest_layer
        tensor = mesh.tensor.size()
        self.heads, self.kv_heads = (
            self.layer.num_attention_heads // tensor,
            self.layer.num_key_value_heads // tensor,
        )
        """Heads per tensor-parallel rank."""
        budget = config.batch.tokens_per_rank
        self.no_plan = Plan(
            "static",
            "none",
            ranks=mesh.ranks,
            tokens_per_rank=budget,
            lengths=(),
            micro_batches=(),
            profile=profile,
            cost=PlanCost(0.0, 0.0, 0.0, 0.0),
        )
        self.empty = Layout(0, mesh.rank, ())

    def seconds(self, *works: Callable[[], object]) -> list[float]:
        """Returns the median seconds of every piece of work on the slowest rank; infinite if out of
        GPU memory.

        They are run in turn, once to warm up and then REPEATS times, so that all see the same
        disturbances.
        """
        slowest = self._repeated(works).max(dim=1).values
        medians: list[float] = slowest.median(dim=0).values.tolist()
        return medians

    def relative_seconds(self, work: Callable[[], object]) -> torch.Tensor:
        """Returns the seconds of every rank of the domain for a piece of work without messages,
        relative to a usual rank's in the same repeat: [REPEATS, ranks].

        A rank of several GPUs is as slow as the slowest of them. A usual rank is one of which at
        most half of the ranks are faster.
        """
        rank_of = self.mesh.gather([float(self.mesh.rank)])[:, 0].long()
        of_process = self._repeated([work])[:, :, 0]
        of_rank = torch.zeros(REPEATS, self.mesh.ranks, dtype=of_process.dtype)
        index = rank_of.expand(REPEATS, -1)
        of_rank = of_rank.scatter_reduce(1, index, of_process, reduce="amax")
        usual = of_rank.median(dim=1, keepdim=True).values  # of two ranks the faster
        return of_rank / usual

    def _repeated(self, works: Sequence[Callable[[], object]]) -> torch.Tensor:
        """Returns the seconds of every process for every piece of work: [REPEATS, processes,
        works]."""
        rounds = [
            self.mesh.gather([self._once(work) for work in works]) for _ in range(1 + REPEATS)
        ]
        return torch.stack(rounds[1:])

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

    def kv_rows(self, count: int) -> torch.Tensor:
        """Returns a buffer for the K and V of `count` rows in one layer: [count, 2 · kv heads ·
        head_dim]."""
        return torch.zeros(
            count,
            2 * self.kv_heads * self.layer.head_dim,
            dtype=self.dtype,
            device=self.mesh.device,
        )

    def batch(
        self, layouts: Sequence[Layout], tokens: Sequence[int], plan: Plan | None = None
    ) -> StepBatch:
        """Returns a step of micro-batches of random tokens, padded for tensor parallelism, whose
        ranks get the same tokens."""
        assert self.spec.vocab_size is not None
        multiple = self.mesh.tensor.size()
        generator = torch.Generator().manual_seed(self.mesh.rank)
        micro_batches = []
        for number, (layout, count) in enumerate(zip(layouts, tokens, strict=True)):
            rows = -(-count // multiple) * multiple
            ids, labels = torch.randint(self.spec.vocab_size, (2, rows), generator=generator)
            micro_batches.append(
                MicroBatch(number, layout, tokens=ids, labels=labels, positions=torch.arange(rows))
            )
        plan = plan or self.no_plan
        total = self.mesh.ranks * sum(tokens)
        return StepBatch(
            1,
            plan,
            documents=tuple("random" for _ in plan.lengths),
            tokens=total,
            target_tokens=max(1, total),
            micro_batches=tuple(micro_batches),
        )

    def micro_batch(self, tokens: int, attention: Attention | None = None) -> Callable[[], object]:
        """Builds a forward and backward pass on `tokens` tokens, in a micro-batch that is not the
        last of its step.

        The layout holds no document, so the run's attention computes nothing; `attention` replaces
        it.
        """
        batch = self.batch([self.empty] * 2, [tokens, 0])
        return lambda: self.trainer.runner.micro_batch(
            batch, 0, StepWeights(batch.target_tokens), attention
        )

    def attention(self, layout: Layout) -> Callable[[], object]:
        """Builds the attention passes of one layer in a step, without a window, forward and
        backward, on random tensors."""
        make = make_attention(
            self.config, self.mesh, spec=self.spec, plan=self.no_plan, layout=layout
        )
        attention = make(None, self.spec.attention_softcap, None)
        size = self.layer.head_dim
        shapes = (
            (layout.tokens, heads, size)
            for heads in (self.heads, self.kv_heads, self.kv_heads, self.heads)
        )
        q, k, v, dout = (
            torch.randn(shape, dtype=self.dtype, device=self.mesh.device, requires_grad=True)
            for shape in shapes
        )

        def run() -> None:
            if self.config.train.recompute == "full":
                with torch.no_grad():
                    attention(q, k, v, layer=0)
            torch.autograd.grad(attention(q, k, v, layer=0), (q, k, v), dout)

        return run


class _Through(torch.autograd.Function):
    """Attention without cost: returns q unchanged and gives k and v gradients of the right
    shape."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ctx.kv_heads = k.shape[1]
        return q.view_as(q)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
        part = dout[:, : ctx.kv_heads].contiguous()
        return dout, part, part


def no_attention(q: Queries, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
    """Replaces attention to time everything else. q, k and v must have the same head size."""
    out: torch.Tensor = _Through.apply(q(lambda x: x), k, v)  # type: ignore[no-untyped-call]  # torch's own
    return out


def _matrices(run: TimedRun) -> tuple[float, float, float]:
    """Returns the seconds of an empty micro-batch, of a token more without attention, and of a step
    beside its micro-batches.

    An empty micro-batch gathers all parameters and builds the attention schedule.
    """
    most = run.config.batch.tokens_per_rank
    counts = [0, most // 4, most // 2, most]
    full = (run.micro_batch(count, no_attention) for count in counts[1:])
    alone = run.batch([run.empty], [0])
    *seconds, whole = run.seconds(run.micro_batch(0), *full, lambda: run.trainer.step(alone))
    if not all(map(math.isfinite, seconds)):
        raise UserError(
            f"{most} tokens per rank, without attention, exceed GPU memory: lower "
            "batch.tokens_per_rank (the profile may use a smaller value than training), or set "
            "train.recompute"
        )
    return (*fit_line(counts, seconds), max(0.0, whole - seconds[0]))


def _attention_constants(run: TimedRun, lengths: Sequence[int]) -> dict[str, Any]:
    """Returns the constants of attention, timed on documents of these lengths."""
    seconds = {}
    for length in lengths:
        seconds[length] = _attention_s(run, length)
    slope, table = fit_attention(seconds)
    return {"attention_s_per_token2": slope, "attention_efficiency": table}


def _memory(run: TimedRun) -> tuple[float, str]:
    """Returns the rate of memory that products wait for, and what it is from."""
    if run.mesh.device.type != "cuda":
        return NO_LIMIT, "caches of CPUs hold what products move"
    return _memory_bytes_per_s(run), "a copy"


def _memory_bytes_per_s(run: TimedRun) -> float:
    """Returns the bytes per second that a copy reads and writes."""
    source = torch.ones(COPIED_BYTES, dtype=torch.uint8, device=run.mesh.device)
    copy = torch.empty_like(source)
    (seconds,) = run.seconds(lambda: copy.copy_(source))
    return 2 * COPIED_BYTES / seconds


def _attention_s(run: TimedRun, length: int) -> float:
    """Returns the seconds of a whole document in all layers, without the fixed cost of a call."""
    documents = max(1, min(DOCUMENTS, run.config.batch.tokens_per_rank // length))
    placements = [Placement(document, run.mesh.rank, 1) for document in range(documents)]
    layout = Layout.of(placements, [length] * documents, 0, run.mesh.rank)
    full, empty = run.seconds(run.attention(layout), run.attention(run.empty))
    if not math.isfinite(full):
        raise UserError(
            f"attention on {length} tokens exceeds free GPU memory: stop other programs on the GPU"
        )
    return max(full - empty, full / 100) / documents * len(run.spec.layers)


def _exchange_constants(
    run: TimedRun, per_node: int, kv_bytes: float
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yields what was timed, and the constants that follow from it."""
    row_bytes = run.kv_rows(1).nbytes
    bandwidths, latency_s = _links(run, per_node, row_bytes)
    yield "messages to all peers at once", bandwidths
    exchanges = kv_bytes / row_bytes
    yield "the shortest messages × layers × passes", {"latency_s": latency_s * exchanges}
    split_s = _split_document_s(run)
    yield "short documents on all ranks and on one", {"split_document_s": split_s}


def _split_document_s(run: TimedRun) -> float:
    """Returns the seconds that a split document takes more than a whole one, on each rank."""
    ranks = run.mesh.ranks
    budget = run.config.batch.tokens_per_rank // SPLIT_TOKENS
    few = min(FEW_SPLIT, budget - 1)
    many = min(MANY_SPLIT, budget)

    def split(count: int) -> Callable[[], object]:
        placements = [Placement(document, 0, ranks) for document in range(count)]
        lengths = [SPLIT_TOKENS * ranks] * count
        return run.attention(Layout.of(placements, lengths, 0, run.mesh.rank))

    def whole(count: int) -> Callable[[], object]:
        placements = [Placement(document, run.mesh.rank, 1) for document in range(count)]
        return run.attention(Layout.of(placements, [SPLIT_TOKENS] * count, 0, run.mesh.rank))

    few_split, many_split, few_whole, many_whole = run.seconds(
        split(few), split(many), whole(few), whole(many)
    )
    more_s = (many_split - few_split) - (many_whole - few_whole)
    return max(0.0, more_s / (many - few)) * len(run.spec.layers)


def _slow_ranks(run: TimedRun, length: int) -> SlowRanks:
    """Returns the ranks that take longer for attention than the others, each with its time relative
    to theirs."""
    layout = Layout.of([Placement(0, run.mesh.rank, 1)], [length], 0, run.mesh.rank)
    relative = run.relative_seconds(run.attention(layout))
    in_every_repeat = relative.min(dim=0).values > 1
    medians = relative.median(dim=0).values
    return tuple(
        (rank, _short(medians[rank].item()))
        for rank in range(run.mesh.ranks)
        if in_every_repeat[rank] and medians[rank] >= SLOW
    )


def _of_usual_ranks(profile: HardwareProfile, slow_ranks: SlowRanks) -> HardwareProfile:
    """Returns the profile with these slow ranks, and the rates of a usual rank: they were measured
    on the slowest."""
    slowest = max((relative for _, relative in slow_ranks), default=1.0)
    return replace(
        profile,
        linear_s_per_token=_short(profile.linear_s_per_token / slowest),
        attention_s_per_token2=_short(profile.attention_s_per_token2 / slowest),
        slow_ranks=slow_ranks,
    )


def _links(run: TimedRun, per_node: int, row_bytes: int) -> tuple[dict[str, float], float]:
    """Returns the bandwidths inside and across nodes, where such pairs of ranks exist, and the
    seconds of a short message.

    Every rank exchanges with several others at once, as in ring attention, because that can lower
    bandwidth per link. Bandwidth is fitted to long messages only, as buffers hide the cost of short
    ones.
    """
    rank = run.mesh.rank
    most = max(run.config.batch.tokens_per_rank, -(-LEAST_BYTES // row_bytes))
    first = rank - rank % per_node
    links = {
        "intra_node_bytes_per_s": range(first, first + per_node),
        "inter_node_bytes_per_s": range(rank % per_node, run.mesh.ranks, per_node),
    }
    rows = [max(PEERS, most // part) for part in (4096, 16, 4, 1)]  # so that no message is empty
    bandwidths = {}
    latencies = []
    for name, among in links.items():
        if len(among) > 1:
            works = (_messages(run, count, peers(rank, among)) for count in rows)
            shortest, *others = (seconds / MESSAGES for seconds in run.seconds(*works))
            bandwidths[name] = 1 / fit_line([row_bytes * count for count in rows[1:]], others)[1]
            latencies.append(shortest)
    return bandwidths, max(latencies)


def _messages(run: TimedRun, rows: int, pairs: list[tuple[int, int]]) -> Callable[[], object]:
    """Builds an exchange of `rows`, split over `pairs`: sent to the first of each pair, received
    from the second."""
    exchange = Exchange(run.mesh.exchange, "longctx calibrate")
    outgoing = run.kv_rows(rows)
    incoming = run.kv_rows(rows)
    shares = [len(part) for part in outgoing.tensor_split(len(pairs))]
    sends = list(zip((after for after, _ in pairs), outgoing.split(shares), strict=True))
    receives = list(zip((before for _, before in pairs), shares, strict=True))
    return lambda: [exchange.start(sends, incoming, receives).wait() for _ in range(MESSAGES)]


def fit_line(amounts: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Returns (intercept ≥ 0, slope > 0) of the line with the least relative errors.

    If time does not grow with the amount, because of noise, returns the line from zero to the
    largest amount, an upper bound on the slope.
    """
    rows = np.array([(1 / y, x / y) for x, y in zip(amounts, seconds, strict=True)])
    ones = np.ones(len(rows))
    intercept, slope = np.linalg.lstsq(rows, ones)[0].tolist()
    if intercept < 0:  # the best line that is allowed goes through the origin
        intercept = 0.0
        slope = float(rows[:, 1] @ ones / (rows[:, 1] @ rows[:, 1]))
    if slope <= 0:
        largest, its_seconds = max(zip(amounts, seconds, strict=True))
        intercept = 0.0
        slope = its_seconds / largest
    return intercept, slope


def fit_attention(seconds: Mapping[int, float]) -> tuple[float, EfficiencyTable]:
    """Returns seconds per token² of the longest document, and the efficiency of every length, from
    the seconds by length.

    It never falls with length: a document measured faster than a longer one counts as equally fast.
    """
    slowest = 0.0
    table = []
    slope = seconds[max(seconds)] / max(seconds) ** 2
    for length in sorted(seconds, reverse=True):
        slowest = max(slowest, seconds[length] / length**2)
        table.append((length, slope / slowest))
    return slope, tuple(reversed(table))


def _check(run: TimedRun, profile: HardwareProfile) -> dict[str, Any]:
    """Predicts and measures a step of documents of halving lengths, the longest as far as attention
    was measured."""
    budget = run.config.batch.tokens_per_rank
    ranks = run.mesh.ranks
    most = run.config.context.max_remote_tokens
    longest = min(ranks * budget // 2, profile.attention_efficiency[-1][0] * max(1, ranks // 2))
    halves = [
        longest >> place
        for place in range(longest.bit_length())
        if longest >> place >= SHORTEST_DOCUMENT
    ]
    lengths = halves * (ranks * budget // sum(halves))
    plan = make_plan(
        lengths, ranks=ranks, tokens_per_rank=budget, profile=profile, max_remote_tokens=most
    )
    layouts = [plan.layout(number, run.mesh.rank) for number in range(len(plan.micro_batches))]
    batch = run.batch(layouts, [layout.tokens for layout in layouts], plan)
    (seconds,) = run.seconds(lambda: run.trainer.step(batch))
    if not math.isfinite(seconds):
        raise UserError(
            f"a step with {budget} tokens per rank exceeds GPU memory: lower batch.tokens_per_rank"
        )
    times = {
        "predicted_s": plan.makespan_s,
        "measured_s": seconds,
        "error": plan.makespan_s / seconds - 1,
    }
    size = {
        "documents": len(lengths),
        "longest": longest,
        "tokens": sum(lengths),
        "degrees": plan.degrees,
    }
    return size | {name: _short(value) for name, value in times.items()}


def _short(value: Any) -> Any:
    """Rounds floats to four significant digits, the precision of the measurements."""
    if isinstance(value, tuple):
        return tuple(_short(item) for item in value)
    if isinstance(value, float):
        return float(f"{value:.4g}")
    return value
