"""Clock: times attention, exchange and optimizer of a step on this rank."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from longctx.attention.exchange import Exchange, Pending
from longctx.parallel.timing import Clock

ATTENTION, EXCHANGE, OPTIMIZER = "attention", "exchange", "optimizer"


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
        self.clock, self.timed = clock, True

    def start(self, *arguments: Any) -> Pending:
        pending = super().start(*arguments)
        return _TimedPending(self, pending)

    def beside(self, hops: Callable[[], None], device: torch.device) -> Callable[[], None]:
        """Times the wait for the end; nothing waits for the messages in between."""
        self.timed = False
        end = super().beside(hops, device)

        def timed_end() -> None:
            with self.clock.span(EXCHANGE):
                end()
            self.timed = True

        return timed_end


class _TimedPending(Pending):
    def __init__(self, exchange: _TimedExchange, pending: Pending) -> None:
        super().__init__(exchange, pending.works, pending.incoming, pending.sent, pending.peers)
        self.timed_exchange = exchange

    def wait(self) -> torch.Tensor:
        with self.timed_exchange.clock.span(EXCHANGE) if self.timed_exchange.timed else nullcontext():
            return super().wait()
