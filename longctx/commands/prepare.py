"""`longctx prepare`: text → a store of tokenised documents, the input of `longctx train`."""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longctx.data.prepare import Prepared
    from longctx.data.writer import Progress

SUMMARY = "Turn text into a store of tokenised documents"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--source",
        default="python-stdlib",
        help="what to read: a text, .jsonl or .parquet file, a folder of those, a dataset saved by `datasets`, "
        "or python-stdlib, the source code of this Python's standard library",
    )
    parser.add_argument("--out", type=Path, default=Path("stores/python-stdlib"), help="folder of the store")
    parser.add_argument(
        "--tokenizer",
        default="bpe",
        help="bpe: byte-level BPE trained on the source; bytes: the bytes themselves; or the path of a tokenizer.json",
    )
    parser.add_argument("--vocab-size", type=int, metavar="N", help="most tokens of a trained tokenizer (default: 4096)")
    parser.add_argument(
        "--end-of-document",
        metavar="TOKEN",
        help="the token of a given tokenizer.json that ends a document (default: a well-known one that it has)",
    )
    parser.add_argument(
        "--text-column", default="text", help="column or key of the text; without it, `messages` are conversations"
    )
    parser.add_argument("--workers", type=int, metavar="N", help="threads that tokenise (default: one per core)")
    parser.add_argument("--overwrite", action="store_true", help="replace the store of another source or other settings")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def run(arguments: argparse.Namespace) -> int:
    from longctx.data.corpus import open_corpus
    from longctx.data.prepare import prepare
    from longctx.data.tokenizer import ANOTHER_TOKENIZER
    from longctx.errors import UserError

    if arguments.workers is not None and arguments.workers < 1:
        raise UserError(f"--workers is {arguments.workers}: at least one thread must tokenise")
    if arguments.vocab_size is not None and arguments.tokenizer != "bpe":
        raise UserError(f"--vocab-size is of a trained tokenizer, and --tokenizer is {arguments.tokenizer}: leave one out")
    began = time.perf_counter()
    corpus = open_corpus(arguments.source, text_column=arguments.text_column)
    with _progress_bar() as progress:
        prepared = prepare(
            corpus,
            arguments.out,
            tokenizer=arguments.tokenizer,
            vocab_size=4096 if arguments.vocab_size is None else arguments.vocab_size,
            end_of_document=arguments.end_of_document,
            workers=arguments.workers,
            overwrite=arguments.overwrite,
            progress=progress,
        )
    seconds = time.perf_counter() - began
    if arguments.json:
        summary = {"out": str(arguments.out), "made": prepared.made, "seconds": round(seconds, 3)}
        print(json.dumps({**summary, **asdict(prepared.manifest)}, indent=2))
    else:
        print(_describe(arguments.out, prepared, seconds))
    if prepared.manifest.loss:
        print(f"longctx prepare: warning: {prepared.manifest.loss}; {ANOTHER_TOKENIZER}", file=sys.stderr)
    return 0


def _describe(out: Path, prepared: "Prepared", seconds: float) -> str:
    manifest = prepared.manifest
    lines = [
        f"{out}: made in {seconds:.1f} s" if prepared.made else f"{out}: is there already, nothing to do",
        f"  documents  {manifest.documents:,}",
        f"  tokens     {manifest.tokens:,}, of which {manifest.trained_tokens:,} are targets",
        f"  longest    {manifest.longest_length:,} tokens: {manifest.longest_name}",
        f"  vocabulary {manifest.vocab_size:,}",
    ]
    if manifest.empty_documents:
        lines.append(f"  left out   {manifest.empty_documents:,} empty documents")
    if manifest.skipped_files:
        names = ", ".join(manifest.skipped_names[:3]) + (", .." if manifest.skipped_files > 3 else "")
        lines.append(f"  left out   {manifest.skipped_files:,} files that are not UTF-8 text: {names}")
    return "\n".join(lines)


@contextmanager
def _progress_bar() -> Iterator["Progress"]:
    """A bar per stage on stderr; none if that is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:24}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bars:
        stages: dict[str, TaskID] = {}

        def show(stage: str, share: float) -> None:
            if stage not in stages:
                stages[stage] = bars.add_task(stage, total=1.0)
            bars.update(stages[stage], completed=share)

        yield show
