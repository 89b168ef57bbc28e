"""Training on one GPU: tokens per second, utilisation and memory by document length, what each memory option does, and a peer.

    python bench/training_gpu.py --list                   # the rows, with memory and time that they are expected to take
    python bench/training_gpu.py                          # the most telling rows first, until 25 minutes are over
    python bench/training_gpu.py --minutes 9 --only 1b    # rows of which the label contains "1b"; and so on in further calls
    python bench/training_gpu.py --quick                  # 1b at 32k alone: memory options, and the peer
    python bench/training_gpu.py --smoke                  # tiny, on a CPU: that the script works, no figures

Every row is a run of `longctx train` (one process, one document of the given length a step) as a user would start it, read
from its metrics: the median, least and most of the steps that it finished, without those to warm up. Long steps are few, and a
row that runs out of time keeps the steps that it has. For each length the settings are taken that fit this GPU by `longctx
estimate` and are expected to be fastest; where they fail, ones that need less memory, or another kernel, are tried, and each
trial is a row. The last model is a few layers of an 8B model on one document of 1,048,576 tokens. Expected times assume
{share:.0%} of the GPU's peak, recomputation counted.

The peer is `transformers` with the fastest attention that it has here (training_peer.py), of the same shape and number of
weights, on as many tokens, in the same precision, with gradient checkpointing. Vocabularies have {vocabulary:,} entries, so
that the loss weighs little. It is one GPU: nothing is said of exchange.

Rows are appended to OUT.csv as they come, what fails with its reason; rows that OUT.csv has already are not measured again. No
checkpoints are written, and what a row leaves on the disk is deleted behind it.
"""

import argparse
import csv
import json
import math
import os
import platform
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any

import torch

from longctx import __version__
from longctx.attention.kernels import Request
from longctx.attention.kernels.flash import Flash
from longctx.config import Config
from longctx.memory.advisor import changed, heaviest
from longctx.memory.model import Load, estimate
from longctx.model.presets import PRESETS, ModelShape
from longctx.training.utilisation import FORWARD_AND_BACKWARD, model_flops, peak_flops

VOCABULARY = 4096
PEAK_SHARE = 0.3
"""Operations a second that steps are expected to reach, recomputation counted, as a share of the GPU's peak."""

MEMORY_SHARE = 0.88
"""Of the GPU's memory, that an estimate may come to: it knows nothing of fragments, contexts and libraries."""

START_S = 40.0
"""Until a run is at its first step, generously."""

LEAST_LIMIT_S = 180.0
"""Before a row is ended, however short its steps should be."""

ROW_S = 60.0
"""Time for the steps of a row, where they are short enough for two in it."""

TRIALS = 3
"""Settings that are tried for a row, at most."""

TOO_LONG = "took more than"
FASTEST = "fastest that fits"
LONGEST = 1_048_576
STACK_LAYERS = 2
"""Of the 8B model at the longest length: a step takes minutes a layer."""


@dataclass(frozen=True)
class Option:
    """Settings of `longctx train` under a name."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict, hash=False)

    def __add__(self, other: "Option") -> "Option":
        return Option(f"{self.name}, {other.name}", {**self.settings, **other.settings})


RECOMPUTE = [Option(mode, {"train.recompute": mode}) for mode in ("none", "selective", "full")]
NONE, SELECTIVE, FULL = RECOMPUTE
TILES = Option("MLP in tiles", {"train.mlp_tile_tokens": 8192})
HOST_INPUTS = Option("inputs in host memory", {"train.offload_activations": True})
HOST_OPTIMIZER = Option("optimizer in host memory", {"train.offload_optimizer": True})
TRITON = Option("kernel triton", {"context.kernel": "triton"})
COMPILED = Option("compiled", {"train.compile": True})
MEMORY_OPTIONS = [SELECTIVE, NONE, FULL, *(SELECTIVE + each for each in (TILES, HOST_INPUTS, HOST_OPTIMIZER, COMPILED))]
CHECKPOINTING = Option("gradient checkpointing", {"train.recompute": "full"})
"""What the peer does, in our words, for the time that it is expected to take."""


@dataclass(frozen=True)
class Gpu:
    """Where rows run, or shall run: its memory in bytes, operations a second, and what kernel auto comes to on it."""

    name: str
    memory: float
    peak: float
    attention: str

    @classmethod
    def here(cls, gib: float | None) -> "Gpu":
        """The GPU of this machine, or an H100 with `gib` of memory to make a list for. A CPU is taken to hold everything."""
        if gib is not None:
            return cls("H100", gib * 2**30, 989e12, "torch's flash operators")
        if not torch.cuda.is_available():
            return cls(f"CPU, {platform.machine()}, {os.cpu_count()} cores", math.inf, 1e11, "cpu")
        name = torch.cuda.get_device_name()
        library = Flash().library(Request("cuda", torch.bfloat16, 128, 128))
        attention = "triton" if isinstance(library, str) else library.name
        peak = peak_flops(name, "bfloat16") or 300e12
        return cls(name, torch.cuda.get_device_properties(0).total_memory, peak, attention)

    def kernel(self, option: Option) -> str:
        return str(option.settings.get("context.kernel", self.attention))


@dataclass(frozen=True)
class Run:
    """A row to be: who trains how many layers (None: all) of which model on documents of how many tokens, with which option."""

    system: str
    model: str
    tokens: int
    chosen: str
    options: tuple[Option, ...]
    layers: int | None = None

    @property
    def shape(self) -> ModelShape:
        changes: dict[str, Any] = {"vocab_size": VOCABULARY}
        if self.layers is not None:
            changes["num_hidden_layers"] = self.layers
        return PRESETS[self.model].model_copy(update=changes)

    @property
    def label(self) -> str:
        layers = "" if self.layers is None else f" ({self.layers} layers)"
        return f"{self.system} {self.model}{layers} {self.tokens} {self.chosen}"

    def settings(self, option: Option, steps: int) -> dict[str, Any]:
        """Of `longctx train`, but for its folders."""
        return {
            "model.preset": self.model,
            "model.vocab_size": VOCABULARY,
            **({} if self.layers is None else {"model.num_hidden_layers": self.layers}),
            "batch.global_tokens": self.tokens,
            "batch.tokens_per_rank": self.tokens,
            "train.steps": steps,
            "train.dtype": "bfloat16",
            "optimizer.warmup_steps": 1,
            "checkpoint.every": None,
            "log.tensorboard": False,
            **option.settings,
        }

    def bytes(self, option: Option, gpu: Gpu) -> int:
        """Memory by `longctx estimate`, and what the kernel needs in backward beside it."""
        config = changed(Config(), self.settings(option, 2).items())
        memory = estimate(self.shape, config, 1, _loads(self.tokens), fused=True).total
        return memory + kernel_bytes(self.shape, self.tokens, gpu.kernel(option))

    def step_s(self, option: Option, gpu: Gpu) -> float:
        """What a step is expected to take: attention is 1 part forward and 2.5 backward, the rest 1 and 2."""
        mode = option.settings.get("train.recompute", "none")
        linear = FORWARD_AND_BACKWARD * 2 * self.shape.multiplied_parameters * self.tokens
        attention = model_flops(self.shape, [self.tokens]) - linear
        flops = linear * (1 if mode == "none" else 4 / 3) + attention * (4.5 if mode == "full" else 3.5) / 3
        # Guesses, but for their order: where two options fit, the one with less to do is the faster one.
        slower = (
            1.0 + 0.02 * ("train.mlp_tile_tokens" in option.settings) + 0.03 * ("train.offload_activations" in option.settings)
        )
        slower += 0.2 * ("context.kernel" in option.settings)
        host = 3e-9 * self.shape.parameters() if "train.offload_optimizer" in option.settings else 0.0
        return slower * flops / (PEAK_SHARE * gpu.peak) + host

    def fitting(self, gpu: Gpu) -> list[Option]:
        """The options that this GPU has the memory for, fastest first. The peer's memory is not estimated."""
        if self.system != "longctx":
            return list(self.options)
        found = [option for option in self.options if self.bytes(option, gpu) <= MEMORY_SHARE * gpu.memory]
        # Our own kernel where no other option is left.
        return sorted(found, key=lambda option: ("context.kernel" in option.settings, self.step_s(option, gpu)))


@cache
def _loads(tokens: int) -> Sequence[Load]:
    """Of a GPU with one document of so many tokens."""
    batch = {"batch.global_tokens": tokens, "batch.tokens_per_rank": tokens}
    return heaviest(changed(Config(), batch.items()), None, 1)


def kernel_bytes(shape: ModelShape, tokens: int, kernel: str) -> int:
    """What a kernel's deterministic backward allocates for itself (see attention/kernels/flash_libraries.py)."""
    queries = tokens * shape.num_attention_heads * shape.head_dim
    keys = tokens * shape.num_key_value_heads * shape.head_dim
    if kernel in ("flash-attn 2", "torch's flash operators"):
        splits = -(-132 // shape.num_attention_heads)
        return 4 * splits * queries + (2 * 2 * queries if keys < queries else 0)
    if kernel in ("flash-attn 3", "flash-attn 4"):
        return 4 * queries + 2 * 4 * keys
    return 2 * 4 * tokens * shape.num_attention_heads


def every_option(gpu: Gpu) -> tuple[Option, ...]:
    """All combinations of what saves memory; with our kernel as well, which needs less than some libraries."""
    found = []
    for mode, *extras in product(RECOMPUTE, (None, TILES), (None, HOST_INPUTS), (None, HOST_OPTIMIZER), (None, TRITON)):
        if (mode is NONE and HOST_INPUTS in extras) or (TRITON in extras and gpu.attention in ("triton", "cpu")):
            continue
        found.append(sum((extra for extra in extras if extra is not None), start=mode))
    return tuple(found)


def runs(
    models: Sequence[str], lengths: Sequence[int], gpu: Gpu, *, quick: bool = False, stack_layers: int = STACK_LAYERS
) -> Iterator[Run]:
    """The most telling rows first."""
    every, (model, *others), shortest = every_option(gpu), models, lengths[0]
    for tokens in lengths[: 1 if quick else None]:
        yield Run("longctx", model, tokens, FASTEST, every)
        if tokens == shortest:
            yield Run("transformers", model, tokens, CHECKPOINTING.name, (CHECKPOINTING,))
    if not quick:
        for other in others:
            yield from (Run("longctx", other, tokens, FASTEST, every) for tokens in lengths[:2])
    for option in [*MEMORY_OPTIONS, *([SELECTIVE + TRITON] if gpu.attention not in ("triton", "cpu") else [])]:
        yield Run("longctx", model, shortest, option.name, (option,))
    if quick or model == "tiny":
        return
    yield Run("longctx", "8b", LONGEST, FASTEST, every, layers=stack_layers)
    for each in models:
        for tokens in lengths if each != model else lengths[1:]:
            yield Run("transformers", each, tokens, CHECKPOINTING.name, (CHECKPOINTING,))
    for other in others:
        yield from (Run("longctx", other, tokens, FASTEST, every) for tokens in lengths[2:])


def main() -> None:
    text = __doc__.format(share=PEAK_SHARE, vocabulary=VOCABULARY)
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="1b,3b")
    parser.add_argument("--lengths", default="32768,131072,524288")
    parser.add_argument("--steps", type=int, default=7, help="of a row at most, those to warm up included")
    parser.add_argument("--minutes", type=float, default=25.0, help="for all rows together; what does not fit in is left out")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="rows of which the label contains this (--list shows labels)"
    )
    parser.add_argument("--stack-layers", type=int, default=STACK_LAYERS, help="of the 8B model that are trained on 1M tokens")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--list", action="store_true", help="print the rows and measure nothing")
    parser.add_argument("--gib", type=float, help="with --list: memory of the H100 to list for (default: the GPU here)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "training_gpu", help="without a suffix")
    a = parser.parse_args()
    if not torch.cuda.is_available() and not a.smoke and not (a.list and a.gib):
        parser.error("there is no GPU here: run this on a machine with one, --smoke to see that it works, or --list --gib 80")
    models, lengths = a.models.split(","), sorted(int(length) for length in a.lengths.split(","))
    if a.smoke:
        models, lengths = ["tiny"], [512]
    gpu = Gpu.here(a.gib if a.list else None)
    planned = runs(models, lengths, gpu, quick=a.quick, stack_layers=a.stack_layers)
    wanted = [run for run in planned if a.only in run.label]
    if a.list:
        print("\n".join(described(run, gpu) for run in wanted))
        return
    table = Table(a.out.with_suffix(".csv"), facts(gpu, a.out))
    deadline = time.monotonic() + a.minutes * 60
    late = [run for run in wanted if not table.has(run) and not measure(run, gpu, table, a.steps, deadline)]
    if late:
        print(f"not started, since what was left of {a.minutes:g} minutes would not do; the same command goes on with them:")
        print("\n".join(described(run, gpu) for run in late))


def described(run: Run, gpu: Gpu) -> str:
    """A line of --list."""
    options = run.fitting(gpu)
    if not options:
        return f"{run.label}: does not fit"
    best = options[0]
    memory = f", {run.bytes(best, gpu) / 2**30:.1f} GiB" if run.system == "longctx" else ""
    return f"{run.label}: {best.name}{memory}, {steps_of(run, best, gpu, 7)} steps of about {run.step_s(best, gpu):.1f} s"


def steps_of(run: Run, option: Option, gpu: Gpu, most: int) -> int:
    return max(min(2, most), min(most, int(ROW_S / run.step_s(option, gpu))))


# Rows


def measure(run: Run, gpu: Gpu, table: "Table", most_steps: int, deadline: float) -> bool:
    """Appends the row, one more for each trial that failed. False if there is no time for it."""
    row = {"system": run.system, "model": run.model, "tokens": run.tokens, "chosen": run.chosen}
    row |= {"layers": run.shape.num_hidden_layers, "parameters": run.shape.parameters()}
    options = run.fitting(gpu)
    if not options:
        least = min(run.bytes(option, gpu) for option in run.options) / 2**30
        counted = MEMORY_SHARE * gpu.memory / 2**30
        table.append({**row, "failed": f"not started: needs {least:.1f} GiB by estimate, of {counted:.1f} that are counted on"})
        return True
    for trial in range(TRIALS):
        if not options:
            break
        option = options[0]
        left, step_s = deadline - time.monotonic(), run.step_s(option, gpu)
        if left < START_S + 1.2 * step_s:
            return trial > 0
        steps = steps_of(run, option, gpu, most_steps)
        limit = min(left, max(LEAST_LIMIT_S, START_S + 3 * steps * step_s))
        found = attempt(run, option, gpu, steps, limit)
        table.append({**row, **found})
        why = found["failed"]
        if not why or why.startswith(TOO_LONG):
            break
        options = less_demanding(run, options, gpu, out_of_memory="out of memory" in why.lower())
    return True


def less_demanding(run: Run, options: Sequence[Option], gpu: Gpu, *, out_of_memory: bool) -> list[Option]:
    """What is worth a trial when the first of the options has failed."""
    failed = options[0]
    if out_of_memory:
        enough = run.bytes(failed, gpu) * 0.9
        return [option for option in options[1:] if run.bytes(option, gpu) <= enough]
    return [option for option in options[1:] if gpu.kernel(option) != gpu.kernel(failed)]


def attempt(run: Run, option: Option, gpu: Gpu, steps: int, limit: float) -> dict[str, Any]:
    """One trial: what its metrics say, and why it ended early, if it did. Its folder is gone afterwards."""
    row: dict[str, Any] = {"options": option.name}
    if run.system == "longctx":
        row |= {"attention": gpu.kernel(option), "settings": shlex.join(arguments_of(run.settings(option, steps)))}
        row["estimate_gib"] = round(run.bytes(option, gpu) / 2**30, 2)
    until = time.monotonic() + limit
    with tempfile.TemporaryDirectory(prefix="training_gpu-") as name:
        folder = Path(name)
        try:
            command = command_of(run, option, steps, folder)
            why = finish(command, folder / "log", until - time.monotonic())
        except Exception as error:  # whatever it is, the other rows go on
            why = f"{type(error).__name__}: {error}"[:300]
        finished = read_steps(folder / "run" / "metrics.jsonl")
    row |= summary(finished, run, gpu)
    if finished and why.startswith(TOO_LONG):
        return {**row, "note": f"{why} with {len(finished)} of {steps} steps", "failed": ""}
    return {**row, "failed": why}


def command_of(run: Run, option: Option, steps: int, folder: Path) -> list[str]:
    """What trains, and writes run/metrics.jsonl in `folder`."""
    if run.system == "longctx":
        folders = {"data.store": str(make_store(folder, run.tokens)), "train.run_dir": str(folder / "run")}
        return [sys.executable, "-m", "longctx", "train", *arguments_of({**run.settings(option, steps), **folders})]
    (folder / "run").mkdir()
    metrics = str(folder / "run" / "metrics.jsonl")
    task = {"shape": run.shape.model_dump(), "tokens": run.tokens, "steps": steps, "metrics": metrics}
    return [sys.executable, str(Path(__file__).with_name("training_peer.py")), json.dumps(task)]


def arguments_of(settings: dict[str, Any]) -> list[str]:
    return [f"--{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in settings.items()]


def make_store(folder: Path, tokens: int) -> Path:
    """A store of two documents of exactly so many tokens, a byte each but for the mark of the end."""
    source, store = folder / "documents.jsonl", folder / "store"
    text = "the quick brown fox jumps over the lazy dog. " * (tokens // 45 + 1)
    source.write_text("".join(json.dumps({"text": (f"{i:06}" + text)[: tokens - 1]}) + "\n" for i in range(2)), "utf-8")
    command = [sys.executable, "-m", "longctx", "prepare", "--source", str(source), "--tokenizer", "bytes", "--out", str(store)]
    why = finish(command, folder / "log", 300.0)
    if why:
        raise RuntimeError(f"no store of documents could be made: {why}")
    return store


def finish(command: Sequence[str], log: Path, seconds: float) -> str:
    """Runs a process to its end: why it failed, in a line, or "". It is killed, with what it started, when time is over."""
    with log.open("w", encoding="utf-8") as stream:
        # A group of its own, in this session: what ends the session ends it as well.
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, process_group=0)
        try:
            code = process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return f"{TOO_LONG} {seconds:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if code == 0:
        return ""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no message"]
    print("\n".join(["", *lines[-20:]]), file=sys.stderr, flush=True)
    told = [line for line in lines if re.search(r"\berror\b|Error\b", line)]
    return f"{(told or lines)[-1].strip()[:300]} (exit status {code})"


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, but for one that was cut short."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def summary(finished: Sequence[dict[str, Any]], run: Run, gpu: Gpu) -> dict[str, Any]:
    """Columns of the finished steps; of n the first min(2, n // 2) warm up."""
    if not finished:
        return {}
    warm_up = min(2, len(finished) // 2)
    times = [step["step_time_s"] for step in finished[warm_up:]]
    median, (first, *_) = statistics.median(times), finished
    on_gpu = math.isfinite(gpu.memory)
    return {
        "steps": len(times),
        "warm_up_steps": warm_up,
        "step_s": round(median, 4),
        "step_s_least": round(min(times), 4),
        "step_s_most": round(max(times), 4),
        "tokens_per_s": round(run.tokens / median, 1),
        "mfu": round(model_flops(run.shape, [run.tokens]) / (median * gpu.peak), 4) if on_gpu else None,
        "peak_gib": round(max(step["peak_memory_bytes"] for step in finished) / 2**30, 2) if on_gpu else None,
        **{name: first[name] for name in ("attention", "parameters") if name in first},
    }


# Results

COLUMNS = (
    *("system", "model", "layers", "parameters", "tokens", "chosen", "options", "attention", "steps", "warm_up_steps"),
    *("step_s", "step_s_least", "step_s_most", "tokens_per_s", "mfu", "peak_gib", "estimate_gib", "note", "failed", "settings"),
)


class Table:
    """A CSV file that grows by rows, each with the facts of this measurement, and knows what it has."""

    def __init__(self, path: Path, facts: dict[str, str]) -> None:
        self.path, self.facts, self.columns = path, facts, [*COLUMNS, *facts]
        path.parent.mkdir(parents=True, exist_ok=True)
        self.rows: list[dict[str, Any]] = []
        if path.exists():
            with path.open(newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                self.rows = list(reader)
            if list(reader.fieldnames or ()) != self.columns:
                sys.exit(f"{path} has other columns than these rows: move it away, or give another --out")
        else:
            self._write([dict(zip(self.columns, self.columns, strict=True))])

    def append(self, row: dict[str, Any]) -> None:
        self.rows.append({**dict.fromkeys(self.columns, ""), **row, **self.facts})
        self._write(self.rows[-1:])
        told = {name: value for name, value in row.items() if value not in ("", None) and name != "settings"}
        print(json.dumps(told), flush=True)

    def has(self, run: Run) -> bool:
        """Whether this row has been measured, on a GPU of this name, or was found not to fit."""
        same = {"system": run.system, "model": run.model, "tokens": run.tokens, "layers": run.shape.num_hidden_layers}
        same["device"] = self.facts["device"]
        rows = [row for row in self.rows if all(str(row[name]) == str(value) for name, value in same.items())]
        done = [row for row in rows if not row["failed"] or row["failed"].startswith("not started")]
        return any(row["chosen"] == run.chosen or row["options"] == run.chosen for row in done)

    def _write(self, rows: Sequence[dict[str, Any]]) -> None:
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self.columns).writerows(rows)


def facts(gpu: Gpu, out: Path) -> dict[str, str]:
    given = [out.name if argument == str(out) else argument for argument in sys.argv[1:]]
    return {
        "device": gpu.name,
        "memory_gib": f"{gpu.memory / 2**30:.1f}",
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "command": shlex.join(["python", "bench/training_gpu.py", *given]),
        "longctx": __version__,
        "cuda": torch.version.cuda or "",
        **{package: _installed(package) for package in ("torch", "triton", "flash-attn-4", "flash-attn", "transformers")},
    }


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # on the way out, what runs is ended
    main()
