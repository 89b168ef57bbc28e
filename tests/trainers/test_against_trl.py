"""What `longctx compare --against trl-packing` models, against the real trainers on two processes:
tokens and attention of every rank in every micro-batch, of TRL's packing and of dynamic context
parallelism."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from longctx.comparison.whole import StepShape, deal, pack_as_trl
from longctx.planning.assignment import Assignment, tokens_on_ranks
from longctx.planning.planners.planner import make_plan
from tests.trainer_cases import PROFILE, VOCABULARY, as_rank, model
from tests.workers import Workers

RANKS = 2
ACCUMULATION = 3
ROW_TOKENS = 61
LENGTHS = [
    61,
    97,
    3,
    7,
    31,
    2,
    13,
    59,
    61,
    60,
    5,
    11,
    43,
    2,
    29,
    17,
    30,
    31,
    23,
    61,
    19,
    47,
    40,
    8,
    53,
]
"""Primes and others; the second document is longer than a row."""
LONGEST = max(LENGTHS)

Loads = list[tuple[int, int]]
"""Tokens, and pairs of queries and keys of attention, in every call of the model."""


def sft(folder: Path, packs: bool) -> dict[str, Any]:
    """Trains an epoch with SFTTrainer: its packing, or dynamic context parallelism. Returns what
    each call of the model in training computed, and the plans."""
    import datasets
    from trl import SFTConfig, SFTTrainer

    from longctx.trainers import dynamic_context_parallel

    ranks = as_rank()
    rows = []
    for length in LENGTHS:
        ids = [token % VOCABULARY for token in range(length)]
        rows.append({"input_ids": ids, "labels": ids})
    options: dict[str, Any] = {"max_length": None}
    if packs:
        options = {"packing": True, "packing_strategy": "bfd", "max_length": ROW_TOKENS}
    options |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": ACCUMULATION}
    trainer = SFTTrainer(
        model(),
        args=SFTConfig(
            output_dir=str(folder),
            num_train_epochs=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            **options,
        ),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=_tokenizer(),
    )
    if not packs:
        dynamic_context_parallel(trainer, profile=PROFILE, tokens_per_rank=ROW_TOKENS)
    loads: Loads = []

    def look(_: Any, __: Any, given: dict[str, Any]) -> None:
        positions = given["position_ids"]
        loads.append((positions.numel(), int((positions + 1).sum())))

    trainer.model.model.register_forward_pre_hook(look, with_kwargs=True)
    trainer.train()
    plans = [] if packs else trainer.dynamic.plans
    return {"ranks": ranks, "rank": dist.get_rank(), "loads": loads, "plans": plans}


def _tokenizer() -> Any:
    from tests.trainer_cases import tokenizer

    return tokenizer()


def sampled(rows: int) -> list[int]:
    """Returns the order of accelerate's sampler in the first epoch, with the default seed."""
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(42))
    return [int(row) for row in order]


def pairs_of(lengths: np.ndarray) -> int:
    """Returns the pairs of queries and keys of whole documents."""
    return int((lengths * (lengths + 1) // 2).sum())


def test_packed_rows_are_those_of_trl_on_every_rank_in_every_micro_batch(
    workers: Workers, tmp_path: Path
) -> None:
    found = workers.run(sft, RANKS, tmp_path, True)
    rows = pack_as_trl(LENGTHS, ROW_TOKENS)
    shape = StepShape(micro_batches=ACCUMULATION, ranks=RANKS, rows_per_rank=1)
    dealt = deal(np.array(sampled(len(rows))), shape)
    assert len(dealt) == 2 and len(rows) % shape.rows, "whole steps, and a rest"
    lengths = np.minimum(np.array(LENGTHS), ROW_TOKENS)
    for rank in range(RANKS):
        modelled: Loads = []
        for row in dealt[:, :, rank, 0].ravel():
            documents = lengths[rows[row]]
            modelled.append((int(documents.sum()), pairs_of(documents)))
        assert found[rank]["loads"][: len(modelled)] == modelled


def test_plans_of_longctx_are_those_of_the_trainer_on_every_rank_in_every_micro_batch(
    workers: Workers, tmp_path: Path
) -> None:
    """Ring ranks have the same attention, which the model takes from the squares of lengths,
    but for the tokens that cut points are rounded by."""
    found = workers.run(sft, RANKS, tmp_path, False)
    plans = found[0]["plans"]
    assert sorted(length for plan in plans for length in plan.lengths) == sorted(LENGTHS)
    assert any(degree > 1 for plan in plans for degree in plan.degrees)
    shape = StepShape(micro_batches=ACCUMULATION, ranks=RANKS, rows_per_rank=1)
    order = np.array(sampled(len(LENGTHS)))
    dealt = deal(order, shape)
    assert len(dealt) == 4
    rest = order[dealt.size :]
    done = 0
    for plan, documents in zip(plans, [*dealt, rest], strict=True):
        assert sorted(plan.lengths) == sorted(LENGTHS[document] for document in documents.ravel())
        modelled = make_plan(plan.lengths, ranks=RANKS, tokens_per_rank=ROW_TOKENS, profile=PROFILE)
        assert modelled.micro_batches == plan.micro_batches
        lengths = np.array(plan.lengths, dtype=np.int64)
        placed = Assignment.of(modelled)
        here = (len(plan.micro_batches), RANKS)
        tokens = tokens_on_ranks(lengths, placed, here)
        squares = placed.runs(here).spread(lengths**2 // placed.degree)
        rounded = placed.runs(here).spread(np.where(placed.degree > 1, 2 * lengths, 0))
        for micro_batch in range(here[0]):
            for rank in range(RANKS):
                held, pairs = found[rank]["loads"][done]
                if tokens[micro_batch, rank] == 0:
                    assert (held, pairs) == (1, 1), "a filler: all ranks run the same calls"
                    continue
                assert held == tokens[micro_batch, rank]
                off = abs(2 * pairs - held - int(squares[micro_batch, rank]))
                assert off <= rounded[micro_batch, rank]
            done += 1
    assert [len(each["loads"]) for each in found] == [done] * RANKS
