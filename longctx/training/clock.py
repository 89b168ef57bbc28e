"""Clock: where the time of a step goes on this rank, without waiting for a GPU in between.

On a CPU, spans are read from the wall clock. On a GPU each end of a span is an event in the stream, read once the step is done,
so that a span is how long the stream took for it; time in which the GPU waits for its host is in none.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from longctx.attention.exchange import Exchange, Pending
from longctx.parallel.timing import Moment, now, seconds

ATTENTION, EXCHANGE, OPTIMIZER = "attention", "exchange", "optimizer"


class StepClock:
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

    @contextmanager
    def attention(self, where: str) -> Iterator[None]:
        """Around one pass of one layer's attention; `where` is its name in a trace."""
        with record_function(where), self.span(ATTENTION):
            yield

    def exchange(self, group: dist.ProcessGroup | None, where: str) -> Exchange:
        """An exchange whose waits are spans."""
        return _TimedExchange(self, group, where)

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


class _TimedExchange(Exchange):
    def __init__(self, clock: StepClock, group: dist.ProcessGroup | None, where: str) -> None:
        super().__init__(group, where)
        self.clock = clock

    def start(self, *arguments: Any) -> Pending:
        pending = super().start(*arguments)
        return _TimedPending(self.clock, pending)


class _TimedPending(Pending):
    def __init__(self, clock: StepClock, pending: Pending) -> None:
        super().__init__(pending.exchange, pending.works, pending.incoming, pending.sent, pending.peers)
        self.clock = clock

    def wait(self) -> torch.Tensor:
        with self.clock.span(EXCHANGE):
            return super().wait()
