"""Versions of transformers and TRL: older ones are refused by name, and extras install beside other
tools."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from transformers import Trainer, TrainingArguments

from longctx.trainers import TrainerError, dynamic_context_parallel, restore, versions
from longctx.trainers import refusals as refused
from tests.trainer_cases import (
    LONGEST,
    PROFILE,
    arguments,
    as_rank,
    as_rank_alone,
    documents,
    model,
    pad,
    tokenizer,
)
from tests.workers import Workers

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("package", "version", "old"),
    [
        ("transformers", "5.5.4", True),
        ("transformers", "4.57.0", True),
        ("transformers", "5.6.0", False),
        ("transformers", "6.0.0.dev0", False),
        ("trl", "0.24.0", True),
        ("trl", "1.9.0", True),
        ("trl", "1.15.0rc1", False),
        ("trl", "of a fork", False),
    ],
)
def test_a_version_is_compared_with_the_least(
    monkeypatch: pytest.MonkeyPatch, package: str, version: str, old: bool
) -> None:
    monkeypatch.setattr(versions, "version", lambda name: version)
    assert versions.is_too_old(package) == old


def older(monkeypatch: pytest.MonkeyPatch, package: str, version: str) -> None:
    found = versions.version
    for module in (versions, refused):
        monkeypatch.setattr(
            module, "version", lambda name: version if name == package else found(name)
        )


def test_an_older_transformers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank_alone()
    trainer = Trainer(
        model("qwen2"),
        TrainingArguments(**arguments(tmp_path, 1, 1, eval_strategy="no")),
        data_collator=pad,
        train_dataset=documents(12),
    )
    older(monkeypatch, "transformers", "5.2.0")
    with pytest.raises(
        TrainerError, match=r"transformers is 5.2.0, whose Trainer longctx does not know"
    ):
        dynamic_context_parallel(trainer, profile=PROFILE)


def test_trainers_of_an_older_trl_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trl import SFTConfig, SFTTrainer

    as_rank_alone()
    args = SFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, max_length=None)
    rows = [{"input_ids": row["input_ids"]} for row in documents(8)]
    trainer = SFTTrainer(
        model("qwen2"),
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
    )
    older(monkeypatch, "trl", "1.9.0")
    with pytest.raises(TrainerError, match=r"TRL is 1.9.0, in which SFTTrainer has no fused head"):
        dynamic_context_parallel(trainer, profile=PROFILE)


def bounds(extra: str) -> str:
    return (ROOT / "pyproject.toml").read_text("utf-8").split(f"\n{extra} = ")[1].split("\n")[0]


def test_extras_begin_and_end_where_versions_are_known() -> None:
    for package, extra in (("transformers", "trainer"), ("trl", "trl")):
        first, last = re.search(rf'"{package}>=([\d.]+),<([\d.]+)"', bounds(extra)).groups()
        assert tuple(map(int, first.split("."))) == versions.LEAST[package]
        major, minor = versions.NEWEST[package]
        assert tuple(map(int, last.split("."))) == (major, minor + 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "tool", ["axolotl>=0.19", "llamafactory>=0.9.5", "ms-swift>=4.6", "unsloth>=2026.10"]
)
def test_the_extra_installs_beside_a_tool(tmp_path: Path, tool: str) -> None:
    """At its newest: resolved, not installed."""
    uv = tmp_path / "uv"
    install = [sys.executable, "-m", "pip", "install", "-q", "--target", str(uv), "uv"]
    subprocess.run(install, check=True, timeout=300)
    wanted = tmp_path / "wanted.in"
    wanted.write_text(f"longctx-train[trainer] @ {ROOT.as_uri()}\n{tool}\n")
    command = [str(uv / "bin" / "uv"), "pip", "compile", "-q", "--python-version", "3.12"]
    done = subprocess.run(
        [*command, str(wanted)], capture_output=True, text=True, timeout=600, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^transformers==5\.", done.stdout, re.M)


def with_buffers(folder: Path, broadcast: bool | None) -> str:
    """What is refused of a model whose buffers are in the order of a set, as in transformers
    5.6."""
    ranks = as_rank()
    made = model("qwen2")
    names = ["full", "sliding"]
    if dist.get_rank() == 1:
        names.reverse()
    for name in names:
        made.model.register_buffer(name, torch.zeros(1), persistent=False)
    options = {"eval_strategy": "no", "ddp_broadcast_buffers": broadcast}
    trainer = Trainer(
        made,
        TrainingArguments(**arguments(folder, ranks, 1, **options)),
        data_collator=pad,
        train_dataset=documents(12),
    )
    try:
        dynamic_context_parallel(trainer, profile=PROFILE, tokens_per_rank=LONGEST)
    except TrainerError as error:
        return str(error)
    restore(trainer)
    return ""


def test_buffers_that_ddp_would_mix_are_refused(workers: Workers, tmp_path: Path) -> None:
    """Unless nothing sends them."""
    for said in workers.run(with_buffers, 2, tmp_path, None):
        assert "buffers of Qwen2ForCausalLM are in other orders on other ranks" in said
    assert workers.run(with_buffers, 1, tmp_path, None) == [""]
    assert workers.run(with_buffers, 2, tmp_path, False) == ["", ""]
