"""`longctx prepare`: text and conversations → a store of tokenised documents, the input of `longctx train`."""

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
    from longctx.data.store import Manifest
    from longctx.data.writer import Progress

SUMMARY = "Turn text and conversations into a store of tokenised documents"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--source",
        default="python-stdlib",
        help="what to read: a text, .jsonl or .parquet file, a folder of those, a dataset saved by `datasets`, "
        "or python-stdlib, the source code of this Python's standard library. Records may be messages, ShareGPT's "
        "conversations, prompt and completion, instruction and output, pairs of chosen and rejected, or text; which of them is "
        "found by their keys",
    )
    parser.add_argument("--out", type=Path, help="folder of the store (default: stores/NAME, by the name of the source)")
    parser.add_argument(
        "--tokenizer",
        default="bpe",
        help="bpe: byte-level BPE trained on the source; bytes: the bytes themselves; the path of a tokenizer.json; or a "
        "Hugging Face checkpoint, its folder or its name on the hub, with its end of text and chat template",
    )
    parser.add_argument("--vocab-size", type=int, metavar="N", help="most tokens of a trained tokenizer (default: 4096)")
    parser.add_argument(
        "--end-of-document",
        metavar="TOKEN",
        help="the token that ends a document (default: the checkpoint's, or a well-known one of a given tokenizer.json)",
    )
    parser.add_argument(
        "--chat-template",
        default="auto",
        metavar="auto|chatml|FILE",
        help="template of conversations: auto: the checkpoint's, or ChatML if there is none; chatml; or a Jinja file, used "
        "with a checkpoint's tokenizer",
    )
    parser.add_argument(
        "--train-on",
        choices=("assistant", "last", "all"),
        default="assistant",
        help="what is learnt of conversations: the assistant's turns, the last one of them, or every token",
    )
    parser.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help="leave conversations of more than N tokens out, and say how many (default: keep all; training splits texts)",
    )
    parser.add_argument(
        "--text-column", metavar="NAME", help="column or key of the text; it goes before all other formats (default: text)"
    )
    parser.add_argument("--workers", type=int, metavar="N", help="threads that tokenise (default: one per core)")
    parser.add_argument("--overwrite", action="store_true", help="replace the store of another source or other settings")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def run(arguments: argparse.Namespace) -> int:
    from longctx.commands.prepare_picture import examples, histogram
    from longctx.data.corpus import open_corpus
    from longctx.data.prepare import prepare
    from longctx.data.store import Store
    from longctx.data.tokenizer import ANOTHER_TOKENIZER
    from longctx.errors import UserError

    if arguments.workers is not None and arguments.workers < 1:
        raise UserError(f"--workers is {arguments.workers}: at least one thread must tokenise")
    if arguments.max_length is not None and arguments.max_length < 2:
        raise UserError(f"--max-length is {arguments.max_length}: a conversation has at least 2 tokens, one of which is learnt")
    if arguments.vocab_size is not None and arguments.tokenizer != "bpe":
        raise UserError(f"--vocab-size is of a trained tokenizer, and --tokenizer is {arguments.tokenizer}: leave one out")
    began = time.perf_counter()
    corpus = open_corpus(arguments.source, text_column=arguments.text_column)
    out = arguments.out or Path("stores", _name(arguments.source))
    with _progress_bar() as progress:
        prepared = prepare(
            corpus,
            out,
            tokenizer=arguments.tokenizer,
            vocab_size=4096 if arguments.vocab_size is None else arguments.vocab_size,
            end_of_document=arguments.end_of_document,
            chat_template=arguments.chat_template,
            train_on=arguments.train_on,
            max_length=arguments.max_length,
            workers=arguments.workers,
            overwrite=arguments.overwrite,
            progress=progress,
        )
    seconds = time.perf_counter() - began
    manifest = prepared.manifest
    if arguments.json:
        summary = {"out": str(out), "made": prepared.made, "seconds": round(seconds, 3)}
        print(json.dumps({**summary, **asdict(manifest)}, indent=2))
    else:
        print(_describe(out, prepared, seconds))
        store = Store.open(out)
        print(histogram(store.lengths))
        examples(store)
    warnings = [f"{manifest.loss}; {ANOTHER_TOKENIZER}"] if manifest.loss else []
    if manifest.spelled_documents:
        warnings.append(
            f"{manifest.spelled_documents:,} conversations spell special tokens in their texts, which become such, as in "
            f"transformers; the first is {manifest.spelled_name}: look whether they mean to, or take --chat-template chatml, "
            "where they stay text"
        )
    for warning in warnings:
        print(f"longctx prepare: warning: {warning}", file=sys.stderr)
    return 0


def _name(source: str) -> str:
    """What a store of this source is called."""
    path = Path(source).resolve()
    return (path.stem if path.is_file() else path.name) or "store"


def _describe(out: Path, prepared: "Prepared", seconds: float) -> str:
    manifest = prepared.manifest
    share = manifest.trained_tokens / max(1, manifest.tokens)
    lines = [
        f"{out}: made in {seconds:.1f} s" if prepared.made else f"{out}: is there already, nothing to do",
        f"  documents  {manifest.documents:,}"
        + (f", {manifest.documents // 2:,} pairs of a chosen and a rejected completion" if manifest.pairs else ""),
        f"  tokens     {manifest.tokens:,}, of which {manifest.trained_tokens:,} are targets ({share:.1%})",
        f"  longest    {manifest.longest_length:,} tokens: {manifest.longest_name}",
        f"  vocabulary {manifest.vocab_size:,}, documents end with {manifest.end_of_document_token}",
    ]
    return "\n".join(lines + list(_particulars(manifest)))


def _particulars(manifest: "Manifest") -> Iterator[str]:
    """What not every store has."""
    together = 2 if manifest.pairs else 1
    if set(manifest.formats) - {"text"}:
        yield "  formats    " + ", ".join(f"{count // together:,} {kind}" for kind, count in sorted(manifest.formats.items()))
        yield f"  template   {manifest.template}"
        learnt = {"assistant": "the assistant's turns", "last": "the assistant's last turn", "all": "every token"}
        yield f"  learnt     {learnt[manifest.train_on]} {'behind the prompt' if manifest.pairs else 'of conversations'}"
    if manifest.straddling_tokens:
        yield f"  learnt     {manifest.straddling_tokens:,} tokens that hold text before or after a turn as well"
    if (manifest.lightest, manifest.heaviest) != (1.0, 1.0):
        yield f"  weights    {manifest.lightest:g} to {manifest.heaviest:g}"
    if manifest.dropped_documents:
        what = "pairs with one conversation" if manifest.pairs else "conversations"
        yield f"  left out   {manifest.dropped_documents // together:,} {what} of more than {manifest.max_length:,} tokens"
    if manifest.useless_pairs:
        yield f"  left out   {manifest.useless_pairs:,} pairs whose completions are equal, or of which one is empty"
    if manifest.empty_documents:
        yield f"  left out   {manifest.empty_documents:,} empty documents"
    if manifest.skipped_files:
        names = ", ".join(manifest.skipped_names[:3]) + (", .." if manifest.skipped_files > 3 else "")
        yield f"  left out   {manifest.skipped_files:,} files that are not UTF-8 text: {names}"


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
