"""Predicts training on 8 to 3,072 GPUs: the best split of the GPUs for models of 8B to 1T, with
dynamic degrees and without.

    python bench/scaling.py      # docs/evidence/scaling.md and bench/results/scaling.csv; run again, it makes what is missing

Nothing here runs on a GPU: all times are those of the cost model with the profile of an H100, and
memory that of the memory model. For every model and number of GPUs the search of `bench/split.py`
finds the best split with mode auto for the step of seed 0, which is then planned for five steps.
Fixed static trains the same five steps on the split that is best for them, at the smallest power of
two that holds the longest document of the mix, packed in the order drawn.

Steps have 4 documents per GPU with lengths of a published mix, at most 2,048, as a step cannot grow
with the GPUs forever.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, get_type_hints

import numpy as np

from harness import Table, command, facts, markdown, options
from longctx.comparison.mixes import load_mix
from longctx.errors import UserError
from longctx.model.presets import PRESETS
from longctx.planning.assignment import Integers
from longctx.planning.cost.spec import ModelSpec
from longctx.planning.planners.planner import make_plan
from longctx.training.metrics import model_flops
from split import schedule_name
from split_cost import LLAMA_3_VOCABULARY, Machine, Split, profile_of
from split_search import memory_of, search
from static_split import best_static

PAGE = Path(__file__).parent.parent / "docs" / "evidence" / "scaling.md"
PROFILE, MIX = "h100-nvlink-ib", "wlb_128k"
DOCUMENTS_A_GPU, MOST_DOCUMENTS = 4, 2048
SEEDS = 5


PRESET = {
    "8B": "llama-3.1-8b",
    "70B": "llama-3.1-70b",
    "462B": "llama-style-462b",
    "1T": "llama-style-1t",
}
MODELS = {name: PRESETS[preset] for name, preset in PRESET.items()}
"""All are in the style of Llama 3.1, with 8 heads of K and V: 462B is its 405B with more layers."""
GPUS = {
    "8B": (8, 64, 256, 1024),
    "70B": (8, 64, 256, 1024, 3072),
    "462B": (64, 256, 1024),
    "1T": (64, 256, 1024, 3072),
}
"""Numbers of GPUs of every model. Searches for 8B and 462B on 3,072 take a quarter of an hour and
longer."""


TEXT = """# Dynamic degrees gain 1.0 to 2.0 times on 8 to 3,072 GPUs, each side on its best split

**Claim.** Against one degree for the whole run on the tensor, pipeline and data split that is best for it, mode `auto` on its
own best split is 1.04 to 2.00 times as fast, for models of 8B to 1T. **Predicted** by the cost and memory models for H100s
with 80 GB, 8 per node with NVLink and 400 Gb/s InfiniBand each.

**Made by** `python bench/scaling.py`; [what the search does](../parallelism.md#which-split-of-the-gpus).

**How it could be wrong**

- [The constants](others.md) are those of data sheets and of published runs. One constant covers matrices of all sizes: of 1T on
  3,072 A100s, [163 TFLOP/s per GPU](https://arxiv.org/abs/2104.04473) are predicted as 181, and 135 of 18.4B as 137.
- Pipelines are 1F1B or interleaved. With zero-bubble schedules, which longctx had until 2026-11-27, fixed static of the 8B
  model was faster: the gain was 1.20× on 64, 1.36× on 256 and 1.67× on 1,024 GPUs, with attention at 45 % of the peak.
- The search has not been compared with a GPU run.

Each row is the fastest split of the GPUs for steps of {documents} documents per GPU, at most {most:,}, with lengths of {mix};
means of {seeds} steps. [Fixed static](speedup.md#the-baselines) trains the same documents on the split that is fastest for it.

<!-- scaling -->
{table}
<!-- end of scaling -->

{left_out}
All models are in the style of Llama 3.1: 462B is its 405B with 144 layers, and 1T has 140 layers of width 24,576.

{made}
"""


@dataclass(frozen=True)
class Row:
    """Predictions for a model on a number of GPUs, means over steps; those of fixed static begin
    with `static`."""

    model: str
    gpus: int
    documents: int
    tokens: int
    tp: int
    pp: int
    domain: int
    schedule: str
    recompute: str
    tokens_per_rank: int
    step_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    memory_gib: float
    static_tp: int
    static_pp: int
    static_degree: int
    static_step_s: float
    static_mfu: float
    search_s: float

    @property
    def speedup(self) -> float:
        return self.static_step_s / self.step_s


def main() -> None:
    parser = options(__doc__, "scaling", minutes=60.0)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    given = parser.parse_args()
    page_at = PAGE if given.out == parser.get_default("out") else given.out.with_suffix(".md")
    began = time.monotonic()
    machine = Machine.load(PROFILE)
    about = facts("longctx", "numpy") | {"profile": PROFILE, "mix": MIX, "command": command()}
    table = Table(given.out.with_suffix(".csv"), [*Row.__annotations__, "refused"], about)
    wanted = [{"model": name, "gpus": gpus} for name in given.models for gpus in GPUS[name]]
    for row in table.missing(wanted, began + 60 * given.minutes):
        try:
            table.append(asdict(predict(machine, row["model"], row["gpus"])))
        except UserError as error:
            table.append({**row, "refused": str(error)})
        print(
            ", ".join(f"{name} {value}" for name, value in table.rows[-1].items() if value),
            file=sys.stderr,
        )
    page_at.write_text(page(table.rows, about), "utf-8")


def predict(machine: Machine, name: str, gpus: int, seeds: int = SEEDS) -> Row:
    """Returns the predictions. Raises UserError if no split of the GPUs holds the model and its
    documents."""
    spec = MODELS[name].model_copy(update={"vocab_size": LLAMA_3_VOCABULARY}).spec
    documents, mix = min(MOST_DOCUMENTS, DOCUMENTS_A_GPU * gpus), load_mix(MIX)
    steps = [np.array(mix.draw(documents, seed), dtype=np.int64) for seed in range(seeds)]
    began = time.perf_counter()
    outcome = search(machine, spec, [steps[0].tolist()], gpus, longest=mix.longest)
    search_s = time.perf_counter() - began
    split, step_s, memory = _auto(
        machine, spec, [best.split for best in outcome.best], steps, mix.longest
    )
    static = best_static(machine, spec, steps, gpus, longest=mix.longest)
    assert static is not None  # mode auto found a split
    flops = fmean(model_flops(spec, lengths.tolist()) for lengths in steps)
    tokens = fmean(int(lengths.sum()) for lengths in steps)
    return Row(
        model=name,
        gpus=gpus,
        documents=documents,
        tokens=round(tokens),
        tp=split.tensor,
        pp=split.pipeline.ranks,
        domain=split.domain,
        schedule=schedule_name(split.pipeline),
        recompute=split.recompute,
        tokens_per_rank=split.tokens_per_rank,
        step_s=step_s,
        tokens_per_s_per_gpu=tokens / step_s / gpus,
        mfu=flops / (step_s * gpus * machine.peak_flops_per_s),
        memory_gib=memory / 2**30,
        static_tp=static.split.tensor,
        static_pp=static.split.pipeline.ranks,
        static_degree=static.degree,
        static_step_s=static.step_s,
        static_mfu=flops / (static.step_s * gpus * machine.peak_flops_per_s),
        search_s=search_s,
    )


def _auto(
    machine: Machine,
    spec: ModelSpec,
    splits: Sequence[Split],
    steps: Sequence[Integers],
    longest: int,
) -> tuple[Split, float, int]:
    """Returns the first of the splits whose memory holds all steps, its mean seconds per step, and
    bytes of memory."""
    for split in splits:
        request: dict[str, Any] = {"ranks": split.domain, "tokens_per_rank": split.tokens_per_rank}
        request |= {"pipeline": split.pipeline, "max_remote_tokens": split.max_remote_tokens}
        request["profile"] = profile_of(machine, spec, split)
        plans = [make_plan(lengths.tolist(), **request) for lengths in steps]
        memory = memory_of(
            machine, spec, split, longest, max(len(plan.micro_batches) for plan in plans)
        ).total
        if memory <= machine.memory_bytes:
            return split, fmean(plan.makespan_s for plan in plans), memory
    raise UserError("no split that is fast for the first step has memory for the others")


def page(found: list[dict[str, str]], about: dict[str, str]) -> str:
    """Returns the page of the table's rows."""
    types = get_type_hints(Row)
    found = sorted(found, key=lambda row: (list(MODELS).index(row["model"]), int(row["gpus"])))
    rows = [
        Row(**{name: types[name](row[name]) for name in types})
        for row in found
        if not row["refused"]
    ]
    head = (
        *(
            "model",
            "GPUs",
            "tokens per step",
            "tp × pp × domain",
            "schedule",
            "recompute",
            "tokens per rank",
            "step",
        ),
        *(
            "tokens/s per GPU",
            "MFU",
            "memory",
            "**over fixed static**",
            "its tp × pp, degree, MFU",
        ),
    )
    lines = [
        [
            row.model,
            f"{row.gpus:,}",
            f"{row.tokens / 1e6:.1f}M",
            f"{row.tp} × {row.pp} × {row.domain}",
            row.schedule,
            row.recompute,
            f"{row.tokens_per_rank:,}",
            f"{row.step_s:.3g} s",
            f"{row.tokens_per_s_per_gpu:,.0f}",
            f"{row.mfu:.1%}",
            f"{row.memory_gib:.0f} GiB",
            f"**{row.speedup:.2f}×**",
            f"{row.static_tp} × {row.static_pp}, {row.static_degree}, {row.static_mfu:.1%}",
        ]
        for row in rows
    ]
    gone = [f"{row['model']} on {int(row['gpus']):,}" for row in found if row["refused"]]
    versions = ", ".join(f"{name} {value}" for name, value in about.items() if name != "command")
    left_out = f"Too few GPUs: {', '.join(gone)}.\n" if gone else ""
    longest_s = max((row.search_s for row in rows), default=0.0)
    return TEXT.format(
        documents=DOCUMENTS_A_GPU,
        most=MOST_DOCUMENTS,
        mix=MIX,
        seeds=SEEDS,
        table="\n".join(markdown(head, lines, 1)),
        left_out=left_out,
        made=f"{versions}, `python bench/scaling.py`; the longest search took {longest_s:.0f} s.",
    )


if __name__ == "__main__":
    main()
