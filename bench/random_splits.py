"""Compares random parallel settings of the trainer with one process, on models and documents of odd sizes.

    python -m bench.random_splits                        # 200 cases of seed 0; continues where an earlier run stopped
    python -m bench.random_splits --seed 7 --cases 50
    python -m bench.random_splits --seed 0 --only 17     # one case, with all its settings

A case draws a model, documents, up to eight processes (tensor, pipeline, domain), a planning mode with its token budget, and
settings of recomputation, resharding, reduction, exchange and compilation. Settings that the rules refuse are drawn again. Each
case trains a few float32 steps; tokens must equal those of one process, losses to 1e-5 relative and gradient norms to 1e-4.
A case depends only on seed and number. Writes OUT.csv, one row per case, and OUT.md; exits with 1 if a case failed.
"""

import math
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import torch
import yaml

from bench.harness import Table, facts, markdown, options
from longctx.config import load
from longctx.config.problems import yaml_text
from longctx.errors import UserError
from longctx.planning.layout import longest_document
from longctx.training.checks import check_vocabulary
from longctx.training.metrics import StepMetrics
from tests.training_cases import SMALL, make_store, train
from tests.workers import Workers

LOSS, GRADIENT_NORM = 1e-5, 1e-4  # maximum relative errors
STEPS = 3
PROCESSES = 8
BYTES = 257  # vocabulary of the stores
PROFILE = "h100-nvlink-ib"
COLUMNS = (
    *("seed", "case", "world", "result", "loss_error", "gradient_norm_error", "seconds"),
    *("torch", "python", "cores", "date", "lengths", "settings"),
)

Settings = dict[str, object]


@dataclass(frozen=True)
class Case:
    """One case: `common` settings of split and single process, and settings of the `split`; document lengths in bytes."""

    world: int
    lengths: tuple[int, ...]
    ranks_per_node: int
    common: Settings
    split: Settings

    def refused(self) -> bool:
        """Returns True if the settings break a rule, or the trainer refuses them."""
        try:
            config = load(None, [*SMALL, "data.store=store", *overrides(self.common | self.split)], world_size=self.world)
            check_vocabulary(config, config.model.shape(BYTES).spec)
        except UserError:
            return True
        return False

    def text(self) -> str:
        return "; ".join(overrides(self.common | self.split | {"ranks_per_node": self.ranks_per_node}))


def overrides(settings: Settings) -> list[str]:
    return [f"{key}={yaml_text(value)}" for key, value in settings.items()]


def draw(seed: int, number: int) -> Case:
    """Draws the case of this number, the first that no rule refuses."""
    rng = random.Random(f"{seed}/{number}")
    while (case := draw_any(rng)).refused():
        pass
    return case


def draw_any(rng: random.Random) -> Case:
    """Draws a case, which rules may refuse."""
    tensor = rng.choice([1, 1, 2, 2, 4])
    pipeline = rng.choice([ranks for ranks in (1, 1, 1, 2, 2, 3) if tensor * ranks <= PROCESSES])
    domain = rng.randint(1, min(6, PROCESSES // (tensor * pipeline)))
    lengths = tuple(rng.randint(2, rng.choice([60, 300, 700])) for _ in range(4))
    longest = max(2, rng.choice([max(lengths) + 1, rng.randint(max(lengths) // 2, max(lengths) + 1)]))
    chunks = rng.randint(1, 3) if pipeline > 1 else 1
    kv_heads = rng.choice([1, 2, 3, 4, 4, 8])
    common: Settings = {
        "model.hidden_size": rng.randint(3, 48),
        "model.intermediate_size": rng.randint(2, 100),
        "model.num_hidden_layers": pipeline * chunks + rng.randint(0, 2),
        "model.num_attention_heads": kv_heads * rng.choice([1, 2, 3]),
        "model.num_key_value_heads": kv_heads,
        "model.head_dim": rng.choice([2, 4, 6, 8, 14]),
        "model.vocab_size": rng.choice([BYTES, rng.randint(BYTES, 400)]),
        "model.tie_word_embeddings": rng.random() < 0.5,
        "data.max_length": longest,
        "data.long_documents": rng.choice(["split", "split", "drop"]) if longest >= min(lengths) + 1 else "split",
        "batch.global_tokens": rng.randint(200, 2500),
        "train.seed": rng.randrange(1000),
    }
    split: Settings = {
        "parallel.tensor_parallel_size": tensor,
        "parallel.pipeline_parallel_size": pipeline,
        "parallel.pipeline_chunks": chunks,
        "parallel.shard_ranks": rng.choice([None, None, rng.randint(1, domain)]),
        "parallel.reshard_after": rng.choice(["block", "micro_batch", "step"]),
        "parallel.reduce_after": rng.choice(["step", "step", "micro_batch"]),
        "train.recompute": rng.choice(["none", "selective", "full"]),
        "train.mlp_tile_tokens": rng.choice([None, None, None, rng.randint(1, 200)]),
        "train.compile": rng.random() < 0.1,
        "context.keep_kv": rng.random() < 0.3,
        "context.two_level_exchange": rng.random() < 0.7,
        "context.max_remote_tokens": rng.choice([None, rng.randint(1, 300)]),
        "context.ulysses_degree": rng.choice([1, 1, "auto", rng.randint(1, 4)]),
        "context.kernel": rng.choice(["auto", "auto", "reference"]),
        **draw_plan(rng, domain, longest, tensor),
    }
    return Case(tensor * pipeline * domain, lengths, rng.choice([1, 2, 3, 8]), common, split)


def draw_plan(rng: random.Random, domain: int, longest: int, tensor: int) -> Settings:
    """Draws a mode and a token budget, between what the longest document needs over all ranks and on one rank."""
    mode, pad = rng.choice(["static", "bins", "auto"]), rng.choice([1, 1, 1, 2, 3, 16])
    degree = rng.randint(1, domain)
    needed = next(tokens for tokens in range(1, longest + 1) if longest_document(degree, tokens) >= longest)
    multiple = math.lcm(pad, tensor)
    budget = -(-rng.randint(needed, longest + 1) // multiple) * multiple
    settings: Settings = {"context.mode": mode, "batch.tokens_per_rank": budget, "batch.pad_to_multiple_of": pad}
    if mode == "static":
        settings["context.degree"] = rng.choice([degree, rng.randint(1, domain), None])
    if mode == "bins" and rng.random() < 0.8:
        degrees = sorted([*rng.sample(range(1, domain + 1), rng.randint(1, domain)), degree])
        limits = [*sorted(rng.sample(range(1, longest), min(len(degrees), longest) - 1)), longest]
        settings["context.bins"] = dict(zip(limits, degrees[-len(limits) :], strict=True))
    return settings


def compare(case: Case, workers: Workers, timeout_s: float) -> tuple[float, float]:
    """Returns the maximum relative errors of loss and gradient norm. Raises AssertionError if it fails or tokens differ."""
    one: Settings = {"batch.tokens_per_rank": case.common["data.max_length"], "context.mode": "static"}
    found = []
    with tempfile.TemporaryDirectory(prefix="longctx-random-") as name:
        folder = Path(name)
        profile = yaml.safe_load((files("longctx.planning") / "profiles" / f"{PROFILE}.yaml").read_text())
        (folder / "profile.yaml").write_text(yaml.safe_dump({**profile, "ranks_per_node": case.ranks_per_node}))
        store = make_store(folder, case.lengths)
        for world, settings in ((1, case.common | one), (case.world, case.common | case.split)):
            settings = {**settings, "context.profile": str(folder / "profile.yaml")}
            run = folder / f"run-{len(found)}"
            found.append(workers.run(train_case, world, store, run, overrides(settings), timeout_s, timeout_s=timeout_s)[0])
    alone, split = found
    counts = [[(m.tokens, m.target_tokens) for m in steps] for steps in found]
    assert counts[0] == counts[1], f"tokens and targets are {counts[1]}, but {counts[0]} on one process"
    return error(split, alone, "loss"), error(split, alone, "grad_norm")


def train_case(store: Path, run: Path, settings: list[str], timeout_s: float) -> list[StepMetrics]:
    """Trains after clearing programs compiled by earlier cases: torch stops compiling after a number of recompilations."""
    torch._dynamo.reset()
    return train(store, run, settings, STEPS, timeout_s=timeout_s)


def error(split: Iterable[StepMetrics], alone: Iterable[StepMetrics], name: str) -> float:
    pairs = [(getattr(a, name), getattr(b, name)) for a, b in zip(split, alone, strict=True)]
    return max(abs(value - expected) / (abs(expected) or 1.0) for value, expected in pairs)


def run_case(seed: int, number: int, workers: Workers, timeout_s: float) -> dict[str, object]:
    """Runs a case and returns its row; prints the reason of a failure."""
    case = draw(seed, number)
    began, losses, norms = time.perf_counter(), math.nan, math.nan
    try:
        losses, norms = compare(case, workers, timeout_s)
        result = "equal" if losses <= LOSS and norms <= GRADIENT_NORM else "different"
    except AssertionError as failure:
        result = "crashed"
        print(failure, flush=True)
    if result != "equal":
        print(f"--seed {seed} --only {number}: {result}\n    lengths {case.lengths}; {case.text()}", flush=True)
    found = {"loss_error": f"{losses:.1e}", "gradient_norm_error": f"{norms:.1e}"}
    found["seconds"] = f"{time.perf_counter() - began:.1f}"
    row = {"seed": seed, "case": number, "world": case.world, "result": result, **found}
    print(row, flush=True)
    return {**row, "lengths": " ".join(map(str, case.lengths)), "settings": case.text()}


def page(rows: Sequence[dict[str, str]]) -> list[str]:
    """Returns the page in Markdown."""
    bad = [row for row in rows if row["result"] != "equal"]
    ran = [row for row in rows if row["result"] != "crashed"]
    loss, norm = (max((float(row[name]) for row in ran), default=0.0) for name in ("loss_error", "gradient_norm_error"))
    values = dict[str, Counter[str]]()
    for row in rows:
        for name, value in (item.split("=", 1) for item in row["settings"].split("; ")):
            values.setdefault(name, Counter()).update([value])
    few = {name: sorted(counts.items()) for name, counts in values.items() if len(counts) <= 8}
    versions = sorted({f"torch {row['torch']}, Python {row['python']}, {row['cores']} cores, {row['date']}" for row in rows})
    return [
        f"{len(rows)} random splits of the trainer, {STEPS} float32 steps each, compared with one process: {len(bad)} failed. "
        f"Maximum relative error of the loss: {loss:.1e} ({LOSS:.0e} allowed), of the gradient norm: "
        f"{norm:.1e} ({GRADIENT_NORM:.0e} allowed). Made by `python -m bench.random_splits` "
        f"({'; '.join(versions)}); the CSV file of the same name has all cases, and `--seed S --only K` repeats one.",
        "",
        *(f"Failed: `--seed {row['seed']} --only {row['case']}` ({row['result']}): {row['settings']}\n" for row in bad),
        *markdown(
            ["setting", "values, each with its number of cases"],
            ([name, ", ".join(f"{value} {count}" for value, count in counts)] for name, counts in few.items()),
        ),
    ]


def main() -> int:
    parser = options(__doc__, "random-splits")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--only", type=int, help="run only this case, without writing tables")
    parser.add_argument("--timeout", type=float, default=600.0, help="timeout of collectives in seconds")
    given = parser.parse_args()
    workers = Workers()
    try:
        if given.only is not None:
            print(draw(given.seed, given.only))
            return int(run_case(given.seed, given.only, workers, given.timeout)["result"] != "equal")
        about = {name: value for name, value in facts("torch").items() if name in COLUMNS}
        table = Table(given.out.with_suffix(".csv"), COLUMNS, about | {"cores": str(os.cpu_count())})
        table.rows = [row for row in table.rows if row["result"] == "equal"]  # failed cases run again
        table.write()
        for case in table.missing([{"seed": given.seed, "case": number} for number in range(given.cases)], math.inf):
            table.append(run_case(case["seed"], case["case"], workers, given.timeout))
            given.out.with_suffix(".md").write_text("\n".join(page(table.rows)) + "\n")
    finally:
        workers.stop()
    return int(any(row["result"] != "equal" for row in table.rows))


if __name__ == "__main__":
    sys.exit(main())
