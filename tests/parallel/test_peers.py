"""Processes that die, stop or are stuck are named on the others, with host, step, micro-batch,
layer and pass."""

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, not in __all__

from longctx.parallel.peers import Peers
from tests import launched
from tests.marks import slow_unless
from tests.training.test_agreement import arguments
from tests.training_cases import make_store

HOST = re.escape(socket.gethostname())
FAST_S = 0.05


@contextmanager
def three(timeout_s: float = 600.0) -> Iterator[list[Peers]]:
    """Three processes, played by one."""
    server = TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    peers = [Peers(PrefixStore("test", server), rank, 3, timeout_s, FAST_S) for rank in range(3)]
    for rank, one in enumerate(peers):
        one.position = f"step {rank}".format
    time.sleep(5 * FAST_S)
    try:
        yield peers
    finally:
        for one in peers:
            one.close()


def test_a_silent_process_is_named_by_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    with three(timeout_s=1.0) as peers:
        peers[2].close()
        time.sleep(1.0)
        said = capsys.readouterr().err
        for rank in (0, 1):
            where = rf"rank {rank} on {HOST}, in step {rank}"
            assert re.search(
                rf"{where}: rank 2 gives no sign of life: .*; last in rank 2 on {HOST} in step 2\n",
                said,
            )
        assert "rank 0 gives" not in said and "rank 1 gives" not in said
        assert (
            peers[1]
            .report("peer closed")
            .startswith("rank 2 gives no sign of life: killed, stopped or cut off; last in")
        )


def test_pages_show_how_a_dead_rank_is_named(repository: Path) -> None:
    place = "step 412, micro-batch 1, attention last in layer 5, forward pass"
    with three(timeout_s=1.0) as peers:
        peers[2].position = lambda: place
        time.sleep(5 * FAST_S)
        peers[2].close()
        said = peers[0].report("peer closed").replace(socket.gethostname(), "node-7")
    line = f"longctx train: rank 0: {said}"
    shown = (repository / "docs" / "reliability.md").read_text("utf-8")
    assert f"```text\n{line}\n```" in shown, line
    short = (repository / "docs" / "troubleshooting.md").read_text("utf-8")
    (begins,) = re.findall(r"^    (longctx train: rank 0: .*) \.\.$", short, re.MULTILINE)
    assert line.startswith(begins)


def test_a_process_that_never_gave_a_sign_is_named_too() -> None:
    server = TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    peers = Peers(server, 0, 3, 600.0, FAST_S)
    other = Peers(server, 1, 3, 600.0, FAST_S)
    said = peers.report("closed by peer")
    other.close()
    assert said == "rank 2 gives no sign of life: killed, stopped or cut off; rank 2 never gave one"


def test_rank_0_is_watched_too(capsys: pytest.CaptureFixture[str]) -> None:
    with three(timeout_s=1.0) as peers:
        peers[0].close()
        time.sleep(1.0)
        assert (
            len(
                re.findall("rank [12] on .*: rank 0 gives no sign of life", capsys.readouterr().err)
            )
            == 2
        )
        assert "rank 0 gives no sign of life" in peers[2].report("peer closed")


def test_the_first_to_end_is_named() -> None:
    with three() as peers:
        assert peers[1].end("the disk is full") is not None
        assert (
            peers[2].report("closed by peer")
            == f"rank 1 on {socket.gethostname()} was the first to end, in step 1: the disk is full"
        )


def test_positions_of_all_if_all_live() -> None:
    with three() as peers:
        peers[1].position = peers[2].position
        time.sleep(3 * FAST_S)
        said = peers[0].report("timed out")
        host = socket.gethostname()
        assert (
            said
            == f"all processes give signs of life; last positions: rank 0 on {host} in step 0; "
            f"ranks 1 to 2 on {host} in step 2"
        )


def test_a_process_without_progress_says_where_all_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Well before its messages time out."""
    monkeypatch.setattr("longctx.parallel.peers.STUCK_SHARE", 0.02)
    with three(timeout_s=32.0) as peers:
        places = iter(range(100))
        peers[0].position = lambda: f"step {next(places)}"
        time.sleep(1.2)
    said = capsys.readouterr().err
    assert "rank 1 on" in said and "no progress for 1 s; last positions: rank 0 on" in said
    assert not re.search("rank 0 on .*: no progress", said)


def unreadable() -> str:
    raise RuntimeError("dictionary changed size during iteration")


def test_a_position_that_cannot_be_read_now_is_no_end(capsys: pytest.CaptureFixture[str]) -> None:
    """Containers change while the thread reads them; and a process that has no position yet makes
    progress."""
    with three(timeout_s=1.0) as peers:
        peers[1].position, peers[2].position = unreadable, None
        time.sleep(1.2)
        said = capsys.readouterr().err
        assert (
            "gives no sign of life" not in said and "rank 2 on" not in said.split("no progress")[0]
        )
        assert "rank 1 on" in said and "in between two layers: no progress" in said


def test_a_store_that_does_not_answer_is_not_waited_for_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process that holds the store stands still: the others waited for it as long as the
    timeout of the process group."""
    monkeypatch.setattr("longctx.parallel.peers.ANSWER_S", 3.0)
    port = launched.free_port()
    serve = "TCPStore('127.0.0.1', int(sys.argv[1]), 1, is_master=True, wait_for_workers=False)"
    code = (
        f"import sys, time; from torch.distributed import TCPStore; store = {serve}; print(); "
        "time.sleep(600)"
    )
    server = subprocess.Popen([sys.executable, "-c", code, str(port)], stdout=subprocess.PIPE)
    assert server.stdout
    try:
        server.stdout.readline()
        peers = Peers(
            TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False),
            0,
            1,
            600.0,
            FAST_S,
        )
        time.sleep(5 * FAST_S)
        server.send_signal(signal.SIGSTOP)
        time.sleep(3.0)
        began = time.monotonic()
        assert "the store of the run does not answer" in peers.report("timed out")
        assert time.monotonic() - began < 1.5
    finally:
        server.kill()
        server.wait()


def test_a_store_that_is_gone_is_said() -> None:
    server = TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, 1, is_master=False, wait_for_workers=False)
    peers = Peers(client, 0, 2, 600.0, FAST_S)
    time.sleep(3 * FAST_S)
    del server
    assert "the store of the run does not answer" in peers.report("closed by peer")


@pytest.mark.parametrize(
    ("how", "every"),
    slow_unless(
        lambda *case: case == (signal.SIGKILL, 1), [(signal.SIGKILL, 1), (signal.SIGSTOP, 1000)]
    ),
)
def test_the_survivors_of_a_run_name_the_one_that_is_gone(
    tmp_path: Path, how: signal.Signals, every: int
) -> None:
    """Within the timeout of 20 s, and the run folder says how to go on."""
    given = arguments(
        tmp_path,
        make_store(tmp_path),
        "train.steps=100000",
        f"checkpoint.every={every}",
        "train.timeout_s=20",
    )
    group, metrics = (
        launched.start([given] * 3, tmp_path / "output"),
        tmp_path / "run" / "metrics.jsonl",
    )
    assert group.until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 2), (
        group.said
    )
    began = time.monotonic()
    group.send(how, [2])
    survivors = group.part(0, 1)
    assert not survivors.end() and survivors.codes == [1, 1], group.said
    assert time.monotonic() - began < 20 + 15, (
        "the timeout, and some seconds to look for signs of life"
    )
    group.send(signal.SIGKILL, [2])
    group.end()
    for rank, text in enumerate(survivors.errors):
        place = (
            rf"rank 2 on {HOST} in step \d+, (micro-batch \d+, attention last in "
            r"\S.*|[a-z][a-z -]*( \d+)?)\n"
        )
        assert re.search(
            rf"longctx train: rank {rank}: rank 2 gives no sign of life: .*; last in {place}", text
        ), text[-2000:]
        assert "--resume continues after it" in text or every == 1000
