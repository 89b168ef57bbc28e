"""Optimizers: the same weights as torch's own on one process, whatever the split; resumed bit by
bit."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F
from torch.optim._muon import _zeropower_via_newtonschulz
from torch.utils.flop_counter import FlopCounterMode
from torchao.optim import AdamW8bit

from longctx.config import ConfigError, load
from longctx.config.rules import broken_rules
from longctx.config.settings import OptimizerSection
from longctx.errors import UserError
from longctx.memory.loads import Load
from longctx.memory.model import RankMemory
from longctx.model.decoder import Decoder
from longctx.model.experts import Experts
from longctx.model.presets import PRESETS
from longctx.model.protocol import generator_of
from longctx.planning.cost.eight_bit import BLOCK, cuts_blocks, in_8_bits
from longctx.training.agreement import require_same_copies
from longctx.training.checks import changes_of_optimizer, check_groups
from longctx.training.optimizer import (
    OPTIMIZERS,
    learning_rate,
    matrices_of,
    set_learning_rate,
    sum_of_squares,
)
from longctx.training.optimizers import eight_bit
from longctx.training.optimizers.eight_bit import EightBit
from longctx.training.optimizers.muon import _matrices, orthogonalisation, work_of_rank
from longctx.training.run_profile import run_profile
from tests.marks import slow_unless
from tests.training_cases import start, train, train_then_save, whole
from tests.workers import Workers

RATES = [0.01 / step for step in range(1, 11)]


def gradient(name: str, step: int, shape: torch.Size) -> torch.Tensor:
    return torch.randn(shape, generator=generator_of(name, step, torch.device("cpu")))


def largest_error(store: Path, run: Path, settings: list[str], steps: int = 4) -> float:
    """Returns the largest difference from weights that torch's optimizers make of the same
    gradients on one process."""
    trainer = start(store, run, settings)
    trainer.loader.close()
    model, section = trainer.model, trainer.config.optimizer
    before = {name: whole(weight) for name, weight in model.named_parameters()}
    for step, rate in enumerate(RATES[:steps]):
        for name, weight in model.named_parameters():
            made = gradient(name, step, weight.shape)
            weight.grad = distribute_tensor(
                made, weight.device_mesh, weight.placements, src_data_rank=None
            )
        set_learning_rate(trainer.optimizer, rate)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
    require_same_copies(model, steps, trainer.mesh.control)
    after = {name: whole(weight) for name, weight in model.named_parameters()}
    counts = {
        f"{path}.{name}": module.count
        * (1 if trainer.mesh.experts is None else trainer.mesh.experts.size(0))
        for path, module in model.named_modules()
        if isinstance(module, Experts)
        for name, _ in module.named_parameters()
    }
    expected = torch_alone(before, counts, section, steps)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    return max(float((after[name] - expected[name]).abs().max()) for name in before)


def torch_alone(
    before: dict[str, torch.Tensor], counts: dict[str, int], section: OptimizerSection, steps: int
) -> dict[str, torch.Tensor]:
    """Returns the weights that torch's own optimizers make on one process; `counts` are numbers of
    stacked experts."""
    eight_bit, shapes = (
        section.name == "adamw-8bit",
        {name: weight.shape for name, weight in before.items()},
    )
    before = {name: padded(weight) if eight_bit else weight for name, weight in before.items()}
    parts = {
        name: [nn.Parameter(part.clone()) for part in weight.chunk(counts.get(name, 1))]
        for name, weight in before.items()
    }
    adamw: list[dict[str, Any]] = []
    matrices = []
    for name, parameters in parts.items():
        grouped = next((group for group in section.groups if group.match in name), None)
        if grouped is not None:  # of these tests all have both, and are no matrices of blocks
            more = {"ratio": grouped.learning_rate_ratio, "weight_decay": grouped.weight_decay}
            adamw.append({"params": parameters, **more})
        elif section.name == "muon" and name.startswith("layers.") and parameters[0].dim() == 2:
            matrices += parameters
        else:
            adamw.append(
                {
                    "params": parameters,
                    "weight_decay": section.weight_decay if parameters[0].dim() > 1 else 0.0,
                }
            )
    kind = AdamW8bit if eight_bit else torch.optim.AdamW
    optimizers: list[torch.optim.Optimizer] = [kind(adamw, betas=section.betas, eps=section.eps)]
    if matrices:
        decay = section.weight_decay
        muon = torch.optim.Muon(
            matrices, weight_decay=decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        )
        optimizers.append(muon)
    for step, rate in enumerate(RATES[:steps]):
        for name, parameters in parts.items():
            made = gradient(name, step, shapes[name])
            parts_of_it = (padded(made) if eight_bit else made).chunk(len(parameters))
            for parameter, part in zip(parameters, parts_of_it, strict=True):
                parameter.grad = part.clone()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                own = rate * group.get("ratio", 1.0)
                group["lr"] = torch.tensor(own) if isinstance(group["lr"], torch.Tensor) else own
            with torch.compiler.set_stance("force_eager"):
                optimizer.step()
    after = {
        name: torch.cat([part.detach() for part in parameters])
        for name, parameters in parts.items()
    }
    return {name: weight[..., : shapes[name][-1]] for name, weight in after.items()}


def padded(matrix: torch.Tensor) -> torch.Tensor:
    """Returns a matrix with zeros behind its rows, which then are whole blocks of torchao; others
    as they are."""
    return F.pad(matrix, (0, -matrix.shape[-1] % BLOCK)) if in_8_bits(matrix.shape) else matrix


def bytes_of_state(store: Path, run: Path, settings: list[str]) -> tuple[int, int]:
    """Returns the bytes of the optimizer's state after a step, but those of step counters, and what
    they should be."""
    trainer = start(store, run, settings)
    with trainer.loader:
        trainer.step()
    values = [
        value
        for state in trainer.optimizer.state.values()
        for value in state.values()
        if value.dim()
    ]
    spec = trainer.model.spec
    kind = OPTIMIZERS[trainer.config.optimizer.name]
    expected = kind.state_bytes(spec.trained_parameters, spec.trained_matrices, spec.trained_sizes)
    return sum(value.numel() * value.element_size() for value in values), expected


def keys_of_moments(rows: int, columns: int, cut: int = 0) -> list[str]:
    """Returns what this rank would save of a parameter of this size, sharded over all ranks, after
    a step."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = nn.Parameter(distribute_tensor(torch.randn(rows, columns), mesh, [Shard(cut)]))
    weight.grad = distribute_tensor(torch.randn(rows, columns), mesh, [Shard(cut)])
    optimizer = EightBit([weight], lr=0.1)
    optimizer.step()
    return sorted(optimizer.state[weight])


def resumed_in_8_bits(store: Path, run: Path) -> None:
    """Resumes a run with moments in float32 with moments in 8 bits."""
    settings = [*WIDE, "model.overrides.num_hidden_layers=2", "batch.tokens_per_rank=750"]
    train_then_save(store, run, settings, 1)
    train(store, run, [*settings, "optimizer.name=adamw-8bit"], 1, resume=True)


# --- tests

EXPERTS = [
    "model.overrides.num_experts=4",
    "model.overrides.num_experts_per_tok=2",
    "model.overrides.moe_intermediate_size=24",
]
SPLITS = {
    "1 rank": (1, []),
    "3 ranks": (3, []),
    "replicas": (2, ["parallel.shard_ranks=1"]),
    "tensor": (2, ["parallel.tensor_parallel_size=2"]),
    "tensor and domain": (4, ["parallel.tensor_parallel_size=2"]),
    "pipeline": (2, ["parallel.pipeline_parallel_size=2"]),
    "experts": (3, EXPERTS),
    "expert parallel": (2, [*EXPERTS, "parallel.expert_parallel_size=2"]),
    "expert and tensor parallel": (
        4,
        [*EXPERTS, "parallel.expert_parallel_size=2", "parallel.tensor_parallel_size=2"],
    ),
}
QUICK = ("tensor and domain", "pipeline", "expert and tensor parallel")
"""Of splits with Muon: `tests.parity` has AdamW under every split."""
WIDE = [
    "model.overrides.hidden_size=512",
    "model.overrides.intermediate_size=512",
    "model.overrides.head_dim=128",
    "model.overrides.num_key_value_heads=4",
]
WIDE += ["batch.global_tokens=1500"]
EIGHT_BIT = ["optimizer.name=adamw-8bit", *WIDE, "model.overrides.num_hidden_layers=2"]
"""Rows of whole blocks, also on two tensor ranks."""
RAGGED = [
    *EIGHT_BIT,
    "model.overrides.hidden_size=264",
    "model.overrides.intermediate_size=300",
    "model.overrides.head_dim=20",
    "model.overrides.num_experts=0",
]
"""Rows of 264, 300 and 80 numbers: none of whole blocks, and no shard of three ranks."""


@pytest.mark.parametrize("split", slow_unless(lambda split: split in QUICK, SPLITS))
def test_weights_are_those_of_torch_alone(
    workers: Workers, store: Path, tmp_path: Path, split: str
) -> None:
    ranks, settings = SPLITS[split]
    settings = [*settings, "optimizer.name=muon", "optimizer.weight_decay=0.3"]
    assert max(workers.run(largest_error, ranks, store, tmp_path, settings)) < 1e-6


@pytest.mark.parametrize(
    "split", slow_unless(lambda split: split == "3 ranks", ["tensor", "3 ranks", "expert parallel"])
)
def test_8_bit_weights_are_those_of_torchao_alone(
    workers: Workers, store: Path, tmp_path: Path, split: str
) -> None:
    ranks, settings = SPLITS[split]
    wide = ["model.overrides.moe_intermediate_size=256"] if "expert" in split else []
    assert (
        max(workers.run(largest_error, ranks, store, tmp_path, [*settings, *EIGHT_BIT, *wide], 2))
        < 1e-6
    )


@pytest.mark.parametrize(
    "split",
    slow_unless(lambda split: split == "3 ranks", ["1 rank", "3 ranks", "replicas", "pipeline"]),
)
def test_8_bit_moments_of_rows_that_are_no_whole_blocks(
    workers: Workers, store: Path, tmp_path: Path, split: str
) -> None:
    ranks, settings = SPLITS[split]
    assert max(workers.run(largest_error, ranks, store, tmp_path, [*settings, *RAGGED], 2)) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape", [(64, 320), (40, 576), (300, 16), (3, 40, 100), (4097,), (4096, 1)], ids=str
)
def test_8_bit_updates_are_the_same_when_compiled(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    """As on GPUs: torch 2.13 compiles scales that are repeated and cut to wrong values."""
    weights = []
    for update in (
        eight_bit._adamw,
        torch.compile(eight_bit._adamw, fullgraph=True, dynamic=False),
    ):
        monkeypatch.setattr(eight_bit, "_adamw", update)
        weight = nn.Parameter(torch.ones(shape))
        optimizer = EightBit([weight], lr=0.01)
        for step in range(3):
            weight.grad = gradient("weight", step, weight.shape)
            optimizer.step()
        weights.append(weight.detach())
    assert torch.allclose(*weights, atol=1e-5)


def test_8_bit_moments_of_an_earlier_version_are_no_damage(
    workers: Workers, store: Path, tmp_path: Path
) -> None:
    """It had moments of such matrices in float32."""
    with pytest.raises(
        AssertionError,
        match=r"CheckpointError: .* with another number of bits, as of an earlier version",
    ):
        workers.run(resumed_in_8_bits, 1, store, tmp_path)


@pytest.mark.parametrize("hidden", [576, 896, 2880])
def test_8_bit_state_is_as_large_as_memory_says(hidden: int) -> None:
    """Of the columns of SmolLM2, Qwen 2.5 and gpt-oss; with vectors, which stay in float32."""
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": 600,
        "num_hidden_layers": 1,
        "vocab_size": 500,
    }
    shape = PRESETS["tiny"].model_copy(update={**sizes, "head_dim": 64, "qkv_bias": True})
    model = Decoder(shape)
    optimizer = EightBit(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    values = [
        value for state in optimizer.state.values() for value in state.values() if value.dim()
    ]
    actual = sum(value.numel() * value.element_size() for value in values)
    spec = shape.spec
    assert actual < 2.1 * spec.parameters
    foretold = OPTIMIZERS["adamw-8bit"].state_bytes(
        spec.trained_parameters, spec.trained_matrices, spec.trained_sizes
    )
    assert foretold == pytest.approx(actual, rel=0.02)


@pytest.mark.parametrize("preset", PRESETS)
def test_8_bit_blocks_that_tensor_ranks_would_cut_are_refused_before_anything_starts(
    preset: str,
) -> None:
    """Of every matrix that the plan splits by columns, and no other."""
    config = load(None, [f"model.preset={preset}", "optimizer.name=adamw-8bit"])
    shape = PRESETS[preset].model_copy(update={"vocab_size": 512})
    with torch.device("meta"):
        model = Decoder(
            shape.model_copy(update={"num_hidden_layers": shape.first_dense_layers + 1})
        )
    split = [end for end, style in model.tensor_plan.items() if style == "rows"]
    weights = {
        name: weight
        for name, weight in model.named_parameters()
        if name.removesuffix(".weight").endswith(tuple(split))
    }
    assert len(weights) > shape.first_dense_layers
    for ranks in range(1, 9):
        tried = config.changed(
            {"parallel.tensor_parallel_size": ranks, "batch.tokens_per_rank": 840 * 256}
        )
        problems = {problem.key: problem for problem in broken_rules(tried, ranks)}
        cut = any(
            in_8_bits(weight.shape) and cuts_blocks(weight.shape[-1], ranks)
            for weight in weights.values()
        )
        if "parallel.tensor_parallel_size" not in problems:  # else more than KV heads
            assert cut == ("optimizer.name" in problems), ranks


@pytest.mark.slow
def test_8_bit_moments_do_not_depend_on_the_part_of_a_rank(
    workers: Workers, store: Path, tmp_path: Path
) -> None:
    """A checkpoint of two tensor ranks goes on without them; a rank without rows, as of adapters,
    saves what others do."""
    settings = [*EIGHT_BIT, "batch.tokens_per_rank=750"]
    whole = workers.run(train, 1, store, tmp_path / "whole", settings, 3)[0]
    workers.run(
        train_then_save,
        2,
        store,
        tmp_path / "saved",
        [*settings, "parallel.tensor_parallel_size=2"],
        1,
    )
    again = workers.run(train, 1, store, tmp_path / "saved", settings, 2, True)[0]
    assert [m.loss for m in again] == pytest.approx([m.loss for m in whole[1:]], rel=1e-5)
    for keys in workers.run(keys_of_moments, 3, 2, 2048):
        assert keys == [
            "exp_avg.codes",
            "exp_avg.scale",
            "exp_avg_sq.codes",
            "exp_avg_sq.scale",
            "step",
        ]
    with pytest.raises(
        AssertionError, match=r"a rank has 1025 of 2049 columns of a parameter, no multiple of 256"
    ):
        workers.run(keys_of_moments, 2, 2, 2049, 1)


RESUMED = {
    "replicas": ["optimizer.name=muon"],
    "expert and tensor parallel": ["optimizer.name=muon"],
    "3 ranks": RAGGED,
}


@pytest.mark.parametrize("split", slow_unless(lambda split: split == "replicas", RESUMED))
def test_runs_resume_bit_by_bit(workers: Workers, store: Path, tmp_path: Path, split: str) -> None:
    """And on another number of ranks, to the accuracy of sums in another order."""
    ranks, settings = SPLITS[split]
    settings = [*settings, *RESUMED[split], "batch.tokens_per_rank=750"]
    whole = workers.run(train, ranks, store, tmp_path / "whole", settings, 2)[0]
    workers.run(train_then_save, ranks, store, tmp_path / "saved", settings, 1)
    again = workers.run(train, ranks, store, tmp_path / "saved", settings, 1, True)[0]
    assert [(m.step, m.loss, m.grad_norm) for m in again] == [
        (m.step, m.loss, m.grad_norm) for m in whole[1:]
    ]
    if split == "3 ranks":
        alone = workers.run(train, 1, store, tmp_path / "saved", settings, 1, True)[0]
        assert [m.loss for m in alone] == pytest.approx([m.loss for m in again], rel=1e-5)


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("split", ["1 rank", "experts"])
def test_memory_of_the_state_is_foretold(
    workers: Workers, store: Path, tmp_path: Path, split: str, name: str
) -> None:
    settings = [*SPLITS[split][1], f"optimizer.name={name}", "batch.tokens_per_rank=750"]
    actual, expected = workers.run(bytes_of_state, 1, store, tmp_path, settings)[0]
    assert actual == expected


def test_muon_takes_less_state_and_more_time(tmp_path: Path) -> None:
    configs = {
        name: load(None, ["model.preset=llama-3.2-1b", f"optimizer.name={name}"])
        for name in ("adamw", "muon")
    }
    adamw, muon = (run_profile(config, 8, 32_000) for config in configs.values())
    assert muon.profile.step_s > adamw.profile.step_s
    assert any("updates by muon take" in line for line in muon.lines)
    spec, load_ = configs["adamw"].model_source(32_000).spec, Load(1024, 0, 0, 0, 0, 1)
    adam_memory, muon_memory = (
        RankMemory(spec, config, 8, load_, True, 0).fixed for config in configs.values()
    )
    assert 0.5 < muon_memory.optimizer / adam_memory.optimizer < 0.65


def test_work_of_muon_counts_the_matrices_that_it_updates() -> None:
    """Also those of routers; operations are those of torch's update."""
    for shape_of_matrix in ((4, 6), (6, 4)):
        with FlopCounterMode(display=False) as counted:
            _zeropower_via_newtonschulz(torch.randn(shape_of_matrix), (1.0, 1.0, 1.0), 5, 1e-7)
        assert orthogonalisation(shape_of_matrix) == counted.get_total_flops()
    shape = PRESETS["tiny-moe"].model_copy(update={"vocab_size": 64})
    updated = sum(parameter.numel() for parameter in matrices_of(Decoder(shape)))
    assert work_of_rank(shape.spec, 2)[1] == updated / 2


def test_the_parts_of_a_matrix_are_where_its_shards_are() -> None:
    """Two matrices of 3 rows and 8 columns are stacked; ranks 0 and 1 have the first rows of each
    half of the columns, ranks 2 and 3 the others."""
    weight = nn.Parameter(torch.arange(48.0).view(6, 8))
    shards = [(row, column, 4 - row // 2, 4, True) for row in (0, 4) for column in (0, 4)]
    matrices = _matrices({weight: 2}, [[shard] for shard in shards])
    assert [matrix.shape for matrix in matrices] == [(3, 8)] * 2
    assert [sorted(matrix.parts) for matrix in matrices] == [[0, 1], [0, 1, 2, 3]]
    for number, matrix in enumerate(matrices):
        whole = torch.full((3, 8), torch.nan)
        for rank, part in matrix.parts.items():
            row, column, rows, columns, _ = shards[rank]
            local = weight.detach()[row : row + rows, column : column + columns]
            whole[part.in_matrix] = local[part.in_shard]
            assert part.size == local[part.in_shard].numel()
        assert torch.equal(whole, weight.detach()[3 * number : 3 * number + 3])


def test_squares_are_summed_in_float64() -> None:
    assert sum_of_squares([torch.tensor([1.0, 2.0**-14])]) == 1 + 2.0**-28


def rates(steps: int = 10, **settings: Any) -> list[float]:
    section = OptimizerSection(learning_rate=2.0, min_learning_rate_ratio=0.1, **settings)
    return [learning_rate(step, steps, section) for step in range(1, steps + 1)]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [1.0] * 8),
        ("linear", [0.1 + 0.9 * (1 - step / 8) for step in range(1, 9)]),
        ("cosine", [0.1 + 0.9 * (1 + math.cos(math.pi * step / 8)) / 2 for step in range(1, 9)]),
        ("wsd", [1.0] * 4 + [0.1 + 0.9 * (1 - step / 4) for step in range(1, 5)]),
        ("inverse_sqrt", [math.sqrt(2 / step) for step in range(3, 11)]),
    ],
)
def test_schedules_follow_their_formulas(schedule: str, expected: list[float]) -> None:
    more = {"decay_share": 0.4} if schedule == "wsd" else {}
    every = rates(warmup_steps=2, schedule=schedule, **more)
    assert every == pytest.approx([2.0 * factor for factor in [0.5, 1.0, *expected]])
    assert every == rates(warmup_steps=0.2, schedule=schedule, **more)


def test_where_decay_begins_and_ends() -> None:
    every = rates(warmup_steps=0, schedule="wsd", decay_share=0.4)
    assert (
        every[5] == 2.0
        and every[7] == pytest.approx(2 * (0.1 + 0.9 * 0.5))
        and every[9] == pytest.approx(0.2)
    )
    assert rates(warmup_steps=0, schedule="wsd", decay_share=0.0) == [2.0] * 10
    late = rates(warmup_steps=8, schedule="wsd", decay_share=0.4)
    assert late[7:] == pytest.approx([2.0, 2 * (0.1 + 0.9 * 0.5), 0.2]), "after the warm-up"
    assert min(rates(10_000, warmup_steps=4, schedule="inverse_sqrt")) == 0.2


def test_a_resumed_run_may_change_its_schedule_but_not_its_optimizer(tmp_path: Path) -> None:
    before = load(None, ["optimizer.schedule=wsd", "train.steps=100"])
    (tmp_path / "config.yaml").write_text(before.to_yaml())
    changed = load(None, ["optimizer.schedule=linear", "train.steps=200"])
    assert changes_of_optimizer(before, tmp_path, resumes=True) == []
    (note,) = changes_of_optimizer(changed, tmp_path, resumes=True)
    assert (
        note == "resumed with other settings: train.steps is 200, was 100; optimizer.schedule is "
        "linear, was wsd"
    )
    assert changes_of_optimizer(changed, tmp_path, resumes=False) == []
    with pytest.raises(
        UserError, match=r"optimizer.name is muon, but checkpoints of .* have the moments of adamw"
    ):
        changes_of_optimizer(load(None, ["optimizer.name=muon"]), tmp_path, resumes=False)


def test_groups_have_their_own_rates_and_decay(
    workers: Workers, store: Path, tmp_path: Path
) -> None:
    ranks, settings = SPLITS["tensor"]
    embeddings, norms = (
        "learning_rate_ratio: 0.3, weight_decay: 0.7",
        "learning_rate_ratio: 2.0, weight_decay: 0.1",
    )
    groups = f"[{{match: embed, {embeddings}}}, {{match: norm, {norms}}}]"
    settings = [*settings, "optimizer.name=muon", f"optimizer.groups={groups}"]
    assert max(workers.run(largest_error, ranks, store, tmp_path, settings)) < 1e-6


def test_groups_are_checked_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="not a regular expression"):
        load(None, ["optimizer.groups=[{match: '('}]"])
    with pytest.raises(ConfigError, match=r"optimizer\.groups"):
        load(None, ["optimizer.groups=[{learning_rate_ratio: 2.0}]"])
    unused = load(
        None, ["model.vocab_size=300", "optimizer.groups=[{match: norm}, {match: input_layernorm}]"]
    )
    with pytest.raises(
        UserError, match="has match input_layernorm, which no trained parameter has"
    ):
        check_groups(unused, unused.model_source())
