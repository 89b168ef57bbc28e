"""Predicts what others have measured on GPUs, beside their figures: step time, memory, longest
document, kernel speed.

    python -m bench.published    # three minutes; writes bench/results/published.csv, the tables of docs/evidence/others.md,
                                 # and the errors that `longctx estimate` and dry runs state

Whole runs are those of bench/published_runs.py: the runs of each source are predicted by constants
that the other sources set (bench/published_fit.py). Other figures: Megatron-LM's benchmark of dynamic context parallelism (bench/results/megatron-published.md) and Table 1 of Narayanan et
al., 2021; verl, pull request 6555; Arctic Long Sequence Training (DeepSpeed, 2025); MagiAttention's
benchmark. Settings that are not published are assumed, and said in the column "assumed".
"""

import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench.harness import RESULTS, Table, facts, markdown
from bench.published_fit import Fit, fitted, median, ninetieth, unseen_errors
from bench.published_memory import peak_bytes
from bench.published_runs import CAUSES, HIDDEN, Case, cases, runs, settings
from bench.recipes import ROOT, replaced, stand_in
from longctx.comparison.baselines import plan_fixed_static
from longctx.comparison.mixes import load_mix
from longctx.config import Config, load
from longctx.errors import UserError
from longctx.memory.fitting import RunMemory
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.plan import Plan
from longctx.planning.planners.planner import make_plan
from longctx.training.run_profile import FLOAT8_TIME, run_profile

H100, A100 = "h100-nvlink-ib", "a100-80gb"
LLAMA_8B = "meta-llama/Llama-3.1-8B"
PAGE = ROOT / "docs" / "evidence" / "others.md"
STATED = ROOT / "longctx" / "planning" / "cost" / "published_errors.py"
COLUMNS = ["who", "what", "unit", "measured", "predicted", "ratio", "assumed", "kind"]


@dataclass(frozen=True)
class Row:
    """A published figure, and ours: None if it is not predicted."""

    who: str
    what: str
    unit: str
    measured: float
    predicted: float | None
    assumed: str = ""
    kind: str = ""

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
            model__overrides__hidden_size=hidden,
            model__overrides__intermediate_size=round(8 * hidden / 3),
            model__overrides__num_hidden_layers=layers,
            model__overrides__num_attention_heads=heads,
            model__overrides__num_key_value_heads=heads,
            model__overrides__head_dim=hidden // heads,
            model__overrides__tie_word_embeddings=True,
            parallel__tensor_parallel_size=tensor,
            parallel__pipeline_parallel_size=pipeline,
            parallel__reshard_after="step",
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


def time_rows(unseen: dict[str, list[tuple[Case, float]]]) -> Iterator[Row]:
    """Yields the speed of published runs as predicted by constants that other sources set."""
    for rows in unseen.values():
        for case, error in rows:
            run = case.run
            slower = 1 + error
            in_seconds = run.speed_unit.startswith("s ")
            predicted = run.speed * slower if in_seconds else run.speed / slower
            yield _row(case, run.speed_unit, measured=run.speed, predicted=predicted)


def memory_rows(given: Sequence[Case], *, reserved: bool) -> Iterator[Row]:
    """Yields the memory of published runs as estimated. With `reserved`, times what other sources
    reserved beside, where it was measured as reserved."""
    known = [case for case in given if case.run.memory is not None]
    estimated = [peak_bytes(case.run) / case.run.memory_unit_bytes for case in known]
    for case, predicted in zip(known, estimated, strict=True):
        run = case.run
        assert run.memory is not None
        if reserved and "reserved" in run.other:
            predicted *= _reserved_by_others(known, estimated, run.source)
        yield _row(case, f"{run.memory_unit} per GPU", measured=run.memory, predicted=predicted)


def _row(case: Case, unit: str, *, measured: float, predicted: float) -> Row:
    run = case.run
    return Row(
        run.source,
        run.what,
        unit,
        measured=measured,
        predicted=predicted,
        assumed=run.assumed,
        kind=case.kind,
    )


def _reserved_by_others(known: Sequence[Case], estimated: Sequence[float], source: str) -> float:
    """Returns what allocators reserved, over the estimate: the median of the sources' medians."""
    found: dict[str, list[float]] = {}
    for case, predicted in zip(known, estimated, strict=True):
        run = case.run
        if run.source != source and "reserved" in run.other:
            assert run.memory is not None
            found.setdefault(run.source, []).append(run.memory / predicted)
    return statistics.median(statistics.median(ratios) for ratios in found.values())


def refused_rows() -> Iterator[Row]:
    """Yields the runs whose settings are refused here."""
    for run in runs():
        try:
            settings(run)
        except UserError:
            yield Row(run.source, run.what, run.speed_unit, run.speed, None, run.assumed)


def is_memory(row: Row) -> bool:
    return row.unit.startswith("G")


def parts_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Returns rows by what they are: time in bfloat16, time in float8, memory."""
    times = [row for row in rows if not is_memory(row)]
    return {
        "time, bfloat16": [row for row in times if row.kind != "in float8"],
        "time, float8": [row for row in times if row.kind == "in float8"],
        "memory": [row for row in rows if is_memory(row)],
    }


def by_source(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Returns the errors of each source."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row.error is not None:
            found.setdefault(row.who, []).append(row.error)
    return found


def errors_table(rows: Sequence[Row]) -> str:
    """Returns the table of errors by source."""
    lines = []
    for part, of_part in parts_of(rows).items():
        for source, off in by_source(of_part).items():
            known = [row for row in of_part if row.who == source]
            worst = max(known, key=lambda row: abs(row.error or 0))
            lines.append(
                [
                    part,
                    source,
                    str(len(off)),
                    f"{median(off):.0%}",
                    f"{ninetieth(off):.0%}",
                    f"{statistics.median(off):+.0%}",
                    f"{worst.error:+.0%} ({worst.what})",
                ]
            )
    head = ("what", "source, unseen", "runs", "median", "nine of ten", "bias", "worst")
    return "\n".join([*markdown(head, lines), ""])


def claim(rows: Sequence[Row]) -> str:
    """Returns the first line of the page: errors per unseen source."""
    times = [row for row in rows if not is_memory(row)]
    memory = [row for row in rows if is_memory(row)]
    return (
        "**Claim.** Each source of published runs is predicted with constants that were fitted to "
        "the others. The median error of its runs is, in the median of sources, for time "
        f"{_median_of_sources(times)}; for memory {_median_of_sources(memory)}.\n"
    )


def _median_of_sources(rows: Sequence[Row]) -> str:
    """Returns the median of the sources' errors, with the error of each."""
    medians = {source: median(off) for source, off in by_source(rows).items()}
    middle = statistics.median(medians.values())
    named = ", ".join(f"{source} {off:.0%}" for source, off in medians.items())
    return f"{middle:.0%} ({named})"


def causes_table(given: Sequence[Case]) -> str:
    """Returns the errors of unseen sources with one cause after the other, constants fitted anew."""
    columns: list[dict[str, list[tuple[Case, float]]]] = []
    for count in range(len(CAUSES) + 1):
        columns.append(unseen_errors(fitted(given, CAUSES[:count])))
    lines = []
    for source in columns[0]:
        cells = []
        for column in columns:
            off = [error for _, error in column[source]]
            cells.append(f"{100 * median(off):.0f} / {100 * ninetieth(off):.0f}")
        lines.append([source, *cells])
    head = ("source, unseen", "operations", *(f"+ {cause}" for cause in CAUSES))
    return "\n".join([*markdown(head, lines), ""])


def hidden_table() -> str:
    """Returns the table of the source that was kept hidden, predicted by the shipped profiles."""
    lines = []
    for case in cases(HIDDEN):
        run = case.run
        seconds = case.seconds(HardwareProfile.load(run.gpu), float8=FLOAT8_TIME)
        predicted = run.documents * run.length / seconds / run.gpus
        error = seconds / case.measured_s - 1
        cells = [run.what, run.gpu, f"{run.speed:,.0f}", f"{predicted:,.0f}", f"{error:+.0%}"]
        lines.append([*cells, run.assumed])
    head = ("run", "GPU", "tokens/s per GPU", "predicted", "time off by", "assumed")
    return "\n".join([*markdown(head, lines), ""])


def stated(rows: Sequence[Row]) -> str:
    """Returns the table of longctx/planning/cost/published_errors.py."""
    lines = []
    for name, wanted in (("TIME", False), ("MEMORY", True)):
        lines.append(f"{name}: dict[str, Errors] = {{")
        known = [row for row in rows if is_memory(row) == wanted and row.error is not None]
        for kind in dict.fromkeys(row.kind for row in known):
            # How much more a run needed than was predicted.
            more = [1 / (1 + (row.error or 0)) - 1 for row in known if row.kind == kind]
            values = (statistics.median(more), median(more), ninetieth(more))
            said = ", ".join(
                f"{field}={value:.2f}"
                for field, value in zip(("more", "half", "most"), values, strict=True)
            )
            lines.append(f'    "{kind}": Errors({len(more)}, {said}),')
        lines.append("}")
    return "\n".join([*lines, ""])


def with_table(text: str, table: str) -> str:
    """Returns the module with its table replaced."""
    begin, end = "# Begin of the table.\n", "# End of the table.\n"
    before, rest = text.split(begin)
    return before + begin + table + end + rest.split(end)[1]


def main() -> None:
    given = cases()
    fit: Fit = fitted(given)
    others = rows()
    times = list(time_rows(unseen_errors(fit)))
    whole = [*times, *memory_rows(given, reserved=True)]
    plain = [*times, *memory_rows(given, reserved=False)]
    table = Table(RESULTS / "published.csv", COLUMNS, facts("longctx"), overwrite=True)
    for row in [*others, *whole, *refused_rows()]:
        table.append(asdict(row) | {"ratio": row.ratio})
    text = PAGE.read_text("utf-8")
    for name, generated in (
        ("claim", claim(whole)),
        ("published", table_of(others)),
        ("published runs", errors_table(whole)),
        ("causes", causes_table(given)),
        ("hidden", hidden_table()),
    ):
        text = replaced(text, name, generated)
    PAGE.write_text(text, "utf-8")
    STATED.write_text(with_table(STATED.read_text("utf-8"), stated(plain)), "utf-8")
    print(claim(whole), errors_table(whole), sep="\n")


if __name__ == "__main__":
    main()
