"""Several stores as one: their shares of the tokens hold at every moment, and a cursor is enough to
resume."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.config import load
from longctx.data.loader import Loader
from longctx.data.mixture import Mixture, make_steps
from longctx.data.pieces import Piece, SamplerError
from longctx.data.position import LoaderError
from longctx.data.records.sources import open_corpus
from longctx.data.sampler import Sampler
from longctx.data.store.held_out import held_out
from longctx.data.store.manifest import StoreError
from longctx.data.store.prepare import prepare
from longctx.data.store.store import Store
from longctx.planning.planners.planner import make_plan
from longctx.training.validation import Documents
from tests.data.test_loader import same, step_rows, take
from tests.data_cases import PROFILE, byte_store, write_jsonl
from tests.marks import examples

CUT = {"seed": 3, "max_length": 100, "long_documents": "split", "held_out_share": 0.0}
LENGTHS = {"a": (2, 3, 5, 8, 13, 40, 100, 257), "b": (30,) * 12, "c": (7, 90, 4)}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Store]:
    folder = tmp_path_factory.mktemp("mixture")
    return [
        byte_store(folder, lengths, name=name, conversations=name == "c")
        for name, lengths in LENGTHS.items()
    ]


def mixture(
    stores: list[Store], amounts: list[float], unit: str = "weight", **options: object
) -> Mixture:
    made = make_steps(Store.join(stores, amounts, unit), **{"global_tokens": 200, **CUT, **options})
    assert isinstance(made, Mixture)
    return made


def source_of(mixed: Mixture, piece: Piece) -> int:
    (number,) = (
        number for number, source in enumerate(mixed.sources) if piece.document in source.documents
    )
    return number


weights_strategy = st.lists(st.floats(0.01, 100), min_size=2, max_size=3)


@settings(max_examples=examples(40))
@given(
    weights=weights_strategy,
    unit=st.sampled_from(["weight", "epochs"]),
    global_tokens=st.integers(1, 900),
    drop=st.booleans(),
)
def test_no_store_is_more_than_a_document_ahead_of_its_share(
    stores: list[Store], weights: list[float], unit: str, global_tokens: int, drop: bool
) -> None:
    long_documents = "drop" if drop else "split"
    mixed = mixture(
        stores[: len(weights)],
        weights,
        unit,
        global_tokens=global_tokens,
        long_documents=long_documents,
    )
    if unit == "epochs":
        weights = [
            weight * sampler.tokens for weight, sampler in zip(weights, mixed.samplers, strict=True)
        ]
    shares = np.array(weights) / sum(weights)
    assert mixed.shares == pytest.approx(shares.tolist())
    longest = np.array(
        [max(piece.length for piece in sampler.in_order()) for sampler in mixed.samplers]
    )
    taken, cursor = np.zeros(len(weights)), mixed.start
    for _ in range(60):
        pieces, cursor = mixed.step(cursor)
        for piece in pieces:
            taken[source_of(mixed, piece)] += piece.length
            ahead = taken - shares * taken.sum()
            assert (ahead <= longest + 1e-6).all()
            assert (ahead >= -(longest.sum() - longest) - 1e-6).all()
        assert [tokens for _, tokens in cursor] == taken.tolist()


@settings(max_examples=examples(20))
@given(weights=weights_strategy, sizes=st.lists(st.integers(1, 700), min_size=1, max_size=6))
def test_any_cursor_can_be_gone_on_from_at_any_size_of_a_step(
    stores: list[Store], weights: list[float], sizes: list[int]
) -> None:
    one_by_one = mixture(stores[: len(weights)], weights, global_tokens=1)
    cursor = expected_cursor = one_by_one.start
    for size in sizes:
        fresh = mixture(stores[: len(weights)], weights, global_tokens=size)
        state = json.loads(json.dumps(fresh.state(cursor)))
        pieces, cursor = fresh.step(fresh.cursor(state))
        assert (
            sum(piece.length for piece in pieces[:-1])
            < size
            <= sum(piece.length for piece in pieces)
        )
        for piece in pieces:
            (expected,), expected_cursor = one_by_one.step(expected_cursor)
            assert piece == expected
    assert cursor == expected_cursor


def test_each_store_has_an_order_of_its_own(tmp_path: Path) -> None:
    """Two stores with the same number of documents, and the same store in another mix."""
    stores = [byte_store(tmp_path, [10 + k] * 60, name=str(k)) for k in range(3)]

    def orders(chosen: list[Store]) -> list[list[int]]:
        mixed = mixture(chosen, [1.0] * len(chosen))
        return [
            [sampler.step(place)[0][0].document - source.documents.start for place in range(60)]
            for source, sampler in zip(mixed.sources, mixed.samplers, strict=True)
        ]

    first, second = orders(stores[:2])
    assert first != second and sorted(first) == sorted(second) == list(range(60))
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.4
    assert orders(stores[1:])[0] == second == orders(stores[::-1])[1]


def test_documents_of_all_stores_are_read_as_from_each(stores: list[Store]) -> None:
    joined = Store.join(stores, [1, 2, 3])
    assert len(joined) == sum(map(len, stores)) == len(list(joined.names))
    document = 0
    for store, source in zip(stores, joined.sources, strict=True):
        assert (source.path, source.fingerprint) == (store.path, store.fingerprint)
        for number in range(len(store)):
            length = int(store.lengths[number])
            assert joined.name(document) == store.name(number)
            for ours, theirs in zip(
                joined.read(document, 1, length), store.read(number, 1, length), strict=True
            ):
                assert (ours == theirs).all()
            assert joined.target_tokens(document, 0, length - 1) == store.target_tokens(
                number, 0, length - 1
            )
            assert joined.weights[document] == store.weights[number]
            document += 1
    # Made before there were weights.
    recorded = Store.open(Path(__file__).parents[1] / "recorded_run" / "store")
    assert set(Store.join([recorded, stores[0]], [1, 1]).weights) == {1.0}
    assert joined.tokens_by_source([0, 8, 9, 22], [1, 20, 300, 4000]) == {
        str(stores[0].path): 1,
        str(stores[1].path): 320,
        str(stores[2].path): 4000,
    }


def mixed_loader(
    stores: list[Store], amounts: list[float], rank: int = 0, ranks: int = 1, **options: object
) -> Loader:
    settings = {
        "global_tokens": 300,
        "seed": 3,
        "max_length": 100,
        "long_documents": "split",
        **options,
    }

    def planner(lengths: list[int]) -> object:
        return make_plan(lengths, ranks=ranks, tokens_per_rank=120, profile=PROFILE, mode="auto")

    return Loader(Store.join(stores, amounts), rank=rank, ranks=ranks, planner=planner, **settings)


def test_a_mixture_goes_on_on_other_ranks(stores: list[Store]) -> None:
    with mixed_loader(stores, [3, 1, 1]) as alone:
        take(alone, 3)
        state = json.loads(json.dumps(alone.state_dict()))
        expected = take(alone, 2)
    assert state["mix"] == [{"weight": 3}, {"weight": 1}, {"weight": 1}]
    with mixed_loader(stores, [3, 1, 1]) as again:
        again.load_state_dict(state)
        assert again.state_dict() == state
        assert all(map(same, take(again, 2), expected))
    three = [mixed_loader(stores, [3, 1, 1], rank, 3) for rank in range(3)]
    for each in three:
        each.load_state_dict(state)
    for reference in expected:
        batches = [next(each) for each in three]
        assert step_rows(batches) == step_rows([reference])
        assert sum(reference.source_tokens.values()) == reference.tokens
        assert batches[0].source_tokens == reference.source_tokens
    for each in three:
        each.close()


def test_a_run_that_continues_another_goes_on_where_its_stores_stopped_and_begins_an_epoch_of_those_that_are_cut_anew(
    stores: list[Store],
) -> None:
    a, b, c = stores
    with mixed_loader([a, b], [1, 1]) as first:
        take(first, 2)
        before = json.loads(json.dumps(first.state_dict()))
    with mixed_loader([c, a], [1, 2]) as second:
        second.continue_from(before)
        state = json.loads(json.dumps(second.state_dict()))
        assert (state["step"], state["cursor"], state["taken"]) == (
            2,
            [0, before["cursor"][0]],
            [0, 0],
        )
        assert state["earlier"][b.fingerprint]["cursor"] == before["cursor"][1]
        take(second, 1)
        state = json.loads(json.dumps(second.state_dict()))
    with mixed_loader([c, a], [1, 2]) as again:
        again.load_state_dict(state)
        assert again.state_dict() == state, "what rests is kept by a run that is cut off"
    with mixed_loader([a, b], [1, 1]) as third:
        third.continue_from(state)
        assert third.state_dict()["cursor"] == [state["cursor"][1], before["cursor"][1]]
        assert "earlier" in third.state_dict() and [c.fingerprint] == list(
            third.state_dict()["earlier"]
        )
    with mixed_loader([a, b], [1, 1], max_length=50) as anew:
        anew.continue_from(before)
        assert anew.state_dict()["epoch"][0] == before["epoch"][0] + 1
        assert (
            anew.state_dict()["cursor"][0]
            == (before["epoch"][0] + 1) * anew.sampler.samplers[0].pieces
        )
        assert anew.state_dict()["cursor"][1] == before["cursor"][1], (
            "none of its documents is longer than 50"
        )
    with mixed_loader([a], [1]) as alone:
        alone.continue_from(before)
        assert alone.state_dict()["epoch"] == before["epoch"][0] + 1, "alone it has another order"
    with (
        mixed_loader([a, b], [1, 1], seed=4) as other,
        pytest.raises(LoaderError, match=r"seed is 4, and was 3"),
    ):
        other.continue_from(before)


def test_all_stores_of_a_mixture_have_the_order_of_its_beginning(stores: list[Store]) -> None:
    with mixed_loader(stores, [3, 1, 1], order="permutation") as began:
        take(began, 2)
        state = json.loads(json.dumps(began.state_dict()))
        expected = take(began, 3)
    del state["order"]
    with mixed_loader(stores, [3, 1, 1]) as resumed:
        resumed.load_state_dict(state)
        assert {sampler.order for sampler in resumed.sampler.samplers} == {"permutation"}
        assert all(map(same, take(resumed, 3), expected))


def test_another_mixture_is_refused(stores: list[Store]) -> None:
    with mixed_loader(stores, [3, 1, 1]) as source:
        state = json.loads(json.dumps(source.state_dict()))
    with (
        mixed_loader(stores, [2, 1, 1]) as other,
        pytest.raises(LoaderError, match="give the weights or epochs"),
    ):
        other.load_state_dict(state)
    with (
        mixed_loader(stores[::-1], [1, 1, 3]) as other,
        pytest.raises(LoaderError, match="several in the same order"),
    ):
        other.load_state_dict(state)
    with mixed_loader(stores[:1], [1]) as single:
        alone = single.state_dict()
        with pytest.raises(LoaderError, match=r"fingerprint is '.*', and was \['"):
            single.load_state_dict(state)
    with (
        mixed_loader(stores, [3, 1, 1]) as other,
        pytest.raises(LoaderError, match=r"mix is \[.*\], and was None"),
    ):
        other.load_state_dict(alone)


def test_a_list_of_one_store_draws_what_the_store_draws(stores: list[Store]) -> None:
    one = make_steps(Store.join(stores[:1], [5.0]), global_tokens=200, **CUT)
    assert isinstance(one, Sampler)
    assert one.step(4) == Sampler(
        stores[0].lengths, global_tokens=200, seed=3, max_length=100
    ).step(4)


def test_documents_are_held_out_of_every_store(stores: list[Store]) -> None:
    joined = Store.join(stores[:2], [1, 1])
    apart = held_out(joined.names, 0.3)
    assert 0 < apart[:8].sum() < 8 and 0 < apart[8:].sum() < 12
    steps = make_steps(joined, global_tokens=20_000, **{**CUT, "held_out_share": 0.3})
    assert {piece.document for piece in steps.step(steps.start)[0]} == set(
        np.flatnonzero(~apart).tolist()
    )
    evaluated = Documents.choose(load(None, []), joined, 100, held_out_share=0.3)
    assert {piece.document for piece in evaluated.pieces} == set(np.flatnonzero(apart).tolist())
    first = Documents.choose(load(None, []), joined, 100, first=2, held_out_share=0.3)
    assert {piece.document for piece in first.pieces} == set(np.flatnonzero(apart)[:2].tolist())


def test_the_same_documents_twice_are_refused(stores: list[Store]) -> None:
    with pytest.raises(StoreError, match="have the same documents"):
        Store.join([stores[0], stores[1], stores[0]], [1, 1, 1])


def test_other_tokenizers_are_refused(stores: list[Store], tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "s.jsonl", [{"text": "some text of words " * 50}])
    prepare(open_corpus(str(source)), tmp_path / "bpe", tokenizer="bpe", vocab_size=300)
    with pytest.raises(StoreError) as caught:
        Store.join([*stores, Store.open(tmp_path / "bpe")], [1] * 4)
    assert str(tmp_path / "bpe") in str(caught.value) and str(stores[0].path) in str(caught.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_length": 6, "long_documents": "drop"}, "b: no document is left: all 12"),
        ({"max_length": 20, "long_documents": "error"}, r"a: document 'a\.jsonl:8' has 257 tokens"),
        (
            {"global_tokens": 10**7},
            "share of 50.00%: a step of 10,000,000 tokens would read them more than 1024 times",
        ),
    ],
)
def test_what_a_store_cannot_give_is_refused_by_its_name(
    stores: list[Store], options: dict[str, object], says: str
) -> None:
    with pytest.raises(SamplerError, match=says):
        mixture(stores[:2], [1.0, 1.0], **options)
