"""Changes of settings that save memory, in ascending order of cost in time."""

from collections.abc import Iterator, Sequence
from typing import Any

from longctx.config import Config
from longctx.config.problems import yaml_text

Settings = dict[str, Any]
"""New values by dotted name."""


def savings(config: Config) -> list[tuple[str, Any]]:
    """Returns the changes of a setting that save memory, in ascending order of cost in time."""
    known = (
        ("parallel.reshard_after", "micro_batch"),
        ("parallel.reshard_after", "block"),
        ("context.keep_kv", False),
        ("context.max_remote_tokens", config.batch.tokens_per_rank),
        ("train.recompute", "norms"),
        ("train.recompute", "mlp"),
        ("train.recompute", "selective"),
        ("parallel.shard_ranks", None),
        ("train.mlp_tile_tokens", 2048),
        ("parallel.reduce_after", "micro_batch"),
        ("context.two_level_exchange", False),
        ("train.offload_activations", True),
        ("train.recompute", "full"),
        ("train.offload_optimizer", True),
    )
    config = config.changed({"context.keep_kv": bool(config.context.keep_kv)})
    present = {
        change[0]: place
        for place, change in enumerate(known)
        if config.changed({change[0]: change[1]}) == config
    }
    return [change for place, change in enumerate(known) if place > present.get(change[0], -1)]


def sets_of(known: Sequence[tuple[str, Any]]) -> Iterator[Settings]:
    """Yields every change alone, then every set, as binary numbers whose highest digit is the most
    expensive change."""
    yield from ({name: value} for name, value in known)
    for number in range(1, 1 << len(known)):
        chosen = [change for digit, change in enumerate(known) if number >> digit & 1]
        together = dict(chosen)
        if 1 < len(chosen) == len(together):  # skips sets with two values of one setting
            yield together


def as_override(name: str, value: object) -> str:
    """Formats a setting as a command-line override."""
    return f"--{name}={yaml_text(value)}"


def changes_between(before: Config, after: Config) -> str:
    """Returns a line on the settings that `fitted` changed, as overrides; empty if there are
    none."""
    old = before.model_dump()
    new = after.model_dump()
    changes = [
        as_override(f"{section}.{key}", value)
        for section in ("context", "parallel", "train")
        for key, value in new[section].items()
        if value != old[section][key]
    ]
    if changes:
        return f"train.fit_memory: {' '.join(changes)}"
    return ""
