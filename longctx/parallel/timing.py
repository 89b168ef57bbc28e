"""Times spans of work: by events in the stream on a GPU, by the wall clock on a CPU.

Events are read only when the work is done, so timing does not wait for the GPU. A GPU span is the
time that the stream took.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

Moment = torch.cuda.Event | float


def now(device: torch.device) -> Moment:
    """Returns the current time; on a GPU an event, which has the time when the stream reaches
    it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds(start: Moment, stop: Moment) -> float:
    """Returns the seconds between two moments of one device; a GPU's stream must have reached
    both."""
    if isinstance(start, torch.cuda.Event) and isinstance(stop, torch.cuda.Event):
        return float(start.elapsed_time(stop)) / 1e3
    assert isinstance(start, float) and isinstance(stop, float)
    return stop - start


def finish(device: torch.device) -> None:
    """Waits until a GPU has finished all work submitted so far."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Spans:
    """Spans of work that a clock has measured, by name."""

    def __init__(self, spans: list[tuple[str, str | None, Moment, Moment]]) -> None:
        """Takes name, name of the enclosing span, start and end of each span, in the order of
        their ends."""
        self._spans = spans

    def seconds(self) -> dict[str, float]:
        """Returns the seconds per name. The host waits until a GPU has ended the last span, but not
        for later work."""
        if self._spans:
            last = self._spans[-1][-1]
            if isinstance(last, torch.cuda.Event):
                last.synchronize()
        spent: dict[str, float] = defaultdict(float)
        for name, around, start, end in self._spans:
            length = seconds(start, end)
            spent[name] += length
            if around is not None:
                spent[around] -= length
        return spent


class Clock:
    """Measures spans by name; the time of nested spans is subtracted from the span around them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.open: list[str] = []
        self.spans: list[tuple[str, str | None, Moment, Moment]] = []
        """Name, name of the enclosing span, start and end of each span."""

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Times what runs in this context, under a name."""
        start = now(self.device)
        self.open.append(name)
        try:
            yield
        finally:
            self.open.pop()
            self.spans.append((name, self.open[-1] if self.open else None, start, now(self.device)))

    def cut(self) -> Spans:
        """Returns the spans since the last call, without waiting."""
        spans = Spans(self.spans)
        self.spans = []
        return spans
