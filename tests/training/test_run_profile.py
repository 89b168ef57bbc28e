"""The profile of a run: chosen by device, scaled to model and parallel sizes, with a printed line
on the scaling."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import yaml

from longctx.cli import main
from longctx.config import Config, load
from longctx.data.loader import plan_step
from longctx.data.store.store import Store
from longctx.memory.fitting import RunMemory
from longctx.model.presets import PRESETS
from longctx.parallel.mesh import make_groups
from longctx.planning.cost.fixed import UPDATE_BYTES
from longctx.planning.cost.scaling import query_share, scale
from longctx.planning.cost.spec import Matrix
from longctx.planning.cost.work import work_of
from longctx.planning.hardware_profile import (
    SHIPPED,
    HardwareProfile,
    ProfileError,
    shipped_profiles,
)
from longctx.planning.pipeline import Pipeline
from longctx.planning.plan import Plan, PlanError
from longctx.planning.planners.planner import make_plan
from longctx.training.build import make_attention
from longctx.training.data import first_plans, make_planner
from longctx.training.described import (
    ProfilesDiffer,
    preset_profile,
    read_described,
    sharded_preset_profile,
    with_vocabulary,
)
from longctx.training.run_profile import FLOAT8_TIME, run_profile, scaled_profile
from tests.training_cases import SMALL, start
from tests.workers import Workers

CPU, H100, H200 = (
    HardwareProfile.load(name) for name in ("cpu-2core", "h100-nvlink-ib", "h200-nvlink-ib")
)
NAMED = (
    "profile h100-nvlink-ib (8.03B parameters in bfloat16 on H100, from data sheets, not measured)"
)
EIGHT_B = [
    "model.preset=llama-3.1-8b",
    "model.vocab_size=128256",
    "train.dtype=bfloat16",
    "train.device=cuda",
]
H100_DESCRIBED = read_described("h100-nvlink-ib")[1]
TINY = ["model.preset=tiny", "model.vocab_size=4096", "train.device=cpu"]


def of(settings: list[str], ranks: int = 1) -> HardwareProfile:
    config = load(None, settings)
    return run_profile(config, ranks, config.model.vocab_size).profile


def linear_s(share: float, **settings: Any) -> float:
    """Returns the seconds of a token of the 8B model on an H100 whose products take a `share` of
    their time, with what memory moves, which tests/planning/test_traffic.py counts by hand."""
    described = read_described("h100-nvlink-ib")[1]
    assert described is not None
    known = sum(described.work.traffic) / H100.memory_bytes_per_s
    traffic = work_of(described.model.spec, "bfloat16", **settings).traffic
    moved = sum(traffic) / H100.memory_bytes_per_s
    return share * (H100.linear_s_per_token - known) + moved


def apart_from(profile: HardwareProfile, other: HardwareProfile, *names: str) -> HardwareProfile:
    """Returns a profile with some constants, launch and step of another one: sharded states add to
    the last two."""
    taken = {name: getattr(other, name) for name in ("launch_s", "step_s", *names)}
    return replace(profile, **taken)


def fake_gpu(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        (None, CPU),
        ("NVIDIA H100 80GB HBM3", H100),
        ("NVIDIA H200 NVL", H200),
        ("NVIDIA A100-SXM4-80GB", HardwareProfile.load("a100-80gb")),
        ("NVIDIA A100-SXM4-40GB", HardwareProfile.load("a100-40gb")),
        ("NVIDIA A100-PCIE-40GB", HardwareProfile.load("a100-80gb")),
        ("NVIDIA H100 PCIe", HardwareProfile.load("h100-pcie")),
        ("NVIDIA H100 NVL", H100),
        ("NVIDIA RTX A6000", H100),
    ],
)
def test_the_profile_follows_the_device(
    monkeypatch: pytest.MonkeyPatch, gpu: str | None, expected: HardwareProfile
) -> None:
    """An 8B model on a GPU uses the H100 profile unscaled, and `tiny` on a CPU the profile of two
    cores."""
    if gpu is None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        settings = [*TINY, "train.device=auto"]
        assumed = apart_from(of(EIGHT_B), H100)
        assert assumed == H100, "for estimates and dry runs of another machine"
    else:
        fake_gpu(monkeypatch, gpu)
        settings = [*EIGHT_B, "train.device=auto"]
    found = of(settings)
    assert apart_from(found, expected) == expected
    if gpu is not None:
        parameters = 8_030_261_248
        update_s = UPDATE_BYTES * parameters / expected.memory_bytes_per_s
        assert found.launch_s == expected.launch_s
        assert found.step_s == pytest.approx(update_s)
    assert of([*EIGHT_B, "train.device=cpu"]).linear_s_per_token > 1000 * CPU.linear_s_per_token


def test_every_constant_is_scaled_by_what_it_grows_with() -> None:
    """From `tiny` to one layer of half the width, by hand."""
    block = 64 * 32 * 2 * (2 + 1) + 3 * 64 * 128
    tiny = 128 * 32 * 2 * (4 + 2) + 3 * 128 * 384
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    found = of(
        [
            *(f"model.overrides.{name}={value}" for name, value in (sizes | heads).items()),
            "model.vocab_size=257",
            "train.device=cpu",
        ]
    )
    assert found.linear_s_per_token == pytest.approx(
        CPU.linear_s_per_token * (block + 257 * 64) / (2 * tiny + 4096 * 128)
    )
    assert found.attention_s_per_token2 == pytest.approx(
        CPU.attention_s_per_token2 * 1 * 2 / (2 * 4)
    )
    assert found.kv_bytes_per_token == 1 * 2 * 1 * 32 * 4 * 3
    assert (found.latency_s, found.launch_s) == (CPU.latency_s / 2, CPU.launch_s / 2)
    assert found.step_s == pytest.approx(CPU.step_s * (block + 257 * 64) / (2 * tiny + 4096 * 128))
    assert found.query_share == pytest.approx(2 / 3 * 64 * 2 * 32 / (block + 257 * 64), rel=1e-3)
    for name in (
        "attention_efficiency",
        "overlap",
        "intra_node_bytes_per_s",
        "inter_node_bytes_per_s",
        "ranks_per_node",
    ):
        assert getattr(found, name) == getattr(CPU, name)


def test_recomputation_splits_and_kept_keys_are_scaled_too() -> None:
    """For runs of the 8B model that differ from the description of h100-nvlink-ib in one or two
    settings."""
    block, head = 4096 * 128 * 2 * 40 + 3 * 4096 * 14336, 128256 * 4096
    anew = (32 * block + head + 32 * (block - 4096 * 14336) / 3) / (32 * block + head)
    selective = of([*EIGHT_B, "train.recompute=selective"])
    assert selective.linear_s_per_token == pytest.approx(linear_s(anew, recompute="selective"))
    same = ("linear_s_per_token", "query_share")
    assert apart_from(selective, H100, *same) == H100
    mlp = of([*EIGHT_B, "train.recompute=mlp"])
    more = 32 * 2 * 4096 * 14336 / 3 / (32 * block + head)
    assert mlp.linear_s_per_token == pytest.approx(linear_s(1 + more, recompute="mlp"))
    norms = of([*EIGHT_B, "train.recompute=norms"])
    assert norms.linear_s_per_token == pytest.approx(linear_s(1, recompute="norms"))
    assert apart_from(norms, H100, *same) == H100, "recomputes no matrices"
    full = of([*EIGHT_B, "train.recompute=full"])
    assert full.attention_s_per_token2 == pytest.approx(H100.attention_s_per_token2 * 4.5 / 3.5)
    assert full.kv_bytes_per_token == H100.kv_bytes_per_token * 4 / 3
    kept = of([*EIGHT_B, "context.keep_kv=true"])
    assert apart_from(kept, H100) == replace(
        H100, kv_bytes_per_token=H100.kv_bytes_per_token * 2 // 3
    )
    wide = of([*EIGHT_B, "train.dtype=float32"])
    assert apart_from(wide, H100, *same) == replace(
        H100, kv_bytes_per_token=H100.kv_bytes_per_token * 2
    )
    moved_s = linear_s(0)
    assert wide.linear_s_per_token == pytest.approx(linear_s(1) + moved_s)
    tensor = of([*EIGHT_B, "parallel.tensor_parallel_size=4"], ranks=8)
    messages_s = 32 * 8 * 0.75 * 4096 * 2 / 300e9
    alone = linear_s(1 / 4, tensor=4, compiled=False)
    assert tensor.linear_s_per_token == pytest.approx(alone + messages_s)
    assert (tensor.kv_bytes_per_token, tensor.ranks_per_node) == (H100.kv_bytes_per_token / 4, 2)
    pipeline = of([*EIGHT_B, "parallel.pipeline_parallel_size=2"], ranks=8)
    assert pipeline.attention_s_per_token2 == pytest.approx(
        H100.attention_s_per_token2 * 15 / 32
    ), "17 blocks on the other"
    stages = Pipeline(2)
    share = (15 * block + head) / (32 * block + head)
    tokens = load(None, EIGHT_B).batch.tokens_per_rank
    on_rank = linear_s(share, pipeline=stages, tokens_per_rank=tokens)
    assert pipeline.linear_s_per_token == pytest.approx(on_rank + 2 * 4096 * 2 / 300e9)


@pytest.mark.parametrize("name", [*shipped_profiles(), "examples/slow_network.yaml"])
def test_profiles_count_the_matrices_to_queries(name: str) -> None:
    profile, described = read_described(name)
    assert described is not None
    assert profile.query_share == pytest.approx(query_share(profile, described.work), rel=2e-3)


def test_queries_of_a_run_hide_messages_while_they_travel() -> None:
    """Two products of the matrix to queries do: forward, which may be repeated, and the gradient of
    its input."""
    block, head = 4096 * 128 * 2 * 40 + 3 * 4096 * 14336, 128256 * 4096
    queries = 32 * 4096 * 4096 * 2 / 3
    products_s = linear_s(1) - linear_s(0)

    def share(*settings: str, ranks: int = 1) -> float:
        """Returns the parameters whose products take as long as queries hide."""
        found = of([*EIGHT_B, *settings], ranks=ranks)
        of_model = (32 * block + head) / products_s
        return found.query_share * found.linear_s_per_token * of_model

    assert share() == pytest.approx(queries, rel=3e-3)
    assert share("train.recompute=selective") == pytest.approx(queries, rel=3e-3)
    assert share("train.recompute=full") == pytest.approx(3 / 2 * queries, rel=3e-3)
    tensor = of([*EIGHT_B, "parallel.tensor_parallel_size=4"], ranks=8)
    assert tensor.query_share * tensor.linear_s_per_token == pytest.approx(
        H100.query_share * H100.linear_s_per_token / 4
    )
    pipeline = share("parallel.pipeline_parallel_size=2", ranks=8)
    assert pipeline == pytest.approx(15 / 32 * queries, rel=3e-3)
    assert share("context.ulysses_degree=8") == 0, "heads are swapped once the queries are there"


def test_queries_that_are_computed_first_hide_nothing() -> None:
    """Those of models of transformers; a profile without the constant hides nothing either."""
    described = read_described("h100-nvlink-ib")[1]
    assert described is not None
    spec = described.model.spec
    matrices = spec.layers[0].matrices  # all blocks are alike
    own = tuple(replace(matrix, role="own") for matrix in matrices)
    first, frozen = (
        replace(spec, layers=tuple(replace(layer, matrices=given) for layer in spec.layers))
        for given in (own, (*matrices, Matrix(1, 1, role="adapter")))
    )
    hidden = scale(H100, described.work, work_of(first, "bfloat16"))
    assert hidden.query_share == 0
    assert hidden.linear_s_per_token == pytest.approx(H100.linear_s_per_token)
    older = replace(H100, query_share=0.0)
    assert (
        scale(older, described.work, work_of(spec, "bfloat16", recompute="full")).query_share == 0
    )
    faster = scale(H100, described.work, work_of(frozen, "bfloat16"))
    shorter = H100.linear_s_per_token / faster.linear_s_per_token
    assert faster.query_share == pytest.approx(shorter * H100.query_share)


def measured(folder: Path, **changes: Any) -> str:
    """Writes a file as `longctx calibrate` does for the 8B model, with some values changed; None:
    omitted."""
    content = yaml.safe_load((SHIPPED / "h100-nvlink-ib.yaml").read_text("utf-8"))
    said = {
        **content.pop("describes"),
        "gpu": "NVIDIA H100 80GB HBM3",
        "cores": 2,
        **changes.pop("said", {}),
    }
    said = {name: value for name, value in said.items() if value is not None}
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({**content, "measured": said, **changes}))
    return f"context.profile={path}"


def test_a_profile_measured_in_a_split_is_scaled_out_of_it(tmp_path: Path) -> None:
    """Tensor parallel communication is subtracted before scaling, so that scaling there and back
    changes nothing."""
    settings = [*EIGHT_B, "train.recompute=full", "parallel.tensor_parallel_size=4"]
    split = of(settings, ranks=8)
    said: dict[str, Any] = {
        "recompute": "full",
        "tensor_parallel_size": 4,
        "compiled": False,
        "from_data_sheets": False,
    }
    mine = measured(tmp_path, said=said, **split.to_dict())
    assert of([*settings, mine], ranks=8) == split
    back = of([*EIGHT_B, mine])
    constants = (
        "linear_s_per_token",
        "query_share",
        "attention_s_per_token2",
        "kv_bytes_per_token",
        "ranks_per_node",
    )
    assert [getattr(back, name) for name in constants] == pytest.approx(
        [getattr(H100, name) for name in constants]
    )
    mine = measured(tmp_path, said=said, **{**split.to_dict(), "intra_node_bytes_per_s": 1.0})
    with pytest.raises(
        ProfileError,
        match=r"mine\.yaml: linear_s_per_token is .*tensor_parallel_size 4 and memory traffic "
        r"alone .* cannot be scaled",
    ):
        of([*EIGHT_B, mine])


def test_a_profile_that_names_no_model_is_not_scaled(tmp_path: Path) -> None:
    for number, more in enumerate(
        ({}, {"measured": "by hand, on a Sunday"}, {"measured": {"dtype": "float32"}})
    ):
        path = tmp_path / f"{number}.yaml"
        path.write_text(yaml.safe_dump({**H100.to_dict(), **more}))
        config = load(None, [*TINY, f"context.profile={path}"])
        found = run_profile(config, 1, 4096)
        assert found.profile == H100
        assert found.lines == (f"profile {path} names no model: used unscaled",)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            {"tensor_parallel_size": 2},
            "kv_bytes_per_token is 393,216, but section `measured` .* implies 196,608",
        ),
        ({"keep_kv": True}, "implies 262,144: correct one of the two"),
        ({"dtype": "float16"}, "section `measured` is invalid: dtype: "),
        ({"device": None}, "section `measured` is invalid: device: Field required"),
        (
            {"tensor_parallel_size": 3},
            "tensor_parallel_size is 3, which does not divide 8 KV heads",
        ),
        (
            {"model": PRESETS["llama-3.1-8b"].model_dump(exclude_none=True)},
            "the model in .* has no vocab_size",
        ),
    ],
)
def test_profiles_that_contradict_their_model_are_refused(
    tmp_path: Path, said: dict[str, Any], message: str
) -> None:
    with pytest.raises(ProfileError, match=message):
        of([*EIGHT_B, measured(tmp_path, said=said)])


def test_scaling_is_reported() -> None:
    same, smaller = (
        run_profile(load(None, [*TINY, *more]), 1, 4096).lines
        for more in ([], ["model.overrides.num_hidden_layers=1"])
    )
    assert same == (
        "profile cpu-2core (0.918M parameters in float32 on AMD EPYC): used unscaled for this run",
    )
    (line,) = smaller
    assert (
        "scaled to this run: linear × 0.7857 (0.9175M → 0.7209M parameters computed per token); "
        "attention × 0.5 (" in line
    )
    assert (
        "K and V × 0.5 (3,072 → 1,536 bytes per token); latency and launch × 0.5 (2 → 1 layers); "
        "step × 0.7857 (" in line
    )


def test_the_price_of_splits_is_scaled_as_latency_is_and_said() -> None:
    known = HardwareProfile.load("h100-nvlink-ib")
    more = ["context.profile=h100-nvlink-ib", "model.overrides.num_hidden_layers=1"]
    scaled = run_profile(load(None, [*TINY, *more]), 1, 4096)
    ratio = scaled.profile.latency_s / known.latency_s
    assert 0 < ratio < 1
    assert scaled.profile.split_document_s == pytest.approx(ratio * known.split_document_s)
    assert any("latency and splits and launch × " in line for line in scaled.lines)


@pytest.mark.parametrize(
    ("settings", "gpu", "doubt"),
    [
        (
            ["train.device=cpu", "context.profile=h100-nvlink-ib"],
            None,
            "h100-nvlink-ib is for cuda, but this run is on cpu",
        ),
        (["context.profile=cpu-2core"], None, "cpu-2core is for cpu, but this run is on cuda"),
        (
            ["context.profile=h100-nvlink-ib"],
            "NVIDIA A100-SXM4-80GB",
            "is for H100, but this run is on NVIDIA A100-SXM4-80GB",
        ),
        (
            [],
            "NVIDIA A10",
            "no shipped profile is for NVIDIA A10: h100-nvlink-ib, which is for H100, is used "
            "instead; speeds",
        ),
        (
            [],
            "NVIDIA A100-PCIE-40GB",
            "no shipped profile is for NVIDIA A100-PCIE-40GB: a100-80gb, which is for A100, is "
            "used",
        ),
        ([], "NVIDIA A100-SXM4-40GB", None),
        (
            ["train.dtype=float32"],
            "NVIDIA H100 80GB HBM3",
            "is for bfloat16, but this run computes in float32",
        ),
        ([], "NVIDIA H100 80GB HBM3", None),
    ],
)
def test_other_devices_and_dtypes_are_warned_about(
    monkeypatch: pytest.MonkeyPatch, settings: list[str], gpu: str | None, doubt: str | None
) -> None:
    if gpu is not None:
        fake_gpu(monkeypatch, gpu)
    _, *warnings = run_profile(load(None, [*EIGHT_B, *settings]), 1, 128256).lines
    assert bool(warnings) == (doubt is not None)
    assert all(line.startswith("warning: ") and "`longctx calibrate`" in line for line in warnings)
    assert doubt is None or doubt in warnings[0]


def launched(monkeypatch: pytest.MonkeyPatch, ranks: int, per_node: int | None) -> None:
    """Sets the environment of a process of torchrun; None: of a launcher that does not say what is
    on a node."""
    for name, value in {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": per_node,
    }.items():
        monkeypatch.setenv(name, str(value)) if value is not None else monkeypatch.delenv(
            name, raising=False
        )


@pytest.mark.parametrize(
    ("ranks", "per_node", "tensor", "pipeline", "expected"),
    [
        (16, 8, 2, 1, 4),
        (16, 4, 2, 1, 2),
        (16, 4, 8, 1, 1),  # tensor-parallel ranks on two nodes
        (12, 6, 4, 1, 1),
        # Domains of 12 ranks: the second one begins in the middle of the second node.
        (24, 8, 1, 2, 4),
        (24, 8, 2, 2, 2),
        (16, 8, 1, 4, 4),  # domains of 4 ranks
        (12, 8, 1, 1, 4),  # not the same number on all nodes
        (4, 4, 1, 1, 8),  # one node: as the profile says
        (16, None, 2, 1, 4),
    ],
)
def test_nodes_are_as_large_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    per_node: int | None,
    tensor: int,
    pipeline: int,
    expected: int,
) -> None:
    """On several nodes their real size counts, in ranks of the domain; its profile has nodes of 8
    GPUs."""
    settings = [
        *EIGHT_B,
        f"parallel.tensor_parallel_size={tensor}",
        f"parallel.pipeline_parallel_size={pipeline}",
    ]
    launched(monkeypatch, ranks, per_node)
    config = load(None, settings)
    found = run_profile(config, ranks, 128256)
    assert found.profile.ranks_per_node == expected
    several = per_node not in (None, ranks)
    assert any("plan and exchange follow the nodes" in line for line in found.lines) == (
        several and per_node != 8
    )
    (other,) = {run_profile(config, 2 * ranks, 128256).profile.ranks_per_node}
    assert other == 8 // tensor, (
        "an estimate for another number of ranks knows nothing of their nodes"
    )


def test_nodes_of_a_profile_without_a_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(H100.to_dict()))
    launched(monkeypatch, 16, 8)
    config = load(None, [*EIGHT_B, "parallel.tensor_parallel_size=2", f"context.profile={path}"])
    assert run_profile(config, 16, 128256).profile == replace(H100, ranks_per_node=4)


def test_messages_of_a_pipeline_cross_real_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight ranks are one node by the profile, but here two: messages between stages go over the
    network."""
    settings = [*EIGHT_B, "parallel.pipeline_parallel_size=2"]
    inside = of(settings, ranks=8)
    launched(monkeypatch, 8, 4)
    slower = of(settings, ranks=8).linear_s_per_token - inside.linear_s_per_token
    assert slower == pytest.approx(
        2 * 4096 * 2 * (1 / H100.inter_node_bytes_per_s - 1 / H100.intra_node_bytes_per_s)
    )


def node_of_rank(sizes: list[int], settings: list[str]) -> tuple[int, int]:
    """Returns the ranks per node of this rank's profile, and those that all agree on; a rank stands
    for a node of `sizes`."""
    with pytest.MonkeyPatch.context() as patch:
        launched(patch, sum(sizes), sizes[dist.get_rank()])
        found = run_profile(load(None, settings), sum(sizes), 128256)
    return found.profile.ranks_per_node, found.agreed(
        make_groups(torch.device("cpu"), timeout_s=30).control
    ).ranks_per_node


@pytest.mark.slow
def test_nodes_of_different_sizes_count_as_smaller_ones(workers: Workers) -> None:
    """Two exchange levels need the same number on all ranks, and no node that is partly another."""
    assert workers.run(node_of_rank, 3, [8, 4, 4], EIGHT_B) == [(8, 4), (4, 4), (4, 4)]


def test_the_exchange_follows_the_real_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen ranks on nodes of 4, two of them for each rank of the domain: rows cross the network
    once for two ranks."""
    launched(monkeypatch, 16, 4)
    config = load(None, [*EIGHT_B, "parallel.tensor_parallel_size=2", "batch.tokens_per_rank=1024"])
    profile = run_profile(config, 16, 128256).profile
    plan = make_planner(config, 8, profile, static=True)([8192])
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    mesh = SimpleNamespace(exchange=None, across=None, device=torch.device("cpu"))
    spec = config.model_source(128256).spec
    made = make_attention(config, cast(Any, mesh), spec, plan, plan.layout(0, 0))(None, 0.0, None)
    ring = getattr(made, "ring", made)
    crossing = [
        peer for round_ in ring.schedule.rounds for peer, _ in round_.hops[0].receives if peer > 1
    ]
    assert len(crossing) == 3, (
        "one relayed copy from each other node, as the other rank of the node takes the second one"
    )


def planned_by(store: Path, run: Path, other: str) -> Any:
    """Returns the profile of a real run's loader, or the error; rank 1 has another file than rank
    0."""
    profile = "cpu-2core" if dist.get_rank() == 0 else other
    try:
        trainer = start(
            store,
            run,
            [f"context.profile={profile}", "train.device=cpu", "context.two_level_exchange=false"],
        )
    except ProfilesDiffer as error:
        return str(error)
    with trainer.loader:
        return next(trainer.loader).plan.profile


@pytest.mark.slow
def test_a_run_plans_by_the_scaled_profile_or_not_at_all(
    workers: Workers, store: Path, tmp_path: Path
) -> None:
    found = workers.run(planned_by, 2, store, tmp_path, "cpu-2core")
    assert found[0] == found[1]
    assert found[0].kv_bytes_per_token == 2 * 2 * 2 * 8 * 4 * 3
    assert found[0].attention_s_per_token2 == pytest.approx(CPU.attention_s_per_token2 / 4)
    assert all(
        "ranks [1] have h100-nvlink-ib" in said
        for said in workers.run(planned_by, 2, store, tmp_path, "h100-nvlink-ib")
    )


@pytest.mark.parametrize(
    "command",
    [
        ["train"],
        ["train", "--dry-run"],
        ["estimate"],
        ["measure", "--modes=auto,static", "--steps=1", "--warmup=0"],
    ],
    ids=" ".join,
)
def test_every_command_reports_the_profile(
    command: list[str], store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [
        *SMALL,
        f"data.store={store}",
        f"train.run_dir={tmp_path / 'run'}",
        "train.steps=1",
        "optimizer.warmup_steps=0",
    ]
    settings += ["batch.tokens_per_rank=1500", "context.profile=h100-nvlink-ib"]
    file = tmp_path / "run.yaml"
    file.write_text("train: {device: cpu}\n")
    assert main([*command, str(file), *(f"--{setting}" for setting in settings)]) == 0
    captured = capsys.readouterr()
    said = captured.err if "measure" in command else captured.out
    assert f"{NAMED}: scaled to this run: linear × " in said
    assert (
        "warning: profile h100-nvlink-ib is for cuda, but this run is on cpu; speeds are not scaled"
        in said
    )


SMALL_PRESET = [
    "model.preset=small",
    "train.device=cpu",
    "batch.tokens_per_rank=1024",
    "batch.global_tokens=8000",
]


def test_each_step_is_planned_once(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default of kept K and V is planned as without them, and no other settings are alike."""
    settings = [*SMALL_PRESET, f"data.store={store}", "data.max_length=1500", "train.steps=3"]
    config = load(None, settings, world_size=8)
    opened = Store.open(store)
    expected = _timeless(first_plans(config, opened, ranks=8, steps=3))
    planned = []

    def counting(*given: Any) -> Any:
        planned.append(given)
        return plan_step(*given)

    monkeypatch.setattr("longctx.training.data.plan_step", counting)
    memory = RunMemory(config.model.shape(257).spec, opened, 8, False)
    assert _timeless(memory.plans(config, 2)) == expected[:2]
    memory.loads(config.changed({"context.keep_kv": False}))
    assert _timeless(memory.plans(config, 5)) == expected
    assert _timeless(memory.plans(config, 1)) == expected[:1]
    assert len(planned) == 3
    kept = config.changed({"context.keep_kv": True})
    fails = RunMemory(config.model.shape(257).spec, opened, 8, False)
    with monkeypatch.context() as broken:
        broken.setattr("longctx.training.data.plan_step", mock.Mock(side_effect=PlanError("no")))
        with pytest.raises(PlanError):
            fails.plans(config, 2)
    assert _timeless(fails.plans(config, 2)) == expected[:2], "what failed is not kept"
    planned.clear()
    of_kept = _timeless(first_plans(kept, opened, ranks=8, steps=2))
    assert _timeless(memory.plans(kept, 2)) == of_kept
    assert len(planned) == 4


def _timeless(plans: Iterable[Plan]) -> list[Plan]:
    """Returns the plans without the time that they took to make."""
    return [replace(plan, planning_ms=0.0) for plan in plans]


@pytest.mark.slow
def test_memory_is_that_of_the_plans_that_each_choice_would_make(store: Path) -> None:
    """Recomputation and kept K and V change planned times, and so degrees and memory per rank."""
    small = [*SMALL_PRESET, f"data.store={store}", "data.max_length=1500"]
    opened, shape = Store.open(store), load(None, small).model.shape(257).spec
    for row, memory in RunMemory(shape, opened, 8, False).choices(load(None, small, world_size=8)):
        own = load(
            None, [*small, *(f"{name}={value}" for name, value in row.items())], world_size=8
        )
        assert memory == RunMemory(shape, opened, 8, False).peak(own)


def test_the_cheapest_change_fits_by_its_own_plans(store: Path) -> None:
    """One byte less than recomputation needs is not enough, whatever the plans without
    recomputation need."""
    config = load(
        None, [*SMALL_PRESET, f"data.store={store}", "data.max_length=1500"], world_size=8
    )
    opened, shape = Store.open(store), config.model.shape(257).spec

    def need(tried: Config) -> int:
        return RunMemory(shape, opened, 8, False).peak(tried).total

    available = need(config.changed({"train.recompute": "selective"})) - 1
    change = RunMemory(shape, opened, 8, False).cheapest_change(config, available)
    assert change is not None and need(config.changed(change)) <= available


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], f"{NAMED}: used unscaled for its model"),
        (["--model", "llama-3.2-1b"], "scaled to llama-3.2-1b: linear × 0.1"),
        (["--pipeline-ranks", "4"], "scaled to its model in a pipeline: linear × 0.2"),
    ],
)
def test_planning_without_a_run_reports_the_profile(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("3000\n500\n")
    common = [
        "plan",
        "--lengths",
        str(lengths),
        "--ranks",
        "4",
        "--tokens-per-rank",
        "1024",
        *arguments,
    ]
    assert main(common) == 0
    assert said in capsys.readouterr().out
    assert main([*common, "--json"]) == 0
    told = capsys.readouterr()
    assert said in told.err
    planned = HardwareProfile.from_dict(json.loads(told.out)["profile"])
    assert (apart_from(planned, H100) == H100) == (not arguments)
    assert planned.step_s > H100.step_s, "updates"
    assert main([*common, "--pipeline-ranks", "40"]) == 2
    assert "40 stages" in capsys.readouterr().err


def test_compare_scales_to_the_model_whose_bytes_it_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("30000\n500\n")
    assert (
        main(
            [
                "compare",
                "--lengths",
                str(lengths),
                "--ranks",
                "4",
                "--model",
                "llama-3.2-1b",
                "--json",
            ]
        )
        == 0
    )
    told = capsys.readouterr()
    assert f"{NAMED}: scaled to llama-3.2-1b: linear × 0.1" in told.err
    step = next(
        row["makespan_s"] for row in json.loads(told.out)["rows"] if row["planner"] == "auto"
    )
    scaled = sharded_preset_profile(
        "h100-nvlink-ib", "llama-3.2-1b", domain=4, tokens_per_rank=16384
    ).profile
    plan = make_plan([30000, 500], ranks=4, tokens_per_rank=16384, profile=scaled)
    assert step == pytest.approx(plan.makespan_s)


@pytest.mark.parametrize("preset", ["llama-3.2-1b", "qwen3-30b-a3b", "gpt-oss-20b"])
@pytest.mark.parametrize(("ranks", "tokens", "pipeline"), [(7, 64, 1), (64, 8192, 1), (12, 64, 2)])
def test_a_plan_without_a_run_costs_what_the_run_does(
    preset: str, ranks: int, tokens: int, pipeline: int
) -> None:
    """Gathers, reductions and updates included, on a profile of data sheets."""
    found = sharded_preset_profile(
        "h100-nvlink-ib",
        preset,
        domain=ranks,
        tokens_per_rank=tokens,
        pipeline=Pipeline(pipeline),
    ).profile
    settings = [
        f"model.preset={preset}",
        "model.vocab_size=128256",
        "context.profile=h100-nvlink-ib",
        "context.keep_kv=false",
        "train.device=cuda",
        "train.dtype=bfloat16",
        f"batch.tokens_per_rank={tokens}",
        f"parallel.pipeline_parallel_size={pipeline}",
    ]
    config = load(None, settings)
    spec = with_vocabulary(config.model_source(128256).spec, H100_DESCRIBED)
    of_run = scaled_profile(config, spec, ranks * pipeline).profile
    assert found == of_run
    assert found.step_s > 0, "updates"


def test_a_measured_profile_already_has_what_sharded_weights_take() -> None:
    known = preset_profile("cpu-2core", "tiny").profile
    assert (
        sharded_preset_profile("cpu-2core", "tiny", domain=4, tokens_per_rank=64).profile == known
    )


def test_float8_makes_products_faster() -> None:
    """Attention, messages and fixed costs stay as they are."""
    given = [
        "model.preset=llama-3.1-8b",
        "context.profile=h100-nvlink-ib",
        "train.device=cuda",
        "model.vocab_size=128256",
    ]
    plain, faster = (
        run_profile(load(None, [*given, *more]), 1) for more in ([], ["train.float8=rowwise"])
    )
    assert faster.profile.linear_s_per_token == pytest.approx(linear_s(FLOAT8_TIME, float8=True))
    same = ("linear_s_per_token", "query_share")
    assert apart_from(faster.profile, plain.profile, *same) == plain.profile
    said = (
        "products in float8 are taken to take 50% of the time of bfloat16; what they multiply is "
        "cast by the rate of memory"
    )
    assert said in faster.lines
