"""Compares the memory model with the allocator; checks its choices, and that runs that cannot fit
are refused."""

import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from longctx.attention.kernels import KERNELS, KernelRequest, reference
from longctx.attention.kernels.contract import BackwardSizes, Options
from longctx.attention.kernels.flash_libraries import LIBRARIES
from longctx.attention.segments import Segment
from longctx.cli import main
from longctx.config import Config, check, load
from longctx.config.rules import broken_rules
from longctx.data.store.store import Store
from longctx.memory import fitting, host, kernels
from longctx.memory.changes import as_override, savings
from longctx.memory.fitting import DoesNotFit, RunMemory
from longctx.memory.host import host_bytes
from longctx.memory.loads import Load, loads
from longctx.memory.model import RankMemory, _moments, estimate, fits
from longctx.model.presets import ModelShape
from longctx.planning.cost.spec import Matrix, Scan
from longctx.planning.cost.work import layers_of_ranks
from longctx.training.data import plan_steps
from longctx.units import format_bytes
from tests.marks import slow_unless
from tests.memory_cases import MODEL, ledger, peak_of_step_2
from tests.training_cases import SMALL, forced
from tests.whole_size import Live
from tests.workers import Workers

ON_4 = [
    "context.mode=static",
    "context.degree=4",
    "batch.tokens_per_rank=512",
    "model.overrides.num_key_value_heads=4",
]
SWAPPED = [
    "context.mode=static",
    "context.degree=2",
    "context.ulysses_degree=2",
    "model.overrides.num_key_value_heads=4",
]
EXPERTS = [
    "model.overrides.num_experts=8",
    "model.overrides.moe_intermediate_size=192",
    "model.overrides.num_hidden_layers=4",
]
FULL, SELECTIVE, NORMS = (f"train.recompute={mode}" for mode in ("full", "selective", "norms"))
BFLOAT16, TILES = "train.dtype=bfloat16", "train.mlp_tile_tokens="
HALF, WHOLE = "batch.tokens_per_rank=1024", "batch.tokens_per_rank=2048"
MEASURED: dict[str, tuple[int, list[str]]] = {
    "bfloat16, experts, recompute full": (
        2,
        [*EXPERTS, HALF, FULL, BFLOAT16, "balance.z_loss=0.1"],
    ),
    "experts, in turns, recompute norms": (1, [*EXPERTS, WHOLE, TILES + "256", NORMS]),
    "experts of other ranks, recompute selective": (
        4,
        [
            *EXPERTS,
            *ON_4[2:],
            "parallel.expert_parallel_size=2",
            SELECTIVE,
        ],
    ),
    "bfloat16, recompute selective": (1, [WHOLE, SELECTIVE, BFLOAT16]),
    "bfloat16, recompute norms, heads swapped for tokens": (2, [*SWAPPED, HALF, NORMS, BFLOAT16]),
    "recompute mlp": (1, [WHOLE, "train.recompute=mlp", "model.overrides.intermediate_size=512"]),
    "recompute norms, split documents, norms of heads": (
        2,
        [HALF, NORMS, "model.overrides.qk_norm=true"],
    ),
    "received keys kept": (4, [*ON_4, "context.keep_kv=true", SELECTIVE]),
    "a large vocabulary, gradients reduced at once": (
        2,
        [HALF, "model.vocab_size=4096", "parallel.reduce_after=micro_batch", FULL],
    ),
    "MLP in tiles, weights gathered all step, received keys kept": (
        2,
        [
            HALF,
            "model.overrides.intermediate_size=1024",
            TILES + "128",
            "parallel.reshard_after=step",
            "context.keep_kv=true",
        ],
    ),
    "copies of the weights": (2, [HALF, "parallel.shard_ranks=1", SELECTIVE]),
    "norms of heads, biases": (
        1,
        [WHOLE, "model.overrides.qk_norm=true", "model.overrides.qkv_bias=true"],
    ),
    "pipeline": (
        2,
        [WHOLE, "parallel.pipeline_parallel_size=2", "model.overrides.num_hidden_layers=4"],
    ),
}
QUICK = [
    *(name for name in MEASURED if name.startswith(("MLP in tiles", "bfloat16, recompute norms")))
]
"""They have most of what the model of memory counts."""
MOST_LOAD = {"experts of other ranks, recompute selective": 1.25}
WITHIN = {"experts of other ranks, recompute selective": 0.2}
"""Cases whose peak differs by up to 25 % between runs: it depends on when the tokens of other ranks
arrive."""


@pytest.mark.parametrize("name", slow_unless(lambda name: name in QUICK, MEASURED))
def test_the_estimate_is_within_10_percent_of_the_allocators_peak(
    workers: Workers, store: Path, tmp_path: Path, name: str
) -> None:
    ranks, settings = MEASURED[name]
    config = load(None, [*SMALL, f"data.store={store}", *MODEL, *settings], world_size=ranks)
    opened = Store.open(store)
    second = plan_steps(config, opened, ranks, 2)[1].plan
    spec = config.model.shape(opened.tokenizer.vocab_size).spec
    placed = list(loads([second], config))
    most_load = MOST_LOAD.get(name, 2.0)
    with forced(expert_max_load=most_load):
        memory = estimate(spec, config, ranks, placed, fused=False)
        fullest = max(placed, key=lambda load: load.tokens)
        block = RankMemory(spec, config, ranks, fullest, False, 0).block
    within = WITHIN.get(name, 0.1)
    measured = math.inf
    # The lowest of up to four runs: on a loaded machine, buffers of messages to slower ranks live
    # longer.
    for run in "abcd":
        peaks = workers.run(peak_of_step_2, ranks, store, tmp_path / run, settings, most_load)
        measured = min(measured, max(peaks))
        if measured <= memory.total / (1 - within):
            break
    print(
        f"{name}: measured {format_bytes(int(measured))}, estimate {format_bytes(memory.total)}: "
        f"{memory}"
    )
    print(ledger(block, config.train.recompute))
    assert memory.total == pytest.approx(measured, rel=within)


CONFIG = load(
    None, ["model.preset=llama-3.1-8b", "batch.tokens_per_rank=16384", "train.dtype=bfloat16"]
)
SPEC = CONFIG.model.shape(128256).spec
LOAD = Load(
    tokens=16384,
    remote=3 * 16384,
    sent=3 * 8192,
    held=3 * 16384,
    fullest=3 * 16384,
    micro_batches=4,
)


def total(*changes: tuple[str, object], config: Config = CONFIG, shape: ModelShape = SPEC) -> int:
    return estimate(shape, config.changed(dict(changes)), 8, [LOAD], fused=True).total


@pytest.mark.parametrize(
    ("before", "change"),
    [
        ([("parallel.reshard_after", "step")], ("parallel.reshard_after", "block")),
        ([("context.keep_kv", True)], ("context.keep_kv", False)),
        ([], ("train.recompute", "norms")),
        ([("train.recompute", "norms")], ("train.recompute", "mlp")),
        ([("train.recompute", "mlp")], ("train.recompute", "selective")),
        ([("train.recompute", "selective")], ("train.recompute", "full")),
        ([], ("train.mlp_tile_tokens", 2048)),
        ([("train.recompute", "full")], ("parallel.reduce_after", "micro_batch")),
        ([("train.recompute", "full")], ("train.offload_activations", True)),
        ([("train.recompute", "full")], ("train.offload_optimizer", True)),
        ([("parallel.shard_ranks", 1)], ("parallel.shard_ranks", None)),
    ],
)
def test_what_saves_memory_saves_memory(
    before: list[tuple[str, object]], change: tuple[str, object]
) -> None:
    assert change in savings(CONFIG.changed(dict(before)))
    assert total(*before, change) < total(*before)


TOKEN_ON_HOST = {"full": 2 * 4096, "selective": 2 * 4096 + 2 * 4096 + 4 * 32}
"""Bytes of a token that a block of the 8B model keeps in host memory: its input, and attention's
output and log-sum-exp of 32 heads."""


@pytest.mark.parametrize("recompute", TOKEN_ON_HOST)
@pytest.mark.parametrize("pipeline", [1, 2])
def test_host_memory_of_offloaded_activations(recompute: str, pipeline: int) -> None:
    """A pipeline has as many micro-batches in flight as ranks."""
    ranks = 8 * pipeline
    given = [f"train.recompute={recompute}", "train.offload_activations=true"]
    given.append(f"parallel.pipeline_parallel_size={pipeline}")
    config = load(None, [*BASE, *given], world_size=ranks)
    loads = RunMemory(SPEC, None, ranks, True).loads(config)
    found = host_bytes(SPEC, config, ranks, loads)
    stages = layers_of_ranks(SPEC, config.pipeline, 16384)
    blocks = pipeline * max(len(stage) for stage in stages)
    assert found == blocks * 16384 * TOKEN_ON_HOST[recompute]
    off = config.changed({"train.offload_activations": False})
    assert host_bytes(SPEC, off, ranks, loads) == 0


def test_a_host_without_room_for_activations_gets_fewer_or_refuses_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 8 GPUs on this machine."""
    ranks, settings = RUNS["recomputation makes offloading possible"]
    config = load(None, [*BASE, *settings, "train.device=cuda"], world_size=ranks)
    selective = 32 * 262144 * TOKEN_ON_HOST["selective"]
    monkeypatch.setattr(host, "own_device", lambda _: (torch.device("cuda"), "NVIDIA H100"))
    memory = RunMemory(SPEC, None, ranks, True)
    recompute = []
    for free in (8 * selective, 8 * selective - 8, None):
        monkeypatch.setattr(host, "free_bytes", lambda free=free: free)
        change = memory.cheapest_change(config, 80 << 30)
        assert change is not None and change["train.offload_activations"]
        recompute.append(change["train.recompute"])
    assert recompute == ["selective", "full", "selective"]
    offloads = {"train.recompute": "selective", "train.offload_activations": True}
    monkeypatch.setattr(host, "free_bytes", lambda: 8 * selective - 8)
    with pytest.raises(DoesNotFit, match=r"needs 129.00 GiB of this machine's memory for each GPU"):
        memory.refuse_too_large(config.changed(offloads), 10**12)
    monkeypatch.setattr(host, "free_bytes", lambda: 8 * selective)
    memory.refuse_too_large(config.changed(offloads), 10**12)


CHOSEN: dict[str, Any] = {name: kernel for name, kernel in KERNELS.items() if name != "flash"}
CHOSEN |= {library.name: library for library in LIBRARIES}
WORKSPACES = {
    # dQ in float32 (16,384 rows of 32 heads); dK and dV of 49,152 rows per query head in bfloat16,
    # or of 8 heads in float32.
    ("torch's flash operators", False): 4 * 16384 * 4096 + 2 * 2 * 49152 * 4096,
    # 132 multiprocessors, 32 heads: 5 splits.
    ("torch's flash operators", True): 5 * 4 * 16384 * 4096 + 2 * 2 * 49152 * 4096,
    ("flash-attn 2", False): 4 * 16384 * 4096 + 2 * 2 * 49152 * 4096,
    ("flash-attn 3", True): 4 * 16384 * 4096 + 2 * 4 * 49152 * 1024,
    ("flash-attn 4", False): 4 * 16384 * 4096 + 2 * 4 * 49152 * 1024,
    ("triton", True): 2 * 4 * 16384 * 32,
    ("reference", True): 8 * 32 * (4 * (16384 + 49152) * 128 + 6 * 16384 * 49152),
}


@pytest.mark.parametrize(("kernel", "deterministic"), WORKSPACES)
def test_the_workspace_of_kernels_is_counted(
    kernel: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CONFIG.changed({"train.recompute": "full", "context.deterministic": deterministic})

    def working(name: str) -> int:
        monkeypatch.setattr(kernels, "kernel_on_gpus", lambda kernel, request: CHOSEN[name])
        (moment,) = (
            memory
            for memory in _moments(SPEC, config, 8, [LOAD], True)
            if "last attention" in memory.moment
        )
        return moment.working

    assert working(kernel) - working("cpu") == WORKSPACES[kernel, deterministic]


def test_every_kernel_and_library_counts_its_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    def workspace(name: str) -> int:
        monkeypatch.setattr(kernels, "kernel_on_gpus", lambda kernel, request: CHOSEN[name])
        return kernels.kernel_workspace(CONFIG, SPEC.layers[0], 100, 200)

    assert [name for name in CHOSEN if not workspace(name)] == ["cpu"]


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_the_workspace_of_the_reference_kernel_is_what_it_takes(
    softcap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "kernel_on_gpus", lambda kernel, request: reference)
    layer, queries, keys = SPEC.layers[0], 1000, 2000
    heads, dim, live = layer.num_attention_heads, layer.head_dim, Live(torch.device("cpu"))
    with FakeTensorMode():
        dout, q, out = (torch.empty(queries, heads, dim, dtype=torch.bfloat16) for _ in range(3))
        k, v = (
            torch.empty(keys, layer.num_key_value_heads, dim, dtype=torch.bfloat16)
            for _ in range(2)
        )
        with live:
            segments = [Segment(0, queries, 0, keys)]
            reference.backward(
                dout, q, k, v, out, torch.empty(queries, heads), segments, Options(1.0, softcap)
            )
    estimated = kernels.kernel_workspace(CONFIG, layer, queries, keys)
    assert 0.95 * live.peak < estimated < 1.25 * live.peak


def test_experts_that_a_token_does_not_use_are_counted() -> None:
    """Weights, moments and gradients have all experts."""
    idle, parts = 10**9, []
    for more in (0, idle):
        layers = tuple(
            replace(layer, matrices=(*layer.matrices, Matrix(1, more, used=0)))
            for layer in SPEC.layers
        )
        shape = replace(SPEC, layers=layers)
        assert shape.parameters == SPEC.parameters + more * len(layers)
        parts.append(estimate(shape, CONFIG, 8, [LOAD], fused=True).parts)
    before, after = parts
    assert after["parameters"] - before["parameters"] == 4 * idle * len(SPEC.layers) // 8
    assert after["optimizer"] - before["optimizer"] == 8 * idle * len(SPEC.layers) // 8
    assert after["gradients"] - before["gradients"] >= 4 * idle * len(SPEC.layers)


@pytest.mark.parametrize(
    ("field", "moment", "part", "bytes_each"),
    [
        ("scan", "last attention", "working", LOAD.tokens),
        ("tower_values", "end of backward", "activations", 2 * LOAD.tokens),
    ],
)
@pytest.mark.parametrize("attends", [True, False])
def test_what_only_some_models_need_is_counted(
    field: str, moment: str, part: str, bytes_each: int, attends: bool
) -> None:
    def counted(number: int) -> int:
        given = {
            "attends": attends,
            "tower_parameters": 1,
            field: Scan(0, working=number) if field == "scan" else number,
        }
        of_layers = {
            name: value for name, value in given.items() if hasattr(SPEC.largest_layer, name)
        }
        layers = tuple(replace(layer, **of_layers) for layer in SPEC.layers)
        spec = replace(
            SPEC, layers=layers, **{name: given[name] for name in given.keys() - of_layers.keys()}
        )
        (found,) = (
            memory.parts[part]
            for memory in _moments(spec, CONFIG, 8, [LOAD], True)
            if moment in memory.moment
        )
        return found

    assert counted(2 * 10**9) - counted(10**9) == bytes_each * 10**9


def test_which_kernel_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    request = KernelRequest("cuda", torch.bfloat16, 128, 128)
    found = [kernels.kernel_on_gpus(name, request) for name in ("auto", "flash", "triton")]
    assert found[2] is KERNELS["triton"]
    if not torch.cuda.is_available():
        sizes = BackwardSizes(request, 100, 200, 200, 8, 2)
        assert [kernel.workspace(sizes) for kernel in found[:2]] == [
            LIBRARIES[-1].workspace(sizes)
        ] * 2
        assert (
            kernels.kernel_on_gpus("auto", request._replace(dtype=torch.float32))
            is KERNELS["triton"]
        )
    refuses, runs = (
        SimpleNamespace(refusal=lambda request: "no"),
        SimpleNamespace(refusal=lambda request: None),
    )
    monkeypatch.setattr(kernels, "KERNELS", {"flash": refuses, "another": runs, "reference": runs})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert kernels.kernel_on_gpus("auto", request._replace(head_dim=512)) is runs


BASE = [
    "model.preset=llama-3.1-8b",
    "batch.tokens_per_rank=16384",
    "train.dtype=bfloat16",
    "context.profile=h100-nvlink-ib",
]
RUNS = {
    "recomputation makes offloading possible": (
        8,
        ["batch.tokens_per_rank=262144", "data.max_length=262144"],
    ),
    "long rings": (64, ["context.keep_kv=true"]),
    "copies of the weights": (8, ["parallel.shard_ranks=1", "parallel.reshard_after=micro_batch"]),
    "a pipeline": (8, ["parallel.pipeline_parallel_size=2", "context.two_level_exchange=false"]),
    "split matrices, which exclude tiles": (
        8,
        ["parallel.tensor_parallel_size=2", "train.recompute=selective"],
    ),
}


def every_set(config: Config, ranks: int) -> list[tuple[dict[str, object], int]]:
    """Returns every set of savings with its bytes per rank, whether the rules allow it or not."""
    values: dict[str, list[tuple[str, object] | None]] = {}
    for change in savings(config):
        values.setdefault(change[0], [None]).append(change)
    found = []
    for chosen in itertools.product(*values.values()):
        change = dict(one for one in chosen if one is not None)
        tried = config.changed(change)
        found.append((change, RunMemory(SPEC, None, ranks, True).peak(tried).total))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_change_is_named_if_there_is_one_and_it_is_the_cheapest(name: str) -> None:
    ranks, settings = RUNS[name]
    config = load(None, [*BASE, *settings], world_size=ranks)
    sets = sorted(every_set(config, ranks), key=lambda one: one[1])
    before = next(size for change, size in sets if not change)
    least = next(size for change, size in sets if not broken_rules(config.changed(change), ranks))
    assert RunMemory(SPEC, None, ranks, True).cheapest_change(config, least - 1) is None
    for available in (least, (before + 3 * least) // 4, (before + least) // 2, before - 1):
        change = RunMemory(SPEC, None, ranks, True).cheapest_change(config, available)
        enough = [other for other, size in sets if size <= available]
        assert change in enough
        check(config.changed(change), world_size=ranks)
        order = [dict([saving]) for saving in savings(config)]
        if len(change) == 1:
            cheaper = order[: order.index(change)]
        else:
            cheaper = order + [other for other in enough if other.items() < change.items()]
        assert not [
            other
            for other in cheaper
            if other in enough and not broken_rules(config.changed(other), ranks)
        ]


@pytest.mark.parametrize(
    ("ranks", "settings", "gibibytes", "change"),
    [
        (
            *RUNS["recomputation makes offloading possible"],
            80,
            {"train.recompute": "selective", "train.offload_activations": True},
        ),
        (64, ["train.recompute=full"], 24, {"context.max_remote_tokens": 16384}),
        (8, ["parallel.shard_ranks=1", "train.recompute=full"], 60, {"parallel.shard_ranks": None}),
    ],
)
def test_a_refusal_names_settings_that_can_be_pasted(
    ranks: int, settings: list[str], gibibytes: int, change: dict[str, object]
) -> None:
    config = load(None, [*BASE, *settings], world_size=ranks)
    with pytest.raises(DoesNotFit) as refused:
        RunMemory(SPEC, None, ranks, True).refuse_too_large(config, gibibytes << 30)
    told = re.search(r"that would fit is (.*?)\. `longctx estimate --all`", str(refused.value))
    assert told
    pasted = load(None, [*BASE, *settings, *told[1].split()], world_size=ranks)
    assert pasted == config.changed(change)
    RunMemory(SPEC, None, ranks, True).refuse_too_large(pasted, gibibytes << 30)


@pytest.mark.parametrize(
    ("ranks", "settings", "gigabytes"),
    [
        (1, [], 0.5),  # a context
        # With a communicator, NVIDIA/nccl 1685.
        (8, ["context.mode=static", "context.degree=1"], 1.06),
        (8, [], 4.34),  # which has sent messages to all ranks of the node, NVIDIA/nccl 1685
        (64, [], 4.34),
        (8, ["parallel.tensor_parallel_size=4"], 1.53),  # a ring of two
    ],
)
def test_gpus_need_memory_outside_of_the_allocator(
    ranks: int, settings: list[str], gigabytes: float
) -> None:
    config = load(None, [*BASE, *settings], world_size=ranks)
    loads = RunMemory(SPEC, None, ranks, True).loads(config)
    on_gpus, on_cpus = (
        estimate(SPEC, config, ranks, loads, fused=fused) for fused in (True, False)
    )
    assert (
        on_gpus.device == pytest.approx(gigabytes * 1e9, rel=0.01)
        and on_gpus.total >= on_gpus.device
    )
    assert on_cpus.device == 0
    assert not fits(SPEC, config, ranks, loads, on_gpus.total - 1, fused=True)


def test_every_saving_can_be_pasted() -> None:
    most = [
        ("parallel.reshard_after", "step"),
        ("context.keep_kv", True),
        ("parallel.shard_ranks", 1),
    ]
    known = savings(CONFIG.changed(dict(most)))
    assert len(known) > len(savings(CONFIG))
    for name, value in known:
        text = as_override(name, value)
        needs = ["train.recompute=full"] if name == "train.offload_activations" else []
        assert load(None, [*needs, text]) == load(None, needs).changed({name: value})


def test_a_refusal_names_parts_and_the_way_out() -> None:
    of_run = RunMemory(SPEC, None, 8, True)
    of_run.refuse_too_large(CONFIG, None)
    of_run.refuse_too_large(CONFIG, of_run.peak(CONFIG).total)
    with pytest.raises(
        DoesNotFit, match=r"activations .*fit is --train.recompute=norms\. `longctx estimate --all`"
    ):
        of_run.refuse_too_large(CONFIG, 90 << 30)
    with pytest.raises(
        DoesNotFit, match=r"no memory setting saves enough: lower batch\.tokens_per_rank"
    ):
        of_run.refuse_too_large(CONFIG, 1 << 30)


def test_training_is_refused_before_it_starts(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fitting, "available_bytes", lambda device, ranks: 1 << 20)
    assert main(["train", f"--data.store={store}", f"--train.run_dir={tmp_path / 'run'}"]) == 2
    assert "only 1.00 MiB is available: no memory setting saves enough" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_choices_differ_where_the_settings_do_and_leave_out_what_the_rules_refuse() -> None:
    found = {
        tuple(settings.values()): memory.total
        for settings, memory in RunMemory(SPEC, None, 8, True).choices(CONFIG)
    }
    assert len(found) == 5 * 2 * 3
    recompute = [
        found[mode, False, "block"] for mode in ("none", "norms", "mlp", "selective", "full")
    ]
    assert recompute == sorted(recompute, reverse=True)
    assert found["none", False, "block"] < found["none", False, "step"]
    assert found["none", False, "block"] < found["none", True, "block"]
    config = load(None, [*BASE, FULL, "train.offload_activations=true"], world_size=8)
    rows = [row for row, _ in RunMemory(SPEC, None, 8, True).choices(config)]
    assert len(rows) == 24
    for row in rows:
        check(config.changed(row), world_size=8)


ON_H100 = [
    "--gpus=8",
    "--train.device=cuda",
    "--model.preset=llama-3.1-8b",
    "--model.vocab_size=128256",
]
LARGE = "--batch.tokens_per_rank=65536"


TIMES = (
    r"; [\d.,]+ s a step, [\d.,]+ tokens/s per (GPU|process)(, MFU \d+%)?, [\d.,]+ (hours|minutes|seconds) for 100 steps, "
    r"[\d.,]+ (GPU|process) hours per billion tokens"
)


@pytest.mark.parametrize(
    ("settings", "verdict", "chosen", "remark"),
    [
        (
            ["--model.preset=llama-3.2-1b"],
            "fits",
            "recompute none, degree 8",
            "train.fit_memory: --context.keep_kv=true, by itself",
        ),
        (
            ["--model.preset=llama-3.2-1b", "--train.fit_memory=false"],
            "fits",
            "recompute none, degree 8",
            "1.24B parameters, computed in bfloat16, 8 ranks, full ranks, documents of 65,536 ",
        ),
        (
            [LARGE],
            "fits",
            "recompute full, degree 8",
            "train.fit_memory: --train.recompute=full, by itself",
        ),
        (
            [LARGE, "--train.fit_memory=false"],
            "does not fit",
            "recompute none, degree 8",
            "the cheapest change that would fit is --train.recompute=",
        ),
        (
            ["--batch.tokens_per_rank=1000000", "--context.profile=a100-40gb"],
            "does not fit",
            "recompute none, degree 8",
            "no memory setting saves enough",
        ),
    ],
)
def test_an_estimate_says_first_whether_the_run_that_starts_fits(
    settings: list[str],
    verdict: str,
    chosen: str,
    remark: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On GPUs that are not here: of the size in the profile. The parts are those of that run."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    gpu = r"37.25 GiB per A100-\S+" if "a100" in settings[-1] else "74.51 GiB per H100"
    assert main(["estimate", "--data.store=none", *ON_H100, *settings]) == 0
    lines = capsys.readouterr().out.splitlines()
    said = re.fullmatch(rf"{verdict}: ([\d,.]+) GiB of {gpu} \({chosen}\){TIMES}", lines[0])
    assert said, lines[0]
    assert lines[1].startswith(remark)
    parts = re.findall(r"^  [a-z]\D* ([\d.,]+) GiB$", "\n".join(lines), re.MULTILINE)
    total = sum(float(part.replace(",", "")) for part in parts)
    assert total == pytest.approx(float(said[1].replace(",", "")), abs=0.005 * (1 + len(parts)))


def test_an_estimate_says_tokens_per_second_and_utilisation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By hand, of documents of one length: matrices, and attention to half of all pairs."""
    length = 30_000
    lengths = tmp_path / "lengths.txt"
    lengths.write_text(f"{length}\n" * 40)
    assert main(["estimate", f"--lengths={lengths}", "--json", *ON_H100]) == 0
    said = json.loads(capsys.readouterr().out)
    layer = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336
    matrices = 32 * layer + 4096 * 128256
    per_token = 6 * matrices + 6 * 32 * 4096 * length
    tokens_per_s = said["step_tokens"] / said["step_s"] / 8
    assert said["tokens_per_s"] == pytest.approx(tokens_per_s)
    assert said["mfu"] == pytest.approx(tokens_per_s * per_token / 989e12, rel=2e-3)
    assert 0.2 < said["mfu"] < 0.7


def test_an_estimate_reads_no_store_that_was_not_named(
    store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Such as that of `make train`, which lies where the default is: the answer would be another
    one in another folder."""
    default = tmp_path / "stores" / "python-stdlib"
    default.parent.mkdir()
    default.symlink_to(store)
    command = [
        "estimate",
        "--model.vocab_size=1000",
        "--train.device=cuda",
        "--context.profile=h100-nvlink-ib",
    ]
    answers = []
    for folder in (tmp_path, store):
        monkeypatch.chdir(folder)
        assert main(command) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] and "full ranks, documents of 8,192 tokens" in answers[0]
    monkeypatch.chdir(tmp_path)
    assert main([*command, "--data.store=stores/python-stdlib"]) == 0
    assert "the first steps of stores/python-stdlib" in capsys.readouterr().out


def test_command(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "estimate",
        f"--data.store={store}",
        "--gpus",
        "2",
        "--train.recompute=full",
        "--context.profile=cpu-2core",
    ]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    configured = found["configured"]
    assert configured["total"] == sum(
        value for name, value in configured.items() if name not in ("moment", "total")
    )
    same = {
        "train.recompute": "full",
        "context.keep_kv": False,
        "parallel.reshard_after": "block",
        "ranks": 2,
    }
    assert [row["total"] for row in found["choices"] if same.items() <= row.items()] == [
        configured["total"]
    ]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    first, second, *others = said.splitlines()
    assert re.fullmatch(
        rf"fits: {format_bytes(configured['total'])} of .* per rank, if all are on this machine "
        rf"\(recompute full, degrees? .*\){TIMES}",
        first,
    )
    assert second.startswith("0.427M parameters, computed in float32, 2 ranks of CPUs")
    shown = {
        name: size for name, size in configured.items() if name not in ("moment", "total") and size
    }
    assert {
        line[2:22].strip().replace(" ", "_")
        for line in others
        if line.startswith("  ") and "--" not in line
    } == {*shown}
    assert sum(line.startswith("  --train.recompute=") for line in others) == 3
    assert main([*arguments, "--all"]) == 0
    assert capsys.readouterr().out.count("\n  --train.recompute=") == len(found["choices"]) == 30
    assert main(["estimate", f"--data.store={tmp_path / 'none'}"]) == 2
    refused = capsys.readouterr().err
    for way_out in ("--model.vocab_size", "--mix", "--lengths"):
        assert way_out in refused
    assert (
        main(["estimate", f"--data.store={tmp_path / 'none'}", "--model.vocab_size=1000", "--json"])
        == 0
    )
    assert json.loads(capsys.readouterr().out)["configured"]["remote_kv"] == 0
    assert main(["estimate", "--gpus=0"]) == 2
