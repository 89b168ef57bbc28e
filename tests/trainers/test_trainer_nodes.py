"""Rings of trainers over several nodes: rows cross the network once per node, in a group of their
own."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.trainer_cases import PROFILE, TOKENS_PER_RANK, arguments, as_rank, documents, model, pad
from tests.workers import Workers

NODE = 2
"""Ranks per node."""


def losses(folder: Path, dynamic: bool) -> tuple[list[float], set[tuple[bool, int]]]:
    """Losses of two steps, and whether rings had two levels, with the ranks per node of their
    second group."""
    from transformers import Trainer, TrainingArguments

    from longctx.attention.ring import RingAttention
    from longctx.trainers import dynamic_context_parallel

    ranks = as_rank()
    if ranks > 1:
        os.environ["LOCAL_WORLD_SIZE"] = str(NODE)
    given = arguments(folder, ranks, 1, max_steps=2, eval_strategy="no")
    trainer = Trainer(
        model(), TrainingArguments(**given), data_collator=pad, train_dataset=documents()
    )
    rings: set[tuple[bool, int]] = set()
    build = RingAttention.__init__

    def building(ring: Any, *arguments: Any, **named: Any) -> None:
        build(ring, *arguments, **named)
        rings.add((ring.schedule.two_levels, 0 if ring.across is None else ring.across[1]))

    if dynamic:
        whole = replace(PROFILE, ranks_per_node=NODE)
        dynamic_context_parallel(
            trainer,
            profile=whole,
            tokens_per_rank=TOKENS_PER_RANK // 2,
            mode="static",
            degree=ranks,
        )
    RingAttention.__init__ = building  # type: ignore[method-assign]
    try:
        trainer.train()
    finally:
        RingAttention.__init__ = build  # type: ignore[method-assign]
        os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
    assert not dynamic or (
        trainer.dynamic.attention.across is None
        or dist.get_world_size(trainer.dynamic.attention.across) == ranks
    )
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], rings


def test_rings_over_two_nodes_have_two_levels_and_two_groups(
    workers: Workers, tmp_path: Path
) -> None:
    runs = workers.run(losses, 2 * NODE, tmp_path, True)
    ((expected, _),) = workers.run(losses, 1, tmp_path, False)
    for found, rings in runs:
        assert found == pytest.approx(expected, rel=1e-6) and len(found) == 2
        assert rings == {(True, NODE)}
