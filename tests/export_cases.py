"""Runs that leave a checkpoint behind, from new weights or from a checkpoint of transformers."""

from pathlib import Path

import torch
import torch.distributed as dist

from longctx.config import load
from longctx.parallel.mesh import make_groups
from longctx.training.assembly import assemble
from longctx.training.run import Run
from longctx.training.trainer import Trainer
from tests.pretrained_cases import SETTINGS


def untouched(store: Path, sources: list[Path], runs: Path, settings: list[str]) -> None:
    """On each rank: a run from each of these checkpoints that saves what it has loaded."""
    for source in sources:
        trainer = begin(store, runs / source.name, [f"model.from_pretrained={source}", *settings])
        with trainer.loader:
            trainer.save()
        del trainer


def begin(store: Path, run: Path, settings: list[str]) -> Trainer:
    everything = [
        *SETTINGS,
        f"data.store={store}",
        f"train.run_dir={run}",
        "log.tensorboard=false",
        *settings,
    ]
    config = load(None, everything, world_size=dist.get_world_size())
    parallel = config.parallel
    sizes = {"tensor": parallel.tensor_parallel_size, "pipeline": parallel.pipeline_parallel_size}
    run.mkdir(parents=True, exist_ok=True)
    return assemble(Run.open(config), make_groups(torch.device("cpu"), timeout_s=60.0, **sizes))
