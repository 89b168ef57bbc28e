"""Start: a whole run, from checked settings to the exit status of this process."""

import sys
import traceback
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from longctx.arguments import a_path, checked, flag, kind, or_none, whole
from longctx.config import Config, check
from longctx.errors import UserError, raise_together
from longctx.memory.fitting import DoesNotFit, check_memory, fitted_run
from longctx.parallel.device import record_messages
from longctx.parallel.environment import Launch
from longctx.parallel.mesh import Mesh, leave, require_no_group
from longctx.parallel.peers import Peers
from longctx.paths import local_path
from longctx.report import print_end, print_start
from longctx.training.agreement import RanksDiffer, identity, require_same
from longctx.training.assembly import assemble
from longctx.training.build import join_run
from longctx.training.checks import check_beginning, checks_before_joining, notes_on
from longctx.training.data import with_steps
from longctx.training.described import ProfilesDiffer
from longctx.training.health import NonFiniteLoss
from longctx.training.run import Run
from longctx.training.saved import checkpoint
from longctx.training.saved.run_folder import only_run_in, open_run_folder
from longctx.training.saved.saving import NotWritten
from longctx.training.stop_signal import StopSignal

ON_EVERY_RANK = (
    RanksDiffer,
    DoesNotFit,
    NonFiniteLoss,
    ProfilesDiffer,
    checkpoint.NoCheckpoint,
    NotWritten,
)
"""Errors that are raised on all ranks alike, after the processes have joined."""


@checked(
    config=kind("settings of load_config(PATH), not their file", Config),
    resume=flag,
    step=or_none(whole(least=0)),
    resume_if_any=flag,
    continued=or_none(a_path),
    trace_steps=or_none(kind("a range of steps", range)),
)
def train(
    config: Config,
    *,
    resume: bool = False,
    step: int | None = None,
    resume_if_any: bool = False,
    continued: Path | None = None,
    trace_steps: range | None = None,
) -> int:
    """Trains a run in the processes that torchrun started, or in this process alone. Every process
    calls it.

    Args:
        resume: continue from the newest complete checkpoint of `train.run_dir`.
        step: continue from the checkpoint of this step instead; later ones are moved to a folder
            set-aside-1 of the run.
        resume_if_any: resume if a checkpoint exists, else start anew.
        continued: folder of another run, whose newest complete checkpoint is the beginning of this
            run: weights, moments, step and places in the stores. Lengths, stores, batch,
            parallelism and RoPE may differ.
        trace_steps: steps to trace, counted from 1; traces are written to `train.run_dir`/traces.

    Returns the exit status of this process: 0 after the last step, 128 + the signal's number if a
    signal ended the run, 2 or 1 for an error after the processes joined, which is printed to
    standard error. Raises UserError for everything that is wrong before the processes join.
    """
    continued = None if continued is None else local_path(continued)
    require_no_group()
    check(config, world_size=Launch.to_join().world_size)
    run = _prepare(
        config,
        resume or step is not None,
        step=step,
        or_begin=resume_if_any,
        continued=continued,
        traced=trace_steps,
    )
    only = only_run_in(run.config.train.run_dir) if run.launch.rank == 0 else nullcontext()
    with StopSignal.installed(interrupts=True) as stop, only:
        record_messages(run.device, run.config.train.run_dir / "nccl")
        return _joined(run, stop)


def _joined(run: Run, stop: StopSignal) -> int:
    """Joins the processes, trains and leaves them. Returns the exit status, after words on what
    went wrong."""
    config = run.config
    rank = run.launch.rank
    peers = None
    try:
        same = identity(config, run.data.fingerprints, run.checkpoint)
        mesh = join_run(config, run.launch, run.device, partial(require_same, same))
        peers = mesh.peers
        finished, step = _train(run, mesh, stop)
        mesh.close()
    except (UserError, OSError) as error:
        together = isinstance(error, ON_EVERY_RANK)
        if rank == 0 or not together:
            where = "" if together else f" on rank {rank}"
            print(f"longctx train: error{where}: {error}", file=sys.stderr, flush=True)
        if peers is not None:
            peers.end(str(error))
        leave(together=together)
        return 2
    except RuntimeError as error:
        status = _failed(config, rank, error, peers)
        leave(together=False)
        return status
    except BaseException:
        leave(together=False)
        raise
    stop.release_interrupts()
    if finished and rank == 0:
        print_end(
            config,
            step,
            trained=not run.resumes or (run.checkpoint is not None and step > run.checkpoint.step),
        )
    if not finished and rank == 0:
        written = config.checkpoint.every is not None
        if written:
            saved = "checkpoint written, --resume continues"
        else:
            saved = "no checkpoint, because checkpoint.every is null"
        print(f"stopped by {stop.number.name} after step {step}; {saved}", file=sys.stderr)
    if finished:
        return 0
    return 128 + stop.number


def _prepare(
    config: Config,
    resume: bool,
    step: int | None,
    or_begin: bool,
    continued: Path | None,
    traced: range | None,
) -> Run:
    """Opens everything that a run needs, and checks everything that can be checked before the
    processes join.

    Rank 0 prints notes on settings without effect, and on damaged checkpoints. See `train`. Raises
    UserError.
    """
    if step is not None and or_begin:
        raise UserError(
            f"--resume is {step}, but --resume-if-any takes the newest checkpoint: omit one of the "
            "two"
        )
    if continued is not None and resume:
        raise UserError(
            f"--continue is {continued}, but --resume continues the run itself: omit one, or use "
            "--resume-if-any"
        )
    if continued is not None and config.train.epochs is not None:
        rule = "the steps of both runs are counted: set train.steps instead"
        raise UserError(
            f"--continue is {continued}, and train.epochs is {config.train.epochs:g}, but {rule}"
        )
    asked = config
    run = Run.open(asked, rewinds=step is not None, traced=traced)
    config = run.config
    raise_together(checks_before_joining(run))
    check_memory(run)  # plans steps, which needs settings and data that go together
    saved, notes = open_run_folder(
        config.train.run_dir,
        resume=resume or or_begin,
        or_begin=or_begin,
        checkpoint_bytes=run.checkpoint_bytes,
        step=step,
        best=config.checkpoint.best,
    )
    if saved is None and continued is not None:
        saved, damaged = checkpoint.to_continue(continued, config.train.steps)
        notes += damaged
    if saved is not None:
        config = with_steps(asked, run.data.store, run.launch.world_size, begun=saved)
    run = replace(run, checkpoint=saved, config=config)
    _print_on_rank_0(run, [*notes, *check_beginning(run), *notes_on(config, run.device)])
    return run


def _print_on_rank_0(run: Run, sentences: Iterable[str]) -> None:
    if run.launch.rank == 0:
        for sentence in sentences:
            print(f"longctx train: {sentence}", file=sys.stderr)


def _train(run: Run, mesh: Mesh, stop: StopSignal) -> tuple[bool, int]:
    """Trains to the last step. Returns whether it is done, and the number of steps done. All ranks
    call it."""
    saved, damaged = checkpoint.verified(run.checkpoint, mesh.control, only=run.rewinds)
    _print_on_rank_0(run, damaged)
    run = fitted_run(replace(run, checkpoint=saved), mesh)
    trainer = assemble(run, mesh, stop)
    if mesh.world_rank == 0:
        print_start(run, trainer)
    trainer.train()
    return trainer.steps_done >= run.config.train.steps, trainer.steps_done


def _failed(config: Config, rank: int, error: RuntimeError, peers: Peers | None) -> int:
    """Says where this rank failed, which peers are dead or stuck, and how to go on. Returns the
    exit status.

    A peer has died or is stuck, or this is a bug: then the traceback helps.
    """
    traceback.print_exception(error)
    what = str(error).splitlines()[0][:300]
    where = (
        "; ".join(getattr(error, "__notes__", []))
        or f"rank {rank}: {peers.where() if peers else 'joining'}"
    )
    lines = [f"longctx train: error: {where}: {what}"]
    if peers is not None:
        lines.append(f"longctx train: rank {rank}: {peers.report(what)}")
    newest = checkpoint.newest(config.train.run_dir)[0]
    run_dir = config.train.run_dir
    again = "no checkpoint: start again"
    if newest is not None:
        again = f"step {newest.step} as newest checkpoint: --resume continues after it"
    print(*lines, f"{run_dir} has {again}", sep="\n", file=sys.stderr, flush=True)
    return 1
