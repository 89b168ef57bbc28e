"""LoRA: the run of plain peft and transformers, however it is split over ranks; what checkpoints hold; what peft loads."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from tests.training_cases import make_store
from tests.workers import Workers

pytest.importorskip("peft")
from transformers import AutoModelForCausalLM

from tests.lora_cases import (
    gathered_losses,
    make_checkpoint,
    reference,
    resumed,
    resuming_fails,
    run,
    run_with_checkpoints,
    settings_of,
)

KINDS = ("llama", "mixtral", "gpt2")
MODES = {
    "static": ["context.mode=static", "batch.tokens_per_rank=200"],
    "auto": ["context.mode=auto", "batch.tokens_per_rank=200"],
    "degree 1": ["context.mode=static", "context.degree=1", "batch.tokens_per_rank=300"],
}
"""In the first two a rank holds less than the longest document has, so that some are split."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("store"), (60, 110, 300, 80))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {kind: make_checkpoint(folder, kind) for kind in KINDS}


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    """Results of one process, by type of model."""
    return {}


@pytest.mark.parametrize(
    ("kind", "ranks", "mode"),
    [
        ("llama", 1, "degree 1"),
        ("llama", 2, "static"),
        ("llama", 2, "auto"),
        ("llama", 3, "auto"),
        ("llama", 3, "degree 1"),
        ("mixtral", 2, "auto"),
        ("mixtral", 3, "static"),
        ("gpt2", 2, "auto"),
        ("gpt2", 3, "auto"),
    ],
)
def test_ten_steps_are_those_of_peft(
    workers: Workers,
    store: Path,
    checkpoints: dict[str, Path],
    tmp_path: Path,
    known: dict[str, Any],
    kind: str,
    ranks: int,
    mode: str,
) -> None:
    settings = settings_of(checkpoints[kind], *MODES[mode])
    targets: Any = ["q_proj", "k_proj", "v_proj", "o_proj"] if kind == "mixtral" else "all-linear"
    results = workers.run(run, ranks, store, tmp_path, settings)
    if kind not in known:
        known[kind] = results[0]["first"], *reference(checkpoints[kind], store, settings, results[0]["first"], targets)
    first, losses, last = known[kind]
    assert results[0]["first"].keys() == first.keys()
    for name, value in results[0]["first"].items():
        assert torch.equal(value, first[name]), f"{name} begins elsewhere on another number of ranks"
        assert bool(value.any()) == ("lora_A" in name)
    assert ranks == 1 or mode == "degree 1" or all(result["split"] for result in results)
    assert gathered_losses(results) == pytest.approx(losses, rel=1e-5)
    assert (ranks, mode) != (3, "degree 1") or any(result["empty"] for result in results)
    for name, value in last.items():
        error = (results[0]["last"][name] - value).norm() / value.norm()
        assert error < 1e-3, (name, error)
    for result in results:
        assert result["frozen stays"]
        assert result["dtypes"] == ({"torch.float32"}, {"torch.float32"})


MOST = ["context.mode=auto", "batch.tokens_per_rank=200"]


def test_a_checkpoint_holds_adapters_alone_and_resumes(
    workers: Workers, store: Path, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Bit by bit on as many ranks; the same adapters on another number of them, where sums have another order."""
    settings = settings_of(checkpoints["llama"], *MOST)
    ended = workers.run(run_with_checkpoints, 2, store, tmp_path / "whole", settings)[0]
    again = workers.run(run_with_checkpoints, 2, store, tmp_path / "again", settings)[0]
    assert all(torch.equal(value, again[name]) for name, value in ended.items()), "a run is not repeatable at all"
    folder = tmp_path / "whole" / "checkpoints" / "step-000005"
    size = sum(weight.numel() * weight.element_size() for weight in ended.values())
    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    assert {name for name in metadata if name.startswith("model.")} == {f"model.hf.{name}" for name in ended}
    assert {name.split(".hf.")[-1] for name in metadata if name.startswith("optimizer.state.")} <= {
        f"{name}.{moment}" for name in ended for moment in ("step", "exp_avg", "exp_avg_sq")
    }
    assert sum(file.stat().st_size for file in folder.glob("*.distcp")) < 3 * size + 60_000
    state = json.loads((folder / "state.json").read_text("utf-8"))["model"]["lora"]
    assert state["rank"] == 4 and state["alpha"] == 12.0 and state["target_modules"] == "all-linear"
    assert state["base"] == str(checkpoints["llama"])
    for ranks in (2, 3):
        other = tmp_path / f"on-{ranks}"
        shutil.copytree(folder, other / "checkpoints" / "step-000005")
        for found in workers.run(resumed, ranks, store, other, settings):
            for name, value in ended.items():
                if ranks == 2:
                    assert torch.equal(found[name], value), name
                torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5)


def test_other_adapters_or_another_base_are_refused_on_resume(
    workers: Workers, store: Path, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    settings = settings_of(checkpoints["llama"], *MOST, "train.steps=5")
    workers.run(run_with_checkpoints, 1, store, tmp_path / "run", settings)
    other = tmp_path / "other"
    shutil.copytree(checkpoints["llama"], other)
    model = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.add_(1e-3)
    model.save_pretrained(other)
    moved = tmp_path / "moved"
    shutil.copytree(checkpoints["llama"], moved)
    for change, message in (
        (["lora.rank=8"], "lora.rank is 8, was 4"),
        (["lora.alpha=8"], r"lora.alpha is 8.0, was 12.0"),
        (["lora.target_modules=[q_proj]"], r"lora.target_modules is \['q_proj'\], was 'all-linear'"),
        (["lora.rank=null", "lora.alpha=null"], "it holds adapters of LoRA: give lora.rank 4"),
        ([f"model.from_pretrained={other}"], f"the weights of {other} are not those of {checkpoints['llama']}"),
    ):
        said = workers.run(resuming_fails, 1, store, tmp_path / "run", [*settings, *change])
        assert re.search(message, said[0]), said[0]
    elsewhere = [*settings, f"model.from_pretrained={moved}", "train.steps=6", "checkpoint.every=6"]
    assert workers.run(resumed, 1, store, tmp_path / "run", elsewhere)
    full = [*settings, "lora.rank=null", "lora.alpha=null"]
    workers.run(run_with_checkpoints, 1, store, tmp_path / "full", full)
    assert "it was trained without LoRA" in workers.run(resuming_fails, 1, store, tmp_path / "full", settings)[0]


@pytest.mark.parametrize(
    "setting",
    ["train.recompute=selective", "train.recompute=full", "train.compile=true", "parallel.reduce_after=micro_batch"],
)
def test_the_run_is_the_same_with(
    workers: Workers, store: Path, checkpoints: dict[str, Path], tmp_path: Path, known: dict[str, Any], setting: str
) -> None:
    settings = settings_of(checkpoints["llama"], *MOST)
    if "plain" not in known:
        known["plain"] = workers.run(run, 2, store, tmp_path / "plain", settings, 3)[0]["losses"]
    found = workers.run(run, 2, store, tmp_path / "other", [*settings, setting], 3)
    assert gathered_losses(found) == pytest.approx(known["plain"], rel=1e-5)


def test_the_frozen_base_is_bfloat16_and_adapters_float32(
    workers: Workers, store: Path, checkpoints: dict[str, Path], tmp_path: Path, known: dict[str, Any]
) -> None:
    settings = settings_of(checkpoints["llama"], *MOST)
    if "plain" not in known:
        known["plain"] = workers.run(run, 2, store, tmp_path / "plain", settings, 3)[0]["losses"]
    results = workers.run(run, 2, store, tmp_path / "bfloat16", [*settings, "train.dtype=bfloat16"], 3)
    assert gathered_losses(results) == pytest.approx(known["plain"], rel=0.02)
    for result in results:
        assert result["dtypes"] == ({"torch.bfloat16"}, {"torch.float32"})
        assert result["frozen stays"]
    assert sum(result["moments"] for result in results) == 2 * sum(value.numel() for value in results[0]["last"].values())
