"""Loss of the quick start after 100 steps with AdamW and with Muon, on the same tokens in the same order.

Each optimizer trains examples/quickstart.yaml, at its learning rate, from the same weights, on one CPU process, with --tokens
a step (16,384 in the quick start) from documents that are not longer than --longest. Not measured: other learning rates and
seeds, larger models, GPUs.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from harness import Table, command, facts, options
from longctx.cli import main as longctx

QUICK_START = Path(__file__).parents[1] / "examples" / "quickstart.yaml"
COLUMNS = ["optimizer", "step", "loss", "mean_loss_of_ten", "tokens", "cpu_s"]
OPTIMIZERS = ("adamw", "muon")


def main() -> None:
    parser = options(__doc__, "optimizers.csv")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens per step")
    parser.add_argument("--longest", type=int, default=8192, help="tokens of the longest documents")
    arguments = parser.parse_args()
    table = Table(
        arguments.out.with_suffix(".csv"),
        COLUMNS,
        facts("torch", "longctx") | {"command": command(arguments.out)},
        overwrite=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        if longctx(["prepare", "--out", str(store)]):
            raise SystemExit("no store could be prepared")
        for name in OPTIMIZERS:
            for row in trained(name, store, Path(folder) / name, arguments.tokens, arguments.longest):
                table.append(row)


def trained(name: str, store: Path, run: Path, tokens_per_step: int, longest: int) -> list[dict[str, Any]]:
    """Trains with an optimizer, and returns a row for every tenth step."""
    changed = {
        "data.store": store,
        "batch.global_tokens": tokens_per_step,
        "batch.tokens_per_rank": longest,
        "train.run_dir": run,
        "train.device": "cpu",
        "checkpoint.every": "null",
        "log.tensorboard": "false",
        "optimizer.name": name,
    }
    before = os.times()
    if longctx(["train", str(QUICK_START), "--processes", "1", *(f"--{key}={value}" for key, value in changed.items())]):
        raise SystemExit(f"the run with {name} failed")
    after = os.times()
    seconds = sum(after[:4]) - sum(before[:4])
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    tokens, rows = 0, []
    for number, step in enumerate(steps, start=1):
        tokens += step["tokens"]
        if number % 10 == 0:
            mean = sum(each["loss"] for each in steps[number - 10 : number]) / 10
            row = {"optimizer": name, "step": number, "loss": step["loss"], "mean_loss_of_ten": mean, "tokens": tokens}
            rows.append(row | {"cpu_s": seconds if number == len(steps) else None})
    return rows


if __name__ == "__main__":
    main()
