"""What the headline would be if constants of the H100's profile were wrong, as others' measurements
suggest.

    python bench/sensitivity.py     # minutes; writes results/sensitivity.csv, then python bench/figures.py

The step is that of README's example: wlb_128k, 64 ranks, 4 documents per rank, five seeds. Each row
changes constants of the shipped profile; fixed static, the best single degree and auto are planned
anew with them.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from statistics import geometric_mean
from typing import Any

from harness import Table, facts, options
from longctx.comparison.baselines import fixed_degree, plan_fixed_static
from longctx.comparison.mixes import load_mix
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.planners.planner import make_plan
from plan import PROFILE, TOKENS_PER_RANK, Setting, best_single_degree, draw_steps

MIX, RANKS, DOCUMENTS, SEEDS = "wlb_128k", 64, 4, 5
Change = Callable[[HardwareProfile], HardwareProfile]
CHANGES: dict[str, tuple[str, Change]] = {
    "as shipped": ("", lambda p: p),
    "attention takes 1/0.57 of its time": (
        "MagiAttention across 8 nodes: 57 % of ours",
        lambda p: replace(p, attention_s_per_token2=p.attention_s_per_token2 / 0.57),
    ),
    "micro-batches and steps cost three times as much": (
        "Megatron's short steps: 2.5 to 3.4 times ours",
        lambda p: replace(p, launch_s=3 * p.launch_s, step_s=3 * p.step_s),
    ),
    "matrices take 1.14 of their time": (
        "torchtitan, Megatron's large models: 0.88 to 1.08 of ours",
        lambda p: replace(p, linear_s_per_token=1.14 * p.linear_s_per_token),
    ),
    "nothing hides messages": (
        "no measurement known",
        lambda p: replace(p, overlap=0.0, query_share=0.0),
    ),
    "the network has half its rate": (
        "no measurement known",
        lambda p: replace(p, inter_node_bytes_per_s=p.inter_node_bytes_per_s / 2),
    ),
    "split attention is three times as inefficient": (
        "gains in Megatron's benchmark: more than ours",
        lambda p: replace(p, attention_split_penalty=3 * p.attention_split_penalty),
    ),
}
COLUMNS = ["change", "why", "fixed_s", "auto_s", "over_fixed", "best_single", "over_best_single"]


def main() -> None:
    arguments = options(__doc__, "sensitivity.csv").parse_args()
    table = Table(arguments.out, COLUMNS, facts("longctx", "numpy"), overwrite=True)
    steps = draw_steps(Setting("speedups", MIX, RANKS, DOCUMENTS), SEEDS)
    longest = load_mix(MIX).longest
    for name, (why, change) in CHANGES.items():
        profile = change(HardwareProfile.load(PROFILE))
        request: dict[str, Any] = {
            "ranks": RANKS,
            "tokens_per_rank": TOKENS_PER_RANK,
            "profile": profile,
        }
        degree = fixed_degree(longest, RANKS, TOKENS_PER_RANK)
        fixed = [plan_fixed_static(step, **request, degree=degree).makespan_s for step in steps]
        auto = [make_plan(step, **request).makespan_s for step in steps]
        single = best_single_degree(steps, longest, RANKS, profile, auto)
        ratio = geometric_mean([a / b for a, b in zip(fixed, auto, strict=True)])
        row = [
            name,
            why,
            sum(fixed) / SEEDS,
            sum(auto) / SEEDS,
            ratio,
            single.best_single_degree,
            single.speedup_over_best_single,
        ]
        table.append(dict(zip(COLUMNS, row, strict=True)))
        print(*row, file=sys.stderr)


if __name__ == "__main__":
    main()
