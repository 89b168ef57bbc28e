"""A loop of one's own: its trainer needs no store, saves, resumes and is exported."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from longctx.config import load
from longctx.data.rollouts import Rollouts
from longctx.parallel.mesh import make_groups
from longctx.training import loop
from longctx.training.build import sizes_of_groups
from longctx.training.saved.checkpoint_io import CheckpointError
from longctx.training.saved.export import export
from longctx.training.saved.run_folder import RunFolderError
from longctx.training.trainer import Trainer
from tests.huggingface_cases import build_model
from tests.workers import Workers

LORA = ["lora.rank=4", "lora.alpha=12"]


def join(config: Any, launch: Any, device: torch.device, check: Any) -> Any:
    """Groups of the processes that the test has joined already."""
    return make_groups(device, **sizes_of_groups(config), timeout_s=30.0, check=check)


def begin(checkpoint: Path, run: Path, settings: list[str], resume: bool = False) -> Trainer:
    everything = [f"model.from_pretrained={checkpoint}", f"train.run_dir={run}", "batch.tokens_per_rank=100", "train.steps=5"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "join_run", join)
        return loop.start(load(None, [*everything, "policy.loss=grpo", "log.tensorboard=false", *settings]), resume=resume)


def rollouts(step: int) -> Rollouts:
    generator = torch.Generator().manual_seed(step)
    ids = partial(torch.randint, 0, 200, generator=generator)
    return Rollouts([ids((20,))] * 4, [ids((n,)) for n in (9, 30, 2, 14)], rewards=[0.0, 1.0, 0.5, 0.0])


def steps(trainer: Trainer, count: int) -> list[tuple[float | None, float]]:
    return [(m.reward, m.grad_norm) for m in (trainer.step(rollouts(trainer.steps_done)) for _ in range(count))]


def saved_and_resumed(checkpoint: Path, run: Path, settings: list[str]) -> dict[str, torch.Tensor]:
    """On each rank: three steps are the same with a checkpoint after the second. Returns the weights after the second."""
    trainer = begin(checkpoint, run, settings)
    assert (trainer.log is not None) == (trainer.mesh.world_rank == 0)
    steps(trainer, 2)
    trainer.save()
    weights, last = dict(trainer.weights()), steps(trainer, 1)
    with pytest.raises(RunFolderError, match="contains a run with a checkpoint at step 2"):
        begin(checkpoint, run, settings)
    resumed = begin(checkpoint, run, settings, resume=True)
    assert resumed.steps_done == 2 and steps(resumed, 1) == last
    with pytest.raises(CheckpointError, match="contains another model"):
        begin(checkpoint, run, [] if settings else LORA, resume=True)
    return weights


@pytest.mark.parametrize("settings", [[], LORA], ids=["whole", "LoRA"])
def test_a_loop_without_a_store_saves_resumes_and_is_exported(workers: Workers, tmp_path: Path, settings: list[str]) -> None:
    source = tmp_path / "source"
    build_model("llama", "eager", vocab_size=260).save_pretrained(source)
    (source / "tokenizer.json").write_text("{}")
    weights, _ = workers.run(saved_and_resumed, 2, source, tmp_path / "run", settings)
    done = export(tmp_path / "run", tmp_path / "out", merge=bool(settings))
    assert done.step == 2 and (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(exported[name], weight) for name, weight in weights.items())
