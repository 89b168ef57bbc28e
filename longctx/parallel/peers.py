"""Peers: names the processes of a run that die, stop or are cut off, and says where each was last.

Every process puts its position into the launcher's store each second, from a thread with a
connection of its own. Rank 0 looks at all of them and the others at rank 0, so the load on the
store grows with the number of ranks and not with its square. This needs no message between ranks,
which is why it works where NCCL only waits: the position is that of the host, ahead of its GPU.
"""

import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]  # public, not in __all__

from longctx.errors import shortened
from longctx.units import format_ranks

INTERVAL_S = 1.0
SILENT_S = 30.0
"""Seconds without a sign of life after which a process is named, unless half of the timeout is
less."""
STUCK_SHARE = 0.8
"""Share of the timeout without progress after which a process says where all are."""
LONGEST = 2000
"""Characters of the positions in a message."""
ANSWER_S = 10.0
"""Seconds that a process which ends waits for the store, less those that it has not answered
already."""


@dataclass(frozen=True)
class Sign:
    """Last sign of life of a process, the `number`-th: its host and where it was; its error if it
    ends, as the `place`-th."""

    number: int
    host: str
    position: str
    error: str = ""
    place: int = 0


class Peers:
    """Signs of life of the processes of a run.

    Attributes:
        position: says where this process is, once set; called from another thread, also while what
            it reads changes.
    """

    def __init__(
        self, store: Store, rank: int, ranks: int, timeout_s: float, interval_s: float = INTERVAL_S
    ) -> None:
        self.position: Callable[[], str] | None = None
        # A connection of its own: one that waits for an answer keeps others waiting.
        self._store: Store = store.clone()  # type: ignore[attr-defined]  # not in the stubs
        self._rank = rank
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._interval_s = interval_s
        self._silent_s = min(SILENT_S, timeout_s / 2)
        self._number = 0
        self._host = socket.gethostname()
        self._answered = time.monotonic()  # when the store did last
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)
        self._thread.start()

    def where(self) -> str:
        if self.position is None:
            return "starting"
        try:
            return self.position()
        except Exception:  # a container changed while it was read
            return "between two layers"

    def close(self) -> None:
        """Ends the signs of life, as the run ends."""
        self._closing.set()
        self._thread.join(max(self._interval_s, self._answered + ANSWER_S - time.monotonic()))

    def end(
        self, error: str, *, look_s: float = 0.0
    ) -> tuple[dict[int, Sign], dict[int, Sign]] | None:
        """Tells the others that this process ends by `error`. Returns the last signs of all, and
        those `look_s` seconds later.

        None if the store does not answer.
        """
        position = self.where()
        self.close()
        looks: list[dict[int, Sign]] = []

        def ask() -> None:
            with suppress(RuntimeError):  # the store is gone
                self._put(position, shortened(error, LONGEST), self._store.add("ends", 1))
                for seconds in (0.0, look_s):
                    time.sleep(seconds)
                    looks.append(self._read(range(self._ranks)))

        if not self._thread.is_alive():  # a store on a stopped host never answers
            asking = threading.Thread(target=ask, daemon=True)
            asking.start()
            asking.join(ANSWER_S + look_s)
        if len(looks) == 2:
            return (looks[0], looks[1])
        return None

    def report(self, error: str) -> str:
        """Returns what is known of the others as this process ends by `error`: who has fallen
        silent, or who ended first."""
        looks = self.end(error, look_s=2.5 * self._interval_s)
        if looks is None:
            return (
                "the store of the run does not answer: rank 0, or torchrun where it runs, has "
                "ended, or this host is cut off"
            )
        before, after = looks
        alive = {rank for rank, sign in after.items() if sign.place or sign != before.get(rank)}
        if silent := sorted({*range(self._ranks)} - alive):
            return self._silent_said(after, silent)
        first = min((sign.place, rank) for rank, sign in after.items() if sign.place)[1]
        if first != self._rank:
            sign = after[first]
            return (
                f"rank {first} on {sign.host} was the first to end, in {sign.position}: "
                f"{sign.error}"
            )
        return f"all processes give signs of life; last positions: {_grouped(after)}"

    def _watch(self) -> None:
        """Gives signs of life and prints who falls silent, until the run ends or the store is
        gone."""
        watched = range(self._ranks) if self._rank == 0 else [0]
        seen: dict[int, tuple[Sign | None, float]] = {
            rank: (None, time.monotonic()) for rank in watched
        }
        told: set[int] = set()
        latest = self.where()
        since = time.monotonic()
        try:
            self._put(latest)
            while not self._closing.wait(self._interval_s):
                self._answered = time.monotonic()
                position = self.where()
                now = time.monotonic()
                self._put(position)
                signs = self._read(watched)
                seen |= {rank: (sign, now) for rank, sign in signs.items() if sign != seen[rank][0]}
                late = (rank for rank in watched if now - seen[rank][1] > self._silent_s)
                silent = {
                    rank for rank in late if (sign := seen[rank][0]) is None or not sign.place
                }
                if self._rank == 0 and silent != told:
                    self._store.set("silent", json.dumps(sorted(silent)))
                elif self._rank and self._store.check(["silent"]):
                    silent |= set(json.loads(self._store.get("silent"))) - {self._rank}
                if silent - told:
                    self._print(self._silent_said(self._read(silent), sorted(silent)))
                told = silent
                if position != latest or self.position is None:
                    latest = position
                    since = now
                elif now - since > STUCK_SHARE * self._timeout_s:
                    since = now
                    self._print(
                        f"no progress for {STUCK_SHARE * self._timeout_s:.0f} s; last positions: "
                        f"{_grouped(self._read(range(self._ranks)))}"
                    )
        except (
            RuntimeError
        ):  # of the store; at the end of a run its process may be the first to leave
            if not self._closing.wait(ANSWER_S):
                self._print(
                    "the store of the run is gone: rank 0, or torchrun where it ran, has ended, or "
                    "this host is cut off"
                )

    def _silent_said(self, signs: dict[int, Sign], silent: Sequence[int]) -> str:
        known = {rank: signs[rank] for rank in silent if rank in signs}
        unknown = [rank for rank in silent if rank not in signs]
        parts = [f"last in {_grouped(known)}"] * bool(known) + [
            f"{format_ranks(unknown)} never gave one"
        ] * bool(unknown)
        return (
            f"{format_ranks(silent)} {'gives' if len(silent) == 1 else 'give'} no sign of life: "
            "killed, stopped or cut off; " + "; ".join(parts)
        )

    def _put(self, position: str, error: str = "", place: int = 0) -> None:
        self._number += 1
        self._store.set(
            f"sign/{self._rank}",
            json.dumps(
                asdict(Sign(self._number, self._host, position=position, error=error, place=place))
            ),
        )

    def _read(self, ranks: Iterable[int]) -> dict[int, Sign]:
        """Returns the last sign of each rank that has given one."""
        keys = {rank: f"sign/{rank}" for rank in ranks}
        if not self._store.check([*keys.values()]):
            keys = {rank: key for rank, key in keys.items() if self._store.check([key])}
        values: list[Any] = self._store.multi_get([*keys.values()]) if keys else []
        return {rank: Sign(**json.loads(value)) for rank, value in zip(keys, values, strict=True)}

    def _print(self, text: str) -> None:
        print(
            f"longctx: rank {self._rank} on {self._host}, in {self.where()}: {text}",
            file=sys.stderr,
            flush=True,
        )


def _grouped(signs: dict[int, Sign]) -> str:
    """Returns the positions of processes, those at the same one together."""
    places: dict[tuple[str, str], list[int]] = {}
    for rank, sign in sorted(signs.items()):
        places.setdefault((sign.position, sign.host), []).append(rank)
    text = "; ".join(
        f"{format_ranks(ranks)} on {host} in {where}" for (where, host), ranks in places.items()
    )
    return shortened(text, LONGEST)
