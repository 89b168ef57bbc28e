"""`longctx compare`: compares dynamic with static degrees on the same documents, by one cost model.

The main baseline is fixed static: one degree for all steps, as in trainers without dynamic degrees.
Lengths come from a named mix, a file, a store or groups. Plans are scored, nothing is trained:
`longctx measure` trains.
"""

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from longctx.commands.lengths import (
    add_planning_options,
    add_source_options,
    add_step_options,
    kind_of_source,
    open_source,
)
from longctx.commands.output import a_path, check_writable, progress_bar, write_csv
from longctx.units import whole_number

if TYPE_CHECKING:
    from longctx.comparison.modelled import Case, PlannerRow
    from longctx.comparison.steps import LengthSource
    from longctx.planning.hardware_profile import HardwareProfile

SUMMARY = "Compare dynamic with static degrees on the same documents"
DEFAULT_RANKS = (8, 64, 256, 1024)
DEFAULT_STEPS = 3
DETAILED = 64
"""Number of ranks shown in detail; otherwise the nearest one given."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source_options(parser)
    sizes = f"sizes of the domain (default: those of {','.join(map(str, DEFAULT_RANKS))} that fit)"
    parser.add_argument("--ranks", type=parse_ranks, metavar="N,..", help=sizes)
    add_planning_options(parser)
    parser.add_argument(
        "--baseline",
        type=parse_baseline,
        metavar="static:DEGREE",
        help="fixed static baseline: the degree in use today, for all steps (default: the "
        "smallest power of two that holds the longest document)",
    )
    parser.add_argument(
        "--long-documents",
        choices=("split", "drop", "error"),
        help="treatment of documents longer than ranks × tokens per rank (default: split; for a "
        "file: error)",
    )
    add_step_options(
        parser, f"steps to plan; figures are means over them (default: {DEFAULT_STEPS})"
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--csv", type=a_path, metavar="F", help="write all rows, one per step and planner"
    )
    output.add_argument(
        "--json", action="store_true", help="print all rows and their means as JSON"
    )


def parse_ranks(text: str) -> tuple[int, ...]:
    """Parses `8,64` as (8, 64)."""
    ranks = {whole_number(part.strip()) or 0 for part in text.split(",")}
    if 0 in ranks:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of whole numbers ≥ 1, as in 8,64,256"
        )
    return tuple(sorted(ranks))


def parse_baseline(text: str) -> int:
    """Parses `static:8` as 8."""
    mode, _, word = text.partition(":")
    degree = whole_number(word)
    if mode != "static" or not degree:
        raise argparse.ArgumentTypeError(f"{text!r} is not static:DEGREE, as in static:8")
    return degree


def run(arguments: argparse.Namespace) -> int:
    from longctx.comparison.modelled import compare_case, mean_rows
    from longctx.training.described import preset_profile

    check_writable(arguments.csv)
    named = preset_profile(arguments.profile, arguments.model)
    source, cases, changed = _cases(arguments, named.profile)
    rows: list[PlannerRow] = []
    with progress_bar() as show:
        for number, case in enumerate(cases):
            show(f"planning {case.ranks} ranks", number / len(cases))
            rows += compare_case(case, named.profile)
    means = mean_rows(rows)
    if arguments.csv:
        write_csv(arguments.csv, [asdict(row) for row in rows])
    print("\n".join(named.lines), file=sys.stderr if arguments.json else sys.stdout)
    if arguments.json:
        print(
            json.dumps(
                {
                    "version": 3,
                    "rows": [asdict(row) for row in rows],
                    "means": [asdict(row) for row in means],
                }
            )
        )
    else:
        from rich.console import Console

        from longctx.comparison.table import print_comparison

        detailed = min({case.ranks for case in cases}, key=lambda ranks: abs(ranks - DETAILED))
        print_comparison(means, detailed, "; ".join([source.words, *changed]), Console())
    return 0


def _cases(
    arguments: argparse.Namespace, profile: "HardwareProfile"
) -> tuple["LengthSource", list["Case"], list[str]]:
    """Returns the source of the steps, the steps, and notes on documents that were split or
    dropped."""
    from longctx.comparison.steps import make_cases

    long_documents = arguments.long_documents or (
        "error" if kind_of_source(arguments) == "file" else "split"
    )
    steps = DEFAULT_STEPS if arguments.steps is None else arguments.steps
    source = open_source(arguments, arguments.tokens_per_rank, steps, long_documents)
    cases, changed = make_cases(
        source,
        arguments.ranks or DEFAULT_RANKS,
        tokens_per_rank=arguments.tokens_per_rank,
        profile=profile,
        long_documents=long_documents,
        all_must_fit=arguments.ranks is not None,
        fixed_degree=arguments.baseline,
    )
    return source, cases, changed
