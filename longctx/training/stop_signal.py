"""Stop signal: SIGTERM, or Ctrl-C, ends a run after its step, with a checkpoint."""

import signal


class StopSignal:
    """Records SIGTERM or SIGINT, once installed, so that the run can write a checkpoint after the step and stop.

    Attributes:
        number: the signal; SIGTERM if another process received it.
    """

    received = False
    number: signal.Signals = signal.SIGTERM

    @classmethod
    def install(cls, *, interrupts: bool = False) -> "StopSignal":
        """Makes SIGTERM set `received` instead of ending the process; with `interrupts` also the first SIGINT."""
        stop = cls()
        signal.signal(signal.SIGTERM, stop._receive)
        if interrupts:
            signal.signal(signal.SIGINT, stop._receive)
        return stop

    def release_interrupts(self) -> None:
        """Makes SIGINT end the process again."""
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def _receive(self, number: int, frame: object) -> None:
        self.received, self.number = True, signal.Signals(number)
        if number == signal.SIGINT:
            self.release_interrupts()  # a second SIGINT ends the process without waiting for the step
