"""What a machine does to runs: a rank that stands still, a full disk, folders that cannot be
written, a cut link; and two preparations of one store at once. Mounts and namespaces need root on
Linux."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.namespaces import ClusterError, command, linked_namespaces
from longctx.checksums import damage
from longctx.data.store.manifest import Manifest
from longctx.training.saved import checkpoint
from tests.faults.kills import Killer, Row, last_step, result
from tests.launched import Group, start

PATIENCE_S = 15.0
"""`train.timeout_s` of runs whose ranks stop answering."""
MARGIN_S = 30.0
"""Over it, on a machine that is busy otherwise."""


def may_mount() -> str:
    """Returns why nothing can be mounted here, or nothing."""
    if os.geteuid() != 0:
        return "mounting needs root"
    done = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"],
        capture_output=True,
        text=True,
    )
    return f"mounting fails: {done.stderr.strip()}" if done.returncode else ""


def may_link() -> str:
    """Returns why no namespaces can be linked here, or nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with linked_namespaces(2, 1e9):
            return ""
    except (ClusterError, OSError) as error:
        return f"namespaces cannot be linked: {error}"


def content(store: Path) -> dict[str, str]:
    """Returns the checksums of a store's documents and tokenizer. Raises an error if they are
    damaged."""
    found = {
        name: text
        for name, text in Manifest.load(store).checksums.items()
        if name.endswith(".arrow") or "tokenizer" in name
    }
    assert found and not any(damage(store / name, text) for name, text in found.items())
    return found


def made_read_only(folder: Path) -> bool:
    """Makes a mounted folder read-only, which is refused while a file in it is open for writing."""
    try:
        command("mount", "-o", "remount,bind,ro", str(folder))
    except ClusterError as error:
        if "busy" not in str(error):
            raise
        return False
    return True


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    command("mount", *options, str(folder))
    try:
        yield
    finally:
        command("umount", "--lazy", str(folder))


class Machine(Killer):
    """Trains runs on two ranks and disturbs them by other means than a kill."""

    def start(self, run: Path, name: str, *more: str, namespaces: tuple[str, ...] = ()) -> Group:
        arguments = [*self.arguments(run), *more]
        return start([arguments] * 2, self.folder / f"{run.name}-{name}", namespaces=namespaces)

    def _finish(self, kind: str, run: Path, namespaces: tuple[str, ...] = ()) -> None:
        """Starts a run again and counts whether it comes to the same end."""
        group = self.start(run, "again", namespaces=namespaces)
        if group.end():
            return self.fail(kind, "the start after it hangs", group, hang=True)
        if any(group.codes) or result(run) != self.reference(2):
            self.fail(kind, f"the start after it ended with {group.codes}, or elsewhere", group)

    def begin(self, kind: str) -> tuple[Row, Path]:
        self.runs += 1
        row = self.rows.setdefault(kind, Row())
        row.tried += 1
        return row, self.folder / f"disturbed-{self.runs}"

    def _under_way(self, run: Path, group: Group) -> None:
        """Waits until a random step of a run, and a random moment more."""
        until = self.random.randrange(1, self.steps // 2)
        group.until(lambda: last_step(run) >= until)
        time.sleep(self.random.uniform(0, 0.2))

    def _ended(self, kind: str, row: Row, group: Group, began: float) -> bool:
        """Waits for the ends of the ranks that are left, and counts a hang if they take longer than
        the timeout."""
        if group.end(PATIENCE_S + MARGIN_S):
            self.fail(kind, "they wait on", group, hang=True)
            return False
        row.seconds.append(time.monotonic() - began)
        if "longctx train: error" not in group.said:
            self.fail(kind, "they ended without a word", group)
        return True

    def standstill(self) -> None:
        """A rank stands still: the other ends after `train.timeout_s`."""
        kind = "SIGSTOP of a rank"
        row, run = self.begin(kind)
        group = self.start(run, "stopped", f"--train.timeout_s={PATIENCE_S}")
        self._under_way(run, group)
        rank, began = self.random.randrange(2), time.monotonic()
        group.send(signal.SIGSTOP, [rank])
        left = group.part(1 - rank)
        ended = self._ended(kind, row, left, began)
        group.send(signal.SIGKILL, [rank])
        group.end()
        if ended:
            self._finish(kind, run)

    def full_disk(self) -> None:
        """The disk is full after some checkpoints: the run says so, they are whole, and it goes on
        when there is room again."""
        kind = "a full disk"
        run = self.begin(kind)[1]
        self.reference(2)
        size = sum(file.stat().st_size for file in (self.folder / "whole-2" / "latest").rglob("*"))
        room = f"size={round(size * self.random.uniform(2.3, 8)) // 4096 * 4096}"
        with mounted(run, "-t", "tmpfs", "-o", room, "tmpfs"):
            group = self.start(run, "full", "--checkpoint.keep=null")
            if group.end():
                return self.fail(kind, "it hangs", group, hang=True)
            whole = [
                not checkpoint.of_step(run, step)[0].damage() for step in checkpoint.steps(run)
            ]
            if not any(group.codes) or "free disk space" not in group.said or not all(whole):
                return self.fail(
                    kind, f"ended with {group.codes}, whole checkpoints: {whole}", group
                )
            command("mount", "-o", "remount,size=100m", str(run))
            self._finish(kind, run)

    def read_only(self) -> None:
        """A folder becomes read-only, before the run or in it: the run says so, and goes on when it
        can be written again."""
        before = self.random.random() < 0.3
        kind = (
            "a run folder that cannot be written"
            if before
            else "a folder of checkpoints that cannot be written any more"
        )
        run = self.begin(kind)[1]
        folder = run if before else run / "checkpoints"
        folder.mkdir(parents=True)
        group = None
        if not before:
            group = self.start(run, "read-only")
            self._under_way(run, group)
        with mounted(folder, "--bind", str(folder)):
            if group:
                group.until(lambda: made_read_only(folder))
            else:
                assert made_read_only(folder)
            group = group or self.start(run, "read-only")
            if group.end():
                return self.fail(kind, "it hangs", group, hang=True)
            if not any(group.codes) or "Read-only file system" not in group.said:
                return self.fail(kind, f"ended with {group.codes}", group)
        self._finish(kind, run)

    def cut_link(self) -> None:
        """The link between two nodes is cut in training: both end after `train.timeout_s`, and go
        on once it is whole."""
        kind = "a cut link between two nodes"
        row, run = self.begin(kind)
        with linked_namespaces(2, 1e9) as cluster:
            group = self.start(
                run, "cut", f"--train.timeout_s={PATIENCE_S}", namespaces=tuple(cluster.namespaces)
            )
            self._under_way(run, group)
            began = time.monotonic()
            command("ip", "-n", cluster.namespaces[1], "link", "set", "eth0", "down")
            ended = self._ended(kind, row, group, began)
            command("ip", "-n", cluster.namespaces[1], "link", "set", "eth0", "up")
            if ended:
                self._finish(kind, run, tuple(cluster.namespaces))

    def _prepare(self, out: Path, name: str) -> Group:
        source = self.store.with_name("source")
        arguments = [
            "prepare",
            "--source",
            str(source),
            "--tokenizer",
            "bytes",
            "--workers",
            "1",
            "--out",
            str(out),
        ]
        return start([arguments], out.with_name(f"{out.name}-{name}"))

    def two_preparations(self) -> None:
        """Two preparations into one folder: a whole store is there afterwards, and one that did not
        make it says why."""
        kill = self.random.random() < 0.5
        kind = f"two preparations of a store at once{', one killed' * kill}"
        out = self.begin(kind)[1]
        groups = [self._prepare(out, "first")]
        time.sleep(self.random.uniform(0, 0.3))
        groups.append(self._prepare(out, "second"))
        if kill:
            time.sleep(self.random.uniform(0, 0.5))
            groups[self.random.randrange(2)].send(signal.SIGKILL, [0])
        if sum(group.end() for group in groups):
            return self.fail(kind, "one hangs", groups[0], hang=True)
        for group in groups:
            if group.codes == [2] and "another process is preparing" in group.said:
                continue
            if group.codes not in ([0], [-9]):
                return self.fail(kind, f"one ended with {group.codes}", group)
        if not out.exists():  # the one that was killed had the lock: the next one goes on
            groups = [self._prepare(out, "third")]
            groups[0].end()
        if content(out) != content(self.store):
            self.fail(kind, "the store is another one", groups[0])


FAULTS: dict[str, tuple[Callable[[], str], int]] = {
    "standstill": (lambda: "", 10),
    "full_disk": (may_mount, 15),
    "read_only": (may_mount, 15),
    "cut_link": (may_link, 5),
    "two_preparations": (lambda: "", 15),
}
"""By name of the method: why it cannot be tried here, and how often the long form tries it."""
