"""For every plan of a step, the ranks together hold every token once, with the labels and positions of a single rank."""

import json
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.data.loader import Loader, LoaderError
from longctx.data.packing import MicroBatch, StepBatch, pack
from longctx.data.records.corpus import open_corpus
from longctx.data.sampler import Piece, SamplerError
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


def rows_of_one_rank(store: Store, pieces: Sequence[Piece]) -> Rows:
    """Returns the same rows for whole documents, read from the store directly."""
    rows: Rows = Counter()
    for document, piece in enumerate(pieces):
        tokens, labels = store.read(piece.document, piece.start, piece.stop, end=piece.stop)
        rows.update((document, p, int(token), int(label)) for p, (token, label) in enumerate(zip(tokens, labels, strict=True)))
    return rows


@given(data=st.data())
def test_every_token_once_with_its_label_and_position(store: Store, data: st.DataObject) -> None:
    pieces = []
    for _ in range(data.draw(st.integers(1, 6))):
        document = data.draw(st.integers(0, len(store) - 1))
        start = data.draw(st.integers(0, int(store.lengths[document]) - 1))
        pieces.append(Piece(document, start, data.draw(st.integers(start + 1, int(store.lengths[document])))))
    ranks = data.draw(st.integers(1, 6))
    multiple = data.draw(st.integers(1, 8))
    plan = random_plan([piece.length for piece in pieces], ranks, data.draw(st.integers(0, 1000)))
    rows: Rows = Counter()
    for index in range(len(plan.micro_batches)):
        for rank in range(ranks):
            micro_batch = pack(store, pieces, plan.layout(index, rank), pad_to_multiple_of=multiple)
            rows += rows_of(micro_batch)
            held = micro_batch.layout.tokens
            assert micro_batch.index == index
            for tensor, filler in [(micro_batch.tokens, 0), (micro_batch.labels, IGNORED_LABEL), (micro_batch.positions, 0)]:
                assert tensor.dtype == torch.int64
                assert tensor.shape == (-(-held // multiple) * multiple,)
                assert (tensor[held:] == filler).all()
    assert rows == rows_of_one_rank(store, pieces)


def planner(ranks: int, mode: str = "auto", tokens_per_rank: int = 120) -> Callable[[Sequence[int]], Plan]:
    def plan(lengths: Sequence[int]) -> Plan:
        return make_plan(lengths, ranks=ranks, tokens_per_rank=tokens_per_rank, profile=PROFILE, mode=mode)

    return plan


def loader(store: Store, rank: int = 0, ranks: int = 1, **options: object) -> Loader:
    arguments = {
        "planner": planner(ranks),
        "global_tokens": 200,
        "seed": 3,
        "max_length": 100,
        "long_documents": "split",
        **options,
    }
    return Loader(store, rank=rank, ranks=ranks, **arguments)


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
        torch.equal(a.tokens, b.tokens) and torch.equal(a.labels, b.labels) and torch.equal(a.positions, b.positions)
        for a, b in zip(left.micro_batches, right.micro_batches, strict=True)
    )


@settings(max_examples=examples(20))
@given(ranks=st.integers(1, 4), mode=st.sampled_from(["static", "bins", "auto"]), multiple=st.integers(1, 8))
def test_steps_do_not_depend_on_ranks_or_plans(store: Store, ranks: int, mode: str, multiple: int) -> None:
    with loader(store) as alone:
        expected = take(alone, 3)
    loaders = [loader(store, rank, ranks, planner=planner(ranks, mode), pad_to_multiple_of=multiple) for rank in range(ranks)]
    for reference in expected:
        batches = [next(each) for each in loaders]
        assert step_rows(batches) == step_rows([reference])
        assert len({batch.plan.hash for batch in batches}) == 1
        for batch in batches:
            assert (batch.step, batch.documents, batch.tokens) == (reference.step, reference.documents, reference.tokens)
            assert batch.tokens == sum(batch.plan.lengths) >= 200 and batch.data_wait_s >= 0
            assert batch.target_tokens == reference.target_tokens
        labels = torch.cat([micro_batch.labels for batch in batches for micro_batch in batch.micro_batches])
        assert int((labels != IGNORED_LABEL).sum()) == reference.target_tokens
    states = [each.state_dict() for each in loaders]
    assert all(state == states[0] for state in states)
    for each in loaders:
        each.close()


@given(before=st.integers(0, 5), ranks=st.integers(1, 3), others=st.integers(1, 3))
@settings(max_examples=examples(32))
def test_resuming_gives_the_same_batches(store: Store, before: int, ranks: int, others: int) -> None:
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
            assert (state["step"], state["cursor"], state["epoch"]) == (step, cursor, cursor // source.sampler.pieces)
    assert state == {
        "fingerprint": store.fingerprint,
        "seed": 3,
        "max_length": 100,
        "long_documents": "split",
        "held_out": 0.0,
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
        for says in ("seed is 4, and was 3: set data.seed", "max_length is 50, and was 100: set data.max_length"):
            assert says in str(caught.value)
        assert "long_documents is 'drop', and was 'split': set data.long_documents" in str(caught.value)
        with pytest.raises(LoaderError, match="lacks cursor"):
            other.load_state_dict({key: value for key, value in state.items() if key != "cursor"})
    with (
        loader(byte_store(tmp_path, [50])) as other,
        pytest.raises(LoaderError, match=r"fingerprint is .*, and was .*: give the data\.store that the run began with"),
    ):
        other.load_state_dict(state)


def test_the_next_step_is_prepared_while_one_is_used(store: Store) -> None:
    planned: list[str] = []
    ready = threading.Event()

    def watched(lengths: Sequence[int]) -> Plan:
        planned.append(threading.current_thread().name)
        if len(planned) == 2:
            ready.set()
        return planner(1)(lengths)

    with loader(store, planner=watched) as source:
        assert not planned
        next(source)
        assert ready.wait(timeout=10)  # nobody has asked for the second step
    assert len(planned) == 2  # and one step ahead is enough
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
        for _ in range(2):
            with pytest.raises(PlanError, match="no room"):
                next(source)
        assert source.state_dict()["step"] == 2


def test_waiting_is_measured(store: Store) -> None:
    release = threading.Event()

    def slow(lengths: Sequence[int]) -> Plan:
        release.wait(timeout=0.3)
        return planner(1)(lengths)

    with loader(store, planner=slow) as source:
        assert next(source).data_wait_s > 0.2
        release.set()


def test_plans_of_something_else_are_refused(store: Store) -> None:
    with loader(store, planner=planner(2)) as source, pytest.raises(PlanError, match="2 ranks, but the domain has 1"):
        next(source)
    with (
        loader(store, planner=lambda lengths: planner(1)(lengths[1:])) as source,
        pytest.raises(PlanError, match="for other lengths"),
    ):
        next(source)


def test_long_document_under_error_is_refused_before_training(store: Store) -> None:
    with pytest.raises(SamplerError, match=r"document 'store\.jsonl:8' has 257 tokens"):
        loader(store, long_documents="error")


def test_close_ends_the_thread(store: Store) -> None:
    before = threading.active_count()
    source = loader(store)
    next(source)
    assert threading.active_count() == before + 1
    source.close()
    assert threading.active_count() == before


def test_pieces_without_a_target_are_not_taken(tmp_path: Path) -> None:
    """Of a long prompt, and of a rest of one token."""
    talk = {"messages": [{"role": "user", "content": "q" * 150}, {"role": "assistant", "content": "a" * 10}]}
    for name, records in (("talk", [talk, talk]), ("rest", [{"text": "t" * 120}]), ("whole", [{"text": "t" * 110}])):
        write_jsonl(tmp_path / f"{name}.jsonl", records)
        prepare(open_corpus(str(tmp_path / f"{name}.jsonl")), tmp_path / name, tokenizer="bytes")
    stores = [Store.open(tmp_path / name) for name in ("talk", "rest", "whole")]
    cut = {"global_tokens": 1, "max_length": 40}
    for opened in (*stores, Store.join(stores, [1.0, 1.0, 1.0])):
        lengths = opened.lengths.tolist()
        spans = {(number, start) for number, length in enumerate(lengths) for start in range(0, length, 40)}
        learned = {span for span in spans if opened.target_tokens(*span, min(span[1] + 40, lengths[span[0]]))}
        with loader(opened, **cut) as source:
            assert all(batch.target_tokens for batch in take(source, 12))
            pieces = coming(source, 200)
        taken = {(piece.document, piece.start) for piece in pieces}
        assert taken == learned if opened in stores else taken <= learned
