"""`longctx compare`: compares dynamic with static degrees on the same documents, by one cost model.

The main baseline is fixed static: one degree for all steps, as in trainers without dynamic degrees.
With --against, those are compared that people have today: TRL's packing and others.
Lengths come from a named mix, a file, a store or groups. Plans are scored, nothing is trained:
`longctx measure` trains.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

from longctx.commands.lengths import (
    add_planning_options,
    add_source_options,
    add_step_options,
    kind_of_source,
    open_source,
)
from longctx.commands.output import a_path, check_writable, progress_bar, write_csv
from longctx.comparison.ways import Way, known_ways, read_ways
from longctx.errors import UserError
from longctx.units import whole_number

if TYPE_CHECKING:
    from longctx.comparison.against import AgainstRow, Job
    from longctx.comparison.modelled import Case, PlannerRow
    from longctx.comparison.steps import LengthSource
    from longctx.planning.hardware_profile import HardwareProfile

SUMMARY = "Compare dynamic with static degrees on the same documents"
DEFAULT_RANKS = (8, 64, 256, 1024)
DEFAULT_STEPS = 3
DETAILED = 64
"""Number of ranks shown in detail; otherwise the nearest one given."""
AGAINST_RANKS = (8,)
AGAINST_STEPS = 16
"""Default ranks and steps with --against."""


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
        "--against",
        type=parse_against,
        metavar="WAY,..",
        help=f"what longctx gains over the way in use today, several by commas: {known_ways()} "
        f"(auto: what fits; defaults with it: --ranks {AGAINST_RANKS[0]}, --steps {AGAINST_STEPS}, "
        "and steps that have a row of the longest document for each rank)",
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


def parse_against(text: str) -> "Against":
    """Parses `trl-packing,cp:8`."""
    try:
        return Against(read_ways(text), best=text.strip() == "auto")
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


@dataclass(frozen=True)
class Against:
    """Ways to compare with; with `best` the answer is for the fastest of them that fits."""

    ways: tuple[Way, ...]
    best: bool


def run(arguments: argparse.Namespace) -> int:
    if arguments.against is not None:
        return _run_against(arguments)
    from longctx.comparison.modelled import compare_case, mean_rows
    from longctx.training.described import preset_profile

    check_writable(arguments.csv)
    named = preset_profile(arguments.profile, arguments.model)
    source, cases, changed = _cases(arguments)
    rows: list[PlannerRow] = []
    with progress_bar() as show:
        for number, case in enumerate(cases):
            show(f"planning {case.ranks} ranks", number / len(cases))
            rows += compare_case(case, _profile(arguments, case.ranks))
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


def _run_against(arguments: argparse.Namespace) -> int:
    """Compares with the ways that --against names, on every number of ranks."""
    from longctx.comparison.against import compare_with
    from longctx.training.described import preset_profile

    if arguments.baseline is not None:
        raise UserError(
            f"--baseline static:{arguments.baseline} does not go with --against: write --against "
            f"cp:{arguments.baseline}"
        )
    check_writable(arguments.csv)
    named = preset_profile(arguments.profile, arguments.model)
    if arguments.steps is None:
        arguments.steps = AGAINST_STEPS
    all_ranks = arguments.ranks or AGAINST_RANKS
    found = []
    with progress_bar() as show:
        for number, ranks in enumerate(all_ranks):
            show(f"planning {ranks} ranks", number / len(all_ranks))
            arguments.ranks = (ranks,)
            most_of_row = ranks * arguments.tokens_per_rank
            source, steps, changed = _cases(arguments, most_of_row=most_of_row)
            rows = compare_with(arguments.against.ways, _job(arguments, steps))
            found.append((rows, "; ".join([source.words, *changed])))
    written = [{**asdict(row), "fits": row.fits} for rows, _ in found for row in rows]
    if arguments.csv:
        write_csv(arguments.csv, written)
    if arguments.json:
        print("\n".join(named.lines), file=sys.stderr)
        print(json.dumps({"version": 1, "against": written}))
        return 0
    for rows, source_words in found:
        _print_against(arguments, rows, source=source_words, notes=named.lines)
    return 0


def _job(arguments: argparse.Namespace, steps: "Sequence[Case]") -> "Job":
    """Returns the steps of one number of ranks as a job."""
    from longctx.comparison.against import Job
    from longctx.comparison.room import Room

    first = steps[0]
    return Job(
        steps=tuple(case.lengths for case in steps),
        longest=first.longest or max(max(case.lengths) for case in steps),
        ranks=first.ranks,
        tokens_per_rank=first.tokens_per_rank,
        profile=_profile(arguments, first.ranks),
        whole_profile=_profile(arguments, first.ranks, reshard_after="step"),
        room=Room.of(arguments.profile, arguments.model, first.ranks),
        single_degree=first.single_degree,
        seed=arguments.seed or 0,
    )


def _profile(
    arguments: argparse.Namespace, ranks: int, *, reshard_after: str = "block"
) -> "HardwareProfile":
    """Returns the profile of ranks that share the weights of the model."""
    from longctx.training.described import sharded_preset_profile

    named = sharded_preset_profile(
        arguments.profile,
        arguments.model,
        domain=ranks,
        tokens_per_rank=arguments.tokens_per_rank,
        reshard_after=reshard_after,
    )
    return named.profile


def _print_against(
    arguments: argparse.Namespace,
    rows: "Sequence[AgainstRow]",
    source: str,
    notes: Sequence[str],
) -> None:
    from rich.console import Console

    from longctx.comparison.against_table import best_sentence, print_against, sentence

    whose = "on your lengths"
    if arguments.mix:
        whose = f"on the mix {arguments.mix}"
    said = sentence(rows, whose)
    if arguments.against.best:
        said = best_sentence(rows, whose)
    print_against(rows, said, source=source, notes=notes, console=Console())


def _cases(
    arguments: argparse.Namespace,
    *,
    most_of_row: int | None = None,
) -> tuple["LengthSource", list["Case"], list[str]]:
    """Returns the source of the steps, the steps, and notes on documents that were split or
    dropped."""
    from longctx.comparison.steps import make_cases

    long_documents = arguments.long_documents or (
        "error" if kind_of_source(arguments) == "file" else "split"
    )
    steps = DEFAULT_STEPS if arguments.steps is None else arguments.steps
    source = open_source(
        arguments,
        arguments.tokens_per_rank,
        steps,
        long_documents,
        most_of_row=most_of_row,
    )
    cases, changed = make_cases(
        source,
        arguments.ranks or DEFAULT_RANKS,
        tokens_per_rank=arguments.tokens_per_rank,
        profile_on=partial(_profile, arguments),
        long_documents=long_documents,
        all_must_fit=arguments.ranks is not None,
        fixed_degree=arguments.baseline,
    )
    return source, cases, changed
