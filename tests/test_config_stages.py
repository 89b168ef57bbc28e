"""`stages`: settings that replace those of the run; errors name the stage."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from longctx.config import Config, ConfigError, describe, load

STAGES: list[dict[str, Any]] = [
    {"steps": 30, "batch": {"tokens_per_rank": 512}, "context": None},
    {"steps": 10, "data": {"stores": [{"path": "a", "weight": 1}], "max_length": 2000}, "model": {"rope_theta": 1e6}},
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"data": {"store": "b"}, "batch": {"tokens_per_rank": 1024}, "stages": STAGES}))
    return path


def problems(file: Path, *overrides: str, world_size: int | None = 2) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        load(file, overrides, world_size=world_size)
    return {problem.key: str(problem) for problem in caught.value.problems}


def test_settings_of_a_stage_replace_those_of_the_run(file: Path, tmp_path: Path) -> None:
    config = load(file, world_size=2)
    first, second = config.at_stage(0), config.at_stage(1)
    assert (first.batch.tokens_per_rank, second.batch.tokens_per_rank) == (512, 1024)
    assert (first.data.said, second.data.said, second.data.store) == ("b", "a", None)
    assert (first.model.rope_theta, second.model.rope_theta) == (None, 1e6)
    assert config.at_stage(-1) == second
    assert config.train.steps == first.train.steps == 40, "the schedule is that of the run"
    assert config.stage_ends == [30, 40] and [config.steps_of(stage) for stage in (0, 1)] == [30, 10]
    assert [config.stage_after(step) for step in (0, 29, 30, 39, 40)] == [0, 0, 1, 1, 1]
    (tmp_path / "again.yaml").write_text(config.to_yaml())
    assert load(tmp_path / "again.yaml") == config


def test_a_run_without_stages_is_one() -> None:
    config = Config()
    assert config.at_stage(0) is config.at_stage(-1) is config
    assert config.stage_ends == [100] and config.stage_after(100) == 0 and config.steps_of(0) == 100


def test_overrides_reach_a_stage(file: Path) -> None:
    given = ["stages.1.steps=7", "stages.2.batch.tokens_per_rank=2048", "data.held_out=0.1"]
    config = load(file, given, world_size=2)
    assert config.stage_ends == [7, 17] and config.train.steps == 17
    assert config.at_stage(1).batch.tokens_per_rank == 2048 and config.at_stage(0).data.held_out == 0.1
    of_one = load(file, ["batch.tokens_per_rank=77"], stage=0)
    assert of_one.batch.tokens_per_rank == 77 and not of_one.stages and of_one.train.steps == 40


@pytest.mark.parametrize(
    ("override", "key", "says"),
    [
        ("batch.tokens_per_rank=64", "batch.tokens_per_rank", "write --stages.1.batch.tokens_per_rank=64"),
        ("data.store=c", "data.store", "stage 2 sets its own value, which takes precedence"),
        ("train.steps=50", "train.steps", "must be the sum of the stages' steps, 40"),
        ("checkpoint.every=null", "checkpoint.every", "stages need checkpoints"),
        ("stages.3.steps=1", "stages.3.steps", "the run has 2 stages, counted from 1"),
        ("stages.0.steps=1", "stages.0.steps", "the run has 2 stages, counted from 1"),
        ("stages.1.steps=0", "stages.1.steps", "greater than or equal to 1"),
        ("stages.2.train.seed=1", "stages.2.train.seed", "cannot differ between stages"),
        ("stages.2.data.held_out=0.5", "stages.2.data.held_out", "set data.held_out for the whole run"),
        ("stages.2.data.tokenizer=x.json", "stages.2.data.tokenizer", "cannot differ between stages"),
        ("stages.2.model.hidden_size=64", "stages.2.model.hidden_size", "cannot differ between stages"),
        ("stages.2.parallel.shard_ranks=1", "stages.2.parallel.shard_ranks", "cannot differ between stages"),
        ("stages.2.optimizer.eps=1", "stages.2.optimizer", "not permitted"),
        ("stages.2.batch.tokens_per_rnk=1", "stages.2.batch.tokens_per_rnk", "did you mean batch.tokens_per_rank?"),
        ("stages.2.train.recompute=some", "stages.2.train.recompute", "'none', 'norms', 'mlp', 'selective' or 'full'"),
        ("stages.2.data.max_length=9000", "stages.2.data.max_length", "2 processes hold documents of at most 2048 tokens"),
        ("stages.2.data.stores=[{path: a}]", "stages.2.data.stores", "each store needs either weight or epochs"),
        ("context.degree=2", "context.degree", "only applies to context.mode static"),
        ("stages.1.batch=3", "stages.1.batch", "valid dictionary"),
    ],
)
def test_each_rule(file: Path, override: str, key: str, says: str) -> None:
    found = problems(file, override)
    assert list(found) == [key]
    assert says in found[key] and "fix: " in found[key]


@pytest.mark.parametrize("stages", ["3", "[3]", "{steps: 3}"])
def test_stages_that_are_not_a_list_of_mappings(tmp_path: Path, stages: str) -> None:
    (tmp_path / "run.yaml").write_text(f"stages: {stages}\n")
    assert "must be a list of mappings" in problems(tmp_path / "run.yaml")["stages"]
    with pytest.raises(ConfigError, match="must be a list of mappings"):
        load(tmp_path / "run.yaml", stage=-1)


def test_help_describes_stages() -> None:
    assert "--stages.1.section.key VALUE" in describe() and "train.steps is the sum" in describe()


def test_a_section_of_the_run_that_is_no_mapping(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("context: text\nstages: [{steps: 3, context: {mode: auto}}]\n")
    assert "a section must be a mapping of settings" in problems(path)["context"]
