"""Models whose indexers select the keys of each query equal their own code in one process, and what
cannot be exact is refused by name."""

import copy
import inspect
import pickle
from dataclasses import replace
from itertools import chain, product
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import Cache

from longctx.attention.inputs import AttentionInputError
from longctx.attention.kernels.selected import SelectedKernel
from longctx.attention.ulysses import HybridAttention
from longctx.data.packing import pack_documents
from longctx.hf.attention import HuggingFaceError, Rings, model_inputs, prepare, restore_layers
from longctx.hf.indexed import Indexed, indexers
from longctx.planning.layout import Layout, Placement
from longctx.planning.tree import ROOT, Tree
from longctx.trainers.families import Causal
from tests import indexed_cases as cases
from tests import sparse_package
from tests.data_cases import placed_plan
from tests.family_cases import GRADIENT_TOLERANCE, LOSS_TOLERANCE, build, largest_error
from tests.huggingface_cases import build_model, make_documents, one_document
from tests.indexed_cases import KINDS, Case
from tests.marks import slow_unless
from tests.workers import Workers

LONG = (2000, 1, 700, 300, 90, 2, 260)
VISIBLE = 100
"""A fault changes gradients by at least so many tolerances."""


def assert_exact(workers: Workers, case: Case, ranks: int) -> list[dict[str, int]]:
    """Compares a step with one process; returns the bytes that each rank sent in each pass."""
    loss, wanted = cases.expected(case)
    found = workers.run(cases.step, ranks, case)
    ring_loss, gradients, _ = found[0]
    assert ring_loss == pytest.approx(loss, rel=LOSS_TOLERANCE)
    assert largest_error(gradients, wanted) <= GRADIENT_TOLERANCE
    return [sent for _, _, sent in found]


@pytest.mark.parametrize(
    ("kind", "ranks"),
    slow_unless(
        lambda kind, ranks: ranks == 3 or kind == "deepseek_v32",
        product(KINDS, (1, 2, 3)),
    ),
)
def test_steps_are_those_of_one_process(workers: Workers, kind: str, ranks: int) -> None:
    assert_exact(workers, Case(kind), ranks)


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_unless(lambda kind: kind == "deepseek_v32", KINDS))
def test_long_documents_are_those_of_one_process(workers: Workers, kind: str) -> None:
    """A choice between two keys may be another one where their scores differ by rounding alone, so
    a few rows may differ: those of one query, and later ones that see its key."""
    case = Case(kind, settings=of_text(kind, index_topk=256), lengths=LONG)
    assert share_of_other_rows(workers, case) < 0.005
    wrong = replace(case, fault="shifted")
    assert share_of_other_rows(workers, wrong) > 0.3


def of_text(kind: str, **settings: Any) -> dict[str, Any]:
    """Returns settings of a model's text."""
    return {"text_config": settings} if kind == "mistral_large4" else settings


def share_of_other_rows(workers: Workers, case: Case) -> float:
    """Returns the share of tokens whose logits on three ranks are not those of one process."""
    wanted = cases.alone(case)
    rows = []
    for document, span, logits in chain(*workers.run(cases.shared, 3, case)):
        theirs = wanted[document][slice(*span)]
        rows.append((logits - theirs).norm(dim=1) > GRADIENT_TOLERANCE * theirs.norm(dim=1))
    other = torch.cat(rows)
    assert len(other) == sum(case.lengths)
    return float(other.float().mean())


@pytest.mark.parametrize("fault", ["ignored", "ring order", "ties", "shifted"])
def test_a_fault_is_visible(workers: Workers, fault: str) -> None:
    case = Case(fault=fault)
    _, wanted = cases.expected(case)
    _, gradients, _ = workers.run(cases.step, 3, case)[0]
    assert largest_error(gradients, wanted) > VISIBLE * GRADIENT_TOLERANCE


@pytest.mark.parametrize(
    "case",
    [
        Case(recompute=True),
        Case("glm_moe_dsa", recompute=True),
        Case("glm_moe_dsa", sharded=True),
        Case("mistral_large4", recompute=True, lora=True),
        Case(lora=True, options={"keep_kv": True}),
        Case(options={"ranks_per_node": 2}),
        Case(options={"kernel": "reference"}, settings={"index_topk": 60}),
    ],
    ids=lambda case: f"{case.kind} {case.options} {case.recompute} {case.sharded} {case.lora}",
)
def test_options_are_exact(workers: Workers, case: Case) -> None:
    assert_exact(workers, case, ranks=3)


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_recomputation_keeps_what_was_selected(workers: Workers, kind: str) -> None:
    once = assert_exact(workers, Case(kind), ranks=3)
    kept = assert_exact(workers, Case(kind, recompute=True, kept=True), ranks=3)
    twice = assert_exact(workers, Case(kind, recompute=True), ranks=3)
    assert [sent["index"] for sent in kept] == [sent["index"] for sent in once]
    assert [sent["index"] for sent in twice] == [2 * sent["index"] for sent in once]


def test_short_documents_send_no_index_keys(workers: Workers) -> None:
    few, none = Case(settings={"index_topk": 90}), Case(settings={"index_topk": 130})
    sent_few = assert_exact(workers, few, ranks=3)
    sent_none = assert_exact(workers, none, ranks=3)
    assert [sent["index"] for sent in sent_none] == [0, 0, 0]
    # Of the last document alone, in two layers: both other ranks see the first 21 of its 130 tokens,
    # and none the tail of rank 0.
    assert sent_few[0]["index"] == 2 * 4 * 8 * (21 + 21)
    assert [sent["forward"] for sent in sent_few] == [sent["forward"] for sent in sent_none]


def test_short_documents_are_left_to_dense_kernels() -> None:
    model = cases.make_model(Case(settings={"index_topk": 16}))
    prepare(model)
    with mock.patch.object(SelectedKernel, "_blocks", side_effect=AssertionError):
        model(**one_document(model, 16)).loss.backward()
        with pytest.raises(AssertionError):
            model(**one_document(model, 17))


@pytest.mark.parametrize(
    ("kind", "ranks"),
    slow_unless(
        lambda kind, ranks: (kind, ranks) == ("deepseek_v32", 3),
        product(KINDS, (1, 3)),
    ),
)
def test_sparse_kernels_of_a_package_are_exact(workers: Workers, kind: str, ranks: int) -> None:
    case = Case(kind, sparse=True)
    assert assert_exact(workers, case, ranks) == assert_exact(workers, Case(kind), ranks)
    _, wanted = cases.expected(case)
    wrong = replace(case, fault="one key less")
    _, gradients, _ = workers.run(cases.step, ranks, wrong)[0]
    assert largest_error(gradients, wanted) > VISIBLE * GRADIENT_TOLERANCE


@pytest.mark.parametrize(
    "case",
    [
        Case(sparse=True, recompute=True),
        Case(sparse=True, sharded=True),
        Case("glm_moe_dsa", sparse=True, lora=True, options={"keep_kv": True}),
    ],
    ids=lambda case: f"{case.kind} {case.options} {case.recompute} {case.sharded} {case.lora}",
)
def test_sparse_kernels_with_options_are_exact(workers: Workers, case: Case) -> None:
    assert_exact(workers, case, ranks=3)


def test_sparse_kernels_read_no_other_keys() -> None:
    model = cases.make_model(Case(settings={"index_topk": 16}))
    prepare(model)
    calls = sparse_package.CALLS
    calls.update(forward=0, backward=0)
    with (
        cases.package(model),
        mock.patch.object(SelectedKernel, "_blocks", side_effect=AssertionError),
    ):
        model(**one_document(model, 16)).loss.backward()
        assert calls == {"forward": 0, "backward": 0}
        model(**one_document(model, 17)).loss.backward()
        assert calls == {"forward": 2, "backward": 2}
        with pytest.raises(AssertionError):
            model(**one_document(model, 17, kernel="reference"))
        with pytest.raises(AssertionError):
            model(**one_document(model, 17, deterministic=True))


def test_an_expansion_with_a_bias_is_left_to_other_kernels() -> None:
    model = cases.make_model(Case())
    projection = model.model.layers[0].self_attn.kv_b_proj
    projection.bias = torch.nn.Parameter(torch.ones(projection.out_features))
    prepare(model)
    sparse_package.CALLS.update(forward=0)
    with cases.package(model), torch.no_grad():
        model(**one_document(model, 40))
    assert sparse_package.CALLS["forward"] == len(model.model.layers) - 1


def test_indexers_are_frozen_and_given_back() -> None:
    model = cases.make_model(Case())
    before = {name: weight.requires_grad for name, weight in model.named_parameters()}
    prepare(model)
    frozen = {name for name, weight in model.named_parameters() if not weight.requires_grad}
    assert frozen == {name for name in before if ".indexer." in name}
    prepare(model)
    restore_layers(model)
    assert before == {name: weight.requires_grad for name, weight in model.named_parameters()}
    assert not any("forward" in vars(module) for module in model.modules())


def test_copies_are_plain() -> None:
    model = cases.make_model(Case())
    ids = make_documents((40,))[0].unsqueeze(0)
    plain = model(input_ids=ids, use_cache=False).logits
    prepare(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model.model.layers[0]))):
        for indexer in indexers(other):
            assert not isinstance(vars(indexer)["forward"], Indexed)
            assert vars(indexer)["forward"].__self__ is indexer
    other = copy.deepcopy(model)
    other.set_attn_implementation("eager")
    assert torch.equal(other(input_ids=ids, use_cache=False).logits, plain)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("deepseek_v4", "DeepseekV4Indexer does not select the keys of single tokens"),
        ("qwen4_exp_text", "Qwen4ExpTextQSAIndexer does not select the keys of single tokens"),
        ("minimax_m3_vl_text", "MiniMaxM3VLIndexer does not select the keys of single tokens"),
        ("glm5_next", "Glm5NextTextIndexer does not select the keys of single tokens"),
    ],
)
def test_other_indexers_are_refused(kind: str, text: str) -> None:
    model = build(kind, "eager")
    with pytest.raises(HuggingFaceError, match=text):
        prepare(model)
    assert model.config._attn_implementation == "eager"


def test_an_indexer_with_gradients_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = cases.make_model(Case())
    kind = type(indexers(model)[0])
    monkeypatch.setattr(kind, "forward", inspect.unwrap(kind.forward))
    with pytest.raises(HuggingFaceError, match="training an indexer"):
        prepare(model)


def test_a_cache_of_another_form_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = cases.make_model(Case())

    def update_indexer(self: Cache, indexer_key_states: Any, scales: Any, layer_idx: int) -> Any:
        raise AssertionError

    monkeypatch.setattr(Cache, "update_indexer", update_indexer)
    with pytest.raises(HuggingFaceError, match="'scales'"):
        prepare(model)


def test_trees_are_refused() -> None:
    model = cases.make_model(Case())
    prepare(model)
    (batch,), targets = pack_documents(
        placed_plan([40], 1, [[Placement(0, 0, 1)]]), 0, make_documents((40,))
    )
    (shard,) = batch.layout.shards
    tree = Tree((20, 10, 10), (ROOT, 0, 0))
    object.__setattr__(shard, "tree", tree)
    with pytest.raises(AttentionInputError, match="do not merge prefixes"):
        model(**model_inputs(model, batch, targets))


def test_swapped_heads_are_refused() -> None:
    model = cases.make_model(Case())
    prepare(model)
    inputs = one_document(model, 40)

    def swapped(scale: Any, softcap: Any, window: Any, device: Any) -> HybridAttention:
        layout = Layout.of([Placement(0, 0, 1)], [40], micro_batch=0, rank=0)
        return HybridAttention(layout, 2, scale=scale)

    inputs["ring_attention"] = Rings(swapped)
    with pytest.raises(HuggingFaceError, match="use no Ulysses"):
        model(**inputs)


def test_an_indexer_without_a_layout_is_an_error() -> None:
    model = cases.make_model(Case())
    prepare(model)
    model.set_attn_implementation("eager")
    with pytest.raises(HuggingFaceError, match="DeepseekV32Indexer was called without a layout"):
        model(input_ids=torch.arange(8)[None], use_cache=False)


def test_trainers_do_not_merge_prefixes() -> None:
    assert not Causal(cases.make_model(Case())).merges_prefixes
    assert Causal(build_model("llama", "sdpa")).merges_prefixes


def test_bfloat16_is_as_exact_as_that_of_transformers() -> None:
    """Rounding selects other keys, here as between eager attention and that of torch."""
    ids = make_documents((400,))[0].unsqueeze(0)
    case = Case(settings={"index_topk": 64})
    model = cases.make_model(case)
    with torch.no_grad():
        exact = model(input_ids=ids, use_cache=False).logits
        model.set_attn_implementation("sdpa")
        with torch.autocast("cpu", torch.bfloat16):
            theirs = model(input_ids=ids, use_cache=False).logits
        prepare(model)
        (batch,), _ = pack_documents(
            placed_plan([400], 1, [[Placement(0, 0, 1)]]), 0, [make_documents((400,))[0]]
        )
        with torch.autocast("cpu", torch.bfloat16):
            ours = model(**model_inputs(model, batch)).logits
    assert (ours - exact).norm() <= 1.5 * (theirs - exact).norm()
