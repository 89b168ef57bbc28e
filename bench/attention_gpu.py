"""Attention on one GPU: is every kernel right, how fast is one rank's part of a ring, and what does it lose to one plain call.

    python bench/attention_gpu.py                # everything, in about 25 minutes at most
    python bench/attention_gpu.py --minutes 9    # what fits in so many: every kernel gets its share of them
    python bench/attention_gpu.py --quick        # fewer sizes
    python bench/attention_gpu.py --smoke        # tiny, on any machine: that the script works; its times mean nothing

A kernel (of flash, every library that is installed) is checked first (attention_checks.py says how) and then timed
(attention_times.py): one GPU measures every degree, since one rank is measured. A kernel that fails in what is timed is not
timed; the others are. The script's status is 1 if any check failed.

Writes OUT.csv (times), OUT-checks.csv, OUT-elementwise.csv and OUT.png; prints the efficiency table for a hardware profile.
Rows are appended as they come, and one that cannot be measured says why. Several kernels are measured in a process each, so
that none takes another with it; where the GPU is lost to a process, another process goes on behind the row at fault.
Not measured here: messages, and whether they hide behind the calls.
"""

import gc
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import NamedTuple

import matplotlib
import torch
import torch.distributed as dist

import attention_checks
import attention_times
from attention_times import GPU_SMOKE, QUICK, SMOKE, Sizes
from harness import Table, command, device_facts, facts, median_s, options
from longctx.attention.kernels import KERNELS, KernelError, choose_kernel
from longctx.attention.kernels.flash import Flash
from longctx.attention.kernels.flash_libraries import LIBRARIES
from longctx.planning.calibration.fit import AttentionTime, fit_attention

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # after the choice of a backend that needs no screen

LOST = 3  # exit status of a process that the GPU does not answer any more
HANGING_S = 60  # more than any one row takes
PIECE_COLUMNS = ["piece", "gb_per_s", "share_of_copy", "failed"]


class Tables(NamedTuple):
    times: Table
    checks: Table
    pieces: Table


def main() -> None:
    parser = options(__doc__, "attention_gpu", minutes=25.0)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="fewer sizes")
    size.add_argument("--smoke", action="store_true", help="tiny sizes, also on a CPU")
    parser.add_argument("--kernels", help="only these, such as triton,reference (default: all that run here)")
    parser.add_argument("--layers", type=int, default=32, help="layers of the model that the efficiency table is for")
    parser.add_argument("--append", action="store_true", help="add to the tables what they do not have, and report nothing")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not given.smoke:
        parser.error("there is no GPU here: --smoke tries the script on a CPU")
    smoke = GPU_SMOKE if device.type == "cuda" else SMOKE
    sizes = smoke if given.smoke else QUICK if given.quick else Sizes()
    deadline = time.monotonic() + given.minutes * 60
    about = facts("torch", "triton", "flash-attn-4", "flash-attn-3", "flash-attn")
    about |= {**device_facts(), "command": command(given.out)}
    columns = {"": attention_times.COLUMNS, "-checks": attention_checks.COLUMNS, "-elementwise": PIECE_COLUMNS}
    files = [(given.out.with_name(f"{given.out.name}{end}.csv"), names) for end, names in columns.items()]
    tables = Tables(*(Table(path, names, about, anew=not given.append) for path, names in files))
    names = kernel_names(given.kernels.split(",") if given.kernels else None)
    names = [name for name in names if runs(name, sizes, device)]
    if len(names) == 1:
        measure_kernel(names[0], sizes, device, tables, deadline)
    else:
        for number, name in enumerate(names):
            until = time.monotonic() + (deadline - time.monotonic()) / (len(names) - number)
            measure_in_processes(name, given.out, tables, until)
    if given.append:
        return  # whoever called reports
    report(sizes, device, tables, given.layers, given.out)
    checks = tables.checks.rows
    failed = [check for check in checks if check["right"] != "True"]
    print(f"{len(checks) - len(failed)} of {len(checks)} checks passed: {', '.join(names)}")
    if failed or not checks:
        told = ["; ".join(f"{name} {check[name]}" for name in attention_checks.COLUMNS) for check in failed]
        sys.exit("\n".join(["these checks failed; a kernel with one among what is timed was not timed:", *told]))


def kernel_names(wanted: Sequence[str] | None) -> list[str]:
    """Kernels to measure; every library of flash attention becomes a kernel of its own name."""
    KERNELS.update({library.name: Flash([library]) for library in LIBRARIES})
    unknown = set(wanted or ()) - set(KERNELS)
    if unknown:
        sys.exit(f"--kernels names {', '.join(sorted(unknown))}: choose from {', '.join(KERNELS)}")
    return list(wanted or (name for name in KERNELS if name not in ("flash", "reference")))


def runs(name: str, sizes: Sizes, device: torch.device) -> bool:
    """Whether the kernel can do what is timed; says why if it cannot."""
    try:
        choose_kernel(name, sizes.request(device))
    except KernelError as error:
        print(f"not measured: {error}")
        return False
    return True


def measure_in_processes(name: str, out: Path, tables: Tables, until: float) -> None:
    """Measures a kernel in a process of its own, and in a new one as often as one has lost the GPU to a row."""
    given = [argument for argument in sys.argv[1:] if argument in ("--quick", "--smoke")]
    while (left := until - time.monotonic()) > 0:
        words = ["--kernels", name, "--minutes", str(left / 60), "--out", str(out), "--append", *given]
        try:
            # It ends by itself between two rows; a row that hangs is ended here.
            code = subprocess.run([sys.executable, __file__, *words], timeout=left + HANGING_S).returncode
            why = f"its process ended with status {code}"
        except subprocess.TimeoutExpired:
            code, why = 1, f"a row hung for {HANGING_S} s"
        for table in tables:
            table.read()
        if code == LOST:
            continue
        if code:
            tables.times.append({"kernel": name, "failed": why})
        return
    print(f"{name}: no time is left")


def measure_kernel(name: str, sizes: Sizes, device: torch.device, tables: Tables, deadline: float) -> None:
    """Appends checks and, if what is timed is right, times, until time is over. What tables have already is left out."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    for case in tables.checks.missing(attention_checks.check_cases(name, sizes, device), deadline):
        with failures(tables.checks, device, **case, right=False):
            for row in attention_checks.check_kernel(case, sizes, device):
                tables.checks.append(row)
    checked = tables.checks.find(kernel=name, dtype=sizes.dtype, head_dim=sizes.head_dim)
    checked = [row for row in checked if row["mask"] in attention_checks.TIMED_MASKS]
    if not checked or any(row["right"] != "True" for row in checked):
        tables.times.append({"kernel": name, "failed": f"not timed: {'wrong' if checked else 'not checked'}"})
        return
    columns = "kernel", "tokens", "degree", "documents"
    cells = product([name], sizes.tokens, sizes.degrees, sizes.documents)
    for cell in tables.times.missing((dict(zip(columns, cell, strict=True)) for cell in cells), deadline):
        with failures(tables.times, device, **cell):
            row = attention_times.measure_cell(cell, sizes, device)
            tables.times.append(row)
            for way in ("forward", "backward"):
                shares = f"{row[f'{way}_ring_share']:.0%} of single, calls alone {row[f'{way}_calls_share']:.0%}"
                print(f"{cell}: {way} {row[f'{way}_ring_tflops']:.3g} TFLOP/s, {shares}", flush=True)


@contextmanager
def failures(table: Table, device: torch.device, **row: object) -> Iterator[None]:
    """Whatever goes wrong becomes a row that says so. Ends the process if it has lost the GPU."""
    try:
        yield
    except Exception as error:  # of libraries, compilers, drivers: the other rows go on
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
            sys.stdout.flush()
            os._exit(LOST)


def report(sizes: Sizes, device: torch.device, tables: Tables, layers: int, out: Path) -> None:
    """The picture, the table for a profile, and memory-bound pieces."""
    rows = [row for row in tables.times.rows if not row["failed"]]
    if rows:
        plot(rows, out.with_suffix(".png"))
    print(efficiency(rows, sizes, device, layers))
    copied = 0.0
    for name, (run, moved) in attention_times.pieces(sizes, device).items():
        with failures(tables.pieces, device, piece=name):
            rate = moved / median_s(run, device, sizes.longest_s) / 1e9
            copied = copied or rate
            tables.pieces.append({"piece": name, "gb_per_s": rate, "share_of_copy": rate / copied})
            print(f"{name}: {rate:.0f} GB/s, {rate / copied:.0%} of a copy")


def efficiency(rows: Sequence[dict[str, str]], sizes: Sizes, device: torch.device, layers: int) -> str:
    """Constants for a hardware profile: forward and backward of the kernel that auto would choose, merging included."""
    chosen = choose_kernel("auto", sizes.request(device))
    name = next(name for name, kernel in KERNELS.items() if kernel is chosen)
    if isinstance(chosen, Flash):
        library = chosen.library(sizes.request(device))
        name = library if isinstance(library, str) else library.name
    times = []
    for row in rows:
        if row["kernel"] == name:
            degree, documents = int(row["degree"]), int(row["documents"])
            both = float(row["forward_ring"]) + float(row["backward_ring"])
            times.append(AttentionTime(int(row["tokens"]) * degree // documents, degree, both * layers / documents))
    if not any(time.degree == 1 for time in times):
        return f"# no efficiency table: whole documents with kernel {name}, which auto chooses, were not measured"
    fit = fit_attention(times)
    table = ", ".join(f"[{length}, {share:.3f}]" for length, share in fit.efficiency)
    penalty = "" if fit.split_penalty is None else f"\nattention_split_penalty: {fit.split_penalty:.3g}"
    return (
        f"# {name}, {layers} layers of {sizes.heads} heads of {sizes.head_dim}, {sizes.dtype}; forward and backward once each\n"
        f"attention_s_per_token2: {fit.s_per_token2:.4g}\nattention_efficiency: [{table}]{penalty}"
    )


def plot(rows: Sequence[dict[str, str]], path: Path) -> None:
    """Throughput by tokens a rank: a column for each kernel, a line for each degree."""
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    degrees, documents = (sorted({int(row[name]) for row in rows}) for name in ("degree", "documents"))
    panels = list(product(("forward", "backward"), documents))
    size = 2 + 3.5 * len(kernels), 1 + 2.6 * len(panels)
    figure, axes = plt.subplots(len(panels), len(kernels), figsize=size, sharey="row", squeeze=False, layout="constrained")
    for (direction, count), line in zip(panels, axes, strict=True):
        line[0].set_ylabel(f"{direction}, TFLOP/s\ndocuments: {count}")
        for kernel, axis in zip(kernels, line, strict=True):
            for number, degree in enumerate(degrees):
                same = {"kernel": kernel, "degree": str(degree), "documents": str(count)}
                chosen = [row for row in rows if same.items() <= row.items()]
                tokens = [int(row["tokens"]) for row in chosen]
                colour = plt.get_cmap("viridis")(0.9 * number / max(1, len(degrees) - 1))
                for what, style in (("ring", "o-"), ("single", "--")):
                    rates = [float(row[f"{direction}_{what}_tflops"]) for row in chosen]
                    label = f"degree {degree}" if what == "ring" else None
                    axis.plot(tokens, rates, style, color=colour, markersize=4, linewidth=1, label=label)
            axis.set_xscale("log", base=2)
            axis.set(xlabel="tokens per rank", title=kernel)
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right upper")
    where = f"{rows[0]['device']}, torch {rows[0]['torch']}, {rows[0]['date']}"
    figure.suptitle(f"One rank of a ring (solid)\nand one call on as much work (dashed)\n{where}", fontsize="medium")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
