"""For every plan of a step, the ranks together hold every token once, with the labels and positions
of a single rank."""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.data.loader import Loader
from longctx.data.packing import MicroBatch, PackingError, StepBatch, pack, pack_documents
from longctx.data.pieces import Piece, SamplerError
from longctx.data.position import LoaderError
from longctx.data.records.sources import open_corpus
from longctx.data.store.prepare import prepare
from longctx.data.store.store import IGNORED_LABEL, Store
from longctx.planning.plan import Plan, PlanError
from longctx.planning.planners.planner import make_plan
from tests.data_cases import PROFILE, byte_store, random_plan, write_jsonl
from tests.marks import examples

LENGTHS = (2, 3, 5, 8, 13, 40, 100, 257)

Rows = Counter[tuple[int, int, int, int]]
"""(document, position, token, label) of buffer rows."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return byte_store(tmp_path_factory.mktemp("loader"), LENGTHS, conversations=2)


def rows_of(micro_batch: MicroBatch) -> Rows:
    """Returns the rows of a buffer by document, according to the layout."""
    rows: Rows = Counter()
    for shard in micro_batch.layout.shards:
        for row in range(shard.offset, shard.offset + shard.tokens):
            values = (micro_batch.positions[row], micro_batch.tokens[row], micro_batch.labels[row])
            position, token, label = (int(value) for value in values)
            rows[(shard.document, position, token, label)] += 1
    return rows


def planner(
    ranks: int, mode: str = "auto", tokens_per_rank: int = 120
) -> Callable[[Sequence[int]], Plan]:
    def plan(lengths: Sequence[int]) -> Plan:
        return make_plan(
            lengths, ranks=ranks, tokens_per_rank=tokens_per_rank, profile=PROFILE, mode=mode
        )

    return plan


def loader(store: Store, rank: int = 0, ranks: int = 1, **options: object) -> Loader:
    arguments = {
        "planner": planner(ranks),
        "global_tokens": 200,
        "seed": 3,
        "max_length": 100,
        "long_documents": "split",
    }
    return Loader(store, rank=rank, ranks=ranks, **{**arguments, **options})


def take(source: Loader, steps: int) -> list[StepBatch]:
    return [next(source) for _ in range(steps)]


def coming(source: Loader, steps: int) -> list[Piece]:
    """Returns the pieces of the next steps."""
    pieces, cursor = list[Piece](), source.sampler.cursor(source.state_dict())
    for _ in range(steps):
        more, cursor = source.sampler.step(cursor)
        pieces += more
    return pieces


def step_rows(batches: Sequence[StepBatch]) -> Counter[tuple[str, int, int, int]]:
    """Returns the rows of one step over all ranks, by the documents' names."""
    rows: Counter[tuple[str, int, int, int]] = Counter()
    for batch in batches:
        for micro_batch in batch.micro_batches:
            for (document, *row), count in rows_of(micro_batch).items():
                rows[(batch.documents[document], row[0], row[1], row[2])] += count
    return rows


def same(left: StepBatch, right: StepBatch) -> bool:
    """Returns whether two batches are equal, except for the time that they took."""
    return (
        (left.step, left.plan.hash, left.documents, left.tokens, left.target_tokens)
        == (right.step, right.plan.hash, right.documents, right.tokens, right.target_tokens)
    ) and all(
        torch.equal(a.tokens, b.tokens)
        and torch.equal(a.labels, b.labels)
        and torch.equal(a.positions, b.positions)
        for a, b in zip(left.micro_batches, right.micro_batches, strict=True)
    )


@given(before=st.integers(0, 5), ranks=st.integers(1, 3), others=st.integers(1, 3))
@settings(max_examples=examples(12))
def test_resuming_gives_the_same_batches(
    store: Store, before: int, ranks: int, others: int
) -> None:
    """On other ranks too: together they hold the same documents."""
    with loader(store, ranks - 1, ranks) as whole:
        batches = take(whole, before + 3)
    with loader(store) as alone:
        expected = take(alone, before + 1)[-1]
    with loader(store, ranks - 1, ranks) as first:
        take(first, before)
        state = json.loads(json.dumps(first.state_dict()))
    with loader(store, ranks - 1, ranks) as second:
        take(second, 2)  # a position of its own, and a step prepared ahead, are forgotten
        second.load_state_dict(state)
        assert second.state_dict() == state
        assert all(map(same, take(second, 3), batches[before:]))
    resumed = []
    for rank in range(others):
        with loader(store, rank, others, planner=planner(others, "static")) as other:
            other.load_state_dict(state)
            resumed.append(next(other))
    assert step_rows(resumed) == step_rows([expected])
    for batch in resumed:
        assert (batch.step, batch.documents, batch.tokens) == (
            expected.step,
            expected.documents,
            expected.tokens,
        )
        assert (
            batch.target_tokens == expected.target_tokens
            and batch.plan.hash == resumed[0].plan.hash
        )


def test_state_is_that_of_the_last_step_handed_out(store: Store) -> None:
    names: set[str] = set()
    with loader(store) as source:
        assert (source.state_dict()["step"], source.state_dict()["cursor"]) == (0, 0)
        cursor = 0
        for step in range(1, 9):
            batch = next(source)
            names |= set(batch.documents)
            cursor += len(batch.documents)
            state = source.state_dict()
            assert (state["step"], state["cursor"], state["epoch"]) == (
                step,
                cursor,
                cursor // source.sampler.pieces,
            )
    assert state == {
        "fingerprint": store.fingerprint,
        "seed": 3,
        "max_length": 100,
        "long_documents": "split",
        "held_out": 0.0,
        "order": "bijection",
        "step": 8,
        "cursor": cursor,
        "epoch": cursor // source.sampler.pieces,
        "longest": 100,
    }
    assert {"store.jsonl:1", "store.jsonl:8[0:100]", "store.jsonl:8[200:257]"} <= names


def test_state_of_another_run_is_refused(store: Store, tmp_path: Path) -> None:
    with loader(store) as source:
        state = source.state_dict()
    with loader(store, seed=4, max_length=50, long_documents="drop") as other:
        with pytest.raises(LoaderError) as caught:
            other.load_state_dict(state)
        for says in (
            "seed is 4, and was 3: set data.seed",
            "max_length is 50, and was 100: set data.max_length",
        ):
            assert says in str(caught.value)
        assert "long_documents is 'drop', and was 'split': set data.long_documents" in str(
            caught.value
        )
        with pytest.raises(LoaderError, match="lacks cursor"):
            other.load_state_dict({key: value for key, value in state.items() if key != "cursor"})
    with (
        loader(byte_store(tmp_path, [50])) as other,
        pytest.raises(
            LoaderError,
            match=r"fingerprint is .*, and was .*: give the data\.store that the run began with",
        ),
    ):
        other.load_state_dict(state)


def test_a_run_keeps_the_order_in_which_it_began(store: Store) -> None:
    """Earlier versions had one order, and did not say so."""
    with loader(store, order="permutation") as began:
        take(began, 2)
        state = json.loads(json.dumps(began.state_dict()))
        expected = take(began, 3)
    assert state.pop("order") == "permutation"
    with loader(store) as resumed, loader(store) as continued, loader(store) as fresh:
        take(resumed, 1)
        resumed.load_state_dict(state)
        continued.continue_from(state)
        assert resumed.state_dict() == continued.state_dict() == {**state, "order": "permutation"}
        assert all(map(same, take(resumed, 3), expected))
        assert all(map(same, take(continued, 3), expected))
        assert not all(map(same, take(fresh, 5)[2:], expected))
        for go_on in (fresh.load_state_dict, fresh.continue_from):
            with pytest.raises(LoaderError, match="'sorted', but this longctx has bijection, perm"):
                go_on({**state, "order": "sorted"})


def test_the_next_step_is_prepared_while_one_is_used(store: Store) -> None:
    """In one thread, which ends with the loader; waiting for a step is measured."""
    planned: list[str] = []
    ready, before = threading.Event(), threading.active_count()

    def watched(lengths: Sequence[int]) -> Plan:
        planned.append(threading.current_thread().name)
        if len(planned) == 2:
            ready.set()
        else:
            time.sleep(0.05)
        return planner(1)(lengths)

    with loader(store, planner=watched) as source:
        assert not planned
        assert next(source).data_wait_s >= 0.05
        assert ready.wait(timeout=10)  # nobody has asked for the second step
        assert threading.active_count() == before + 1
    assert len(planned) == 2 and threading.active_count() == before  # and one step ahead is enough
    assert all(name.startswith("longctx-loader") for name in planned)


def test_what_goes_wrong_is_raised_by_the_step_that_it_belongs_to(store: Store) -> None:
    calls = 0

    def failing(lengths: Sequence[int]) -> Plan:
        nonlocal calls
        calls += 1
        if calls >= 3:
            raise PlanError("no room")
        return planner(1)(lengths)

    with loader(store, planner=failing) as source:
        assert [batch.step for batch in take(source, 2)] == [1, 2]
        assert source._ahead is not None and source._ahead.exception() is not None
        assert source.next_hash() is None, "ranks agree on plans alone"
        for _ in range(2):
            with pytest.raises(PlanError, match="no room"):
                next(source)
        assert source.state_dict()["step"] == 2


def test_plans_of_something_else_are_refused(store: Store) -> None:
    with (
        loader(store, planner=planner(2)) as source,
        pytest.raises(PlanError, match="2 ranks, but the domain has 1"),
    ):
        next(source)
    with (
        loader(store, planner=lambda lengths: planner(1)(lengths[1:])) as source,
        pytest.raises(PlanError, match="for other lengths"),
    ):
        next(source)


def test_long_document_under_error_is_refused_before_training(store: Store) -> None:
    with pytest.raises(SamplerError, match=r"document 'store\.jsonl:8' has 257 tokens"):
        loader(store, long_documents="error")


def test_pieces_without_a_target_are_not_taken(tmp_path: Path) -> None:
    """Of a long prompt, and of a rest of one token."""
    talk = {
        "messages": [
            {"role": "user", "content": "q" * 150},
            {"role": "assistant", "content": "a" * 10},
        ]
    }
    for name, records in (
        ("talk", [talk, talk]),
        ("rest", [{"text": "t" * 120}]),
        ("whole", [{"text": "t" * 110}]),
    ):
        write_jsonl(tmp_path / f"{name}.jsonl", records)
        prepare(open_corpus(str(tmp_path / f"{name}.jsonl")), tmp_path / name, tokenizer="bytes")
    stores = [Store.open(tmp_path / name) for name in ("talk", "rest", "whole")]
    cut = {"global_tokens": 1, "max_length": 40}
    for opened in (*stores, Store.join(stores, [1.0, 1.0, 1.0])):
        lengths = opened.lengths.tolist()
        spans = {
            (number, start)
            for number, length in enumerate(lengths)
            for start in range(0, length, 40)
        }
        learned = {
            span
            for span in spans
            if opened.target_tokens(*span, min(span[1] + 40, lengths[span[0]]))
        }
        with loader(opened, **cut) as source:
            assert all(batch.target_tokens for batch in take(source, 12))
            pieces = coming(source, 200)
        taken = {(piece.document, piece.start) for piece in pieces}
        assert taken == learned if opened in stores else taken <= learned


# --- packing of documents in memory


PACKED = [37, 3, 150, 8, 2, 64]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("multiple", [1, 16])
def test_documents_in_memory_give_the_buffers_of_a_store(
    tmp_path: Path, seed: int, multiple: int
) -> None:
    store = byte_store(tmp_path, PACKED)
    documents = [store.read(document, 0, length)[0] for document, length in enumerate(PACKED)]
    pieces = [Piece(document, 0, length) for document, length in enumerate(PACKED)]
    plan = random_plan(PACKED, 3, seed)
    for rank in range(3):
        packed, targets = pack_documents(plan, rank, documents, pad_to_multiple_of=multiple)
        assert targets == store.trained_tokens.sum() == sum(PACKED) - len(PACKED)
        assert len(packed) == len(plan.micro_batches)
        for index, mine in enumerate(packed):
            stored = pack(store, pieces, plan.layout(index, rank), pad_to_multiple_of=multiple)
            assert mine.index == index and mine.layout == stored.layout
            held = stored.layout.tokens
            for name, filler in (("tokens", 0), ("labels", IGNORED_LABEL), ("positions", 0)):
                assert torch.equal(getattr(mine, name), getattr(stored, name)), name
                assert (getattr(stored, name)[held:] == filler).all() and len(stored.tokens) == -(
                    -held // multiple
                ) * multiple


def test_labels_of_a_document_are_shifted_and_masked() -> None:
    """For every cut, each target is the label of the token before it, exactly once over all
    ranks."""
    documents = [list(range(1000 * i, 1000 * i + length)) for i, length in enumerate(PACKED)]
    labels = [
        torch.tensor([IGNORED_LABEL if token % 3 else token for token in document])
        for document in documents
    ]
    plan = random_plan(PACKED, 3, seed=4)
    pairs, targets = [], 0
    for rank in range(3):
        packed, targets = pack_documents(plan, rank, documents, labels)
        for batch in packed:
            valid = batch.labels != IGNORED_LABEL
            pairs += zip(batch.tokens[valid].tolist(), batch.labels[valid].tolist(), strict=True)
    expected = [
        (token - 1, token) for document in documents for token in document[1:] if token % 3 == 0
    ]
    assert sorted(pairs) == expected
    assert targets == len(expected)


@pytest.mark.parametrize(
    ("documents", "labels", "message"),
    [
        ([[1, 2]], None, r"there are 1 documents, but the plan has 2"),
        (
            [[1, 2], [3]],
            None,
            r"documents\[1\] has shape \[1\], but the plan's document 1 has 3 tokens",
        ),
        ([[1, 2], [[3, 4, 5]]], None, r"documents\[1\] has shape \[1, 3\]"),
        ([[1, 2], [3, 4, 5]], [[1, 2], np.zeros(4, np.int64)], r"labels\[1\] has shape \[4\]"),
    ],
)
def test_documents_of_another_plan_are_refused(
    documents: list, labels: list | None, message: str
) -> None:
    with pytest.raises(PackingError, match=message):
        pack_documents(random_plan([2, 3], 1, seed=0), 0, documents, labels)
