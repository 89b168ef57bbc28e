"""Prints peak memory per rank as two tables: by part, and in total for every choice of settings."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from longctx.config import Config
from longctx.memory.advisor import Choice
from longctx.memory.model import Memory
from longctx.units import format_bytes


def print_memory(title: str, memory: Memory, choices: Sequence[Choice], config: Config) -> None:
    """Prints both tables, with the configured settings in bold."""
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
