"""A small store, small settings, and the code that the ranks of a training test run."""

import gc
import itertools
import json
import os
import sysconfig
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.filesystem
from torch.distributed.tensor import DTensor

from longctx.attention import RingAttention
from longctx.checksums import sealed
from longctx.config import Config, load
from longctx.data.records.sources import open_corpus
from longctx.data.store.prepare import prepare
from longctx.parallel.mesh import make_groups
from longctx.parallel.pipeline import _WatchedStage
from longctx.parallel.sharding import reduce_gradients
from longctx.planning.layout import Layout
from longctx.training import runner
from longctx.training.assembly import assemble
from longctx.training.build import sizes_of_groups
from longctx.training.metrics import StepMetrics
from longctx.training.optimizer import learning_rate, make_optimizer
from longctx.training.run import Run
from longctx.training.runner import ModelRunner
from longctx.training.saved import checkpoint
from longctx.training.trainer import Trainer

CPU = torch.device("cpu")
MODULES = (
    "abc.py ast.py base64.py bisect.py calendar.py cmd.py copy.py csv.py enum.py fnmatch.py "
    "glob.py heapq.py this.py"
)
"""Part of the embedded corpus, 80 to 60,000 bytes a file."""

SMALL = [
    "model.overrides.hidden_size=32",
    "model.overrides.intermediate_size=64",
    "model.overrides.num_attention_heads=4",
    "model.overrides.num_key_value_heads=2",
    "model.overrides.head_dim=8",
    "data.max_length=750",
    "batch.global_tokens=2000",
    "train.steps=10",
    "optimizer.warmup_steps=2",
    "optimizer.learning_rate=0.01",
    "checkpoint.every=4",
    "log.tensorboard=false",
    f"context.profile={Path(__file__).parent / 'as_given.yaml'}",
]


def make_store(folder: Path, lengths: Sequence[int] = (125, 250, 525, 187)) -> Path:
    """Prepares a byte-level store under `folder`: of some modules of the standard library a piece
    of each of these lengths.

    One long for every three short ones, so that degrees differ within a step: whole modules would
    all be cut to the longest.
    """
    source = folder / "source"
    source.mkdir()
    for name in MODULES.split():
        text = (Path(sysconfig.get_path("stdlib")) / name).read_bytes()
        for piece, length in enumerate(lengths):
            (source / f"{piece}-{name}").write_bytes(
                text[max(lengths) * piece :][:length] or text[:length]
            )
    prepare(open_corpus(str(source)), folder / "store", tokenizer="bytes")
    return folder / "store"


def pretend_checkpoints(run: Path, *steps: int) -> None:
    """Makes folders of checkpoints without weights."""
    for step in steps:
        state = run / "checkpoints" / f"step-{step:06d}" / "state.json"
        state.parent.mkdir(parents=True)
        state.write_text(json.dumps(sealed({"step": step, "files": {}, "checksums": {}})))


def whole(tensor: Any) -> torch.Tensor:
    """Returns a copy of a tensor, or of all shards of one."""
    copied: torch.Tensor = (
        (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
    )
    return copied


def steps_in(run: Path) -> list[dict[str, Any]]:
    """Returns the lines of metrics.jsonl, but not one that is being written."""
    path = run / "metrics.jsonl"
    return (
        [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        if path.exists()
        else []
    )


@contextmanager
def forced(**values: Any) -> Iterator[None]:
    """Within this block Config has other values of what no setting changes, by name."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setattr(Config, name, value)
        yield


def start(
    store: Path,
    run: Path,
    settings: list[str],
    *,
    resume: bool = False,
    timeout_s: float = 30.0,
    device: torch.device = CPU,
    traced: range | None = None,
) -> Trainer:
    """A trainer on this rank of the test's group."""
    everything = [*SMALL, f"data.store={store}", f"train.run_dir={run}", *settings]
    config = load(None, everything, world_size=dist.get_world_size())
    mesh = make_groups(device, **sizes_of_groups(config), timeout_s=timeout_s)
    run.mkdir(parents=True, exist_ok=True)
    found = checkpoint.newest(run)[0] if resume else None
    return assemble(Run.open(config, checkpoint=found, traced=traced), mesh)


@contextmanager
def optimizer_of_gpus() -> Iterator[None]:
    """Within this block trainers get fused AdamW, as on a GPU."""

    def fused(
        model: Any, settings: Any, device: torch.device, stage: Any = None
    ) -> torch.optim.Optimizer:
        optimizer = make_optimizer(model, settings, device, stage=stage)
        for group in optimizer.param_groups:
            group["fused"] = True
        return optimizer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "make_optimizer", fused)
        yield


def train(
    store: Path,
    run: Path,
    settings: list[str],
    steps: int = 10,
    resume: bool = False,
    timeout_s: float = 30.0,
) -> list[StepMetrics]:
    """Metrics of the next `steps` steps."""
    trainer = start(store, run, settings, resume=resume, timeout_s=timeout_s)
    with trainer.loader:
        return [trainer.step() for _ in range(steps)]


def train_and_save(store: Path, run: Path, settings: list[str]) -> bool:
    """The real loop, with its checkpoints; whether it came to its last step."""
    return start(store, run, settings).train()


def train_then_save(store: Path, run: Path, settings: list[str], steps: int) -> None:
    """Steps, and a checkpoint behind the last one."""
    trainer = start(store, run, settings)
    with trainer.loader:
        for _ in range(steps):
            trainer.step()
        trainer.save()


def resumed_with(
    store: Path, run: Path, settings: list[str], other: list[str]
) -> list[dict[str, Any]]:
    """Parameter groups, without the parameters, of a run of two steps that resumed with `other`
    settings."""
    saved = start(store, run, settings)
    with saved.loader:
        for _ in range(2):
            saved.step()
        saved.save()
    resumed = start(store, run, [*settings, *other], resume=True)
    resumed.loader.close()
    for a, b in zip(saved.model.parameters(), resumed.model.parameters(), strict=True):
        for name, value in saved.optimizer.state[a].items():
            before, after = (
                x.to_local() if isinstance(x, DTensor) else x
                for x in (value, resumed.optimizer.state[b][name])
            )
            assert torch.equal(before, after), name
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in resumed.optimizer.param_groups
    ]


def steps_not_finite(
    store: Path, run: Path, what: str, spoiled: list[int], settings: list[str]
) -> tuple[list[bool], str]:
    """Trains with a loss or a gradient of rank 1 that is NaN in some steps. Returns which were
    skipped, and the error."""
    trainer, skipped, error = start(store, run, settings), list[bool](), ""
    original = ModelRunner.forward_backward

    def spoil(self: ModelRunner, *arguments: Any) -> torch.Tensor:
        loss = original(self, *arguments)
        if trainer.steps_done + 1 not in spoiled or dist.get_rank() != 1:
            return loss
        if what == "loss":
            return loss * float("nan")
        if (gradient := self.model.norm.weight.grad) is not None:
            gradient.to_local().fill_(float("nan"))
        return loss

    with pytest.MonkeyPatch.context() as patch, trainer.loader:
        patch.setattr(ModelRunner, "forward_backward", spoil)
        while len(skipped) < 7 and not error:
            before = [
                parameter.detach().to_local().clone() for parameter in trainer.model.parameters()
            ]
            try:
                skipped.append(trainer.step().skipped)
            except ValueError as refused:
                error = str(refused)
            same = all(
                torch.equal(a, b.to_local())
                for a, b in zip(before, trainer.model.parameters(), strict=True)
            )
            assert same == bool(error or skipped[-1]), (
                "the weights change unless the step is skipped or refused"
            )
            assert all(
                bool(parameter.to_local().isfinite().all())
                for parameter in trainer.model.parameters()
            )
    return skipped, error


def without_targets_in_step_3(store: Path, run: Path, settings: list[str]) -> list[StepMetrics]:
    """Three steps, of which the last has no target: weights, moments and biases stay, bit by
    bit."""
    trainer = start(store, run, ["optimizer.weight_decay=0.1", *settings])

    def values() -> list[torch.Tensor]:
        states = [trainer.optimizer.state[parameter] for parameter in trainer.optimizer.state]
        held = [
            *trainer.model.parameters(),
            *trainer.model.buffers(),
            *(value for state in states for value in state.values()),
        ]
        return [
            (value.to_local() if isinstance(value, DTensor) else value).detach().clone()
            for value in held
        ]

    with trainer.loader:
        metrics = [trainer.step(), trainer.step()]
        batch, before = next(trainer.loader), values()
        for micro_batch in batch.micro_batches:
            micro_batch.labels.fill_(-100)
        metrics.append(trainer.step(replace(batch, target_tokens=0)))
        assert all(map(torch.equal, before, values()))
        assert trainer.steps_done == 3 and not trainer.finite.skipped
    return metrics


def with_another_plan_on_rank_1(store: Path, run: Path) -> None:
    mode = "context.mode=static" if dist.get_rank() == 1 else "context.mode=auto"
    trainer = start(store, run, [mode])
    with trainer.loader:
        trainer.step()


def host_gathers(store: Path, run: Path, settings: list[str], ready: bool) -> list[int]:
    """Returns how often each step gathers over all processes on the host; its next step is `ready`
    at that time, or not."""
    trainer = start(store, run, settings)
    share = trainer._gather
    if ready:
        trainer._gather = lambda *given: (trainer.loader._ahead.result(), share(*given))[1]
    else:
        trainer.loader.next_hash = lambda: None if dist.get_rank() else "0" * 64
    counts: list[int] = []

    def counting(collective: Any) -> Any:
        def counted(*given: Any, **named: Any) -> Any:
            counts[-1] += named.get("group") is trainer.mesh.control
            return collective(*given, **named)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather", "all_gather_object", "all_reduce", "broadcast", "barrier"):
            patch.setattr(dist, name, counting(getattr(dist, name)))
        with trainer.loader:
            for _ in range(4):
                counts.append(0)
                trainer.step()
    return counts


def with_another_plan_later(store: Path, run: Path) -> None:
    """The plan of step 3 is another one on rank 1."""
    trainer = start(store, run, [])
    with trainer.loader:
        trainer.step()
        trainer.loader._ahead.result()
        if dist.get_rank() == 1:
            trainer.loader.planner = start(store, run, ["context.mode=static"]).loader.planner
        else:
            start(store, run, [])  # as it is collective
        trainer.step()
        trainer.step()


def clipped_and_at_the_right_rate(store: Path, run: Path) -> None:
    """Looks at the gradients and rates that the optimizer is given."""
    greatest = 0.01
    trainer = start(store, run, [f"optimizer.clip_grad_norm={greatest}"])
    seen: list[tuple[float, float]] = []

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        squares = sum(
            float(p.grad.full_tensor().double().square().sum()) for p in trainer.model.parameters()
        )
        seen.append((squares**0.5, optimizer.param_groups[0]["lr"]))

    trainer.optimizer.register_step_pre_hook(look)
    with trainer.loader:
        metrics = [trainer.step() for _ in range(3)]
    for step, (norm, rate) in enumerate(seen, start=1):
        assert abs(norm / greatest - 1) < 1e-3, (
            f"the gradient has norm {norm} after clipping to {greatest}"
        )
        assert metrics[step - 1].grad_norm > 10 * greatest, "the norm before clipping is reported"
        assert rate == metrics[step - 1].lr == learning_rate(step, 10, trainer.config.optimizer)


def skipped_by_collections(store: Path, run: Path) -> list[int]:
    """Objects that garbage collection skips before the optimizer of each of three steps, and after
    the run."""
    trainer, counts = start(store, run, ["train.steps=3"]), list[int]()
    trainer.optimizer.register_step_pre_hook(lambda *_: counts.append(gc.get_freeze_count()))
    assert trainer.train()
    return [*counts, gc.get_freeze_count()]


def reduced_in_float32(store: Path, run: Path) -> None:
    """Ranks hold gradients 1 and 1 + 2⁻⁷ of opposite sign, next to 256: bfloat16 sums would lose
    the difference."""
    trainer = start(store, run, ["train.dtype=bfloat16"])
    trainer.loader.close()
    model, rank = trainer.model, dist.get_rank()
    zero = torch.zeros(0, dtype=torch.int64)
    layout = Layout(0, rank, ())
    factors = [(256.0, 1.0), (-256.0, 2.0**-7)][rank]
    for number, factor in enumerate(factors):
        reduce_gradients(model, in_this_backward=number == len(factors) - 1)
        made = model(
            zero,
            zero,
            RingAttention(layout),
            lambda hidden, weight: hidden.sum() + weight.float().sum(),
        )
        (made * factor).backward()
    gradient = model.lm_head.weight.grad.full_tensor()
    assert gradient.dtype == torch.float32
    assert torch.equal(gradient, torch.full_like(gradient, 1 + 2.0**-7)), gradient.unique()


def with_rank_1_failing(
    store: Path,
    run: Path,
    how: str,
    settings: Sequence[str] = ("context.mode=static", "context.degree=2"),
) -> None:
    """Rank 1 dies, or stays silent, when it comes to attention of layer 1 in micro-batch 0 of step
    2."""
    trainer = start(store, run, list(settings), timeout_s=2.0)
    trainer.step()
    if dist.get_rank() == 1:
        original: Callable[..., Any] = RingAttention.__call__

        def fail(self: RingAttention, *arguments: Any) -> Any:
            if arguments[-1] == 1:
                if how == "dies":
                    os._exit(9)
                time.sleep(6)
            return original(self, *arguments)

        RingAttention.__call__ = fail
    trainer.step()


def counted_after(
    trainer: Trainer, passes: Sequence[str], count: Callable[[_WatchedStage], int]
) -> list[int]:
    """What `count` finds after each of these passes of a stage of this rank, in a step of a
    pipeline."""
    counts = []

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: _WatchedStage, *arguments: Any, **named: Any) -> None:
            original(self, *arguments, **named)
            counts.append(count(self))

        return run

    with pytest.MonkeyPatch.context() as patch, trainer.loader:
        for name in passes:
            patch.setattr(_WatchedStage, name, watched(getattr(_WatchedStage, name)))
        trainer.step()
    return counts


def gathered(blocks: Iterable[torch.nn.Module]) -> int:
    """How many blocks have whole weights, not shards."""
    return sum(not isinstance(next(block.parameters()), DTensor) for block in blocks)


def gathered_blocks_in_a_pipeline(store: Path, run: Path, settings: list[str]) -> list[int]:
    """How many blocks of this rank are gathered after each backward pass of a step."""
    trainer = start(store, run, settings)
    assert trainer.runner.pipeline is not None
    blocks = [block for stage in trainer.runner.pipeline.stages for block in stage.layers]
    return counted_after(trainer, ["backward_one_chunk"], lambda _: gathered(blocks))


def gathered_blocks(store: Path, run: Path, settings: list[str]) -> list[list[int]]:
    """How many blocks are gathered when each micro-batch of two steps begins."""
    trainer, counts = start(store, run, settings), list[list[int]]()
    original = trainer.runner.inputs

    def inputs(*given: Any) -> Any:
        counts[-1].append(gathered(trainer.model.layers))
        return original(*given)

    trainer.runner.inputs = inputs
    with trainer.loader:
        for _ in range(2):
            counts.append([])
            trainer.step()
    return counts


def unsummed_gradients_in_a_pipeline(store: Path, run: Path, settings: list[str]) -> list[int]:
    """How many gradients of this rank are in bfloat16 after each backward pass of a step, and not
    yet added up in float32."""

    def unsummed(stage: _WatchedStage) -> int:
        gradients = (parameter.grad for parameter in stage.stage.parameters())
        return sum(
            gradient is not None and gradient.dtype == torch.bfloat16 for gradient in gradients
        )

    return counted_after(
        start(store, run, settings), ["backward_one_chunk", "backward_weight_one_chunk"], unsummed
    )


def buffers_of_a_pipeline(store: Path, run: Path, settings: list[str]) -> tuple[int, int]:
    """How many micro-batches a step has, and for how many this rank has buffers at a time, at
    most."""
    trainer = start(store, run, settings)
    assert trainer.runner.pipeline is not None
    original, most = trainer.runner.pipeline.hidden, 0
    alive: list[weakref.ref[torch.Tensor]] = []

    def count(device: torch.device) -> torch.Tensor:
        nonlocal most
        made = original(device)
        if device.type != "meta":
            alive.append(weakref.ref(made))
            stage = trainer.runner.pipeline._schedule[1]._stage
            infos = itertools.chain(*stage.args_recv_info.values(), *stage.grad_recv_info.values())
            buffers = [getattr(info, "buffer", None) for info in infos] + [
                buffer() for buffer in alive
            ]
            most = max(
                most,
                len({id(buffer) for buffer in buffers if buffer is not None and buffer.numel()}),
            )
        return made

    trainer.runner.pipeline.hidden = count
    with trainer.loader:
        return trainer.step().micro_batches, most
