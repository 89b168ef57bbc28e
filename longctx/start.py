"""Start: a whole run, from checked settings to the exit status of this process."""

import math
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from longctx.config import Config, check
from longctx.errors import UserError, raise_together
from longctx.memory.fitting import DoesNotFit, available_bytes, changes_between, fitted, refuse_too_large
from longctx.parallel.device import record_messages
from longctx.parallel.environment import Launch
from longctx.parallel.float8 import check_float8
from longctx.parallel.mesh import Mesh
from longctx.parallel.peers import Peers
from longctx.report import print_end, print_start
from longctx.training.agreement import RanksDiffer, identity, require_same
from longctx.training.assembly import assemble
from longctx.training.build import join_run, prepare_run_kernels
from longctx.training.checks import changes_of_optimizer, check_export, checks_of
from longctx.training.health import NonFiniteLoss
from longctx.training.metrics import check_wandb
from longctx.training.optimizer import OPTIMIZERS
from longctx.training.run import Run
from longctx.training.run_profile import ProfilesDiffer
from longctx.training.saved import checkpoint
from longctx.training.saved.run_folder import only_run_in, open_run_folder
from longctx.training.saved.saving import NotWritten
from longctx.training.stop_signal import StopSignal

ON_EVERY_RANK = (RanksDiffer, DoesNotFit, NonFiniteLoss, ProfilesDiffer, checkpoint.NoCheckpoint, NotWritten)
"""Errors that are raised on all ranks alike, after the processes have joined."""


def train(
    config: Config,
    *,
    resume: bool = False,
    step: int | None = None,
    resume_if_any: bool = False,
    continued: Path | None = None,
    trace_steps: range | None = None,
) -> int:
    """Trains a run in the processes that torchrun started, or in this process alone. Every process calls it.

    Args:
        resume: continue from the newest complete checkpoint of `train.run_dir`.
        step: continue from the checkpoint of this step instead; later ones are moved to a folder set-aside-1 of the run.
        resume_if_any: the same if there is a checkpoint, else start from the beginning.
        continued: folder of another run, whose newest complete checkpoint is the beginning of this run: weights, moments, step
            and places in the stores. Lengths, stores, batch, parallelism and RoPE may differ.
        trace_steps: steps to trace, counted from 1; traces are written to `train.run_dir`/traces.

    Returns the exit status of this process: 0 after the last step, 128 + the signal's number if a signal ended the run, 2 or 1
    for an error after the processes joined, which is printed to standard error.
    Raises UserError for everything that is wrong before the processes join.
    """
    check(config, world_size=Launch.read().world_size)
    run = prepare(config, resume=resume, step=step, resume_if_any=resume_if_any, continued=continued)
    run, config = replace(run, traced=trace_steps), run.config
    rank, peers = run.launch.rank, None
    stop = StopSignal.install(interrupts=True)
    with only_run_in(config.train.run_dir) if rank == 0 else nullcontext():
        record_messages(run.device, config.train.run_dir / "nccl")
        try:
            same = identity(config, run.data.fingerprints, run.checkpoint)
            mesh = join_run(config, run.launch, run.device, partial(require_same, same))
            peers = mesh.peers
            finished, step = _train(run, mesh, stop)
        except (UserError, OSError) as error:
            if rank == 0 or not isinstance(error, ON_EVERY_RANK):
                where = "" if isinstance(error, ON_EVERY_RANK) else f" on rank {rank}"
                print(f"longctx train: error{where}: {error}", file=sys.stderr, flush=True)
            if peers is not None:
                peers.end(str(error))
            return 2
        except RuntimeError as error:
            return _failed(config, rank, error, peers)
        mesh.close()
        stop.release_interrupts()
        if finished and rank == 0:
            print_end(config, step, trained=not run.resumes or (run.checkpoint is not None and step > run.checkpoint.step))
    if not finished and rank == 0:
        written = config.checkpoint.every is not None
        saved = "checkpoint written, --resume continues" if written else "no checkpoint, because checkpoint.every is null"
        print(f"stopped by {stop.number.name} after step {step}; {saved}", file=sys.stderr)
    return 0 if finished else 128 + stop.number


def prepare(
    config: Config,
    *,
    resume: bool = False,
    step: int | None = None,
    resume_if_any: bool = False,
    continued: Path | None = None,
) -> Run:
    """Opens everything that a run needs, and checks everything that can be checked before the processes join.

    Rank 0 prints notes on settings without effect, and on damaged checkpoints. See `train`. Raises UserError.
    """
    if step is not None and resume_if_any:
        raise UserError(f"--resume is {step}, but --resume-if-any takes the newest checkpoint: omit one of the two")
    resume = resume or step is not None
    if continued is not None and resume:
        raise UserError(f"--continue is {continued}, but --resume continues the run itself: omit one, or use --resume-if-any")
    if continued is not None and config.train.epochs is not None:
        rule = "the steps of both runs are counted: set train.steps instead"
        raise UserError(f"--continue is {continued}, and train.epochs is {config.train.epochs:g}, but {rule}")
    run = Run.open(config)
    config = run.config
    _check(run)
    saved, damaged = open_run_folder(
        config.train.run_dir,
        resume=resume or resume_if_any,
        or_begin=resume_if_any,
        checkpoint_bytes=_checkpoint_bytes(run),
        step=step,
        best=config.checkpoint.best,
    )
    if saved is None and continued is not None:
        saved, more = checkpoint.to_continue(continued, config.train.steps)
        damaged += more
    run = replace(run, checkpoint=saved, returns=step is not None)
    changes = [] if saved is None else changes_of_optimizer(config, saved.run, resumes=run.resumes)
    check_export(config, saved if run.resumes else None)
    if run.launch.rank == 0:
        for sentence in damaged + changes + _notes(config, run.device):
            print(f"longctx train: {sentence}", file=sys.stderr)
    return run


def _check(run: Run) -> None:
    """Checks the device, kernels, model and, if no setting may change any more, memory. Raises UserError."""
    config, spec, ranks = run.config, run.source.spec, run.launch.world_size
    files = run.source.files
    checks: list[Callable[[], object]] = [
        partial(check_wandb, config.log.wandb),
        *([] if files is None else [files.require_weights]),
        *([] if config.train.float8 is None else [partial(check_float8, run.device)]),
        partial(prepare_run_kernels, config, spec, run.launch, run.device),
        *checks_of(config, run.data, run.source, ranks),
    ]
    if not _may_change_settings(run):  # otherwise the settings that are checked are known when all ranks have joined
        available = available_bytes(run.device, run.launch.local_world_size)
        checks.append(partial(refuse_too_large, spec, config, run.data.store, ranks, available, fused=run.on_gpu))
    raise_together(checks)


def _checkpoint_bytes(run: Run) -> int:
    """Returns the size of a checkpoint; 0 if none is written."""
    if run.config.checkpoint.every is None:
        return 0
    spec = run.source.spec
    trained = spec.trained_parameters
    weights = trained if spec.adapted else spec.parameters
    return torch.float32.itemsize * weights + OPTIMIZERS[run.config.optimizer.name].state_bytes(trained, spec.trained_matrices)


def _notes(config: Config, device: torch.device) -> list[str]:
    """Returns notes on settings that have no effect or are changed."""
    notes, on_gpu = [], device.type == "cuda"
    if not on_gpu and (config.train.offload_activations or config.train.offload_optimizer):
        notes.append("offloading has no effect: on a CPU everything is in host memory already")
    if on_gpu and config.dtype == "float32":
        notes.append("train.dtype is float32: on GPUs, matrix products and attention take many times as long as in bfloat16")
    if config.optimizer.warmup_ratio is None and config.optimizer.warmup_steps > config.schedule_steps:
        limit = "train.steps" if config.optimizer.decay_steps is None else "optimizer.decay_steps"
        notes.append(f"optimizer.warmup_steps {config.optimizer.warmup_steps} is shortened to {limit} {config.schedule_steps}")
    return notes


def _may_change_settings(run: Run) -> bool:
    """Returns whether settings may be changed so that the run fits: `train.fit_memory`, or else its default."""
    fit = run.config.train.fit_memory
    return run.on_gpu if fit is None else fit


def _fit(run: Run, mesh: Mesh) -> Run:
    """Returns the run with settings that fit into the memory of every rank. Collective: raises DoesNotFit on every rank."""
    available = available_bytes(run.device, run.launch.local_world_size)
    least = min(mesh.gather_objects(math.inf if available is None else available))  # all ranks decide the same
    if math.isinf(least):
        return run
    spec, store, ranks = run.source.spec, run.data.store, run.launch.world_size
    config = fitted(spec, run.config, store, ranks, int(least), fused=run.on_gpu)
    refuse_too_large(spec, config, store, ranks, int(least), fused=run.on_gpu)
    return replace(run, config=config, changes=changes_between(run.config, config))


def _train(run: Run, mesh: Mesh, stop: StopSignal) -> tuple[bool, int]:
    """Trains to the last step. Returns whether it is done, and the number of steps done. All ranks call it."""
    saved, damaged = checkpoint.verified(run.checkpoint, mesh.control, only=run.returns)
    run = replace(run, checkpoint=saved)
    if mesh.world_rank == 0:
        for sentence in damaged:
            print(f"longctx train: {sentence}", file=sys.stderr)
    if _may_change_settings(run):
        run = _fit(run, mesh)
    trainer = assemble(run, mesh, stop)
    if mesh.world_rank == 0:
        print_start(run, trainer)
    trainer.train()
    return trainer.steps_done >= run.config.train.steps, trainer.steps_done


def _failed(config: Config, rank: int, error: RuntimeError, peers: Peers | None) -> int:
    """Says where this rank failed, which peers are dead or stuck, and how to go on. Returns the exit status.

    A peer has died or is stuck, or this is a bug: then the traceback helps.
    """
    traceback.print_exception(error)
    what = str(error).splitlines()[0][:300]
    where = "; ".join(getattr(error, "__notes__", [])) or f"rank {rank}: {peers.where() if peers else 'joining'}"
    lines = [f"longctx train: error: {where}: {what}"]
    if peers is not None:
        lines.append(f"longctx train: rank {rank}: {peers.report(what)}")
    newest, run_dir = checkpoint.newest(config.train.run_dir)[0], config.train.run_dir
    again = "no checkpoint: start again"
    if newest is not None:
        again = f"step {newest.step} as newest checkpoint: --resume continues after it"
    print(*lines, f"{run_dir} has {again}", sep="\n", file=sys.stderr, flush=True)
    return 1
