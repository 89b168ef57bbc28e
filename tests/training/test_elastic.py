"""torchrun goes on with the nodes that are left when one dies, and with one more when it comes
back."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from longctx.training.metrics import StepMetrics
from tests.launched import free_port
from tests.training_cases import SMALL, make_store, steps_in, train
from tests.workers import Workers

STEPS, LIMIT_S = 3000, 400
SETTINGS = [
    "batch.tokens_per_rank=750",
    f"train.steps={STEPS}",
    "checkpoint.every=5",
    "checkpoint.keep=null",
]
TIMES = "join_timeout=300,read_timeout=300,last_call_timeout=20,keep_alive_interval=3,keep_alive_max_attempt=6"


def children(pid: int) -> list[int]:
    """All processes below `pid`: torchrun's workers are in sessions of their own and outlive a
    killed agent."""
    found = [
        int(line)
        for line in subprocess.run(
            ["pgrep", "-P", str(pid)], capture_output=True, text=True
        ).stdout.split()
    ]
    return [*found, *(grandchild for child in found for grandchild in children(child))]


class Agent:
    """One node: a torchrun on this machine, with its output in a file."""

    def __init__(self, name: str, folder: Path, port: int) -> None:
        settings = [
            f"--{setting}" for setting in [*SMALL, *SETTINGS, f"data.store={folder / 'store'}"]
        ]
        self.output = folder / f"{name}.txt"
        command = [
            *(
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nnodes",
                "1:2",
                "--nproc-per-node",
                "1",
                "--max-restarts",
                "3",
            ),
            *(
                "--rdzv-backend",
                "c10d",
                "--rdzv-id",
                "elastic",
                "--rdzv-endpoint",
                f"localhost:{port}",
            ),
            *(
                "--rdzv-conf",
                f"is_host={int(name == 'first')},{TIMES}",
                "-m",
                "longctx",
                "train",
                *settings,
            ),
            *(f"--train.run_dir={folder / 'run'}", "--resume-if-any"),
        ]
        # Without it an agent that joins later waits for an address that the others told each other
        # before.
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        with self.output.open("wb") as stream:
            self.process = subprocess.Popen(
                command, env=environment, stdout=stream, stderr=stream, start_new_session=True
            )

    @property
    def said(self) -> str:
        return self.output.read_text()

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline, self.said
            time.sleep(0.05)

    def kill(self) -> None:
        for pid in [self.process.pid, *children(self.process.pid)]:
            os.kill(pid, signal.SIGKILL)
        self.process.wait()


@pytest.mark.slow
def test_a_node_leaves_and_joins_again(workers: Workers, tmp_path: Path) -> None:
    """Losses are those of one process, and those of a run whose number of ranks was changed by hand
    bit by bit."""
    store, run, port = make_store(tmp_path), tmp_path / "run", free_port()
    first, second = agents = [Agent(name, tmp_path, port) for name in ("first", "second")]

    def begun(ranks: int) -> list[int]:
        """Steps after which the run was begun on this number of ranks."""
        found = re.findall(r"on (\d) ranks.*?, from (?:step (\d+)|new weights)", first.said)
        return [int(step or 0) for count, step in found if int(count) == ranks]

    try:
        first.until(lambda: len(steps_in(run)) >= 12)
        assert begun(2) == [0], first.said
        second.kill()
        first.until(lambda: len(begun(1)) == 1)
        first.until(lambda: len(steps_in(run)) >= begun(1)[0] + 7)
        agents.append(Agent("again", tmp_path, port))
        first.until(lambda: len(begun(2)) == 2)
        first.until(lambda: len(steps_in(run)) >= begun(2)[1] + 7)
        first.process.send_signal(signal.SIGTERM)
        first.process.wait(timeout=LIMIT_S)
    finally:
        for agent in agents:
            if agent.process.poll() is None:
                agent.kill()
    steps, (left,), (_, joined) = steps_in(run), begun(1), begun(2)
    assert [step["step"] for step in steps] == [*range(1, len(steps) + 1)]
    assert 10 <= left < joined
    alone: list[StepMetrics] = workers.run(
        train, 1, store, tmp_path / "alone", SETTINGS, len(steps)
    )[0]
    assert [step["loss"] for step in steps] == pytest.approx(
        [metrics.loss for metrics in alone], rel=1e-4
    )
    by_hand = tmp_path / "by hand"
    shutil.copytree(
        run / "checkpoints" / f"step-{left:06d}", by_hand / "checkpoints" / f"step-{left:06d}"
    )
    changed: list[StepMetrics] = workers.run(
        train, 1, store, by_hand, SETTINGS, joined - left, True
    )[0]
    assert [metrics.loss for metrics in changed] == [step["loss"] for step in steps[left:joined]]
