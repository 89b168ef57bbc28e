"""`longctx-check FILE`, and in longctx `longctx check-step FILE`: names what is wrong with a step
of any trainer."""

import argparse
import logging
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .data import DataReport, check_data
from .errors import CheckError, UsageError
from .github import annotation, annotations, annotations_of_data
from .loop import place
from .options import SUMMARY, add_arguments, check_given
from .probe import named
from .step import Report, check_step
from .template import give, missing_package

REFUSED = 3
"""Exit status for a step that cannot be judged."""
CRASHED = 4
"""Exit status where the user's function, or the check, raises what it should not."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command without longctx and returns its exit status; `argv` is `sys.argv[1:]` unless
    given."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="longctx-check",
        description=SUMMARY,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="start N processes on this machine, by torchrun (default: this process)",
    )
    arguments = parser.parse_args(given)
    try:
        if arguments.processes is not None and _launches(arguments.processes):
            return _launch(arguments.processes, given)
        return run(arguments)
    except UsageError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return 130


def run(arguments: argparse.Namespace, passed: tuple[type[Exception], ...] = ()) -> int:
    """Checks a step on this process, and the others that its launcher started with it, prints the
    verdicts and returns the exit status; or prints a template.

    Raises UsageError for a file, function, probe or fault that does not exist, and passes errors of
    the types `passed` on.
    """
    if arguments.template is not None:
        give(arguments.template, program=arguments.program, path=arguments.out)
        return 0
    check_given(arguments)
    judge = _judge_of_data if arguments.data else _judge_of_steps
    judged = judge(arguments)
    not_caught: tuple[type[Exception], ...] = (UsageError, *passed)
    with _joined_processes() as rank:
        try:
            report = judged()
        except CheckError as error:
            if rank == 0:
                _print_no_verdict(f"refused: {error}", arguments)
            return REFUSED
        except not_caught:
            raise
        except (Exception, SystemExit):
            traceback.print_exc()
            _print_no_verdict("no verdict, as the error above was raised", arguments)
            return CRASHED
    if rank == 0:
        _print(report, arguments)
    return report.status


def _judge_of_steps(arguments: argparse.Namespace) -> Callable[[], Report]:
    """Returns what judges a step of the file on each probe. Raises UsageError for a probe that does
    not exist."""
    asked = named(arguments.probe or ())
    probes = [replace(probe, dtype=arguments.dtype) for probe in asked]

    def judged() -> Report:
        make = _function(arguments.make or "make", "probe", script=arguments.script)
        return check_step(make, probes, arguments.allow)

    return judged


def _judge_of_data(arguments: argparse.Namespace) -> Callable[[], DataReport]:
    """Returns what judges the file's batches. Raises UsageError on several processes."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("--data reads batches in one process: omit --processes")

    def judged() -> DataReport:
        data = _function(arguments.make or "data", "", script=arguments.script)
        return check_data(data(), arguments.allow)

    return judged


@contextmanager
def _joined_processes() -> Iterator[int]:
    """Joins the processes that the launcher started with this one, and yields the rank."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    rank, _ = place()
    try:
        yield rank
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _function(name: str, taken: str, *, script: Path) -> Callable[..., Any]:
    """Runs a file and returns its function of this name, which takes what is said.

    Raises UsageError without one, CheckError for a trainer's package that is not installed.
    """
    folder = str(script.resolve().parent)
    sys.path.insert(0, folder)  # as Python does for a script
    try:
        names = runpy.run_path(str(script), run_name="check")
    except ModuleNotFoundError as error:
        missing = missing_package(error)
        if missing:
            raise CheckError(f"{script}: {missing}") from error
        raise
    if name not in names:
        hint = "--data checks data()" if "data" in names else "name yours by --make"
        raise UsageError(f"{script} has no function {name}({taken}): {hint}")
    function: Callable[..., Any] = names[name]
    return function


def _print(report: Report | DataReport, arguments: argparse.Namespace) -> None:
    if arguments.json:
        print(report.to_json())
        return
    lines = report.lines()
    if arguments.github:
        lines += _annotations(report, file=arguments.script.as_posix())
    print("\n".join(lines))


def _annotations(report: Report | DataReport, *, file: str) -> list[str]:
    if isinstance(report, DataReport):
        return annotations_of_data(report, file=file)
    return annotations(report, file=file)


def _print_no_verdict(reason: str, arguments: argparse.Namespace) -> None:
    print(f"{arguments.program}: {reason}", file=sys.stderr)
    if arguments.github:
        file = arguments.script.as_posix()
        print(annotation("error", reason, file=file, title=arguments.program))


def _launches(processes: int) -> bool:
    """Returns whether this process starts `processes` others, and is not one of them.

    Raises UsageError for less than 1, and for another number than torchrun started here.
    """
    if processes < 1:
        raise UsageError(f"--processes is {processes}: must be at least 1")
    if not dist.is_torchelastic_launched():
        return processes > 1
    started = os.environ["LOCAL_WORLD_SIZE"]
    if started != str(processes):
        raise UsageError(
            f"--processes is {processes}, but torchrun started {started} on this machine: omit "
            "--processes"
        )
    return False


def _launch(processes: int, arguments: Sequence[str]) -> int:
    """Runs this command in `processes` processes. Returns the exit status of the first that fails,
    else 0; 128 and the signal's number after SIGINT or SIGTERM, which go on to the processes.

    Nothing follows their output, as torchrun would print a traceback.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    cores = os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // processes)))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    options = ["--standalone", f"--nproc-per-node={processes}", "-m", str(__package__)]
    try:
        torchrun.main([*options, *arguments])
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return int(failure.exitcode)
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0
