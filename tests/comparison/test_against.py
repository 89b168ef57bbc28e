"""`longctx compare --against`: rows packed and dealt as TRL and accelerate do, times of every rank in
every micro-batch, memory, and what is printed."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from accelerate.data_loader import BatchSamplerShard
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler
from trl.data_utils import _pack_bfd, pack_dataset

from longctx.cli import main
from longctx.comparison import against
from longctx.comparison.against import (
    AgainstRow,
    Job,
    RankTimes,
    compare_with,
    packed,
    padded,
    row_of_times,
)
from longctx.comparison.against_table import (
    best_sentence,
    remarks,
    sentence,
    table_line,
    three_digits,
)
from longctx.comparison.baselines import plan_fixed_static, plan_placed
from longctx.comparison.mixes import load_mix, mix_names
from longctx.comparison.modelled import Case, compare_case
from longctx.comparison.room import Room
from longctx.comparison.ways import AUTO, Way, read_ways
from longctx.comparison.whole import (
    MAP_BATCH,
    StepShape,
    _beside_longest,
    deal,
    epochs,
    pack_as_trl,
    padded_ns,
    place_balanced,
    row_ns,
)
from longctx.config import load
from longctx.data.store.store import Store
from longctx.errors import UserError
from longctx.memory.fitting import RunMemory
from longctx.planning.check import check_plan
from longctx.planning.cost.model import NANOSECONDS, fixed_ns
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.plan import PlanError
from longctx.planning.planners.planner import make_plan
from tests.marks import examples

H100 = HardwareProfile.load("h100-nvlink-ib")
PRIMES = (2, 3, 5, 7, 11, 13, 17, 101, 251, 499, 997)
lengths_of_documents = st.lists(
    st.one_of(st.integers(1, 300), st.sampled_from(PRIMES)), min_size=1, max_size=60
)


def in_trl(lengths: list[int], row_tokens: int) -> list[list[tuple[int, int]]]:
    """Returns (document, tokens) of every row that TRL's code packs."""
    ids = pa.array([[document] * length for document, length in enumerate(lengths)])
    table = _pack_bfd(pa.table({"input_ids": ids}), row_tokens, on_seq_length_overflow="truncate")
    rows = []
    for row in table.to_pylist():
        first = np.cumsum([0, *row["seq_lengths"][:-1]])
        documents = [row["input_ids"][at] for at in first]
        rows.append(list(zip(documents, row["seq_lengths"], strict=True)))
    return rows


@settings(max_examples=examples(200), deadline=None)
@given(lengths_of_documents, st.sampled_from([1, 2, 31, 97, 100, 256, 1000]))
def test_rows_are_those_of_trl(lengths: list[int], row_tokens: int) -> None:
    """Documents longer than a row are cut, every other token is in one row once."""
    rows = pack_as_trl(lengths, row_tokens)
    of_documents = [[(each, min(lengths[each], row_tokens)) for each in row] for row in rows]
    assert of_documents == in_trl(lengths, row_tokens)
    assert sorted(document for row in rows for document in row) == list(range(len(lengths)))
    assert all(sum(tokens for _, tokens in row) <= row_tokens for row in of_documents)


def test_of_rows_with_equal_space_the_first_is_filled() -> None:
    assert pack_as_trl([6, 6, 3, 2, 4], 10) == [[0, 4], [1, 2], [3]]
    assert in_trl([6, 6, 3, 2, 4], 10) == [[(0, 6), (4, 4)], [(1, 6), (2, 3)], [(3, 2)]]


def test_as_many_documents_are_packed_together_as_datasets_maps_at_once() -> None:
    import datasets

    lengths = [(7 * number) % 50 + 1 for number in range(2 * MAP_BATCH + 1)]
    data = datasets.Dataset.from_dict({"input_ids": [[0] * length for length in lengths]})
    found = pack_dataset(data, 64, "bfd")["seq_lengths"]
    rows = pack_as_trl(lengths, 64)
    assert [[lengths[document] for document in row] for row in rows] == list(found)
    assert all(row[0] // MAP_BATCH == row[-1] // MAP_BATCH for row in rows)


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 60))
def test_batches_are_dealt_as_accelerate_deals_them(
    ranks: int, rows_per_rank: int, micro_batches: int, rows: int
) -> None:
    """Whole steps; the rest of an epoch, which accelerate fills with its first rows, is left out."""
    shape = StepShape(micro_batches, ranks, rows_per_rank)
    order = np.random.default_rng(rows).permutation(rows)
    dealt = deal(order, shape)
    assert len(dealt) == rows // shape.rows
    batches = BatchSampler(order.tolist(), rows_per_rank, drop_last=False)
    for rank in range(ranks):
        of_rank = list(BatchSamplerShard(batches, ranks, rank))
        mine = dealt[:, :, rank].reshape(-1, rows_per_rank).tolist()
        assert of_rank[: len(mine)] == mine


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 50), st.integers(1, 300))
def test_every_epoch_has_every_row_once(rows: int, fewest: int) -> None:
    order = epochs(rows, fewest, seed=0)
    assert fewest <= len(order) < fewest + rows and len(order) % rows == 0
    for first in range(0, len(order), rows):
        assert sorted(order[first : first + rows]) == list(range(rows))
    if rows > 9 and len(order) > rows:
        assert order[:rows].tolist() != order[rows : 2 * rows].tolist()


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.lists(st.integers(1, 5000), min_size=1, max_size=6), min_size=1, max_size=5))
def test_a_row_takes_the_time_of_its_documents_on_a_rank(rows: list[list[int]]) -> None:
    lengths = np.array([length for row in rows for length in row])
    last = np.cumsum([len(row) for row in rows])
    numbers = [list(range(stop - len(row), stop)) for row, stop in zip(rows, last, strict=True)]
    found = row_ns(H100, lengths, numbers)
    for row, time in zip(rows, found.tolist(), strict=True):
        alone = make_plan(row, ranks=1, tokens_per_rank=sum(row), profile=H100)
        assert time == round(alone.makespan_s * NANOSECONDS) - fixed_ns(H100, 1)


def test_padded_documents_take_the_time_of_the_longest() -> None:
    """Of one document a rank nothing is padded."""
    longest = np.array([[700, 31], [5, 8192]])
    three = padded_ns(H100, longest, 3)
    for at, length in np.ndenumerate(longest):
        (same,) = row_ns(H100, np.array([length] * 3), [[0, 1, 2]])
        assert three[at] == pytest.approx(same, abs=3)


@settings(max_examples=examples(80), deadline=None)
@given(lengths_of_documents, st.integers(1, 7), st.sampled_from([300, 997, 1024]))
def test_balanced_documents_are_whole_and_each_is_placed_once(
    lengths: list[int], ranks: int, tokens_per_rank: int
) -> None:
    lengths = [min(length, tokens_per_rank) for length in lengths]
    plan = plan_placed(
        "x", place_balanced, lengths, ranks=ranks, tokens_per_rank=tokens_per_rank, profile=H100
    )
    check_plan(plan)
    assert set(plan.degrees) == {1}
    assert all(plan.micro_batches)


def test_balanced_ranks_have_equal_work_not_equal_tokens() -> None:
    """Sixteen documents of 2,048 tokens are as many tokens as one of 32,768, and less work; one rank
    has the long one alone."""
    lengths = [32_768, *[2048] * 16, *[8192] * 6]
    plan = plan_placed("x", place_balanced, lengths, ranks=3, tokens_per_rank=65_536, profile=H100)
    assert len(plan.micro_batches) == 1
    (long_one,) = [p.first_rank for p in plan.micro_batches[0] if p.document == 0]
    with_it = [p.document for p in plan.micro_batches[0] if p.first_rank == long_one]
    assert with_it == [0]
    assert plan.idle_share < 0.12


def test_the_longest_documents_have_a_micro_batch_of_their_own_if_that_is_faster() -> None:
    """Spread evenly over the slots of two micro-batches, the short ones would wait for the long one
    in the first, and take as long again."""
    lengths = [65_536, *[4096] * 45]
    plan = plan_placed("x", place_balanced, lengths, ranks=3, tokens_per_rank=65_536, profile=H100)
    beside, after = plan.micro_batches
    assert (len(beside), len(after)) == (33, 13)
    alone = make_plan([65_536], ranks=1, tokens_per_rank=65_536, profile=H100)
    assert plan.makespan_s < 1.16 * alone.makespan_s, "1.26 times if spread"


def test_beside_the_longest_document_ranks_take_no_longer_and_no_more_tokens() -> None:
    time = np.array([10, 6, 5, 4, 3])
    few = np.ones_like(time)
    assert _beside_longest(time, few, 2, 9).tolist() == [0, 1, -1, 1, -1]
    tokens = np.array([1, 5, 4, 4, 3])
    assert _beside_longest(time, tokens, 2, 8).tolist() == [0, 1, -1, -1, 1]


def test_a_document_that_no_rank_holds_is_refused() -> None:
    with pytest.raises(
        PlanError, match=r"9,001 tokens fits on no rank of 9,000 tokens whole: rais"
    ):
        place_balanced(H100, np.array([5, 9001]), 4, 9000)


def test_under_ddp_ranks_meet_only_at_the_end_of_a_step() -> None:
    """Ranks 0 and 1 are slow in turn: meeting in each micro-batch costs both times."""
    s = NANOSECONDS
    times = RankTimes(
        steps=[np.array([[3 * s, s], [s, 2 * s]]), np.array([[5 * s, 5 * s]])],
        tokens=2_000_000,
        most_tokens=7,
        padding=500_000,
    )
    documents = documents_of((1,), tokens_per_rank=8)
    fixed = 2 * H100.step_s + 3 * H100.launch_s
    fsdp = row_of_times("w", "W", times, documents, meets=True)
    ddp = row_of_times("w", "W", times, documents, meets=False)
    assert fsdp.seconds_per_million == pytest.approx((fixed + 3 + 2 + 5) / 2)
    assert ddp.seconds_per_million == pytest.approx((fixed + 4 + 5) / 2)
    work = (4 + 3) / 2 + 5
    assert fsdp.waiting == pytest.approx((10 - work) / (fixed + 10))
    assert ddp.waiting == pytest.approx((9 - work) / (fixed + 9))
    assert (fsdp.padding, fsdp.micro_batches, fsdp.step_tokens) == (0.2, 1.5, 1_000_000)


def test_ranks_that_keep_all_weights_gather_none() -> None:
    """Launches and steps are those of whole weights under DDP, and of shared ones under FSDP2."""
    whole = replace(H100, launch_s=0.5, step_s=0.25)
    documents = documents_of((1,), tokens_per_rank=8, whole_profile=whole)
    times = RankTimes(steps=[np.array([[0, 0], [0, 0]])], tokens=1_000_000, most_tokens=7)
    fsdp = row_of_times("w", "W", times, documents, meets=True)
    ddp = row_of_times("w", "W", times, documents, meets=False)
    assert fsdp.seconds_per_million == pytest.approx(2 * H100.launch_s + H100.step_s)
    assert ddp.seconds_per_million == pytest.approx(2 * 0.5 + 0.25)


def test_a_mixture_whose_weights_are_gathered_waits_for_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Under DDP no micro-batch gathers them, so TRL's packing is faster there by more than the
    waits of ranks for each other."""
    given = ["--mix", "wlb_128k", "--ranks", "8", "--steps", "2", "--json"]
    assert main(["compare", *given, "--model", "qwen3-30b-a3b", "--against", "trl-packing"]) == 0
    rows = json.loads(capsys.readouterr().out)["against"]
    fsdp, ddp = rows[1:]
    assert (fsdp["sharing"], ddp["sharing"]) == ("FSDP2", "DDP")
    numbers = 30e9 * 7 / 8
    gathers_s = 2 * 2 * numbers / H100.intra_node_bytes_per_s
    seconds = [row["seconds_per_million"] * (1 - row["waiting"]) for row in (fsdp, ddp)]
    million = ddp["step_tokens"] / 1e6
    gathers_of_step = fsdp["micro_batches"] * gathers_s / million
    assert seconds[0] - seconds[1] == pytest.approx(gathers_of_step, rel=0.1)


def documents_of(*steps: tuple[int, ...], ranks: int = 2, **more: Any) -> Job:
    longest = max(max(step) for step in steps)
    given: dict[str, Any] = {"longest": longest, "tokens_per_rank": 1024}
    given |= {"profile": H100, "whole_profile": H100, **more}
    return Job(tuple(steps), ranks=ranks, **given)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 997), min_size=1, max_size=30), min_size=1, max_size=4),
    st.integers(1, 5),
    st.sampled_from([97, 500, 997, 2000]),
)
def test_steps_of_packed_rows_count_every_token_once(
    steps: list[list[int]], ranks: int, row_tokens: int
) -> None:
    """In whole epochs, whatever the rows are dealt to; steps have as many tokens as ours, as far as
    rows allow."""
    documents = documents_of(*map(tuple, steps), ranks=ranks)
    times, shape = packed(documents, row_tokens)
    lengths = np.minimum(documents.all, row_tokens)
    rows = pack_as_trl(lengths.tolist(), row_tokens)
    assert shape.rows_per_rank == max(1, 1024 // row_tokens)
    assert len(times.steps) * shape.rows == times.rows
    assert all(step.shape == (shape.micro_batches, ranks) for step in times.steps)
    whole, rest = divmod(times.rows, len(rows))
    least = whole * int(lengths.sum())
    assert least <= times.tokens <= least + (int(lengths.sum()) if rest else 0)
    mean = lengths.sum() / len(rows)
    of_micro_batch = mean * ranks * shape.rows_per_rank
    fewer = abs(of_micro_batch * shape.micro_batches - documents.step_tokens)
    assert fewer <= max(of_micro_batch / 2, of_micro_batch - documents.step_tokens) + 1
    spent = sum(int(step.sum()) for step in times.steps)
    once = int(row_ns(H100, lengths, rows).sum())
    assert whole * once <= spent <= (whole + bool(rest)) * once


def test_packed_and_padded_documents_of_their_own_are_the_same() -> None:
    """Rows of one document each: packing them or padding one document a rank is the same."""
    documents = documents_of((997,) * 6, (997,) * 6, tokens_per_rank=997)
    rows, shape = packed(documents, 997)
    alone, same = padded(documents, 1)
    assert shape == same == StepShape(3, 2, 1) and alone.padding == 0
    assert [step.tolist() for step in rows.steps] == [step.tolist() for step in alone.steps]
    four, _ = padded(documents_of((997, 1) * 8, tokens_per_rank=997), 4)
    assert four.padding / four.tokens > 0.5 and four.most_tokens == 4 * 997


def test_ways_take_the_times_of_their_plans() -> None:
    steps = [load_mix("wlb_128k").draw(40, seed) for seed in (0, 1)]
    documents = documents_of(*map(tuple, steps), ranks=8, longest=100_000, tokens_per_rank=16384)
    rows = compare_with(read_ways("cp:8,megatron,batch-rebalance,trl-packing"), documents)
    by_way = {row.way: row for row in rows}
    tokens = sum(map(sum, steps))
    request: dict[str, Any] = {"ranks": 8, "tokens_per_rank": 16384, "profile": H100}

    def per_million(seconds: list[float]) -> Any:
        return pytest.approx(sum(seconds) / tokens * 1e6, rel=1e-9)

    ours = [make_plan(step, **request).makespan_s for step in steps]
    fixed = [plan_fixed_static(step, **request, degree=8).makespan_s for step in steps]
    assert by_way["longctx"].seconds_per_million == per_million(ours)
    assert by_way["cp:8"].seconds_per_million == per_million(fixed)
    cases = [Case(tuple(step), 8, 16384, longest=100_000) for step in steps]
    free = [compare_case(case, H100, ("auto", "fixed-static"))[1].no_barrier_s for case in cases]
    assert by_way["megatron"].seconds_per_million == per_million([each or 0 for each in free])
    balanced = [
        plan_placed(
            "x", place_balanced, step, ranks=8, tokens_per_rank=100_000, profile=H100
        ).makespan_s
        for step in steps
    ]
    assert by_way["batch-rebalance"].seconds_per_million == per_million(balanced)
    assert by_way["longctx"].speedup == 1
    for row in rows:
        assert row.speedup == pytest.approx(
            (row.seconds_per_million or 0) / (rows[0].seconds_per_million or 1)
        )
    assert by_way["trl-packing:100000"].sharing == "DDP", "the last of the two"
    assert {row.sharing for row in rows} == {"", "FSDP2", "DDP"}


@pytest.mark.parametrize(
    ("steps", "ranks"),
    [([(7,)], 1), ([(7,)], 5), ([(997, 2), (3,)], 3), ([(4096,) * 3], 4), ([(1,) * 50] * 2, 2)],
)
def test_few_documents_and_one_rank_have_an_answer(
    steps: list[tuple[int, ...]], ranks: int
) -> None:
    documents = documents_of(*steps, ranks=ranks)
    rows = compare_with([*read_ways("auto"), Way("padding", 3)], documents)
    assert all(row.speedup is not None and row.speedup > 0 for row in rows)
    assert all(row.fits for row in rows), "memory is not known"
    if ranks == 1:
        trained = [row for row in rows if not row.padding]
        assert all(row.waiting == pytest.approx(0, abs=1e-9) for row in trained)


def test_tokens_that_trl_cuts_are_said_and_not_counted() -> None:
    documents = documents_of((3000, 500, 500), ranks=1, tokens_per_rank=4096)
    rows = compare_with([Way("trl-packing", 1000)], documents)
    assert "TRL cuts 1 document of more, 50.0% of all tokens are not trained" in rows[1].remark
    times, _ = packed(documents, 1000)
    assert times.tokens % 2000 == 0 and times.most_tokens <= 4 * 1000
    uncut = compare_with([Way("trl-packing")], documents)[1]
    assert "cuts" not in uncut.remark and uncut.way == "trl-packing:3000"


def test_a_way_without_a_plan_says_why() -> None:
    documents = documents_of((3000, 500), ranks=8)
    rows = compare_with([Way("cp", 2), Way("cp", 3), Way("cp", 4)], documents)
    assert [row.fits for row in rows] == [True, False, False, True]
    assert "static:2 does not hold the longest document of 3,000 tokens" in rows[1].remark
    assert "3 on 8 ranks: the degree must divide the number of ranks" in rows[2].remark
    assert table_line(rows[1])[1:] == ["–"] * 6
    assert "reasons are below" in sentence(rows[:2], "on your lengths")


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_memory_is_that_of_estimate(micro_batches: int) -> None:
    """A whole document of 131,072 tokens with every block recomputed, by its own settings."""
    room = Room.of("h100-nvlink-ib", None, 8)
    assert room is not None and room.available == 80_000_000_000
    settings_of_run = [
        "train.device=cuda",
        "train.recompute=full",
        "batch.tokens_per_rank=131072",
        f"batch.global_tokens={micro_batches * 8 * 131072}",
        "context.mode=static",
        "context.degree=1",
        "parallel.reduce_after=micro_batch",
        "data.max_length=131072",
        "model.preset=llama-3.1-8b",
        "model.vocab_size=128256",
    ]
    config = load(None, settings_of_run, world_size=8)
    peak = RunMemory(room.spec, None, 8, fused=True).peak(config).total
    assert room.of_whole(131_072, micro_batches, shards=True) == pytest.approx(peak, rel=1e-3)
    assert room.of_whole(131_072, 2, shards=False) > 1.5 * peak
    plan = make_plan([131_072], ranks=8, tokens_per_rank=16384, profile=H100)
    split = room.of_plans([plan])
    assert split < peak / 2
    whole = make_plan([1024] * 8, ranks=8, tokens_per_rank=1024, profile=H100)
    assert room.of_plans([whole]) == room.of_whole(1024, 1, shards=True)
    assert room.of_plans([plan], keeps_weights=True) > split
    other = Room.of("h100-nvlink-ib", "llama-3.2-1b", 8)
    assert other is not None and other.of_whole(131_072, 2, shards=True) < peak / 2


def row(way: str, speedup: float, needs: int | None = 10, **more: Any) -> AgainstRow:
    values: dict[str, Any] = {"seconds_per_million": 10 * speedup, "waiting": 0.5, "padding": 0.0}
    values |= {"most_tokens": 1_048_576, "least_bytes": needs, "available_bytes": 20}
    return AgainstRow(way, more.pop("title", way), 8, speedup=speedup, **{**values, **more})


def test_the_sentence_names_what_fits_and_doubts_what_does_not() -> None:
    ours = row("longctx", 1.0)
    fsdp = row("trl", 1.6, sharing="FSDP2", title="TRL's packing (FSDP2)")
    ddp = row("trl", 1.4, needs=30, sharing="DDP", title="TRL's packing (DDP)")
    assert sentence([ours, fsdp, ddp], "on your lengths") == (
        "longctx is 1.60 times as fast as TRL's packing (FSDP2) on your lengths, 8 GPUs, predicted."
    )
    no_room = replace(fsdp, least_bytes=21)
    assert sentence([ours, no_room, ddp, row("x", 1.1)], "on it") == (
        "longctx is 1.60 times as fast as TRL's packing (FSDP2) (which does not fit), 1.10 times as "
        "fast as x on it, 8 GPUs, predicted."
    )
    assert best_sentence([ours, no_room, row("x", 1.2), row("y", 1.1)], "on it").startswith(
        "longctx is 1.10 times as fast as y, the fastest other way that fits, on it"
    )
    assert best_sentence([ours, no_room], "on it").startswith("No other way fits 8 GPUs")
    assert table_line(no_room)[-1] == "0 (no)" and table_line(row("x", 1, None))[-1] == "?"


def test_figures_keep_three_digits() -> None:
    assert [three_digits(value) for value in (0.0123, 1.0, 16.0, 304.2, 98_765.4)] == [
        "0.0123",
        "1.00",
        "16.0",
        "304",
        "98,765",
    ]


def test_remarks_of_several_ways_are_said_once() -> None:
    rows = [row("a", 1, remark="x"), row("b", 1, remark="x"), row("c", 1), row("d", 1, remark="y")]
    assert remarks(rows) == ["a and b: x", "d: y"]


@pytest.mark.parametrize(
    ("text", "ways"),
    [
        ("trl-packing", [Way("trl-packing")]),
        ("cp:8, padding:4", [Way("cp", 8), Way("padding", 4)]),
        ("auto", [Way(kind) for kind in AUTO]),
        ("megatron,auto,megatron", [Way("megatron"), *(Way(k) for k in AUTO if k != "megatron")]),
    ],
)
def test_ways_are_read(text: str, ways: list[Way]) -> None:
    assert list(read_ways(text)) == ways


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "trl",
            "'trl' is no way to train that is known: give trl-packing[:ROW_TOKENS], batch-reba",
        ),
        ("", "'' is no way to train"),
        ("cp", "'cp' has no degree: write it as in cp:8"),
        ("cp:0", "'0' is not a whole number ≥ 1, as in cp:8"),
        ("padding:x", "'x' is not a whole number ≥ 1, as in padding:8"),
        ("megatron:2", "megatron takes no number: write megatron"),
    ],
)
def test_unknown_ways_are_named(text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        read_ways(text)
    assert message in str(error.value)


def compare(*arguments: str) -> int:
    return main(["compare", *arguments])


MANY = ("--against", "trl-packing,trl-packing:32768,padding:4,batch-rebalance,megatron,cp:4,cp:3")


def test_nothing_is_cut_at_80_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(map(str, load_mix("magi_192k").draw(300, 0))))
    csv_path = tmp_path / "rows.csv"
    given = ("--lengths", str(path), "--ranks", "16", "--steps", "2", *MANY)
    assert compare(*given, "--csv", str(csv_path)) == 0
    out = capsys.readouterr().out
    assert out.startswith("longctx is 1.") and "times as fast as TRL's packing (FSDP2)" in out
    assert "on your lengths, 16 GPUs, predicted." in " ".join(out.split())
    assert all(len(line) <= 80 for line in out.splitlines()) and "…" not in out
    assert "3 on 16 ranks: the degree must divide the number of ranks" in " ".join(out.split())
    assert compare(*given, "--json") == 0
    rows = json.loads(capsys.readouterr().out)["against"]
    with csv_path.open(newline="") as file:
        written = list(csv.DictReader(file))
    assert [line["way"] for line in written] == [each["way"] for each in rows]
    assert len(rows) == 1 + 2 + 2 + 5 and rows[0]["way"] == "longctx" and rows[0]["fits"]
    assert [line["title"] for line in written if f"{line['title'][:20]}" not in out] == []


def test_steps_have_a_row_of_the_longest_document_for_each_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By default, of files and mixes; --global-tokens is what the user says."""
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(["9000", *["50"] * 4000]))
    given = ("--lengths", str(path), "--ranks", "8", "--tokens-per-rank", "1500", "--json")
    against_trl = ("--against", "trl-packing", "--steps", "3")

    def step_tokens(*more: str) -> list[float]:
        assert compare(*given, *against_trl, *more) == 0
        return [each["step_tokens"] for each in json.loads(capsys.readouterr().out)["against"]]

    ours, *packed_rows = step_tokens()
    assert ours == pytest.approx(8 * 9000, rel=0.1), "not 8 × 4 × 1500"
    assert packed_rows == pytest.approx([ours] * 2, rel=0.3)
    assert step_tokens("--global-tokens", "9500")[0] < 20_000
    assert compare("--mix", "magi_192k", "--ranks", "2", "--json", *against_trl) == 0
    ours, trl, _ = (each["step_tokens"] for each in json.loads(capsys.readouterr().out)["against"])
    assert ours == pytest.approx(2 * 65_536, rel=0.4) and trl == pytest.approx(ours, rel=0.4)


def test_rows_of_a_store_hold_its_longest_document(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    longest = int(Store.open(store).lengths.max())
    given = ("--lengths", str(store), "--ranks", "2", "--tokens-per-rank", str(longest), "--json")
    assert compare(*given, "--against", "trl-packing", "--steps", "2") == 0
    rows = json.loads(capsys.readouterr().out)["against"]
    assert [each["way"] for each in rows][1:] == [f"trl-packing:{longest}"] * 2
    assert rows[0]["step_tokens"] > 0.9 * 8 * longest


@pytest.mark.parametrize("name", mix_names())
def test_the_mean_of_a_mix_is_that_of_its_documents(name: str) -> None:
    mix = load_mix(name)
    assert mix.mean == pytest.approx(np.mean(mix.draw(200_000, 0)), rel=0.05)


def test_a_baseline_beside_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--mix", "wikipedia", "--against", "megatron", "--baseline", "static:8")
    assert compare(*given) == 2
    assert "does not go with --against: write --against cp:8" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        compare("--mix", "wikipedia", "--against", "fsdp")
    assert "'fsdp' is no way to train that is known: give" in capsys.readouterr().err


def test_many_rows_are_dealt_in_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(against, "DEALT_ROWS", 40)
    times, shape = packed(documents_of((500,) * 12, tokens_per_rank=1000), 1000)
    assert shape == StepShape(3, 2, 1) and len(times.steps) == 6
