"""Rows of K and V that block diffusion sends, beside those of position-sharded context parallelism,
and plans beside their bounds, for three published mixes.

    python bench/block_diffusion.py                  # about 3 minutes on one core

Documents of a mix, of at most 64k tokens, get noise in blocks of 32 and are planned on 8 H100s.
Counted, per layer and pass, from the schedules of all ranks: rows that longctx receives; those of
the same documents, whole noisy copies included, as one causal sequence of twice the tokens on the
same ranks (which needs K and V of noisy tokens, too); and all rows of other ranks, as an all-gather
brings them. "planned": at the planner's degrees; "degree 8": each document of 1,024 tokens and more
over all ranks. Writes results/block-diffusion.csv.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from harness import Table, command, facts, options
from longctx import HardwareProfile, make_plan
from longctx.attention import RingSchedule
from longctx.comparison.mixes import load_mix, mix_names
from longctx.data.diffusion import Noise, Noised, noise_documents
from longctx.planning.layout import Layout, Placement
from longctx.planning.tree import NO_TREES, Trees

RANKS = 8
TOKENS_PER_RANK = 16384
DOCUMENTS = 64
LONGEST = 65536
SPLIT_FROM = 1024
BLOCK = 32
PROFILE = "h100-nvlink-ib"
COLUMNS = [
    "mix",
    "placed",
    "documents",
    "tokens",
    "split_documents",
    "gap_percent",
    "rows",
    "position_sharded_rows",
    "all_rows",
    "share",
]


def main() -> None:
    parser = options(__doc__, "block-diffusion.csv")
    arguments = parser.parse_args()
    known = facts("torch", "longctx") | {"command": command(arguments.out)}
    table = Table(arguments.out, COLUMNS, known, overwrite=True)
    for name in mix_names():
        lengths = [min(LONGEST, length) for length in load_mix(name).draw(DOCUMENTS, seed=0)]
        for row in rows_of(lengths):
            table.append({"mix": name, **row})
            print(table.rows[-1], flush=True)


def rows_of(lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Returns the rows of the table of documents of these lengths."""
    random = np.random.default_rng(0)
    texts = [random.integers(1, 1000, length) for length in lengths]
    noised = noise_documents(texts, noise=Noise(mask_token=0, block=BLOCK))
    plan = make_plan(
        noised.lengths,
        ranks=RANKS,
        tokens_per_rank=TOKENS_PER_RANK,
        profile=HardwareProfile.load(PROFILE),
        trees=noised.trees,
    )
    long = [number for number, length in enumerate(lengths) if length >= SPLIT_FROM]
    over_all = [(Placement(number, 0, RANKS),) for number in long]
    planned = counted(plan.micro_batches, noised, lengths)
    return [
        {"placed": "planned", "gap_percent": round(100 * plan.gap, 2), **planned},
        {"placed": f"degree {RANKS}", "gap_percent": "", **counted(over_all, noised, lengths)},
    ]


MicroBatches = Sequence[Sequence[Placement]]


def counted(placed: MicroBatches, noised: Noised, lengths: Sequence[int]) -> dict[str, Any]:
    """Returns the columns with numbers of rows."""
    twice = [2 * length for length in lengths]
    ours = received(placed, noised.lengths, noised.trees)
    theirs = received(placed, twice, NO_TREES)
    everything = [placement for placements in placed for placement in placements]
    gathered = sum((each.degree - 1) * twice[each.document] for each in everything)
    return {
        "documents": len(everything),
        "tokens": sum(lengths[each.document] for each in everything),
        "split_documents": sum(each.degree > 1 for each in everything),
        "rows": ours,
        "position_sharded_rows": theirs,
        "all_rows": gathered,
        "share": round(ours / theirs, 3) if theirs else "",
    }


def received(placed: MicroBatches, lengths: Sequence[int], trees: Trees) -> int:
    """Returns the rows of K and V that all ranks receive in a pass of a layer."""
    rows = 0
    for number, placements in enumerate(placed):
        for rank in range(RANKS):
            layout = Layout.of(placements, lengths, number, rank, trees)
            rows += RingSchedule.build(layout).received_rows
    return rows


if __name__ == "__main__":
    main()
