"""Reads metrics.jsonl, the log of a run's steps, for training, which writes it, and for pictures of runs. Without torch."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

LOG = "metrics.jsonl"


def read_log(path: Path) -> Iterator[tuple[dict[str, Any] | None, str]]:
    """Yields step and text of every line; None for the step if the line is damaged or was cut short by a kill."""
    if path.exists():
        for line in path.read_text("utf-8", errors="replace").splitlines():
            step: dict[str, Any] | None = None
            with suppress(ValueError, KeyError, TypeError, OverflowError):
                values = json.loads(line)
                step = {**values, "step": int(values["step"])}
            yield step, line
