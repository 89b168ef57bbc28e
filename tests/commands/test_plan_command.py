"""`longctx plan` from the command line: drawing, JSON, picture, stores, and what it says about bad
input."""

import contextlib
import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from longctx.cli import main
from longctx.comparison.mixes import load_mix
from longctx.comparison.steps import file_source
from longctx.config import load
from longctx.planning.cost.bounds import tight_bound_s
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.pipeline import Pipeline
from longctx.planning.plan import Plan, PlanError
from longctx.planning.planners.bins import derived_bins
from longctx.planning.planners.planner import make_plan
from longctx.plots.terminal import MOST_ROWS, draw_plan
from longctx.training.described import sharded_preset_profile

H100 = HardwareProfile.load("h100-nvlink-ib")
ON_FOUR = sharded_preset_profile("h100-nvlink-ib", None, domain=4, tokens_per_rank=8192).profile


LENGTHS = [30000, 500, 700, 12000, 40]


def flat(capsys: pytest.CaptureFixture[str]) -> str:
    """Returns what was printed as one line, however the terminal broke it."""
    return " ".join(capsys.readouterr().out.split())


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.txt"
    path.write_text("\ufeff30000\n\n500\n 700 \n12000\n40\n")
    return path


def drawn(made: Plan, width: int) -> list[str]:
    """Returns the lines of a drawing for a terminal of that width."""
    console = Console(width=width)
    with console.capture() as captured:
        draw_plan(made, console)
    return captured.get().splitlines()


def plan(lengths: Path, *more: str, ranks: int = 4, tokens: int = 8192) -> int:
    return main(
        [
            "plan",
            "--lengths",
            str(lengths),
            "--ranks",
            str(ranks),
            "--tokens-per-rank",
            str(tokens),
            *more,
        ]
    )


def test_json_is_the_plan(lengths: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(lengths, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    made = make_plan(LENGTHS, ranks=4, tokens_per_rank=8192, profile=ON_FOUR)
    assert data.pop("planning_ms") > 0
    assert made.lower_bound_s <= data.pop("tight_bound_s") == tight_bound_s(made) <= made.makespan_s
    expected = made.to_json()
    del expected["planning_ms"]
    assert data == expected
    assert data["hash"] == made.hash


def test_drawing_shows_rings_across_ranks(
    lengths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(lengths, "--mode", "static", "--degree", "4") == 0
    out = capsys.readouterr().out
    assert "static → static:4" in out
    assert "gap" in out
    rows = [line for line in out.splitlines() if line.startswith("rank ")]
    assert len(rows) == 4
    assert all("▏0═══" in row and "▏3═══" in row for row in rows)
    assert "as fast as" not in out, "it is static itself"


def best_single(lengths: list[int]) -> Plan:
    """The fastest of the plans with one degree for all documents, on 4 ranks."""
    plans = []
    for degree in (1, 2, 3, 4):
        with contextlib.suppress(PlanError):
            plans.append(
                make_plan(
                    lengths,
                    ranks=4,
                    tokens_per_rank=8192,
                    profile=ON_FOUR,
                    mode="static",
                    degree=degree,
                )
            )
    return min(plans, key=lambda plan: plan.makespan_s)


def test_the_gain_over_the_best_single_degree_is_said_first(
    lengths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths.write_text("\n".join(map(str, LENGTHS * 4)))
    assert plan(lengths, "--global-tokens", "1000000") == 0
    made = make_plan(LENGTHS * 4, ranks=4, tokens_per_rank=8192, profile=ON_FOUR)
    out = flat(capsys)
    assert ("no plan takes less than" in out) == (tight_bound_s(made) > 1.0005 * made.lower_bound_s)
    single = best_single(LENGTHS * 4)
    speedup = f"{single.makespan_s / made.makespan_s:.2f}×"
    assert (
        f"{speedup} as fast as the best single degree: {single.winner.removeprefix('static:')} for "
        f"every document takes {single.makespan_s:.4g} s" in out
    )


def test_no_two_documents_have_the_same_sign() -> None:
    """200 documents on 8 ranks: every number on a row is of a document that the rank holds, and is
    there once."""
    made = make_plan([6000, 3000, 30_000, 900] * 50, ranks=8, tokens_per_rank=16384, profile=H100)
    rows = [line for line in drawn(made, 4000) if line.startswith("rank ")]
    ranks: dict[int, list[int]] = {}
    for rank, row in enumerate(rows):
        for number, line in re.findall("▏([0-9]+)([═─]?)", row):
            ranks.setdefault(int(number), []).append(rank)
            assert line != "─" or ranks[int(number)] == [rank]
    placed = {p.document: list(p.ring) for placements in made.micro_batches for p in placements}
    assert {document: placed[document] for document in ranks} == ranks
    assert len(ranks) > 100


def test_drawings_fit_the_terminal() -> None:
    """Numbers are written whole or not at all, and many ranks are grouped."""
    made = make_plan([500] * 300, ranks=2, tokens_per_rank=16384, profile=H100)
    rows = [line for line in drawn(made, 60) if line.startswith("rank ")]
    assert all(re.fullmatch("rank [01] [ │▏─·]+", row) for row in rows)
    lines = drawn(make_plan([20000, 3000] * 50, ranks=100, tokens_per_rank=8192, profile=H100), 60)
    rows = [line for line in lines if line.strip().startswith("rank ")]
    assert len(rows) == 25 <= MOST_ROWS
    assert max(map(len, lines)) <= 60


def test_a_picture_says_what_it_shows(
    lengths: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make_plan(LENGTHS, ranks=4, tokens_per_rank=8192, profile=ON_FOUR)
    single = best_single(LENGTHS)
    degree = single.winner.removeprefix("static:")
    picture = tmp_path / "plan.png"
    assert plan(lengths, "--png", str(picture)) == 0
    with Image.open(picture) as image:
        shown = json.loads(image.info["Description"])
    assert [panel["plan"] for panel in shown["panels"]] == [single.hash, made.hash], (
        "the baseline stands above"
    )
    assert shown["speedup"] == f"{single.makespan_s / made.makespan_s:.2f}×"
    baseline = f"The best single degree, {degree} for all: {single.makespan_s:.3g} s"
    assert shown["panels"][0]["name"] == baseline
    assert plan(lengths, "--png", str(tmp_path / "plan.svg")) == 0
    assert b"<svg" in (tmp_path / "plan.svg").read_bytes()
    assert plan(lengths, "--mode", "static", "--png", str(picture)) == 0
    with Image.open(picture) as image:
        assert len(json.loads(image.info["Description"])["panels"]) == 1


def test_a_mix_needs_no_data(capsys: pytest.CaptureFixture[str]) -> None:
    request = ["plan", "--mix", "wlb_128k", "--ranks", "8", "--tokens-per-rank", "16384", "--json"]
    assert main(request) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["lengths"] == load_mix("wlb_128k").draw(32, seed=0)
    assert main([*request, "--documents", "5", "--seed", "3"]) == 0
    assert json.loads(capsys.readouterr().out)["lengths"] == load_mix("wlb_128k").draw(5, seed=3)
    assert main([*request, "--global-tokens", "100"]) == 2
    assert (
        "--global-tokens needs a file or store, but the lengths come from a mix"
        in capsys.readouterr().err
    )


def test_a_step_is_drawn_from_a_file_as_compare_draws_it(
    lengths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of many documents is no step: its plan would say little of training."""
    known = [12000, *[900] * 20, *[300] * 400]
    lengths.write_text("\n".join(map(str, known)))
    sized = ["--global-tokens", "40000", "--seed", "2", "--json"]
    assert plan(lengths, *sized) == 0
    step = json.loads(capsys.readouterr().out)["lengths"]
    source = file_source(known, "", lambda _: 40000, seed=2, steps=1, long_documents="error")
    (drawn,) = source.draw(4, 32768).lengths
    assert step == drawn and 40000 <= sum(step) < 40000 + 12000 and step != known[: len(step)]
    assert plan(lengths, "--global-tokens", "40000") == 0
    assert "1 step of the 421 documents of " in flat(capsys)
    assert plan(lengths, "--global-tokens", "1000000") == 0
    assert "as one step" in flat(capsys)
    lengths.write_text("99999\n" + "5\n" * 100_000)
    assert plan(lengths, "--global-tokens", "100") == 2, "whether or not it is drawn"
    assert "document 0 has 99999 tokens, but 4 ranks of 8192" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "more", "message"),
    [
        ("", [], "has no lengths"),
        ("5\nseven\n", [], "line 2: 'seven' is not a length"),
        ("5\n\n7.5\n", [], "line 3: '7.5'"),
        ("0\n", [], "line 1: '0'"),
        ("99999\n", [], "document 0 has 99999 tokens, but 4 ranks of 8192"),
        ("\xff\xfe\0", [], "is not a text file"),
        (None, [], "not found: give a file with one length per line, or a store"),
        ("5\n", ["--profile", "h900"], "no hardware profile 'h900'"),
        ("5\n", ["--degree", "2"], "degree is 2, but mode is auto"),
        ("500\n", ["--mode", "bins", "--bins", "100:1"], "the bins end at 100"),
        *(
            ("5\n", ["--mode", "bins", f"--bins={bins}"], "--bins")
            for bins in ("", "8192", "8192:x", "a:1", "1:1,1:2", "-4:1")
        ),
        (
            "5\n",
            ["--pipeline-chunks", "2"],
            "several chunks need a pipeline of 2 or more ranks; use 1 chunk, or 2 or more",
        ),
        ("5\n", ["--documents", "1"], "--documents needs a mix"),
        ("5\n", ["--png", "missing/plan.png"], "missing/plan.png cannot be written"),
        ("5\n", ["--png", "plan.doc"], "plan.doc: the file name must end in one of .png"),
    ],
)
def test_bad_requests_are_named(
    tmp_path: Path,
    text: str | None,
    more: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if text is not None:
        (tmp_path / "bad.txt").write_text(text, "latin-1")
    try:
        status: object = plan(tmp_path / "bad.txt", *more)
    except SystemExit as end:
        status = end.code
    captured = capsys.readouterr()
    assert status == 2 and message in captured.err and captured.out == ""


def test_the_bins_of_a_plan_can_be_pasted_into_settings(
    lengths: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(lengths, "--mode", "bins") == 0
    out = capsys.readouterr().out
    run = tmp_path / "run.yaml"
    run.write_text(out[out.index("context:") :])
    context = load(run, ["batch.tokens_per_rank=8192", f"data.store={tmp_path}"]).context
    assert context.mode == "bins" and context.bins == derived_bins(H100, 4, 8192)
    given = ",".join(f"{longest}:{degree}" for longest, degree in context.bins.items())
    assert plan(lengths, "--mode", "bins", "--json") == 0
    derived = json.loads(capsys.readouterr().out)
    assert plan(lengths, "--mode", "bins", "--bins", given, "--json") == 0
    assert json.loads(capsys.readouterr().out)["hash"] == derived["hash"]


def test_json_has_the_bins_of_a_plan_of_bins_alone(
    lengths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bins = {600: 1, 12000: 2, 20000: 3, 40000: 4}
    assert plan(lengths, "--mode", "bins", "--bins", "600:1,12000:2,20000:3,40000:4", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    made = make_plan(
        LENGTHS, ranks=4, tokens_per_rank=8192, profile=ON_FOUR, mode="bins", bins=bins
    )
    assert data["hash"] == made.hash and data["bins"] == {
        str(longest): degree for longest, degree in bins.items()
    }
    assert plan(lengths, "--json") == 0
    assert "bins" not in json.loads(capsys.readouterr().out)


def test_bins_hold_what_only_an_odd_degree_can(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """18 tokens fit 6 ranks of 3, but the last bin of the derived table ends before."""
    path, planned = tmp_path / "odd.txt", []
    for length in range(1, 19):
        path.write_text(f"{length}\n")
        if plan(path, "--mode", "bins", "--json", ranks=6, tokens=3) == 0:
            planned.append(length)
            assert len(json.loads(capsys.readouterr().out)["lengths"]) == 1
    assert planned == [*range(1, 17), 18], "17 tokens are 2 shards of 4 on any degree"


def test_a_plan_in_a_pipeline(lengths: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline = ["--pipeline-ranks", "4", "--pipeline-chunks", "2"]
    assert plan(lengths, *pipeline) == 0
    assert "pipeline of 4 ranks × 2 chunks   bubble " in capsys.readouterr().out
    assert plan(lengths, *pipeline, "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert made["pipeline"] == asdict(Pipeline(4, 2))
    assert made["bubble_share"] > 0


def test_a_store_gives_the_documents_of_one_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(12):
        (texts / f"{i}.txt").write_text("word " * (10 + 40 * i))
    store = tmp_path / "store"
    assert (
        main(["prepare", "--source", str(texts), "--out", str(store), "--tokenizer", "bytes"]) == 0
    )
    capsys.readouterr()
    assert plan(store, "--json", "--global-tokens", "3000", ranks=2, tokens=400) == 0
    data = json.loads(capsys.readouterr().out)
    assert 3000 <= sum(data["lengths"]) < 3800
    assert max(data["lengths"]) <= 800
    assert plan(store, "--json", "--global-tokens", "3000", ranks=2, tokens=401) == 0
    assert json.loads(capsys.readouterr().out)["lengths"] == data["lengths"], (
        "an odd token holds nothing of a ring"
    )
    assert plan(store, ranks=2, tokens=400) == 0
    assert "the first step of" in capsys.readouterr().out
    settings = [
        "--ranks",
        "2",
        "--tokens-per-rank",
        "400",
        "--global-tokens",
        "3000",
        "--steps",
        "1",
        "--json",
    ]
    assert main(["compare", "--lengths", str(store), *settings]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["makespan_s"] == data["makespan_s"]
