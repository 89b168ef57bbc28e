"""A published measurement through our cost model: Megatron's own benchmark of dynamic context parallelism, on 4 to 64 GPUs.

    python bench/megatron_published.py      # minutes; needs the wheel's class: pip install 'longctx[bench]'

Published (examples/dynamic_context_parallel in the dev branch of NVIDIA/Megatron-LM, README.md and benchmark_dcp.sh at commit
10ce7bc; one run each, June 9, 2026): the time of an iteration under `dp_balanced`, which is fixed static of degree 4, and
under `default_dynamic_cp`, as means of iterations 11 to 30 without the fastest and the slowest 10 %. 12 layers of 2,048 (MLP
8,192, 16 heads, vocabulary 131,072), 2,048 tokens a rank, 8 documents for every 4 GPUs in a step, their lengths lognormal
(mean 1,024, sigma 1.5, cut to 128 … 8,192) from the generator and seed used here, padded to 8.

Not published, so assumed: the kind of GPU (there are four a node; taken as H100), the network, and the order of the documents
(taken as drawn; five runs of 20 steps show what it changes). Their scheduler of that day is read in two ways that lie on
either side of it: the class of the megatron-core wheel, before packing, and our reading of the later dev branch.

The prediction is by the shipped profile scaled to that model: nothing that they measured enters.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from harness import markdown, options
from longctx.comparison.baselines import plan_baseline, plan_fixed_static
from longctx.comparison.layouts.cost import Machine, Split, profile_of
from longctx.model.presets import ModelShape
from longctx.planning.cost.hardware_profile import HardwareProfile
from longctx.planning.cost.pipeline import NO_PIPELINE
from longctx.planning.plan import Plan
from longctx.planning.planner import make_plan

Lengths = np.ndarray[tuple[int], np.dtype[np.int64]]
MEASURED_MS = {4: (195.269, 151.906), 8: (220.119, 155.850), 16: (226.775, 187.125)}
MEASURED_MS |= {32: (286.206, 208.088), 64: (271.988, 181.912)}
"""GPUs → milliseconds of an iteration under dp_balanced and under default_dynamic_cp."""
PROFILE = "h100-nvlink-ib"
GPUS_PER_NODE, DEGREE, TOKENS_PER_RANK, MICRO_BATCHES, STEPS, RUNS = 4, 4, 2048, 8, 20, 5
SHAPE = ModelShape(
    vocab_size=131_072,
    hidden_size=2048,
    intermediate_size=8192 * 2 // 3,  # theirs has two matrices, ours three: as many parameters
    num_hidden_layers=12,
    num_attention_heads=16,
    num_key_value_heads=16,
    head_dim=128,
)
WHY = """Most of an iteration of so few tokens is time that depends on no token, of which the model knows the launches alone.
We think that a ring of four costs more of it than no ring: the model counts rings in bytes, not in kernels and messages. Its
barrier after every micro-batch, which their runs have not, works the other way: it slows the modelled baseline."""


def main() -> None:
    out = options(__doc__, "megatron-published").parse_args().out
    lengths = mock_lengths()
    plans = {gpus: plan_steps(lengths, gpus, scaled_profile(gpus)) for gpus in MEASURED_MS}
    launch_ms = 1e3 * plans[4]["auto"][0].profile.launch_s
    measured = [before / after for before, after in MEASURED_MS.values()]
    off = [ratio(by, "megatron-dev") / found - 1 for by, found in zip(plans.values(), measured, strict=True)]
    lines = [
        "Speedups over fixed static of degree 4 (`dp_balanced`): measured by Megatron's authors, and as our cost model has "
        f"them, in brackets lowest and highest of {RUNS} runs of {STEPS} steps. Their scheduler is read in two ways; auto is",
        f"ours.\n\nBy {PROFILE}, scaled to their model, {launch_ms:.0f} ms a micro-batch:\n",
        *table(plans),
        f"\nBy the reading of the dev branch, the model is {min(off):+.0%} to {max(off):+.0%} off what was measured. {WHY}",
        "\nMade by `python bench/megatron_published.py`, whose head says what is published and what is assumed.\n",
    ]
    out.with_suffix(".md").write_text("\n".join(lines), encoding="utf-8")


def mock_lengths() -> Lengths:
    """A million lengths as their mock data set has them: without the last token, padded to 2 × degree."""
    drawn = np.random.RandomState(0).lognormal(np.log(1024) - 1.5**2 / 2, 1.5, 1_000_000)
    samples = np.clip(drawn, 128, 8192).astype(np.int64)
    return -(-(samples - 1) // (2 * DEGREE)) * 2 * DEGREE


def scaled_profile(gpus: int) -> HardwareProfile:
    """Of the shipped profile's GPUs, for this model; gradients are reduced once a step, weights not sharded in between."""
    machine = Machine.load(PROFILE)
    machine = replace(machine, profile=replace(machine.profile, ranks_per_node=GPUS_PER_NODE))
    return profile_of(machine, SHAPE.spec, Split(1, NO_PIPELINE, gpus, "none", "step", "step", TOKENS_PER_RANK))


def plan_steps(lengths: Lengths, gpus: int, profile: HardwareProfile) -> dict[str, list[Plan]]:
    """Every step's plan under each planner."""
    drawn = lengths[: RUNS * STEPS * MICRO_BATCHES * gpus // DEGREE].reshape(RUNS * STEPS, -1).tolist()
    request: dict[str, Any] = {"ranks": gpus, "tokens_per_rank": TOKENS_PER_RANK, "profile": profile}
    theirs = ("megatron-main", "megatron-dev")
    return {
        "fixed-static": [plan_fixed_static(step, **request, degree=DEGREE) for step in drawn],
        **{planner: [plan_baseline(planner, step, **request) for step in drawn] for planner in theirs},
        "auto": [make_plan(step, **request) for step in drawn],
    }


def trimmed_ms(plans: Sequence[Plan]) -> float:
    """Mean without the fastest and the slowest 10 %, as theirs."""
    cut = len(plans) // 10
    return 1e3 * float(np.mean(sorted(plan.makespan_s for plan in plans)[cut : len(plans) - cut]))


def ratio(by: dict[str, list[Plan]], planner: str, run: slice = slice(None)) -> float:
    """Speedup of a planner over fixed static."""
    return trimmed_ms(by["fixed-static"][run]) / trimmed_ms(by[planner][run])


def table(plans: dict[int, dict[str, list[Plan]]]) -> list[str]:
    head = ["GPUs", "baseline, measured", "modelled", "**theirs, measured**", "modelled: wheel", "modelled: dev", "auto"]
    lines = []
    for gpus, by in plans.items():
        base, dynamic = MEASURED_MS[gpus]
        line = [str(gpus), f"{base:.0f} ms", f"{trimmed_ms(by['fixed-static']):.0f} ms", f"**{base / dynamic:.2f}**"]
        for planner in ("megatron-main", "megatron-dev", "auto"):
            of_runs = [ratio(by, planner, slice(i * STEPS, (i + 1) * STEPS)) for i in range(RUNS)]
            line.append(f"{ratio(by, planner):.2f} ({min(of_runs):.2f} to {max(of_runs):.2f})")
        lines.append(line)
    return markdown(head, lines, 0)


if __name__ == "__main__":
    main()
