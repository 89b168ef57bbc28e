"""Measured profiles: fits recover known constants, and the command writes a profile that planning reads."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.calibration.communication import Nodes
from longctx.calibration.computation import no_attention
from longctx.calibration.fit import (
    AttentionTime,
    OverlapTime,
    fit_attention,
    fit_line,
    fit_overlap,
)
from longctx.calibration.profiled_run import layout_of
from longctx.cli import main
from longctx.model.decoder import Decoder
from longctx.model.presets import ModelShape
from longctx.planning.cost.model import NANOSECONDS, attention_ns, efficiency
from longctx.planning.cost.work import kv_bytes_per_token
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.layout import Placement
from longctx.planning.planners.planner import make_plan
from tests import calibration_cases, launched
from tests.calibration_cases import TINY
from tests.marks import examples
from tests.test_plan_properties import profiles
from tests.workers import Workers

H100 = HardwareProfile.load("h100-nvlink-ib")
amounts = st.floats(1e-3, 1e3)


@given(
    st.just(0.0) | st.floats(1e-3, 1),
    st.floats(1e-6, 1e-3),
    st.lists(st.integers(1, 100_000), min_size=3, max_size=6, unique=True),
)
def test_a_line_is_found(intercept: float, slope: float, counts: list[int]) -> None:
    counts = [0, *counts] if intercept else counts
    seconds = [intercept + slope * count for count in counts]
    line = fit_line(counts, seconds)
    assert line.residual < 1e-6
    assert [line.intercept + line.slope * count for count in counts] == pytest.approx(seconds, rel=1e-5)


def test_a_line_of_noise_still_rises() -> None:
    line = fit_line([100, 200, 400], [3.0, 2.0, 1.0])
    assert (line.intercept, line.slope) == (0.0, 1 / 400)
    assert line.residual > 0.5
    line = fit_line([100, 200, 400], [1.0, 3.0, 9.0])  # through the origin rather than below it
    assert line.intercept == 0
    assert line.slope > 0.01


@settings(max_examples=examples(60))
@given(profiles(), st.integers(4, 9), st.integers(0, 300))
def test_attention_is_found(profile: HardwareProfile, sizes: int, penalty: int) -> None:
    """Times from the cost model give back its efficiencies and its split penalty."""
    # Slow enough that rounding to nanoseconds does not matter.
    profile = replace(profile, attention_split_penalty=penalty / 100, attention_s_per_token2=1e-3)
    lengths = [1 << (4 + i) for i in range(sizes)]
    # A table of these lengths only, as a finer one would bend between its points.
    # Where the table is flat, rounding may lift interpolated values above its points.
    rates = np.maximum.accumulate(efficiency(profile.attention_efficiency, np.array(lengths, dtype=np.float64)))
    profile = replace(profile, attention_efficiency=tuple(zip(lengths, rates.tolist(), strict=True)))
    times = []
    for degree in (1, 2, 4, 8):
        for length in lengths if degree == 1 else [length * degree + degree // 3 for length in lengths]:
            rank_ns = attention_ns(profile, np.array([length]), np.array([degree]))[0]
            times.append(AttentionTime(length, degree, rank_ns / NANOSECONDS))
    fit = fit_attention(times)
    found = replace(
        profile,
        attention_s_per_token2=fit.s_per_token2,
        attention_efficiency=fit.efficiency,
        attention_split_penalty=fit.split_penalty,
    )
    for time in times:
        modelled = attention_ns(found, np.array([time.length]), np.array([time.degree]))[0] / NANOSECONDS
        assert modelled == pytest.approx(time.seconds, rel=1e-5)
    assert fit.efficiency[-1] == (lengths[-1], 1.0)
    assert max(fit.residual, fit.split_residual) < 1e-2
    if rates[0] < rates[-1] / 2:  # otherwise splitting hardly matters
        assert fit.split_penalty == pytest.approx(penalty / 100, abs=0.02)


def test_split_documents_leave_whole_ones_alone() -> None:
    """Averaging split documents with unsplit ones as long as their chunks made short unsplit documents 15 to 25 % too cheap."""
    whole = [AttentionTime(256, 1, 2e-3), AttentionTime(1024, 1, 8e-3), AttentionTime(4096, 1, 64e-3)]
    split = [AttentionTime(2048, 4, 1e-3 * share) for share in (4, 6)]
    fit, alone = fit_attention([*whole, *split]), fit_attention(whole)
    assert (fit.s_per_token2, fit.efficiency, fit.residual) == (alone.s_per_token2, alone.efficiency, alone.residual)
    assert alone.split_penalty is None and fit.split_penalty is not None


def test_a_document_measured_faster_than_longer_ones_counts_as_equally_fast() -> None:
    rates = {64: 0.01, 256: 0.004, 1024: 0.005}
    fit = fit_attention([AttentionTime(length, 1, rate * length**2) for length, rate in rates.items()])
    assert fit.s_per_token2 == pytest.approx(0.005)
    assert dict(fit.efficiency) == pytest.approx({64: 0.5, 256: 1.0, 1024: 1.0})


@given(st.integers(0, 100), st.lists(st.tuples(st.floats(0.01, 1), st.floats(0.5, 3)), min_size=1, max_size=4))
def test_overlap_is_found(percent: int, cases: list[tuple[float, float]]) -> None:
    """Finds overlap if some exchange stays exposed; otherwise the smallest overlap that hides all of it."""
    times = [
        OverlapTime(attention, ratio * attention, attention * (1 + max(0.0, ratio - percent / 100)))
        for attention, ratio in cases
    ]
    overlap, residual = fit_overlap(times)
    assert residual < 1e-3
    longest = max(ratio for _, ratio in cases)
    assert overlap == pytest.approx(percent / 100 if longest > percent / 100 else longest, abs=2e-3)


@pytest.mark.parametrize(
    ("ranks", "recompute", "keep_kv"), [(2, False, False), (3, False, False), (3, True, False), (3, False, True)]
)
def test_bytes_of_keys_and_values(workers: Workers, ranks: int, recompute: bool, keep_kv: bool) -> None:
    """The cost model counts the bytes of the rank that moves most, pass by pass."""
    length = 2 * ranks * 10
    by_rank = workers.run(calibration_cases.count_bytes, ranks, length, recompute, keep_kv)
    passes = zip(*by_rank, strict=True)
    slowest = sum(max(max(sent, received) for sent, received in of_pass) for of_pass in passes)
    expected = kv_bytes_per_token(1, 2, 8, 4, 3 + recompute - keep_kv)
    assert slowest == expected * (ranks - 1) * length // ranks


def test_bytes_of_an_8b_model() -> None:
    assert kv_bytes_per_token(32, 8, 128, 2) == H100.kv_bytes_per_token


@given(st.integers(1, 10), st.integers(1, 10))
def test_neighbours_and_counterparts(per_node: int, count: int) -> None:
    """Every rank sends to distinct other ranks of the right kind, which receive from it in the same turn."""
    nodes = Nodes(per_node * count, per_node)
    for peers, others, same_node in ((nodes.neighbours, per_node - 1, True), (nodes.counterparts, count - 1, False)):
        for rank in range(nodes.ranks):
            pairs = peers(rank)
            assert len({after for after, _ in pairs} - {rank}) == len(pairs) == min(7, others)
            for turn, (after, _) in enumerate(pairs):
                assert peers(after)[turn][1] == rank
                assert (after // per_node == rank // per_node) == same_node


@given(st.integers(1, 6), st.integers(1, 500), st.integers(0, 3), st.data())
def test_layouts_are_those_of_a_plan(degree: int, length: int, first: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, degree - 1))
    placements = tuple(Placement(document, first, degree, rounds=3) for document in range(2))
    plan = make_plan([length] * 2, ranks=first + degree, tokens_per_rank=2 * length, profile=H100)
    expected = replace(plan, micro_batches=(placements,)).layout(0, first + index)
    ours = layout_of(first + index, 2, length, degree=degree, ring_index=index, rounds=3)
    assert [shard for shard in ours.shards if shard.tokens] == list(expected.shards)


def test_without_attention_all_weights_get_gradients() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 9}
    shape = ModelShape(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=4)
    model = Decoder(shape)
    model.initialize(0)
    model(torch.arange(5), torch.arange(5), no_attention).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_the_slowest_rank_counts(workers: Workers) -> None:
    slow, large, again = zip(*workers.run(calibration_cases.time_a_slow_rank, 2, 0.02), strict=True)
    assert slow[0] == slow[1] and again[0] == again[1]
    assert min(slow + again) >= 0.02
    assert large == (math.inf, math.inf)


def test_nodes_are_found(workers: Workers) -> None:
    found = workers.run(calibration_cases.find_nodes, 3, [0, 1, 2])
    assert found == ["Nodes(ranks=3, per_node=3)"] * 3
    for said in workers.run(calibration_cases.find_nodes, 3, [0, 1, 0]):
        assert "nodes have 1, 2 ranks" in said


def profile_arguments(out: Path, *more: str) -> list[str]:
    return ["calibrate", "--out", str(out), "--longest=0.02", *(f"--{setting}" for setting in TINY), *more]


def test_the_command_in_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command needs no store, writes a profile that `plan` reads, and reports what it did not measure."""
    out = tmp_path / "my.yaml"
    assert main(profile_arguments(out, "--base=h100-nvlink-ib", "--data.store=nowhere")) == 0
    said = capsys.readouterr().out
    found, content = HardwareProfile.load(out), yaml.safe_load(out.read_text("utf-8"))
    not_measured = {"intra_node_bytes_per_s", "inter_node_bytes_per_s", "ranks_per_node", "latency_s", "overlap"}
    assert set(content["measured"]["not_measured"]) == not_measured
    for name in not_measured:
        assert getattr(found, name) == getattr(H100, name)
        assert content["measured"]["not_measured"][name] == "one process: taken from h100-nvlink-ib"
    given = {
        "kv_bytes_per_token",
        "state_bytes",
        "split_s_per_token",
        "exchange_levels",
        "query_share",
    }  # given by the model and the settings
    assert set(content["measured"]["relative_residual"]) == set(found.to_dict()) - not_measured - given
    assert found.exchange_levels == 2
    assert found.kv_bytes_per_token == 1 * 2 * 2 * 8 * 4 * 3
    queries, others = 64 * 4 * 8, 64 * 8 * (4 + 2 + 2) + 3 * 64 * 128 + 300 * 64
    assert found.query_share == pytest.approx(2 / 3 * queries / (queries + others), rel=1e-3)
    assert content["measured"]["ranks"] == 1
    assert content["measured"]["model"]["vocab_size"] == 300
    check = content["measured"]["check"]
    assert 64 <= check["tokens"] <= 1024  # a step that would take too long is halved
    # The error is not tested: on a busy machine, that would fail at random.
    assert check["error"] == pytest.approx(check["predicted_s"] / check["measured_s"] - 1, abs=2e-3)
    assert all(name in said for name in found.to_dict())
    assert "predicted" in said and str(out) in said
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("300\n40\n")
    assert main(["plan", "--lengths", str(lengths), "--ranks=2", "--tokens-per-rank=512", f"--profile={out}", "--json"]) == 0
    assert HardwareProfile.from_dict(json.loads(capsys.readouterr().out)["profile"]) == found


@pytest.mark.parametrize("nodes", [1, 2])
def test_two_ranks(workers: Workers, nodes: int) -> None:
    """On one node or two, both ranks get the same profile, and only the missing link is taken from the base profile."""
    more = ["train.recompute=full", "context.max_remote_tokens=64", "train.dtype=bfloat16"]
    more = more if nodes == 2 else []
    answers = workers.run(calibration_cases.measure_profile, 2, [0, 1] if nodes == 1 else [0, 0], more)
    assert answers[0][1] == answers[1][1]
    found = answers[0][0]
    HardwareProfile.from_dict({name: found[name] for name in H100.to_dict()})
    missing = {"inter_node_bytes_per_s", "ranks_per_node"} if nodes == 1 else {"intra_node_bytes_per_s"}
    assert set(found["measured"]["not_measured"]) == missing
    assert found["measured"]["nodes"] == nodes
    assert found["ranks_per_node"] == (8 if nodes == 1 else 1)
    assert found["kv_bytes_per_token"] == 1 * 2 * 2 * 8 * (4 * 3 if nodes == 1 else 2 * 4)
    assert "split over 1 peers" in found["sources"][f"int{'ra' if nodes == 1 else 'er'}_node_bytes_per_s"]
    assert "tokens at degree 2" in found["sources"]["overlap"]
    assert min(found["measured"]["check"]["predicted_s"], found["measured"]["check"]["measured_s"]) > 0


def test_tensor_ranks_share_the_nodes_of_the_base_profile(workers: Workers) -> None:
    """Nodes of 8 GPUs hold 4 ranks of the domain if each rank is two GPUs."""
    (found, _), _ = workers.run(calibration_cases.measure_profile, 2, [0, 1], ["parallel.tensor_parallel_size=2"])
    assert (found["ranks_per_node"], found["measured"]["tensor_parallel_size"]) == (4, 2)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["calibrate", *arguments]) == 2
    return capsys.readouterr().err


def test_the_exchange_that_is_measured_is_the_one_that_is_predicted(workers: Workers) -> None:
    """Two nodes of two ranks: rows cross the network once per node, or go directly to every rank if the settings say so.
    Overlap is measured on rings inside a node and across both nodes."""
    answers = workers.run(calibration_cases.nodes_of_rings, 4, [0, 1, 0, 1], [])
    given, hops, levels, degrees = map(list, zip(*answers, strict=True))
    assert given == [{2}] * 4 and levels == [2] * 4 and degrees == [{2, 4}] * 4
    assert set.union(*hops) == {1, 2}
    straight = workers.run(calibration_cases.nodes_of_rings, 2, [0, 0], ["context.two_level_exchange=false"])
    assert straight == [({None}, {1}, 1, {2})] * 2


def test_what_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The settings may name the profile that is to be made: only `train` needs an existing one."""
    (tmp_path / "run.yaml").write_text(f"context: {{profile: {tmp_path / 'mine.yaml'}}}\n")
    assert "a folder" in refusal(capsys, str(tmp_path / "run.yaml"), "--out", str(tmp_path))
    assert "does not exist" in refusal(capsys, "--out", str(tmp_path / "none" / "my.yaml"))
    assert "no hardware profile 'h1000'" in refusal(capsys, "--base", "h1000")
    assert "--longest is 0.0" in refusal(capsys, "--longest=0")
    assert "did you mean batch.tokens_per_rank?" in refusal(capsys, "--batch.tokens_per_rnk=5")
    assert "none.yaml not found" in refusal(capsys, str(tmp_path / "none.yaml"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = refusal(capsys, "--parallel.pipeline_parallel_size=2")
    assert "parallel.pipeline_parallel_size is 2, but profiles are measured without a pipeline, and scaled" in said
    assert not dist.is_initialized()


def test_too_few_tokens_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, "--out", str(tmp_path / "my.yaml"), "--batch.tokens_per_rank=32")
    assert "batch.tokens_per_rank is 32" in said
    assert not (tmp_path / "my.yaml").exists()


def test_two_ranks_run_the_command_together(tmp_path: Path) -> None:
    """The JSON is printed once."""
    printed = json.loads(launched.run(*profile_arguments(tmp_path / "my.yaml", "--json"), ranks=2)[0])
    assert {name: printed[name] for name in H100.to_dict()} == HardwareProfile.load(tmp_path / "my.yaml").to_dict()
    assert printed["measured"]["ranks"] == 2
