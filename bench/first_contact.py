"""The first minutes on GPUs: is it right, how fast is it, does the memory estimate hold. Needs one
GPU, and no network.

    python bench/first_contact.py                  # 10 minutes at most on one GPU, 14 on two and more
    python bench/first_contact.py --minutes 25     # more rows
    python bench/first_contact.py --dry-run        # every part at tiny sizes, on any machine: no figures

Answers in OUT.md, which is rewritten after every part, beside what was predicted:
  device     What are the best rates of this GPU (device_rates.py)?
  compile    How long do attention kernels compile (compile_gpu.py)? Once: they are kept.
  attention  Does every kernel agree with float64? How fast is it, and what does a ring cost over one call (attention_gpu.py)?
  training   How fast does a 1B model train on documents of 32,768 and 131,072 tokens, does it take the memory that was
             estimated, and which recomputation and compilation are best (training_gpu.py)?
  messages   On two and more GPUs: do rings, pipelines and training over NCCL give what one process gives (pytest -m gpu)?
  profile    What are the constants of this machine for the planner (longctx calibrate), on two and more GPUs those of messages
             between them too?
  several    On two and more GPUs: is a ring over all of them right and fast, and what do dynamic degrees gain over the best
             single one, and over TRL's packing (several_gpus.py)?

Each part is a process of its own, with a share of the time: one that hangs is ended with all that
it started, OUT.md has the end of the output of one that failed, and the others run. Rows are
appended to OUT-attention*.csv and OUT-training.csv as they are measured; the same command continues
with those that are missing. A dry run measures nothing: it fails if any row of a part does, and its
OUT.md is what a GPU would send; where others use the machine, parts that reach their deadline are
called slow. docs/gpu.md says how to read the answers.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from first_contact_page import Page
from harness import command, facts, options

HERE = Path(__file__).parent
SHARES = {"device": 0.1, "compile": 0.25, "attention": 0.5, "training": 0.85, "profile": 1.0}
"""Share of the time that has passed at the end of each part."""
OF_SEVERAL = {
    "device": 0.06,
    "compile": 0.15,
    "attention": 0.28,
    "training": 0.45,
    "messages": 0.58,
    "profile": 0.72,
    "several": 1.0,
}
"""The same on two and more GPUs."""
DRY = {
    "device": 0.1,
    "compile": 0.15,
    "attention": 0.3,
    "training": 0.55,
    "messages": 0.63,
    "messages here": 0.77,
    "profile": 0.87,
    "several": 1.0,
}
"""The same for a dry run, with the tests of messages once as on GPUs, where all are skipped, and
once on processes."""
MINUTES, MINUTES_OF_SEVERAL, MINUTES_DRY = 9.5, 13.0, 15.0
LATE_S = 60.0
"""Time after which a part is ended whose share is over: parts end by themselves, but not in the
middle of a row."""
NOT_SHOWN = {
    "device": "rates of a GPU",
    "compile": "seconds of a library that compiles (tests/attention/test_flash_4_real.py compiles "
    "flash-attn 4 without a GPU)",
    "attention": "flash-attn, PyTorch's flash operators and triton on a GPU "
    "(tests/attention/test_flash.py calls stand-ins)",
    "training": "speed, memory and compiled blocks of a GPU",
    "messages": "NCCL; that the tests for GPUs are found is shown",
    "messages here": "NCCL; the same tests pass over gloo",
    "profile": "constants of a GPU, bandwidth and latency between GPUs",
    "several": "speed of GPUs; that two processes give the right result is shown",
}
"""What a dry run of a part cannot show."""
TAIL = 25


def main() -> None:
    gpus = torch.cuda.device_count()
    parser = options(__doc__, "first-contact")
    parser.add_argument(
        "--minutes",
        type=float,
        help=f"time for all parts ({MINUTES:.0f}; {MINUTES_OF_SEVERAL:.0f} on several)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="tiny sizes, also on a CPU; writes OUT-dry-run.md only",
    )
    given = parser.parse_args()
    if not torch.cuda.is_available() and not given.dry_run:
        built = (
            ""
            if torch.backends.cuda.is_built()
            else f" (torch {torch.__version__} is a build without CUDA)"
        )
        parser.error(
            f"no GPU is available{built}: run this on a machine with a GPU, or use --dry-run to "
            "test the script"
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a part in progress is ended too
    shares, minutes = plan(gpus, dry=given.dry_run)
    page = given.out.with_name(given.out.name + "-dry-run" * given.dry_run + ".md")
    page.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "dry" if given.dry_run else given.out
        failures = contact(
            out,
            page,
            shares,
            (given.minutes or minutes) * 60,
            small=given.dry_run,
            gpus=2 if given.dry_run else gpus,
        )
    print(page.read_text(encoding="utf-8"))
    sys.exit(1 if failures else 0)


def plan(gpus: int, *, dry: bool) -> tuple[dict[str, float], float]:
    """Returns the parts on so many GPUs with their shares of the time, and the minutes for all of
    them."""
    return (
        (DRY, MINUTES_DRY)
        if dry
        else (OF_SEVERAL, MINUTES_OF_SEVERAL)
        if gpus > 1
        else (SHARES, MINUTES)
    )


def contact(
    out: Path, page: Path, shares: dict[str, float], seconds: float, *, small: bool, gpus: int
) -> list[str]:
    """Runs the parts, and rewrites the page after each. Returns reasons of failures."""
    began, told, failures, found = time.monotonic(), list[str](), list[str](), list[str]()
    any_slow = False
    for part in ("", *shares):
        if part:
            left, start = began + shares[part] * seconds - time.monotonic(), time.monotonic()
            words = commands(part, out, left / 60, small=small, gpus=gpus)
            ended = run(words, Path(f"{out}-{part}.log"), left + LATE_S)
            slow = small and ended.late
            any_slow |= slow
            verdict = "done"
            if slow:
                verdict = "**slow**, ended at its deadline"
            elif ended.why:
                verdict = "**failed**"
                failures.append(f"{part}: {ended.why}")
            shown = f"; not shown here: {NOT_SHOWN[part]}" if small else ""
            told.append(f"- {part}: {verdict} in {time.monotonic() - start:.0f} s{shown}")
        lines, wrong = text(out, small=small)
        if any_slow:  # rows are missing for want of time
            wrong = []
        found = [*failures, *(wrong if part == list(shares)[-1] else [])]
        head = [
            "",
            *(f"- **passed over**: {line}" for line in Page(out, []).passed_over()),
            *(told or ["- no part has ended"]),
            *("", *(f"**Failed** {failure}" for failure in found)) * bool(found),
        ]
        page.write_text("\n".join([*lines[:3], *head, *lines[3:]]) + "\n", encoding="utf-8")
    return found


def text(out: Path, *, small: bool) -> tuple[list[str], list[str]]:
    """Returns the lines of OUT.md, and what is wrong with them; of a dry run also rows that failed
    or are missing."""
    expected = Page(
        Path("none") if small else out, commands("profile", out, 1.0, small=False, gpus=1)[3:6]
    )
    versions = facts(
        "longctx", "torch", "triton", "flash-attn-4", "flash-attn-3", "flash-attn", "torchao"
    )
    versions |= {
        name: expected.about[name]
        for name in ("driver", "cuda", "matrix product", "copy")
        if name in expected.about
    }
    title = f"a dry run, predicted for {expected.assumed}" if small else expected.about["device"]
    lines = [
        f"# First contact: {title}",
        "",
        f"`{command(out)}`; " + "; ".join(f"{a}: {b}" for a, b in versions.items()),
    ]
    lines += expected.lines()
    if not small:
        return lines, expected.failures
    here = Page(out, commands("profile", out, 1.0, small=True, gpus=1)[3:6], small=True)
    tiny = [f"#{line}" if line.startswith("## ") else line for line in here.lines()]
    lines += [
        "",
        f"## The same of a tiny model on {here.about['device']}: only that it runs is meant",
        *tiny,
    ]
    return lines, [*expected.failures, *here.failures, *here.missing()]


def commands(part: str, out: Path, minutes: float, *, small: bool, gpus: int) -> list[str]:
    """Returns the command of a part on so many GPUs, or `small` on any machine."""
    tiny = ["--smoke"] if small else []
    if part == "device":
        return [str(HERE / "device_rates.py"), f"{out}-device.json", *tiny]
    if part == "compile":
        return [str(HERE / "compile_gpu.py"), f"{out}-compile.json", *tiny]
    if part.startswith("messages"):
        marker = "slow" if part == "messages here" else "gpu"
        return [
            "-m",
            "pytest",
            "-v",
            "-m",
            marker,
            str(HERE.parent / "tests" / "attention" / "test_two_devices.py"),
        ]
    if part == "profile":
        model = "tiny" if small else "llama-3.2-1b"
        several = [f"--processes={gpus}"] if gpus > 1 else []
        settings = [
            f"--model.preset={model}",
            "--train.dtype=bfloat16",
            f"--batch.tokens_per_rank={256 if small else 16384}",
        ]
        return ["-m", "longctx", "calibrate", *settings, "--out", f"{out}-profile.yaml", *several]
    if part == "several":
        files = ["--profile", f"{out}-profile.yaml", "--out", f"{out}-several"]
        words = ["--gpus", str(gpus), "--minutes", f"{minutes:.2f}", *tiny]
        return [str(HERE / "several_gpus.py"), *files, *words]
    script = [
        str(HERE / f"{part}_gpu.py"),
        "--first",
        *tiny,
        "--minutes",
        f"{minutes:.2f}",
        "--out",
        f"{out}-{part}",
    ]
    if part == "training":
        return [*script, "--steps", "2" if small else "5"]
    return [
        *script,
        "--append",
        *(["--kernels", "cpu"] if small and not torch.cuda.is_available() else []),
    ]


class Ended(NamedTuple):
    """How a part ended: the reason and the end of its output if it failed, and whether that was its
    deadline."""

    why: str = ""
    late: bool = False


def run(words: Sequence[str], log: Path, seconds: float) -> Ended:
    """Runs a part, and shows and keeps its output."""
    mark, until = (
        f"LONGCTX_FIRST_CONTACT={os.getpid()}-{time.monotonic_ns()}",
        time.monotonic() + seconds,
    )
    environment = {**os.environ, **dict([mark.split("=")]), "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as stream, log.open(encoding="utf-8", errors="replace") as shown:
        part = subprocess.Popen(
            [sys.executable, *words], stdout=stream, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while part.poll() is None and time.monotonic() < until:
                time.sleep(0.1)
                print(shown.read(), end="", flush=True)
        finally:
            code = part.poll()
            end_marked(mark)
            with suppress(subprocess.TimeoutExpired):
                part.wait(10)  # a process in a call of the driver may not end at all
            print(shown.read(), end="", flush=True)
    if code == 0:
        return Ended()
    why = f"ended after {seconds:.0f} s" if code is None else f"exit status {code}"
    last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:]
    told = "\n".join([f"{why}, at the end of its output:", "", "```", *last, "```"])
    return Ended(told, late=code is None)


def end_marked(mark: str) -> None:
    """Ends all processes with this variable: also what a part started in other sessions would hold
    memory of the GPU."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark.encode() in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)


if __name__ == "__main__":
    main()
