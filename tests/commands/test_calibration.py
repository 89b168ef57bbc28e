"""Measured profiles: fits recover known constants, and the command writes a profile that planning
and training read."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from hypothesis import given
from hypothesis import strategies as st

from longctx.calibration import (
    BY_MODEL,
    COPIED_BYTES,
    PEERS,
    _matrices,
    _memory_bytes_per_s,
    _of_usual_ranks,
    _split_document_s,
    fit_attention,
    fit_line,
    no_attention,
    peers,
)
from longctx.cli import main
from longctx.model.decoder import Decoder
from longctx.model.presets import ModelShape
from longctx.planning.cost.work import kv_bytes_per_token
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.layout import Layout
from longctx.training.described import read_described
from tests import calibration_cases, launched
from tests.calibration_cases import TINY
from tests.family_cases import build
from tests.workers import Workers

H100 = HardwareProfile.load("h100-nvlink-ib")


@given(
    st.just(0.0) | st.floats(1e-3, 1),
    st.floats(1e-6, 1e-3),
    st.lists(st.integers(1, 100_000), min_size=3, max_size=6, unique=True),
)
def test_a_line_is_found(intercept: float, slope: float, counts: list[int]) -> None:
    counts = [0, *counts] if intercept else counts
    seconds = [intercept + slope * count for count in counts]
    found = fit_line(counts, seconds)
    assert [found[0] + found[1] * count for count in counts] == pytest.approx(seconds, rel=1e-5)


def test_a_copy_reads_and_writes_memory() -> None:
    copied = []

    def seconds(work: Any) -> list[float]:
        copied.append(work())
        return [0.5]

    run = SimpleNamespace(mesh=SimpleNamespace(device=torch.device("cpu")), seconds=seconds)
    assert _memory_bytes_per_s(run) == 4 * COPIED_BYTES  # type: ignore[arg-type]  # a part of it
    (copy,) = copied
    assert copy.nbytes == COPIED_BYTES and bool(copy.all())


def test_a_line_of_noise_still_rises() -> None:
    assert fit_line([100, 200, 400], [3.0, 2.0, 1.0]) == (0.0, 1 / 400)
    # Through the origin rather than below it.
    intercept, slope = fit_line([100, 200, 400], [1.0, 3.0, 9.0])
    assert intercept == 0 and slope > 0.01


def test_a_document_measured_faster_than_longer_ones_counts_as_equally_fast() -> None:
    rates = {64: 0.01, 256: 0.004, 1024: 0.005}
    slope, table = fit_attention({length: rate * length**2 for length, rate in rates.items()})
    assert slope == pytest.approx(0.005)
    assert [length for length, _ in table] == [64, 256, 1024] and dict(table) == pytest.approx(
        {64: 0.5, 256: 1.0, 1024: 1.0}
    )


@pytest.mark.parametrize(
    ("ranks", "recompute", "keep_kv"),
    [(2, False, False), (3, False, False), (3, True, False), (3, False, True)],
)
def test_bytes_of_keys_and_values(
    workers: Workers, ranks: int, recompute: bool, keep_kv: bool
) -> None:
    """The cost model counts the bytes of the rank that moves most, pass by pass."""
    length = 2 * ranks * 10
    by_rank = workers.run(calibration_cases.count_bytes, ranks, length, recompute, keep_kv)
    passes = zip(*by_rank, strict=True)
    slowest = sum(max(max(sent, received) for sent, received in of_pass) for of_pass in passes)
    expected = kv_bytes_per_token(2 * 2 * 8, 4, 3 + recompute - keep_kv)
    assert slowest == expected * (ranks - 1) * length // ranks


@given(st.integers(1, 12), st.integers(0, 30), st.integers(1, 5))
def test_peers(count: int, first: int, step: int) -> None:
    """Every rank sends to distinct other ranks, which receive from it in the same turn."""
    among = range(first, first + count * step, step)
    for rank in among:
        pairs = peers(rank, among)
        assert len({after for after, _ in pairs} - {rank}) == len(pairs) == min(PEERS, count - 1)
        for turn, (after, _) in enumerate(pairs):
            assert peers(after, among)[turn][1] == rank


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


def test_a_rank_that_takes_longer_is_slow(workers: Workers) -> None:
    """Relative to a usual one; one of several GPUs as its slowest."""
    first, *others = workers.run(calibration_cases.slow_ranks, 3, [0.1, 0.15, 0.1])
    assert all(found == first for found in others)
    ((rank, relative),) = first
    assert rank == 1 and 1.3 < relative < 1.7
    for found in workers.run(calibration_cases.slow_ranks, 4, [0.1, 0.1, 0.1, 0.2], 2):
        ((rank, relative),) = found
        assert rank == 1 and 1.7 < relative < 2.3


def test_ranks_as_quick_as_each_other_are_not_slow(workers: Workers) -> None:
    assert workers.run(calibration_cases.slow_ranks, 2, [0.1, 0.1]) == [[], []]


def test_a_split_costs_what_split_documents_take_more_than_whole_ones() -> None:
    """Without what the same number of whole documents takes, and fixed costs, in all layers."""

    class Run:
        config = SimpleNamespace(batch=SimpleNamespace(tokens_per_rank=400))
        mesh = SimpleNamespace(ranks=2, rank=0)
        spec = SimpleNamespace(layers=[None] * 3)

        def attention(self, layout: Layout) -> int:
            assert layout.tokens == 16 * len(layout.shards)
            degrees = {shard.degree for shard in layout.shards}
            assert len(degrees) == 1
            return len(layout.shards) if degrees == {2} else -len(layout.shards)

        def seconds(self, *works: int) -> list[float]:
            """A call takes 5 s, a split document 2 s, a whole one 0.5 s."""
            return [5 + (2 * work if work > 0 else -0.5 * work) for work in works]

    run: Any = Run()
    assert _split_document_s(run) == pytest.approx(3 * 1.5)


def test_nodes_are_found(workers: Workers) -> None:
    assert workers.run(calibration_cases.ranks_per_node, 3, [0, 1, 2]) == [3] * 3
    assert workers.run(calibration_cases.ranks_per_node, 3, [0, 0, 0]) == [1] * 3
    for said in workers.run(calibration_cases.ranks_per_node, 3, [0, 1, 0]):
        assert "nodes have 1, 2 ranks" in said


def profile_arguments(out: Path, *more: str) -> list[str]:
    return ["calibrate", "--out", str(out), *(f"--{setting}" for setting in TINY), *more]


def test_the_command_in_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command needs no store, writes a profile that planning and training read, and reports
    what it did not measure."""
    out = tmp_path / "my.yaml"
    assert main(profile_arguments(out, "--base=h100-nvlink-ib", "--data.store=nowhere")) == 0
    said = capsys.readouterr().out
    found, measured = HardwareProfile.load(out), yaml.safe_load(out.read_text("utf-8"))["measured"]
    taken = (
        "intra_node_bytes_per_s",
        "inter_node_bytes_per_s",
        "ranks_per_node",
        "overlap",
        "attention_split_penalty",
    )
    assert measured["not_measured"] == dict.fromkeys(
        (*taken, "latency_s", "split_document_s"), "taken from h100-nvlink-ib"
    )
    assert [getattr(found, name) for name in taken] == [getattr(H100, name) for name in taken]
    assert found.latency_s == pytest.approx(H100.latency_s / 32), "of one layer, not of 32"
    assert found.split_document_s == pytest.approx(H100.split_document_s / 32)
    assert found.exchange_levels == 2 and found.kv_bytes_per_token == 1 * 2 * 2 * 8 * 4 * 3
    assert [length for length, _ in found.attention_efficiency] == [128, 1024]
    assert min(found.linear_s_per_token, found.attention_s_per_token2) > 0
    assert found.launch_s >= 0, "0 where others' work on the machine hides it"
    assert 0 < found.query_share < 1
    described = read_described(str(out))[1]
    assert described is not None and described.model.hidden_size == 64
    check = measured["check"]
    assert check["error"] == pytest.approx(check["predicted_s"] / check["measured_s"] - 1, abs=2e-3)
    assert all(name in said for name in found.to_dict())
    assert "predicted" in said and str(out) in said
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("300\n40\n")
    assert (
        main(
            [
                "plan",
                "--lengths",
                str(lengths),
                "--ranks=2",
                "--tokens-per-rank=512",
                f"--profile={out}",
                "--json",
            ]
        )
        == 0
    )
    assert HardwareProfile.from_dict(json.loads(capsys.readouterr().out)["profile"]) == found


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.slow
def test_two_ranks(workers: Workers, nodes: int) -> None:
    """On one node or two, both ranks get the same profile, and only the missing link is taken from
    the base profile."""
    more = [
        "train.recompute=full",
        "context.max_remote_tokens=64",
        "train.dtype=bfloat16",
        "context.two_level_exchange=false",
    ]
    more = more if nodes == 2 else []
    found, other = workers.run(
        calibration_cases.measure_profile, 2, [0, 1] if nodes == 1 else [0, 0], more
    )
    assert found == other
    profile, how = HardwareProfile.from_dict(found["profile"]), found["how"]
    missing = (
        {"inter_node_bytes_per_s", "ranks_per_node"} if nodes == 1 else {"intra_node_bytes_per_s"}
    )
    missing |= {"overlap", "attention_split_penalty"}
    assert set(H100.to_dict()) - set(how) - set(BY_MODEL) == missing
    assert all(found["sources"][name] == "taken from h100-nvlink-ib" for name in missing)
    assert profile.exchange_levels == (2 if nodes == 1 else 1), "those of the settings"
    assert found["run"]["nodes"] == nodes and profile.ranks_per_node == (8 if nodes == 1 else 1)
    assert profile.kv_bytes_per_token == 1 * 2 * 2 * 8 * (4 * 3 if nodes == 1 else 2 * 4)
    assert (
        how["intra_node_bytes_per_s" if nodes == 1 else "inter_node_bytes_per_s"]
        == "messages to all peers at once"
    )
    assert how["split_document_s"] == "short documents on all ranks and on one"
    assert profile.split_document_s >= 0
    assert min(found["check"]["predicted_s"], found["check"]["measured_s"], profile.latency_s) > 0


@pytest.mark.slow
def test_tensor_ranks_share_the_nodes_of_the_base_profile(workers: Workers) -> None:
    """Nodes of 8 GPUs hold 4 ranks of the domain if each rank is two GPUs."""
    found, _ = workers.run(
        calibration_cases.measure_profile, 2, [0, 1], ["parallel.tensor_parallel_size=2"]
    )
    assert (found["profile"]["ranks_per_node"], found["run"]["tensor_parallel_size"]) == (4, 2)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["calibrate", *arguments]) == 2
    return capsys.readouterr().err


def test_what_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The settings may name the profile that is to be made: only `train` needs an existing one."""
    (tmp_path / "run.yaml").write_text(f"context: {{profile: {tmp_path / 'mine.yaml'}}}\n")
    assert "a folder" in refusal(capsys, str(tmp_path / "run.yaml"), "--out", str(tmp_path))
    assert "does not exist" in refusal(capsys, "--out", str(tmp_path / "none" / "my.yaml"))
    assert "no hardware profile 'h1000'" in refusal(capsys, "--base", "h1000")
    assert "did you mean batch.tokens_per_rank?" in refusal(capsys, "--batch.tokens_per_rnk=5")
    assert "none.yaml not found" in refusal(capsys, str(tmp_path / "none.yaml"))
    build("llama", "eager").save_pretrained(tmp_path / "llama")
    said = refusal(capsys, f"--model.from_pretrained={tmp_path / 'llama'}")
    assert "but profiles are measured with the native decoder, and scaled" in said
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    said = refusal(capsys, "--parallel.pipeline_parallel_size=2")
    assert (
        "parallel.pipeline_parallel_size is 2, but profiles are measured without a pipeline, and "
        "scaled" in said
    )
    assert not dist.is_initialized()


def test_a_step_counts_without_its_micro_batch() -> None:
    """A micro-batch takes 2 s and 0.01 s per token, and a step with an empty one 5 s."""

    def seconds(*parts: Any) -> list[float]:
        return [*(2 + 0.01 * tokens for tokens in parts[:-1]), 5.0]

    run: Any = SimpleNamespace(
        config=SimpleNamespace(batch=SimpleNamespace(tokens_per_rank=1000)),
        empty=None,
        batch=lambda layouts, tokens: None,
        micro_batch=lambda tokens, attention=None: tokens,
        seconds=seconds,
    )
    assert _matrices(run) == pytest.approx((2.0, 0.01, 3.0))


def test_too_few_tokens_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, "--out", str(tmp_path / "my.yaml"), "--batch.tokens_per_rank=32")
    assert "batch.tokens_per_rank is 32" in said
    assert not (tmp_path / "my.yaml").exists()


def test_two_ranks_run_the_command_together(tmp_path: Path) -> None:
    """The table is printed once, and the file is written once."""
    printed = launched.run(*profile_arguments(tmp_path / "my.yaml"), ranks=2)[0]
    assert printed.count("attention_s_per_token2") == 1
    assert yaml.safe_load((tmp_path / "my.yaml").read_text("utf-8"))["measured"]["ranks"] == 2


def test_rates_are_those_of_a_usual_rank() -> None:
    found = _of_usual_ranks(H100, ((2, 1.25), (5, 2.0)))
    assert found.slow_ranks == ((2, 1.25), (5, 2.0))
    assert found.linear_s_per_token == pytest.approx(H100.linear_s_per_token / 2, rel=1e-3)
    assert found.attention_s_per_token2 == pytest.approx(H100.attention_s_per_token2 / 2, rel=1e-3)
    assert _of_usual_ranks(H100, ()).launch_s == H100.launch_s
