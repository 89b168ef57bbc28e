"""The cluster of namespaces: arithmetic and tables everywhere; links, training and cleaning up where root may make it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import cluster
import namespaces

SCRIPT = Path(cluster.__file__)


def can_make_namespaces() -> bool:
    if os.name != "posix" or os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc", "nsenter"))):
        return False
    name = f"{namespaces.PREFIX}{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "delete", name], check=True)
    return made


needs_namespaces = pytest.mark.skipif(not can_make_namespaces(), reason="needs root, iproute2 and network namespaces")


def names_of(number: int) -> list[str]:
    """What a process of that number has made and not removed."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.splitlines()
    groups = [path.name for path in namespaces.group_root().glob(f"{namespaces.PREFIX}{number}*")]
    return [line.split()[0] for line in listed if line.startswith(f"{namespaces.PREFIX}{number}-")] + groups


def test_rates_follow_from_the_h100() -> None:
    rate, facts = cluster.network_rate("hardware", 18e9)
    assert rate == pytest.approx(4e6), "18,000 FLOP a number, 4 bytes a number"
    # By hand: 2 layers of 4 projections and 3 matrices of the MLP, the norms, and the tied embedding, 6 FLOP each;
    # 2 layers × (K, V) × 2 heads × 32 × 3 passes.
    parameters = 2 * (256 * 32 * (2 * 8 + 2 * 2) + 3 * 256 * 768 + 2 * 256) + 257 * 256 + 256
    assert facts["flop_per_kv_number"] == pytest.approx(6 * parameters / 768)
    llama = 6 * 8.03e9 / 196_608
    assert cluster.network_rate("workload", 18e9)[0] == pytest.approx(4e6 * llama / (6 * parameters / 768))


def test_documents_have_the_lengths_of_the_mix(tmp_path: Path) -> None:
    from longctx.comparison.mixes import load_mix
    from longctx.data.store import Store

    lengths = cluster.make_lengths("magi_192k", 64, 1000)
    store = Store.open(cluster.harness.make_store(lengths, tmp_path))
    drawn = [min(1000, max(2, length // 64)) for length in load_mix("magi_192k").draw(cluster.DOCUMENTS, 0)]
    assert store.lengths.tolist() == lengths == drawn
    assert max(drawn) == 1000


@pytest.mark.parametrize(
    ("change", "message"), [({"share": 1e6}, "lower --share"), ({"tools": False}, "apt-get install"), ({"user": 1}, "root")]
)
def test_what_the_machine_cannot_do(change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: change.get("user", 0))
    monkeypatch.setattr(shutil, "which", lambda tool: tool if change.get("tools", True) else None)
    with pytest.raises(namespaces.ClusterError, match=message):
        namespaces.refuse_impossible(ranks=4, share=change.get("share", 0.01))


@pytest.mark.slow
@needs_namespaces
def test_links_carry_their_rate_and_not_more() -> None:
    rate, size = 4e6, 6_000_000
    receive = f"import socket; c = socket.create_server(('10.77.0.1', 7)).accept()[0]; n = {size}\nwhile n: n -= len(c.recv(n))"
    send = f"import socket; c = socket.create_connection(('10.77.0.1', 7)); c.sendall(bytes({size})); c.shutdown(1); c.recv(1)"
    with cluster.linked_namespaces(2, rate) as made:
        enter = [["nsenter", f"--net=/run/netns/{name}", sys.executable, "-c"] for name in made.namespaces]
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
def test_real_training_on_two_nodes(tmp_path: Path) -> None:
    profile = SCRIPT.parents[1] / "longctx" / "planning" / "profiles" / "cpu-2core.yaml"
    arguments = Namespace(
        nodes=2,
        ranks_per_node=1,
        network="workload",
        share=0.4,
        rate=None,
        settings=[],
        mix="wlb_128k",
        scale=256,
        tokens_per_rank=256,
        global_tokens=600,
        steps=2,
        warmup=1,
        modes="auto,static:2",
        profile=profile,
        timeout=600,
    )
    with ExitStack() as stack:
        result = cluster.run(arguments, stack)
    assert names_of(os.getpid()) == []
    measured = json.loads(json.dumps(result))["measured"]
    assert measured["ranks"] == 2 and measured["losses_equal"]
    assert [len(mode["steps"]) for mode in measured["modes"]] == [2, 2]
    assert "| 2 × 1, workload: " in cluster.page([result])


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_after_an_interrupt(number: signal.Signals, tmp_path: Path) -> None:
    words = [sys.executable, str(SCRIPT), "--share", "0.2", "--out", str(tmp_path / "cluster-x.json")]
    running = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        ranks: list[str] = []
        deadline = time.monotonic() + 600
        while len(ranks) < 4 and time.monotonic() < deadline and running.poll() is None:
            time.sleep(0.5)
            groups = namespaces.group_root().glob(f"{namespaces.PREFIX}{running.pid}/rank-*/cgroup.procs")
            started = any(name.endswith("node1") for name in names_of(running.pid))
            ranks = [number for group in groups for number in group.read_text().split()] if started else []
        assert len(ranks) >= 4, "all ranks run"
        running.send_signal(number)
        assert running.wait(timeout=600) == 130
        assert names_of(running.pid) == []
        assert not any(Path(f"/proc/{rank}").exists() for rank in ranks), "no rank runs on"
    finally:
        running.kill()
        running.communicate()
    assert not list(tmp_path.iterdir())
