"""Models of transformers over trees: log-probabilities and gradients are those of every sequence
alone, under any split."""

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from longctx.data.packing import MicroBatch
from longctx.data.trees import Merged, merge_prefixes, pack_merged
from longctx.hf.attention import HuggingFaceError, model_inputs, prepare
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.planners.planner import make_plan
from tests.family_cases import build, largest_error
from tests.huggingface_cases import build_model, gradients, make_documents
from tests.marks import slow_unless
from tests.workers import Workers

H100 = HardwareProfile.load("h100-nvlink-ib")
KINDS = ("llama", "mistral", "gemma3_text", "qwen3_next")
SPLITS = ((2, 2, None), (3, 3, None), (3, 2, 80))
"""Ranks, degree of every document, and the largest number of tokens of a tree: the whole group is
in one, or in several."""


@cache
def group() -> tuple[list[list[int]], list[list[int]]]:
    """Returns conversations of several turns, of which two are equal, one of them part of others,
    and one of another prompt."""
    prompt, first, answer, question, *ends, other = (
        part.tolist() for part in make_documents((37, 11, 9, 6, 21, 1, 15, 12, 40))
    )
    turns = [*prompt, *first, *answer]
    sequences = [[*turns, *question, *end] for end in ends[:2]]
    sequences += [
        [*prompt, *ends[2]],
        [*prompt, *first, *ends[3]],
        turns,
        [*prompt, *ends[2]],
        other,
    ]
    labels = [[*[-100] * len(prompt), *each[len(prompt) :]] for each in sequences[:-1]] + [other]
    return sequences, labels


def log_probabilities(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns log p of every label; 0 without."""
    chosen = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    return chosen.where(labels >= 0, 0)


def build_wide(kind: str) -> Any:
    """Returns a model in float64, though some of its layers compute in float32, and experts only in
    that."""
    model = build(kind, "eager")
    return model if kind == "qwen3_next" else model.double()


def tree_step(
    kind: str, degree: int, most_tokens: int | None, least_shared: int = 1
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Runs on each rank: log p of every row of every sequence, and gradients of the mean over all
    targets."""
    model: Any = build_wide(kind)
    prepare(model)
    merged = merge_prefixes(*group(), most_tokens=most_tokens, least_shared=least_shared)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    plan = make_plan(
        merged.lengths,
        ranks=ranks,
        tokens_per_rank=130,
        profile=H100,
        mode="static",
        degree=degree,
        trees=merged.trees,
    )
    values = [torch.zeros(length, dtype=torch.float64) for length in merged.lengths]
    packed, targets = pack_merged(plan, rank, merged)
    for batch in packed:
        rows = len(batch.tokens)
        found = log_probabilities(
            model(**model_inputs(model, batch)).logits[0, :rows], batch.labels
        )
        (
            (-found * batch.weights).sum() / targets + 0 * sum(p.sum() for p in model.parameters())
        ).backward()
        for shard in batch.layout.shards:
            of_document = torch.cat([torch.arange(*shard.head), torch.arange(*shard.tail)])
            values[shard.document][of_document] = found.detach().double()[
                shard.offset : shard.offset + shard.tokens
            ]
    totals = gradients(model)
    for tensor in (*totals, *values):
        dist.all_reduce(tensor)
    return [values[document][rows] for document, rows in merged.rows], totals


@cache
def one_by_one(kind: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    model: Any = build_wide(kind)
    sequences, labels = group()
    targets = sum(value >= 0 for label in labels for value in label[1:])
    values = []
    for sequence, label in zip(sequences, labels, strict=True):
        logits = model(input_ids=torch.tensor([sequence]), use_cache=False).logits[0]
        found = log_probabilities(logits, torch.tensor([*label[1:], -100]))
        (-found.sum() / targets).backward()
        values.append(found.detach())
    return values, gradients(model)


def assert_equal(
    results: list[Any], expected: Any, values_within: float, gradients_within: float
) -> None:
    for values, found in results:
        assert (
            max(float((a - b).abs().max()) for a, b in zip(values, expected[0], strict=True))
            <= values_within
        )
        assert largest_error(found, expected[1]) <= gradients_within


@pytest.mark.parametrize(
    ("kind", "split"),
    slow_unless(
        lambda kind, split: kind != "qwen3_next" and split == SPLITS[KINDS.index(kind) % 3],
        [(kind, split) for kind in KINDS for split in SPLITS],
    ),
)
def test_equal_to_every_sequence_alone(
    workers: Workers, kind: str, split: tuple[int, int, int | None]
) -> None:
    """Qwen3-Next's own code is less exact in float32, so trees are also compared with the same code
    without merging."""
    ranks, degree, most_tokens = split
    results = workers.run(tree_step, ranks, kind, degree, most_tokens)
    if kind != "qwen3_next":
        assert_equal(results, one_by_one(kind), 2e-6, 1e-6)
        return
    assert_equal(results, one_by_one(kind), 1e-5, 1e-4)
    apart = workers.run(tree_step, ranks, kind, degree, most_tokens, 10**6)
    assert_equal(results, apart[0], 2e-6, 1e-6)


def one_batch(merged: Merged) -> tuple[MicroBatch, float]:
    """Returns the only micro-batch of one rank, and the weight of all targets."""
    plan = make_plan(
        merged.lengths, ranks=1, tokens_per_rank=1000, profile=H100, trees=merged.trees
    )
    (batch,), targets = pack_merged(plan, 0, merged)
    return batch, targets


def test_the_loss_of_the_model_is_that_of_the_sequences() -> None:
    """If no row counts for several, as the model's own loss has no weights."""
    sequences, labels = ([each[number] for number in (0, 2, 3)] for each in group())
    shared = 37 + 11
    labels = [[*[-100] * shared, *label[shared:]] for label in labels]
    model: Any = build("llama", "eager")
    targets = sum(value >= 0 for label in labels for value in label)
    expected = sum(
        model(
            input_ids=torch.tensor([ids]), labels=torch.tensor([label]), num_items_in_batch=targets
        ).loss
        for ids, label in zip(sequences, labels, strict=True)
    )
    prepare(model)
    batch, weight = one_batch(merge_prefixes(sequences, labels))
    assert len(batch.layout.shards) == 1 and weight == targets
    assert model(**model_inputs(model, batch, targets)).loss.item() == pytest.approx(
        expected.item(), rel=1e-6
    )
    with pytest.raises(HuggingFaceError, match="rows of the batch have weights other than 1"):
        model_inputs(model, one_batch(merge_prefixes(*group()))[0], targets)


def test_limits_of_positions_are_those_of_the_longest_sequence() -> None:
    model: Any = build_model(
        "llama",
        "longctx",
        rope_scaling={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        max_position_embeddings=100,
    )
    batch, _ = one_batch(merge_prefixes(*group()))
    assert batch.layout.shards[0].length > 100 > batch.layout.shards[0].longest
    model_inputs(model, batch)
