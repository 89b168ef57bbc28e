"""`longctx estimate`: the verdict on a run first, then its peak memory per rank by part, and other
choices of settings."""

import argparse
import json
from itertools import islice
from typing import TYPE_CHECKING, Any

from longctx.commands.lengths import add_stand_in_options
from longctx.commands.output import a_path
from longctx.config import Config, load, overview
from longctx.errors import UserError
from longctx.hf.source import lines_on
from longctx.model.published import config_alone
from longctx.planning.cost.published_errors import kind_of, said
from longctx.units import format_bytes, format_count

if TYPE_CHECKING:
    from collections.abc import Iterable

    from longctx.data.store.store import Store
    from longctx.memory.changes import Settings
    from longctx.memory.fitting import RunMemory
    from longctx.memory.model import Memory
    from longctx.memory.verdict import PredictedRun, Verdict

SUMMARY = (
    "Say whether a run fits and how long it takes: memory by part, and other choices of settings"
)
CHEAPEST = 3
"""Choices that are shown without --all."""
OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config",
        nargs="?",
        type=a_path,
        metavar="CONFIG",
        help="YAML file of settings; defaults if omitted",
    )
    parser.add_argument(
        "--gpus",
        type=int,
        default=1,
        metavar="N",
        help="number of GPUs of the run, one process on each",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="show every choice of recomputation and resharding, also on more GPUs",
    )
    parser.add_argument("--json", action="store_true", help="print the estimate in bytes as JSON")
    add_stand_in_options(parser, only="")
    parser.add_argument(
        "--trl",
        choices=("ddp", "fsdp2"),
        help="of TRL's SFTTrainer with dynamic_context_parallel, on GPUs, which shards nothing "
        "(ddp) or weights and optimizer (fsdp2)",
    )
    parser.epilog = (
        "Documents are those of --lengths or --mix, or of stores that the settings name; without "
        "them, all have the maximum length.\n"
        "For a run on GPUs, on a machine without one, add --train.device cuda. Of a checkpoint, "
        "config.json is enough: --model.from_pretrained FOLDER\n"
        "\n" + overview()
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.gpus < 1:
        raise UserError(f"--gpus is {arguments.gpus}: must be at least 1")
    with config_alone():
        if arguments.trl is None:
            _estimate(arguments)
        else:
            _estimate_trl(arguments)
    return 0


def _estimate_trl(arguments: argparse.Namespace) -> None:
    """Predicts a trainer of TRL, and prints what is predicted."""
    ranks = arguments.gpus
    overrides = ["train.device=cuda", *arguments.overrides]
    config = load(arguments.config, overrides)  # without rules on processes of `longctx train`
    if config.model.from_pretrained is None:
        raise UserError("--trl is of a checkpoint: set --model.from_pretrained OWNER/NAME")
    if arguments.all:
        raise UserError("--all is of `longctx train`, whose settings trainers lack: omit it")
    documents = _documents(config, arguments)
    from longctx.trainers.prediction import predict_trl

    source = config.model_source()
    predicted = predict_trl(
        config, source.spec, documents=documents, ranks=ranks, sharding=arguments.trl
    )
    if arguments.json:
        print(json.dumps(_verdict_json(predicted.verdict, ranks)))
        return
    used = predicted.documents
    longest = min(predicted.config.max_length(ranks), used.longest)
    print("\n".join(predicted.lines()))
    print(f"steps of {used.description}, of {config.batch.global_tokens:,} tokens")
    for line in lines_on(source, config.model.from_pretrained, longest):
        print(line)
    print("\n".join(predicted.named.lines))


def _estimate(arguments: argparse.Namespace) -> None:
    """Predicts a run, and prints what is predicted."""
    config = load(arguments.config, arguments.overrides, world_size=arguments.gpus)
    # Imports torch, which takes seconds: settings may be wrong.
    from longctx.commands.dry_run import on_gpus
    from longctx.memory.fitting import RunMemory
    from longctx.memory.verdict import longest_documents, predict
    from longctx.training.data import with_steps
    from longctx.training.run_profile import run_profile

    ranks = arguments.gpus
    found = _documents(config, arguments)
    documents: Store
    if found is None:
        documents = longest_documents(config, ranks, _vocabulary(config))
    else:
        documents = found
        config = with_steps(config, documents, ranks)
    source = config.model_source(documents.tokenizer.vocab_size)
    spec = source.spec
    of_run = RunMemory(spec, found, ranks, on_gpus(config))
    predicted = predict(config, of_run, documents)
    choices = of_run.choices(config)
    if arguments.json:
        _print_json(predicted, of_run.peak(config), ranks, choices)
    else:
        _print_run(predicted, of_run, documents)
        _print_choices(choices, predicted.verdict, all_of_them=arguments.all)
        longest = min(config.max_length(ranks), documents.longest)
        for line in lines_on(source, config.model.from_pretrained, longest):
            print(line)
        print("not counted: the process, its libraries and memory fragmentation")
        profile = run_profile(predicted.config, ranks, spec.vocab_size)
        print("\n".join(profile.lines))
        if of_run.fused:
            kind = kind_of(spec, float8=config.train.float8 is not None)
            print(said("time", kind), said("memory", kind), sep="\n")


def _documents(config: Config, arguments: argparse.Namespace) -> "Store | None":
    """Returns the documents of --lengths or --mix, or of stores that the settings name; otherwise
    None.

    A store that lies where the default would be is not read: nobody named it, and the answer would
    change with the folder.
    """
    from longctx.commands.dry_run import stand_in_store
    from longctx.training.checks import check_weights
    from longctx.training.data import RunData

    lengths = stand_in_store(arguments, config)
    if lengths is not None:
        return lengths
    named = "store" in config.data.model_fields_set
    if not named or not all(path.exists() for path in config.data.paths):
        return None
    data = RunData.open(config)
    check_weights(config, data)
    return data.store


def _vocabulary(config: Config) -> int:
    """Returns the entries of the embedding without a store. Raises UserError if nobody knows
    them."""
    from longctx.commands.dry_run import vocabulary_of

    vocabulary = vocabulary_of(config)
    if vocabulary is None:
        raise UserError(
            f"model.preset {config.model.preset} has no published vocabulary, and no store is "
            "named, or it is not there yet: set --model.vocab_size, or --data.store; with --mix "
            "wlb_128k or --lengths FILE it is an estimate for such documents"
        )
    return vocabulary


def _print_json(
    predicted: "PredictedRun",
    configured: "Memory",
    ranks: int,
    choices: "Iterable[tuple[Settings, Memory]]",
) -> None:
    """Prints the peak as configured and as started, and the choices, in bytes."""
    rows = [{**settings, "ranks": ranks, **choice.to_json()} for settings, choice in choices]
    content = {
        **_verdict_json(predicted.verdict, ranks),
        "configured": configured.to_json(),
        "started": predicted.memory.to_json(),
        "choices": rows,
    }
    print(json.dumps(content))


def _verdict_json(verdict: "Verdict", ranks: int) -> dict[str, Any]:
    return {
        "version": 1,
        "ranks": ranks,
        "verdict": verdict.line(),
        "fits": verdict.fits,
        "needed": verdict.needed,
        "available": verdict.available,
        "step_s": verdict.step_s,
        "step_tokens": verdict.step_tokens,
        "tokens_per_s": verdict.tokens_per_s,
        "mfu": verdict.mfu,
    }


def _print_run(predicted: "PredictedRun", of_run: "RunMemory", documents: "Store") -> None:
    """Prints the verdict, what it is of, and the peak by part."""
    from longctx.parallel.device import assumed

    config = predicted.config
    ranks = of_run.ranks
    print("\n".join(predicted.lines()))
    if of_run.store is None:
        source = f"full ranks, {documents.description} (--mix or --lengths for others)"
    else:
        source = f"the first steps of {documents.description}"
    print(
        f"{format_count(of_run.spec.parameters)} parameters, computed in {config.dtype}, {ranks} "
        f"rank{'s' * (ranks > 1)}{assumed(config.train.device)}, {source}"
    )
    print(f"memory of the fullest rank, at {predicted.memory.moment}:")
    for name, size in sorted(predicted.memory.parts.items(), key=lambda part: -part[1]):
        if size:
            print(f"  {name.replace('_', ' '):20}{format_bytes(size):>12}")


def _print_choices(
    choices: "Iterable[tuple[Settings, Memory]]", verdict: "Verdict", *, all_of_them: bool
) -> None:
    """Prints all choices of settings, or the fastest that fit: the others are not even planned."""
    from longctx.memory.changes import as_override

    available = verdict.available
    if all_of_them:
        print("every choice, fastest first")
    else:
        print("choices that fit, fastest first (--all: every choice)")
        fitting = (
            choice for choice in choices if available is None or choice[1].total <= available
        )
        choices = list(islice(fitting, CHEAPEST))
        if not choices:
            print("  none of them alone")
    for settings, memory in choices:
        overrides = " ".join(as_override(name, value) for name, value in settings.items())
        print(f"  {overrides:86}{format_bytes(memory.total):>12}")
