"""Merging in training: what documents of a step share is computed once, and the loss stays the
same."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.cli import main
from longctx.config import ConfigError, load
from longctx.data.loader import Loader, Merging, merge_pieces
from longctx.data.packing import StepBatch, pack_documents
from longctx.data.pieces import Piece
from longctx.data.records.sources import open_corpus
from longctx.data.store.prepare import prepare
from longctx.data.store.store import Store
from longctx.data.trees import merge_prefixes
from longctx.planning.planners.planner import make_plan
from longctx.training.data import plan_steps
from longctx.training.metrics import mean_speed
from longctx.training.objectives.objective import token_mean
from tests.data_cases import PROFILE, byte_store, text_of, write_jsonl
from tests.marks import examples
from tests.merging_cases import APART, MERGED, SETTINGS, make_group_store, train
from tests.training_cases import SMALL
from tests.workers import Workers


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_group_store(tmp_path_factory.mktemp("groups"))


@pytest.mark.slow
def test_a_run_resumes_bit_by_bit(workers: Workers, groups: Path, tmp_path: Path) -> None:
    settings = [MERGED, "batch.tokens_per_rank=400"]
    whole = workers.run(train, 2, groups, tmp_path / "run", settings)[0]
    before, after = (
        sum(row[key] for row in whole["rows"]) for key in ("tokens", "computed_tokens")
    )
    assert after < 0.8 * before
    assert mean_speed(tmp_path / "run").endswith(f"per step, {before:,} tokens merged to {after:,}")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000003")
    again = workers.run(train, 2, groups, tmp_path / "run", settings, True)[0]
    assert [row["loss"] for row in again["rows"]] == [row["loss"] for row in whole["rows"]]
    assert all(
        torch.equal(again["weights"][name], weight) for name, weight in whole["weights"].items()
    )


def whole_pieces(store: Store) -> list[Piece]:
    return [Piece(document, 0, int(length)) for document, length in enumerate(store.lengths)]


def test_what_is_merged(groups: Path) -> None:
    store = Store.open(groups)
    merged = merge_pieces(store, whole_pieces(store), 2000, 300)
    assert merged is not None
    together: dict[int, list[int]] = {}
    for sequence, (document, rows) in enumerate(merged.rows):
        together.setdefault(document, []).append(sequence)
        tokens, labels = store.read(sequence, 0, int(store.lengths[sequence]))
        assert merged.tokens[document][rows].tolist() == tokens.tolist()
        assert merged.labels[document][rows].tolist() == labels.tolist()
    assert sorted(together.values()) == [
        [0, 1, 2, 3, 4, 19],
        [5, 6, 7, 8, 9],
        [10, 11, 12, 13],
        *([n] for n in range(14, 19)),
    ]
    small = merge_pieces(store, whole_pieces(store), 700, 300)
    assert (
        small is not None and max(small.lengths) <= 700 and len(small.tokens) > len(merged.tokens)
    )
    assert merge_pieces(store, whole_pieces(store)[14:19], 2000, 300) is None


def test_what_all_documents_share_is_not_enough(tmp_path: Path) -> None:
    """A chat template or a system prompt would make one large tree of every step."""
    records = [{"text": text_of(20) + text_of(300, seed)} for seed in range(1, 9)]
    prepare(
        open_corpus(str(write_jsonl(tmp_path / "s.jsonl", records))),
        tmp_path / "s",
        tokenizer="bytes",
    )
    store = Store.open(tmp_path / "s")
    assert merge_pieces(store, whole_pieces(store), 5000, 300) is None


def test_documents_that_share_nothing_are_planned_and_packed_as_before(
    tmp_path: Path, groups: Path
) -> None:
    def batches(store: Store, merging: Merging | None) -> list[Any]:
        def planner(lengths: Any, **trees: Any) -> Any:
            return make_plan(lengths, ranks=2, tokens_per_rank=300, profile=PROFILE, **trees)

        options: dict[str, Any] = {
            "rank": 1,
            "ranks": 2,
            "planner": planner,
            "global_tokens": 3000,
            "seed": 0,
        }
        with Loader(store, max_length=600, merging=merging, **options) as loader:
            return [next(loader) for _ in range(3)]

    store = byte_store(tmp_path, (200, 70, 410, 130, 90))
    merging = partial(merge_pieces, most_tokens=600, tokens_per_rank=300)
    for ours, theirs in zip(batches(store, merging), batches(store, None), strict=True):
        assert (
            ours.plan.hash == theirs.plan.hash
            and not ours.rows
            and ours.documents == theirs.documents
        )
        for a, b in zip(ours.micro_batches, theirs.micro_batches, strict=True):
            assert (
                torch.equal(a.tokens, b.tokens)
                and torch.equal(a.labels, b.labels)
                and a.weights is None
            )
    alike = batches(Store.open(groups), merging)
    assert all(batch.plan.trees and batch.tokens > sum(batch.plan.lengths) for batch in alike)
    assert any("that begin alike" in name for name in alike[0].documents)


def test_the_first_steps_are_planned_with_trees(
    groups: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    settings = [
        *SMALL,
        *SETTINGS,
        f"data.store={groups}",
        "batch.tokens_per_rank=400",
        f"train.run_dir={tmp_path / 'run'}",
    ]
    merged, apart = (
        plan_steps(load(None, [*settings, which], world_size=2), Store.open(groups), 2, 2)
        for which in (MERGED, APART)
    )
    for ours, theirs in zip(merged, apart, strict=True):
        assert (
            ours.plan.trees
            and ours.plan.makespan_s < theirs.plan.makespan_s
            and not theirs.plan.trees
        )
        assert sum(ours.plan.lengths) == sum(ours.static.lengths) < sum(theirs.plan.lengths)
    arguments = [f"--{one}" for one in [*settings, MERGED]]
    assert main(["train", "--dry-run", "--processes", "2", *arguments]) == 0
    assert f"  {sum(merged[0].plan.lengths):,}  " in capsys.readouterr().out


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_weights_are_those_of_the_sequences(data: st.DataObject) -> None:
    """Over the shares of all ranks, with any value on every row of the documents."""
    count, ranks = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 3))
    sequences = data.draw(
        st.lists(
            st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=count, max_size=count
        )
    )
    labels = [
        [token if data.draw(st.booleans()) else -100 for token in tokens] for tokens in sequences
    ]
    factors = data.draw(st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=count, max_size=count))
    merged = merge_prefixes(sequences, labels, most_tokens=30)
    plan = make_plan(
        merged.lengths, trees=merged.trees, ranks=ranks, tokens_per_rank=32, profile=PROFILE
    )
    of_rows = [torch.arange(1.0, 1 + length) * 7 % 11 for length in merged.lengths]
    names = tuple(map(str, range(len(plan.lengths))))
    total = 0.0
    for rank in range(ranks):
        packed, _ = pack_documents(
            plan, rank, merged.tokens, merged.labels, shift=False, pad_to_multiple_of=2
        )
        values = [torch.full((len(micro_batch.tokens),), 99.0) for micro_batch in packed]
        for micro_batch, row in zip(packed, values, strict=True):
            for shard in micro_batch.layout.shards:
                held = torch.cat(
                    [of_rows[shard.document][slice(*span)] for span in (shard.head, shard.tail)]
                )
                row[shard.offset : shard.offset + shard.tokens] = held
        options = {"weights": tuple(factors), "target_weight": 1.0, "rows": merged.rows}
        batch = StepBatch(1, plan, names, sum(map(len, sequences)), 1, tuple(packed), **options)
        tokens = token_mean(batch).tokens
        assert tokens is not None
        for micro_batch, row, weight in zip(packed, values, tokens, strict=True):
            total += float((row * weight)[micro_batch.labels != -100].sum())
    targets = [torch.tensor([*label[1:], -100]) != -100 for label in labels]
    expected = [
        float(of_rows[at][rows][kept].sum())
        for (at, rows), kept in zip(merged.rows, targets, strict=True)
    ]
    assert total == pytest.approx(
        sum(factor * each for factor, each in zip(factors, expected, strict=True))
    )


REFUSED = {
    "document_loss": [
        "model.overrides.num_experts=4",
        "model.overrides.num_experts_per_tok=2",
        "balance.document_loss=0.01",
    ],
    "z_loss": [
        "model.overrides.num_experts=4",
        "model.overrides.num_experts_per_tok=2",
        "balance.z_loss=0.01",
    ],
    "bias of the router": [
        "model.overrides.num_experts=4",
        "model.overrides.num_experts_per_tok=2",
        "model.overrides.router_bias=true",
    ],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_exact_is_refused(name: str) -> None:
    settings = [*SMALL, *REFUSED[name]]
    with pytest.raises(
        ConfigError, match=rf"data\.merge_prefixes = true\n.*not possible where .*{name}"
    ) as refused:
        load(None, [*settings, MERGED], world_size=1)
    assert "set it to false" in str(refused.value), "no way out"
