"""`longctx check-step`: names what is wrong with one optimizer step of any trainer."""

import argparse
import sys
import traceback

from longctx.commands.output import a_path
from longctx.errors import UserError

SUMMARY = (
    "Name what is wrong with packing, padding, accumulation or context parallelism in a step "
    "of any trainer"
)
PROCESSES = True
CRASHED = 4
"""Exit status where the user's function, or the check, raises what it should not."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "script",
        type=a_path,
        metavar="FILE",
        help="Python file with `make(probe)`: see docs/check-step.md",
    )
    parser.add_argument(
        "--make",
        default="make",
        metavar="FUNCTION",
        help="function of the file (default: %(default)s)",
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
    parser.add_argument("--json", action="store_true", help="print verdicts as JSON")
    parser.epilog = (
        "Exit status: 0 right, 1 wrong in ways that have a name, 2 wrong in another way, 3 "
        "refused, 4 an error in the file or in its function. On several ranks:\n"
        "longctx check-step check.py --processes 2, or torchrun --nproc-per-node 2 -m longctx "
        "check-step check.py"
    )


def run(arguments: argparse.Namespace) -> int:
    if not arguments.script.is_file():
        raise UserError(
            f"there is no file {arguments.script}: give a Python file with a function make(probe)"
        )
    import runpy

    import torch
    import torch.distributed as dist

    from longctx.check import CheckError, check_step
    from longctx.check.probe import named
    from longctx.parallel.environment import Launch

    probes = named(arguments.probe or ())
    launch = Launch.to_join()
    if launch.world_size > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        make = runpy.run_path(str(arguments.script), run_name="check").get(arguments.make)
        if make is None:
            raise UserError(f"{arguments.script} has no function {arguments.make}(probe)")
        report = check_step(make, probes, arguments.allow)
    except CheckError as error:
        if launch.rank == 0:
            print(f"longctx check-step: refused: {error}", file=sys.stderr)
        return 3
    except UserError:
        raise
    except (Exception, SystemExit):
        traceback.print_exc()
        print("longctx check-step: no verdict, as the error above was raised", file=sys.stderr)
        return CRASHED
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if launch.rank == 0:
        print(report.to_json() if arguments.json else "\n".join(report.lines()))
    return report.status
