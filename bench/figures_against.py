"""Figures of what longctx gains on 8 GPUs over the ways in use today, from bench/results/against.csv;
see figures.py."""

from collections.abc import Callable, Sequence

from figures_of_pages import Row, rows_of, wrapped
from harness import markdown

GIB = 2**30
MIXES = ("wlb_128k", "magi_192k", "wikipedia")
TRL = "trl-packing"
SHARED = "over TRL's packing, FSDP2"
OTHERS = {
    "batch-rebalance": "over whole documents, balanced over ranks",
    "megatron": "over the best single context-parallel degree",
}
"""Ways whose ranges over all mixes are on the first screen."""


def figure_of(way: str, mix: str, most: str, sharing: str = "") -> Row:
    """Returns the row of a way for documents of a mix of up to `most` tokens."""
    wanted = (mix, most, sharing)
    (found,) = [
        row
        for row in rows_of("against")
        if (row["mix"], row["most_tokens_of_a_document"], row["sharing"]) == wanted
        and row["way"].partition(":")[0] == way
    ]
    return found


def mosts() -> list[str]:
    """Returns tokens of the longest documents, the shortest first."""
    found = {int(row["most_tokens_of_a_document"]) for row in rows_of("against")}
    return [str(most) for most in sorted(found)]


def in_thousands(most: str) -> str:
    return f"{int(most) // 1024}k"


def gain(row: Row) -> str:
    return f"{float(row['speedup']):.2f}×"


def gains_of_mixes(way: str, most: str, sharing: str = "") -> str:
    """Returns the range of a gain over all mixes."""
    values = [float(figure_of(way, mix, most, sharing)["speedup"]) for mix in MIXES]
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    if low == high:
        return f"{low}×"
    return f"{low} to {high}×"


def against_headline() -> list[str]:
    """The gains on 8 GPUs of the first screen."""
    head = [
        "8B model, 8 H100s, 1.0M tokens per step, **predicted**; documents of up to",
        *map(in_thousands, mosts()),
    ]
    lines = []
    for mix in MIXES:
        gains = [f"**{gain(figure_of(TRL, mix, most, 'FSDP2'))}**" for most in mosts()]
        lines.append([f"{SHARED}: {mix}", *gains])
    for way, words in OTHERS.items():
        lines.append([words, *(gains_of_mixes(way, most) for most in mosts())])
    return markdown(head, lines)


def against_table() -> list[str]:
    """The gains on 8 GPUs over every way, and what the ways need."""
    head = [
        "documents of up to",
        "lengths",
        "TRL's packing, FSDP2",
        "ranks wait",
        "TRL's packing, DDP",
        "whole, balanced",
        "padded, 4 a rank",
        "best single degree",
    ]
    lines = []
    for most in mosts():
        for mix in MIXES:
            lines.append(_line_of(mix, most))
    return markdown(head, lines, 2)


def _line_of(mix: str, most: str) -> list[str]:
    fsdp = figure_of(TRL, mix, most, "FSDP2")
    ddp = figure_of(TRL, mix, most, "DDP")
    others = [figure_of(way, mix, most) for way in ("batch-rebalance", "padding", "megatron")]
    return [
        in_thousands(most),
        mix,
        f"**{gain(fsdp)}**",
        f"{float(fsdp['waiting']):.0%}",
        gain(ddp),
        *map(gain, others),
    ]


def against_memory() -> list[str]:
    """What rows of the longest documents need, in words."""
    needs = []
    for most in mosts():
        row = figure_of(TRL, MIXES[0], most, "FSDP2")
        needs.append(f"{int(row['least_bytes']) / GIB:.0f}")
    ours = figure_of("longctx", MIXES[0], mosts()[-1])
    available = int(ours["available_bytes"]) / GIB
    return wrapped(
        f"Rows of {_listed([in_thousands(most) for most in mosts()])} tokens need "
        f"{_listed(needs)} GiB on a rank under FSDP2, with every block recomputed, of the "
        f"{available:.0f} of an H100; longctx needs {int(ours['least_bytes']) / GIB:.0f} for "
        f"{in_thousands(mosts()[-1])}. No row counts recomputation in its time."
    )


def against_whole_rows() -> list[str]:
    """What is gained at the longest documents over whole rows, in words."""
    most = mosts()[-1]
    gains = gains_of_mixes("batch-rebalance", most).replace("×", " times")
    return wrapped(
        f"Predicted, over whole rows balanced over 8 GPUs, of up to {in_thousands(most)} tokens: "
        f"{gains} as fast, [by the mix of lengths](evidence/speedup.md#on-8-gpus)."
    )


def _listed(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"


OF_AGAINST: dict[str, Callable[[], list[str]]] = {
    "against-headline": against_headline,
    "against-whole-rows": against_whole_rows,
    "against": against_table,
    "against-memory": against_memory,
}
