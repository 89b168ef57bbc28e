"""The best splits of GPUs, as a terminal table and as plain values."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from longctx.comparison.splits.cost import Split
from longctx.comparison.splits.search import PlannedSplit, SearchResult
from longctx.planning.pipeline import Pipeline


def row(planned: PlannedSplit) -> dict[str, Any]:
    """Returns a split as plain values: domain, settings of a run, predictions, and memory by part."""
    split, memory = planned.split, planned.memory.to_json()
    figures = {name: value for name, value in vars(planned).items() if name not in ("split", "memory")}
    return {"domain": split.domain, "settings": split.settings, **figures, "memory": memory}


def counts(outcome: SearchResult) -> dict[str, int]:
    """Returns the number of splits by outcome."""
    return {**outcome.refused, "were planned": outcome.planned, "cannot be faster than these": outcome.slower}


def print_splits(title: str, outcome: SearchResult, common: dict[str, str], console: Console) -> None:
    """Prints the best splits, and the settings of the fastest: those of the split and those `common` to all splits."""
    console.print(title, style="bold", highlight=False, markup=False)
    console.print()
    table = Table(box=None, padding=(0, 1, 0, 0))
    with_experts = any(planned.split.expert > 1 for planned in outcome.best)
    for name in ("tp", "pp", "ep" if with_experts else "domain"):  # the domain is what tp and pp leave
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("schedule", "recompute", "kept\nwhole"):
        table.add_column(name, no_wrap=True)
    for name in ("tokens\nper rank", "step\ns", "tokens/s\nper GPU", "MFU", "bubble", "memory\nGiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, planned in enumerate(outcome.best):
        split = planned.split
        table.add_row(
            str(split.tensor),
            str(split.pipeline.ranks),
            str(split.expert if with_experts else split.domain),
            schedule_name(split.pipeline),
            split.recompute,
            _kept_whole(split),
            f"{split.tokens_per_rank}",
            f"{planned.step_s:.3g}",
            f"{planned.tokens_per_s_per_gpu:,.0f}",
            f"{planned.mfu:.1%}",
            f"{planned.bubble_share:.1%}",
            f"{planned.memory.total / 2**30:.1f}",
            style="bold" if number == 0 else None,
        )
    console.print(table)
    for line in _captions(outcome):
        console.print(line, style="dim", highlight=False, markup=False)
    console.print()
    console.print("Settings of the first split:", highlight=False)
    for name, value in {**common, **outcome.best[0].split.settings}.items():
        console.print(f"    --{name} {value}", highlight=False, markup=False)


def _captions(outcome: SearchResult) -> Sequence[str]:
    numbers = "; ".join(f"{count:,} {what}" for what, count in counts(outcome).items() if count)
    return (
        f"Of {outcome.possible:,} splits, {numbers}.",
        "Each row has the best schedule, sharding and tokens per rank for its tp, pp and recompute. Predicted, not measured.",
        "kept whole: unsharded on every rank during the step: weights and gradients (all), gradients (grads), or neither (–)",
        "bubble: share of the step in which the pipeline fills and drains (interl: interleaved, × chunks)",
        "memory: peak memory per rank at the full token budget",
    )


def schedule_name(pipeline: Pipeline) -> str:
    """Returns the schedule of a pipeline and its chunks in a few letters, and – without a pipeline."""
    if pipeline.ranks == 1:
        return "–"
    return f"interl×{pipeline.chunks}" if pipeline.chunks > 1 else "1f1b"


def _kept_whole(split: Split) -> str:
    if split.reshard_after == "step":
        return "all"
    return "grads" if split.reduce_after == "step" else "–"
