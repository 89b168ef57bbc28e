"""`longctx split`: searches for the best tensor, pipeline and domain sizes for a model, a number of GPUs and documents."""

import argparse
import json
from typing import TYPE_CHECKING

from longctx.commands.lengths import DEFAULT_TOKENS_PER_RANK, add_source_options, add_step_options, open_source
from longctx.commands.output import progress_bar
from longctx.config import load
from longctx.errors import UserError
from longctx.model.presets import PRESETS

if TYPE_CHECKING:
    from longctx.planning.cost.spec import ModelSpec

SUMMARY = "Search for the best split of GPUs into tensor, pipeline and domain ranks, without training"
OVERRIDES = True
MOST_GPUS = 1 << 16
MANY_GPUS = 256
"""From this number of GPUs on, one step has enough documents to compare splits."""
DEFAULT_STEPS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="number of GPUs")
    add_source_options(parser)
    parser.add_argument(
        "--model",
        metavar="PRESET",
        default="llama-3.1-8b",
        help=f"model: {', '.join(PRESETS)}; --model.num_hidden_layers 80 changes its sizes",
    )
    parser.add_argument("--tokens-per-rank", type=int, metavar="T", help="maximum tokens per rank (default: it is searched)")
    parser.add_argument("--max-length", type=int, metavar="L", help="split longer documents, as data.max_length does")
    known = "(default: known for shipped profiles)"
    parser.add_argument("--peak-tflops", type=float, metavar="P", help=f"peak dense bfloat16 TFLOP/s per GPU {known}")
    parser.add_argument("--memory-gb", type=float, metavar="M", help=f"memory per GPU in GB, 10⁹ bytes {known}")
    add_step_options(
        parser, f"steps to plan; figures are means over them (default: {DEFAULT_STEPS}; 1 from {MANY_GPUS} GPUs on)"
    )
    parser.add_argument("--json", action="store_true", help="print the splits with their settings and memory as JSON")
    parser.epilog = (
        "Each split has its schedule, recomputation, sharding and tokens per rank, chosen by the cost and memory models.\n"
        "A profile that names no model is taken to describe the 8b model without tensor or pipeline parallelism."
    )


def run(arguments: argparse.Namespace) -> int:
    """Searches, and prints the best splits with their settings."""
    from longctx.comparison.splits.cost import Machine
    from longctx.comparison.splits.search import BUDGETS, search
    from longctx.comparison.splits.table import counts, print_splits, row
    from longctx.planning.check import check_settings

    gpus, profile, budget = arguments.gpus, arguments.profile, arguments.tokens_per_rank
    _refuse(gpus, arguments.max_length, arguments.overrides)
    if budget is not None:
        check_settings(gpus, budget, "auto", None, None, None)
    machine, spec = Machine.load(profile, arguments.peak_tflops, arguments.memory_gb), _spec(arguments)
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
    common = {
        "model.preset": arguments.model,
        **dict(override.split("=", 1) for override in arguments.overrides),
        "context.profile": profile,
        "context.two_level_exchange": str(machine.profile.exchange_levels == 2).lower(),
    }
    tokens = sum(map(sum, steps)) // len(steps)
    if arguments.json:
        best = [{**row(split), "settings": {**common, **split.split.settings}} for split in outcome.best]
        about = {"version": 2, "gpus": gpus, "profile": profile, "parameters": spec.parameters, "tokens": tokens}
        print(json.dumps({**about, "splits": {"possible": outcome.possible, **counts(outcome)}, "best": best}))
        return 0
    from rich.console import Console

    title = (
        f"{gpus:,} GPUs ({profile}, {machine.memory_bytes / 2**30:,.1f} GiB), {spec.parameters / 1e9:,.1f}B parameters, "
        f"{tokens:,} tokens per step, longest document of the data set {longest:,} tokens\n{source}"
    )
    print_splits(title, outcome, common, Console())
    return 0


def _refuse(gpus: int, max_length: int | None, overrides: list[str]) -> None:
    if not 1 <= gpus <= MOST_GPUS:
        raise UserError(f"--gpus is {gpus}: must be a whole number in 1..{MOST_GPUS}")
    if max_length is not None and max_length < 1:
        raise UserError(f"--max-length is {max_length}: must be a whole number ≥ 1")
    others = [f"--{override.split('=')[0]}" for override in overrides if not override.startswith("model.")]
    if others:
        raise UserError(f"{', '.join(others)} is not supported: `longctx split` takes only model.* settings; omit it")


def _steps(arguments: argparse.Namespace, budget: int) -> tuple[list[tuple[int, ...]], int, str]:
    """Returns the document lengths of every step, split to fit, the longest of the data set, and the source in words."""
    from longctx.comparison.steps import fit
    from longctx.planning.check import MOST_TOKENS
    from longctx.planning.layout import longest_document

    gpus = arguments.gpus
    few = 1 if gpus >= MANY_GPUS else DEFAULT_STEPS
    count = few if arguments.steps is None else arguments.steps
    source = open_source(arguments, arguments.tokens_per_rank or DEFAULT_TOKENS_PER_RANK, count, "split")
    longest = min(MOST_TOKENS, longest_document(gpus, budget) or gpus * budget, arguments.max_length or MOST_TOKENS)
    drawn, remark = source.draw(gpus, longest)
    words = "; ".join(filter(None, [source.words, remark]))
    return [fit(lengths, longest) for lengths in drawn], source.longest_kept(longest, "split"), words


def _spec(arguments: argparse.Namespace) -> "ModelSpec":
    from longctx.comparison.splits.cost import LLAMA_3_VOCABULARY

    config = load(None, [f"model.preset={arguments.model}", *arguments.overrides])
    return config.model_source(config.model.vocab_size or LLAMA_3_VOCABULARY).spec
