"""Stop signal: SIGTERM, or Ctrl-C, ends a run after its step, with a checkpoint."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class StopSignal:
    """Records SIGTERM or SIGINT, while installed, so that the run can write a checkpoint after the
    step and stop.

    Attributes:
        number: the signal; SIGTERM if another process received it.
    """

    received = False
    number: signal.Signals = signal.SIGTERM

    @classmethod
    @contextmanager
    def installed(cls, *, interrupts: bool = False) -> Iterator["StopSignal"]:
        """Makes SIGTERM set `received` instead of ending the process; with `interrupts` also the
        first SIGINT.

        Afterwards signals do what they did before. In a thread that is not the main one no signal
        can be received, and none is.
        """
        stop = cls()
        if not _is_main_thread():
            yield stop
            return
        numbers = [signal.SIGTERM, *([signal.SIGINT] if interrupts else [])]
        before = {number: signal.getsignal(number) for number in numbers}
        for number in numbers:
            signal.signal(number, stop._receive)
        try:
            yield stop
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def release_interrupts(self) -> None:
        """Makes SIGINT end the process again."""
        if _is_main_thread():
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _receive(self, number: int, frame: object) -> None:
        self.received = True
        self.number = signal.Signals(number)
        if number == signal.SIGINT:
            # A second SIGINT ends the process without waiting for the step.
            self.release_interrupts()


def _is_main_thread() -> bool:
    """Returns whether this thread is the one in which Python lets signals be handled."""
    return threading.current_thread() is threading.main_thread()
