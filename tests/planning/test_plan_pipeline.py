"""Plans for pipelines: more and smaller micro-batches, the bubble in the cost, and schedules that
can run the plans."""

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.model.presets import PRESETS
from longctx.planning.cost.model import NANOSECONDS
from longctx.planning.cost.rounds import plan_score
from longctx.planning.cost.spec import PassFlops, Scan
from longctx.planning.cost.work import work_of
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.pipeline import NO_PIPELINE, Pipeline
from longctx.planning.plan import Plan
from longctx.planning.planners.planner import make_plan
from longctx.plots.timeline import timeline
from tests.marks import examples

H100 = HardwareProfile.load("h100-nvlink-ib")
MIXED = [30_000, 12_000, 9_000, *[700 + 50 * i for i in range(60)]]


def plan(lengths: list[int], pipeline: Pipeline, mode: str = "auto") -> Plan:
    return make_plan(
        lengths, ranks=4, tokens_per_rank=16384, profile=H100, mode=mode, pipeline=pipeline
    )


def test_the_bubble_is_that_of_the_longest_micro_batch() -> None:
    made = plan(MIXED, Pipeline(4, 2))
    result = replace(plan_score(made), pipeline=NO_PIPELINE)
    longest = int(result.micro_batch_ns.max()) + result.launch_ns
    runs = made.pipeline.runs(len(made.micro_batches))
    bubble = (runs - len(made.micro_batches)) * result.launch_ns + -(-3 * longest // 2)
    assert made.makespan_s == pytest.approx((result.makespan_ns + bubble) / NANOSECONDS, rel=1e-12)
    assert made.bubble_share == pytest.approx(bubble / NANOSECONDS / made.makespan_s, rel=1e-9)
    assert timeline(made).makespan_s == made.makespan_s


def simulated_1f1b(times: list[float], ranks: int) -> float:
    """Returns the time when the last rank finishes: forward is a third of a micro-batch's time,
    messages take no time."""
    passes = []
    for rank in range(ranks):
        ahead = min(len(times), ranks - rank)
        rest = [
            (name, i + shift)
            for i in range(len(times))
            for name, shift in (("backward", 0), ("forward", ahead))
        ]
        passes.append(
            [("forward", i) for i in range(ahead)]
            + [(name, i) for name, i in rest if i < len(times)]
        )
    done: dict[tuple[str, int, int], float] = {}
    clocks = [0.0] * ranks
    while any(passes):
        for rank, waiting in enumerate(passes):
            while waiting:
                name, i = waiting[0]
                before = (name, i, rank - 1 if name == "forward" else rank + 1)
                if before[2] == ranks:
                    before = ("forward", i, rank)
                if before[2] >= 0 and before not in done:
                    break
                clocks[rank] = (
                    max(clocks[rank], done.get(before, 0.0))
                    + times[i] * (1 if name == "forward" else 2) / 3
                )
                done[name, i, rank] = clocks[rank]
                waiting.pop(0)
    return max(clocks)


@given(ranks=st.integers(2, 8), extra=st.integers(0, 20))
def test_the_modelled_bubble_is_that_of_the_schedule(ranks: int, extra: int) -> None:
    micro_batches = ranks + extra
    assert simulated_1f1b([1.0] * micro_batches, ranks) == pytest.approx(
        micro_batches + Pipeline(ranks).bubble
    )


@pytest.mark.parametrize("tensor", [1, 2])
def test_the_work_of_a_rank_is_that_of_its_stages(tensor: int) -> None:
    """A token of a micro-batch passes each of a rank's stages: its hidden states are received in
    bfloat16 forward, and their gradients backward."""
    spec = replace(PRESETS["tiny"].spec, layers=PRESETS["tiny"].spec.layers[:1] * 8, vocab_size=99)
    whole, plain, chunked = (
        work_of(spec, "bfloat16", pipeline=pipeline, tensor=tensor, gpus=16)
        for pipeline in (NO_PIPELINE, Pipeline(4), Pipeline(4, 2))
    )
    one_way = 2 * spec.hidden_size / tensor
    assert (whole.pipeline_bytes, whole.gpus, whole.layers) == (0, 1, 8)
    assert (plain.pipeline_bytes, plain.gpus) == (2 * one_way, 16)
    assert (chunked.pipeline_bytes, chunked.gpus) == (2 * 2 * one_way, 16)
    for part in (plain, chunked):
        assert part.kv_bytes * 8 == whole.kv_bytes * part.layers and part.layers < 8
        assert part.attention * 8 == whole.attention * part.layers


@pytest.mark.parametrize(
    ("recompute", "keep_kv", "passes"),
    [("none", False, 3), ("none", True, 2), ("full", False, 4), ("full", True, 3)],
)
def test_keys_travel_once_less_where_they_are_kept(
    recompute: str, keep_kv: bool, passes: int
) -> None:
    """K and V travel in forward and backward, and their gradients back; again if all is
    recomputed."""
    spec = replace(PRESETS["tiny"].spec, vocab_size=99)
    found = work_of(spec, "float32", recompute=recompute, keep_kv=keep_kv)
    assert found.kv_bytes * 3 == work_of(spec, "float32").kv_bytes * passes


def test_tensor_ranks_share_what_split_documents_cost_beside() -> None:
    tiny = PRESETS["tiny"].spec
    scan = Scan(8, flops=PassFlops(600.0, 1200.0), split_flops=PassFlops(60.0, 120.0))
    layers = tuple(replace(layer, scan=scan) for layer in tiny.layers)
    spec = replace(tiny, layers=layers, vocab_size=99)
    alone, shared = (work_of(spec, "float32", tensor=tensor).split for tensor in (1, 2))
    assert alone == 2 * shared > 0


def test_the_order_suits_the_schedule() -> None:
    made = plan(MIXED, Pipeline(8))
    times = (plan_score(made).micro_batch_ns / NANOSECONDS).tolist()
    peak = times.index(max(times))
    assert times == sorted(times[:peak]) + sorted(times[peak:], reverse=True)
    assert len(times) > 4
    takes, descending = simulated_1f1b(times, 8), simulated_1f1b(sorted(times, reverse=True), 8)
    assert takes <= descending
    assert takes <= sum(times) + 7 * max(times)


@settings(max_examples=examples(15))
@given(
    lengths=st.lists(st.integers(1, 40_000), min_size=1, max_size=12),
    pipeline=st.builds(Pipeline, st.integers(2, 6), st.integers(1, 3)),
)
def test_plans_in_pipelines(lengths: list[int], pipeline: Pipeline) -> None:
    made = {mode: plan(lengths, pipeline, mode) for mode in ("auto", "static", "bins")}
    assert made["auto"].makespan_s <= min(made["static"].makespan_s, made["bins"].makespan_s)
    for one in made.values():
        assert one.lower_bound_s <= one.makespan_s
        assert one.lower_bound_s >= plan(lengths, NO_PIPELINE, "static").lower_bound_s
    assert json.loads(json.dumps(made["auto"].to_json()))["pipeline"] == asdict(pipeline)


@given(real=st.integers(1, 200), ranks=st.integers(1, 16), chunks=st.integers(1, 3))
def test_empty_micro_batches(real: int, ranks: int, chunks: int) -> None:
    """As few as possible, so that 1F1B has one micro-batch per stage and schedules with chunks have
    equal rounds."""
    runs = Pipeline(ranks, chunks).runs(real)
    assert real <= runs < real + ranks
    if chunks == 1:
        assert runs == (real if ranks == 1 else max(real, ranks))
    elif ranks > 1:
        assert runs % max(1, runs // ranks) == 0
        assert all(fewer % max(1, fewer // ranks) for fewer in range(real, runs))
