"""Predicts what others have measured on GPUs, beside their figures: step time, memory, longest
document, kernel speed.

    python -m bench.published          # seconds; writes bench/results/published.csv and the table of docs/evidence/others.md

Whole runs are those of bench/published_runs.py, half of them held out. Other sources: Megatron-LM's
benchmark of dynamic context parallelism (bench/results/megatron-published.md) and Table 1 of Narayanan et
al., 2021; verl, pull request 6555; Arctic Long Sequence Training (DeepSpeed, 2025); MagiAttention's
benchmark. Settings that are not published are assumed, and said in the column "assumed".
"""

import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench.harness import RESULTS, Table, facts, markdown
from bench.published_runs import figures
from bench.recipes import ROOT, replaced, stand_in
from longctx.comparison.baselines import plan_fixed_static
from longctx.comparison.mixes import load_mix
from longctx.config import Config, load
from longctx.memory.fitting import RunMemory
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.plan import Plan
from longctx.planning.planners.planner import make_plan
from longctx.training.run_profile import run_profile

H100, A100 = "h100-nvlink-ib", "a100-80gb"
LLAMA_8B = "meta-llama/Llama-3.1-8B"
PAGE = ROOT / "docs" / "evidence" / "others.md"
COLUMNS = ["who", "what", "unit", "measured", "predicted", "ratio", "assumed", "held_out"]


@dataclass(frozen=True)
class Row:
    """A published figure, and ours: None if it is not predicted."""

    who: str
    what: str
    unit: str
    measured: float
    predicted: float | None
    assumed: str = ""
    held_out: str = ""

    @property
    def ratio(self) -> float | None:
        return None if self.predicted is None else self.predicted / self.measured

    @property
    def error(self) -> float | None:
        """How far time or memory is off, relative to what was measured: 0.1 if a run is predicted
        to take a tenth longer."""
        if self.ratio is None:
            return None
        return (1 / self.ratio if "/s per GPU" in self.unit else self.ratio) - 1

    @property
    def kind(self) -> str:
        """What is predicted: memory, or time in bfloat16 or with float8."""
        return (
            "memory"
            if self.unit.startswith("G")
            else "time, float8"
            if "float8" in self.what
            else "time, bfloat16"
        )


def configured(
    model: str, gpus: int, tokens_per_rank: int, profile: str = H100, **values: Any
) -> Config:
    """Returns the settings of a run; `values` by name, with two underscores for the dot."""
    named = (
        f"model.preset={model}" if "/" not in model else f"model.from_pretrained={stand_in(model)}"
    )
    given = {name.replace("__", "."): value for name, value in values.items()}
    common = {
        "batch.tokens_per_rank": tokens_per_rank,
        "context.profile": profile,
        "train.device": "cuda",
    }
    return load(
        None,
        [named, *(f"{name}={value}" for name, value in (common | given).items())],
        world_size=gpus,
    )


def planned(
    config: Config, gpus: int, lengths: Sequence[int], vocabulary: int | None = None
) -> Plan:
    return make_plan(
        lengths,
        ranks=config.domain(gpus),
        tokens_per_rank=config.batch.tokens_per_rank,
        profile=run_profile(config, gpus, vocabulary).profile,
        mode=config.context.mode,
        degree=config.context.degree,
        pipeline=config.pipeline,
    )


def gib_of(config: Config, gpus: int, vocabulary: int) -> float:
    spec = config.model_source(vocabulary).spec
    return RunMemory(spec, None, gpus, True).peak(config).total / 2**30


def megatron_models() -> Iterator[Row]:
    """Table 1 of Narayanan et al.: full recomputation, sequences of 2,048 tokens, TFLOP/s as they
    count them."""
    for model, heads, layers, hidden, tensor, pipeline, chunks, gpus, batch, measured in (
        ("18.4B", 48, 40, 6144, 8, 1, 1, 256, 1024, 135),
        ("530B", 128, 105, 20480, 8, 35, 3, 2520, 2520, 163),
        ("1T", 160, 128, 25600, 8, 64, 2, 3072, 3072, 163),
    ):
        pipelined = {"parallel__pipeline_chunks": chunks} if pipeline > 1 else {}
        config = configured(
            "llama-3.1-8b",
            gpus,
            2048,
            A100,
            model__vocab_size=51200,
            model__hidden_size=hidden,
            model__intermediate_size=round(8 * hidden / 3),
            model__num_hidden_layers=layers,
            model__num_attention_heads=heads,
            model__num_key_value_heads=heads,
            model__head_dim=hidden // heads,
            model__tie_word_embeddings=True,
            parallel__tensor_parallel_size=tensor,
            parallel__pipeline_parallel_size=pipeline,
            batch__global_tokens=2048 * batch,
            train__recompute="full",
            context__mode="static",
            context__degree=1,
            **pipelined,
        )
        plan = planned(config, gpus, [2048] * batch, 51200)
        flops = (
            96
            * batch
            * 2048
            * layers
            * hidden**2
            * (1 + 2048 / (6 * hidden) + 51200 / (16 * layers * hidden))
        )
        what = f"{model}, {gpus:,} A100s"
        predicted = flops / plan.makespan_s / gpus / 1e12
        yield Row(
            "Megatron-LM",
            what,
            "TFLOP/s per GPU",
            measured,
            predicted,
            "MLPs of three matrices with as many parameters",
        )


def megatron_dynamic() -> Iterator[Row]:
    """The rows of results/megatron-published.md."""
    text = (RESULTS / "megatron-published.md").read_text("utf-8")
    for gpus, fixed_ms, modelled_ms, gain, gain_modelled in re.findall(
        r"\| (\d+) \| (\d+) ms \| (\d+) ms \| \*\*([\d.]+)\*\* \| [^|]*\| ([\d.]+) \(", text
    ):
        what = f"12 layers, up to 8,192 tokens, {gpus} GPUs"
        yield Row(
            "Megatron-LM dev",
            f"{what}, fixed CP 4",
            "ms per step",
            float(fixed_ms),
            float(modelled_ms),
            "H100s",
        )
        reading = "H100s; our reading of its scheduler"
        yield Row(
            "Megatron-LM dev",
            f"{what}, dynamic over fixed",
            "speedup",
            float(gain),
            float(gain_modelled),
            reading,
        )


def verl() -> Row:
    """Dynamic context parallelism over fixed degree 4, documents of 1k to 16k tokens."""
    config = configured(
        "qwen3-30b-a3b", 8, 4096, batch__global_tokens=2**19, train__recompute="selective"
    )
    lengths = [min(16384, max(1024, length)) for length in load_mix("wlb_128k").draw(256, seed=0)]
    profile = run_profile(config, 8, 151936).profile
    fixed = plan_fixed_static(lengths, ranks=8, tokens_per_rank=4096, profile=profile, degree=4)
    gain = fixed.makespan_s / planned(config, 8, lengths, 151936).makespan_s
    assumed = "8 H100s; lengths of wlb_128k, cut; our own planner"
    return Row(
        "verl",
        "Qwen3 30B-A3B, 1k to 16k tokens, dynamic over fixed CP 4",
        "speedup",
        1.606,
        gain,
        assumed,
    )


def alst() -> Iterator[Row]:
    """The longest document of Llama 8B, with weights, optimizer and checkpoints in host memory and
    tiled MLP and loss."""
    for gpus, measured in ((1, 500_000), (8, 3_700_000)):
        low, high = 2**12, 2**22

        def fits(tokens: int, gpus: int = gpus) -> bool:
            offload = {
                "train__offload_activations": "true",
                "train__offload_optimizer": "true",
                "train__mlp_tile_tokens": 2048,
            }
            offload |= {"context__ulysses_degree": gpus}
            config = configured(
                LLAMA_8B, gpus, tokens, train__recompute="full", train__compile="false", **offload
            )
            return gib_of(config, gpus, 128256) * 2**30 <= 80e9

        while high - low > 1024:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        yield Row("ALST", f"Llama 3.1 8B, {gpus} H100s", "longest document", measured, gpus * low)


def magi() -> Iterator[Row]:
    """Attention alone, packed causal documents, 8,192 tokens per GPU: TFLOP/s of forward and
    backward together."""
    profile = HardwareProfile.load(H100)
    # Of a pass and its backward, per pair of tokens below the diagonal, of 32 layers.
    flops = 3.5 * 2 * 32 * 32 * 128
    for gpus, forward, backward in ((8, 459, 361), (64, 238, 264)):
        length = 8192 * gpus
        alone = replace(profile, linear_s_per_token=1e-12, launch_s=0.0, step_s=0.0, latency_s=0.0)
        plan = make_plan(
            [length], ranks=gpus, tokens_per_rank=8192, profile=alone, mode="static", degree=gpus
        )
        measured = 3.5 / (1 / forward + 2.5 / backward)
        predicted = flops * length**2 / plan.makespan_s / gpus / 1e12
        what = f"attention alone, 8,192 tokens per GPU, {gpus} H100s"
        yield Row(
            "MagiAttention",
            what,
            "TFLOP/s per GPU",
            measured,
            predicted,
            "one document; heads of an 8B; all messages hidden",
        )


def rows() -> list[Row]:
    return [*megatron_models(), *megatron_dynamic(), verl(), *alst(), *magi()]


def table_of(published: Sequence[Row]) -> str:
    """Returns the table of the page."""
    lines = [
        [
            row.who,
            row.what,
            row.unit,
            f"{row.measured:,.0f}" if row.measured >= 100 else f"{row.measured:.3g}",
            *(("–", "–") if row.ratio is None else shown(row)),
            row.assumed,
        ]
        for row in published
    ]
    head = ("who", "what", "unit", "measured", "predicted", "predicted / measured", "assumed")
    return "\n".join([*markdown(head, lines), ""])


def shown(row: Row) -> tuple[str, str]:
    assert row.predicted is not None
    return (
        f"{row.predicted:,.0f}" if row.predicted >= 100 else f"{row.predicted:.3g}",
        f"{row.ratio:.2f}",
    )


def run_rows() -> Iterator[Row]:
    """The runs of published_runs.csv, each with its figures; what our settings refuse is not
    predicted."""
    for run, unit, measured, predicted in figures():
        yield Row(
            run.source,
            run.what,
            unit,
            measured,
            predicted,
            run.assumed,
            "yes" if run.held_out else "no",
        )


def errors_of(rows: Sequence[Row]) -> list[str]:
    """Returns the cells of a line of the table of errors: number of figures, median error, and the
    worst with its run."""
    known = [row for row in rows if row.error is not None]
    if not known:
        return ["–", "–", "–"]
    worst = max(known, key=lambda row: abs(row.error or 0))
    median = statistics.median(abs(row.error or 0) for row in known)
    return [str(len(known)), f"{median:.0%}", f"{worst.error:+.0%} ({worst.what})"]


def errors_table(published: Sequence[Row]) -> str:
    """Returns the table of median and worst errors of whole runs, by kind and by source."""
    kinds = [
        (kind, [row for row in published if row.kind == kind])
        for kind in dict.fromkeys(row.kind for row in published)
    ]
    sources = [
        (f"{who}, {kind}", [row for row in of_kind if row.who == who])
        for kind, of_kind in kinds
        for who in dict.fromkeys(row.who for row in of_kind)
    ]
    lines = []
    for name, of_kind in [*((f"**{kind}**", rows) for kind, rows in kinds), *sources]:
        halves = [[row for row in of_kind if row.held_out == half] for half in ("no", "yes")]
        lines.append([name, *errors_of(halves[0])[:2], *errors_of(halves[1])])
    head = ("what", "fitted", "median error", "held out", "median error", "worst of those held out")
    return "\n".join([*markdown(head, lines), ""])


def main() -> None:
    others, whole = rows(), list(run_rows())
    table = Table(RESULTS / "published.csv", COLUMNS, facts("longctx"), overwrite=True)
    for row in [*others, *whole]:
        table.append(asdict(row) | {"ratio": row.ratio})
    text = replaced(PAGE.read_text("utf-8"), "published", table_of(others))
    PAGE.write_text(replaced(text, "published runs", errors_table(whole)), "utf-8")
    print(errors_table(whole))


if __name__ == "__main__":
    main()
