"""The door of the public API: a wrong argument is refused in words, or means what it says; nothing
fails inside.

Whole numbers, types and shapes are checked where a public function is called (`longctx.arguments`),
and nothing is cast.
"""

import inspect
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

import longctx
from longctx import (
    HardwareProfile,
    Plan,
    RingAttention,
    Store,
    make_plan,
    pack_documents,
    ring_attention,
)
from longctx.arguments import checked, is_number, is_whole, said, token_ids, whole
from longctx.attention import Mask, warm_up
from longctx.config import load
from longctx.data.packing import PackingError, pack_seq2seq
from longctx.data.records.sources import open_corpus
from longctx.data.trees import merge_prefixes, pack_merged
from longctx.errors import UserError
from longctx.hf.attention import model_inputs
from longctx.hf.attention import prepare as prepare_model
from longctx.planning.layout import CrossLayout
from longctx.planning.plan import PlanError
from longctx.planning.tree import Tree
from tests.data_cases import byte_store
from tests.huggingface_cases import build_model

PROFILE = HardwareProfile.load("cpu-2core")
LENGTHS = [5, 3]


def plan_of(lengths: list[int] = LENGTHS, **more: Any) -> Plan:
    return make_plan(lengths, ranks=1, tokens_per_rank=64, profile=PROFILE, **more)


PLAN = plan_of()
X = torch.zeros(8, 2, 4)


class TestNothingIsCast:
    """What was cast in silence: targets became ids 0 and 1, causality was off."""

    @pytest.mark.parametrize(
        "document",
        [
            [0.0, 1.0, 1.0, 0.0, 1.0],
            [True, False, True, True, False],
            torch.ones(5),
            torch.ones(5, dtype=torch.bool),
            np.ones(5, np.float32),
            [0.5, 1, 2, 3, 4],
            [1, 2, math.nan, 3, 4],
            [1, 2, -3, 3, 4],
            [1, 2, 2**63, 3, 4],
            [1, 2, 2**31, 3, 4],
            [1, 2, 2**70, 3, 4],
            np.array([1, 2, 2**64 - 1, 3, 4], np.uint64),
            ["a", "b", "c", "d", "e"],
            "abcde",
            [1, 2, None, 3, 4],
            [1 + 0j] * 5,
            [[1, 2, 3, 4, 5]],
            7,
            None,
            {1: 2},
            [1, [2], 3, 4, 5],
        ],
        ids=repr,
    )
    def test_documents_and_labels_are_whole_numbers_in_range(self, document: Any) -> None:
        good = [1, 2, 3]
        with pytest.raises(PackingError, match=r"documents\[0\]"):
            pack_documents(PLAN, 0, [document, good])
        with pytest.raises(PackingError, match=r"labels\[0\]"):
            pack_documents(PLAN, 0, [[1, 2, 3, 4, 5], good], [document, good])
        with pytest.raises(PackingError, match=r"sequences\[0\]"):
            merge_prefixes([document, good])
        with pytest.raises(PackingError, match=r"labels\[0\]"):
            merge_prefixes([[1, 2, 3, 4, 5], good], [document, good])
        with pytest.raises(PackingError, match=r"sources\[0\]"):
            pack_seq2seq(plan_of([8, 5]), 0, [document, good], [good, [1, 2]], start_token=0)

    @pytest.mark.parametrize("label", [-1, -99, -101])
    def test_only_one_negative_number_is_a_label(self, label: int) -> None:
        with pytest.raises(PackingError, match=rf"labels\[0\] has {label} at 1: .* or -100"):
            pack_documents(PLAN, 0, [[1, 2, 3, 4, 5], [1, 2, 3]], [[1, label, 3, 4, 5], [1, 2, 3]])

    def test_what_is_right_is_packed_whatever_holds_it(self) -> None:
        documents = [[1, 2, 3, 4, 5], [6, 7, 8]]
        labels = [[-100, 2, 3, 4, 5], [-100, -100, 8]]
        kinds: list[Callable[[list[int]], Any]] = [
            list,
            tuple,
            np.array,
            torch.tensor,
            lambda ids: np.array(ids, np.int32),
            lambda ids: torch.tensor(ids, dtype=torch.int32),
            lambda ids: [np.int64(one) for one in ids],
        ]
        (expected,), targets = pack_documents(PLAN, 0, documents, labels)
        assert targets == 5
        for kind in kinds:
            (found,), _ = pack_documents(
                PLAN, 0, list(map(kind, documents)), list(map(kind, labels))
            )
            assert torch.equal(found.tokens, expected.tokens) and torch.equal(
                found.labels, expected.labels
            )

    @pytest.mark.parametrize(
        "wrong",
        [
            {"causal": None},
            {"causal": "no"},
            {"causal": 0},
            {"window": 1.5},
            {"window": True},
            {"window": "8"},
            {"window": 0},
            {"sinks": 0.5, "window": 4},
            {"sinks": -1, "window": 4},
            {"prefix": [3]},
            {"prefix": {0: 1.5}},
            {"prefix": {0: -1}},
            {"prefix": {"0": 3}},
            {"prefix": {0: True}},
            {"blocks": {0: 3}},
            {"blocks": {0: [(1.5, 2)]}},
            {"blocks": {0: [(1, 2, 3)]}},
            {"hidden": {0: [5]}},
            {"hidden": "0"},
        ],
        ids=repr,
    )
    def test_masks(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(UserError):
            Mask(**wrong)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: make_plan(LENGTHS, ranks=1, tokens_per_rank=64, profile="cpu-2core"),
            "HardwareProfile.load",
        ),
        (lambda: plan_of(bins=[1]), "must be a mapping of lengths to degrees"),
        (
            lambda: make_plan(5, ranks=1, tokens_per_rank=64, profile=PROFILE),
            "must be a list of document lengths",
        ),
        (lambda: plan_of(pipeline=2), "must be a Pipeline"),
        (
            lambda: pack_documents(PLAN, 0, [[1] * 5, [1] * 3], pad_to_multiple_of=0),
            "must be a whole number from 1",
        ),
        (lambda: pack_documents(PLAN, 0.0, [[1] * 5, [1] * 3]), "must be a whole number ≥ 0"),
        (
            lambda: pack_documents(PLAN, 7, [[1] * 5, [1] * 3]),
            "rank 7 is not in this plan's domain",
        ),
        (lambda: pack_documents([PLAN], 0, [[1] * 5, [1] * 3]), "must be a Plan of make_plan"),
        (lambda: pack_documents(PLAN, 0, 5), "must be a list of documents"),
        (lambda: ring_attention(X, X, X, PLAN), r"plan\.layout\(micro_batch, rank\)"),
        (lambda: ring_attention(X, X, X.tolist(), PLAN.layout(0, 0)), "must be a tensor"),
        (lambda: ring_attention(X, X, X, PLAN.layout(0, 0), mask="causal"), "must be a Mask"),
        (
            lambda: ring_attention(X, X, X, PLAN.layout(0, 0), softcap=math.nan),
            "must be a finite number",
        ),
        (lambda: ring_attention(X, X, X, PLAN.layout(0, 0), scale="1"), "must be a finite number"),
        (lambda: RingAttention(PLAN.layout(0, 0), ranks_per_node=1.5), "must be a whole number"),
        (lambda: warm_up("world", "cpu"), "process group"),
        (lambda: warm_up(None, "cpu"), "init_process_group"),
        (lambda: longctx.train("x.yaml"), "load_config"),
        (lambda: load(None, "train.steps=10"), "must be a list of settings"),
        (lambda: load(5), "must be a path"),
        (lambda: Store.open(5), "must be a text"),
        (lambda: longctx.prepare(5, "out"), "must be a path"),
        (lambda: longctx.prepare("a", 5), "must be a path"),
        (
            lambda: longctx.prepare("python-stdlib", "out", tokeniser="bytes"),
            "prepare has no argument tokeniser",
        ),
        (lambda: longctx.prepare("python-stdlib", "out", tokenizer=5), "must be a path"),
        (lambda: longctx.prepare("python-stdlib", "out", workers=0), "must be a whole number"),
        (lambda: HardwareProfile.load(5), "must be a text"),
        (lambda: PLAN.layout("0", 0), "micro-batch '0' is not in this plan"),
        (lambda: PLAN.cross_layout(0, 0), "no sources"),
        (lambda: Tree((3, 1.5), (-1, 0)), "must be a whole number"),
        (lambda: Tree(3, -1), "must be a tuple"),
        (lambda: pack_merged(PLAN, 0, [[1]]), "what merge_prefixes returns"),
        (lambda: merge_prefixes([[1]], weights=[math.nan]), "must be a finite number"),
        (lambda: merge_prefixes([[1]], most_tokens=0), "must be a whole number"),
        (lambda: prepare_model("llama"), "is not a model of transformers"),
        (lambda: model_inputs("llama", PLAN), "must be a model of transformers"),
    ],
)
def test_wrong_calls_are_refused_in_words(
    call: Callable[[], object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=words):
        call()


def test_whole_numbers_and_numbers() -> None:
    assert all(map(is_whole, (0, -3, 2**70, np.int32(3), np.uint8(0))))
    assert not any(map(is_whole, (True, 1.0, "1", None, np.float64(1), np.bool_(True), math.nan)))
    assert all(map(is_number, (0, 1.5, np.float32(2), np.int8(1), Fraction(1, 3))))
    assert not any(
        map(
            is_number, (True, "1", None, math.nan, math.inf, np.float64("nan"), 1j, np.bool_(False))
        )
    )


def test_rules_check_what_is_given_by_place_or_by_name() -> None:
    @checked(PlanError, b=whole(least=1))
    def function(a: int, b: int = 0) -> int:
        return a + b

    assert function(1) == 1, "a default is right"
    for call in (lambda: function(1, 0), lambda: function(1, b=0), lambda: function(b=0, a=1)):
        with pytest.raises(PlanError, match="b is 0: must be a whole number ≥ 1"):
            call()
    assert list(inspect.signature(function).parameters) == ["a", "b"]


def test_an_empty_document_has_no_ids() -> None:
    (ids,) = token_ids("documents", [[]], PackingError)
    assert ids.dtype == np.int64 and not len(ids)


ODD: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1,
    3,
    2**63,
    2**70,
    0.5,
    1.0,
    math.nan,
    math.inf,
    -0.0,
    1j,
    "",
    "auto",
    "static",
    "cpu-2core",
    "no such thing",
    "s3://bucket/x",
    "a\0b",
    b"bytes",
    (),
    [],
    [0],
    [[1, 2, 3]],
    [[1] * 5, [1] * 3],
    [1.5],
    [None],
    {},
    {0: 1},
    {"a": "b"},
    {0: [(0, 1)]},
    set(),
    range(3),
    object(),
    object,
    len,
    Path("nowhere"),
    np.zeros(0),
    np.zeros(5),
    np.ones((2, 2), np.int64),
    np.int64(3),
    torch.zeros(0),
    torch.zeros(8, 2, 4),
    torch.zeros(8, 2, 4, dtype=torch.int64),
    torch.tensor(3),
    torch.tensor([5, 3]),
    torch.device("cpu"),
    torch.float32,
    PLAN,
    PLAN.layout(0, 0),
    PROFILE,
    Mask(),
    Mask(causal=False),
    Tree((3, 2), (-1, 0)),
)
"""Values that people give by mistake."""


def calls(folder: Path) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Public functions with arguments that are right, by name."""
    store = byte_store(folder, [20, 30]).path
    model = build_model("llama", "eager", vocab_size=300)
    prepare_model(model)
    (batch,), targets = pack_documents(PLAN, 0, [[1] * 5, [1] * 3])
    merged = merge_prefixes([[1, 2, 3], [1, 2, 4]])
    merged_plan = make_plan(
        merged.lengths, ranks=1, tokens_per_rank=64, profile=PROFILE, trees=merged.trees
    )
    placements = PLAN.micro_batches[0]
    planned = {
        "lengths": LENGTHS,
        "ranks": 1,
        "tokens_per_rank": 64,
        "profile": PROFILE,
        "mode": "auto",
        "degree": None,
    }
    planned |= {
        "bins": None,
        "max_remote_tokens": None,
        "trees": {},
        "sources": (),
        "images": None,
        "tower": None,
    }
    packed = {
        "plan": PLAN,
        "rank": 0,
        "documents": [[1] * 5, [1] * 3],
        "labels": None,
        "pad_to_multiple_of": 1,
        "shift": True,
    }
    pairs = {
        "plan": plan_of([8, 5]),
        "rank": 0,
        "sources": [[1] * 5, [1] * 3],
        "targets": [[1] * 3, [1] * 2],
    }
    ring = {
        "q": X,
        "k": X,
        "v": X,
        "layout": PLAN.layout(0, 0),
        "group": None,
        "mask": Mask(),
        "scale": None,
        "softcap": 0.0,
    }
    ring |= {
        "sink_logits": None,
        "kernel": "auto",
        "keep_kv": False,
        "deterministic": False,
        "ranks_per_node": None,
    }
    inputs = {
        "model": model,
        "batch": batch,
        "target_tokens": targets,
        "group": None,
        "kernel": "auto",
        "device": "cpu",
    }
    merging = {
        "sequences": [[1, 2], [1, 3]],
        "labels": None,
        "most_tokens": None,
        "tokens_per_rank": None,
        "weights": None,
    }
    cross = {
        "targets": placements,
        "target_lengths": LENGTHS,
        "sources": placements,
        "source_lengths": LENGTHS,
    }
    written = {
        "corpus": str(folder / "store.jsonl"),
        "out": folder / "fuzzed",
        "tokenizer": "bytes",
        "overwrite": True,
    }
    written |= {
        "workers": None,
        "vocab_size": 300,
        "max_length": None,
        "template_variables": None,
        "end_of_document": None,
    }
    return {
        "make_plan": (make_plan, planned),
        "pack_documents": (pack_documents, packed),
        "pack_seq2seq": (
            pack_seq2seq,
            {**pairs, "start_token": 0, "labels": None, "pad_to_multiple_of": 1},
        ),
        "ring_attention": (ring_attention, ring),
        "warm_up": (warm_up, {"group": None, "device": "cpu"}),
        "Mask": (
            Mask,
            {"causal": True, "window": None, "sinks": 0, "prefix": {}, "blocks": {}, "hidden": {}},
        ),
        "Tree": (Tree, {"lengths": (3, 2), "parents": (-1, 0)}),
        "model_inputs": (model_inputs, inputs),
        "prepare_model": (prepare_model, {"model": model, "causal": True, "head": True}),
        "merge_prefixes": (merge_prefixes, {**merging, "least_shared": 1}),
        "pack_merged": (
            pack_merged,
            {"plan": merged_plan, "rank": 0, "merged": merged, "pad_to_multiple_of": 1},
        ),
        "layout": (PLAN.layout, {"micro_batch": 0, "rank": 0}),
        "cross_layout": (PLAN.cross_layout, {"micro_batch": 0, "rank": 0}),
        "CrossLayout": (CrossLayout.of, {**cross, "micro_batch": 0, "rank": 0}),
        "profile": (HardwareProfile.load, {"name_or_path": "cpu-2core"}),
        "from_dict": (HardwareProfile.from_dict, {"values": PROFILE.to_dict()}),
        "Store.open": (Store.open, {"path": store}),
        "load": (load, {"path": None, "overrides": [], "world_size": None, "defaults": None}),
        "open_corpus": (
            open_corpus,
            {"source": "python-stdlib", "text_column": None, "split": None, "as_text": False},
        ),
        "prepare": (longctx.prepare, written),
        "train": (
            longctx.train,
            {"config": None, "resume": False, "step": None, "continued": None, "trace_steps": None},
        ),
    }


def drawn(random: Random, folder: Path, count: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields calls in which one or two arguments are wrong, in words and as functions."""
    known = calls(folder)
    for number in range(count):
        name = list(known)[number % len(known)]
        function, right = known[name]
        chosen = random.sample(list(right), random.choice((1, 1, 2)) if len(right) > 1 else 1)
        wrong = {argument: random.choice(ODD) for argument in chosen}
        words = ", ".join(f"{argument}={said(value)}" for argument, value in wrong.items())
        yield f"{name}({words})", partial(function, **{**right, **wrong})


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_wrong_argument_never_fails_inside(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """500 calls with each seed: a UserError, an error of the file system, or a result."""
    monkeypatch.chdir(tmp_path)
    refused: list[str] = []
    inside: list[str] = []
    for words, call in drawn(Random(seed), tmp_path, count=500):
        try:
            call()
        except (UserError, OSError) as error:
            refused.append(str(error))
        except Exception as error:
            inside.append(f"{words}: {type(error).__name__}: {error}"[:400])
    assert not inside, "\n".join(inside)
    assert len(refused) > 200 and min(map(len, refused)) > 10
