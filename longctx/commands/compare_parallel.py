"""`longctx compare --parallel`: searches for the best tensor, pipeline and domain sizes for a model and documents."""

import argparse
import json
from typing import TYPE_CHECKING

from longctx.commands.output import given_options, progress_bar
from longctx.config import load
from longctx.errors import UserError

if TYPE_CHECKING:
    from longctx.comparison.steps import Source
    from longctx.model.spec import ModelSpec

MOST_GPUS = 1 << 16
DEFAULT_MODEL = "8b"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "with --parallel",
        f"--model is the model (default: {DEFAULT_MODEL}); settings such as --model.num_hidden_layers 80 change its sizes.\n"
        "A --profile that names no model is taken to describe the 8b model without tensor or pipeline parallelism.\n"
        "--tokens-per-rank fixes the token budget; by default powers of two are searched.",
    )
    group.add_argument(
        "--parallel",
        type=int,
        metavar="GPUS",
        help="search for the best split of this many GPUs into tensor, pipeline and domain ranks for these documents, with "
        "schedule, recomputation, sharding and tokens per rank, by the cost and memory models",
    )
    group.add_argument(
        "--peak-tflops",
        type=float,
        metavar="P",
        help="peak dense bfloat16 TFLOP/s per GPU (default: known for shipped profiles)",
    )
    group.add_argument(
        "--memory-gb", type=float, metavar="M", help="memory per GPU in GB, 10⁹ bytes (default: known for shipped profiles)"
    )


def refuse(arguments: argparse.Namespace) -> None:
    """Raises UserError for options that need --parallel, or are not supported with it."""
    if arguments.parallel is None:
        given = given_options(arguments, "peak_tflops", "memory_gb")
        if given:
            raise UserError(f"{', '.join(given)} requires --parallel: omit it, or add --parallel GPUS")
        return
    if not 1 <= arguments.parallel <= MOST_GPUS:
        raise UserError(f"--parallel is {arguments.parallel}: must be a whole number of GPUs in 1..{MOST_GPUS}")
    given = given_options(arguments, "measure", "ranks", "baseline", "html", "csv", "long_documents", "modes", "warmup", "out")
    if given:
        raise UserError(f"{', '.join(given)} is not supported with --parallel, which searches over splits: omit it")
    others = [f"--{override.split('=')[0]}" for override in arguments.overrides if not override.startswith("model.")]
    if others:
        raise UserError(f"{', '.join(others)} is not supported with --parallel, which takes only model.* settings: omit it")


def compare_splits(arguments: argparse.Namespace, source: "Source") -> int:
    """Searches, and prints the best splits with their settings."""
    from longctx.comparison.layouts.cost import Machine
    from longctx.comparison.layouts.search import BUDGETS, search
    from longctx.comparison.layouts.table import counts, print_splits, row
    from longctx.planning.check import check_settings

    gpus, profile, budget = arguments.parallel, arguments.profile, arguments.tokens_per_rank
    if budget is not None:
        check_settings(gpus, budget, "auto", None, None, None)
    machine, spec = Machine.load(profile, arguments.peak_tflops, arguments.memory_gb), _spec(arguments)
    budgets = BUDGETS if budget is None else (budget,)
    steps, remark = _steps(source, gpus, max(budgets))
    with progress_bar() as show:  # usually ends early: the remaining splits cannot be faster

        def progress(doing: str, done: int, of: int) -> None:
            show(doing, done / max(1, of))

        outcome = search(machine, spec, steps, gpus, budgets=budgets, progress=progress)
    common = {
        "model.preset": arguments.model or DEFAULT_MODEL,
        **dict(override.split("=", 1) for override in arguments.overrides),
        "context.profile": profile,
        "context.two_level_exchange": str(machine.profile.exchange_levels == 2).lower(),
    }
    tokens = sum(map(sum, steps)) // len(steps)
    if arguments.json:
        best = [{**row(found), "settings": {**common, **found.split.settings}} for found in outcome.best]
        about = {"version": 2, "gpus": gpus, "profile": profile, "parameters": spec.parameters, "tokens": tokens}
        print(json.dumps({**about, "splits": {"possible": outcome.possible, **counts(outcome)}, "best": best}))
        return 0
    from rich.console import Console

    title = (
        f"{gpus:,} GPUs ({profile}, {machine.memory_bytes / 2**30:,.1f} GiB), {spec.parameters / 1e9:,.1f}B parameters, "
        f"{tokens:,} tokens per step, longest document {max(map(max, steps)):,} tokens\n"
        f"{source.words}{f'; {remark}' if remark else ''}"
    )
    print_splits(title, outcome, common, Console())
    return 0


def _steps(source: "Source", gpus: int, budget: int) -> tuple[list[tuple[int, ...]], str]:
    """Returns the document lengths of every step, split to fit, and the source's remark on them."""
    from longctx.comparison.modelled import cut
    from longctx.planning.check import MOST_TOKENS
    from longctx.planning.layout import longest_document

    longest = min(MOST_TOKENS, longest_document(gpus, budget) or gpus * budget)
    drawn, remark = source.draw(gpus, longest)
    return [cut(lengths, longest) for lengths in drawn], remark


def _spec(arguments: argparse.Namespace) -> "ModelSpec":
    from longctx.comparison.layouts.cost import LLAMA_3_VOCABULARY

    preset = f"model.preset={arguments.model or DEFAULT_MODEL}"
    config = load(None, [preset, *arguments.overrides])
    return config.model_source(config.model.vocab_size or LLAMA_3_VOCABULARY).spec
