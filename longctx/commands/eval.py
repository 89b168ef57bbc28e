"""`longctx eval`: evaluates a run or a checkpoint, by loss and perplexity on a store."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from longctx.commands.output import a_name, a_source
from longctx.errors import UserError
from longctx.paths import is_hub_name

if TYPE_CHECKING:
    import torch

    from longctx.data.loader import Planner
    from longctx.evaluation.loss import LossReport
    from longctx.evaluation.target import Target
    from longctx.parallel.environment import Launch
    from longctx.training.runner import ModelRunner
    from longctx.training.validation import Documents

SUMMARY = "Evaluate a run or a checkpoint: loss by length and position"
OVERRIDES = PROCESSES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        type=a_name,
        metavar="RUN|DIR",
        help="run folder, evaluated at its newest checkpoint; or a transformers checkpoint: a "
        "folder, or OWNER/NAME on the hub",
    )
    parser.add_argument(
        "--store",
        type=a_source,
        help="store to evaluate on (default: the validation documents of the run)",
    )
    parser.add_argument(
        "--documents",
        type=int,
        metavar="N",
        help="evaluate only the first N documents (default: all)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.epilog = (
        "Settings are those of the run and can be overridden: --batch.tokens_per_rank 65536 for "
        "longer documents,\n"
        "--model.rope_scaling '{rope_type: yarn, factor: 4}' to scale RoPE.\n"
        "On 8 GPUs: longctx eval RUN --store STORE --processes 8\n"
        "Results are also written to the run folder: eval.json."
    )


def run(arguments: argparse.Namespace) -> int:
    from longctx.parallel.environment import Launch

    launch = Launch.to_join()
    if arguments.documents is not None and arguments.documents < 1:
        raise UserError(f"--documents is {arguments.documents}: must be at least 1")
    _check_target(arguments.target)
    from longctx.evaluation.target import Target  # and torch, which takes seconds
    from longctx.parallel.device import prepare_device

    target = Target.open(arguments.target, arguments.overrides, launch.world_size)
    device = prepare_device(target.config.train.device, launch)
    work = _documents(arguments, target, launch.world_size)
    target.check(work.store.tokenizer)
    _evaluate(arguments, target, work=work, launch=launch, device=device)
    return 0


def _check_target(target: str) -> None:
    """Raises UserError for a folder that does not exist; whether a name is on the hub is seen
    later."""
    folder = Path(target)
    if folder.is_dir():
        return
    if is_hub_name(target):
        return
    raise UserError(
        f"there is no folder {target}: give the folder of a run or of a checkpoint, or a "
        "checkpoint's name on the hub as OWNER/NAME"
    )


def _documents(arguments: argparse.Namespace, target: "Target", world_size: int) -> "Documents":
    from longctx.data.store.store import Store
    from longctx.training.data import RunData
    from longctx.training.validation import Documents, validation_documents

    config = target.config
    if arguments.store is not None:
        store = Store.open(arguments.store)
        max_length = target.max_length(world_size, store.longest)
        return Documents.choose(config, store, max_length, arguments.documents)
    if target.checkpoint is None or (config.eval.store is None and not config.data.held_out):
        raise UserError(
            f"{target.name} has no validation documents (neither eval.store nor data.held_out is "
            "set): give --store STORE"
        )
    first = arguments.documents or config.eval.documents
    config = config.changed({"eval.documents": first, "eval.every": config.eval.every or 1})
    data = RunData.open(config)
    longest = (data.validation or data.store).longest
    return validation_documents(config, data, target.max_length(world_size, longest))


def _evaluate(
    arguments: argparse.Namespace,
    target: "Target",
    work: "Documents",
    launch: "Launch",
    device: "torch.device",
) -> None:
    """Joins the processes and evaluates; rank 0 prints and writes the result."""
    from longctx.evaluation.loss import evaluate
    from longctx.training.build import join_run
    from longctx.training.kernels import prepare_run_kernels

    prepare_run_kernels(target.config, target.source.spec, launch, device)
    with join_run(target.config, launch, device) as mesh:
        runner, target = target.build(mesh)
        longest = max(piece.length for piece in work.pieces)
        target.config.model_source(work.store.tokenizer.vocab_size).check_length(longest)
        report = evaluate(work, runner.log_probabilities, make_evaluation_planner(runner), mesh)
        if launch.rank == 0:
            _report(arguments, target, documents=work, report=report, ranks=mesh.world_size)


def make_evaluation_planner(runner: "ModelRunner") -> "Planner":
    """Makes the planner for evaluation, for the model as built. Collective: all ranks must call
    it."""
    from longctx.training.data import make_planner
    from longctx.training.run_profile import run_profile

    profile = run_profile(
        runner.config, runner.mesh.world_size, runner.model.spec.vocab_size
    ).agreed(runner.mesh.control)
    return make_planner(runner.config, runner.mesh.ranks, profile)


def _report(
    arguments: argparse.Namespace,
    target: "Target",
    documents: "Documents",
    report: "LossReport",
    ranks: int,
) -> None:
    result = {
        "target": target.name,
        "step": None if target.checkpoint is None else target.checkpoint.step,
        "store": documents.store.description,
        "fingerprint": documents.store.fingerprint,
        "max_length": documents.max_length,
        "ranks": ranks,
        **report.as_json(),
    }
    for sentence in filter(
        None, (*target.notes, target.other_tokenizer(documents.store.tokenizer))
    ):
        print(f"longctx eval: {sentence}", file=sys.stderr)
    if target.folder is not None:
        (target.folder / "eval.json").write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    if arguments.json:
        print(json.dumps(result, indent=2))
        return
    overall = report.overall
    print(
        f"{target.described} on {documents.store.description}: loss {overall.loss:.4f}, "
        f"perplexity {overall.perplexity:.3f} over {overall.tokens:,} tokens of "
        f"{overall.documents:,} documents"
    )
    if documents.long:
        done = {None: "split", "split": "split", "drop": "dropped"}.get(
            target.config.data.long_documents, "truncated"
        )
        print(
            f"{documents.long:,} documents of more than {documents.max_length:,} tokens were {done}"
        )
    for title, parts in (
        ("document length (tokens)", report.by_length),
        ("tokens of context", report.by_position),
    ):
        counted = parts[0].documents is not None if parts else False
        print(
            f"\n{title:>30} {'documents' if counted else '':>10} {'predicted':>12} {'loss':>8} "
            f"{'perplexity':>11}"
        )
        for part in parts:
            documents_of = f"{part.documents:,}" if part.documents is not None else ""
            span = f"{part.first:,} to {part.last:,}"
            print(
                f"{span:>30} {documents_of:>10} {part.tokens:>12,} {part.loss:>8.4f} "
                f"{part.perplexity:>11.3f}"
            )
