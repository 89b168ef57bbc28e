"""Nodes on one machine: network namespaces with links of limited rate, and ranks with a share of a core. Linux, as root.

Every node is a network namespace with one link to a bridge, limited by `tc tbf` in both directions; ranks of one node use its
loopback. Every rank has a control group with a CPU quota. Names contain the process id, so that concurrent runs do not clash.
Everything is removed at the end, unless the run is killed by SIGKILL (see `ip netns list` and /sys/fs/cgroup then).
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

PREFIX = "longctx-bench-"  # of names of namespaces and control groups; followed by the process id
PORT = 29500
PACKET, LARGE_PACKET = 1500, 62_000  # bytes
PERIOD_US = 10_000
MESSAGES = "messages"
"""Group without a limit, of the threads that do not compute."""


class ClusterError(Exception):
    """Raised if this machine cannot run the benchmark, or a run fails."""


def command(*words: str) -> str:
    """Runs a short command and returns its output. Raises ClusterError with its error output if it fails."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise ClusterError(f"`{shlex.join(words)}` failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def refuse_impossible(ranks: int = 0, share: float = 0.0) -> None:
    """Raises ClusterError if this machine cannot make namespaces, or has not `share` of a core for each rank."""
    if os.geteuid() != 0:
        raise ClusterError("creating network namespaces needs root")
    for tool, package in (("ip", "iproute2"), ("tc", "iproute2"), ("nsenter", "util-linux")):
        if shutil.which(tool) is None:
            raise ClusterError(f"`{tool}` not found: install it (apt-get install {package})")
    cores = os.cpu_count() or 1
    if ranks * share > cores:
        raise ClusterError(f"{ranks} ranks with {share} cores each exceed the {cores} cores available: lower --share")


def group_root() -> Path:
    """Returns the root of control groups that limit CPU time: version 2, or the cpu controller of version 1."""
    root = Path("/sys/fs/cgroup")
    controllers = root / "cgroup.controllers"
    if controllers.exists() and "cpu" in controllers.read_text().split():
        return root
    if (root / "cpu").is_dir():
        return root / "cpu"
    raise ClusterError("no cpu controller under /sys/fs/cgroup, which is needed to limit ranks to a share of a core")


@contextmanager
def limited_groups(ranks: int, share: float) -> Iterator[list[Path]]:
    """Creates one control group per rank, with `share` of a core and priority over everything else on the machine."""
    top = group_root() / f"{PREFIX}{os.getpid()}"
    groups = [top / f"rank-{rank}" for rank in range(ranks)]
    quota = int(share * PERIOD_US)
    try:
        top.mkdir()
        if (top / "cpu.max").exists():  # version 2
            (top / "cgroup.subtree_control").write_text("+cpu")
            (top / "cpu.weight").write_text("10000")
            limits = {"cpu.max": f"{quota} {PERIOD_US}"}
        else:
            (top / "cpu.shares").write_text("262144")
            limits = {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": str(quota)}
        for group in groups:
            group.mkdir()
            for name, text in limits.items():
                (group / name).write_text(text)
        (top / MESSAGES).mkdir()
        yield groups
    except OSError as error:
        raise ClusterError(f"control groups cannot be created: {error}") from error
    finally:
        remove_groups(top)


def free_messages(groups: Sequence[Path]) -> None:
    """Moves all threads but the first of each process out of the limited groups: they send messages, read data and plan.

    Beside a GPU these do not wait until the GPU has computed. With control groups of version 2 nothing is moved.
    """
    for group in groups:
        tasks, processes = group / "tasks", group / "cgroup.procs"
        if not tasks.exists():
            return
        for thread in set(tasks.read_text().split()) - set(processes.read_text().split()):
            with suppress(OSError):  # it has ended
                (group.parent / MESSAGES / "tasks").write_text(thread)


def remove_groups(top: Path) -> None:
    for group in [*top.glob("rank-*"), top / MESSAGES, top]:
        for _ in range(50):  # killed processes take a moment to leave the group
            with suppress(OSError):
                group.rmdir()
            if not group.exists():
                break
            time.sleep(0.1)


@dataclass(frozen=True)
class Cluster:
    """Namespaces as nodes, with their IP addresses."""

    namespaces: Sequence[str]
    addresses: Sequence[str]

    def torchrun(
        self,
        words: Sequence[str],
        per_node: int,
        groups: Sequence[Path],
        timeout_s: float,
        module: Sequence[str] = ("longctx",),
    ) -> None:
        """Runs `longctx WORDS` on all ranks, with their output. Raises ClusterError if it fails or exceeds the timeout.

        Without `groups` ranks share the cores. `module` is run instead of longctx, with its own first arguments.
        """
        entry = f"exec {shlex.join([sys.executable, '-m', *module, *words])}"
        if groups:  # every rank enters its control group (0: the writing process) before Python starts
            entry = f"echo 0 > {groups[0].parent}/rank-$RANK/cgroup.procs && {entry}"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "PYTHONUNBUFFERED": "1"}
        started: list[subprocess.Popen[bytes]] = []
        try:
            for node, namespace in enumerate(self.namespaces):
                launcher = [
                    # `ip netns exec` would hide the control groups.
                    *("nsenter", f"--net=/run/netns/{namespace}", sys.executable, "-m", "torch.distributed.run"),
                    *("--nnodes", str(len(self.namespaces)), "--node-rank", str(node), "--nproc-per-node", str(per_node)),
                    *("--rdzv-backend", "static", "--master-addr", self.addresses[0], "--master-port", str(PORT)),
                    *("--no-python", "sh", "-c", entry),
                ]
                started.append(subprocess.Popen(launcher, env=environment, start_new_session=True))
            deadline = time.monotonic() + timeout_s
            while None in (codes := [process.poll() for process in started]) and not any(codes):
                if time.monotonic() > deadline:
                    raise ClusterError(f"`longctx {words[0]}` took longer than {timeout_s:.0f} s")
                free_messages(groups)
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
            raise ClusterError(f"`longctx {words[0]}` failed on node(s) {', '.join(failed)}")


@contextmanager
def linked_namespaces(nodes: int, bytes_per_s: float, inside_bytes_per_s: float | None = None) -> Iterator[Cluster]:
    """Creates namespaces on a bridge (in another namespace), with links limited to `bytes_per_s` in each direction.

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
            command("ip", "link", "add", port, "netns", hub, "type", "veth", "peer", "name", "eth0", "netns", name)
            command("ip", "-n", hub, "link", "set", port, "master", "bridge", "up")
            command("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            command("ip", "-n", name, "link", "set", "eth0", "up")
            command("ip", "-n", name, "link", "set", "lo", "up")
            packet = PACKET if inside_bytes_per_s is None else LARGE_PACKET
            for place, device in ((name, "lo"), (name, "eth0"), (hub, port)):
                if packet == LARGE_PACKET:  # a large one is as much work for the host as a small one
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
    # Half a millisecond, or ten small packets. A full bucket is sent at once after every pause: a larger one would make the
    # many short exchanges of a step up to a quarter faster than the rate. Packets larger than the bucket are dropped.
    burst = max(16_384, packet + 1000, int(bytes_per_s * 0.0005))
    # A queue that never overflows: networks of GPU clusters are lossless under congestion, and TCP would back off.
    limits = ("rate", f"{int(bytes_per_s * 8)}bit", "burst", str(burst), "limit", str(256 << 20))
    command("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *limits)


def kill_inside(namespace: str) -> None:
    """Kills all processes in a namespace created by this run."""
    for number in command("ip", "netns", "pids", namespace).split():
        with suppress(ProcessLookupError):
            os.kill(int(number), signal.SIGKILL)
