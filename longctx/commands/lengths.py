"""Document lengths on the command lines of `plan` and `compare`: their options, and the source that
these name."""

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from longctx.commands.output import a_name, a_path
from longctx.comparison.mixes import load_mix, mix_names
from longctx.errors import UserError
from longctx.model.presets import PRESETS
from longctx.planning.hardware_profile import shipped_profiles
from longctx.units import whole_number

if TYPE_CHECKING:
    from longctx.comparison.steps import LengthSource

DEFAULT_PROFILE = "h100-nvlink-ib"
DEFAULT_TOKENS_PER_RANK = 16384
MICRO_BATCHES = 4
"""Default size of a step, in full micro-batches."""
DOCUMENTS_PER_RANK = 4
"""Default number of documents that a step draws from a mix, per rank."""
KINDS = {"documents": ("mix",), "global_tokens": ("file", "store")}
"""Option → sources of lengths that it applies to."""


def add_source_options(parser: argparse.ArgumentParser) -> None:
    sources = parser.add_mutually_exclusive_group(required=True)
    sources.add_argument(
        "--mix", metavar="NAME", help=f"draw documents from a length mix: {', '.join(mix_names())}"
    )
    sources.add_argument(
        "--lengths",
        type=a_path,
        metavar="FILE|STORE",
        help="document lengths: a text file with one length per line, or a store written by "
        "`longctx prepare`",
    )
    profiles = ", ".join(shipped_profiles())
    parser.add_argument(
        "--profile",
        type=a_name,
        default=DEFAULT_PROFILE,
        help=f"hardware profile: a YAML or JSON file, or one of {profiles}",
    )


def add_stand_in_options(parser: argparse.ArgumentParser, only: str = "--dry-run: ") -> None:
    """Adds lengths in place of data; `only` says with which option."""
    instead = parser.add_mutually_exclusive_group()
    lengths = f"{only}lengths in place of data, one per line, or those of a store"
    instead.add_argument("--lengths", type=a_path, metavar="FILE|STORE", help=lengths)
    mix = f"{only}documents of a length mix in place of data: {', '.join(mix_names())}"
    instead.add_argument("--mix", metavar="NAME", help=mix)


def lengths_given(arguments: argparse.Namespace) -> bool:
    """Returns whether lengths are in place of data."""
    return arguments.lengths is not None or arguments.mix is not None


def stands_in(arguments: argparse.Namespace) -> bool:
    """Returns whether lengths are in place of data. Raises UserError if the run is not dry."""
    given = lengths_given(arguments)
    if given and not arguments.dry_run:
        raise UserError(
            "--lengths and --mix need --dry-run: lengths can be planned, but not trained on"
        )
    return given


def add_planning_options(parser: argparse.ArgumentParser) -> None:
    """Adds what one split plans for: tokens per rank and the model."""
    tokens = "maximum tokens per rank in one micro-batch"
    parser.add_argument(
        "--tokens-per-rank", type=int, default=DEFAULT_TOKENS_PER_RANK, metavar="T", help=tokens
    )
    model = (
        f"scale the profile to a preset: {', '.join(PRESETS)} (default: the profile's own model)"
    )
    parser.add_argument("--model", metavar="PRESET", help=model)


def add_step_options(parser: argparse.ArgumentParser, steps: str = "") -> None:
    """Adds the size and seed of a step, and if `steps` describes it, the number of steps."""
    group = parser.add_argument_group("steps" if steps else "step")
    group.add_argument(
        "--documents",
        type=int,
        metavar="D",
        help=f"documents per step, not with --lengths (default with --mix: {DOCUMENTS_PER_RANK} × "
        "ranks)",
    )
    group.add_argument(
        "--global-tokens",
        type=int,
        help=f"tokens per step, --lengths only (default: {MICRO_BATCHES} × ranks × tokens per "
        "rank)",
    )
    group.add_argument("--seed", type=int, help="seed for drawing documents (default: 0)")
    if steps:
        group.add_argument("--steps", type=int, help=steps)


def kind_of_source(arguments: argparse.Namespace) -> str:
    if arguments.mix:
        return "mix"
    if arguments.lengths.is_dir():
        return "store"
    return "file"


def open_source(
    arguments: argparse.Namespace,
    tokens_per_rank: int,
    steps: int,
    long_documents: str,
    *,
    most_of_row: int | None = None,
) -> "LengthSource":
    """Returns the source of the lengths of `steps` steps. Raises UserError for an option that it
    does not support.

    With `most_of_row`, steps have by default at least as many tokens as rows of the longest
    document, or of so many tokens, one for each rank.
    """
    from longctx.comparison.steps import file_source, mix_source, store_source
    from longctx.data.store.store import Store

    _refuse_other_kinds(arguments)
    if steps < 1:
        raise UserError(f"--steps is {steps}: must be a whole number ≥ 1")
    kind = kind_of_source(arguments)
    seed = arguments.seed or 0
    if kind == "mix":
        documents_per_rank = DOCUMENTS_PER_RANK
        if most_of_row is not None:
            mix = load_mix(arguments.mix)
            tokens = max(MICRO_BATCHES * tokens_per_rank, min(mix.longest, most_of_row))
            documents_per_rank = math.ceil(tokens / mix.mean)
        return mix_source(
            arguments.mix,
            arguments.documents,
            documents_per_rank=documents_per_rank,
            seed=seed,
            steps=steps,
        )

    row_tokens = 0

    def global_tokens(ranks: int) -> int:
        tokens: int | None = arguments.global_tokens
        if tokens is not None:
            return tokens
        return ranks * max(MICRO_BATCHES * tokens_per_rank, row_tokens)

    if kind == "file":
        lengths = read_lengths(arguments.lengths)
        if most_of_row is not None:
            row_tokens = min(max(lengths), most_of_row)
        return file_source(
            lengths,
            str(arguments.lengths),
            global_tokens=global_tokens,
            seed=seed,
            steps=steps,
            long_documents=long_documents,
        )
    if most_of_row is not None:
        row_tokens = min(int(Store.open(arguments.lengths).lengths.max()), most_of_row)
    return store_source(
        arguments.lengths, global_tokens, seed=seed, steps=steps, long_documents=long_documents
    )


def _refuse_other_kinds(arguments: argparse.Namespace) -> None:
    """Raises UserError for an option of another kind of source."""
    kind = kind_of_source(arguments)
    for name, supported in KINDS.items():
        if kind not in supported and getattr(arguments, name) is not None:
            option = name.replace("_", "-")
            kinds_of_it = " or ".join(supported)
            raise UserError(
                f"--{option} needs a {kinds_of_it}, but the lengths come from a {kind}: omit it"
            )


def read_lengths(path: Path) -> list[int]:
    """Reads one length per line, skipping empty lines. Raises UserError with the line number, or
    for a file without lengths."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except FileNotFoundError as error:
        raise UserError(
            f"{path} not found: give a file with one length per line, or a store"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not a text file: give a file with one length per line, or a store"
        ) from error
    lengths: list[int] = []
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        length = whole_number(text) if text else None
        if text and not length:
            raise UserError(
                f"{path}, line {number}: {text[:40]!r} is not a length: write one whole number "
                "from 1 to 10¹⁸ per line"
            )
        lengths += [length] if length else []
    if not lengths:
        raise UserError(f"{path} has no lengths: write one whole number ≥ 1 per line")
    return lengths
