"""`longctx plan`: plans one step for given lengths, and shows the plan in the terminal, as a
picture or as JSON."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from longctx.commands.lengths import (
    add_planning_options,
    add_source_options,
    add_step_options,
    kind_of_source,
    open_source,
)
from longctx.commands.output import a_path, check_picture
from longctx.planning.pipeline import Pipeline
from longctx.planning.plan import MODES
from longctx.units import whole_number

if TYPE_CHECKING:
    from longctx.planning.hardware_profile import HardwareProfile
    from longctx.planning.plan import Plan

SUMMARY = "Plan one step from document lengths, without training"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source_options(parser)
    parser.add_argument(
        "--ranks", type=int, required=True, metavar="N", help="number of ranks in the domain"
    )
    add_planning_options(parser)
    parser.add_argument(
        "--mode", choices=MODES, default="auto", help="how degrees are chosen; see context.mode"
    )
    parser.add_argument("--degree", type=int, help="degree in mode static (default: the best one)")
    parser.add_argument(
        "--bins",
        type=parse_bins,
        metavar="LENGTH:DEGREE,..",
        help="table of mode bins, maximum length:degree, such as 8192:1,32768:4 (default: derived "
        "from the profile)",
    )
    pipeline = parser.add_argument_group(
        "pipeline parallelism",
        "--ranks is the domain, without pipeline ranks. A profile that names its model is scaled "
        "to the layers of the\n"
        "slowest pipeline rank; any other profile must describe the layers of one pipeline rank.",
    )
    pipeline.add_argument(
        "--pipeline-ranks",
        type=int,
        default=1,
        metavar="P",
        help="ranks that the layers are split over",
    )
    pipeline.add_argument(
        "--pipeline-chunks", type=int, default=1, metavar="V", help="pipeline stages per rank"
    )
    add_step_options(parser)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--json",
        action="store_true",
        help="print the plan as JSON, with the tight lower bound, and the table of mode bins",
    )
    output.add_argument(
        "--png",
        type=a_path,
        metavar="F",
        help="draw the plan into this file (.png, .svg or .pdf), below the best single degree for "
        "all documents",
    )


def run(arguments: argparse.Namespace) -> int:
    from longctx.planning.check import check_settings
    from longctx.planning.cost.bounds import tight_bound_s
    from longctx.planning.planners.bins import derived_bins
    from longctx.planning.planners.planner import make_plan
    from longctx.training.described import sharded_preset_profile

    check_picture(arguments.png)
    pipeline = Pipeline(arguments.pipeline_ranks, arguments.pipeline_chunks)
    check_settings(
        arguments.ranks,
        arguments.tokens_per_rank,
        mode="auto",
        degree=None,
        bins=None,
        max_remote_tokens=None,
        pipeline=pipeline,
    )
    planned = sharded_preset_profile(
        arguments.profile,
        arguments.model,
        domain=arguments.ranks,
        tokens_per_rank=arguments.tokens_per_rank,
        pipeline=pipeline,
    )
    lengths, source = _step(arguments, planned.profile)
    plan = make_plan(
        lengths,
        ranks=arguments.ranks,
        tokens_per_rank=arguments.tokens_per_rank,
        profile=planned.profile,
        mode=arguments.mode,
        degree=arguments.degree,
        bins=arguments.bins,
        pipeline=pipeline,
    )
    baseline = _best_single(plan)
    bins = None
    if plan.mode == "bins":
        bins = arguments.bins or derived_bins(plan.profile, plan.ranks, plan.tokens_per_rank)
    if arguments.png:
        _save(
            plan,
            baseline,
            f"lengths: {source}; times: modelled, profile {planned.name}",
            arguments.png,
        )
    print("\n".join(planned.lines), file=sys.stderr if arguments.json else sys.stdout)
    if arguments.json:
        more = {} if bins is None else {"bins": bins}
        print(json.dumps({**plan.to_json(), "tight_bound_s": tight_bound_s(plan), **more}))
    else:
        from rich.console import Console

        from longctx.plots.terminal import draw_plan

        console = Console()
        draw_plan(plan, console, source, baseline)
        if bins is not None:
            rows = (f"    {longest}: {degree}" for longest, degree in bins.items())
            print(
                "\n# {longest document: degree}, as settings of a run",
                "context:",
                "  mode: bins",
                "  bins:",
                *rows,
                sep="\n",
            )
    return 0


def _best_single(plan: "Plan") -> "Plan | None":
    """Returns the plan of the same documents at the one degree for all that takes least time; None
    for a plan that is static or in a pipeline itself."""
    from longctx.planning.planners.planner import make_plan

    if plan.mode == "static" or plan.pipeline.ranks > 1:
        return None
    return make_plan(
        plan.lengths,
        ranks=plan.ranks,
        tokens_per_rank=plan.tokens_per_rank,
        profile=plan.profile,
        mode="static",
    )


def _save(plan: "Plan", baseline: "Plan | None", source: str, path: Path) -> None:
    from longctx.plots.picture import Panel, save_plans

    if baseline is None:
        panels = [Panel(f"{plan.mode.capitalize()} ({plan.winner})", plan)]
    else:
        degree = baseline.winner.removeprefix("static:")
        names = {
            "auto": "Dynamic, a degree for each document",
            "bins": "Bins, a degree for each class of lengths",
        }
        panels = [
            Panel(f"The best single degree, {degree} for all", baseline),
            Panel(names[plan.mode], plan),
        ]
    save_plans(panels, source, path)


def parse_bins(text: str) -> dict[int, int]:
    """Parses `8192:1,32768:4` as {8192: 1, 32768: 4}."""
    from longctx.planning.planners.bins import table_problem

    bins: dict[int, int] = {}
    for part in text.split(","):
        length, degree = (whole_number(number.strip()) for number in part.partition(":")[::2])
        if length is None or degree is None:
            raise argparse.ArgumentTypeError(f"{part!r} is not LENGTH:DEGREE, as in 8192:1,32768:4")
        if length in bins:
            raise argparse.ArgumentTypeError(f"bin {length} is given twice")
        bins[length] = degree
    if problem := table_problem(bins):
        raise argparse.ArgumentTypeError(f"{text!r}: {'; '.join(problem)}")
    return bins


def _step(arguments: argparse.Namespace, profile: "HardwareProfile") -> tuple[list[int], str]:
    """Returns lengths, and their source in words.

    The step is drawn from a mix or a file, or the first one of training on a store; a file with
    fewer tokens than a step is one. Raises PlanError for a document of the file that the ranks
    cannot hold.
    """
    from longctx.planning.check import check_lengths
    from longctx.planning.layout import longest_document

    ranks = arguments.ranks
    tokens_per_rank = arguments.tokens_per_rank
    of_file = kind_of_source(arguments) == "file"
    # Training on a store splits longer documents; whoever writes lengths down may not want that.
    long_documents = "error" if of_file else "split"
    source = open_source(arguments, tokens_per_rank, steps=1, long_documents=long_documents)
    if source.data_set is not None and of_file:
        check_lengths(source.data_set.tolist(), ranks, tokens_per_rank, profile)
    most = longest_document(ranks, tokens_per_rank) or ranks * tokens_per_rank
    drawn = source.draw(ranks, most)
    (lengths,) = drawn.lengths
    if arguments.mix:
        return lengths, f"mix {arguments.mix}, seed {source.seed}"
    if of_file and drawn.remark:
        return lengths, f"all of {arguments.lengths} as one step"
    return lengths, source.words
