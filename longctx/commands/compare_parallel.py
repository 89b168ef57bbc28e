"""`longctx compare --parallel`: the best splits of GPUs into tensor, pipeline and domain ranks for a model and documents."""

import argparse
import csv
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longctx.config import load
from longctx.errors import UserError

if TYPE_CHECKING:
    from longctx.comparison.layouts.search import SearchResult
    from longctx.comparison.steps import Source
    from longctx.model.spec import ModelSpec

MOST_GPUS = 1 << 16
DEFAULT_MODEL = "8b"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "with --parallel",
        f"--model is the model (default: {DEFAULT_MODEL}), and settings such as --model.num_hidden_layers 80 change its sizes; "
        "--profile is of the model that it names, else of the 8B one, unsplit; "
        "--tokens-per-rank is one number to take, not powers of two to try",
    )
    group.add_argument(
        "--parallel",
        type=int,
        metavar="GPUS",
        help="find the best splits of so many GPUs into tensor, pipeline and domain ranks for these documents, by the cost and "
        "memory models, with schedule, recomputation, sharding and tokens a rank",
    )
    group.add_argument("--peak-tflops", type=float, metavar="P", help="of a GPU, dense bfloat16 (shipped profiles: known)")
    group.add_argument("--memory-gb", type=float, metavar="M", help="of a GPU, in 10⁹ bytes (shipped profiles: known)")


def refuse(arguments: argparse.Namespace) -> None:
    """Raises UserError for options that go only with --parallel, or never with it."""
    if arguments.parallel is None:
        given = [f"--{name.replace('_', '-')}" for name in ("peak_tflops", "memory_gb") if getattr(arguments, name) is not None]
        if given:
            raise UserError(f"{', '.join(given)} goes with --parallel: leave it out, or say --parallel GPUS")
        return
    if not 1 <= arguments.parallel <= MOST_GPUS:
        raise UserError(f"--parallel is {arguments.parallel}: must be a whole number of GPUs in 1..{MOST_GPUS}")
    names = ("measure", "ranks", "baseline", "html", "long_documents", "modes", "warmup", "out")
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name) is not None]
    if given:
        raise UserError(f"{', '.join(given)} does not go with --parallel, which searches for the ranks: leave it out")
    others = [f"--{override.split('=')[0]}" for override in arguments.overrides if not override.startswith("model.")]
    if others:
        raise UserError(f"{', '.join(others)} does not go with --parallel: of the settings, it takes only those of the model")


def run(arguments: argparse.Namespace, source: "Source", profile: str) -> int:
    from longctx.comparison.layouts.cost import Machine
    from longctx.comparison.layouts.search import BUDGETS, search
    from longctx.comparison.modelled import cut
    from longctx.planning.layout import longest_document
    from longctx.planning.validation import MOST_TOKENS, check_settings

    gpus, budget = arguments.parallel, arguments.tokens_per_rank
    if arguments.csv is not None and not arguments.csv.absolute().parent.is_dir():
        raise UserError(f"{arguments.csv} cannot be written: there is no folder {arguments.csv.parent}")
    if budget is not None:
        check_settings(gpus, budget, "auto", None, None, None)
    machine = Machine.load(profile, arguments.peak_tflops, arguments.memory_gb)
    levels = arguments.exchange_levels or machine.profile.exchange_levels
    machine = replace(machine, profile=replace(machine.profile, exchange_levels=levels))
    spec = _spec(arguments)
    common = {
        "model.preset": arguments.model or DEFAULT_MODEL,
        **dict(override.split("=", 1) for override in arguments.overrides),
        "context.profile": profile,
        "context.two_level_exchange": str(levels == 2).lower(),
    }
    budgets = BUDGETS if budget is None else (budget,)
    longest = min(MOST_TOKENS, longest_document(gpus, max(budgets)) or gpus * max(budgets))
    drawn, remark = source.draw(gpus, longest)
    steps = [cut(lengths, longest) for lengths in drawn]
    with _progress() as progress:
        outcome = search(machine, spec, steps, gpus, budgets=budgets, progress=progress)
    tokens = sum(map(sum, steps)) // len(steps)
    if arguments.csv is not None:
        _write_csv(outcome, arguments.csv)
    if arguments.json:
        print(json.dumps(_to_json(outcome, gpus, profile, spec, tokens, common)))
        return 0
    from rich.console import Console

    from longctx.comparison.layouts.table import print_splits

    title = (
        f"{gpus:,} GPUs ({profile}, {machine.memory_bytes / 2**30:,.1f} GiB), {spec.parameters / 1e9:,.1f}B parameters, "
        f"steps of {tokens:,} tokens, the longest document {max(map(max, steps)):,}\n"
        f"{source.words}{f'; {remark}' if remark else ''}"
    )
    print_splits(title, outcome, common, Console())
    return 0


def _spec(arguments: argparse.Namespace) -> "ModelSpec":
    from longctx.comparison.layouts.cost import LLAMA_3_VOCABULARY

    preset = f"model.preset={arguments.model or DEFAULT_MODEL}"
    model = load(None, [preset, *arguments.overrides]).model
    spec: ModelSpec = model.shape(model.vocab_size or LLAMA_3_VOCABULARY).spec
    return spec


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Shows on a terminal how many splits are looked at. Mostly it ends early: the rest cannot be faster."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("")
        yield lambda doing, done, of: progress.update(task, description=doing, completed=done, total=of)


def _write_csv(outcome: "SearchResult", path: Path) -> None:
    from longctx.comparison.layouts.table import COLUMNS, row

    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(row(found) for found in outcome.best)


def _to_json(
    outcome: "SearchResult", gpus: int, profile: str, spec: "ModelSpec", tokens: int, common: dict[str, str]
) -> dict[str, Any]:
    from longctx.comparison.layouts.table import counts, row

    best = [
        {**row(found), "settings": {**common, **found.split.settings}, "memory": found.memory.to_json()}
        for found in outcome.best
    ]
    return {
        "version": 1,
        "gpus": gpus,
        "profile": profile,
        "parameters": spec.parameters,
        "tokens": tokens,
        "splits": {"possible": outcome.possible, **counts(outcome)},
        "best": best,
    }
