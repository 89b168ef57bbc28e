"""Prefix trees beside the same sequences one by one: CPU time of a model, and predicted steps of
three sets of groups.

    python bench/trees.py                                       # about 5 minutes on one core
    python bench/trees.py --groups groups.jsonl --ranks 64      # only predicts, for a file of groups

Measured: forward and backward of a Llama of two layers from transformers over one group, packed as
trees and as sequences, in turn in one process with one thread; the least CPU time of several
rounds, which other processes on the machine change little. Losses and gradients are compared.
Predicted: means of three steps of about four full micro-batches before merging, for the files of
groups in examples/, which this script draws. Writes results/trees.csv.
"""

import json
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
import transformers
from torch.nn import functional as F

from harness import Table, command, facts, options
from longctx import HardwareProfile, make_plan, pack_documents
from longctx.comparison.baselines import fixed_degree, plan_fixed_static
from longctx.data.packing import MicroBatch
from longctx.data.sampler import Sampler
from longctx.data.trees import Merged, merge_prefixes, pack_merged
from longctx.hf.attention import model_inputs, prepare
from longctx.planning.layout import longest_document

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
MEASURED = {"2,048 + 8 × 256": (2048, [256] * 8), "512 + 8 × 512": (512, [512] * 8)}
SETS = {
    "long_prompts": (64, 8, (8192, 98304), (200, 2000)),
    "pairs": (512, 2, (500, 8000), (100, 1000)),
}
SETS["reasoning"] = (128, 8, (200, 4000), (500, 16384))
"""Name → groups, completions of each, and least and most tokens of prompts and of completions,
drawn log-uniformly."""
RANKS, TOKENS_PER_RANK, STEPS, MICRO_BATCHES = 64, 16384, 3, 4
PROFILE = "h100-nvlink-ib"
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
    parser.add_argument(
        "--groups",
        type=Path,
        metavar="FILE",
        help='lines of {"prompt": 2048, "completions": [256, 300]}',
    )
    parser.add_argument(
        "--ranks", type=int, default=RANKS, help="ranks of the domain, with --groups"
    )
    arguments = parser.parse_args()
    if arguments.groups:
        found = predicted(arguments.groups, arguments.ranks)
        print(f"predicted step on {arguments.ranks} GPUs ({PROFILE}), the mean of {STEPS}")
        print(
            f"one degree, {found['fixed_degree']}, for all  {found['tokens']:9,} tokens  "
            f"{found['fixed_static_s']:8.3f} s"
        )
        print(
            f"a degree per sequence    {found['tokens']:9,} tokens  {found['sequences_s']:8.3f} s"
        )
        print(
            f"and prefixes once        {found['merged_tokens']:9,} tokens  {found['trees_s']:8.3f} "
            "s"
        )
        return
    torch.set_num_threads(1)
    known = facts("torch", "transformers", "longctx") | {
        "rounds": str(arguments.rounds),
        "command": command(arguments.out),
    }
    table = Table(arguments.out, COLUMNS, known, overwrite=True)
    for name in SETS:
        row = {"table": "predicted", "name": name, "lengths": in_words(name)}
        table.append(row | predicted(write_groups(name)))
    for name, (prompt, completions) in MEASURED.items():
        table.append(
            {"table": "measured", "name": name} | measured(prompt, completions, arguments.rounds)
        )
        print(table.rows[-1], flush=True)


def write_groups(name: str) -> Path:
    """Draws a set of groups into its file, always the same."""
    groups, count, prompts, completions = SETS[name]
    dice = random.Random(name)

    def drawn(least: int, most: int) -> int:
        return round(math.exp(dice.uniform(math.log(least), math.log(most))))

    path = EXAMPLES / f"groups_{name}.jsonl"
    lines = [
        {"prompt": drawn(*prompts), "completions": [drawn(*completions) for _ in range(count)]}
        for _ in range(groups)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "ascii")
    return path


def in_words(name: str) -> str:
    _, count, prompts, completions = SETS[name]
    (a, b), (c, d) = prompts, completions
    return f"prompts of {a:,} to {b:,} tokens, {count} completions of {c:,} to {d:,}"


def predicted(path: Path, ranks: int = RANKS) -> dict[str, Any]:
    """Returns the means of three steps of a file of groups, whose completions differ from their
    first tokens on."""
    records = map(json.loads, filter(None, path.read_text("utf-8").splitlines()))
    groups = [(record["prompt"], record["completions"]) for record in records]
    lengths = [[prompt + tokens for tokens in completions] for prompt, completions in groups]
    of_all = sum(map(sum, lengths))
    count = max(
        1, min(len(groups), MICRO_BATCHES * ranks * TOKENS_PER_RANK * len(groups) // of_all)
    )
    degree = fixed_degree(max(map(max, lengths)), ranks, TOKENS_PER_RANK)
    request: dict[str, Any] = {
        "ranks": ranks,
        "tokens_per_rank": TOKENS_PER_RANK,
        "profile": HardwareProfile.load(PROFILE),
    }
    sampler = Sampler(np.ones(len(groups), np.int64), global_tokens=count, seed=0, max_length=1)
    steps = []
    for step in range(STEPS):
        drawn = [piece.document for piece in sampler.step(step * count)[0]]
        alone = [length for group in drawn for length in lengths[group]]
        sizes: list[int] = []
        trees = {}
        for merged in (merge(*groups[group], ranks) for group in drawn):
            trees |= {len(sizes) + place: tree for place, tree in merged.trees.items()}
            sizes += merged.lengths
        plans = make_plan(alone, **request), make_plan(sizes, **request, trees=trees)
        fixed = plan_fixed_static(alone, **request, degree=degree)
        steps.append((sum(alone), sum(sizes), *(plan.makespan_s for plan in (*plans, fixed))))
    tokens, merged_tokens, *seconds = map(fmean, zip(*steps, strict=True))
    names = ("sequences_s", "trees_s", "fixed_static_s")
    known = {
        "tokens": round(tokens),
        "merged_tokens": round(merged_tokens),
        **dict(zip(names, seconds, strict=True)),
    }
    return known | {"fixed_degree": str(degree)}


def merge(prompt: int, completions: Sequence[int], ranks: int) -> Merged:
    """Returns the trees of a group."""
    sequences = [
        np.repeat([0, 1 + number], [prompt, tokens]) for number, tokens in enumerate(completions)
    ]
    return merge_prefixes(
        sequences,
        most_tokens=longest_document(ranks, TOKENS_PER_RANK),
        tokens_per_rank=TOKENS_PER_RANK,
    )


def measured(prompt: int, completions: list[int], rounds: int) -> dict[str, Any]:
    """Returns CPU seconds of a step over one group, as sequences and as trees, and the relative
    difference of gradients."""
    numbers = np.random.default_rng(0)
    start = numbers.integers(VOCABULARY, size=prompt)
    sequences = [
        np.append(start, numbers.integers(VOCABULARY, size=tokens)) for tokens in completions
    ]
    merged = merge_prefixes(sequences)
    request: dict[str, Any] = {
        "ranks": 1,
        "tokens_per_rank": 1 << 15,
        "profile": HardwareProfile.load("cpu-2core"),
    }
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
            gradients[way] = torch.cat(
                [parameter.grad.flatten() for parameter in model.parameters()]
            )
    one, other = gradients["sequences_s"], gradients["trees_s"]
    difference = float((one - other).norm() / one.norm())
    return {
        "tokens": sum(map(len, sequences)),
        "merged_tokens": sum(merged.lengths),
        "difference": difference,
    } | seconds


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
