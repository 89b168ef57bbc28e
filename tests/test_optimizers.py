"""Optimizers: the same weights as torch's own on one process, whatever the split; resumed bit by bit."""

import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from longctx.config import ConfigError, load
from longctx.config.settings import OptimizerSection
from longctx.errors import UserError
from longctx.memory.loads import Load
from longctx.memory.model import RankMemory
from longctx.training.checks import changes_of_optimizer, check_groups
from longctx.training.optimizer import learning_rate
from longctx.training.run_profile import run_profile
from tests.marks import slow_unless
from tests.optimizer_cases import bytes_of_state, keys_of_moments, largest_error
from tests.training_cases import train, train_then_save
from tests.workers import Workers

EXPERTS = ["model.num_experts=4", "model.num_experts_per_tok=2", "model.moe_intermediate_size=24"]
SPLITS = {
    "1 rank": (1, []),
    "3 ranks": (3, []),
    "replicas": (2, ["parallel.shard_ranks=1"]),
    "tensor": (2, ["parallel.tensor_parallel_size=2"]),
    "tensor and domain": (4, ["parallel.tensor_parallel_size=2"]),
    "pipeline": (2, ["parallel.pipeline_parallel_size=2"]),
    "experts": (3, EXPERTS),
    "expert parallel": (2, [*EXPERTS, "parallel.expert_parallel_size=2"]),
    "expert and tensor parallel": (4, [*EXPERTS, "parallel.expert_parallel_size=2", "parallel.tensor_parallel_size=2"]),
}
QUICK = {("tensor and domain", "muon"), ("pipeline", "muon"), ("expert and tensor parallel", "muon"), ("replicas", "adamw")}
"""`tests.parity` has AdamW under every split."""
WIDE = ["model.hidden_size=512", "model.intermediate_size=512", "model.head_dim=128", "model.num_key_value_heads=4"]
WIDE += ["batch.global_tokens=1500"]
EIGHT_BIT = ["optimizer.name=adamw-8bit", *WIDE, "model.num_hidden_layers=2"]
"""Rows of whole blocks, also on two tensor ranks."""


@pytest.mark.parametrize(("split", "name"), slow_unless(lambda *case: case in QUICK, product(SPLITS, ("adamw", "muon"))))
def test_weights_are_those_of_torch_alone(workers: Workers, store: Path, tmp_path: Path, split: str, name: str) -> None:
    ranks, settings = SPLITS[split]
    settings = [*settings, f"optimizer.name={name}", "optimizer.weight_decay=0.3"]
    assert max(workers.run(largest_error, ranks, store, tmp_path, settings)) < 1e-6


@pytest.mark.parametrize("split", slow_unless(lambda split: split == "tensor", ["tensor", "3 ranks", "expert parallel"]))
def test_8_bit_weights_are_those_of_torchao_alone(workers: Workers, store: Path, tmp_path: Path, split: str) -> None:
    ranks, settings = SPLITS[split]
    wide = ["model.moe_intermediate_size=256"] if "expert" in split else []
    assert max(workers.run(largest_error, ranks, store, tmp_path, [*settings, *EIGHT_BIT, *wide], 2)) < 1e-6


@pytest.mark.slow
def test_8_bit_moments_do_not_depend_on_the_part_of_a_rank(workers: Workers, store: Path, tmp_path: Path) -> None:
    """A checkpoint of two tensor ranks goes on without them; a rank without rows, as of adapters, saves what others do."""
    settings = [*EIGHT_BIT, "batch.tokens_per_rank=1500"]
    whole = workers.run(train, 1, store, tmp_path / "whole", settings, 3)[0]
    workers.run(train_then_save, 2, store, tmp_path / "saved", [*settings, "parallel.tensor_parallel_size=2"], 1)
    again = workers.run(train, 1, store, tmp_path / "saved", settings, 2, True)[0]
    assert [m.loss for m in again] == pytest.approx([m.loss for m in whole[1:]], rel=1e-5)
    for keys in workers.run(keys_of_moments, 3, 2, 2048):
        assert keys == ["exp_avg.codes", "exp_avg.scale", "exp_avg_sq.codes", "exp_avg_sq.scale"]
    narrow = [*EIGHT_BIT, "parallel.tensor_parallel_size=2", "model.intermediate_size=256"]
    with pytest.raises(AssertionError, match="a rank has 128 of 256 columns of a parameter, no multiple of 256"):
        workers.run(train, 2, store, tmp_path / "narrow", narrow, 1)


RESUMED = {"replicas": ["optimizer.name=muon"], "expert and tensor parallel": ["optimizer.name=muon"], "3 ranks": EIGHT_BIT}


@pytest.mark.parametrize("split", slow_unless(lambda split: split == "replicas", RESUMED))
def test_runs_resume_bit_by_bit(workers: Workers, store: Path, tmp_path: Path, split: str) -> None:
    """And on another number of ranks, to the accuracy of sums in another order."""
    ranks, settings = SPLITS[split]
    settings = [*settings, *RESUMED[split], "batch.tokens_per_rank=1500"]
    whole = workers.run(train, ranks, store, tmp_path / "whole", settings, 2)[0]
    workers.run(train_then_save, ranks, store, tmp_path / "saved", settings, 1)
    again = workers.run(train, ranks, store, tmp_path / "saved", settings, 1, True)[0]
    assert [(m.step, m.loss, m.grad_norm) for m in again] == [(m.step, m.loss, m.grad_norm) for m in whole[1:]]
    if split == "3 ranks":
        alone = workers.run(train, 1, store, tmp_path / "saved", settings, 1, True)[0]
        assert [m.loss for m in alone] == pytest.approx([m.loss for m in again], rel=1e-5)


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("split", ["1 rank", "experts"])
def test_memory_of_the_state_is_foretold(workers: Workers, store: Path, tmp_path: Path, split: str, name: str) -> None:
    settings = [*SPLITS[split][1], f"optimizer.name={name}", "batch.tokens_per_rank=1500"]
    actual, expected = workers.run(bytes_of_state, 1, store, tmp_path, settings)[0]
    assert actual == expected


def test_muon_takes_less_state_and_more_time(tmp_path: Path) -> None:
    configs = {name: load(None, ["model.preset=llama-3.2-1b", f"optimizer.name={name}"]) for name in ("adamw", "muon")}
    adamw, muon = (run_profile(config, 8, 32_000) for config in configs.values())
    assert muon.profile.step_s > adamw.profile.step_s
    assert any("Muon's updates take" in line for line in muon.lines)
    spec, load_ = configs["adamw"].model_source(32_000).spec, Load(1024, 0, 0, 0, 0, 1)
    adam_memory, muon_memory = (RankMemory(spec, config, 8, load_, True, 0).fixed for config in configs.values())
    assert 0.5 < muon_memory.optimizer / adam_memory.optimizer < 0.65


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
    assert every == rates(warmup_steps=7, warmup_ratio=0.2, schedule=schedule, **more)


def test_where_decay_begins_and_ends() -> None:
    every = rates(warmup_steps=0, schedule="wsd", decay_share=0.4)
    assert every[5] == 2.0 and every[7] == pytest.approx(2 * (0.1 + 0.9 * 0.5)) and every[9] == pytest.approx(0.2)
    assert rates(warmup_steps=0, schedule="wsd", decay_share=0.0) == [2.0] * 10
    assert min(rates(10_000, warmup_steps=4, schedule="inverse_sqrt")) == 0.2


def test_a_resumed_run_may_change_its_schedule_but_not_its_optimizer(tmp_path: Path) -> None:
    before = load(None, ["optimizer.schedule=wsd", "train.steps=100"])
    (tmp_path / "config.yaml").write_text(before.to_yaml())
    changed = load(None, ["optimizer.schedule=linear", "train.steps=200"])
    assert changes_of_optimizer(before, tmp_path, resumes=True) == []
    (note,) = changes_of_optimizer(changed, tmp_path, resumes=True)
    assert note == "resumed with other settings: train.steps is 200, was 100; optimizer.schedule is linear, was wsd"
    assert changes_of_optimizer(changed, tmp_path, resumes=False) == []
    with pytest.raises(UserError, match=r"optimizer.name is muon, but checkpoints of .* have the moments of adamw"):
        changes_of_optimizer(load(None, ["optimizer.name=muon"]), tmp_path, resumes=False)


def test_groups_have_their_own_rates_and_decay(workers: Workers, store: Path, tmp_path: Path) -> None:
    ranks, settings = SPLITS["tensor"]
    embeddings, norms = "learning_rate_ratio: 0.3, weight_decay: 0.7", "learning_rate_ratio: 2.0, weight_decay: 0.1"
    groups = f"[{{match: embed, {embeddings}}}, {{match: norm, {norms}}}]"
    settings = [*settings, "optimizer.name=muon", f"optimizer.groups={groups}"]
    assert max(workers.run(largest_error, ranks, store, tmp_path, settings)) < 1e-6


def test_groups_are_checked_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="not a regular expression"):
        load(None, ["optimizer.groups=[{match: '('}]"])
    with pytest.raises(ConfigError, match=r"optimizer\.groups"):
        load(None, ["optimizer.groups=[{learning_rate_ratio: 2.0}]"])
    unused = load(None, ["model.vocab_size=300", "optimizer.groups=[{match: norm}, {match: input_layernorm}]"])
    with pytest.raises(UserError, match="has match input_layernorm, which no trained parameter has"):
        check_groups(unused, unused.model_source())
