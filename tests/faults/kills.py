"""Runs whose ranks are killed at random moments and started again until they end, compared with a
run that nobody disturbs.

`tests/training/test_kills.py` kills some, `python -m tests.faults.evidence kills soak` kills hundreds.
"""

import json
import os
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from longctx.training.saved import checkpoint
from tests.launched import LIMIT_S, Group, start
from tests.training_cases import steps_in

TIMEOUT_S = 60.0
"""Of messages between ranks, and for ranks to join."""
SETTINGS = (
    "--model.overrides.hidden_size=32 --model.overrides.intermediate_size=64 "
    "--model.overrides.num_hidden_layers=1 --model.overrides.num_attention_heads=2 "
    "--model.overrides.num_key_value_heads=1 --model.overrides.head_dim=16 --model.vocab_size=257 "
    "--batch.global_tokens=700 "
    "--batch.tokens_per_rank=400 --data.max_length=350 --train.device=cpu --log.tensorboard=false "
    f"--train.timeout_s={TIMEOUT_S}"
).split()
START, TRAINING, SAVING = "before the first step", "in training", "while a checkpoint is written"
UNDISTURBED = "a start without a fault"


def last_step(run: Path) -> int:
    """Returns the last step in metrics.jsonl, of which only the end is read."""
    try:
        with (run / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            lines = file.read().split(b"\n")
        return int(json.loads(lines[-2])["step"])
    except (FileNotFoundError, IndexError):
        return 0


def is_saving(run: Path) -> bool:
    return any(run.glob("checkpoints/*.partial"))


def is_stepping(group: Group) -> bool:
    """Returns whether a run has done a step since this start."""
    return " tok/s/rank " in group.said


def is_close(
    found: list[tuple[int, float, float]], expected: list[tuple[int, float, float]]
) -> bool:
    """Returns whether steps and losses are the same but for the order of sums, which depends on the
    number of ranks."""
    pairs = zip(found, expected, strict=True)
    return len(found) == len(expected) and all(
        a[0] == b[0] and abs(a[1] / b[1] - 1) < 1e-4 for a, b in pairs
    )


def newest_step(run: Path) -> int:
    found, damaged = checkpoint.newest(run)
    assert not [problem for problem in damaged if ".partial" not in problem], damaged
    return 0 if found is None else found.step


def result(run: Path) -> tuple[list[tuple[int, float, float]], dict[str, str], dict[str, Any]]:
    """Returns what a finished run leaves: losses and norms of its steps, checksums of the tensors,
    the position in the data."""
    found, _ = checkpoint.newest(run)
    assert found is not None and not found.damage()
    sums = {name: text for name, text in found.checksums.items() if name.endswith(".distcp")}
    return (
        [(step["step"], step["loss"], step["grad_norm"]) for step in steps_in(run)],
        sums,
        found.state,
    )


@dataclass
class Row:
    """What was counted of one kind of fault."""

    tried: int = 0
    lost: int = 0
    hangs: int = 0
    seconds: list[float] = field(default_factory=list)
    """Until the other ranks had ended."""

    @property
    def line(self) -> str:
        noticed = (
            f"{median(self.seconds):.2f} s, {max(self.seconds):.2f} s" if self.seconds else "–"
        )
        return (
            f"{self.tried} | {self.tried - self.lost - self.hangs} | {self.lost} | {self.hangs} "
            f"| {noticed}"
        )


class Killer:
    """Trains runs and kills their ranks. What was not as it should be is in `failures`."""

    def __init__(
        self,
        folder: Path,
        store: Path,
        seed: int,
        *,
        steps: int = 24,
        every: int = 2,
        attempts: int = 100,
    ) -> None:
        self.folder, self.store, self.random, self.steps, self.attempts = (
            folder,
            store,
            Random(seed),
            steps,
            attempts,
        )
        self.settings = [
            *SETTINGS,
            f"--data.store={store}",
            f"--train.steps={steps}",
            f"--checkpoint.every={every}",
        ]
        self.rows: dict[str, Row] = {}
        self.failures: list[str] = []
        self.whole: dict[int, Any] = {}
        self.runs = 0

    @property
    def tried(self) -> int:
        return sum(row.tried for row in self.rows.values())

    def arguments(self, run: Path) -> list[str]:
        return ["train", *self.settings, f"--train.run_dir={run}", "--resume-if-any"]

    def reference(self, ranks: int) -> Any:
        """Returns the result of a run that nobody disturbs."""
        if ranks not in self.whole:
            run = self.folder / f"whole-{ranks}"
            group = start([self.arguments(run)] * ranks, self.folder / f"{run.name}-said")
            assert (
                not group.end(LIMIT_S * max(1, self.steps / 50)) and group.codes == [0] * ranks
            ), group.said
            self.whole[ranks] = result(run)
            assert len(self.whole[ranks][0]) == self.steps
        return self.whole[ranks]

    def run(
        self,
        ranks: Sequence[int],
        most: int,
        disturb: Callable[[Path, Group, bool], str | None] | None = None,
    ) -> None:
        """Trains a run, on one of the numbers of `ranks` after every start, with up to `most`
        kills."""
        self.runs += 1
        run, killed, saved = self.folder / f"run-{self.runs}", Counter[str](), 0
        self.reference(ranks[0])
        for attempt in range(self.attempts):
            count = self.random.choice(ranks)
            group = start([self.arguments(run)] * count, self.folder / f"run-{self.runs}-{attempt}")
            kind = (
                (disturb or self.kill)(run, group, len(ranks) > 1)
                if killed.total() < most
                else None
            )
            if group.end(LIMIT_S * max(1, self.steps / 50)):
                self.fail(kind or UNDISTURBED, "it hangs", group, hang=True)
            begun = re.search(r"from step (\d+)|from new weights", group.said)
            if begun is not None and int(begun[1] or 0) < saved:
                self.fail(
                    kind or UNDISTURBED,
                    f"it began anew, but a checkpoint of step {saved} was complete",
                    group,
                )
            if kind is not None:
                killed[kind] += 1
            elif any(group.codes):
                self.fail(UNDISTURBED, f"ended with {group.codes}", group)
                break
            if len(steps_in(run)) == self.steps and not any(group.codes):
                break
            saved = newest_step(run)
        self._compare(run, ranks, killed)
        shutil.rmtree(run, ignore_errors=True)

    def kill(self, run: Path, group: Group, changes: bool) -> str | None:
        """Sends a signal at a random moment. Returns the kind of fault, or None if the run was over
        before."""
        random, ranks = self.random, len(group.processes)
        when = random.choices((START, TRAINING, SAVING), (1, 4, 4))[0]
        if when == START:
            time.sleep(random.uniform(0, 2))
        elif not group.until(lambda: is_stepping(group)):
            return None
        if when == TRAINING:
            until = last_step(run) + random.randrange(3)
            group.until(lambda: last_step(run) >= until)
            time.sleep(random.uniform(0, 0.1))
        elif when == SAVING:
            for _ in range(random.randrange(1, 3)):
                group.until(lambda: not is_saving(run))
                group.until(lambda: is_saving(run))
            time.sleep(random.uniform(0, 0.05))
        number = random.choices((signal.SIGKILL, signal.SIGTERM), (9, 1))[0]
        alone = number == signal.SIGKILL and when != START and ranks > 1 and random.random() < 0.6
        victims = [random.randrange(ranks)] if alone else [*range(ranks)]
        if len(group.running) < ranks:
            return None
        when = START if not is_stepping(group) else SAVING if is_saving(run) else TRAINING
        began = time.monotonic()
        group.send(number, victims)
        what = (
            "SIGTERM to all ranks"
            if number == signal.SIGTERM
            else f"SIGKILL of {'one rank' if alone else 'all ranks'}"
        )
        kind = f"{what}, {when}" + ", 1 to 3 ranks in turn" * changes
        row = self.rows.setdefault(kind, Row())
        if alone and not group.end(TIMEOUT_S + LIMIT_S):
            row.seconds.append(time.monotonic() - began)
            others = [code for rank, code in enumerate(group.codes) if rank not in victims]
            if any(others) and f"rank {victims[0]} gives no sign of life" not in group.said:
                self.fail(kind, "the others ended without naming it", group)
        return kind

    def _compare(self, run: Path, ranks: Sequence[int], killed: Counter[str]) -> None:
        """Counts the faults of a finished run, as lost unless its result is that of a run that
        nobody disturbed."""
        expected = self.reference(ranks[0])
        found = result(run) if newest_step(run) else ([], {}, {})
        same = found == expected if len(ranks) == 1 else is_close(found[0], expected[0])
        if not same:
            self.failures.append(f"{run} is not the run that nobody disturbed: {killed}")
        for kind, count in killed.items():
            self.rows[kind].tried += count
            self.rows[kind].lost += 0 if same else count

    def fail(self, kind: str, what: str, group: Group, *, hang: bool = False) -> None:
        self.failures.append(f"{kind}: {what}\n{group.said[-3000:]}\n")
        row = self.rows.setdefault(kind, Row())
        row.hangs, row.lost = row.hangs + hang, row.lost + (not hang)

    @property
    def table(self) -> str:
        total = Row(
            *(
                sum(getattr(row, name) for row in self.rows.values())
                for name in ("tried", "lost", "hangs")
            )
        )
        total.seconds = [seconds for row in self.rows.values() for seconds in row.seconds]
        rows = [*sorted(self.rows.items()), ("all", total)]
        head = (
            "| fault | tried | survived | lost | hangs | until the others ended: median, longest |"
        )
        return "\n".join(
            [head, "|---" * 6 + "|", *(f"| {kind} | {row.line} |" for kind, row in rows), ""]
        )


class Soak(Killer):
    """A long run with a kill every `between` steps or so, and one without, whose memory, open files
    and threads are watched."""

    def __init__(
        self, folder: Path, store: Path, seed: int, *, steps: int = 2000, between: int = 50
    ) -> None:
        super().__init__(folder, store, seed, steps=steps, every=10, attempts=4 * steps // between)
        self.between = between
        self.samples: list[tuple[int, int, int]] = []
        """Resident KiB, open files and threads of rank 0: every 10 steps without kills, and before
        each kill."""

    def sample(self, group: Group) -> None:
        process = Path("/proc", str(group.processes[0].pid))
        with suppress(OSError, KeyError):  # a process that is ending has no memory
            status = dict(
                line.split(":", 1) for line in (process / "status").read_text().splitlines()
            )
            files = len([*(process / "fd").iterdir()])
            self.samples.append((int(status["VmRSS"].split()[0]), files, int(status["Threads"])))

    def change(self, name: str, kills: int) -> str:
        """Returns a line of the table: medians of the first and the last quarter of the samples,
        without the first tenth."""
        samples = self.samples[len(self.samples) // 10 :]
        quarter = max(1, len(samples) // 4)
        columns = [
            [median(values) for values in zip(*part, strict=True)]
            for part in (samples[:quarter], samples[-quarter:])
        ]
        memory, files, threads = (
            f"{before:.6g} → {after:.6g}" for before, after in zip(*columns, strict=True)
        )
        self.samples = []
        return f"| {name} | {self.steps:,} | {kills} | {memory} | {files} | {threads} |"

    def both(self) -> list[str]:
        """Trains both runs. Returns the lines of the table."""
        run = self.folder / "whole-2"
        group = start([self.arguments(run)] * 2, self.folder / "whole-2-said")
        for step in range(5, self.steps, 10):
            group.until(lambda step=step: last_step(run) >= step)
            self.sample(group)
        assert not group.end() and group.codes == [0, 0], group.said
        self.whole[2] = result(run)
        lines = [self.change("undisturbed", 0)]
        self.run([2], self.steps, self._after_some_steps)
        return [*lines, self.change("with kills", self.tried)]

    def _after_some_steps(self, run: Path, group: Group, changes: bool) -> str | None:
        wanted = self.random.randrange(self.between // 2, self.between * 3 // 2)
        group.until(lambda: is_stepping(group))
        begun = last_step(run)
        group.until(lambda: last_step(run) >= begun + wanted, LIMIT_S * 10)
        self.sample(group)
        return self.kill(run, group, changes)
