"""Training on one GPU: tokens/s, MFU and memory by document length, the effect of each memory
option, and a peer.

    python bench/training_gpu.py                          # the most important rows first, for 25 minutes
    python bench/training_gpu.py --minutes 9 --only 1b    # rows with "1b" in their label; call again for the others
    python bench/training_gpu.py --smoke                  # tiny, on a CPU: tests the script, no figures

Every row is a run of `longctx train` (one process, one document of the given length per step) as a
user would start it. Its metrics give median, minimum and maximum over the finished steps, without
warm-up; a row that runs out of time keeps the finished steps. For each length, settings are chosen
from a ladder from fast to small: the first that fit this GPU by `longctx estimate`
(training_rows.py). If memory runs out all the same, smaller settings are tried, with a row for each
trial. The last model is a few layers of an 8B model on one document of 786,432 tokens.

The peer is `transformers` with its fastest attention here (training_peer.py), with the same shape,
number of weights, tokens and precision, and gradient checkpointing. Vocabularies are small, so that
the loss takes little time. One GPU: exchange is not measured.

Rows are appended to OUT.csv as they are measured, failed rows with a reason; rows that OUT.csv
already has are skipped. No checkpoints are written, and the files of a row are deleted after it.
"""

import json
import math
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from harness import Table, command, device_facts, facts, make_store, options
from longctx.training.metrics import model_flops
from training_rows import MEMORY_SHARE, Gpu, Option, Run, runs

START_S = 40.0  # generous time until the first step of a run; no row is started with less time left
ROW_S = 480.0  # maximum time of a row
TOO_LONG = "took more than"
LLAMA = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
PEER_SIZES = {*LLAMA, "vocab_size", "rope_theta", "rms_norm_eps", "tie_word_embeddings"}
COLUMNS = (
    *(
        "system",
        "model",
        "layers",
        "parameters",
        "tokens",
        "chosen",
        "options",
        "attention",
        "steps",
        "warm_up_steps",
    ),
    *(
        "step_s",
        "step_s_least",
        "step_s_most",
        "tokens_per_s",
        "mfu",
        "peak_gib",
        "estimate_gib",
        "note",
        "failed",
        "settings",
    ),
)


def main() -> None:
    parser = options(__doc__, "training_gpu", minutes=25.0)
    parser.add_argument(
        "--steps", type=int, default=7, help="maximum steps per row, including warm-up"
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help='only rows with it in their label ("llama-3.2-1b 32768 none")',
    )
    parser.add_argument("--first", action="store_true", help="the few rows of first_contact.py")
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    if not torch.cuda.is_available() and not given.smoke:
        parser.error(
            "no GPU is available: run this on a machine with a GPU, or use --smoke to test the "
            "script"
        )
    gpu = Gpu.here()
    about = (
        facts("longctx", "torch", "triton", "flash-attn-4", "flash-attn", "transformers")
        | device_facts()
    )
    about |= {"memory_gib": f"{gpu.memory / 2**30:.1f}", "command": command(given.out)}
    table = Table(given.out.with_suffix(".csv"), COLUMNS, about)
    deadline = time.monotonic() + given.minutes * 60
    for run in runs(gpu, smoke=given.smoke, first=given.first):
        if given.only not in run.label or has(table, run):
            continue
        if deadline - time.monotonic() < START_S:
            print(
                "not started, out of time; run the same command again to continue with it: "
                f"{run.label}"
            )
        else:
            measure(run, gpu, table, given.steps, deadline)


def has(table: Table, run: Run) -> bool:
    """Returns True if this row has been measured on a GPU of this name, or does not fit."""
    same = {
        "system": run.system,
        "model": run.model,
        "tokens": run.tokens,
        "layers": run.shape.num_hidden_layers,
    }
    rows = table.find(**same, device=table.facts["device"])
    done = [row for row in rows if not row["failed"] or row["failed"].startswith("not started")]
    return any(run.chosen in (row["chosen"], row["options"]) for row in done)


def measure(run: Run, gpu: Gpu, table: Table, steps: int, deadline: float) -> None:
    """Appends the row, and one for each trial that ran out of memory."""
    row = {"system": run.system, "model": run.model, "tokens": run.tokens, "chosen": run.chosen}
    row |= {"layers": run.shape.num_hidden_layers, "parameters": run.shape.spec.parameters}
    fitting, enough = run.fitting(gpu), math.inf
    if not fitting:
        least = min(run.bytes(option) for option in run.options) / 2**30
        counted = MEMORY_SHARE * gpu.memory / 2**30
        table.append(
            {
                **row,
                "failed": f"not started: needs {least:.1f} GiB by estimate, but {counted:.1f} GiB "
                "are available",
            }
        )
    for option in fitting:
        if run.bytes(option) > enough:
            continue
        found = row | attempt(run, option, gpu, steps, min(time.monotonic() + ROW_S, deadline))
        table.append(found)
        print(
            json.dumps(
                {name: value for name, value in found.items() if value and name != "settings"}
            ),
            flush=True,
        )
        if "out of memory" not in found["failed"].lower():
            return
        enough = 0.9 * run.bytes(option)


def attempt(run: Run, option: Option, gpu: Gpu, steps: int, until: float) -> dict[str, Any]:
    """Runs one trial. Returns its metrics, and the reason if it ended early. Deletes its folder."""
    row: dict[str, Any] = {"options": option.name}
    if run.system == "longctx":
        row |= {
            "attention": gpu.kernel(option),
            "settings": shlex.join(run.arguments(option, steps)),
        }
        row["estimate_gib"] = round(run.bytes(option) / 2**30, 2)
    with tempfile.TemporaryDirectory(prefix="training_gpu-") as name:
        folder = Path(name)
        try:
            words = command_of(run, option, steps, folder)
            why = finish(words, folder / "log", until - time.monotonic())
        except Exception as error:  # any error: continue with the other rows
            why = f"{type(error).__name__}: {error}"[:300]
        metrics = folder / "run" / "metrics.jsonl"
        lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
        # The last line may be incomplete.
        finished = [json.loads(line) for line in lines if line.endswith("}")]
    row |= summary(finished, run, gpu)
    if finished and why.startswith(TOO_LONG):
        return {**row, "note": f"{why} with {len(finished)} of {steps} steps", "failed": ""}
    return {**row, "failed": why}


def command_of(run: Run, option: Option, steps: int, folder: Path) -> list[str]:
    """Returns the command that trains and writes run/metrics.jsonl in `folder`."""
    if run.system == "longctx":
        words = [
            f"--data.store={make_store([run.tokens] * 2, folder)}",
            f"--train.run_dir={folder / 'run'}",
        ]
        return [sys.executable, "-m", "longctx", "train", *run.arguments(option, steps), *words]
    (folder / "run").mkdir()
    metrics = str(folder / "run" / "metrics.jsonl")
    task = {
        "shape": run.shape.model_dump(include=PEER_SIZES),
        "tokens": run.tokens,
        "steps": steps,
        "metrics": metrics,
    }
    return [sys.executable, str(Path(__file__).with_name("training_peer.py")), json.dumps(task)]


def finish(words: Sequence[str], log: Path, seconds: float) -> str:
    """Runs a process, and kills it after `seconds`. Returns the reason if it failed, otherwise
    ""."""
    with log.open("w", encoding="utf-8") as stream:
        try:
            code = subprocess.run(
                words, stdout=stream, stderr=subprocess.STDOUT, timeout=max(0.0, seconds)
            ).returncode
        except subprocess.TimeoutExpired:
            return f"{TOO_LONG} {seconds:.0f} s"
    if code == 0:
        return ""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no message"]
    print("\n".join(["", *lines[-20:]]), file=sys.stderr, flush=True)
    told = [line for line in lines if re.search(r"\berror\b|Error\b", line)]
    return f"{(told or lines)[-1].strip()[:300]} (exit status {code})"


def summary(finished: Sequence[dict[str, Any]], run: Run, gpu: Gpu) -> dict[str, Any]:
    """Returns the columns of the finished steps; the first min(2, n // 2) of n steps are
    warm-up."""
    if not finished:
        return {}
    warm_up = min(2, len(finished) // 2)
    times = [step["step_time_s"] for step in finished[warm_up:]]
    median, on_gpu = statistics.median(times), math.isfinite(gpu.memory)
    return {
        "steps": len(times),
        "warm_up_steps": warm_up,
        "step_s": round(median, 4),
        "step_s_least": round(min(times), 4),
        "step_s_most": round(max(times), 4),
        "tokens_per_s": round(run.tokens / median, 1),
        "mfu": round(model_flops(run.shape.spec, [run.tokens]) / (median * gpu.peak), 4)
        if on_gpu
        else None,
        "peak_gib": round(max(step["peak_memory_bytes"] for step in finished) / 2**30, 2)
        if on_gpu
        else None,
        **{name: finished[0][name] for name in ("attention", "parameters") if name in finished[0]},
    }


if __name__ == "__main__":
    # Exits through `subprocess.run`, which kills the running row.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    main()
