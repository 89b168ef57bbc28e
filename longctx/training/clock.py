"""Clock: times attention, exchange and optimizer of a step on this rank."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from longctx.attention.exchange import Exchange, Pending
from longctx.parallel.timing import Clock

ATTENTION = "attention"
EXCHANGE = "exchange"
OPTIMIZER = "optimizer"


class StepClock(Clock):
    """A clock for the attention of a step and for waiting on its exchange."""

    @contextmanager
    def attention(self, where: str) -> Iterator[None]:
        """Times one pass of one layer's attention; `where` is its name in a trace."""
        with record_function(where), self.span(ATTENTION):
            yield

    def exchange(self, group: dist.ProcessGroup | None, where: str) -> Exchange:
        """Makes an exchange whose waits are timed."""
        return _TimedExchange(self, group, where)


class _TimedExchange(Exchange):
    def __init__(self, clock: StepClock, group: dist.ProcessGroup | None, where: str) -> None:
        super().__init__(group, where)
        self.clock = clock

    def start(self, *arguments: Any) -> Pending:
        pending = super().start(*arguments)
        return _TimedPending(self.clock, pending)

    def beside(self, hops: Callable[[], None], device: torch.device) -> Callable[[], None]:
        end = super().beside(hops, device)

        def timed_end() -> None:
            with self.clock.span(EXCHANGE):
                end()

        return timed_end


class _TimedPending(Pending):
    def __init__(self, clock: StepClock, pending: Pending) -> None:
        super().__init__(
            pending.exchange, pending.works, pending.incoming, pending.sent, pending.peers
        )
        self.clock = clock

    def wait(self) -> torch.Tensor:
        beside = self.exchange.held is not None  # computation waits for the end alone
        with nullcontext() if beside else self.clock.span(EXCHANGE):
            return super().wait()
