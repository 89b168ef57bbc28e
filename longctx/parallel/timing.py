"""Moments in a rank's time: on a GPU an event in its stream, so that nothing waits for it; else the wall clock."""

import time

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
