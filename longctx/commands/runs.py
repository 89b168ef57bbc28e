"""`longctx runs`: what happened in training runs, from their metrics.jsonl, also while a run is writing, as a table."""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from longctx.errors import UserError
from longctx.step_log import LOG, read_log
from longctx.units import format_bytes

SUMMARY = "Show training runs: loss, speed, degrees, predicted time and time split"
PARTS = {
    "attention_s": "attention",
    "exchange_wait_s": "exchange wait",
    "bubble_s": "pipeline bubble",
    "optimizer_s": "optimizer",
    "rest_s": "rest",
    "data_s": "data wait",
}
"""Parts of the step time: column → name. `data_s` is the step time without the other parts."""
LAST = 10
"""Number of steps whose mean is the final loss."""
PAUSED = 5
FAR_OFF = 1.5
"""Measured over predicted step time, or its inverse, from which on the profile is in doubt."""
Step = Mapping[str, Any]
"""A line of metrics.jsonl as plain data; see `longctx.training.metrics.StepMetrics`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder (train.run_dir); several are compared")
    parser.epilog = "For curves over steps: tensorboard --logdir RUN/tensorboard"


def run(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    runs = read_runs(arguments.runs)
    console = Console()
    headings, lines = summary(runs)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(Text(heading), justify="right" if heading else "left", overflow="fold")
    for line in lines:
        table.add_row(*map(Text, line))
    console.print(table)
    words = (
        "tokens/s, step time, measured / predicted: medians; shares: of the mean step time. All of these leave out the "
        f"first step, which also compiles, and pauses: steps that took {PAUSED} times as long as usual, compared with their "
        "prediction."
    )
    console.print(words, style="dim", highlight=False)
    for remark in (remark for each in runs for remark in each.remarks()):
        console.print(remark, highlight=False, markup=False)
    return 0


@dataclass(frozen=True)
class RunLog:
    """Steps of one run, ascending.

    Attributes:
        name: short name for headings, unique among the runs that were read together.
        path: run folder.
        damaged: number of lines that could not be read, without the last one.
    """

    name: str
    path: Path
    steps: Sequence[Step]
    damaged: int = 0

    def usual(self) -> Sequence[Step]:
        """Returns the steps for times: without the first, which also compiles, and without steps in which something paused.

        A step with a measured over predicted time of more than PAUSED times the median is a pause.
        """
        steps = self.steps[1:] if len(self.steps) > 2 else self.steps
        most = PAUSED * median(map(_over_predicted, steps))
        return [step for step in steps if _over_predicted(step) <= most]

    def time_parts(self) -> dict[str, float]:
        """Returns the mean seconds per step of every part of PARTS, over the usual steps."""
        rows = [{part: float(step.get(part) or 0.0) for part in PARTS if part != "data_s"} for step in self.usual()]
        for row, step in zip(rows, self.usual(), strict=True):
            row["data_s"] = max(0.0, step["step_time_s"] - sum(row.values()))
        return {part: fmean(row[part] for row in rows) for part in PARTS}

    def over_predicted(self) -> float:
        """Returns the median of measured over predicted step time."""
        return median(map(_over_predicted, self.usual()))

    def remarks(self) -> list[str]:
        """Returns lines on a profile whose predictions are far off, and on damaged lines of the log."""
        remarks, ratio = [], self.over_predicted()
        if not 1 / FAR_OFF <= ratio <= FAR_OFF:
            remarks.append(
                f"{self.name}: steps take {ratio:.2f} times the predicted time, so plans may be worse than they could be: "
                "measure a profile of this machine (longctx profile CONFIG --out FILE), and train with --context.profile FILE"
            )
        if self.damaged:
            remarks.append(f"{self.path}: {self.damaged} damaged lines of {LOG} left out")
        return remarks


def _over_predicted(step: Step) -> float:
    return float(step["step_time_s"]) / float(step["predicted_s"])


def read_runs(paths: Sequence[Path]) -> list[RunLog]:
    """Reads several runs. Raises UserError if a run cannot be read or is given twice."""
    for i, path in enumerate(paths):
        if path.resolve() in [other.resolve() for other in paths[:i]]:
            raise UserError(f"run {path} is given twice: leave one out")
    names = [path.resolve().name for path in paths]
    return [read_run(path, name if names.count(name) == 1 else str(path)) for path, name in zip(paths, names, strict=True)]


def read_run(path: Path, name: str) -> RunLog:
    """Reads one run folder. A damaged last line is being written, and is left out.

    Raises UserError without such a folder, without metrics.jsonl, and without a complete step.
    """
    if not path.is_dir():
        raise UserError(f"no run {path}: {'it is a file' if path.exists() else 'no such folder'}; give the folder of a run")
    if not (path / LOG).is_file():
        inside = sorted(log.parent for log in path.glob(f"*/{LOG}"))
        way_out = f"give {', '.join(map(str, inside[:3]))}" if inside else "give the folder of a run (train.run_dir)"
        raise UserError(f"{path} holds no {LOG}, which training writes after its first step: {way_out}")
    lines = [None if step is None else _checked(step) for step, _ in read_log(path / LOG)]
    steps = {step["step"]: step for step in lines if step is not None}
    if not steps:
        raise UserError(f"{path / LOG} holds no complete step yet: wait for the first one, or see why training stopped")
    return RunLog(name, path, [steps[number] for number in sorted(steps)], lines[:-1].count(None))


def _checked(step: dict[str, Any]) -> Step | None:
    """Returns the step, with a loss of NaN if it had no update; None if it lacks a metric that is shown."""
    try:
        if step["loss"] is None or step.get("target_tokens") == 0:
            step["loss"] = math.nan
        typed = isinstance(step["loss"], float) and isinstance(step["degrees"], dict)
        return step if typed and min(step["tokens"], step["step_time_s"], step["predicted_s"]) > 0 else None
    except (KeyError, TypeError):
        return None


def summary(runs: Sequence[RunLog]) -> tuple[list[str], list[list[str]]]:
    """Returns headings (the runs) and lines (one per figure), in words."""
    columns = [_figures(run) for run in runs]
    shown = [name for name in columns[0] if any(column[name] for column in columns)]
    return ["", *(run.name for run in runs)], [[name, *(column[name] or "—" for column in columns)] for name in shown]


def _figures(run: RunLog) -> dict[str, str]:
    """Returns name → value of every figure of a run; empty values where the run has none."""
    usual, parts = run.usual(), run.time_parts()
    losses = [step["loss"] for step in run.steps if math.isfinite(step["loss"])]  # not of skipped steps
    validation = [loss for step in run.steps if (loss := step.get("validation_loss")) is not None]
    degrees = sorted({int(degree) for step in run.steps for degree in step["degrees"]})
    peak = max(step.get("peak_memory_bytes") or 0 for step in run.steps)
    return {
        "steps": f"{run.steps[0]['step']:,} to {run.steps[-1]['step']:,}",
        "loss, first step": f"{losses[0]:.3f}" if losses else "",
        f"loss, last {LAST} steps": f"{fmean(losses[-LAST:]):.3f}" if losses else "",
        "steps without update": str(sum(bool(step.get("skipped")) for step in run.steps) or ""),
        "loss, validation": f"{validation[-1]:.3f}" if validation else "",
        "tokens/s, all ranks": f"{median(step['tokens'] / step['step_time_s'] for step in usual):,.0f}",
        "step time": f"{median(step['step_time_s'] for step in usual):.3g} s",
        "measured / predicted": f"{run.over_predicted():.2f}×",
        **{PARTS[part]: f"{parts[part] / sum(parts.values()):.1%}" if parts[part] else "" for part in PARTS},
        "degrees": " ".join(map(str, degrees)) if len(degrees) < 8 else f"{degrees[0]} to {degrees[-1]}",
        "peak memory": format_bytes(peak) if peak else "",
    }
