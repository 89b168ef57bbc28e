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

    held: list[torch.Tensor] | None = None
    """What `hold` got during `beside`, until its end."""
    across: tuple[dist.ProcessGroup, int] | None = None
    """Another group of the same ranks, for messages between nodes of so many consecutive ranks;
    None: `group` has all."""

    def __init__(self, group: dist.ProcessGroup | None, where: str) -> None:
        self.group = group
        self.where = where
        self.routes: Routes = {}

    def start(
        self, outgoing: Sequence[tuple[int, torch.Tensor]], incoming: torch.Tensor, rows: Rows
    ) -> "Pending":
        """Posts all sends and receives and returns without waiting. Raises ExchangeError if that
        fails.

        Args:
            outgoing: (peer, contiguous tensor [rows, width]) of each message to send.
            incoming: buffer [Σ rows, width] for the received messages, in the order of `rows`.
            rows: (peer, number of rows) of each message to receive.
        """
        parts = incoming.split([count for _, count in rows]) if rows else ()
        rounds: dict[tuple[bool, int], list[dist.P2POp]] = defaultdict(list)
        for operation, messages in (
            (dist.isend, outgoing),
            (dist.irecv, zip((peer for peer, _ in rows), parts, strict=True)),
        ):
            for peer, tensor in messages:
                route = self.route(peer)
                rounds[route.order].append(dist.P2POp(operation, tensor, route.peer, route.group))
        peers = sorted({peer for peer, _ in (*outgoing, *rows)})
        _Beside.end_others()
        try:
            works = [
                work for order in sorted(rounds) for work in dist.batch_isend_irecv(rounds[order])
            ]
        except RuntimeError as error:
            raise self._failure(peers, error) from error
        return Pending(self, works, incoming, [tensor for _, tensor in outgoing], peers)

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

    def hold(self, *tensors: torch.Tensor) -> None:
        """Keeps tensors until the end of `beside`: a GPU's stream may still read their memory, so
        it must not be used again."""
        if self.held is not None:
            self.held += tensors

    def _route(self, peer: int) -> "Route":
        """Batches have near ranks first, by their distance in the ring of all ranks.

        A batch has OPERATIONS_PER_BATCH / 4 distances, each with two peers, to which a rank sends
        and from which it receives.
        """
        ranks, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        group, node = self.across or (self.group, ranks)
        if peer // node == rank // node:
            group = self.group
        distance = min((peer - rank) % ranks, (rank - peer) % ranks)
        batch = (distance - 1) // (OPERATIONS_PER_BATCH // 4)
        whole = peer if self.group is None else dist.get_global_rank(self.group, peer)
        return Route((group is not self.group, batch), whole, group)

    def _failure(self, peers: list[int], error: Exception) -> ExchangeError:
        rank = dist.get_rank(self.group)
        return ExchangeError(
            f"rank {rank} of the domain: exchange with rank(s) {', '.join(map(str, peers))} failed "
            f"in {self.where}: {error}. "
            "A peer died or is stuck: its own output says why. To wait longer, raise the timeout "
            "of the process group "
            "(train.timeout_s)"
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
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    except ValueError as error:
        text = (
            "torch.distributed is not initialized, so there is no group: call "
            "init_process_group first"
        )
        raise ArgumentError(text) from error
    if ranks == 1:
        return
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    numbers = torch.tensor([[rank], [-1]], device=device)
    received = (
        Exchange(group, "the warm-up")
        .start([(after, numbers[:1])], numbers[1:], [(before, 1)])
        .wait()
        .item()
    )
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
        incoming: torch.Tensor,
        sent: list[torch.Tensor],
        peers: list[int],
    ) -> None:
        self.exchange, self.works, self.incoming, self.sent, self.peers = (
            exchange,
            works,
            incoming,
            sent,
            peers,
        )

    def wait(self) -> torch.Tensor:
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
