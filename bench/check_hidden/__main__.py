"""Runs cases, prints every line that the checker says of them, and keeps the lines with what
somebody has read in them."""

import argparse
import json
import os
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.check_hidden import parallel, parallel_more, plain, plain_more, second, second_parallel
from bench.check_hidden.cases import Case, Precision, distance, true_gradients
from longctx.check import CheckError, Probe, Step, check_step

RESULTS = Path(__file__).parents[1] / "results"
STORE = RESULTS / "check_hidden.json"
PAGE = RESULTS / "check_hidden.md"
VERDICTS = ("named", "located", "unnamed", "missed", "misnamed", "right", "alarm", "refused")
SMALLEST = 1e-6  # relative change of the gradient that is a fault
ROUNDING = 2e-5  # relative error of a right step, in float32
SMALL = 0.02  # relative change of the gradient below which a fault is a small one


MORE = (
    plain_more,
    parallel_more,
    second,
    second_parallel,
)  # modules that add to the cases of plain and parallel


def cases() -> list[Case]:
    return [*plain.CASES, *parallel.CASES]


def side(case: Case) -> str:
    """Returns which half of the faults a case belongs to."""
    return "plain" if case in plain.CASES else "parallel"


def processes() -> tuple[int, int]:
    """Returns rank and number of processes."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def worst(value: float) -> float:
    """Returns the largest value of all processes; infinity for what is no number."""
    number = torch.tensor(value if value == value else float("inf"), dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
    return float(number)


def judge(case: Case) -> tuple[list[str], float]:
    """Returns what the checker says of a case, and how far its gradients are from right ones."""
    far = [0.0]
    making = [False]

    def make(probe: Probe) -> Step:
        making[0] = True
        step = case.make(probe)
        making[0] = False
        truth = true_gradients(case.model(probe), probe.rows)
        far.append(distance(step.gradients, truth))
        return step

    try:
        report = check_step(make, case.probes)
        lines = report.lines()
    except CheckError as error:
        lines = [f"refused: {error}"]
    except Exception as error:
        if making[0]:
            raise
        lines = [f"crash of the checker: {type(error).__name__}: {error}"]
        if dist.is_initialized():
            keep({key(case): entry(case, lines, max(far))})
            print(f"== {key(case)}\n   >", lines[0], flush=True)
            os._exit(1)  # other ranks wait in a collective
    return lines, worst(max(far))


def complaint(case: Case, far: float) -> str:
    """Returns what is wrong with the case itself, in float32; "" if nothing is."""
    if Precision.dtype is not torch.float32:
        return ""
    right = not case.fault or case.only_logged
    largest = 0.1 if case.rounds else ROUNDING
    if right and not far < largest:
        return f"NO RIGHT SET-UP: its gradient is {far:.1e} off"
    if not right and not far > SMALLEST:
        return f"NO FAULT: its gradient is {far:.1e} off"
    return ""


def stored() -> dict[str, Any]:
    if not STORE.exists():
        return {}
    content: dict[str, Any] = json.loads(STORE.read_text())
    return content


def key(case: Case) -> str:
    """Returns the name of a case in the store."""
    suffix = "" if Precision.dtype is torch.float32 else " [bfloat16]"
    return case.name + suffix


def keep(results: dict[str, Any]) -> None:
    """Writes results, without a loss of those of other cases."""
    names = {case.name for case in cases()}
    whole = {
        name: result
        for name, result in {**stored(), **results}.items()
        if name.removesuffix(" [bfloat16]") in names
    }
    text = json.dumps(whole, indent=1, ensure_ascii=False, sort_keys=True)
    STORE.write_text(text + "\n")


def entry(case: Case, lines: list[str], far: float) -> dict[str, Any]:
    """Returns what is kept of a case; readings are those of before. "off" is how far gradients
    are from right ones, -1 if that is no number or nothing was run."""
    before = stored().get(key(case), {})
    return {
        "source": case.source,
        "fault": case.fault,
        "side": side(case),
        "processes": case.processes,
        "off": float(f"{far:.2g}") if 0 < far < float("inf") else -1,
        "lines": lines,
        "read": before.get("read"),
        "second": case.second,
        "first_sight": before.get("first_sight"),
    }


def run(pattern: str, second_only: bool) -> int:
    """Runs the cases whose names match; returns 1 if a case is not what it says."""
    rank, ranks = processes()
    wrong = 0
    for case in cases():
        if case.processes != ranks or not re.search(pattern, case.name):
            continue
        if second_only and not case.second:
            continue
        start = time.perf_counter()
        torch.manual_seed(0)
        try:
            lines, far = judge(case)
        except Exception:
            traceback.print_exc()
            print(f"BROKEN {case.name}", flush=True)
            if ranks > 1:
                os._exit(1)  # others wait in a collective
            wrong = 1
            continue
        if rank:
            continue
        seconds = time.perf_counter() - start
        print(f"== {key(case)} ({far:.1e}, {seconds:.1f} s)\n   {case.fault or 'right'}")
        problem = complaint(case, far)
        if problem:
            print("  ", problem)
            wrong = 1
        for line in lines:
            print("   >", line)
        sys.stdout.flush()
        keep({key(case): entry(case, lines, far)})
    return wrong


# --- reading


def reading(entry: dict[str, Any]) -> str:
    """Returns the verdict of a case; "not read" or "not read again" without one of its lines."""
    read = entry.get("read")
    if read is None:
        return "not read"
    if read["lines"] != entry["lines"]:
        return "not read again"
    verdict: str = read["verdict"]
    return verdict


def read(path: Path) -> None:
    """Takes readings over: a line is a verdict, a name and untrue sentences, with | between.

    The first reading of a case of the second set is kept as the one at first sight.
    """
    whole = stored()
    for line in path.read_text().splitlines():
        if not line.strip():
            continue
        verdict, name, *untrue = [part.strip() for part in line.split("|")]
        if verdict not in VERDICTS:
            raise ValueError(f"no verdict: {verdict}")
        case = whole[name]
        taken = {"verdict": verdict, "untrue": untrue, "lines": case["lines"]}
        case["read"] = taken
        if case.get("second") and case["first_sight"] is None:
            case["first_sight"] = taken
    keep(whole)


def first_sight(entry: dict[str, Any]) -> str:
    """Returns the verdict that a case of the second set had before any mend."""
    seen = entry["first_sight"]
    if seen is None:
        return "not read"
    verdict: str = seen["verdict"]
    return verdict


Group = tuple[str, str, str, str]


def group_of(name: str, whole: dict[str, Any]) -> Group:
    """Returns set, side, sort and dtype of a case; how large a fault is is known in float32."""
    case = whole[name]
    plain_name = name.removesuffix(" [bfloat16]")
    dtype = "float32" if name == plain_name else "bfloat16"
    off = whole.get(plain_name, case)["off"]
    if not case["fault"]:
        what = "right set-ups"
    elif 0 <= off < SMALL:
        what = "small faults"
    else:
        what = "faults"
    examiner = "second set" if case.get("second") else "first set"
    return examiner, case["side"], what, dtype


def kinds(entry: dict[str, Any]) -> list[str]:
    """Returns the kinds of findings that lines have, of all probes."""
    findings = [
        line for line in entry["lines"] if not line.startswith(("not tested", "    ", "refused"))
    ]
    return [line.split(": ")[1] for line in findings if ": " in line]


def in_bfloat16() -> list[str]:
    """Returns what bfloat16 makes of faults that float32 names, and of right set-ups."""
    counts = Counter[str]()
    whole = stored()
    for name, case in whole.items():
        coarse = whole.get(f"{name} [bfloat16]")
        if coarse is None:
            continue
        before = reading(case)
        found = kinds(coarse)
        if coarse["lines"][0].startswith("refused"):
            became = "refused"
        elif set(found) == {"right"}:
            became = "right"
        elif before == "named" and kinds(case)[0] in found:
            became = "the same kind"
        else:
            became = "another kind"
        if before in ("named", "right"):
            counts[f"{before} in float32: {became}"] += 1
    return [f"- {what}: {count}" for what, count in sorted(counts.items())]


COLUMNS = (*VERDICTS, "not read", "not read again")


def counted(entries: dict[str, Any], field: str, verdict_of: Callable[[Any], str]) -> list[str]:
    """Returns a table of how many cases of a group have which verdict.

    Args:
        entries: cases of the store, by name.
        field: of an entry: the reading that counts.
        verdict_of: returns the verdict of an entry.
    """
    counts: dict[Group, Counter[str]] = {}
    for name, case in entries.items():
        group = counts.setdefault(group_of(name, entries), Counter())
        verdict = verdict_of(case)
        group[verdict] += 1
        if verdict in VERDICTS and case[field]["untrue"]:
            group["with untrue sentences"] += 1
    columns = (*COLUMNS, "with untrue sentences")
    lines = ["| " + " | ".join(["", *columns]) + " |", "|" + "---|" * (len(columns) + 1)]
    for group_name in sorted(counts):
        cells = [str(counts[group_name][column] or "") for column in columns]
        row = [", ".join(group_name), *cells]
        lines.append("| " + " | ".join(row) + " |")
    return lines


def score() -> None:
    """Prints and writes how many cases have which verdict, now and at first sight."""
    whole = stored()
    second_set = {name: case for name, case in whole.items() if case.get("second")}
    now = counted(whole, field="read", verdict_of=reading)
    before = counted(second_set, field="first_sight", verdict_of=first_sight)
    page = "\n".join(
        [
            "# Faults by people who have not read the checker",
            "",
            "`python -m bench.check_hidden score`; cases, lines and readings are in",
            "check_hidden.json. Small faults change the gradient by less than 2 %, or only a log.",
            "The checker was mended by the first set; the second one is by another examiner.",
            "",
            *now,
            "",
            "The second set at first sight, before any mend:",
            "",
            *before,
            "",
            "In bfloat16 (plain ones; kinds of findings, not read):",
            "",
            *in_bfloat16(),
            "",
        ]
    )
    PAGE.write_text(page)
    print("\n".join([*now, "", *before]))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.check_hidden")
    parser.add_argument("pattern", nargs="?", default="", help="a regex of names; score; read")
    parser.add_argument("path", nargs="?", type=Path, help="a file of readings, for read")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--second", action="store_true", help="the second set only")
    asked = parser.parse_args()
    if asked.pattern == "score":
        score()
        return 0
    if asked.pattern == "read":
        read(asked.path)
        return 0
    Precision.dtype = getattr(torch, asked.dtype)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    return run(asked.pattern, second_only=asked.second)


if __name__ == "__main__":
    raise SystemExit(main())
