"""`longctx estimate`: says whether a run fits, its peak memory per rank by part, and other choices
of settings."""

import argparse
import json
from typing import TYPE_CHECKING

from longctx.commands.output import a_path
from longctx.config import Config, load, overview
from longctx.errors import UserError
from longctx.units import format_bytes, format_count

if TYPE_CHECKING:
    from longctx.data.store.store import Store
    from longctx.planning.cost.spec import ModelSpec

SUMMARY = (
    "Say whether a run fits: peak memory per rank, as configured and for other choices of settings"
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
    parser.epilog = (
        "The documents of the first steps are used if the store exists. Otherwise set "
        "model.vocab_size; the estimate then is for a full rank\n"
        "with its share of the longest document. For a run on GPUs, on a machine without one, add "
        "--train.device cuda. Of a checkpoint, config.json is enough: --model.from_pretrained "
        "FOLDER\n"
        "\n" + overview()
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.gpus < 1:
        raise UserError(f"--gpus is {arguments.gpus}: must be at least 1")
    from longctx.memory.fitting import RunMemory, as_override, changes_between
    from longctx.parallel.device import assumed, choose_device
    from longctx.training.run_profile import run_profile

    ranks = arguments.gpus
    config = load(arguments.config, arguments.overrides, world_size=ranks)
    store, spec = _store_and_spec(config)
    of_run = RunMemory(spec, store, ranks, choose_device(config.train.device, 0).type == "cuda")
    memory = of_run.peak(config)
    table = list(of_run.choices(config))
    if arguments.json:
        rows = [{**settings, "ranks": ranks, **choice.to_json()} for settings, choice in table]
        print(
            json.dumps(
                {"version": 1, "ranks": ranks, "configured": memory.to_json(), "choices": rows}
            )
        )
        return 0
    changes = changes_between(config, of_run.as_fitted(config))
    print("\n".join(of_run.verdict(config, changes, memory)))
    print(
        f"{format_count(spec.parameters)} parameters, computed in {config.dtype}, {ranks} "
        f"rank{'s' * (ranks > 1)}{assumed(config.train.device)}, "
        f"{f'the first steps of {config.data.description}' if store else 'a full rank (no store)'}"
    )
    for name, size in sorted(memory.parts.items(), key=lambda part: -part[1]):
        if size:
            print(f"  {name.replace('_', ' '):20}{format_bytes(size):>12}")
    if not arguments.all:
        available = of_run.available(config)[0]
        table = [choice for choice in table if available is None or choice[1].total <= available][
            :CHEAPEST
        ]
    print(
        "every choice, fastest first"
        if arguments.all
        else "choices that fit, fastest first (--all: every choice)"
    )
    for settings, choice in table:
        overrides = " ".join(as_override(name, value) for name, value in settings.items())
        print(f"  {overrides:86}{format_bytes(choice.total):>12}")
    print("not counted: the process, its libraries and memory fragmentation")
    if of_run.fused:
        print(_errors_said(config, spec))
    print("\n".join(run_profile(config, ranks, spec.vocab_size).lines))
    return 0


def _errors_said(config: Config, spec: "ModelSpec") -> str:
    from longctx.planning.cost.published_errors import kind_of, said

    return said("memory", kind_of(spec, float8=config.train.float8 is not None))


def _store_and_spec(config: Config) -> "tuple[Store | None, ModelSpec]":
    from longctx.training.checks import check_weights
    from longctx.training.data import RunData

    if all(path.exists() for path in config.data.paths):
        data = RunData.open(config)
        check_weights(config, data)
        store = data.store
        return store, config.model_source(store.tokenizer.vocab_size).spec
    if config.model_source().spec.vocab_size is None:
        raise UserError(
            f"store {config.data.description} not found, and model.vocab_size is null: set "
            "--model.vocab_size, or --data.store to an existing store"
        )
    return None, config.model_source(config.model.vocab_size).spec
