"""Moments in a rank's time, and spans between them: on a GPU events in its stream, read once what was timed is done.

So nothing waits for a GPU in between, and a span is how long the stream took for it; time in which the GPU waits for its host
is in none. On a CPU moments are those of the wall clock.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

Moment = torch.cuda.Event | float


def now(device: torch.device) -> Moment:
    """This moment; on a GPU when its stream comes to it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds(start: Moment, stop: Moment) -> float:
    """Between two moments of one device; on a GPU its stream must have come to both."""
    if isinstance(start, torch.cuda.Event) and isinstance(stop, torch.cuda.Event):
        return float(start.elapsed_time(stop)) / 1e3
    assert isinstance(start, float) and isinstance(stop, float)
    return stop - start


def finish(device: torch.device) -> None:
    """Waits until a GPU has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Clock:
    """Spans by name, those inside of others taken out of them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.open: list[str] = []
        self.spans: list[tuple[str, str | None, Moment, Moment]] = []
        """Name, name of the span around it, start, end."""

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = now(self.device)
        self.open.append(name)
        try:
            yield
        finally:
            self.open.pop()
            self.spans.append((name, self.open[-1] if self.open else None, start, now(self.device)))

    def take(self) -> dict[str, float]:
        """Seconds by name since the last call."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        spent: dict[str, float] = defaultdict(float)
        for name, around, start, end in self.spans:
            length = seconds(start, end)
            spent[name] += length
            if around is not None:
                spent[around] -= length
        self.spans = []
        return spent
