"""Prefix trees beside the same sequences one by one: CPU time of a model, and predicted steps of three sets of groups.

    python bench/trees.py               # about 5 minutes on one core

Measured: forward and backward of a Llama of two layers from transformers over one group, packed as trees and as sequences, in
turn in one process with one thread; the least CPU time of several rounds, which other processes on the machine change little.
Losses and gradients are compared. Predicted: `longctx compare --groups` for the files of groups in examples/, which this script
draws. Writes results/trees.csv.
"""

import contextlib
import io
import json
import math
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.nn import functional as F

from harness import Table, command, facts, options
from longctx import HardwareProfile, make_plan, pack_documents
from longctx.attention.huggingface import model_inputs, prepare
from longctx.cli import main as longctx
from longctx.data.packing import MicroBatch
from longctx.data.trees import merge_prefixes, pack_merged

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
MEASURED = {"2,048 + 8 × 256": (2048, [256] * 8), "512 + 8 × 512": (512, [512] * 8)}
SETS = {"long_prompts": (64, 8, (8192, 98304), (200, 2000)), "pairs": (512, 2, (500, 8000), (100, 1000))}
SETS["reasoning"] = (128, 8, (200, 4000), (500, 16384))
"""Name → groups, completions of each, and least and most tokens of prompts and of completions, drawn log-uniformly."""
RANKS = 64
VOCABULARY = 4096
COLUMNS = [
    "table",
    "name",
    "lengths",
    "tokens",
    "merged_tokens",
    "sequences_s",
    "trees_s",
    "fixed_static_s",
    "fixed_degree",
    "difference",
]


def main() -> None:
    parser = options(__doc__, "trees.csv")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    known = facts("torch", "transformers", "longctx") | {"rounds": str(arguments.rounds), "command": command(arguments.out)}
    table = Table(arguments.out, COLUMNS, known, overwrite=True)
    for name in SETS:
        row = {"table": "predicted", "name": name, "lengths": in_words(name)}
        table.append(row | predicted(write_groups(name)))
    for name, (prompt, completions) in MEASURED.items():
        table.append({"table": "measured", "name": name} | measured(prompt, completions, arguments.rounds))
        print(table.rows[-1], flush=True)


def write_groups(name: str) -> Path:
    """Draws a set of groups into its file, always the same."""
    groups, count, prompts, completions = SETS[name]
    dice = random.Random(name)

    def drawn(least: int, most: int) -> int:
        return round(math.exp(dice.uniform(math.log(least), math.log(most))))

    path = EXAMPLES / f"groups_{name}.jsonl"
    lines = [{"prompt": drawn(*prompts), "completions": [drawn(*completions) for _ in range(count)]} for _ in range(groups)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "ascii")
    return path


def in_words(name: str) -> str:
    _, count, prompts, completions = SETS[name]
    (a, b), (c, d) = prompts, completions
    return f"prompts of {a:,} to {b:,} tokens, {count} completions of {c:,} to {d:,}"


def predicted(path: Path) -> dict[str, Any]:
    """Returns the means of three steps of a file of groups."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert longctx(["compare", "--groups", str(path), "--ranks", str(RANKS), "--json"]) == 0
    rows = {row["planner"]: row for row in json.loads(output.getvalue())["means"]}
    return {
        "tokens": rows["auto"]["tokens"],
        "merged_tokens": rows["trees"]["tokens"],
        "sequences_s": rows["auto"]["makespan_s"],
        "trees_s": rows["trees"]["makespan_s"],
        "fixed_static_s": rows["fixed-static"]["makespan_s"],
        "fixed_degree": rows["fixed-static"]["winner"].removeprefix("static:"),
    }


def measured(prompt: int, completions: list[int], rounds: int) -> dict[str, Any]:
    """Returns CPU seconds of a step over one group, as sequences and as trees, and the relative difference of gradients."""
    numbers = np.random.default_rng(0)
    start = numbers.integers(VOCABULARY, size=prompt)
    sequences = [np.append(start, numbers.integers(VOCABULARY, size=tokens)) for tokens in completions]
    merged = merge_prefixes(sequences)
    request: dict[str, Any] = {"ranks": 1, "tokens_per_rank": 1 << 15, "profile": HardwareProfile.load("cpu-2core")}
    alone = pack_documents(make_plan([len(s) for s in sequences], **request), 0, sequences)
    ways = {
        "sequences_s": (alone[0], float(alone[1])),
        "trees_s": pack_merged(make_plan(merged.lengths, trees=merged.trees, **request), 0, merged),
    }
    model = llama()
    gradients, seconds = {}, dict.fromkeys(ways, math.inf)
    for _ in range(rounds):
        for way, (micro_batches, targets) in ways.items():
            model.zero_grad()
            began = time.process_time()
            step(model, micro_batches, targets)
            seconds[way] = min(seconds[way], time.process_time() - began)
            gradients[way] = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    one, other = gradients["sequences_s"], gradients["trees_s"]
    difference = float((one - other).norm() / one.norm())
    return {"tokens": sum(map(len, sequences)), "merged_tokens": sum(merged.lengths), "difference": difference} | seconds


def step(model: Any, micro_batches: list[MicroBatch], targets: float) -> None:
    for batch in micro_batches:
        logits = model(**model_inputs(model, batch)).logits[0]
        losses = F.cross_entropy(logits, batch.labels, reduction="none")
        (losses * (1 if batch.weights is None else batch.weights)).sum().div(targets).backward()


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=4096,
    )
    model = transformers.LlamaForCausalLM(config)
    prepare(model)
    return model


if __name__ == "__main__":
    main()
