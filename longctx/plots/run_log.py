"""Steps of training runs, as their metrics.jsonl has them, also while a run is writing, and their summary in words."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from longctx.errors import UserError
from longctx.plots.colours import degree_class
from longctx.step_log import LOG, read_log
from longctx.units import format_bytes

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


@dataclass(frozen=True)
class RunLog:
    """Steps of one run, ascending.

    Attributes:
        name: short name for legends, unique among the runs that were read together.
        path: run folder.
        damaged: number of lines that could not be read, without the last one.
    """

    name: str
    path: Path
    steps: Sequence[Step]
    damaged: int = 0

    def column(self, name: str) -> tuple[list[int], list[float]]:
        """Returns steps and values of one metric; steps without a value are left out."""
        pairs = [(step["step"], float(step[name])) for step in self.steps if step.get(name) is not None]
        return [number for number, _ in pairs], [value for _, value in pairs]

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
                "measure a profile of this machine (longctx calibrate CONFIG --out FILE), and train with --context.profile FILE"
            )
        if self.damaged:
            remarks.append(f"{self.path}: {self.damaged} damaged lines of {LOG} left out")
        return remarks

    def degrees(self) -> dict[int, list[int]]:
        """Returns the number of documents of every step by degree class, ascending; see `degree_class`."""
        counts: dict[int, list[int]] = {}
        for i, step in enumerate(self.steps):
            for degree, documents in step["degrees"].items():
                row = counts.setdefault(degree_class(int(degree)), [0] * len(self.steps))
                row[i] += documents
        return dict(sorted(counts.items()))


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
    """Returns the step, with a loss of NaN if it had no update; None if it lacks a metric that is drawn."""
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
    validation, rewards = run.column("validation_loss")[1], run.column("reward")[1]
    degrees = sorted({int(degree) for step in run.steps for degree in step["degrees"]})
    peak = max(step.get("peak_memory_bytes") or 0 for step in run.steps)
    return {
        "steps": f"{run.steps[0]['step']:,} to {run.steps[-1]['step']:,}",
        "loss, first step": f"{losses[0]:.3f}" if losses else "",
        f"loss, last {LAST} steps": f"{fmean(losses[-LAST:]):.3f}" if losses else "",
        "reward, first step": f"{rewards[0]:.3f}" if rewards else "",
        f"reward, last {LAST} steps": f"{fmean(rewards[-LAST:]):.3f}" if rewards else "",
        "steps without update": str(sum(bool(step.get("skipped")) for step in run.steps) or ""),
        "loss, validation": f"{validation[-1]:.3f}" if validation else "",
        "tokens/s, all ranks": f"{median(step['tokens'] / step['step_time_s'] for step in usual):,.0f}",
        "step time": f"{median(step['step_time_s'] for step in usual):.3g} s",
        "measured / predicted": f"{run.over_predicted():.2f}×",
        **{PARTS[part]: f"{parts[part] / sum(parts.values()):.1%}" if parts[part] else "" for part in PARTS},
        "degrees": " ".join(map(str, degrees)) if len(degrees) < 8 else f"{degrees[0]} to {degrees[-1]}",
        "peak memory": format_bytes(peak) if peak else "",
    }
