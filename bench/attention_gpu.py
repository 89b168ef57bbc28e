"""Attention on one GPU: correctness of every kernel, throughput of one rank's part of a ring, and
of one plain call.

    python bench/attention_gpu.py                     # everything, in about 25 minutes at most
    python bench/attention_gpu.py --minutes 9         # as much as fits; every kernel gets an equal share of the time
    python bench/attention_gpu.py --kernels triton    # one kernel
    python bench/attention_gpu.py --append            # only rows that the files do not have yet
    python bench/attention_gpu.py --smoke             # tiny, on any machine: tests the script, times are meaningless

Every kernel (and every installed flash attention library) is first checked (attention_checks.py),
then timed (attention_times.py). One GPU measures every degree, since only one rank is timed. A
kernel that fails a check of what is timed is not timed. The exit status is 1 if any check failed.

Writes OUT.csv (times), OUT-checks.csv and OUT-elementwise.csv (memory-bound pieces of a step
compared with a copy). Rows are appended as they are measured; failed rows have a reason. If an
error makes the GPU unusable, the process ends; the same command with --append continues after the
failed row. Not measured: messages, and whether attention hides them.
"""

import gc
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

import attention_checks
import attention_times
from attention_times import FIRST, GPU_SMOKE, SMOKE, Sizes
from harness import Table, command, device_facts, facts, median_s, options
from longctx.attention.kernels import KERNELS, KernelError, choose_kernel
from longctx.attention.kernels.flash import Flash
from longctx.attention.kernels.flash_libraries import LIBRARIES

PIECE_COLUMNS = "piece", "gb_per_s", "share_of_copy", "failed"


def main() -> None:
    parser = options(__doc__, "attention_gpu", minutes=25.0)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, also on a CPU")
    parser.add_argument("--first", action="store_true", help="the few sizes of first_contact.py")
    parser.add_argument(
        "--kernels",
        help="only these kernels, such as triton,reference (default: all that run here)",
    )
    parser.add_argument(
        "--append", action="store_true", help="keep the rows of OUT and measure only missing rows"
    )
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not given.smoke:
        parser.error("no GPU is available: --smoke tests the script on a CPU")
    smoke = GPU_SMOKE if device.type == "cuda" else SMOKE
    sizes = smoke if given.smoke else FIRST if given.first else Sizes()
    deadline = time.monotonic() + given.minutes * 60
    about = facts("torch", "triton", "flash-attn-4", "flash-attn-3", "flash-attn")
    about |= {**device_facts(), "command": command(given.out)}
    columns = {
        "": attention_times.COLUMNS,
        "-checks": attention_checks.COLUMNS,
        "-elementwise": PIECE_COLUMNS,
    }
    files = [
        (given.out.with_name(f"{given.out.name}{end}.csv"), names) for end, names in columns.items()
    ]
    times, checks, pieces = (
        Table(path, names, about, overwrite=not given.append) for path, names in files
    )
    names = kernels_here(given.kernels, sizes, device)
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    for number, name in enumerate(names):
        share_s = (deadline - time.monotonic()) / (len(names) - number)
        measure_kernel(name, sizes, device, times, checks, time.monotonic() + share_s)
    if not pieces.rows:
        measure_pieces(sizes, device, pieces)
    failed = [check for check in checks.rows if check["right"] != "True"]
    print(
        f"{len(checks.rows) - len(failed)} of {len(checks.rows)} checks passed: {', '.join(names)}"
    )
    if not checks.rows:
        sys.exit("no kernel was checked")
    if failed:
        told = [
            "; ".join(f"{name} {check[name]}" for name in attention_checks.COLUMNS)
            for check in failed
        ]
        sys.exit(
            "\n".join(
                [
                    "these checks failed; kernels that failed a check of what is timed were not "
                    "timed:",
                    *told,
                ]
            )
        )


def kernels_here(wanted: str | None, sizes: Sizes, device: torch.device) -> list[str]:
    """Returns the requested kernels that support what is timed; prints the reason for the others.

    Every flash attention library is a kernel of its own name.
    """
    KERNELS.update({library.name: Flash([library]) for library in LIBRARIES})
    names = (
        wanted.split(",")
        if wanted
        else [name for name in KERNELS if name not in ("flash", "reference")]
    )
    found = []
    for name in names:
        try:
            choose_kernel(name, sizes.request(device))
            found.append(name)
        except KernelError as error:
            print(f"not measured: {error}")
    return found


def measure_kernel(
    name: str, sizes: Sizes, device: torch.device, times: Table, checks: Table, deadline: float
) -> None:
    """Appends checks and, if those of what is timed pass, times, until the deadline. Skips rows
    that tables already have.

    A library that compiles takes seconds for each mask: the first length is timed before masks that
    are not timed are checked.
    """

    def check(cases: list[dict[str, Any]]) -> None:
        for case in checks.missing(cases, deadline):
            with failures(checks, device, **case, right=False):
                for row in attention_checks.check_kernel(case, sizes, device):
                    checks.append(row)

    cases = list(attention_checks.check_cases(name, sizes, device))
    timed = {"dtype": sizes.dtype, "head_dim": sizes.head_dim}
    if cases:  # the backward pass that trains is the first
        timed["deterministic"] = cases[0]["deterministic"]
    needed = [
        case
        for case in cases
        if timed.items() <= case.items() and case["mask"] in attention_checks.TIMED_MASKS
    ]
    check(needed)
    checked = [
        row
        for row in checks.find(kernel=name, **timed)
        if row["mask"] in attention_checks.TIMED_MASKS
    ]
    if any(row["right"] != "True" for row in checked) and not times.find(kernel=name):
        times.append({"kernel": name, "failed": "not timed: wrong"})
    right = checked and not times.find(kernel=name, failed="not timed: wrong")
    if right:
        measure_times(name, sizes.tokens[:1], sizes, device, times, deadline)
    check([case for case in cases if case not in needed])
    if right:
        measure_times(name, sizes.tokens[1:], sizes, device, times, deadline)


def measure_times(
    name: str,
    tokens: Sequence[int],
    sizes: Sizes,
    device: torch.device,
    times: Table,
    deadline: float,
) -> None:
    """Appends times of these lengths, until the deadline."""
    columns = "kernel", "tokens", "degree", "documents"
    cells = product([name], tokens, sizes.degrees, sizes.documents)

    def needed_s(cell: dict[str, Any]) -> float:
        return attention_times.needed_s(cell, times.find(kernel=name, failed=""), sizes)

    for cell in times.missing(
        (dict(zip(columns, cell, strict=True)) for cell in cells), deadline, needed_s
    ):
        with failures(times, device, **cell):
            row = attention_times.measure_cell(cell, sizes, device)
            times.append(row)
            for way in ("forward", "backward"):
                shares = (
                    f"{row[f'{way}_ring_share']:.0%} of single, calls alone "
                    f"{row[f'{way}_calls_share']:.0%}"
                )
                print(
                    f"{cell}: {way} {row[f'{way}_ring_tflops']:.3g} TFLOP/s, {shares}", flush=True
                )


@contextmanager
def failures(table: Table, device: torch.device, **row: object) -> Iterator[None]:
    """Appends a row with the reason if an error occurs. Ends the process if the GPU is unusable
    then."""
    try:
        yield
    except (
        Exception
    ) as error:  # any error of libraries, compilers or drivers: continue with the other rows
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        table.append({**row, "failed": why})
        print(f"{', '.join(map(str, row.values()))}: {why}", flush=True)
    else:
        return
    if device.type == "cuda":
        gc.collect()  # the traceback held tensors
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except Exception:  # an error that stays, such as an illegal address
            sys.exit(
                "the GPU is unusable after this error: run the same command with --append to "
                "continue after this row"
            )


def measure_pieces(sizes: Sizes, device: torch.device, table: Table) -> None:
    """Measures memory-bound pieces of a step relative to a copy, the first piece."""
    copied = 0.0
    for name, (run, moved) in attention_times.pieces(sizes, device).items():
        with failures(table, device, piece=name):
            rate = moved / median_s(run, device, sizes.longest_s) / 1e9
            copied = copied or rate
            table.append({"piece": name, "gb_per_s": rate, "share_of_copy": rate / copied})
            print(f"{name}: {rate:.0f} GB/s, {rate / copied:.0%} of a copy")


if __name__ == "__main__":
    main()
