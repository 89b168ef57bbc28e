"""Figures of single pages, from the results of one benchmark each; see figures.py."""

import csv
import statistics
import textwrap
from collections.abc import Callable, Sequence

from harness import RESULTS, markdown

Row = dict[str, str]


def rows_of(name: str) -> list[Row]:
    with (RESULTS / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def to(values: Sequence[float], digits: int = 2) -> str:
    """Returns the range of the values as text."""
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def wrapped(text: str) -> list[str]:
    """Returns a paragraph or an item of a list as lines."""
    return textwrap.wrap(text, 140, subsequent_indent="  " if text.startswith("- ") else "")


def trainers_table() -> list[str]:
    """CPU time of an epoch of SFTTrainer, by way to train."""
    by_way: dict[str, list[Row]] = {}
    for row in rows_of("trainers"):
        by_way.setdefault(row["way"], []).append(row)
    columns = ("slowest_cpu_s", "fastest_cpu_s", "slowest_of_steps_cpu_s")
    medians = {
        way: [statistics.median(float(row[name]) for row in rows) for name in columns]
        for way, rows in by_way.items()
    }
    ours = medians["longctx"]
    lines = [
        [
            way,
            *(f"{value:.1f}" for value in values),
            f"{ours[0] / values[0]:.2f}",
            f"{ours[2] / values[2]:.2f}",
        ]
        for way, values in medians.items()
    ]
    head = ["CPU seconds of an epoch", "slowest rank", "fastest rank", "slowest rank of each step"]
    return markdown([*head, "longctx to it, slowest rank", "of each step"], lines, 1)


def trainer_trees() -> tuple[dict[tuple[str, str], float], dict[str, str]]:
    """Returns the median CPU seconds of steps by trainer of sequences and way, and the share of
    tokens left by trainer."""
    seconds: dict[tuple[str, str], list[float]] = {}
    left: dict[str, str] = {}
    for row in rows_of("trainer-trees"):
        seconds.setdefault((row["trainer"], row["way"]), []).append(
            float(row["slowest_of_steps_cpu_s"])
        )
        left[row["trainer"]] = row["tokens_after_merging"]  # of the last way, which merges
    return {key: statistics.median(each) for key, each in seconds.items()}, left


def trainer_trees_gains() -> dict[str, float]:
    """Returns how many times as fast steps of a trainer are when prefixes are merged."""
    medians, left = trainer_trees()
    ways = list(dict.fromkeys(way for _, way in medians))
    return {kind: medians[kind, ways[0]] / medians[kind, ways[-1]] for kind in left}


def trainer_trees_table() -> list[str]:
    """CPU time of steps of trainers of sequences, by way to train."""
    medians, left = trainer_trees()
    ways, gains = list(dict.fromkeys(way for _, way in medians)), trainer_trees_gains()
    lines = [
        [
            kind,
            f"{float(share):.0%}",
            *(f"{medians[kind, way]:.1f}" for way in ways),
            f"{gains[kind]:.2f}×",
        ]
        for kind, share in left.items()
    ]
    return markdown(["trainer", "tokens left", *ways, "plain over merged"], lines, 1)


def trainers_sentence() -> list[str]:
    """What planning cost in bench/trainers.py, and when it ran."""
    rows = [row for row in rows_of("trainers") if row["way"] == "longctx"]
    cpu, wait = (
        max(float(row[name]) for row in rows)
        for name in ("sharing_cpu_share", "sharing_wait_share")
    )
    text = (
        f"Planning and the exchange of token ids took at most {cpu:.1%} of a rank's CPU time, and "
        f"steps waited at most {wait:.1%} of their time for them. Medians of {len(rows)} rounds "
        f"on {rows[0]['ranks']} processes, {rows[0]['date']}, transformers "
        f"{rows[0]['transformers']}, TRL {rows[0]['trl']}."
    )
    return textwrap.wrap(text, 160)


def trees_predicted() -> list[str]:
    """Predicted steps of the sets of groups."""
    head = [
        "groups",
        "tokens per step",
        "merged",
        "fixed static (degree)",
        "auto",
        "auto on trees",
        "over fixed",
        "over auto",
    ]
    lines = []
    for row in [row for row in rows_of("trees") if row["table"] == "predicted"]:
        fixed, auto, trees = (
            float(row[f"{way}_s"]) for way in ("fixed_static", "sequences", "trees")
        )
        line = [f"`examples/groups_{row['name']}.jsonl`: {row['lengths']}"]
        line += [
            f"{int(row['tokens']) / 1e6:.2f}M",
            f"{int(row['tokens']) / int(row['merged_tokens']):.2f} times fewer",
        ]
        line += [f"{fixed:.3g} s ({row['fixed_degree']})", f"{auto:.3g} s", f"{trees:.3g} s"]
        lines.append([*line, f"**{fixed / trees:.2f}×**", f"{auto / trees:.2f}×"])
    return markdown(head, lines, 1)


def qlora_table() -> list[str]:
    """Held-out loss and peak memory of LoRA on bases of 16, 4 and 8 bits."""
    rows = rows_of("qlora")
    head = [
        "base",
        "held-out loss",
        "over LoRA's",
        "estimated peak",
        "measured peak",
        "estimated over measured",
    ]
    lines = []
    for row in rows:
        loss, (estimated, measured) = (
            float(row["loss"]),
            (float(row[f"{name}_bytes"]) for name in ("estimated", "measured")),
        )
        line = [
            "bfloat16" if row["base"] == "none" else row["base"],
            f"{loss:.3f}",
            f"{loss / float(rows[0]['loss']) - 1:+.1%}",
        ]
        lines.append(
            [
                *line,
                *(f"{size / 2**30:.2f} GiB" for size in (estimated, measured)),
                f"{estimated / measured:.3f}",
            ]
        )
    first = rows[0]
    about = (
        f"Measured (`python -m bench.qlora`): {first['steps']} steps of LoRA of SmolLM2-135M on "
        f"two CPU processes, from a held-out loss of {float(first['loss_before']):.3f}; one seed, "
        f"weights that had 4 bits before. {first['date']}, torch {first['torch']}, torchao "
        f"{first['torchao']}."
    )
    return [*wrapped(about), "", *markdown(head, lines, numbers_from=1)]


def latents_table() -> list[str]:
    """Messages and predicted steps of DeepSeek V3, by what travels."""
    rows = rows_of("latents")
    head = [
        "GPUs",
        "tokens per rank",
        "degree",
        "exchange levels",
        "received, K and V",
        "received, latents",
    ]
    head += ["step, K and V", "step, latents", "step"]
    lines = []
    for keys, latents in zip(rows[::2], rows[1::2], strict=True):
        before, after = float(keys["step_s"]), float(latents["step_s"])
        line = [keys["gpus"], f"{int(keys['tokens_per_rank']):,}", keys["degree"], keys["levels"]]
        line += [f"{float(row['received_gb']):.2f} GB" for row in (keys, latents)]
        lines.append([*line, f"{before:.1f} s", f"{after:.1f} s", f"{after / before - 1:+.1%}"])
    about = (
        "Predicted, not measured (`python bench/latents.py`): DeepSeek V3, a step of 32 documents "
        "of 131,072 tokens on H100s, by the constants of the shipped profile. Received are the "
        "rows of one document in one layer, as they travel."
    )
    return [*wrapped(about), "", *markdown(head, lines, numbers_from=0)]


def sensitivity_table() -> list[str]:
    """The headline with other constants of the H100's profile."""
    head = [
        "constants",
        "because",
        "auto's step",
        "over fixed static",
        "over the best single degree",
    ]
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
    head = [
        "rule",
        "documents",
        "head size",
        *(f"dispatches, {name}" for name in names),
        *(f"CPU, {name}" for name in names),
    ]
    return markdown(head, table, numbers_from=2)


def trees_measured() -> list[str]:
    """CPU time of a model over one group, as sequences and as trees."""
    rows = [row for row in rows_of("trees") if row["table"] == "measured"]
    lines = []
    for row in rows:
        alone, trees = float(row["sequences_s"]), float(row["trees_s"])
        line = [row["name"], f"{int(row['tokens']):,}", f"{int(row['merged_tokens']):,}"]
        line += [
            f"{int(row['tokens']) / int(row['merged_tokens']):.2f}",
            f"{alone:.1f} s",
            f"{trees:.1f} s",
        ]
        lines.append([*line, f"**{alone / trees:.2f}×**"])
    text = (
        "Measured (`bench/trees.py`): forward and backward of a Llama of two layers, one process "
        f"and thread, least CPU time of {rows[0]['rounds']} rounds; gradients differ by at most "
        f"{max(float(row['difference']) for row in rows):.0e} (float32). {rows[0]['date']}, "
        f"{rows[0]['machine']}, torch {rows[0]['torch']}."
    )
    head = [
        "prompt + completions",
        "tokens",
        "merged",
        "times fewer",
        "sequences",
        "trees",
        "as fast",
    ]
    return [*textwrap.wrap(text, 160), "", *markdown(head, lines, 1)]


def large_table() -> list[str]:
    """Steps of many kinds, planned by the code before and now."""
    rows = {(row["label"], row["step"], row["documents"]): row for row in rows_of("plan-large")}
    lines = []
    for (label, step, documents), now in rows.items():
        if label == "before":
            continue
        before = rows.get(("before", step, documents))
        lines.append(
            [
                f"{step}, {int(documents):,} × {int(now['ranks']):,}",
                *(_percent(row, "gap", 1) for row in (before, now)),
                *(_percent(row, "whole", 0) for row in (before, now)),
                *(f"{float(row['planning_s']):.1f}" if row else "–" for row in (before, now)),
                f"{float(now['memory_mib']):.0f}",
            ]
        )
    head = [
        "documents × ranks",
        "gap, before",
        "now",
        "whole, before",
        "now",
        "CPU s, before",
        "now",
        "MiB, now",
    ]
    return markdown(head, lines, numbers_from=1)


def _percent(row: Row | None, name: str, digits: int) -> str:
    if row is None:
        return "–"
    return f"{100 * float(row[name]):.{digits}f} %"


def robust_table() -> list[str]:
    """What plans lose whose profile is wrong, by which times are wrong, and what they lose if the
    profile says so."""
    by_wrong: dict[str, list[Row]] = {}
    for row in rows_of("plan-robust"):
        wrong = [name for name in ("attention", "matrices", "messages") if float(row[name]) != 1.0]
        words = {0: "nothing", 1: "".join(wrong), 3: "all three"}
        by_wrong.setdefault(words[len(wrong)], []).append(row)
    lines = []
    for words, rows in by_wrong.items():
        line = [words]
        for hedged in (False, True):
            its = [row for row in rows if (float(row["rate_error"]) > 0) == hedged]
            mean = statistics.median(float(row["mean_loss"]) for row in its)
            largest = max(float(row["largest_loss"]) for row in its)
            line += [f"{100 * mean:.1f} %", f"{100 * largest:.1f} %"]
        lines.append(line)
    head = ["wrong by 30 %", "median loss", "largest", "with `rate_error`: median", "largest"]
    return markdown(head, lines, numbers_from=1)


DOLLARS_PER_CORE_HOUR = 0.05
"""What an hour of one core of a rented machine is assumed to cost."""


def prepare_rate(price: float = DOLLARS_PER_CORE_HOUR) -> list[str]:
    """Hours of `longctx prepare` for 2 TB, from its CPU time per byte, and dollars at an assumed
    price of an hour of a core."""
    row = next(row for row in rows_of("prepare-rate") if row["what"] == "prepare")
    s_per_gb = float(row["seconds"]) / int(row["amount"]) * 1e9
    core_hours = 2000 * s_per_gb / 3600
    cost = f"${core_hours * price:,.2f}"
    lines = []
    for machines, cores in ((1, 64), (16, 64)):
        hours = core_hours / machines / cores
        lines.append([f"{machines} of {cores} cores", f"{hours:,.1f}", f"{core_hours:,.0f}", cost])
    head = ["machines", "hours for 2 TB", "core hours", f"if one costs ${price:g}"]
    return markdown(head, lines, numbers_from=1)


def prepare_peers() -> list[str]:
    """CPU seconds per GB of programs that tokenize the same file."""
    names = {"tokenizer": "the tokenizer alone", "longctx": "`longctx prepare`"}
    names |= {"datatrove": "datatrove", "megatron": "Megatron's `preprocess_data.py`"}
    lines = []
    for row in rows_of("prepare-peers"):
        if row["processes"] == "1":
            times = f"{float(row['of_tokenizer']):.2f}×"
            lines.append([names[row["tool"]], f"{float(row['cpu_s_per_gb']):.0f}", times])
    head = ["one process", "CPU seconds per GB of JSON Lines", "of the tokenizer's"]
    return markdown(head, lines, numbers_from=1)


PROCESSES = 8
"""Processes of a node."""
TOKENS_PER_S = 10_000
"""Tokens per second of one of them, of an 8B model."""
DOCUMENT_TOKENS = 1_960
PIECE_MB = 4 * 1.048576


def data_size() -> list[str]:
    """What 10G documents take on a node, by those that were measured."""
    (row,) = (row for row in rows_of("data-size") if row["what"] == "one store")
    times = 10e9 / float(row["documents"])
    index = float(row["index_bytes_per_document"])
    held = PROCESSES * float(row["held_bytes_per_document"])
    lines = []
    for what, more in (("texts", 0), ("conversations, with weights of documents", 4 + 2)):
        size = [f"{10 * (index + more):,.0f} GB", f"{index + more + held:.1f}"]
        lines.append([what, *size])
    opened = [f"{times * float(row[name]):.0f} s" for name in ("opened_s", "ready_s")]
    rate = PROCESSES * TOKENS_PER_S / DOCUMENT_TOKENS * PIECE_MB
    for line in lines:
        line += [" + ".join(opened), f"{rate:.0f} MB/s"]
    head = ["10G documents of", "index, per node", "bytes a document, with 8 processes"]
    return markdown([*head, "to open, and to draw", "from object storage"], lines, numbers_from=1)


def block_diffusion_table() -> list[str]:
    """Rows of K and V of block diffusion, and the gaps of its plans."""
    rows = rows_of("block-diffusion")
    lines = []
    for planned in [row for row in rows if row["placed"] == "planned"]:
        (split,) = (
            row for row in rows if row["mix"] == planned["mix"] and row["placed"] != "planned"
        )
        lines.append(
            [
                planned["mix"],
                f"**{float(planned['share']):.2f}×**",
                f"{float(split['share']):.2f}×",
                f"{float(planned['gap_percent']):.1f} %",
            ]
        )
    head = ["documents of", "rows, as planned", "over all ranks", "plan above the bound"]
    return markdown(head, lines, numbers_from=1)


OF_PAGES: dict[str, Callable[[], list[str]]] = {
    "trainers": trainers_table,
    "trainers-sentence": trainers_sentence,
    "trainer-trees": trainer_trees_table,
    "linear": linear_table,
    "plan-large": large_table,
    "plan-robust": robust_table,
    "latents": latents_table,
    "qlora": qlora_table,
    "sensitivity": sensitivity_table,
    "prepare-rate": prepare_rate,
    "prepare-peers": prepare_peers,
    "data-size": data_size,
    "block-diffusion": block_diffusion_table,
    "trees": trees_measured,
    "trees-predicted": trees_predicted,
}
