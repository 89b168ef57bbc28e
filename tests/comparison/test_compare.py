"""`longctx compare`: its numbers against plans made by hand, its CSV and JSON, and errors for bad
input."""

import csv
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longctx.cli import main
from longctx.comparison.baselines import best_single_degree, plan_fixed_static
from longctx.comparison.mixes import load_mix
from longctx.comparison.modelled import (
    COLUMNS,
    PLANNERS,
    Case,
    PlannerRow,
    compare_case,
    mean_rows,
    most_speedup,
    over_fixed_without_barriers,
)
from longctx.comparison.steps import (
    LengthSource,
    file_source,
    fit,
    make_cases,
    mix_source,
    store_source,
)
from longctx.comparison.table import missing
from longctx.config import load
from longctx.data.mixture import make_steps
from longctx.data.records.sources import open_corpus
from longctx.data.sampler import Sampler
from longctx.data.store.prepare import prepare
from longctx.data.store.store import Store
from longctx.planning.cost.bounds import tight_bound_s
from longctx.planning.hardware_profile import HardwareProfile, shipped_profiles
from longctx.planning.plan import PlanError
from longctx.planning.planners.planner import make_plan
from rivals import place_plain_static
from tests.data_cases import write_jsonl

H100 = HardwareProfile.load("h100-nvlink-ib")
LENGTHS = tuple(load_mix("wlb_128k").draw(64, seed=0))


@pytest.fixture(scope="module")
def rows() -> dict[str, PlannerRow]:
    return {row.planner: row for row in compare_case(Case(LENGTHS, 16, 16384), H100)}


def test_numbers_are_those_of_the_plans(rows: dict[str, PlannerRow]) -> None:
    """Plans exchange in two levels, as training does: in one, static degrees across nodes would be
    slower than in training."""
    assert load(None, []).context.two_level_exchange
    assert {HardwareProfile.load(name).exchange_levels for name in shipped_profiles()} == {2}
    assert tuple(rows) == PLANNERS
    for row in rows.values():
        assert (row.documents, row.tokens, row.longest) == (64, sum(LENGTHS), max(LENGTHS))
        assert (row.makespan_s is None) == bool(row.note)
        shares = (row.work_share, row.exchange_share, row.idle_share, row.fixed_share)
        assert row.note or (min(shares) >= -1e-12 and sum(shares) == pytest.approx(1))
    request = {"ranks": 16, "tokens_per_rank": 16384, "profile": H100}
    for planner in ("auto", "bins", "static"):
        plan = make_plan(LENGTHS, **request, mode=planner)
        row = rows[planner]
        assert (row.makespan_s, row.lower_bound_s, row.gap) == (
            plan.makespan_s,
            plan.lower_bound_s,
            plan.gap,
        )
        assert row.idle_share == pytest.approx(plan.idle_share, abs=1e-9)
        assert row.micro_batches == len(plan.micro_batches)
        slots = len(plan.micro_batches) * 16 * 16384
        assert row.padding_share == pytest.approx(1 - sum(LENGTHS) / slots)
        layouts = [
            plan.layout(k, rank) for k in range(len(plan.micro_batches)) for rank in range(16)
        ]
        assert row.most_tokens == max(lay.tokens for lay in layouts)
        assert row.remote_tokens == max(
            sum(s.length - s.tokens for s in lay.shards if s.degree > 1) for lay in layouts
        )
        assert row.lower_bound_s <= tight_bound_s(plan) == row.tight_bound_s <= row.makespan_s
        assert row.unavoidable_gap == row.tight_bound_s / plan.lower_bound_s - 1 >= 0
    fixed, static, auto = (
        rows[planner].makespan_s for planner in ("fixed-static", "static", "auto")
    )
    assert fixed is not None and static is not None and auto is not None
    assert rows["fixed-static"].speedup_over_fixed == rows["static"].speedup_over_best_static == 1
    assert (
        rows["auto"].speedup_over_fixed
        == fixed / auto
        >= rows["auto"].speedup_over_best_static
        == static / auto
        >= 1
    )
    assert rows["fixed-static"].speedup_over_best_static == static / fixed < 1


def test_fixed_static_has_the_degree_of_its_data_set_or_the_given_one() -> None:
    """Documents that need 1, 2 and 4 ranks; best static depends only on the documents of the
    step."""

    def fixed(**more: int) -> PlannerRow:
        return compare_case(Case((6000,) * 8, 8, 4096, **more), H100, ("auto", "fixed-static"))[1]

    of_data_set = fixed(longest=13_000)
    winners = [row.winner for row in (fixed(), of_data_set, fixed(longest=13_000, fixed_degree=8))]
    assert winners == ["static:2", "static:4", "static:8"]
    plan = plan_fixed_static((6000,) * 8, ranks=8, tokens_per_rank=4096, profile=H100, degree=4)
    assert of_data_set.makespan_s == plan.makespan_s


def test_without_barriers_groups_of_fixed_static_wait_only_at_the_end_of_the_step() -> None:
    """Two groups and two micro-batches: with barriers the longer of each counts, without them the
    longer sum."""
    lengths = (1000, 8000, 8192, 500)
    alone = {
        length: make_plan((length,), ranks=1, tokens_per_rank=8192, profile=H100)
        for length in lengths
    }
    busy = {length: plan.makespan_s - H100.step_s - H100.launch_s for length, plan in alone.items()}
    rows = compare_case(Case(lengths, 2, 8192), H100, ("auto", "fixed-static"))
    fixed = H100.step_s + 2 * H100.launch_s
    assert rows[1].makespan_s == pytest.approx(fixed + busy[8000] + busy[8192])
    assert rows[1].no_barrier_s == pytest.approx(fixed + busy[1000] + busy[8192])
    assert rows[0].makespan_s is not None and rows[1].no_barrier_s is not None
    assert over_fixed_without_barriers(rows) == pytest.approx(
        rows[1].no_barrier_s / rows[0].makespan_s, rel=1e-12
    )


def test_the_best_static_degree_is_sought_among_all() -> None:
    """Two documents that just fit on 40 of 80 ranks each: no power of two is as fast, nor three
    times a power of two."""
    row = compare_case(Case((40 * 4096, 40 * 4096, 500), 80, 4100), H100, ("static",))[0]
    assert row.winner == "static:40"


def test_a_baseline_that_cannot_hold_the_documents_gets_a_note() -> None:
    planners = ("auto", "static", "plain-static")
    rows = {
        row.planner: row
        for row in compare_case(
            Case((6 * 4096,), 6, 4096), H100, planners, {"plain-static": place_plain_static}
        )
    }
    assert (
        "largest degree here is 4" in rows["plain-static"].note
        and rows["plain-static"].speedup_over_best_static is None
    )
    assert rows["static"].winner == "static:6" and rows["auto"].speedup_over_best_static is not None
    assert rows["auto"].speedup_over_fixed is None, "fixed static was not asked for"
    assert (
        mean_rows([rows["plain-static"], rows["plain-static"]])[0].note == rows["plain-static"].note
    )


def test_the_best_single_degree_is_that_of_all_steps() -> None:
    """A step of short documents alone is faster at a small degree, one with a long document at a
    large one."""
    steps = [[16_000] * 16 + [60_000], [900] * 40]
    request = {"ranks": 16, "tokens_per_rank": 16384, "profile": H100}
    seconds = {
        degree: [plan_fixed_static(step, **request, degree=degree).makespan_s for step in steps]
        for degree in (4, 8, 16)
    }
    best = min(seconds, key=lambda degree: sum(seconds[degree]))
    assert best_single_degree(steps, 60_000, 16, 16384, H100) == best
    assert best_single_degree(steps[1:], 60_000, 16, 16384, H100) == min(
        seconds, key=lambda degree: seconds[degree][1]
    )
    case = Case(tuple(steps[1]), 16, 16384, longest=60_000, single_degree=8)
    auto, single = compare_case(case, H100, ("auto", "single-degree"))
    assert single.winner == "static:8" and single.makespan_s == seconds[8][1] and auto.makespan_s
    assert auto.speedup_over_single == pytest.approx(seconds[8][1] / auto.makespan_s)


def test_gains_are_those_of_the_readme_in_its_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        compare(
            "--mix", "magi_192k", "--ranks", "64", "--documents", "64", "--steps", "2", "--json"
        )
        == 0
    )
    auto, single = (
        {**row}
        for row in json.loads(capsys.readouterr().out)["means"]
        if row["planner"] in ("auto", "single-degree")
    )
    assert compare("--mix", "magi_192k", "--ranks", "64", "--documents", "64", "--steps", "2") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("auto over ")]
    assert "the best tensor and pipeline split" in lines[0] and len(lines) == 3
    assert (
        "best single context-parallel degree (" + single["winner"].removeprefix("static:")
        in lines[1]
    )
    assert (
        lines[1].endswith(f"{auto['speedup_over_single']:.2f}×")
        and "the smallest degree that holds all" in lines[2]
    )


def test_a_reason_for_a_missing_plan_is_given_once(rows: dict[str, PlannerRow]) -> None:
    everywhere = [
        replace(rows[name], ranks=ranks)
        for name in ("auto", "bins", "static")
        for ranks in (8, 1024)
    ]
    assert missing([replace(row, note="") for row in everywhere]) == []
    noted = [replace(row, note="no table" if row.planner == "bins" else "") for row in everywhere]
    assert missing(noted) == ["bins: no table"]
    noted[-1] = replace(noted[-1], note="too long")
    assert missing(noted) == ["bins: no table", "best static, 1,024 ranks: too long"]


def test_means_are_means(rows: dict[str, PlannerRow]) -> None:
    auto = rows["auto"]
    assert (
        auto.makespan_s is not None
        and auto.speedup_over_fixed is not None
        and auto.speedup_over_best_static is not None
    )
    more: dict[str, Any] = {"most_tokens": 99_999, "remote_tokens": 0}
    more |= {
        "speedup_over_fixed": 9 * auto.speedup_over_fixed,
        "speedup_over_best_static": 4 * auto.speedup_over_best_static,
    }
    other = replace(auto, seed=1, makespan_s=3 * auto.makespan_s, documents=66, **more)
    mean = mean_rows([auto, other])
    assert len(mean) == 1
    assert mean[0].makespan_s == pytest.approx(2 * auto.makespan_s)
    assert mean[0].speedup_over_fixed == pytest.approx(3 * auto.speedup_over_fixed)
    assert mean[0].speedup_over_best_static == pytest.approx(2 * auto.speedup_over_best_static)
    assert mean[0].documents == 65
    assert (mean[0].most_tokens, mean[0].remote_tokens) == (99_999, auto.remote_tokens), (
        "memory must hold the most"
    )


def test_auto_never_exceeds_the_bound_in_means_over_steps(rows: dict[str, PlannerRow]) -> None:
    """A short step with a large speedup and a long step with none: the ratio of their mean times is
    below auto's speedup."""
    auto = replace(rows["auto"], makespan_s=1.0, tight_bound_s=1.0, speedup_over_fixed=9.0)
    fixed = replace(rows["fixed-static"], makespan_s=9.0, tight_bound_s=1.0)
    later = {"makespan_s": 20.0, "tight_bound_s": 20.0, "seed": 1}
    means = mean_rows(
        [auto, fixed, replace(auto, **later, speedup_over_fixed=1.0), replace(fixed, **later)]
    )
    reached = next(row for row in means if row.planner == "auto").speedup_over_fixed
    assert reached == pytest.approx(3)
    assert most_speedup(means, "speedup_over_fixed") == pytest.approx(reached)


def from_file(
    long_documents: str, lengths: Sequence[int] = (40_000, 5), tokens: int = 1 << 20, steps: int = 3
) -> LengthSource:
    return file_source(
        lengths, "a file", lambda ranks: tokens, seed=1, steps=steps, long_documents=long_documents
    )


def on_h100(_: int) -> HardwareProfile:
    """Returns the profile of any number of ranks."""
    return H100


def test_long_documents_are_split_and_reported() -> None:
    assert fit([10, 4, 9, 3], 4) == (4, 4, 2, 4, 4, 4, 1, 3)
    cases, words = make_cases(from_file("split"), [2, 8], 8192, on_h100, "split", all_must_fit=True)
    assert [case.lengths for case in cases] == [(16384, 16384, 7232, 5), (40_000, 5)]
    assert [case.longest for case in cases] == [16384, 40_000]
    assert words[1] == "1 documents longer than 16,384 tokens, the maximum of 2 ranks, split"
    cases, words = make_cases(
        from_file("error"), [2, 8], 8192, on_h100, "error", all_must_fit=False
    )
    assert [case.ranks for case in cases] == [8]
    assert words[0].startswith("2 ranks are skipped: document 0 has 40000 tokens")
    cases, words = make_cases(from_file("drop"), [2], 8192, on_h100, "drop", all_must_fit=True)
    assert cases[0].lengths == (5,) and cases[0].longest == 5 and words[1].endswith("dropped")


def test_steps_are_drawn_from_a_file_as_training_draws_them() -> None:
    """1,000 different documents: no step repeats one before the epoch is over, and the same seed
    draws the same."""
    lengths = range(1, 1001)
    cases, words = make_cases(
        from_file("error", lengths, 100_000), [2], 8192, on_h100, "error", all_must_fit=True
    )
    assert words == []
    drawn = [length for case in cases for length in case.lengths]
    assert len(drawn) == len(set(drawn)) and {case.longest for case in cases} == {1000}
    assert all(
        100_000 <= sum(case.lengths) < 101_000 and list(case.lengths) != sorted(case.lengths)
        for case in cases
    )
    sampler = Sampler(np.array(lengths), global_tokens=100_000, seed=1, max_length=1000)
    assert cases[0].lengths == tuple(piece.length for piece in sampler.step(0)[0])
    more, _ = make_cases(
        from_file("error", lengths, 100_000, steps=9),
        [2],
        8192,
        on_h100,
        "error",
        all_must_fit=True,
    )
    assert more[:3] == cases


def test_steps_of_a_store_are_those_of_training(tmp_path: Path) -> None:
    """Documents without a target, such as those of a single token, are left out."""
    source = write_jsonl(
        tmp_path / "ids.jsonl", [{"input_ids": [1] * length} for length in (1, 7, 1, 9, 8, 1)]
    )
    prepare(open_corpus(str(source)), tmp_path / "store", tokenizer="bytes")
    (first, second), _ = store_source(tmp_path / "store", lambda ranks: 12, 3, 2, "split").draw(
        1, 100
    )
    steps = make_steps(Store.open(tmp_path / "store"), global_tokens=12, seed=3, max_length=100)
    pieces, cursor = steps.step(0)
    assert first == [piece.length for piece in pieces] and second == [
        piece.length for piece in steps.step(cursor)[0]
    ]
    assert 1 not in [*first, *second]


def test_a_file_with_fewer_tokens_than_a_step_is_one_step_and_reported() -> None:
    cases, words = make_cases(
        from_file("error", [7, 3, 5], 16), [2], 8192, on_h100, "error", all_must_fit=True
    )
    assert [case.lengths for case in cases] == [(7, 3, 5)]
    assert words == [
        "on 2 ranks all documents are one step: they have 15 tokens, fewer than 16 per step"
    ]
    cases, words = make_cases(
        from_file("error", [7, 3, 5], 15), [2], 8192, on_h100, "error", all_must_fit=True
    )
    assert [sorted(case.lengths) for case in cases] == [[3, 5, 7]] * 3 and words == []


@pytest.mark.parametrize(("mix", "degree"), [("wlb_128k", 8), ("magi_192k", 16), ("wikipedia", 64)])
def test_the_fixed_degree_of_a_mix_holds_documents_that_are_not_drawn(
    mix: str, degree: int
) -> None:
    """64 ranks hold 1,048,576 tokens: of wikipedia's longest documents that is what splitting
    leaves."""
    (case,), _ = make_cases(
        mix_source(mix, 16, 4, 0, 1), [64], 16384, on_h100, "split", all_must_fit=True
    )
    assert max(case.lengths) < case.longest
    assert compare_case(case, H100, ("fixed-static",))[0].winner == f"static:{degree}"


def test_a_named_degree_must_hold_the_longest_document_of_the_data_set() -> None:
    """Like all ranks, even if no step has it."""
    long = from_file("error", [100] * 1000 + [99_999], 500, steps=1)
    with pytest.raises(PlanError, match="document 1000 has 99999 tokens"):
        make_cases(long, [2], 8192, on_h100, "error", all_must_fit=True)
    source = from_file("error", [100] * 1000 + [30_000], 500, steps=1)
    with pytest.raises(
        PlanError,
        match=r"static:2 does not hold the longest document of 30,000 tokens.*use degree 4 or more",
    ):
        make_cases(source, [8], 8192, on_h100, "error", all_must_fit=True, fixed_degree=2)
    cases, words = make_cases(
        source, [8, 12, 16], 8192, on_h100, "error", all_must_fit=False, fixed_degree=8
    )
    assert [case.fixed_degree for case in cases] == [8, 8]
    assert words == [
        "12 ranks are skipped: static:8 on 12 ranks: the degree must divide the number of ranks"
    ]


def compare(*arguments: str) -> int:
    return main(["compare", *arguments])


def test_the_table_names_every_planner(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare("--mix", "wlb_128k", "--ranks", "4,8", "--documents", "24", "--steps", "1") == 0
    out = capsys.readouterr().out
    assert "1 step of documents drawn from the length mix wlb_128k, seed 0" in " ".join(out.split())
    fixed = out.index("speedup over fixed static (one degree for all steps), by ranks")
    assert fixed < out.index("speedup over the best static degree of every step, by ranks")
    titles = ("auto", "bins", "fixed static (", "best static", "bound for any plan")
    assert all(title in out for title in titles)
    assert "8 ranks: 24 documents" in out
    assert "remote tokens" in out


def test_json_and_csv_hold_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.csv"
    assert (
        compare(
            "--mix",
            "magi_192k",
            "--ranks",
            "8",
            "--documents",
            "16",
            "--steps",
            "2",
            "--json",
            "--csv",
            str(path),
        )
        == 0
    )
    data = json.loads(capsys.readouterr().out)
    assert len(data["rows"]) == 2 * len(PLANNERS) and len(data["means"]) == len(PLANNERS)
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert tuple(lines[0]) == COLUMNS
    assert [line["planner"] for line in lines] == [row["planner"] for row in data["rows"]]
    assert [float(line["makespan_s"] or 0) for line in lines] == [
        row["makespan_s"] or 0 for row in data["rows"]
    ]


MIX = ("--mix", "wlb_128k")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--mix", "wikipaedia"],
            "unknown length mix 'wikipaedia': choose one of magi_192k, wikipedia, wlb_128k",
        ),
        ([*MIX, "--documents", "0"], "documents is 0"),
        ([*MIX, "--steps", "0"], "--steps is 0"),
        ([*MIX, "--profile", "h900"], "no hardware profile 'h900'"),
        ([*MIX, "--tokens-per-rank", "0"], "tokens_per_rank is 0"),
        (
            [*MIX, "--global-tokens", "5"],
            "--global-tokens needs a file or store, but the lengths come from a",
        ),
        (
            [*MIX, "--ranks", "8", "--baseline", "static:3"],
            "static:3 on 8 ranks: the degree must divide",
        ),
        ([*MIX, "--ranks", "8", "--baseline", "static:1"], "use degree"),
        ([*MIX, "--csv", "missing/rows.csv"], "folder missing does not exist"),
        (
            [*MIX, "--ranks=2", "--documents=200", "--long-documents=error"],
            "2 ranks of 16384 tokens hold at most 32768",
        ),
        (["5\n", "--documents", "1"], "--documents needs a mix, but the lengths come from a file"),
        (["5\n", "--steps", "0"], "--steps is 0"),
        (
            ["5\n999999\n", "--ranks", "4"],
            "document 1 has 999999 tokens, but 4 ranks of 16384 tokens hold at most 65536",
        ),
        (["99999999\n"], "raise tokens_per_rank to 97658, use 6104 ranks, or split the document"),
        *(
            ([*MIX, f"--baseline={value}"], "is not static:DEGREE, as in static:8")
            for value in ("8", "static:", "static:0", "auto:8")
        ),
        *(([*MIX, f"--ranks={value}"], "--ranks") for value in ("", "8,x", "0", "8;64")),
    ],
)
def test_bad_requests_are_named(
    tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if arguments[0] != "--mix":
        (tmp_path / "lengths.txt").write_text(arguments[0])
        arguments = ["--lengths", str(tmp_path / "lengths.txt"), *arguments[1:]]
    try:
        status: object = compare(*arguments)
    except SystemExit as end:
        status = end.code
    captured = capsys.readouterr()
    assert status == 2 and message in captured.err and captured.out == ""
