"""The cluster of namespaces: arithmetic and tables everywhere; links, training and cleaning up
where root may make it."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import cluster
import namespaces

pytestmark = pytest.mark.slow

SCRIPT = Path(cluster.__file__)


def can_make_namespaces() -> bool:
    if (
        os.name != "posix"
        or os.geteuid() != 0
        or not all(map(shutil.which, ("ip", "tc", "nsenter")))
    ):
        return False
    name = f"{namespaces.PREFIX}{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "delete", name], check=True)
    return made


needs_namespaces = pytest.mark.skipif(
    not can_make_namespaces(), reason="needs root, iproute2 and network namespaces"
)


def names_of(number: int) -> list[str]:
    """What a process of that number has made and not removed."""
    listed = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [line.split()[0] for line in listed if line.startswith(f"{namespaces.PREFIX}{number}-")]


@pytest.mark.parametrize(
    ("change", "message"), [({"tools": False}, "apt-get install"), ({"user": 1}, "root")]
)
def test_what_the_machine_cannot_do(
    change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: change.get("user", 0))
    monkeypatch.setattr(shutil, "which", lambda tool: tool if change.get("tools", True) else None)
    with pytest.raises(namespaces.ClusterError, match=message):
        namespaces.refuse_impossible()


@pytest.mark.slow
@needs_namespaces
def test_links_carry_their_rate_and_not_more() -> None:
    rate, size = 4e6, 6_000_000
    receive = (
        "import socket; c = socket.create_server(('10.77.0.1', 7)).accept()[0]; n = "
        f"{size}\nwhile n: n -= len(c.recv(n))"
    )
    send = (
        "import socket; c = socket.create_connection(('10.77.0.1', 7)); "
        f"c.sendall(bytes({size})); c.shutdown(1); c.recv(1)"
    )
    with cluster.linked_namespaces(2, rate) as made:
        enter = [
            ["nsenter", f"--net=/run/netns/{name}", sys.executable, "-c"]
            for name in made.namespaces
        ]
        receiver = subprocess.Popen([*enter[0], receive])
        try:
            time.sleep(1.0)
            began = time.perf_counter()
            subprocess.run([*enter[1], send], timeout=600, check=True)
            seconds = time.perf_counter() - began
            assert receiver.wait(timeout=600) == 0
        finally:
            receiver.kill()
        assert len(names_of(os.getpid())) == 3
    assert size / rate * 0.9 < seconds < size / rate * 2
    assert names_of(os.getpid()) == []


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_after_an_interrupt(number: signal.Signals, tmp_path: Path) -> None:
    words = [sys.executable, str(SCRIPT), "--out", str(tmp_path / "cluster-x.json")]
    running = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        ranks: list[str] = []
        deadline = time.monotonic() + 600
        while len(ranks) < 4 and time.monotonic() < deadline and running.poll() is None:
            time.sleep(0.5)
            nodes = [name for name in names_of(running.pid) if "-node" in name]
            ranks = [
                number
                for name in nodes
                for number in namespaces.command("ip", "netns", "pids", name).split()
            ]
        assert len(ranks) >= 4, "all ranks run"
        running.send_signal(number)
        assert running.wait(timeout=600) == 130
        assert names_of(running.pid) == []
        assert not any(Path(f"/proc/{rank}").exists() for rank in ranks), "no rank runs on"
    finally:
        running.kill()
        running.communicate()
    assert not list(tmp_path.iterdir())
