"""A small store, small settings, and the code that the ranks of a training test run."""

import os
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from longctx.attention import RingAttention
from longctx.config import load
from longctx.data.corpus import open_corpus
from longctx.data.prepare import prepare
from longctx.data.store import Store
from longctx.parallel.mesh import make_groups
from longctx.training import checkpoint
from longctx.training.metrics import StepMetrics
from longctx.training.trainer import Trainer

MODULES = "abc.py ast.py base64.py bisect.py calendar.py cmd.py copy.py csv.py enum.py fnmatch.py glob.py heapq.py this.py"
"""Part of the embedded corpus, 80 to 60,000 bytes a file: cut at 1,500 tokens it gives both long and short documents."""

SMALL = [
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.num_attention_heads=4",
    "model.num_key_value_heads=2",
    "model.head_dim=8",
    "data.max_length=1500",
    "batch.global_tokens=4000",
    "train.steps=10",
    "optimizer.warmup_steps=2",
    "optimizer.learning_rate=0.01",
    "checkpoint.every=4",
    "log.tensorboard=false",
    "context.profile=h100-nvlink-ib",
]


def make_store(folder: Path) -> Path:
    """Prepares a byte-level store of some modules of the standard library under `folder`."""
    source = folder / "source"
    source.mkdir()
    for name in MODULES.split():
        (source / name).write_bytes((Path(sysconfig.get_path("stdlib")) / name).read_bytes())
    prepare(open_corpus(str(source)), folder / "store", tokenizer="bytes")
    return folder / "store"


def start(store: Path, run: Path, settings: list[str], *, resume: bool = False, timeout_s: float = 30.0) -> Trainer:
    """A trainer on this rank of the test's group."""
    everything = [*SMALL, f"data.store={store}", f"train.run_dir={run}", *settings]
    config = load(None, everything, world_size=dist.get_world_size())
    mesh = make_groups(torch.device("cpu"), timeout_s=timeout_s)
    run.mkdir(parents=True, exist_ok=True)
    return Trainer.start(config, mesh, Store.open(store), checkpoint.newest(run)[0] if resume else None)


def train(store: Path, run: Path, settings: list[str], steps: int = 10, resume: bool = False) -> list[StepMetrics]:
    """Metrics of the next `steps` steps."""
    trainer = start(store, run, settings, resume=resume)
    with trainer.loader:
        return [trainer.step() for _ in range(steps)]


def train_and_save(store: Path, run: Path, settings: list[str]) -> bool:
    """The real loop, with its checkpoints; whether it came to its last step."""
    return start(store, run, settings).train()


def with_loss_of_rank_1_not_finite(store: Path, run: Path) -> str:
    trainer = start(store, run, ["checkpoint.every=1"])
    before = trainer.step()
    weights = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    if dist.get_rank() == 1:
        original = Trainer._forward_backward
        Trainer._forward_backward = lambda *a: original(*a) * float("nan")  # type: ignore[method-assign]
    try:
        trainer.step()
    except ValueError as error:
        assert before.step == trainer.steps_done == 1
        same = all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(weights, trainer.model.parameters(), strict=True))
        assert same, "a refused step must not change the weights"
        return str(error)
    finally:
        if dist.get_rank() == 1:
            Trainer._forward_backward = original  # type: ignore[method-assign]
        trainer.loader.close()
    raise AssertionError("a loss that is not finite must stop the run")


def with_rank_1_failing(store: Path, run: Path, how: str) -> None:
    """Rank 1 dies, or stays silent, when it comes to attention of layer 1 in micro-batch 0 of step 2."""
    trainer = start(store, run, ["context.mode=static", "context.degree=2"], timeout_s=2.0)
    trainer.step()
    if dist.get_rank() == 1:
        original: Callable[..., Any] = RingAttention.__call__

        def fail(self: RingAttention, *arguments: Any) -> Any:
            if arguments[-1] == 1:
                if how == "dies":
                    os._exit(9)
                time.sleep(6)
            return original(self, *arguments)

        RingAttention.__call__ = fail  # type: ignore[method-assign]
    trainer.step()
