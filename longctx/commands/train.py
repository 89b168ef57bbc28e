"""`longctx train`: the options of a training run; `longctx.start` runs it."""

import argparse
from pathlib import Path

from longctx.commands.lengths import add_stand_in_options, stands_in
from longctx.commands.output import a_path
from longctx.config import load, overview
from longctx.errors import UserError
from longctx.model.published import config_alone
from longctx.paths import local_path
from longctx.units import whole_number

SUMMARY = (
    "Train a model on packed documents, with a context-parallel degree that changes by the document"
)
OVERRIDES = PROCESSES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config",
        nargs="?",
        type=a_path,
        metavar="CONFIG",
        help="YAML file of settings (default: none)",
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const=True,
        metavar="STEP",
        help="continue from the newest complete checkpoint in train.run_dir, or from that of "
        "STEP: later ones are moved to set-aside-1 there",
    )
    any_ = (
        "continue if there is a checkpoint, otherwise start from scratch: for jobs that a "
        "scheduler restarts"
    )
    parser.add_argument("--resume-if-any", action="store_true", help=any_)
    parser.add_argument(
        "--continue",
        dest="continued",
        type=a_path,
        metavar="RUN",
        help="begin with weights, moments, step and place in the data of another run, such as one "
        "with shorter documents; train.steps counts the steps of both",
    )
    dry = (
        "check settings and store, plan the first steps, and say how long the run takes and "
        "whether it fits, by prediction"
    )
    parser.add_argument("--dry-run", action="store_true", help=dry)
    trace = (
        "trace steps A to B into train.run_dir/traces: one file per rank, for "
        "https://ui.perfetto.dev"
    )
    parser.add_argument("--trace-steps", metavar="A:B", help=trace)
    parser.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="--dry-run: number of GPUs to plan for, one process on each",
    )
    add_stand_in_options(parser)
    parser.epilog = (
        "On 8 GPUs: longctx train run.yaml --processes 8 --batch.tokens_per_rank 32768\n"
        "On every one of several machines: torchrun --nnodes 2 --nproc-per-node 8 .. -m longctx "
        "train run.yaml\n\n" + overview()
    )


def run(arguments: argparse.Namespace) -> int:
    from longctx.parallel.environment import Launch

    world_size = Launch.read().world_size
    if arguments.dry_run:
        with config_alone():
            _dry_run(arguments, world_size)
        return 0
    if arguments.gpus is not None:
        raise UserError(
            "--gpus requires --dry-run: to train on N processes of this machine, give --processes N"
        )
    stands_in(arguments)
    traced = None if arguments.trace_steps is None else parse_steps(arguments.trace_steps)
    step, file = _step(arguments.resume, arguments.config)
    config = load(file, arguments.overrides, world_size=world_size)
    from longctx.start import train  # and torch, which takes seconds: settings may be wrong

    return train(
        config,
        resume=arguments.resume is not None,
        step=step,
        resume_if_any=arguments.resume_if_any,
        continued=arguments.continued,
        trace_steps=traced,
    )


def _dry_run(arguments: argparse.Namespace, world_size: int) -> None:
    """Predicts the run on --gpus or --processes, or on the processes that there are."""
    numbers = [number for number in (arguments.gpus, arguments.processes) if number is not None]
    ranks = numbers[0] if numbers else world_size
    if ranks < 1:
        raise UserError(
            f"--{'gpus' if arguments.gpus is not None else 'processes'} is {ranks}: give 1 or more"
        )
    config = load(arguments.config, arguments.overrides, world_size=ranks)
    from longctx.commands.dry_run import dry_run, stand_in_store

    dry_run(config, ranks, stand_in_store(arguments, config))


def _step(resumed: str | bool | None, config: Path | None) -> tuple[int | None, Path | None]:
    """Returns the step to resume from, None if none is given, and the settings' file, which may
    come after `--resume`."""
    if not isinstance(resumed, str):
        return None, config
    if resumed.isdecimal():
        return int(resumed), config
    if config is not None:
        raise UserError(
            f"--resume is {resumed}: give the step of a checkpoint, or nothing for the newest"
        )
    return None, local_path(resumed)


def parse_steps(text: str) -> range:
    """Parses `10:12` as steps 10, 11 and 12, and `10` as that step. Raises UserError for anything
    else."""
    first, colon, last = text.partition(":")
    start = whole_number(first)
    end = whole_number(last if colon else first)
    if start and end and start <= end:
        return range(start, end + 1)
    raise UserError(
        f"--trace-steps is {text!r}: give the first and the last step, as in 10:12, counted from 1"
    )
