"""`longctx estimate`: estimates peak memory per rank, by part and for other choices of settings."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from longctx.config import Config, load, overview
from longctx.errors import UserError
from longctx.units import format_bytes, format_count

if TYPE_CHECKING:
    from longctx.data.store import Store
    from longctx.memory.advisor import Choice
    from longctx.memory.model import Memory
    from longctx.planning.cost.spec import ModelSpec

SUMMARY = "Estimate the peak memory per rank, as configured and for every choice of recomputation and resharding"
OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", type=Path, metavar="CONFIG", help="YAML file of settings; defaults if omitted")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="number of GPUs of the run, one process on each")
    parser.add_argument("--json", action="store_true", help="print the estimate in bytes as JSON")
    parser.epilog = (
        "The documents of the first steps are used if the store exists. Otherwise set model.vocab_size; the estimate then is "
        "for a full rank\nwith its share of the longest document. For a run on GPUs, on a machine without one, add "
        "--train.device cuda\n\n" + overview()
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.gpus < 1:
        raise UserError(f"--gpus is {arguments.gpus}: must be at least 1")
    from longctx.memory.advisor import choices, heaviest
    from longctx.memory.model import estimate
    from longctx.parallel.device import assumed, choose_device
    from longctx.training.run_profile import run_profile

    ranks = arguments.gpus
    config = load(arguments.config, arguments.overrides, world_size=ranks)
    fused = choose_device(config.train.device, 0).type == "cuda"
    store, spec = _store_and_spec(config)
    memory = estimate(spec, config, ranks, heaviest(config, store, ranks), fused=fused)
    table = list(choices(spec, config, store, (ranks, 2 * ranks, 4 * ranks), fused=fused))
    if arguments.json:
        rows = [{**settings, **choice.to_json()} for settings, choice in table]
        print(json.dumps({"version": 1, "ranks": ranks, "configured": memory.to_json(), "choices": rows}))
        return 0
    source = f"the first steps of {config.data.said}" if store else "a full rank (no store)"
    parameters = f"{format_count(spec.parameters)} parameters, computed in {config.dtype}"
    _print_memory(f"{parameters}, {ranks} ranks{assumed(config.train.device)}, {source}", memory, table, config)
    print(*run_profile(config, ranks, spec.vocab_size).lines, sep="\n")
    return 0


def _store_and_spec(config: Config) -> "tuple[Store | None, ModelSpec]":
    from longctx.training.data import RunData

    if all(path.exists() for path in config.data.paths):
        store = RunData.open(config).store
        return store, config.model_source(store.tokenizer.vocab_size).spec
    if config.model_source().spec.vocab_size is None:
        raise UserError(
            f"store {config.data.said} not found, and model.vocab_size is null: set --model.vocab_size, or --data.store to an "
            "existing store"
        )
    return None, config.model_source(config.model.vocab_size).spec


def _print_memory(title: str, memory: "Memory", choices: "Sequence[Choice]", config: Config) -> None:
    """Prints peak memory per rank as two tables: by part, and in total for every choice of settings."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    parts = Table("part", box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    parts.add_column("per rank", justify="right")
    for name, size in memory.parts.items():
        parts.add_row(name.replace("_", " "), format_bytes(size))
    parts.add_section()
    parts.add_row(f"peak memory, at: {memory.moment}", format_bytes(memory.total))
    console.print(parts)
    worlds = sorted({settings["ranks"] for settings, _ in choices})
    table = Table("recompute", "keep_kv", "reshard_after", box=box.SIMPLE_HEAD, title="every choice", title_justify="left")
    for ranks in worlds:
        table.add_column(f"{ranks} ranks", justify="right")
    rows: dict[tuple[str, bool, str], dict[int, str]] = {}
    for settings, choice in choices:
        key = settings["train.recompute"], settings["context.keep_kv"], settings["parallel.reshard_after"]
        rows.setdefault(key, {})[settings["ranks"]] = format_bytes(choice.total)
    configured = config.train.recompute, bool(config.context.keep_kv), config.parallel.reshard_after
    for key, totals in rows.items():
        style = "bold" if key == configured else None
        table.add_row(key[0], str(key[1]).lower(), key[2], *(totals.get(ranks, "-") for ranks in worlds), style=style)
    console.print(table)
    console.print("Bold: as configured. Not counted: the process, its libraries and memory fragmentation.")
