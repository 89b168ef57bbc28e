"""`longctx plan`: plans one step for given lengths, and shows the plan in the terminal, as a picture or as JSON."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from longctx.errors import UserError
from longctx.model.presets import PRESETS
from longctx.planning.cost.hardware_profile import shipped_profiles
from longctx.planning.cost.pipeline import SCHEDULES, Pipeline

SUMMARY = "Plan one step from document lengths, without training"
DEFAULT_PROFILE = "h100-nvlink-ib"
PROFILE_HELP = f"hardware profile: a YAML or JSON file, or one of {', '.join(shipped_profiles())}"
LENGTHS_HELP = "document lengths: a text file with one length per line, or a store written by `longctx prepare`"
PICTURES = (".png", ".svg", ".pdf")
DEFAULT_MICRO_BATCHES = 4
"""Default size of a step, in full micro-batches."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lengths", type=Path, required=True, metavar="FILE|STORE", help=LENGTHS_HELP)
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="number of ranks in the domain")
    parser.add_argument(
        "--tokens-per-rank", type=int, required=True, metavar="T", help="maximum tokens per rank in one micro-batch"
    )
    parser.add_argument("--profile", default=DEFAULT_PROFILE, help=PROFILE_HELP)
    parser.add_argument("--model", choices=PRESETS, help="scale the profile to this preset (default: the profile's own model)")
    parser.add_argument(
        "--mode", choices=("auto", "static", "bins"), default="auto", help="how degrees are chosen; see context.mode"
    )
    parser.add_argument("--degree", type=int, help="degree in mode static (default: the best one)")
    parser.add_argument(
        "--bins",
        type=parse_bins,
        metavar="LENGTH:DEGREE,..",
        help="table of mode bins, maximum length:degree, such as 8192:1,32768:4 (default: derived from the profile)",
    )
    pipeline = parser.add_argument_group(
        "pipeline parallelism",
        "--ranks is the domain, without pipeline ranks. A profile that names its model is scaled to the layers of the\n"
        "slowest pipeline rank; any other profile must describe the layers of one pipeline rank.",
    )
    pipeline.add_argument("--pipeline-ranks", type=int, default=1, metavar="P", help="ranks that the layers are split over")
    pipeline.add_argument("--pipeline-schedule", choices=SCHEDULES, default="1f1b", help="pipeline schedule")
    pipeline.add_argument("--pipeline-chunks", type=int, default=1, metavar="V", help="pipeline stages per rank")
    parser.add_argument(
        "--global-tokens",
        type=int,
        help=f"tokens of the step, store only (default: {DEFAULT_MICRO_BATCHES} × ranks × tokens per rank)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the plan as JSON, with the tight lower bound, and the table of mode bins"
    )
    parser.add_argument("--png", type=Path, metavar="F", help="write a picture of the plan (.png, .svg or .pdf)")


def run(arguments: argparse.Namespace) -> int:
    from longctx.planning.cost.bounds import tight_bound_s
    from longctx.planning.planner import make_plan
    from longctx.planning.planners.bins import derived_bins
    from longctx.planning.validation import check_settings
    from longctx.plots.bins import fill_bins, print_bins
    from longctx.training.run_profile import preset_profile

    if arguments.png and arguments.png.suffix not in PICTURES:
        raise UserError(f"--png is {arguments.png}: the file name must end in one of {', '.join(PICTURES)}")
    pipeline = Pipeline(arguments.pipeline_ranks, arguments.pipeline_chunks, arguments.pipeline_schedule)
    lengths, source = _lengths(arguments)
    check_settings(arguments.ranks, arguments.tokens_per_rank, "auto", None, None, None, pipeline)
    planned = preset_profile(arguments.profile, arguments.model, pipeline, arguments.ranks, arguments.tokens_per_rank)
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
    bins = None
    if plan.mode == "bins":
        bins = fill_bins(plan, arguments.bins or derived_bins(plan.profile, plan.ranks, plan.tokens_per_rank))
    if arguments.png:
        from longctx.plots.picture import save_plan

        save_plan(plan, arguments.png)
    print(*planned.lines, sep="\n", file=sys.stderr if arguments.json else sys.stdout)
    if arguments.json:
        more = {} if bins is None else {"bins": [asdict(row) for row in bins]}
        print(json.dumps({**plan.to_json(), "tight_bound_s": tight_bound_s(plan), **more}))
    else:
        from rich.console import Console

        from longctx.plots.terminal import draw_plan

        console = Console()
        draw_plan(plan, console, source)
        if bins is not None:
            print_bins(bins, console)
    return 0


def parse_bins(text: str) -> dict[int, int]:
    """Parses `8192:1,32768:4` as {8192: 1, 32768: 4}."""
    bins: dict[int, int] = {}
    for part in text.split(","):
        length, colon, degree = part.partition(":")
        if not colon or not length.strip().isdecimal() or not degree.strip().isdecimal():
            raise argparse.ArgumentTypeError(f"{part!r} is not LENGTH:DEGREE, as in 8192:1,32768:4")
        if int(length) in bins:
            raise argparse.ArgumentTypeError(f"bin {int(length)} is given twice")
        bins[int(length)] = int(degree)
    if list(bins) != sorted(bins) or list(bins.values()) != sorted(bins.values()):
        raise argparse.ArgumentTypeError(f"{text!r}: lengths must be ascending, and degrees must not decrease with length")
    return bins


def read_lengths(path: Path) -> list[int]:
    """Reads one length per line, skipping empty lines. Raises UserError with the line number, or for a file without lengths."""
    lengths: list[int] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a text file: give a file with one length per line, or a store") from error
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text:
            continue
        if not (text.isascii() and text.isdecimal()) or len(text) > 18 or int(text) < 1:
            raise UserError(
                f"{path}, line {number}: {text[:40]!r} is not a length: write one whole number from 1 to 10¹⁸ per line"
            )
        lengths.append(int(text))
    if not lengths:
        raise UserError(f"{path} has no lengths: write one whole number ≥ 1 per line")
    return lengths


def _lengths(arguments: argparse.Namespace) -> tuple[list[int], str]:
    """Returns the document lengths of the step, and a description of their source."""
    path: Path = arguments.lengths
    if path.is_dir():
        return _first_step(arguments)
    if arguments.global_tokens is not None:
        raise UserError(f"--global-tokens needs a store, but {path} is a file, which is planned as one step: omit it")
    return read_lengths(path), str(path)


def _first_step(arguments: argparse.Namespace) -> tuple[list[int], str]:
    """Returns the document lengths of the first training step on this store, and a description of it."""
    from longctx.comparison.steps import store_source
    from longctx.planning.layout import longest_document

    ranks, capacity = arguments.ranks, arguments.ranks * arguments.tokens_per_rank
    tokens = DEFAULT_MICRO_BATCHES * capacity if arguments.global_tokens is None else arguments.global_tokens
    source = store_source(arguments.lengths, lambda _: tokens, seed=0, steps=1, long_documents="split")
    (lengths,), _ = source.draw(ranks, longest_document(ranks, arguments.tokens_per_rank) or capacity)
    return lengths, source.words
