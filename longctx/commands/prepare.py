"""`longctx prepare`: tokenizes text and conversations into a store of documents, the input of
`longctx train`."""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longctx.commands.output import a_name, a_path, a_source, progress_bar
from longctx.errors import UserError
from longctx.own_files import that_stay

if TYPE_CHECKING:
    from longctx.data.store.manifest import Manifest
    from longctx.data.store.prepare import Prepared

ASKED = (
    *("tokenizer", "end_of_document", "chat_template", "date"),
    *("train_on", "max_length", "long_documents", "workers", "overwrite"),
)
"""Options that `prepare` takes by the same names."""
READ = (
    *("text_column", "split", "as_text", "subset", "revision"),
    *("max_documents", "max_bytes", "document_separator"),
)
"""Options that `open_corpus` takes by the same names."""
IN_PLACE = "tokenizer", "end_of_document", "overwrite", "workers"
"""Options of `add_data_arguments` that may be given with --in-place."""
DEFAULT_VOCABULARY = 4096
TRAINED_ON = {
    "assistant": "the assistant's turns",
    "last": "the assistant's last turn",
    "all": "all tokens",
}
"""What the choices of --train-on mean."""
SUMMARY = "Turn text and conversations into a store of tokenized documents"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--source",
        type=a_source,
        default="python-stdlib",
        help="data to read: a file of records (.jsonl, .ndjson, .json, .csv, .tsv, each also as "
        ".gz or .zst, .parquet, .arrow, Megatron's .idx with .bin) or text, a folder of "
        "those, a dataset saved by `datasets`, OWNER/NAME of the hub, or python-stdlib, the "
        "source of this Python's standard library. Records may be messages, ShareGPT "
        "conversations, prompt and completion, instruction and output, text, or token ids "
        "(with a --tokenizer); the format is detected by the keys",
    )
    parser.add_argument(
        "--out",
        type=a_path,
        help="folder of the store (default: stores/NAME, by the name of the source)",
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="maximum vocabulary of --tokenizer bpe (default: 4096)",
    )
    parser.add_argument(
        "--in-place",
        action="store_true",
        help="make the store beside token files of Megatron (.bin with .idx) or datatrove (.ds "
        "with .ds.index), in their folder, without a copy; --tokenizer is that of the tokens",
    )
    parser.add_argument(
        "--ray",
        metavar="ADDRESS|auto",
        help="make the store on a Ray cluster, whose machines see source and --out under the same "
        "names (extra `ray`)",
    )
    parser.add_argument(
        "--upload",
        type=a_source,
        metavar="ADDRESS",
        help="upload the finished store to object storage too, such as s3://bucket/store, where "
        "runs read it (data.store); an upload that was interrupted goes on",
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.add_argument(
        "--share",
        metavar="K/N",
        help="make share K of N, as of a SLURM or Kubernetes job array, beside the others: source "
        "and --out are the same on all machines, and the last one to finish puts the store in "
        "place (see docs/data.md)",
    )
    add_data_arguments(parser)


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `finetune` too."""
    _add_token_arguments(parser.add_argument_group("tokens"))
    _add_loss_arguments(parser.add_argument_group("conversations"))
    _add_source_arguments(parser.add_argument_group("what is read"))


def _add_token_arguments(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--tokenizer",
        type=a_name,
        default="bpe",
        help="bpe: train a byte-level BPE on the source; bytes: one token per byte; the path of a "
        "tokenizer.json; or a transformers checkpoint (a folder, or OWNER/NAME on the hub), "
        "whose end-of-text token and chat template are used too",
    )
    parser.add_argument(
        "--end-of-document",
        metavar="TOKEN",
        help="token that ends a document (default: the checkpoint's, or a well-known token of "
        "tokenizer.json)",
    )
    parser.add_argument(
        "--special-tokens-as-text",
        action="store_true",
        help="read special tokens in texts and messages as characters (default: they are the "
        "tokenizer's, as in transformers)",
    )
    parser.add_argument(
        "--chat-template",
        type=a_name,
        default="auto",
        metavar="auto|chatml|FILE",
        help="chat template of conversations; auto: the checkpoint's, or ChatML if it has none; "
        "chatml; or a Jinja file, for the tokenizer of a checkpoint",
    )
    parser.add_argument(
        "--date",
        metavar="YYYY-MM-DD",
        help="day of the conversations, for a chat template that asks for the day (default: such a "
        "template is refused)",
    )
    parser.add_argument(
        "--template-set",
        action="append",
        metavar="NAME=VALUE",
        help="sets a variable of the chat template, which exports then have by default, such as "
        "enable_thinking=false; a value that is not JSON is a text; may be repeated",
    )


def _add_loss_arguments(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--train-on",
        choices=("assistant", "last", "all"),
        default="assistant",
        help="tokens with loss in conversations: the assistant's turns, its last turn, or all "
        "tokens",
    )
    parser.add_argument(
        "--train-on-empty-thoughts",
        action="store_true",
        help="train on an empty <think> block that the chat template writes before an answer "
        "(default: no loss there)",
    )
    parser.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help="maximum tokens of a conversation (default: keep all)",
    )
    parser.add_argument(
        "--long-documents",
        choices=("error", "drop", "truncate_left", "truncate_right"),
        default="error",
        help="what happens to conversations of more than --max-length tokens; truncate_left keeps "
        "the end",
    )


def _add_source_arguments(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--text-column",
        metavar="NAME",
        help="column or key of the text; takes precedence over other formats (default: text)",
    )
    split = "split to read, where files (by their names) or a dataset have several (default: train)"
    parser.add_argument("--split", metavar="NAME", help=split)
    parser.add_argument(
        "--subset", metavar="NAME", help="subset (configuration) of a data set on the hub"
    )
    parser.add_argument(
        "--revision",
        metavar="NAME",
        help="branch, tag or commit of a data set on the hub (default: main)",
    )
    parser.add_argument(
        "--max-documents",
        type=int,
        metavar="N",
        help="stop reading after N documents; a data set on the hub is then streamed, not "
        "downloaded (default: read all)",
    )
    most = "stop reading after N bytes of text, or token ids of 4 bytes (default: all)"
    parser.add_argument("--max-bytes", type=int, metavar="N", help=most)
    parser.add_argument(
        "--document-separator",
        metavar="TEXT",
        help="what separates documents in files that are one text each (default: <|endoftext|> in "
        ".txt; see docs/data.md)",
    )
    parser.add_argument(
        "--as-text", action="store_true", help="read every file as one text, whatever its ending"
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="number of tokenizer threads, those of all processes (default: one per core)",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace a store of another source or other settings; other files there stay",
    )


def run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    if arguments.upload is not None:
        from longctx.data.store.upload import check_address

        check_address(arguments.upload)
    began = time.perf_counter()
    prepared: Prepared | None
    if arguments.in_place:
        out, prepared = _in_place(arguments)
    else:
        out = arguments.out or Path("stores", default_name(arguments.source))
        prepared = _prepared(arguments, out)
    if prepared is None and arguments.json:
        print(json.dumps({"out": str(out), "made": False, "share": arguments.share}, indent=2))
    elif prepared is None:
        print(f"{out}: share {arguments.share} is finished, and others are not yet")
    else:
        _tell(arguments, out, prepared, time.perf_counter() - began)
        if arguments.upload is not None:
            _upload(arguments, out)
    return 0


def _upload(arguments: argparse.Namespace, out: Path) -> None:
    """Uploads the store, and tells it."""
    from longctx.data.store.upload import upload

    was_needed = upload(out, arguments.upload, overwrite=arguments.overwrite)
    if not arguments.json:
        what = {True: "uploaded", False: "up to date"}
        print(f"{arguments.upload}: {what[was_needed]}")


def _check(arguments: argparse.Namespace) -> None:
    """Raises UserError for options that contradict each other."""
    if arguments.workers is not None and arguments.workers < 1:
        raise UserError(f"--workers is {arguments.workers}: must be at least 1")
    if arguments.max_length is None and arguments.long_documents != "error":
        raise UserError(
            f"--long-documents is {arguments.long_documents}, but no length is set: give "
            "--max-length"
        )
    others = arguments.out, arguments.share, arguments.ray
    if arguments.in_place and any(others):
        raise UserError(
            "--in-place makes the store in the source's folder, at once: omit --out, --share and "
            "--ray"
        )
    if arguments.in_place and (unused := _not_in_place(arguments)):
        raise UserError(
            f"--in-place takes all tokens of its files as they are: omit {', '.join(unused)}"
        )
    if arguments.ray is not None and arguments.share is not None:
        raise UserError("--ray and --share are two ways to use many machines: omit one of the two")
    if arguments.vocab_size is not None and arguments.tokenizer != "bpe":
        raise UserError(
            f"--vocab-size needs --tokenizer bpe, but --tokenizer is {arguments.tokenizer}: omit "
            "one of the two"
        )


def _not_in_place(arguments: argparse.Namespace) -> list[str]:
    """Returns the given options on data that files which stay where they are cannot follow."""
    parser = argparse.ArgumentParser()
    add_data_arguments(parser)
    found = []
    for name, default in vars(parser.parse_args([])).items():
        if name not in IN_PLACE and getattr(arguments, name) != default:
            found.append(f"--{name.replace('_', '-')}")
    return found


def _in_place(arguments: argparse.Namespace) -> "tuple[Path, Prepared]":
    """Makes a store of token files in their folder. Returns the folder, and what was made."""
    from longctx.data.store.in_place import prepare_in_place

    folder = Path(arguments.source)
    if not folder.is_dir():
        folder = folder.parent
    with progress_bar() as progress:
        prepared = prepare_in_place(
            arguments.source,
            arguments.tokenizer,
            end_of_document=arguments.end_of_document,
            overwrite=arguments.overwrite,
            progress=progress,
        )
    return folder, prepared


def _prepared(arguments: argparse.Namespace, out: Path) -> "Prepared | None":
    """Prepares the store, or a share of it; returns None for a share that others have to
    complete."""
    from longctx.data.records.sources import open_corpus
    from longctx.data.store.prepare import prepare, prepare_share
    from longctx.data.store.shares import Share

    share = None
    if arguments.share is not None:
        share = Share.parse(arguments.share)
    corpus = open_corpus(arguments.source, **{name: getattr(arguments, name) for name in READ})
    choices = {name: getattr(arguments, name) for name in ASKED}
    choices["vocab_size"] = DEFAULT_VOCABULARY
    if arguments.vocab_size is not None:
        choices["vocab_size"] = arguments.vocab_size
    choices["template_variables"] = dict(map(_variable, arguments.template_set or ()))
    choices["empty_thoughts"] = arguments.train_on_empty_thoughts
    choices["special_as_text"] = arguments.special_tokens_as_text
    with progress_bar() as progress:
        if share is None:
            return prepare(corpus, out, ray=arguments.ray, progress=progress, **choices)
        return prepare_share(corpus, out, share, progress=progress, **choices)


def _tell(arguments: argparse.Namespace, out: Path, prepared: "Prepared", seconds: float) -> None:
    """Prints what was prepared, and warns of text that the tokenizer lacks."""
    from longctx.data.records.tokenizer import ANOTHER_TOKENIZER

    manifest = prepared.manifest
    if arguments.json:
        summary = {"out": str(out), "made": prepared.made, "seconds": round(seconds, 3)}
        summary |= asdict(manifest)
        text = json.dumps(summary, indent=2)
        print(text)
    else:
        print(_describe(out, prepared, seconds))
    if manifest.loss:
        print(f"longctx prepare: warning: {manifest.loss}; {ANOTHER_TOKENIZER}", file=sys.stderr)


def _variable(setting: str) -> tuple[str, Any]:
    name, equals, value = setting.partition("=")
    if not equals or not name.isidentifier():
        raise UserError(
            f"--template-set is {setting!r}: it must be NAME=VALUE, such as enable_thinking=false"
        )
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def default_name(source: str) -> str:
    path = Path(source).resolve()
    return (path.stem if path.is_file() else path.name) or "store"


def _describe(out: Path, prepared: "Prepared", seconds: float) -> str:
    manifest = prepared.manifest
    share = manifest.trained_tokens / max(1, manifest.tokens)
    lines = [
        f"{out}: written in {seconds:.1f} s"
        if prepared.made
        else f"{out}: up to date, nothing to do",
        f"  documents  {manifest.documents:,}",
        f"  tokens     {manifest.tokens:,}, of which {manifest.trained_tokens:,} with loss "
        f"({share:.1%})",
        f"  longest    {manifest.longest_length:,} tokens: {manifest.longest_name}",
        f"  vocabulary {manifest.vocab_size:,}, documents end with "
        f"{manifest.end_of_document_token}",
    ]
    stays = [f"  stays      {that_stay(list(prepared.stays))}"] if prepared.stays else []
    return "\n".join(lines + list(_particulars(manifest)) + stays)


def _particulars(manifest: "Manifest") -> Iterator[str]:
    """Yields lines on formats, templates, weights and left-out documents, where the store has
    them."""
    if set(manifest.formats) - {"text"}:
        formats = (f"{count:,} {kind}" for kind, count in sorted(manifest.formats.items()))
        yield "  formats    " + ", ".join(formats)
    for what, count in manifest.noted.items():
        yield f"  noted      {count:,} {what}"
    if manifest.spelled_tokens:
        yield (
            f"  special    {manifest.spelled_tokens:,} special tokens in the texts of "
            f"{manifest.spelled_documents:,} documents, read as transformers does; the first is "
            f"{manifest.spelled_name} (--special-tokens-as-text)"
        )
    yield from _about_loss(manifest)
    yield from _about_left_out_documents(manifest)
    if manifest.limits:
        limits = (
            f"--{name.replace('_', '-')} {value:,}" for name, value in manifest.limits.items()
        )
        yield "  stopped    at " + ", ".join(limits)
    if manifest.not_read:
        files = (f"{count:,} × {reason}" for reason, count in sorted(manifest.not_read.items()))
        yield "  not read   " + ", ".join(files)
    if manifest.skipped_files:
        names = ", ".join(manifest.skipped_names[:3])
        more = ", .." if manifest.skipped_files > 3 else ""
        yield (
            f"  dropped    {manifest.skipped_files:,} files that are not UTF-8 text: {names}{more}"
        )
    yield from _counted("not used", manifest.unused, "records")
    yield from _counted("left out", manifest.left_out, "conversations")


def _about_loss(manifest: "Manifest") -> Iterator[str]:
    """Yields lines on what is trained on, and with which weight."""
    if manifest.template:
        yield f"  template   {manifest.template}"
        yield f"  loss on    {TRAINED_ON[manifest.train_on]} of conversations"
    if manifest.empty_thoughts:
        yield (
            "  no loss    on the empty <think> block that the template writes before "
            f"{manifest.empty_thoughts:,} answers"
        )
    if manifest.straddling_tokens:
        yield (
            f"  loss on    {manifest.straddling_tokens:,} tokens that also contain text before "
            "or after a turn or part"
        )
    if (manifest.lightest, manifest.heaviest) != (1.0, 1.0):
        yield f"  weights    {manifest.lightest:g} to {manifest.heaviest:g}"
    if manifest.weighted_documents:
        yield (
            f"  weights    of single messages or tokens in {manifest.weighted_documents:,} "
            "documents"
        )


def _about_left_out_documents(manifest: "Manifest") -> Iterator[str]:
    """Yields lines on documents that are dropped or cut."""
    if manifest.dropped_documents:
        yield (
            f"  dropped    {manifest.dropped_documents:,} conversations of more than "
            f"{manifest.max_length:,} tokens"
        )
    if manifest.truncated_documents:
        yield (
            f"  truncated  {manifest.truncated_documents:,} conversations to "
            f"{manifest.max_length:,} tokens"
        )
    if manifest.untrained_documents:
        yield (
            f"  dropped    {manifest.untrained_documents:,} documents that switch off the loss "
            "of everything"
        )
    if manifest.empty_documents:
        yield f"  dropped    {manifest.empty_documents:,} documents that are empty or null"


def _counted(title: str, counts: Mapping[str, int], what: str) -> Iterator[str]:
    """Yields a line with the number of records or conversations of each name, if there are any."""
    if counts:
        names = ", ".join(f"{name} in {count:,}" for name, count in sorted(counts.items()))
        yield f"  {title}   {names} {what}"
