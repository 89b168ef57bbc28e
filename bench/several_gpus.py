"""What several GPUs gain: a ring over all of them beside one call, dynamic degrees beside the best
single one, and beside TRL's packing, each beside its prediction.

    python bench/several_gpus.py --gpus 8                  # minutes
    python bench/several_gpus.py --gpus 2 --smoke          # on CPU processes: tests the script

Documents are drawn from a published mix, cut at a length that every way can hold. The ring's
result is compared with float64, and its speed with that of one call of equal work. `longctx
measure` trains under dynamic degrees and under every single degree that holds all documents. TRL's
SFTTrainer trains an epoch with its packing, and with dynamic context parallelism. Predictions are
from PROFILE, which `longctx calibrate` measured before.

Rows are appended to OUT.csv as they are measured; those that it has are skipped. A claim holds if
what is measured reaches 90 % of what is predicted.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from harness import Table, device_facts, facts, make_store, options
from longctx.comparison.mixes import load_mix
from longctx.training.run_profile import default_profile
from training_rows import VOCABULARY

ENOUGH = 0.9
"""Share of a prediction that a measurement has to reach."""
ENDING_S = 30.0
"""Time for a command to end what it started."""
MIX = "wlb_128k"
COLUMNS = "what", "predicted", "measured", "holds", "failed"
RING, SPEED, SINGLE, TOKENS, PACKING = (
    "A ring over all GPUs has at most twice the error of one call",
    "A ring over all GPUs is as fast as predicted, beside one call",
    "Dynamic degrees gain what is predicted over the best single degree",
    "Tokens per second under dynamic degrees are as predicted",
    "In TRL's trainer they gain what is predicted over its packing",
)
CLAIMS = RING, SPEED, SINGLE, TOKENS, PACKING
"""What is measured, in the order of importance."""
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Sizes:
    """The model, documents of at most `longest` tokens, and steps of them; a ring's tokens per rank
    that are compared with float64, and those that are timed."""

    preset: str = "llama-3.2-1b"
    longest: int = 32_768
    tokens_per_rank: int = 16_384
    step_tokens: int = 524_288
    steps: int = 4
    checked: int = 512
    timed: int = 8_192
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"


SMOKE = Sizes("tiny", 512, 256, 2048, 2, 64, 256, 4, 2, 16, "float32")


class Task(NamedTuple):
    """What all parts need: number of GPUs, sizes, profile, and where files go."""

    gpus: int
    sizes: Sizes
    profile: str
    out: Path

    def lengths(self) -> list[int]:
        """Draws documents of all steps; the same on every machine."""
        sizes = self.sizes
        wanted = sizes.step_tokens * sizes.steps
        found = list[int]()
        drawn = iter(load_mix(MIX).draw(100_000, seed=0))
        while sum(found) < wanted:
            found.append(min(next(drawn), sizes.longest))
        return found

    def settings(self, folder: Path) -> list[str]:
        """Returns the settings of a run of longctx on these documents."""
        sizes = self.sizes
        return [
            f"--model.preset={sizes.preset}",
            f"--model.vocab_size={VOCABULARY}",
            f"--data.store={make_store(self.lengths(), folder)}",
            f"--batch.tokens_per_rank={sizes.tokens_per_rank}",
            f"--batch.global_tokens={sizes.step_tokens}",
            f"--train.dtype={sizes.dtype}",
            f"--context.profile={self.profile}",
        ]

    def degrees(self) -> list[int]:
        """Returns the powers of two, up to all GPUs, that hold the longest document."""
        least = -(-self.sizes.longest // self.sizes.tokens_per_rank)
        powers = [2**power for power in range(self.gpus.bit_length())]
        return [degree for degree in powers if least <= degree <= self.gpus]


def main() -> None:
    parser = options(__doc__, "several-gpus", minutes=10.0)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--profile", default="", help="of this machine (default: the shipped one)")
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    sizes = SMOKE if given.smoke else Sizes()
    about = facts("longctx", "torch", "trl", "transformers") | device_facts()
    profile = given.profile
    if not Path(profile).is_file():
        profile = default_profile("cuda" if torch.cuda.is_available() else "cpu", about["device"])
    task = Task(given.gpus, sizes, profile, given.out)
    about |= {"gpus": str(given.gpus), "profile": profile}
    table = Table(given.out.with_suffix(".csv"), COLUMNS, about)
    until = time.monotonic() + given.minutes * 60
    parts = {ring: (RING, SPEED), single_degree: (SINGLE, TOKENS), packing: (PACKING,)}
    for part, names in parts.items():
        if all(table.find(what=name, failed="") for name in names):
            continue
        try:
            rows = list(part(task, until))
        except Exception as error:  # any error: the other parts are measured all the same
            rows = [row_of(name, failed=f"{type(error).__name__}: {error}"[:300]) for name in names]
        for row in rows:
            table.append(row)
            print(json.dumps(row), flush=True)


def row_of(
    what: str, predicted: float | None = None, measured: float | None = None, failed: str = ""
) -> dict[str, Any]:
    """Returns a row of what should reach its prediction."""
    holds = None
    if predicted is not None and measured is not None:
        holds = measured >= ENOUGH * predicted
    return {
        "what": what,
        "predicted": predicted,
        "measured": measured,
        "holds": holds,
        "failed": failed,
    }


def ended(words: Sequence[str], until: float) -> None:
    """Runs a command until a deadline. Raises RuntimeError with the end of its output."""
    left = until - time.monotonic()
    if left < 1:
        raise RuntimeError("not started: no time was left")
    process = subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=left)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun then ends the processes of all ranks, which would hold GPUs
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=ENDING_S)
        process.kill()
        raise
    print(output, end="", flush=True)
    if process.returncode:
        last = " ".join(output.split())[-200:]
        raise RuntimeError(f"exit status {process.returncode}: {last}")


def on_ranks(task: Task, script: str, until: float) -> dict[str, Any]:
    """Runs a script of bench on a process per GPU. Returns what rank 0 wrote."""
    answer = Path(f"{task.out}-{script}.json")
    given = {**vars(task.sizes), "profile": task.profile, "answer": str(answer)}
    given["lengths"] = task.lengths()
    path = Path(f"{task.out}-{script}-task.json")
    path.write_text(json.dumps(given), encoding="utf-8")
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={task.gpus}"]
    ended([*launcher, str(HERE / f"{script}.py"), str(path)], until)
    found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return found


def ring(task: Task, until: float) -> Iterator[dict[str, Any]]:
    """Yields the rows of a ring over all GPUs."""
    found = on_ranks(task, "several_gpus_ring", until)
    yield {**row_of(RING, 2.0, found["errors"]), "holds": found["right"]}
    yield row_of(SPEED, found["predicted"], found["measured"])


def single_degree(task: Task, until: float) -> Iterator[dict[str, Any]]:
    """Yields the rows of dynamic degrees, beside the best single one, as `longctx measure` finds
    them."""
    answer = Path(f"{task.out}-measure.json")
    folder = Path(f"{task.out}-store")
    folder.mkdir(parents=True, exist_ok=True)
    modes = ",".join(["auto", *(f"static:{degree}" for degree in task.degrees())])
    words = ["-m", "longctx", "measure", *task.settings(folder), f"--modes={modes}"]
    words += [f"--processes={task.gpus}", "--warmup=1", f"--steps={task.sizes.steps - 1}"]
    ended([*words, f"--out={answer}"], until)
    found = json.loads(answer.read_text(encoding="utf-8"))
    dynamic = next(mode for mode in found["modes"] if mode["mode"] == "auto")
    yield row_of(SINGLE, dynamic["predicted_speedup"], dynamic["speedup"])
    tokens = sum(step["tokens"] for step in dynamic["steps"])
    yield row_of(TOKENS, tokens / dynamic["predicted_s"], tokens / dynamic["total_s"])


def packing(task: Task, until: float) -> Iterator[dict[str, Any]]:
    """Yields the row of TRL's packing, with DDP on both sides. Raises RuntimeError without TRL."""
    if find_spec("trl") is None:
        raise RuntimeError("TRL is not installed: pip install '.[trl]'")
    lengths = Path(f"{task.out}-lengths.txt")
    lengths.write_text("\n".join(map(str, task.lengths())), encoding="utf-8")
    words = ["longctx", "compare", f"--lengths={lengths}", "--against=trl-packing", "--json"]
    words += [f"--ranks={task.gpus}", f"--tokens-per-rank={task.sizes.tokens_per_rank}"]
    words += [f"--model={task.sizes.preset}", f"--profile={task.profile}"]
    words += [f"--global-tokens={task.sizes.step_tokens}"]
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-300:])
    rows = json.loads(done.stdout)["against"]
    predicted = next(row["speedup"] for row in rows if row["sharing"] == "DDP")
    found = on_ranks(task, "several_gpus_trl", until)
    yield row_of(PACKING, predicted, found["packing_s"] / found["longctx_s"])


if __name__ == "__main__":
    main()
