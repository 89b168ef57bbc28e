"""Options of the command, read without torch, so that its help and its refusals are quick."""

import argparse
from collections.abc import Callable
from pathlib import Path

from .errors import UsageError
from .probe import DTYPES, named
from .template import TEMPLATES

SUMMARY = (
    "Name what is wrong with packing, padding, accumulation or context parallelism in a step "
    "of any trainer"
)


def add_arguments(parser: argparse.ArgumentParser, path: Callable[[str], Path] = Path) -> None:
    """Adds all arguments but `--processes`; `path` reads the name of a file."""
    parser.set_defaults(program=parser.prog)
    parser.add_argument(
        "script",
        nargs="?",
        type=path,
        metavar="FILE",
        help="Python file with `make(probe)`, or `data()`: see docs/check-step.md",
    )
    parser.add_argument(
        "--template",
        choices=TEMPLATES,
        metavar="KIND",
        help=f"print a file to begin with, for a trainer of this kind: {', '.join(TEMPLATES)}",
    )
    parser.add_argument(
        "-o", "--out", type=path, metavar="FILE", help="write the template to this file"
    )
    parser.add_argument(
        "--make",
        metavar="FUNCTION",
        help="function of the file (default: make, or data with --data)",
    )
    parser.add_argument(
        "--data",
        action="store_true",
        help="read the batches of `data()`, a Trainer, or rows, collator and tokenizer, without a "
        "model: who sees whom, what is trained",
    )
    parser.add_argument(
        "--probe",
        action="append",
        metavar="NAME",
        help="only this probe; may be repeated (default: all)",
    )
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="FAULT",
        help="a fault that is meant, as it is printed, or its words before the first colon",
    )
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=DTYPES,
        help="of the weights of `probe.model` (default: %(default)s)",
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print verdicts as JSON")
    output.add_argument(
        "--github", action="store_true", help="also print annotations of GitHub Actions"
    )
    parser.epilog = (
        "Exit status: 0 right, 1 wrong in ways that have a name, 2 wrong in another way, 3 "
        "refused, 4 an error in the file or in its function. On several ranks:\n"
        f"{parser.prog} check.py --processes 2, or torchrun --nproc-per-node 2 -m {__package__} "
        "check.py"
    )


def check_given(arguments: argparse.Namespace) -> None:
    """Raises UsageError for a file or a probe that does not exist, where no template is asked
    for."""
    if arguments.template is not None:
        return
    if arguments.script is None:
        raise UsageError(
            "no file is given: `--template KIND -o FILE` writes one to begin with, where KIND is "
            f"one of {', '.join(TEMPLATES)}"
        )
    if not arguments.script.is_file():
        raise UsageError(
            f"there is no file {arguments.script}: give a Python file with a function make(probe), "
            "or data() with --data"
        )
    if arguments.data and arguments.probe:
        raise UsageError("--data has no probes: omit --probe")
    named(arguments.probe or ())
