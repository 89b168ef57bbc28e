"""Searches for the best tensor, pipeline and domain sizes for a model, a number of GPUs and
documents, without training.

    python bench/split.py --gpus 64 --mix wlb_128k --model llama-3.1-8b      # half a minute on one core

Each split has its schedule, recomputation, sharding and tokens per rank, chosen by the cost and
memory models. A profile that names no model is taken to describe the 8b model without tensor or
pipeline parallelism.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from longctx.cli import split_overrides
from longctx.commands.lengths import (
    DEFAULT_TOKENS_PER_RANK,
    add_source_options,
    add_step_options,
    open_source,
)
from longctx.commands.output import progress_bar
from longctx.comparison.steps import fit
from longctx.config import load
from longctx.errors import UserError
from longctx.model.presets import PRESETS
from longctx.planning.check import MOST_TOKENS, check_settings
from longctx.planning.cost.spec import ModelSpec
from longctx.planning.layout import longest_document
from longctx.planning.pipeline import Pipeline
from split_cost import LLAMA_3_VOCABULARY, Machine, Split
from split_search import BUDGETS, PlannedSplit, SearchResult, search
from static_split import StaticSplit, best_static

MOST_GPUS = 1 << 16
MANY_GPUS = 256
"""From this number of GPUs on, one step has enough documents to compare splits."""
DEFAULT_STEPS = 3


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="number of GPUs")
    add_source_options(parser)
    sizes = "; --model.overrides.num_hidden_layers 80 changes its sizes (default: %(default)s)"
    parser.add_argument(
        "--model",
        metavar="PRESET",
        default="llama-3.1-8b",
        help=f"model: {', '.join(PRESETS)}{sizes}",
    )
    parser.add_argument(
        "--tokens-per-rank",
        type=int,
        metavar="T",
        help="maximum tokens per rank (default: it is searched)",
    )
    parser.add_argument(
        "--max-length",
        type=int,
        metavar="L",
        help="split longer documents, as data.max_length does",
    )
    known = "(default: known for shipped profiles)"
    parser.add_argument(
        "--peak-tflops",
        type=float,
        metavar="P",
        help=f"peak dense bfloat16 TFLOP/s per GPU {known}",
    )
    parser.add_argument(
        "--memory-gb", type=float, metavar="M", help=f"memory per GPU in GB, 10⁹ bytes {known}"
    )
    parser.add_argument(
        "--static",
        action="store_true",
        help="also search for the best split of a static run, one degree for all documents, and "
        "print what mode auto gains over it (minutes)",
    )
    steps = (
        f"steps to plan; figures are means over them (default: {DEFAULT_STEPS}; 1 from "
        f"{MANY_GPUS} GPUs on)"
    )
    add_step_options(parser, steps)
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the splits with their settings and memory as JSON",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Searches, and prints the best splits with their settings."""
    parser = options()
    try:
        words, overrides = split_overrides(list(sys.argv[1:] if argv is None else argv))
        run(parser.parse_args(words), overrides)
    except UserError as error:
        parser.error(str(error))


def run(arguments: argparse.Namespace, overrides: list[str]) -> None:
    gpus, profile, budget = arguments.gpus, arguments.profile, arguments.tokens_per_rank
    _refuse(gpus, arguments.max_length, overrides)
    if budget is not None:
        check_settings(gpus, budget, "auto", None, None, None)
    machine, spec = (
        Machine.load(profile, arguments.peak_tflops, arguments.memory_gb),
        _spec(arguments, overrides),
    )
    budgets = BUDGETS if budget is None else (budget,)
    steps, longest, source = _steps(arguments, max(budgets))
    with progress_bar() as show:  # usually ends early: the remaining splits cannot be faster
        outcome = search(
            machine,
            spec,
            steps,
            gpus,
            longest=longest,
            budgets=budgets,
            progress=lambda phase, done, total: show(phase, done / max(1, total)),
        )
    static = None
    if arguments.static:
        arrays = [np.array(lengths) for lengths in steps]
        static = best_static(machine, spec, arrays, gpus, longest=longest, budgets=budgets)
    common = {
        "model.preset": arguments.model,
        **dict(override.split("=", 1) for override in overrides),
        "context.profile": profile,
        "context.two_level_exchange": str(machine.profile.exchange_levels == 2).lower(),
    }
    tokens = sum(map(sum, steps)) // len(steps)
    if arguments.json:
        best = [
            {**row(split), "settings": {**common, **split.split.settings}} for split in outcome.best
        ]
        about = {
            "version": 2,
            "gpus": gpus,
            "profile": profile,
            "parameters": spec.parameters,
            "tokens": tokens,
        }
        print(
            json.dumps(
                {
                    **about,
                    "splits": {"possible": outcome.possible, **counts(outcome)},
                    "best": best,
                    **({"static": static_json(static)} if arguments.static else {}),
                }
            )
        )
        return
    title = (
        f"{gpus:,} GPUs ({profile}, {machine.memory_bytes / 2**30:,.1f} GiB), "
        f"{spec.parameters / 1e9:,.1f}B parameters, {tokens:,} tokens per step, longest document "
        f"of the data set {longest:,} tokens\n"
        f"{source}"
    )
    print_splits(title, outcome, common, Console())
    if arguments.static:
        print(static_line(static, outcome.best[0]))


def _refuse(gpus: int, max_length: int | None, overrides: list[str]) -> None:
    if not 1 <= gpus <= MOST_GPUS:
        raise UserError(f"--gpus is {gpus}: must be a whole number in 1..{MOST_GPUS}")
    if max_length is not None and max_length < 1:
        raise UserError(f"--max-length is {max_length}: must be a whole number ≥ 1")
    others = [
        f"--{override.split('=')[0]}" for override in overrides if not override.startswith("model.")
    ]
    if others:
        raise UserError(
            f"{', '.join(others)} is not supported: this search takes only model.* settings; omit "
            "it"
        )


def _steps(arguments: argparse.Namespace, budget: int) -> tuple[list[tuple[int, ...]], int, str]:
    """Returns the document lengths of every step, split to fit, the longest of the data set, and
    the source in words."""
    gpus = arguments.gpus
    few = 1 if gpus >= MANY_GPUS else DEFAULT_STEPS
    count = few if arguments.steps is None else arguments.steps
    source = open_source(
        arguments, arguments.tokens_per_rank or DEFAULT_TOKENS_PER_RANK, count, "split"
    )
    longest = min(
        MOST_TOKENS,
        longest_document(gpus, budget) or gpus * budget,
        arguments.max_length or MOST_TOKENS,
    )
    drawn, remark = source.draw(gpus, longest)
    words = "; ".join(filter(None, [source.words, remark]))
    return (
        [fit(lengths, longest) for lengths in drawn],
        source.longest_kept(longest, "split"),
        words,
    )


def _spec(arguments: argparse.Namespace, overrides: list[str]) -> ModelSpec:
    config = load(None, [f"model.preset={arguments.model}", *overrides])
    return config.model_source(config.model.vocab_size or LLAMA_3_VOCABULARY).spec


def row(planned: PlannedSplit) -> dict[str, Any]:
    """Returns a split as plain values: domain, settings of a run, predictions, and memory by
    part."""
    split, memory = planned.split, planned.memory.to_json()
    figures = {
        name: value for name, value in vars(planned).items() if name not in ("split", "memory")
    }
    return {"domain": split.domain, "settings": split.settings, **figures, "memory": memory}


def static_json(static: StaticSplit | None) -> dict[str, Any] | None:
    """Returns the best split of a static run as plain values; None without one."""
    if static is None:
        return None
    return {
        "settings": static.split.settings,
        "degree": static.degree,
        "step_s": static.step_s,
    }


def static_line(static: StaticSplit | None, best: PlannedSplit) -> str:
    """Returns what the best split gains over that of a static run, in words."""
    if static is None:
        return "No split holds a static run of these documents."
    split = static.split
    sizes = f"tp {split.tensor}, pp {split.pipeline.ranks}, domain {split.domain}"
    return (
        f"The first split is {static.step_s / best.step_s:.2f} times as fast as a static run on "
        f"its own best split: {static.step_s:.3g} s a step at degree {static.degree} for all "
        f"({sizes}, {split.tokens_per_rank} tokens per rank, recompute {split.recompute})"
    )


def counts(outcome: SearchResult) -> dict[str, int]:
    """Returns the number of splits by outcome."""
    return {
        **outcome.refused,
        "were planned": outcome.planned,
        "cannot be faster than these": outcome.slower,
    }


def print_splits(
    title: str, outcome: SearchResult, common: dict[str, str], console: Console
) -> None:
    """Prints the best splits, and the settings of the fastest: those of the split and those
    `common` to all splits."""
    console.print(title, style="bold", highlight=False, markup=False)
    console.print()
    table = Table(box=None, padding=(0, 1, 0, 0))
    with_experts = any(planned.split.expert > 1 for planned in outcome.best)
    # The domain is what tp and pp leave.
    for name in ("tp", "pp", "ep" if with_experts else "domain"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("schedule", "recompute", "kept\nwhole"):
        table.add_column(name, no_wrap=True)
    for name in (
        "tokens\nper rank",
        "step\ns",
        "tokens/s\nper GPU",
        "MFU",
        "bubble",
        "memory\nGiB",
    ):
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
        "Each row has the best schedule, sharding and tokens per rank for its tp, pp and "
        "recompute. Predicted, not measured.",
        "kept whole: unsharded on every rank during the step: weights and gradients (all), "
        "gradients (grads), or neither (–)",
        "bubble: share of the step in which the pipeline fills and drains (interl: interleaved, × "
        "chunks)",
        "memory: peak memory per rank at the full token budget",
    )


def schedule_name(pipeline: Pipeline) -> str:
    """Returns the schedule of a pipeline and its chunks in a few letters, and – without a
    pipeline."""
    if pipeline.ranks == 1:
        return "–"
    return f"interl×{pipeline.chunks}" if pipeline.chunks > 1 else "1f1b"


def _kept_whole(split: Split) -> str:
    if split.reshard_after == "step":
        return "all"
    return "grads" if split.reduce_after == "step" else "–"


if __name__ == "__main__":
    main()
