"""`longctx compare`: its numbers against plans made by hand, its page, CSV and JSON, and what it says about bad input."""

import csv
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from longctx.cli import main
from longctx.planning.bound import tight_bound_s
from longctx.planning.mixes import load_mix
from longctx.planning.planner import make_plan
from longctx.planning.profile import HardwareProfile
from longctx.report.compare import COLUMNS, PLANNERS, Case, Row, compare_case, cut, mean_rows, static_curve
from longctx.report.compare_steps import list_source, make_cases, sweeps

H100 = HardwareProfile.load("h100-nvlink-ib")
LENGTHS = tuple(load_mix("wlb_128k").draw(64, seed=0))


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    return {row.planner: row for row in compare_case(Case(LENGTHS, 16, 16384), H100, kv_bytes=100).rows}


def test_every_planner_has_a_row_on_the_same_documents(rows: dict[str, Row]) -> None:
    assert tuple(rows) == PLANNERS
    for row in rows.values():
        assert (row.documents, row.tokens, row.longest) == (64, sum(LENGTHS), max(LENGTHS))
        assert (row.makespan_s is None) == bool(row.note)


def test_numbers_are_those_of_the_plans(rows: dict[str, Row]) -> None:
    request = {"ranks": 16, "tokens_per_rank": 16384, "profile": H100}
    for planner in ("auto", "bins", "static"):
        plan = make_plan(LENGTHS, **request, mode=planner)
        row = rows[planner]
        assert (row.makespan_s, row.lower_bound_s, row.gap) == (plan.makespan_s, plan.lower_bound_s, plan.gap)
        assert row.idle_share == pytest.approx(plan.idle_share, abs=1e-9)
        assert row.micro_batches == len(plan.micro_batches)
        slots = len(plan.micro_batches) * 16 * 16384
        assert row.padding_share == pytest.approx(1 - sum(LENGTHS) / slots)
        layouts = [plan.layout(k, rank) for k in range(len(plan.micro_batches)) for rank in range(16)]
        assert row.most_tokens == max(lay.tokens for lay in layouts)
        assert row.remote_tokens == max(sum(s.length - s.tokens for s in lay.shards if s.degree > 1) for lay in layouts)
        assert row.remote_kv_bytes == 100 * row.remote_tokens
        assert row.tight_bound_s == tight_bound_s(plan)
        assert row.unavoidable_gap == row.tight_bound_s / plan.lower_bound_s - 1 >= 0
    assert rows["static"].speedup == 1
    static, auto = rows["static"].makespan_s, rows["auto"].makespan_s
    assert static is not None and auto is not None and rows["auto"].speedup == static / auto >= 1


def test_shares_add_up_to_the_step(rows: dict[str, Row]) -> None:
    for row in rows.values():
        if not row.note:
            shares = (row.work_share, row.exchange_share, row.idle_share, row.fixed_share)
            assert all(share is not None and share >= -1e-12 for share in shares)
            assert sum(share or 0 for share in shares) == pytest.approx(1)


def test_the_curve_holds_the_degrees_that_fit() -> None:
    curve = dict(static_curve(Case((40_000, 100), 6, 8192), H100))
    assert {degree for degree, seconds in curve.items() if seconds is None} == {1, 2, 3, 4}
    assert curve[6] == make_plan((40_000, 100), ranks=6, tokens_per_rank=8192, profile=H100, mode="static", degree=6).makespan_s


def test_the_best_static_degree_is_sought_among_all() -> None:
    """Two documents that just fit 40 of 80 ranks each: no power of two does as well, nor three times one."""
    row = compare_case(Case((40 * 4096, 40 * 4096, 500), 80, 4100), H100, ("static",)).rows[0]
    assert row.winner == "static:40"


def test_no_row_is_faster_than_the_tight_bound(rows: dict[str, Row]) -> None:
    for row in rows.values():
        if row.makespan_s is not None:
            assert row.tight_bound_s is not None and row.lower_bound_s is not None
            assert row.lower_bound_s <= row.tight_bound_s <= row.makespan_s


def test_what_a_baseline_cannot_hold_is_a_note_and_not_an_error() -> None:
    outcome = compare_case(Case((6 * 4096,), 6, 4096), H100, ("auto", "static", "flexsp", "plain-static"))
    rows = {row.planner: row for row in outcome.rows}
    assert "largest degree here is 4" in rows["flexsp"].note and rows["flexsp"].speedup is None
    assert rows["static"].winner == "static:6" and rows["auto"].speedup is not None
    assert mean_rows([rows["flexsp"], rows["flexsp"]])[0].note == rows["flexsp"].note


def test_means_are_means(rows: dict[str, Row]) -> None:
    auto = rows["auto"]
    assert auto.makespan_s is not None and auto.speedup is not None
    more = {"most_tokens": 99_999, "remote_tokens": 0, "remote_kv_bytes": None}
    other = replace(auto, seed=1, makespan_s=3 * auto.makespan_s, speedup=4 * auto.speedup, documents=66, **more)
    mean = mean_rows([auto, other])
    assert len(mean) == 1
    assert mean[0].makespan_s == pytest.approx(2 * auto.makespan_s)
    assert mean[0].speedup == pytest.approx(2 * auto.speedup)
    assert mean[0].documents == 65
    assert (mean[0].most_tokens, mean[0].remote_tokens) == (99_999, auto.remote_tokens), "memory must hold the most"
    assert mean[0].remote_kv_bytes == auto.remote_kv_bytes


def test_long_documents_are_cut_and_it_is_said() -> None:
    assert cut([10, 4, 9, 3], 4) == (4, 4, 2, 4, 4, 4, 1, 3)
    source = list_source([40_000, 5], "two")
    cases, words = make_cases(source, [2, 8], 8192, H100, "split", all_must_fit=True)
    assert [case.lengths for case in cases] == [(16384, 16384, 7232, 5), (40_000, 5)]
    assert words == ["1 longer than 16,384 tokens, more than 2 ranks hold, split into pieces"]
    cases, words = make_cases(source, [2, 8], 8192, H100, "error", all_must_fit=False)
    assert [case.ranks for case in cases] == [8]
    assert words[0].startswith("2 ranks are left out: document 0 has 40000 tokens")
    cases, words = make_cases(source, [2], 8192, H100, "drop", all_must_fit=True)
    assert cases[0].lengths == (5,) and words[0].endswith("left out")
    varied = sweeps(cases, [4096], [3])
    assert [(case.sweep, case.tokens_per_rank, case.lengths) for case in varied] == [
        ("budget", 4096, (5,)),
        ("longest", 8192, (3, 2)),
    ]


def compare(*arguments: str) -> int:
    return main(["compare", *arguments])


def test_the_table_names_every_planner(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare("--mix", "wlb_128k", "--ranks", "4,8", "--documents", "24", "--steps", "1") == 0
    out = capsys.readouterr().out
    assert "documents drawn from the length mix wlb_128k, seed 0" in out
    for title in (
        "auto",
        "bins",
        "best static",
        "plain static",
        "Megatron dev",
        "FlexSP-like",
        "ByteScale-like",
        "no plan can pass",
    ):
        assert title in out
    assert "8 ranks: 24 documents" in out
    assert "tokens of others" in out and "K and V" not in out and "GiB" not in out


def test_a_model_gives_the_bytes_of_gathered_keys(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The 8b preset has 8 heads of 128 for K and for V: 4,096 bytes a token and layer in bfloat16."""
    page = tmp_path / "page.html"
    request = ("--mix", "wlb_128k", "--ranks", "8", "--tokens-per-rank", "4096", "--documents", "24", "--model", "8b")
    assert compare(*request, "--steps", "1", "--json") == 0
    means = json.loads(capsys.readouterr().out)["means"]
    held = {row["planner"]: row["remote_kv_bytes"] for row in means if not row["note"]}
    assert held == {row["planner"]: 4096 * row["remote_tokens"] for row in means if not row["note"]}
    assert held["static"] > 0
    assert compare(*request, "--steps", "1", "--html", str(page)) == 0
    shown = f"{held['static'] / 2**30:.2f} GiB"
    assert "their K and V" in (out := capsys.readouterr().out) and shown in out
    parsed = Page()
    parsed.feed(page.read_text(encoding="utf-8"))
    assert shown in parsed.text and "one layer of the preset 8b, in bfloat16" in parsed.text


def test_json_and_csv_hold_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.csv"
    assert compare("--mix", "magi_192k", "--ranks", "8", "--documents", "16", "--steps", "2", "--json", "--csv", str(path)) == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data["rows"]) == 2 * len(PLANNERS) and len(data["means"]) == len(PLANNERS)
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert tuple(lines[0]) == COLUMNS
    assert [line["planner"] for line in lines] == [row["planner"] for row in data["rows"]]
    assert [float(line["makespan_s"] or 0) for line in lines] == [row["makespan_s"] or 0 for row in data["rows"]]


class Page(HTMLParser):
    """Collects what a browser would fetch, and the texts."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [value or "" for name, value in attributes if name in ("src", "href", "srcset", "data", "poster")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_whole_small_and_asks_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = tmp_path / "lengths <b>.txt"
    lengths.write_text("\n".join(map(str, LENGTHS[:32])))
    page = tmp_path / "page.html"
    assert compare("--lengths", str(lengths), "--ranks", "8,16", "--html", str(page)) == 0
    content = page.read_text(encoding="utf-8")
    assert len(content) < 2_000_000
    parsed = Page()
    parsed.feed(content)
    assert len(parsed.fetched) == parsed.tags.count("img") >= 9
    assert all(re.match(r"data:image/(png|svg\+xml);base64,", address) for address in parsed.fetched)
    assert not {"script", "link", "iframe", "object"} & set(parsed.tags)
    assert "@import" not in content and "url(" not in content
    assert "lengths <b>.txt" in parsed.text, "names are escaped"
    assert parsed.tags.count("figcaption") == parsed.tags.count("figure") == parsed.tags.count("img")
    auto = make_plan(LENGTHS[:32], ranks=16, tokens_per_rank=16384, profile=H100)
    assert f"{auto.makespan_s:.3g} s" in parsed.text
    assert f"no plan can pass{tight_bound_s(auto):.3g} s" in parsed.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mix", "wikipaedia"], "no length mix 'wikipaedia': choose one of magi_192k, wikipedia, wlb_128k"),
        (["--mix", "wlb_128k", "--documents", "0"], "documents is 0"),
        (["--mix", "wlb_128k", "--steps", "0"], "--steps is 0"),
        (["--mix", "wlb_128k", "--profile", "h900"], "no hardware profile 'h900'"),
        (["--mix", "wlb_128k", "--tokens-per-rank", "0"], "tokens_per_rank is 0"),
        (["--mix", "wlb_128k", "--global-tokens", "5"], "--global-tokens belongs to a store, and this is a mix"),
        (["--mix", "wlb_128k", "--html", "missing/page.html"], "there is no folder missing"),
        (["--measure", "run.yaml", "--model", "8b"], "--model does not go with --measure"),
        (
            ["--mix", "wlb_128k", "--ranks", "2", "--documents", "200", "--long-documents", "error"],
            "2 ranks of 16384 hold at most 32768",
        ),
    ],
)
def test_bad_requests_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(*arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "more", "message"),
    [
        ("", [], "holds no lengths"),
        ("5\n7.5\n", [], "line 2: '7.5' is not a length"),
        ("5\n", ["--seed", "1"], "--seed belongs to a mix or a store, and this is a file"),
        ("5\n999999\n", ["--ranks", "4"], "document 1 has 999999 tokens: 4 ranks of 16384 hold at most 65536"),
        ("99999999\n", [], "raise tokens_per_rank to 97658, take 6104 ranks, or split the document"),
    ],
)
def test_bad_lengths_are_named(
    tmp_path: Path, text: str, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.txt"
    path.write_text(text)
    assert compare("--lengths", str(path), *more) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("broken", [{"overlap": None}, {"linear_s_per_token": 0}, {"inter_node_bytes_per_s": -1.0}])
def test_bad_profiles_are_named(tmp_path: Path, broken: dict[str, object], capsys: pytest.CaptureFixture[str]) -> None:
    values = {**H100.to_dict(), **broken}
    values = {name: value for name, value in values.items() if value is not None}
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(values))
    assert compare("--mix", "wlb_128k", "--profile", str(path)) == 2
    assert next(iter(broken)) in capsys.readouterr().err


@pytest.mark.parametrize("ranks", ["", "8,x", "0", "8;64"])
def test_malformed_ranks_are_refused(ranks: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare("--mix", "wlb_128k", f"--ranks={ranks}")
    assert "--ranks" in capsys.readouterr().err


def test_a_store_gives_the_steps_that_training_would_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(12):
        (texts / f"{i}.txt").write_text("word " * (10 + 40 * i))
    store = tmp_path / "store"
    assert main(["prepare", "--source", str(texts), "--out", str(store), "--tokenizer", "bytes"]) == 0
    capsys.readouterr()
    settings = ["--ranks", "2", "--tokens-per-rank", "400", "--global-tokens", "3000", "--steps", "1"]
    assert compare("--lengths", str(store), *settings, "--json") == 0
    row = json.loads(capsys.readouterr().out)["rows"][0]
    assert 3000 <= row["tokens"] < 3800
    assert main(["plan", "--lengths", str(store), *settings[:-2], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["makespan_s"] == row["makespan_s"]
