"""Training on one GPU: tokens per second, utilisation and memory by document length, what each memory option does, and a peer.

    python bench/training_gpu.py                          # a 1b and a 3b model at 32k, 128k and 512k tokens: about half an hour
    python bench/training_gpu.py --quick                  # 1b at 32k only
    python bench/training_gpu.py --smoke                  # tiny, on a CPU: that the script works, no figures

Every row is a run of `longctx train` (one process, one document of the given length a step) as a user would start it, read
from its metrics: the median of the steps after the first two. The peer is `transformers` with the fastest attention that it has
here, on the same shape, tokens and dtype, with gradient checkpointing. A run that does not fit is a row that says so. Prints a
line for each row and writes OUT.csv. It is one GPU: nothing is said of exchange.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from longctx.model.presets import PRESETS

WARM_UP = 2
VOCABULARY = 4096
MEMORY_OPTIONS: dict[str, dict[str, Any]] = {
    "selective": {"train.recompute": "selective"},
    "none": {"train.recompute": "none"},
    "full": {"train.recompute": "full"},
    "selective, MLP in tiles": {"train.recompute": "selective", "train.mlp_tile_tokens": 8192},
    "selective, inputs in host memory": {"train.recompute": "selective", "train.offload_activations": True},
    "selective, optimizer in host memory": {"train.recompute": "selective", "train.offload_optimizer": True},
    "selective, compiled": {"train.recompute": "selective", "train.compile": True},
}


@dataclass(frozen=True)
class Run:
    """One row: who trains which model on documents of how many tokens, with which settings."""

    system: str
    model: str
    tokens: int
    name: str
    settings: dict[str, Any] = field(default_factory=dict)


def runs(models: list[str], lengths: list[int], peer: bool) -> Iterator[Run]:
    """Every length with selective recomputation, every option at the shortest length, and the peer."""
    for model in models:
        for tokens in lengths:
            for name, settings in MEMORY_OPTIONS.items():
                if name == "selective" or tokens == lengths[0]:
                    yield Run("longctx", model, tokens, name, settings)
            if peer:
                yield Run("transformers", model, tokens, "gradient checkpointing")
    if models[0] != "tiny":
        yield Run("longctx", "8b", 1_048_576, "full", {"train.recompute": "full", "train.offload_optimizer": True,
                  "train.offload_activations": True, "train.mlp_tile_tokens": 8192})  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="1b,3b")
    parser.add_argument("--lengths", default="32768,131072,524288")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=10.0, help="most that one row may take")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "training_gpu", help="without a suffix")
    a = parser.parse_args()
    if not a.smoke and not torch.cuda.is_available():
        sys.exit("there is no GPU here: run this on a machine with one, or --smoke to see that the script works")
    models, lengths = a.models.split(","), [int(length) for length in a.lengths.split(",")]
    if a.quick:
        models, lengths = ["1b"], [32768]
    if a.smoke:
        models, lengths = ["tiny"], [512]
    peer = _installed("transformers") != "not installed"
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for run in runs(models, lengths, peer):
            measure = train_peer if run.system == "transformers" else train
            row = {"system": run.system, "model": run.model, "tokens": run.tokens, "options": run.name}
            rows.append({**row, **measure(run, a.steps + WARM_UP, Path(folder), a.minutes * 60)})
            print(json.dumps(rows[-1]), flush=True)
    if not peer:
        print("transformers is not installed: no peer was measured")
    write(rows, a.out.with_suffix(".csv"))


def train(run: Run, steps: int, folder: Path, seconds: float) -> dict[str, Any]:
    """`longctx train`, and what its metrics say."""
    store = make_store(folder, run.tokens, steps)
    run_dir = folder / f"run-{len(list(folder.iterdir()))}"
    settings = {
        "model.preset": run.model,
        "data.store": store,
        "batch.global_tokens": run.tokens,
        "batch.tokens_per_rank": run.tokens,
        "train.steps": steps,
        "train.dtype": "bfloat16",
        "train.run_dir": run_dir,
        "checkpoint.every": 10**6,
        "optimizer.warmup_steps": 1,
        **run.settings,
    }
    arguments = [
        str(part) for key, value in settings.items() for part in (f"--{key}", json.dumps(value, default=str).strip('"'))
    ]
    command = [sys.executable, "-m", "longctx", "train", *arguments]
    done = _run(command, seconds)
    if isinstance(done, str):
        return {"failed": done}
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    kept = [json.loads(line) for line in lines][WARM_UP:]
    peak = max(line["peak_memory_bytes"] for line in kept)
    mfu = [line["mfu"] for line in kept if line["mfu"] is not None]
    return _row(
        statistics.median(line["step_time_s"] for line in kept), run.tokens, peak, statistics.median(mfu) if mfu else None
    )


def train_peer(run: Run, steps: int, folder: Path, seconds: float) -> dict[str, Any]:
    """The same in transformers, in a process of its own."""
    shape = {**PRESETS[run.model].model_dump(), "vocab_size": VOCABULARY}
    done = _run([sys.executable, "-c", PEER, json.dumps(shape), str(run.tokens), str(steps)], seconds)
    if isinstance(done, str):
        return {"failed": done}
    found = json.loads(done.stdout.splitlines()[-1])
    return {
        **_row(statistics.median(found["seconds"][WARM_UP:]), run.tokens, found["peak"], None),
        "attention": found["attention"],
    }


PEER = """
import json, sys, time, torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import is_flash_attn_2_available
shape, tokens, steps = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
device = "cuda" if torch.cuda.is_available() else "cpu"
attention = "flash_attention_2" if is_flash_attn_2_available() and device == "cuda" else "sdpa"
theta = shape.pop("rope_theta")
config = LlamaConfig(**shape, rope_theta=theta, max_position_embeddings=tokens)
with torch.device(device):
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
model.gradient_checkpointing_enable()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device == "cuda")
seconds = []
for _ in range(steps):
    ids = torch.randint(shape["vocab_size"], (1, tokens), device=device)
    began = time.perf_counter()
    with torch.autocast(device, torch.bfloat16):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    loss.item()
    seconds.append(time.perf_counter() - began)
peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
print(json.dumps({"seconds": seconds, "peak": peak, "attention": attention}))
"""


def make_store(folder: Path, tokens: int, documents: int) -> Path:
    """A store of documents of exactly so many tokens, a byte each but for the mark of the end."""
    store = folder / f"store-{tokens}"
    if not store.exists():
        source = folder / f"documents-{tokens}.jsonl"
        text = "the quick brown fox jumps over the lazy dog. " * (tokens // 45 + 1)
        with source.open("w", encoding="utf-8") as file:
            for i in range(documents):
                file.write(json.dumps({"text": (f"{i:06}" + text)[: tokens - 1]}) + "\n")
        subprocess.run(
            [sys.executable, "-m", "longctx", "prepare", "--source", source, "--tokenizer", "bytes", "--out", store],
            check=True,
            capture_output=True,
        )
    return store


def _run(command: list[Any], seconds: float) -> "subprocess.CompletedProcess[str] | str":
    """The finished process, or why it failed, in a line."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"took more than {seconds:.0f} s"
    lines = done.stderr.strip().splitlines() or ["no message"]
    return done if done.returncode == 0 else next((line for line in lines if "error" in line.lower()), lines[-1])[:300]


def _row(seconds: float, tokens: int, peak: int, mfu: float | None) -> dict[str, Any]:
    return {
        "step_s": round(seconds, 4),
        "tokens_per_s": round(tokens / seconds, 1),
        "mfu": None if mfu is None else round(mfu, 4),
        "peak_gib": round(peak / 2**30, 2),
    }


def write(rows: list[dict[str, Any]], path: Path) -> None:
    facts = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores",
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        **{package: _installed(package) for package in ("torch", "triton", "flash-attn-4", "transformers", "longctx")},
    }
    columns = ["system", "model", "tokens", "options", "step_s", "tokens_per_s", "mfu", "peak_gib", "attention", "failed"]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*columns, *facts])
        writer.writeheader()
        writer.writerows({**row, **facts} for row in rows)


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    main()
