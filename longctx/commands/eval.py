"""`longctx eval`: evaluates a run or a checkpoint, by loss and perplexity on a store or by retrieval of facts."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longctx.commands.output import given_options, said_once
from longctx.errors import UserError

if TYPE_CHECKING:
    from longctx.data.loader import Planner
    from longctx.data.tokenizer import Tokenizer
    from longctx.evaluation.loss import LossReport
    from longctx.evaluation.retrieval import Cell, Grid
    from longctx.evaluation.target import Target
    from longctx.parallel.environment import Launch
    from longctx.training.passes import Passes
    from longctx.training.validation import Documents

SUMMARY = "Evaluate a run or a checkpoint: loss by length and position, or retrieval of facts from long documents"
OVERRIDES = True

LENGTHS, DEPTHS = (1024, 2048, 4096, 8192), (0.0, 0.25, 0.5, 0.75, 1.0)
OF_GRIDS = ("lengths", "depths", "keys", "samples", "seed", "prefix")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        metavar="RUN|DIR",
        help="run folder, evaluated at its newest checkpoint; or a transformers checkpoint: a folder, or OWNER/NAME on the hub",
    )
    parser.add_argument("--store", type=Path, help="store to evaluate on (default: the validation documents of the run)")
    parser.add_argument("--documents", type=int, metavar="N", help="evaluate only the first N documents (default: all)")
    parser.add_argument("--needle", action="store_true", help="evaluate retrieval of facts from documents of filler instead")
    parser.add_argument(
        "--lengths", metavar="N,N,..", help=f"--needle: document lengths in tokens (default: {','.join(map(str, LENGTHS))})"
    )
    parser.add_argument(
        "--depths",
        metavar="X,X,..",
        help=f"--needle: depths of the fact in the document, 0 to 1 (default: {','.join(f'{d:g}' for d in DEPTHS)})",
    )
    parser.add_argument(
        "--keys", type=int, metavar="N", help="--needle: facts per document, of which one is queried (default: 1)"
    )
    parser.add_argument("--samples", type=int, metavar="N", help="--needle: documents per length and depth (default: 8)")
    parser.add_argument("--seed", type=int, metavar="N", help="--needle: seed of facts and filler (default: 0)")
    parser.add_argument(
        "--prefix", metavar="TEXT", help="--needle: text at the start of every document, such as a special token"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.epilog = (
        "Settings are those of the run and can be overridden: --batch.tokens_per_rank 65536 for longer documents,\n"
        "--model.rope_scaling yarn --model.rope_factor 4 --model.rope_original_length 8192 to scale RoPE.\n"
        "On 8 GPUs: longctx eval RUN --store STORE --processes 8\n"
        "Results are also written to the run folder: eval.json, or needle.json."
    )


def starts_processes(arguments: argparse.Namespace) -> bool:
    return True


def run(arguments: argparse.Namespace) -> int:
    from longctx.data.store import Store
    from longctx.evaluation.target import Target
    from longctx.parallel.device import prepare_device
    from longctx.parallel.environment import Launch
    from longctx.training.checks import check_sources

    launch = Launch.read()
    with said_once(launch):
        _check_options(arguments)
        target = Target.open(arguments.target, arguments.overrides, launch.world_size)
        config = target.config
        device = prepare_device(config.train.device, launch)
        work: Documents | Grid
        if arguments.needle:
            if config.masked.share is not None:
                raise UserError("--needle is for causal models, which continue a text, but masked.share is set: omit --needle")
            if config.model_source().spec.encoder_layers:
                raise UserError("--needle is for causal models, but this is an encoder-decoder: omit --needle")
            tokenizer = Store.open(arguments.store).tokenizer if arguments.store else target.tokenizer()
            work = _grid(arguments)
            _check_grid(work, tokenizer, config.capacity(launch.world_size), launch.world_size)
        else:
            work = _documents(arguments, target, launch.world_size)
            check_sources({"--store": work.store}, config.model_source())
            tokenizer = work.store.tokenizer
        target.check(tokenizer)
        _evaluate(arguments, target, work, tokenizer, launch, device)
    return 0


def _check_options(arguments: argparse.Namespace) -> None:
    grids = given_options(arguments, *OF_GRIDS)
    if grids and not arguments.needle:
        raise UserError(f"{' and '.join(grids)} requires --needle: add --needle, or omit it")
    if arguments.needle and arguments.documents is not None:
        raise UserError("--documents is not supported with --needle, which generates its documents: omit one of the two")
    if arguments.documents is not None and arguments.documents < 1:
        raise UserError(f"--documents is {arguments.documents}: must be at least 1")


def _documents(arguments: argparse.Namespace, target: "Target", world_size: int) -> "Documents":
    from longctx.data.store import Store
    from longctx.training.data import RunData
    from longctx.training.validation import Documents, validation_documents

    config = target.config
    if arguments.store is not None:
        store = Store.open(arguments.store)
        max_length = target.max_length(world_size, int(store.lengths.max()))
        return Documents.choose(config, store, max_length, arguments.documents)
    if target.checkpoint is None or (config.eval.store is None and not config.data.held_out):
        raise UserError(
            f"{target.name} has no validation documents (neither eval.store nor data.held_out is set): give --store STORE"
        )
    first = arguments.documents or config.eval.documents
    config = config.changed({"eval.documents": first, "eval.every": config.eval.every or 1})
    data = RunData.open(config)
    longest = int((data.validation or data.store).lengths.max())
    return validation_documents(config, data, target.max_length(world_size, longest))


def _grid(arguments: argparse.Namespace) -> "Grid":
    from longctx.evaluation.retrieval import Grid

    chosen: dict[str, Any] = {
        name: getattr(arguments, name) for name in ("keys", "samples", "seed", "prefix") if getattr(arguments, name) is not None
    }
    lengths = LENGTHS if arguments.lengths is None else _numbers("--lengths", arguments.lengths, int)
    depths = DEPTHS if arguments.depths is None else _numbers("--depths", arguments.depths, float)
    return Grid(lengths, depths, **chosen)


def _numbers(option: str, text: str, kind: type) -> list[Any]:
    try:
        return sorted({kind(number) for number in text.split(",")})
    except ValueError:
        raise UserError(f"{option} is {text!r}: must be numbers separated by commas") from None


def _check_grid(grid: "Grid", tokenizer: "Tokenizer", capacity: int, world_size: int) -> None:
    """Raises UserError for documents that the ranks cannot hold, or that are too short for the facts."""
    from longctx.evaluation.retrieval import TaskWriter

    longest = max(grid.lengths)
    if longest > capacity:
        raise UserError(
            f"--lengths has {longest:,} tokens, but {world_size} processes hold documents of at most {capacity:,}: raise "
            "--batch.tokens_per_rank, start more processes, or use shorter lengths"
        )
    TaskWriter(tokenizer, grid).write(grid.cells[0], 0)


def _evaluate(
    arguments: argparse.Namespace,
    target: "Target",
    work: "Documents | Grid",
    tokenizer: "Tokenizer",
    launch: "Launch",
    device: Any,
) -> None:
    """Joins the processes and evaluates; rank 0 prints and writes the result."""
    from longctx.evaluation.loss import evaluate
    from longctx.evaluation.retrieval import Grid, retrieve
    from longctx.training.build import join_run

    mesh = join_run(target.config, launch, device)
    passes, target = target.build(mesh)
    longest = max(work.lengths) if isinstance(work, Grid) else max(piece.length for piece in work.pieces)
    target.config.model_source(tokenizer.vocab_size).check_length(longest)
    planner = make_evaluation_planner(passes)
    if isinstance(work, Grid):
        cells = retrieve(work, tokenizer, passes.look, planner, mesh, target.config.batch.global_tokens)
        if launch.rank == 0:
            _report_grid(arguments, target, work, cells, tokenizer)
    else:
        report = evaluate(work, passes.look, planner, mesh)
        if launch.rank == 0:
            _report_loss(arguments, target, work, report, mesh.world_size)
    mesh.close()


def make_evaluation_planner(passes: "Passes") -> "Planner":
    """Makes the planner for evaluation, for the model as built. Collective: all ranks must call it."""
    from longctx.training.data import make_planner
    from longctx.training.run_profile import run_profile

    profile = run_profile(passes.config, passes.mesh.world_size, passes.model.spec.vocab_size).agreed(passes.mesh)
    return make_planner(passes.config, passes.mesh.ranks, profile)


def _report_loss(
    arguments: argparse.Namespace, target: "Target", documents: "Documents", report: "LossReport", ranks: int
) -> None:
    result = {
        "target": target.name,
        "step": None if target.checkpoint is None else target.checkpoint.step,
        "store": documents.store.said,
        "fingerprint": documents.store.fingerprint,
        "max_length": documents.max_length,
        "ranks": ranks,
        **report.as_json(),
    }
    _notes(target, documents.store.tokenizer)
    _write(target, "eval.json", result)
    if arguments.json:
        print(json.dumps(result, indent=2))
        return
    overall = report.overall
    print(
        f"{target.described} on {documents.store.said}: loss {overall.loss:.4f}, perplexity {overall.perplexity:.3f} over "
        f"{overall.tokens:,} tokens of {overall.documents:,} documents"
    )
    if documents.long:
        done = {None: "split", "split": "split", "drop": "dropped"}.get(target.config.data.long_documents, "truncated")
        print(f"{documents.long:,} documents of more than {documents.max_length:,} tokens were {done}")
    place = "tokens of context" if documents.masking is None else "position of the masked token"
    place = place if documents.store.start_token is None else "position in the target"
    for title, parts in (("document length (tokens)", report.by_length), (place, report.by_position)):
        counted = parts[0].documents is not None if parts else False
        print(f"\n{title:>30} {'documents' if counted else '':>10} {'predicted':>12} {'loss':>8} {'perplexity':>11}")
        for part in parts:
            documents_of = f"{part.documents:,}" if part.documents is not None else ""
            span = f"{part.first:,} to {part.last:,}"
            print(f"{span:>30} {documents_of:>10} {part.tokens:>12,} {part.loss:>8.4f} {part.perplexity:>11.3f}")


def _report_grid(
    arguments: argparse.Namespace, target: "Target", grid: "Grid", cells: "list[Cell]", tokenizer: "Tokenizer"
) -> None:
    from longctx.evaluation.retrieval import as_json

    trained = None if target.checkpoint is None else int(target.checkpoint.state["data"]["max_length"])
    step = None if target.checkpoint is None else target.checkpoint.step
    result = {"target": target.name, "step": step, "trained_length": trained, **as_json(grid, cells)}
    _notes(target, tokenizer)
    _write(target, "needle.json", result)
    if arguments.json:
        print(json.dumps(result, indent=2))
        return
    right, asked = sum(cell.right for cell in cells), sum(cell.samples for cell in cells)
    facts = "one fact" if grid.keys == 1 else f"{grid.keys} facts, one queried"
    print(f"{target.described}: {right:,} of {asked:,} answers right ({facts}, {grid.samples} documents per cell)\n")
    share = {(cell.length, cell.depth): cell.share for cell in cells}
    print(f"{'depth of the fact':>20}" + "".join(f"{length:>10,}" for length in grid.lengths) + "  tokens")
    for depth in grid.depths:
        print(f"{depth:>20.0%}" + "".join(f"{share[length, depth]:>10.0%}" for length in grid.lengths))


def _notes(target: "Target", tokenizer: "Tokenizer") -> None:
    for sentence in filter(None, (*target.notes, target.other_tokenizer(tokenizer))):
        print(f"longctx eval: {sentence}", file=sys.stderr)


def _write(target: "Target", name: str, result: dict[str, Any]) -> None:
    """Writes the result to the run folder; the folder of a checkpoint is not changed."""
    if target.folder is not None:
        (target.folder / name).write_text(json.dumps(result, indent=2) + "\n", "utf-8")
