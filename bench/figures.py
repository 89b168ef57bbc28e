"""Writes the figures of README.md and of pages of docs/ from bench/results, between their `figures` comments.

    python bench/figures.py            # after bench/plan.py, bench/scaling.py or bench/cluster.py
    python bench/figures.py --check    # exits with 1 if a page has other figures

All speedups are those of longctx's mode auto, predicted by the cost model unless a table says otherwise.
"""

import argparse
import csv
import json
import re
import statistics
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness import RESULTS, markdown, speedups
from longctx.comparison.modelled import PlannerRow, over_fixed_without_barriers
from plan import FEW_LONG, times

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("optimizers", "policy", "trainers", "transformers", "trees")),
    *(ROOT / "docs" / "evidence" / f"{name}.md" for name in ("bound", "emulated", "linear", "others", "speedup")),
)
BLOCK = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
HEADLINE = ("wlb_128k", 64, 4)
"""Mix, ranks and documents per rank of README's example."""
EMULATED = {
    "wlb_128k, 4": "modelled-4x8-wlb_128k-4",
    "wlb_128k, 16": "modelled-4x8-wlb_128k-16",
    "magi_192k, 1": "modelled-4x8-magi_192k-1",
}
EMULATED_BESIDE_MEGATRON = {
    "wlb_128k, 4": "modelled-4x8-wlb_128k-4-megatron-dev",
    "magi_192k, 1": "modelled-4x8-magi_192k-1",
}
Row = dict[str, str]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a figure differs")
    arguments = parser.parse_args()
    stale = [page for page in PAGES if filled(text := page.read_text("utf-8")) != text]
    for page in stale:
        print(f"{page.relative_to(ROOT)}: its figures are not those of bench/results", file=sys.stderr)
        if not arguments.check:
            page.write_text(filled(page.read_text("utf-8")), "utf-8")
    return int(arguments.check and bool(stale))


def filled(text: str) -> str:
    """Returns a page with its figures replaced. Raises KeyError for a name that `FIGURES` lacks."""
    return BLOCK.sub(lambda block: block[1] + "\n".join(FIGURES[block[2]]()) + "\n" + block[3], text)


def rows_of(name: str) -> list[Row]:
    with (RESULTS / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def planned(table: str, planner: str = "auto", **values: object) -> list[Row]:
    """Returns the rows of a table and planner of plan.csv that have these values."""
    wanted = {"table": table, "planner": planner} | {name: str(value) for name, value in values.items()}
    return [row for row in rows_of("plan") if all(row[name] == value for name, value in wanted.items())]


def same_step(auto: Row, planner: str) -> Row:
    """Returns the row of another planner for the documents of a row."""
    same = {name: auto[name] for name in ("mix", "documents_a_rank", "ranks")}
    return planned(auto["table"], planner, **same)[0]


def without_barriers(auto: Row) -> float:
    """Returns auto's speedup over fixed static whose ranks wait for each other only at the end of a step."""
    rows = []
    for row in (auto, same_step(auto, "fixed-static")):
        seconds = {name: float(row[name]) for name in ("makespan_s", "no_barrier_s", "speedup_over_fixed")}
        rows.append(PlannerRow(0, 0, 0, 0, 0, 0, row["planner"], **seconds))
    speedup = over_fixed_without_barriers(rows)
    assert speedup is not None
    return speedup


def to(values: Sequence[float], digits: int = 2) -> str:
    """Returns the range of the values as text."""
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def wrapped(text: str) -> list[str]:
    """Returns a paragraph or an item of a list as lines."""
    return textwrap.wrap(text, 140, subsequent_indent="  " if text.startswith("- ") else "")


def measured(name: str) -> dict[str, dict[str, Any]]:
    """Returns the modes of an emulated run, by name."""
    modes = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))["measured"]["modes"]
    return {mode["mode"]: mode for mode in modes}


# --- README


def headline() -> list[str]:
    """The table of the first screen."""
    mix, ranks, documents = HEADLINE
    (auto,) = planned("speedups", mix=mix, ranks=ranks, documents_a_rank=documents)
    splits = [row for row in rows_of("scaling") if not row["refused"]]
    gains = [float(row["static_step_s"]) / float(row["step_s"]) for row in splits]
    (own,) = [gain for row, gain in zip(splits, gains, strict=True) if (row["model"], row["gpus"]) == ("8B", str(ranks))]
    tokens = f"{int(auto['tokens']) / 1e6:.1f}M tokens per step"
    head = [
        f"8B model, {ranks} H100s, {tokens}, documents of up to 128k tokens, five steps, **predicted**; compared with",
        "speedup",
    ]
    gpus = f"8 to {max(int(row['gpus']) for row in splits):,} GPUs"
    rows = [
        ["a static run on its own best tensor and pipeline split", f"**{own:.1f}×** ({to(gains, 1)}× for 8B to 1T on {gpus})"],
        [
            "64 data-parallel ranks at the best single context-parallel degree",
            f"{float(auto['speedup_over_best_single']):.1f}×",
        ],
        [
            "the same at the smallest degree that holds every document",
            f"{float(auto['speedup_over_fixed']):.1f}× "
            f"({without_barriers(auto):.1f}× if ranks wait for each other once per step)",
        ],
    ]
    return markdown(head, rows)


def emulated_sentence() -> list[str]:
    """The sentence of the first screen on emulated runs."""
    runs = [measured(name) for name in EMULATED.values()]
    texts = [speedups(modes["static:8"], modes["auto"])[0] for modes in runs]
    reached, predicted = zip(*(re.findall(r"([\d.]+)×", text) for text in texts), strict=True)

    def listed(values: Sequence[str]) -> str:
        return f"{', '.join(values[:-1])} and {values[-1]}×"

    return wrapped(
        "On 32 emulated ranks, whose computing is replaced by sleeps, the third comparison was run for three sets of "
        f"documents: {listed(reached)}, with {listed(predicted)} predicted. Fewer ranks gain less than 64."
    )


# --- docs/evidence


def modelled_table() -> list[str]:
    """Speedups on 64 ranks, the largest steps first."""
    head = ["lengths, documents per rank", "tokens per step", "its degree", "auto over fixed static", "without barriers"]
    head += ["over the best single degree", "over the best static degree of every step", "bins", "FlexSP-like"]
    head += ["Megatron dev", "Megatron main", "limit"]
    lines = []
    for auto in sorted(planned("speedups", ranks=64), key=lambda row: -int(row["tokens"])):
        fixed = same_step(auto, "fixed-static")
        line = [f"{auto['mix']}, {auto['documents_a_rank']}", f"{int(auto['tokens']) / 1e6:.2f}M"]
        line += [fixed["winner"].removeprefix("static:"), f"**{float(auto['speedup_over_fixed']):.2f}**"]
        line += [times(without_barriers(auto))]
        line += [f"{float(auto['speedup_over_best_single']):.2f} ({auto['best_single_degree']})"]
        line += [times(float(auto["speedup_over_best_static"]))]
        others = [same_step(auto, name) for name in ("bins", "flexsp", "megatron-dev", "megatron-main")]
        line += [times(float(row["speedup_over_fixed"]) if row["speedup_over_fixed"] else None) for row in others]
        line.append(times(float(auto["speedup_over_fixed"]) * float(auto["makespan_s"]) / float(auto["tight_bound_s"])))
        lines.append(line)
    return markdown(head, lines, 1)


def ranges_table() -> list[str]:
    """Lowest, median and highest speedup over all mixes, by documents per rank and number of ranks."""
    head = ["ranks", "documents per rank", "tokens per step", "auto over fixed static", "over the best single degree"]
    head += ["over the best static degree of every step", "bins over fixed static"]
    lines = []
    for ranks in (8, 64, 256, 1024):
        for documents in (1, 4, 16):
            setting = {"ranks": ranks, "documents_a_rank": documents}
            autos, bins = planned("speedups", **setting), planned("speedups", "bins", **setting)
            tokens = [int(row["tokens"]) / 1e6 for row in autos]
            columns = [(autos, name) for name in ("fixed", "best_single", "best_static")] + [(bins, "fixed")]
            values = [[float(row[f"speedup_over_{name}"]) for row in rows] for rows, name in columns]
            lines.append([f"{ranks:,}", str(documents), f"{to(tokens)}M", *map(low_median_high, values)])
    return markdown(head, lines, 2)


def low_median_high(values: Sequence[float]) -> str:
    return f"{min(values):.2f}, {statistics.median(values):.2f}, {max(values):.2f}"


def sources() -> list[str]:
    """The two parts of the gain, and the tie with FlexSP, over all settings with 64 ranks."""
    autos = planned("speedups", ranks=64)
    mix, ranks, documents = HEADLINE
    (auto,) = planned("speedups", mix=mix, ranks=ranks, documents_a_rank=documents)
    packing = float(same_step(auto, "static")["speedup_over_fixed"])
    flexsp = [float(row["speedup_over_fixed"]) / float(same_step(row, "flexsp")["speedup_over_fixed"]) for row in autos]
    dev = [float(row["speedup_over_fixed"]) / float(same_step(row, "megatron-dev")["speedup_over_fixed"]) for row in autos]
    return [
        *wrapped(
            f"- **Two gains.** Of the {float(auto['speedup_over_fixed']):.2f}× for {mix} with {documents} documents per rank, "
            f"{packing:.2f}× is packing by predicted time at the best degree of each step, which `context.mode: static` does "
            f"too, and {float(auto['speedup_over_best_static']):.2f}× is a degree for every document."
        ),
        *wrapped(
            f"- **FlexSP: a tie.** `auto` is {to(flexsp)} times as fast as our reading, whose plans FlexSP's own solver "
            "beats by up to 6 % or misses by up to 18 %. Planning time differs: its authors report 5 to 15 s per step."
        ),
        *wrapped(
            f"- **Megatron's development branch**: `auto` is {to(dev)} times as fast as our reading, which makes the plans of "
            "its code (snapshot d48bd6be0a) without their padding."
        ),
    ]


def gaps_table() -> list[str]:
    """Gaps of auto to the lower bound."""
    counts = ("1", "4", "10")
    lines = []
    for ranks in (64, 256):
        for mix in ("wlb_128k", "magi_192k", "wikipedia", FEW_LONG):
            cells = []
            for documents in counts:
                (row,) = planned("gaps", mix=mix, ranks=ranks, documents_a_rank=documents, stretched_to="")
                unavoidable = float(row["unavoidable_gap"])
                cells.append(f"{float(row['gap']):.1%}" + (f" ({unavoidable:.1%})" if unavoidable >= 0.0005 else ""))
            lines.append([str(ranks), mix.replace("_", " ") if mix == FEW_LONG else mix, *cells])
    return markdown(["ranks", "lengths", *(f"{count} per rank" for count in counts)], lines, 2)


def planning_table() -> list[str]:
    """Time to plan a step."""
    lines = []
    for ranks in (8, 64, 256, 1024):
        rows = planned("speedups", ranks=ranks)
        lines.append([f"{ranks:,}", *(f"{at([float(r['planning_ms']) for r in rows]):.0f} ms" for at in (min, max))])
    return markdown(["ranks", "least", "most, of 3 mixes with 1, 4 and 16 documents per rank"], lines, 1)


def emulated_table() -> list[str]:
    """Measured steps of the emulated ranks."""
    head = ["lengths, documents per rank", "mean tokens per step", "auto over fixed static (degree 8)", "over Megatron dev"]
    head += ["over the best static degree of every step", "prediction error of auto", "of fixed static", "day"]
    lines = []
    for setting, name in EMULATED.items():
        run = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
        modes = measured(name)
        auto, line = modes["auto"], [setting]
        line.append(f"{statistics.fmean(step['tokens'] for step in auto['steps']) / 1e6:.2f}M")
        line.append(speedups(modes["static:8"], auto, mark="**")[0])
        beside = measured(EMULATED_BESIDE_MEGATRON[setting]) if setting in EMULATED_BESIDE_MEGATRON else {}
        line.append(speedups(beside["megatron-dev"], beside["auto"])[0] if beside else "–")
        best = "best static of every step"
        line.append(speedups(modes[best], auto)[0] if best in modes else "–")
        line += [f"{modes[mode]['prediction_error']:+.1%}" for mode in ("auto", "static:8")]
        lines.append([*line, run["about"]["date"]])
    return markdown(head, lines, 1)


def trainers_table() -> list[str]:
    """CPU time of an epoch of SFTTrainer, by way to train."""
    by_way: dict[str, list[Row]] = {}
    for row in rows_of("trainers"):
        by_way.setdefault(row["way"], []).append(row)
    columns = ("slowest_cpu_s", "fastest_cpu_s", "slowest_of_steps_cpu_s")
    medians = {way: [statistics.median(float(row[name]) for row in rows) for name in columns] for way, rows in by_way.items()}
    ours = medians["longctx"]
    lines = [
        [way, *(f"{value:.1f}" for value in values), f"{ours[0] / values[0]:.2f}", f"{ours[2] / values[2]:.2f}"]
        for way, values in medians.items()
    ]
    head = ["CPU seconds of an epoch", "slowest rank", "fastest rank", "slowest rank of each step"]
    return markdown([*head, "longctx to it, slowest rank", "of each step"], lines, 1)


def trainer_trees_table() -> list[str]:
    """CPU time of steps of trainers of sequences, by way to train."""
    seconds: dict[tuple[str, str], list[float]] = {}
    left: dict[str, str] = {}
    for row in rows_of("trainer-trees"):
        seconds.setdefault((row["trainer"], row["way"]), []).append(float(row["slowest_of_steps_cpu_s"]))
        left[row["trainer"]] = row["tokens_after_merging"]  # of the last way, which merges
    medians = {key: statistics.median(each) for key, each in seconds.items()}
    ways = list(dict.fromkeys(way for _, way in medians))
    lines = [
        [
            kind,
            f"{float(share):.0%}",
            *(f"{medians[kind, way]:.1f}" for way in ways),
            f"{medians[kind, ways[0]] / medians[kind, ways[-1]]:.2f}×",
        ]
        for kind, share in left.items()
    ]
    return markdown(["trainer", "tokens left", *ways, "plain over merged"], lines, 1)


def trainers_sentence() -> list[str]:
    """What planning cost in bench/trainers.py, and when it ran."""
    rows = [row for row in rows_of("trainers") if row["way"] == "longctx"]
    cpu, wait = (max(float(row[name]) for row in rows) for name in ("sharing_cpu_share", "sharing_wait_share"))
    text = (
        f"Planning and the exchange of token ids took at most {cpu:.1%} of a rank's CPU time, and steps waited at "
        f"most {wait:.1%} of their time for them. Medians of {len(rows)} rounds on {rows[0]['ranks']} processes, "
        f"{rows[0]['date']}, transformers {rows[0]['transformers']}, TRL {rows[0]['trl']}."
    )
    return textwrap.wrap(text, 160)


# --- docs/trees.md


def trees_predicted() -> list[str]:
    """Predicted steps of the sets of groups."""
    head = ["groups", "tokens per step", "merged", "fixed static (degree)", "auto", "auto on trees", "over fixed", "over auto"]
    lines = []
    for row in [row for row in rows_of("trees") if row["table"] == "predicted"]:
        fixed, auto, trees = (float(row[f"{way}_s"]) for way in ("fixed_static", "sequences", "trees"))
        line = [f"`examples/groups_{row['name']}.jsonl`: {row['lengths']}"]
        line += [f"{int(row['tokens']) / 1e6:.2f}M", f"{int(row['tokens']) / int(row['merged_tokens']):.2f} times fewer"]
        line += [f"{fixed:.3g} s ({row['fixed_degree']})", f"{auto:.3g} s", f"{trees:.3g} s"]
        lines.append([*line, f"**{fixed / trees:.2f}×**", f"{auto / trees:.2f}×"])
    return markdown(head, lines, 1)


def optimizers_table() -> list[str]:
    """Loss of a smaller quick start with two optimizers."""
    rows = rows_of("optimizers")
    head, names = ["mean loss of ten steps, up to step", *dict.fromkeys(row["step"] for row in rows)], ("adamw", "muon")
    table = [[name, *(f"{float(row['mean_loss_of_ten']):.2f}" for row in rows if row["optimizer"] == name)] for name in names]
    cpu_s = [f"{float(row['cpu_s']):.0f}" for row in rows if row["cpu_s"]]
    first = rows[0]
    about = (
        f"Measured: the quick start's model and learning rate on the same {int(rows[-1]['tokens']):,} tokens "
        f"(`{first['command']}`: shorter documents and smaller steps than the quick start's), one seed, one process; "
        f"{' and '.join(cpu_s)} CPU seconds. {first['date']}, {first['machine']}, torch {first['torch']}."
    )
    return [*wrapped(about), "", *markdown(head, table, numbers_from=1)]


def policy_table() -> list[str]:
    """CPU seconds of GRPO steps on the same rollouts."""
    rows, head = rows_of("policy"), ["trainer", "CPU seconds per step", "rounds"]
    seconds = {
        way: [float(row["slowest_of_steps_cpu_s"]) for row in rows if row["way"] == way]
        for way in ("TRL", "longctx.trainers", "longctx train")
    }
    table = [[way, f"{statistics.median(values):.2f}", to(values)] for way, values in seconds.items()]
    first = rows[0]
    about = (
        "Measured (`bench/policy.py`): GRPO steps of 16 rollouts, prompts of 512 to 1,023 tokens with 8 completions of 32, on "
        "the slower of two processes with one thread each, without sampling; medians of "
        f"{len(seconds['TRL'])} rounds. {first['date']}, {first['machine']}, torch {first['torch']}, TRL {first['trl']}."
    )
    return [*wrapped(about), "", *markdown(head, table, numbers_from=1)]


def qlora_table() -> list[str]:
    """Held-out loss and peak memory of LoRA on bases of 16, 4 and 8 bits."""
    rows = rows_of("qlora")
    head = ["base", "held-out loss", "over LoRA's", "estimated peak", "measured peak", "estimated over measured"]
    lines = []
    for row in rows:
        loss, (estimated, measured) = float(row["loss"]), (float(row[f"{name}_bytes"]) for name in ("estimated", "measured"))
        line = [
            "bfloat16" if row["base"] == "none" else row["base"],
            f"{loss:.3f}",
            f"{loss / float(rows[0]['loss']) - 1:+.1%}",
        ]
        lines.append([*line, *(f"{size / 2**30:.2f} GiB" for size in (estimated, measured)), f"{estimated / measured:.3f}"])
    first = rows[0]
    about = (
        f"Measured (`python -m bench.qlora`): {first['steps']} steps of LoRA of SmolLM2-135M on two CPU processes, from a "
        f"held-out loss of {float(first['loss_before']):.3f}; one seed, weights that had 4 bits before. {first['date']}, "
        f"torch {first['torch']}, torchao {first['torchao']}."
    )
    return [*wrapped(about), "", *markdown(head, lines, numbers_from=1)]


def sensitivity_table() -> list[str]:
    """The headline with other constants of the H100's profile."""
    head = ["constants", "because", "auto's step", "over fixed static", "over the best single degree"]
    lines = [
        [
            *(row[name] for name in ("change", "why")),
            f"{float(row['auto_s']):.2f} s",
            f"{float(row['over_fixed']):.2f}",
            f"{float(row['over_best_single']):.2f} ({row['best_single']})",
        ]
        for row in rows_of("sensitivity")
    ]
    return markdown(head, lines, numbers_from=2)


def linear_table() -> list[str]:
    """Dispatches and CPU time of a linear layer, chunk by chunk and by the blocked scan."""
    rows = rows_of("linear")
    names = list(dict.fromkeys(row["code"] for row in rows))
    before, after = ([row for row in rows if row["code"] == name] for name in names)
    table = [
        [
            *(old[name] for name in ("rule", "documents", "head_dim")),
            *(f"{int(row['dispatches']):,}" for row in (old, new)),
            *(f"{int(row['cpu_ms']):,} ms" for row in (old, new)),
        ]
        for old, new in zip(before, after, strict=True)
    ]
    head = ["rule", "documents", "head size", *(f"dispatches, {name}" for name in names), *(f"CPU, {name}" for name in names)]
    return markdown(head, table, numbers_from=2)


def trees_measured() -> list[str]:
    """CPU time of a model over one group, as sequences and as trees."""
    rows = [row for row in rows_of("trees") if row["table"] == "measured"]
    lines = []
    for row in rows:
        alone, trees = float(row["sequences_s"]), float(row["trees_s"])
        line = [row["name"], f"{int(row['tokens']):,}", f"{int(row['merged_tokens']):,}"]
        line += [f"{int(row['tokens']) / int(row['merged_tokens']):.2f}", f"{alone:.1f} s", f"{trees:.1f} s"]
        lines.append([*line, f"**{alone / trees:.2f}×**"])
    text = (
        "Measured (`bench/trees.py`): forward and backward of a Llama of two layers, one process and thread, least CPU time of "
        f"{rows[0]['rounds']} rounds; gradients differ by at most {max(float(row['difference']) for row in rows):.0e} "
        f"(float32). {rows[0]['date']}, {rows[0]['machine']}, torch {rows[0]['torch']}."
    )
    head = ["prompt + completions", "tokens", "merged", "times fewer", "sequences", "trees", "as fast"]
    return [*textwrap.wrap(text, 160), "", *markdown(head, lines, 1)]


FIGURES: dict[str, Callable[[], list[str]]] = {
    "headline": headline,
    "emulated-sentence": emulated_sentence,
    "modelled": modelled_table,
    "ranges": ranges_table,
    "sources": sources,
    "gaps": gaps_table,
    "planning": planning_table,
    "emulated": emulated_table,
    "trainers": trainers_table,
    "trainers-sentence": trainers_sentence,
    "trainer-trees": trainer_trees_table,
    "linear": linear_table,
    "qlora": qlora_table,
    "sensitivity": sensitivity_table,
    "policy": policy_table,
    "optimizers": optimizers_table,
    "trees": trees_measured,
    "trees-predicted": trees_predicted,
}

if __name__ == "__main__":
    sys.exit(main())
