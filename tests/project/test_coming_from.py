"""The page for users of other trainers: names on our side exist, and names of TRL are those of the
installed version."""

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from longctx.cli import COMMANDS, _module, main
from longctx.config import load
from longctx.config.names import SETTINGS

PAGE = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text("utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| ")
]
WIDE = [row for row in ROWS if len(row) == 6 and row[0] != "what"]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_names_on_our_side_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(WIDE) >= 35
    for name in (name for row in ROWS if row[0] != "what" for name in names(row[-1])):
        if not name.startswith("longctx "):
            assert name in SETTINGS, name
            continue
        _, command, option = name.split()
        assert command in COMMANDS and _module(command)
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert option in capsys.readouterr().out, name


def test_examples_are_settings(tmp_path: Path) -> None:
    axolotl, *blocks = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert yaml.safe_load(axolotl)["lora_r"] == 16 and len(blocks) == 2
    (torchtitan,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert tomllib.loads(torchtitan)["training"]["seq_len"] == 131072
    for block in blocks:
        (tmp_path / "run.yaml").write_text(block)
        assert load(tmp_path / "run.yaml", [], world_size=8).max_length(8) == 131072


def test_examples_have_the_tokens_per_step_of_the_others() -> None:
    """Of two GPUs in TRL and Axolotl, and of eight in torchtitan and Megatron-LM, whose degrees
    count."""
    (trl,) = re.findall(r"SFTConfig\(\n(.*?)\)", PAGE, re.DOTALL)
    of_trl = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)\b", trl)}
    axolotl, titan, megatron = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    of_axolotl = yaml.safe_load(axolotl)
    (ours,) = re.findall(r"longctx finetune .*?global_tokens (\d+)", PAGE, re.DOTALL)
    gpus = 2
    rows = of_trl["per_device_train_batch_size"] * of_trl["gradient_accumulation_steps"] * gpus
    assert rows * of_trl["max_length"] == int(ours)
    replicas = gpus // of_axolotl["context_parallel_size"]
    rows = of_axolotl["micro_batch_size"] * of_axolotl["gradient_accumulation_steps"] * replicas
    (half,) = re.findall(r"half as many tokens per step, `--batch.global_tokens (\d+)`", PAGE)
    assert rows * of_axolotl["sequence_len"] == int(half) == int(ours) // 2
    (toml,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    of_titan = tomllib.loads(toml)
    rows = (
        of_titan["training"]["local_batch_size"]
        * of_titan["parallelism"]["data_parallel_shard_degree"]
    )
    assert rows * of_titan["training"]["seq_len"] == yaml.safe_load(titan)["batch"]["global_tokens"]
    (text,) = re.findall(r"```text\n(--seq-length.*?)```", PAGE, re.DOTALL)
    of_megatron = {name: int(value) for name, value in re.findall(r"--([\w-]+) (\d+)", text)}
    tokens = of_megatron["seq-length"] * of_megatron["global-batch-size"]
    assert tokens == yaml.safe_load(megatron)["batch"]["global_tokens"]


def test_names_of_trl_are_those_of_its_config() -> None:
    trl = pytest.importorskip("trl")
    fields = {field.name for field in dataclasses.fields(trl.SFTConfig)}
    used = [name for row in WIDE for name in names(row[1]) if name != "peft_config"]
    assert len(used) > 30 and set(used) <= fields, set(used) - fields
