"""Nodes on one machine: network namespaces with links of limited rate. Linux, as root.

Every node is a network namespace with one link to a bridge, limited by `tc tbf` in both directions;
ranks of one node use its loopback. Names contain the process id, so that concurrent runs do not
clash. Everything is removed at the end, unless the run is killed by SIGKILL (see `ip netns list`
then).
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

PREFIX = "longctx-bench-"  # of names of namespaces; followed by the process id
PORT = 29500
PACKET, LARGE_PACKET = 1500, 62_000  # bytes


class ClusterError(Exception):
    """Raised if this machine cannot run the benchmark, or a run fails."""


def command(*words: str) -> str:
    """Runs a short command and returns its output. Raises ClusterError with its error output if it
    fails."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise ClusterError(
            f"`{shlex.join(words)}` failed: {done.stderr.strip() or done.stdout.strip()}"
        )
    return done.stdout


def refuse_impossible() -> None:
    """Raises ClusterError if this machine cannot make namespaces."""
    if os.geteuid() != 0:
        raise ClusterError("creating network namespaces needs root")
    for tool, package in (("ip", "iproute2"), ("tc", "iproute2"), ("nsenter", "util-linux")):
        if shutil.which(tool) is None:
            raise ClusterError(f"`{tool}` not found: install it (apt-get install {package})")


@dataclass(frozen=True)
class Cluster:
    """Namespaces as nodes, with their IP addresses."""

    namespaces: Sequence[str]
    addresses: Sequence[str]

    def torchrun(self, words: Sequence[str], per_node: int, timeout_s: float) -> None:
        """Runs `python -m WORDS` on all ranks, with their output. Raises ClusterError if it fails
        or exceeds the timeout."""
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
            "PYTHONUNBUFFERED": "1",
        }
        started: list[subprocess.Popen[bytes]] = []
        try:
            for node, namespace in enumerate(self.namespaces):
                launcher = [
                    *(
                        "nsenter",
                        f"--net=/run/netns/{namespace}",
                        sys.executable,
                        "-m",
                        "torch.distributed.run",
                    ),
                    *(
                        "--nnodes",
                        str(len(self.namespaces)),
                        "--node-rank",
                        str(node),
                        "--nproc-per-node",
                        str(per_node),
                    ),
                    *(
                        "--rdzv-backend",
                        "static",
                        "--master-addr",
                        self.addresses[0],
                        "--master-port",
                        str(PORT),
                    ),
                    *("-m", *words),
                ]
                started.append(subprocess.Popen(launcher, env=environment, start_new_session=True))
            deadline = time.monotonic() + timeout_s
            while None in (codes := [process.poll() for process in started]) and not any(codes):
                if time.monotonic() > deadline:
                    raise ClusterError(f"`{words[0]}` took longer than {timeout_s:.0f} s")
                time.sleep(0.2)
        finally:
            for process in started:  # launchers stop their ranks and wait for them
                process.terminate()
            for process in started:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=10)
            for namespace in self.namespaces:
                kill_inside(namespace)
            for process in started:
                process.kill()
                process.wait(timeout=10)
        failed = [str(node) for node, process in enumerate(started) if process.returncode]
        if failed:
            raise ClusterError(f"`{words[0]}` failed on node(s) {', '.join(failed)}")


@contextmanager
def linked_namespaces(
    nodes: int, bytes_per_s: float, inside_bytes_per_s: float | None = None
) -> Iterator[Cluster]:
    """Creates namespaces on a bridge (in another namespace), with links limited to `bytes_per_s` in
    each direction.

    `inside_bytes_per_s` limits all that the ranks of a node send to each other.
    """
    base = f"{PREFIX}{os.getpid()}"
    hub, names = f"{base}-hub", [f"{base}-node{node}" for node in range(nodes)]
    addresses = [f"10.77.0.{node + 1}" for node in range(nodes)]
    try:
        for name in (hub, *names):
            command("ip", "netns", "add", name)
        command("ip", "-n", hub, "link", "add", "bridge", "type", "bridge")
        command("ip", "-n", hub, "link", "set", "bridge", "up")
        for node, (name, address) in enumerate(zip(names, addresses, strict=True)):
            port = f"port{node}"
            command(
                "ip",
                "link",
                "add",
                port,
                "netns",
                hub,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                name,
            )
            command("ip", "-n", hub, "link", "set", port, "master", "bridge", "up")
            command("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            command("ip", "-n", name, "link", "set", "eth0", "up")
            command("ip", "-n", name, "link", "set", "lo", "up")
            packet = PACKET if inside_bytes_per_s is None else LARGE_PACKET
            for place, device in ((name, "lo"), (name, "eth0"), (hub, port)):
                # A large one is as much work for the host as a small one.
                if packet == LARGE_PACKET:
                    command("ip", "-n", place, "link", "set", device, "mtu", str(packet))
                rate = inside_bytes_per_s if device == "lo" else bytes_per_s
                if rate is not None:
                    limit(place, device, rate, packet)
        yield Cluster(names, addresses)
    finally:
        for name in (*names, hub):
            if Path(f"/run/netns/{name}").exists():  # deleting it also deletes its devices
                command("ip", "netns", "delete", name)


def limit(namespace: str, device: str, bytes_per_s: float, packet: int) -> None:
    """Limits the sending rate of a device for packets of at most `packet` bytes."""
    # Half a millisecond, or ten small packets. A full bucket is sent at once after every pause: a
    # larger one would make the many short exchanges of a step up to a quarter faster than the rate.
    # Packets larger than the bucket are dropped.
    burst = max(16_384, packet + 1000, int(bytes_per_s * 0.0005))
    # A queue that never overflows: networks of GPU clusters are lossless under congestion, and TCP
    # would back off.
    limits = ("rate", f"{int(bytes_per_s * 8)}bit", "burst", str(burst), "limit", str(256 << 20))
    command("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *limits)


def kill_inside(namespace: str) -> None:
    """Kills all processes in a namespace created by this run."""
    for number in command("ip", "netns", "pids", namespace).split():
        with suppress(ProcessLookupError):
            os.kill(int(number), signal.SIGKILL)
