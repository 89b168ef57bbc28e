"""Hops that run beside the computation: in order with all other messages, and not counted as
waits."""

import threading
import time
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from longctx.attention.exchange import Exchange, ExchangeError
from longctx.training.clock import EXCHANGE, StepClock
from tests import fake_cuda

CPU = torch.device("cpu")
TRAVEL_S = 0.1


@pytest.fixture
def posted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Peers of the messages that rank 0 of 4 posts; they arrive after TRAVEL_S, and those of peer 3
    fail."""
    peers: list[int] = []

    def post(operations: list[Any]) -> list[Any]:
        peers.extend(peer for _, _, peer, _ in operations)

        def wait() -> None:
            time.sleep(TRAVEL_S)
            if peers[-1] == 3:
                raise RuntimeError("connection closed by peer")

        return [SimpleNamespace(wait=wait)]

    for name, value in {"get_rank": 0, "get_world_size": 4}.items():
        monkeypatch.setattr(dist, name, lambda *group, value=value: value)
    monkeypatch.setattr(dist, "P2POp", lambda *arguments: arguments)
    monkeypatch.setattr(dist, "batch_isend_irecv", post)
    return peers


def send(exchange: Exchange, *peers: int) -> None:
    """Sends a row to each peer, after the row before has arrived."""
    for peer in peers:
        exchange.start([(peer, torch.zeros(1, 1))], torch.zeros(0, 1), []).wait()


def test_hops_beside_keep_their_place(posted: list[int]) -> None:
    """Messages that are posted while they run come after all of theirs, of this exchange or
    another."""
    first, second = Exchange(None, "a test"), Exchange(None, "a test")
    end = first.beside(lambda: send(first, 1, 2), CPU)
    other_end = second.beside(lambda: send(second, 2, 2), CPU)
    send(second, 1)
    assert posted == [1, 2, 2, 2, 1]
    end(), other_end()


def test_batches_are_posted_in_the_order_of_all_ranks(
    posted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the order of the messages is: two ranks would wait for each other."""
    monkeypatch.setattr("longctx.attention.exchange.OPERATIONS_PER_BATCH", 4)
    one = Exchange(None, "a test")
    assert one.route(1).order < one.route(2).order
    for peers in ((1, 2), (2, 1)):
        posted.clear()
        one.start([(peer, torch.zeros(1, 1)) for peer in peers], torch.zeros(0, 1), [])
        assert posted == [1, 2]


def test_the_end_of_hops_beside_raises_what_they_raised(posted: list[int]) -> None:
    exchange = Exchange(None, "a test")
    end = exchange.beside(lambda: send(exchange, 3), CPU)
    with pytest.raises(
        ExchangeError,
        match=r"exchange with rank\(s\) 3 failed in a test: connection closed by peer",
    ):
        end()


def test_a_gpu_keeps_messages_until_the_end_of_hops_beside(
    posted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host is far ahead of the stream that sends them: their memory would be used again while
    it reads them."""
    ordered: list[tuple[Any, Any]] = []
    entered: list[Any] = []
    monkeypatch.setattr(
        fake_cuda.Stream, "wait_stream", lambda stream, other: ordered.append((stream, other))
    )
    exchange = Exchange(None, "a test")
    messages: list[weakref.ref[torch.Tensor]] = []

    def hops() -> None:
        sent, received = torch.zeros(1, 1), torch.zeros(1, 1)
        messages.extend(map(weakref.ref, (sent, received)))
        exchange.start([(1, sent)], received, [(2, 1)]).wait()

    def enter(stream: Any) -> Any:
        entered.append(stream)
        return nullcontext()

    with fake_cuda.fake_cuda(), mock.patch.object(torch.cuda, "stream", enter):
        end = exchange.beside(hops, torch.device("cuda"))
        assert all(message() is not None for message in messages)
        end()
    assert not any(message() is not None for message in messages)
    # The stream waits for what was computed before, and is waited for.
    (beside, _), (_, awaited) = ordered
    assert entered == [beside] == [awaited]


def test_computation_hides_hops_beside_it(posted: list[int]) -> None:
    """The clock counts what is left of them at their end."""
    clock = StepClock(CPU)
    for hidden in (True, False):
        exchange, arrived = clock.exchange(None, "a test"), threading.Event()

        def hops(exchange: Exchange = exchange, arrived: threading.Event = arrived) -> None:
            send(exchange, 1, 2)
            arrived.set()

        end = exchange.beside(hops, CPU)
        if hidden:
            assert arrived.wait(60)
        end()
        assert (clock.cut().seconds()[EXCHANGE] < TRAVEL_S) == hidden
        send(exchange, 1)
        assert clock.cut().seconds()[EXCHANGE] >= TRAVEL_S
