"""Exchange: moves rows of K and V and of their gradients between ranks, with one packed message per
peer and round.

Uses only batched point-to-point messages on one communicator, never a process group per degree.
NCCL runs the batches of a communicator one after the other, so messages between nodes may have a
second one, to travel beside those inside a node. Ranks post matching messages in the same order,
because the order is a function of the plan (invariant I3). Many messages of one exchange round are
posted in several batches; both ends of a message post it in the same batch, so that no rank waits
for a later batch of another.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from longctx.arguments import ArgumentError, checked, kind, or_none

Rows = Sequence[tuple[int, int]]
"""(peer, number of rows) of each message, peers ascending."""

OPERATIONS_PER_BATCH = 64
"""Maximum number of messages that a rank sends and receives in one batch.

NCCL splits large batches by a budget, and may hang if two ranks split at different places (pytorch
issue 174288, Megatron-LM issue 7189).
"""


class ExchangeError(RuntimeError):
    """A message of the exchange failed or timed out. Names rank, peers, micro-batch, layer and
    pass.

    On gloo only. NCCL raises nothing for a message that never comes: after the group's timeout its
    watchdog ends the process.
    """


class Route(NamedTuple):
    """The way of all messages between this rank and another one.

    Attributes:
        order: batches are posted in this order: (whether they are between nodes, their number).
        peer: the other rank in the default group.
        group: the group that the messages use.
    """

    order: tuple[bool, int]
    peer: int
    group: dist.ProcessGroup | None


Routes = dict[int, Route]
"""Routes by peer; those who exchange often share one among their exchanges, as torch looks ranks up
slowly."""


class Exchange:
    """Sends and receives the messages of one rank over `group`, which holds the ranks of the domain
    in order.

    `where` names micro-batch, layer and pass for error messages.
    """

    held: list[Tensor] | None = None
    """What `hold` got during `beside`, until its end."""
    across: tuple[dist.ProcessGroup, int] | None = None
    """Another group of the same ranks, for messages between nodes of so many consecutive ranks;
    None: `group` has all."""

    def __init__(self, group: dist.ProcessGroup | None, where: str) -> None:
        self.group = group
        self.where = where
        self.routes: Routes = {}

    def start(
        self, outgoing: Sequence[tuple[int, Tensor]], incoming: Tensor, rows: Rows
    ) -> "Pending":
        """Posts all sends and receives and returns without waiting. Raises ExchangeError if that
        fails.

        Args:
            outgoing: (peer, contiguous tensor [rows, width]) of each message to send.
            incoming: buffer [Σ rows, width] for the received messages, in the order of `rows`.
            rows: (peer, number of rows) of each message to receive.
        """
        batches: dict[tuple[bool, int], list[dist.P2POp]] = defaultdict(list)
        for peer, tensor in outgoing:
            route = self.route(peer)
            batches[route.order].append(dist.P2POp(dist.isend, tensor, route.peer, route.group))
        parts = incoming.split([count for _, count in rows]) if rows else ()
        for (peer, _), part in zip(rows, parts, strict=True):
            route = self.route(peer)
            batches[route.order].append(dist.P2POp(dist.irecv, part, route.peer, route.group))
        peers = sorted({peer for peer, _ in (*outgoing, *rows)})
        _Beside.end_others()
        works: list[dist.Work] = []
        try:
            for order in sorted(batches):
                works += dist.batch_isend_irecv(batches[order])
        except RuntimeError as error:
            raise self._failure(peers, error) from error
        sent = [tensor for _, tensor in outgoing]
        return Pending(self, works, incoming=incoming, sent=sent, peers=peers)

    def route(self, peer: int) -> "Route":
        """Returns the way of messages to and from `peer`, found once."""
        if peer not in self.routes:
            self.routes[peer] = self._route(peer)
        return self.routes[peer]

    def beside(self, hops: Callable[[], None], device: torch.device) -> Callable[[], None]:
        """Runs `hops`, which waits for messages and posts others, beside the computation that
        follows.

        On a GPU it runs in a stream of its own; elsewhere in a thread, and no other messages are
        posted before its end. Returns a function that waits for the end, or on a GPU lets the
        current stream wait, and raises what `hops` raised.
        """
        self.held = []
        wait = _in_stream(hops, device) if device.type == "cuda" else _Beside(hops).end

        def end() -> None:
            wait()
            self.held = None

        return end

    def hold(self, *tensors: Tensor) -> None:
        """Keeps tensors until the end of `beside`: a GPU's stream may still read their memory, so
        it must not be used again."""
        if self.held is not None:
            self.held += tensors

    def _route(self, peer: int) -> "Route":
        """Batches have near ranks first, by their distance in the ring of all ranks.

        A batch has OPERATIONS_PER_BATCH / 4 distances, each with two peers, to which a rank sends
        and from which it receives.
        """
        ranks = dist.get_world_size(self.group)
        rank = dist.get_rank(self.group)
        group, node = self.across or (self.group, ranks)
        if peer // node == rank // node:
            group = self.group
        distance = min((peer - rank) % ranks, (rank - peer) % ranks)
        batch = (distance - 1) // (OPERATIONS_PER_BATCH // 4)
        if self.group is not None:
            peer = dist.get_global_rank(self.group, peer)
        return Route((group is not self.group, batch), peer, group)

    def _failure(self, peers: list[int], error: Exception) -> ExchangeError:
        rank = dist.get_rank(self.group)
        return ExchangeError(
            f"rank {rank} of the domain: exchange with rank(s) {', '.join(map(str, peers))} "
            f"failed in {self.where}: {error}. A peer died or is stuck: its own output says why. "
            "To wait longer, raise the timeout of the process group (train.timeout_s)"
        )


@checked(
    group=or_none(kind("a process group of torch.distributed", dist.ProcessGroup)),
    device=kind("a torch.device or its name", torch.device, str),
)
def warm_up(group: dist.ProcessGroup | None, device: torch.device | str) -> None:
    """Connects the ranks of `group` (None: the default group) by a ring of messages. All of them
    must call it, once.

    NCCL connects the ranks of a group at its first batch of messages, and waits until all of them
    have posted one; the first batch of ring attention may concern only some. A barrier is not
    enough: in a group with two backends it may use the other. Returns when this rank's messages
    have arrived.

    Args:
        group: the group that is given to ring attention.
        device: device of the messages to come, this rank's own.

    Raises ExchangeError if a message fails or times out (on gloo), or is not from the neighbor.
    """
    try:
        ranks = dist.get_world_size(group)
        rank = dist.get_rank(group)
    except ValueError as error:
        text = (
            "torch.distributed is not initialized, so there is no group: call "
            "init_process_group first"
        )
        raise ArgumentError(text) from error
    if ranks == 1:
        return
    after = (rank + 1) % ranks
    before = (rank - 1) % ranks
    numbers = torch.tensor([[rank], [-1]], device=device)
    exchange = Exchange(group, "the warm-up")
    pending = exchange.start([(after, numbers[:1])], numbers[1:], [(before, 1)])
    received = pending.wait().item()
    if received != before:
        raise ExchangeError(
            f"rank {rank} of the group received a message of rank {received} from rank {before} in "
            "the warm-up"
        )


class _Beside(threading.Thread):
    """A thread of `Exchange.beside`. Messages that other threads post later come after its own, as
    on every rank."""

    running: "_Beside | None" = None

    def __init__(self, hops: Callable[[], None]) -> None:
        self.end_others()
        super().__init__(name="exchange", daemon=True)
        self.hops = hops
        self.error: BaseException | None = None
        _Beside.running = self
        self.start()

    def run(self) -> None:
        try:
            self.hops()
        except BaseException as error:
            self.error = error

    def end(self) -> None:
        self.end_others()
        if self.error is not None:
            raise self.error

    @classmethod
    def end_others(cls) -> None:
        """Waits until no thread runs but perhaps this one."""
        if cls.running is not None and cls.running is not threading.current_thread():
            cls.running.join()
            cls.running = None


def _in_stream(hops: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Runs `hops` in a stream beside the current one. Returns a function that lets the current
    stream wait for it."""
    stream = _stream_beside(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        hops()
    return lambda: torch.cuda.current_stream(device).wait_stream(stream)


@cache
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Pending:
    """Messages in flight. Keeps the sent tensors alive until `wait` returns the buffer."""

    def __init__(
        self,
        exchange: Exchange,
        works: list[dist.Work],
        incoming: Tensor,
        sent: list[Tensor],
        peers: list[int],
    ) -> None:
        self.exchange = exchange
        self.works = works
        self.incoming = incoming
        self.sent = sent
        self.peers = peers

    def wait(self) -> Tensor:
        """Returns the buffer of the received messages.

        On gloo, blocks until every message has been sent and received, and raises ExchangeError
        after the group's timeout. On NCCL, only orders streams and returns at once: what the
        current stream computes next sees the received rows.
        """
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise self.exchange._failure(self.peers, error) from error
        self.exchange.hold(self.incoming, *self.sent)
        self.sent = []
        return self.incoming
