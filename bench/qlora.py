"""QLoRA beside LoRA: held-out loss after the same steps, and peak memory beside its estimate, of
SmolLM2-135M on two processes.

    python -m bench.qlora          # needs the packages of `make finetune`

The model, the conversations and the settings are those of `make finetune`, with --steps steps of
--tokens tokens. Loss: the mean over the held-out conversations, on the base that was trained on.
Memory: live tensors of the fullest rank in the second of two steps, by torch's profiler, beside
`longctx estimate` for the same step; all tokens have a loss there, as the estimate assumes. One
seed, one model, whose weights come from a package with 4 bits already. Writes results/qlora.csv.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.harness import Table, command, facts, options
from longctx.config import load
from longctx.data.store.store import Store
from longctx.memory.loads import loads
from longctx.memory.model import estimate
from longctx.parallel.mesh import make_groups
from longctx.training.assembly import assemble
from longctx.training.build import sizes_of_groups
from longctx.training.data import plan_steps
from longctx.training.run import Run
from longctx.training.trainer import Trainer
from tests.memory_cases import peak_of_second_step
from tests.workers import Workers

RANKS, RANK = 2, 16
PROCESSES = ("--processes", RANKS)
BASES = (None, "nf4", "int8")
COLUMNS = ["base", "steps", "loss_before", "loss", "estimated_bytes", "measured_bytes", "cpu_s"]
EXAMPLES = Path(__file__).parents[1] / "examples"
SETTINGS = EXAMPLES / "finetune_smollm2.yaml"
STORES = (
    ("train", "train", "assistant"),
    ("held-out", "held_out", "assistant"),
    ("all", "train", "all"),
)
"""Store, its conversations, and their parts with loss."""
TOKENS = 8192
"""Longest conversation."""


def main() -> None:
    parser = options(__doc__, "qlora.csv")
    parser.add_argument("--steps", type=int, default=12, help="steps of each run")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--documents", type=int, default=6, help="held-out conversations")
    arguments = parser.parse_args()
    table = Table(
        arguments.out.with_suffix(".csv"),
        COLUMNS,
        facts("torch", "torchao", "transformers", "peft", "longctx")
        | {"command": command(arguments.out)},
        overwrite=True,
    )
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        subprocess.run([sys.executable, EXAMPLES / "smollm2.py", folder / "model"], check=True)
        subprocess.run([sys.executable, EXAMPLES / "code_conversations.py", folder], check=True)
        for name, source, part in STORES:
            given = [
                "--source",
                folder / f"{source}.jsonl",
                "--tokenizer",
                folder / "model",
                "--out",
                folder / name,
            ]
            longctx(
                "prepare",
                *given,
                "--max-length",
                TOKENS,
                "--long-documents",
                "drop",
                "--train-on",
                part,
            )
        documents = ("--store", folder / "held-out", "--documents", arguments.documents)
        before = loss_of(folder / "model", *documents, "--train.dtype=bfloat16")
        for base in BASES:
            run = folder / f"run-{base}"
            began = os.times()
            values = settings(folder, "train", run, base) | {
                "train.steps": arguments.steps,
                "checkpoint.every": arguments.steps,
            }
            longctx(
                "train",
                SETTINGS,
                *(f"--{name}={value}" for name, value in values.items()),
                *PROCESSES,
            )
            seconds = sum(os.times()[2:4]) - sum(began[2:4])
            row = {
                "base": base or "none",
                "steps": arguments.steps,
                "loss_before": before,
                "loss": loss_of(run, *documents),
            }
            table.append(row | memory(folder, base) | {"cpu_s": seconds})
            print(table.rows[-1], flush=True)


def settings(folder: Path, store: str, run: Path, base: str | None) -> dict[str, Any]:
    return {
        "model.from_pretrained": folder / "model",
        "data.store": folder / store,
        "train.run_dir": run,
        "train.device": "cpu",
        "lora.rank": RANK,
        "lora.base": base or "null",
        "log.tensorboard": "false",
    }


def longctx(*words: object) -> str:
    """Runs a command and returns what it prints. Raises CalledProcessError if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "longctx", *map(str, words)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return done.stdout


def loss_of(target: Path, *options: object) -> float:
    report = longctx("eval", target, *options, "--batch.tokens_per_rank=4096", "--json", *PROCESSES)
    return float(json.loads(report)["overall"]["loss"])


def memory(folder: Path, base: str | None) -> dict[str, int]:
    """Returns the estimated and the measured peak memory of the fullest rank, in bytes, in the
    second step."""
    given = [
        f"{name}={value}"
        for name, value in settings(folder, "all", folder / "measured", base).items()
    ]
    config = load(SETTINGS, given, world_size=RANKS)
    store = Store.open(folder / "all")
    second = plan_steps(config, store, RANKS, 2)[1].plan
    spec = config.model_source(store.tokenizer.vocab_size).spec
    workers = Workers()
    measured = workers.run(peak, RANKS, given, timeout_s=600)
    workers.stop()
    estimated = estimate(spec, config, RANKS, list(loads([second], config)), fused=False).total
    return {"estimated_bytes": estimated, "measured_bytes": max(measured)}


def peak(given: list[str]) -> int:
    """Returns the peak bytes of live tensors of this rank."""
    config = load(SETTINGS, given, world_size=dist.get_world_size())

    def start() -> Trainer:
        mesh = make_groups(torch.device("cpu"), **sizes_of_groups(config), timeout_s=600)
        config.train.run_dir.mkdir(parents=True, exist_ok=True)
        return assemble(Run.open(config), mesh)

    return peak_of_second_step(start)


if __name__ == "__main__":
    main()
