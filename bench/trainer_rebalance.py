"""CPU seconds of an epoch in TRL's SFTTrainer: dynamic context parallelism beside `batch_rebalance`
of transformers.

    torchrun --nproc-per-node 2 bench/trainer_rebalance.py --rounds 2          # about 10 minutes on two cores
    torchrun --nproc-per-node 4 bench/trainer_rebalance.py --rounds 2 --out bench/results/trainer_rebalance_4.csv

Data, model and measure are those of bench/trainers.py. `batch_rebalance` chooses which documents of
a step a rank gets, and how many a batch, by their padded length; it splits none. Writes
results/trainer_rebalance.csv.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trainers import COLUMNS, in_rounds, measured, ways

REBALANCED = {"train_sampling_strategy": "batch_rebalance"}


def main() -> None:
    def by_round(number: int, folder: Path) -> Iterator[dict[str, Any]]:
        dynamic, alone, padded, _ = ways(dist.get_world_size())
        rebalanced = replace(
            padded, name="batch_rebalance, two a batch", options=padded.options | REBALANCED
        )
        for way in (dynamic, rebalanced, alone):
            yield {"way": way.name, "round": number} | measured(way, str(folder))

    in_rounds(__doc__, "trainer_rebalance.csv", COLUMNS, by_round)


if __name__ == "__main__":
    main()
