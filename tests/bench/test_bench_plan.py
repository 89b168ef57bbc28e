"""Benchmarks of planning, on few of their settings: tables and pages say what their rows hold."""

import contextlib
import csv
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

import plan as bench
import scaling
from longctx.comparison.baselines import fixed_degree, place_fixed_static, plan_fixed_static
from longctx.comparison.mixes import load_mix
from longctx.errors import UserError
from longctx.planning.cost.model import score
from longctx.planning.cost.rounds import choose_rounds
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.plan import PlanError
from longctx.planning.planners.planner import make_plan
from longctx.planning.planners.planning_input import PlanningInput
from longctx.planning.planners.search import search
from longctx.planning.planners.settings import DEFAULT
from split_cost import Machine, profile_of
from split_search import memory_of, possible_splits

pytestmark = pytest.mark.slow

H100 = HardwareProfile.load("h100-nvlink-ib")


def test_its_tables_are_those_of_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan"
    options = [
        "--only",
        "(speedups|gaps) wlb_128k (6|8) ranks 4 documents",
        "--seeds",
        "1",
        "--out",
        str(out),
    ]
    monkeypatch.setattr(sys, "argv", ["plan.py", *options])
    bench.main()
    with out.with_suffix(".csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {(row["table"], row["ranks"]) for row in rows} == {
        ("speedups", "8"),
        ("gaps", "6"),
        ("gaps", "8"),
    }
    lines = out.with_suffix(".md").read_text().splitlines()
    assert capsys.readouterr().out.strip().splitlines() == lines
    for row in rows:
        if row["planner"] == "megatron-main" and not row["makespan_s"]:
            assert row["note"]  # its wheel is not installed
            continue
        assert (
            float(row["lower_bound_s"]) <= float(row["tight_bound_s"]) <= float(row["makespan_s"])
        )
        if row["planner"] == "auto":
            gaps = f"{float(row['gap']):.1%}", f"{float(row['unavoidable_gap']):.1%}"
            shown = (
                f"| {gaps[0]} | {gaps[1]} |"
                if row["table"] == "speedups"
                else f"| {gaps[0]} ({gaps[1]}) |"
            )
            assert [
                line
                for line in lines
                if line.startswith(f"| wlb_128k | {row['ranks']} |") and shown in line
            ]
    speedups = {row["planner"]: row for row in rows if row["table"] == "speedups"}
    (cells,) = (
        line.strip("| ").split(" | ") for line in lines if line.startswith("| wlb_128k | 8 | 4 |")
    )
    auto = speedups["auto"]
    over, single, static = (
        f"{float(auto[f'speedup_over_{name}']):.2f}"
        for name in ("fixed", "best_single", "best_static")
    )
    degree = speedups["fixed-static"]["winner"].removeprefix("static:")
    assert cells[3] == f"{int(auto['tokens']) / 1e6:.2f}M"
    assert cells[4:6] == [degree, f"**{over}**"]
    assert cells[7:9] == [f"{single} ({auto['best_single_degree']})", static]
    assert rows[0]["command"] in lines[-1] + lines[-2]


def test_the_fixed_degree_is_that_of_the_longest_document_of_the_mix() -> None:
    """32 ranks and a document each: the documents drawn would fit into a smaller degree; the best
    single degree is larger."""
    steps = [load_mix("wlb_128k").draw(32, seed) for seed in range(2)]
    assert max(fixed_degree(max(step), 32, bench.TOKENS_PER_RANK) for step in steps) < 8
    result = bench.measure(bench.Setting("speedups", "wlb_128k", 32, 1), 2, H100)
    request = {"ranks": 32, "tokens_per_rank": bench.TOKENS_PER_RANK, "profile": H100}
    times = {
        d: [plan_fixed_static(step, **request, degree=d).makespan_s for step in steps]
        for d in (8, 16, 32)
    }
    assert result["fixed-static"].winner == "static:8"
    assert result["fixed-static"].makespan_s == pytest.approx(sum(times[8]) / 2)
    best = min(times, key=lambda degree: sum(times[degree]))
    assert result.single.best_single_degree == best > 8
    auto = [make_plan(step, **request).makespan_s for step in steps]
    gains = [single / own for single, own in zip(times[best], auto, strict=True)]
    assert result.single.speedup_over_best_single == pytest.approx((gains[0] * gains[1]) ** 0.5)


def test_documents_are_stretched_by_one_factor() -> None:
    assert bench.stretch([100, 3, 1], 1000) == [1000, 30, 10]
    assert bench.stretch([100, 3, 1], 10) == [10, 1, 1]
    assert bench.stretch([100, 3], None) == [100, 3]
    stretched = [setting for setting in bench.settings(["wlb_128k"]) if setting.stretched_to]
    assert {setting.ranks for setting in stretched} == {256} and {
        setting.stretched_to for setting in stretched
    } == {2 << 20}


@pytest.mark.parametrize(("documents", "most"), [(64, 0.03), (256, 0.025)])
def test_few_long_documents_are_near_the_bound(documents: int, most: float) -> None:
    """On 64 ranks, mean of five steps. With blocks of one rank alone, or of at most a node, plans
    are slower."""
    steps = [
        PlanningInput(H100, np.array(bench.few_long(documents, seed)), 64, 16384)
        for seed in range(5)
    ]
    plans = [
        make_plan(step.lengths.tolist(), ranks=64, tokens_per_rank=16384, profile=H100)
        for step in steps
    ]
    assert sum(plan.gap for plan in plans) / len(plans) < most
    found = sum(search(step).makespan_ns for step in steps)
    for blocks in ((1,), (8, 4, 2, 1)):
        fewer = replace(DEFAULT, blocks=blocks)
        assert found < sum(search(step, fewer).makespan_ns for step in steps)


def test_the_gain_of_a_window_is_at_most_the_gaps_and_rounding() -> None:
    """Steps of the same documents: a window's bound is that of each step, but for micro-batches
    that are partly empty."""
    same = bench.Setting("windows", "wlb_128k", 8, 2)
    plans = [
        make_plan(bench.draw(same, s), ranks=8, tokens_per_rank=16384, profile=H100)
        for s in range(8)
    ]
    gaps = sum(plan.makespan_s for plan in plans) / sum(plan.lower_bound_s for plan in plans) - 1
    gains = bench.window_gains(same, H100)
    assert len(gains) == len(bench.WINDOWS)
    assert all(0.9 * gaps <= gain < gaps + 0.02 for gain in gains)


# --- bench/scaling.py


def test_a_node_of_eight() -> None:
    machine = Machine.load(scaling.PROFILE)
    row = scaling.predict(machine, "8B", 8, seeds=2)
    assert row.tp * row.pp * row.domain == row.gpus == 8
    assert row.documents == 32
    assert 0.3 < row.static_mfu <= row.mfu < 0.55
    assert row.static_step_s / row.step_s == pytest.approx(row.mfu / row.static_mfu), (
        "the same documents"
    )
    assert row.static_degree * row.tokens_per_rank >= load_mix(scaling.MIX).longest, (
        "also of documents that are not drawn"
    )
    assert row.static_step_s == pytest.approx(min(static_times_s(machine)))
    with pytest.raises(UserError, match="no split of 8 GPUs can hold this model"):
        scaling.predict(machine, "1T", 8)
    found = {name: str(value) for name, value in asdict(row).items()} | {"refused": ""}
    page = scaling.page(
        [{**found, "model": "1T", "refused": "too large"}, found], {"command": "python ..."}
    )
    assert f"| 8B | 8 | 0.1M | {row.tp} × {row.pp} × {row.domain} |" in page
    assert f"**{row.speedup:.2f}×**" in page
    assert "Too few GPUs: 1T on 8." in page


def static_times_s(machine: Machine) -> Iterator[float]:
    """Times of fixed static for the 8B model on every split of 8 GPUs that fits."""
    spec = scaling.MODELS["8B"].model_copy(update={"vocab_size": scaling.LLAMA_3_VOCABULARY}).spec
    mix = load_mix(scaling.MIX)
    steps = [np.array(mix.draw(32, seed), dtype=np.int64) for seed in range(2)]
    for split in possible_splits(spec, 8, 8):
        with contextlib.suppress(PlanError):
            degree = fixed_degree(mix.longest, split.domain, split.tokens_per_rank)
            profile = profile_of(machine, spec, split)
            times = []
            for lengths in steps:
                plan = place_fixed_static(
                    profile, lengths, split.domain, split.tokens_per_rank, degree
                )
                if (
                    memory_of(machine, spec, split, mix.longest, plan.micro_batches).total
                    <= machine.memory_bytes
                ):
                    plain = score(profile, lengths, plan, split.domain, split.pipeline)
                    times.append(
                        choose_rounds(profile, lengths, plan, plain, split.max_remote_tokens)[
                            1
                        ].makespan_ns
                        / 1e9
                    )
            if len(times) == len(steps):
                yield sum(times) / len(times)
