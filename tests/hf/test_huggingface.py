"""Models of transformers with attn_implementation="longctx": equal to one unpacked process, or
refused."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import masking_utils

from longctx.data.packing import pack_documents
from longctx.hf import attention as hf_attention
from longctx.hf.attention import (
    CausalMask,
    HuggingFaceError,
    attend,
    describe_mask,
    model_inputs,
    prepare,
)
from longctx.hf.spec import spec_of
from longctx.planning.cost.published_errors import kind_of
from longctx.planning.layout import Placement
from tests.data_cases import placed_plan
from tests.huggingface_cases import (
    LENGTHS,
    build_model,
    gradients,
    make_documents,
    one_document,
    ring_step,
    unpacked,
)
from tests.workers import Workers

TOLERANCE = 1e-5


def assert_equal_to_unpacked(
    kind: str, results: list[tuple[float, list[torch.Tensor]]], plain: str = "sdpa"
) -> None:
    model = build_model(kind, plain)
    loss, expected = unpacked(model, make_documents())
    assert max(float(gradient.abs().max()) for gradient in expected) > 0.01
    for ring_loss, ring_gradients in results:
        assert ring_loss == pytest.approx(loss, abs=TOLERANCE)
        for name, mine, theirs in zip(
            dict(model.named_parameters()), ring_gradients, expected, strict=True
        ):
            torch.testing.assert_close(
                mine, theirs, atol=TOLERANCE, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
            )


OWN_ATTENTION = {"mistral": "sdpa", "deepseek_v3": "sdpa", "gemma2": "eager", "gpt_oss": "eager"}
"""Of models with windows, unequal head sizes, soft caps and sinks; `tests.parity` has others."""


@pytest.mark.parametrize("kind", OWN_ATTENTION)
def test_two_ranks_equal_one_unpacked_process(workers: Workers, kind: str) -> None:
    assert_equal_to_unpacked(kind, workers.run(ring_step, 2, kind), OWN_ATTENTION[kind])


@pytest.mark.parametrize(
    ("kind", "without"),
    [
        ("mistral", {"sliding_window": None}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"sliding_window": 4096}),
    ],
)
def test_the_special_settings_matter(kind: str, without: dict[str, Any]) -> None:
    """Otherwise a test of equality would pass even if the settings were ignored."""
    with_it, without_it = (
        unpacked(build_model(kind, "eager", **settings), make_documents())[0]
        for settings in ({}, without)
    )
    assert abs(with_it - without_it) > 100 * TOLERANCE


def test_recomputation_takes_the_layout_of_its_own_micro_batch(workers: Workers) -> None:
    """All forward passes come before the first backward, which recomputes the layers."""
    assert_equal_to_unpacked("llama", workers.run(ring_step, 2, "llama", True))


def test_a_sharded_model_equals_one_unpacked_process(workers: Workers) -> None:
    assert_equal_to_unpacked("llama", workers.run(ring_step, 2, "llama", False, True))


def test_autocast_reaches_the_attention() -> None:
    """Under autocast, rotated q and k are float32 and v is bfloat16."""
    model = build_model("llama", "longctx")
    with torch.autocast("cpu", torch.bfloat16):
        packed = model(**one_document(model)).loss
        packed.backward()
        model.set_attn_implementation("sdpa")
        ids = make_documents((16,))[0].unsqueeze(0)
        plain = model(input_ids=ids, labels=ids, use_cache=False).loss
    assert packed.item() == pytest.approx(plain.item(), abs=0.02)


def test_all_experts_of_a_token_are_the_width_of_its_mlp() -> None:
    model = build_model("deepseek_v3", "eager")
    dense, sparse = spec_of(model, model.get_decoder().layers).layers
    assert (dense.intermediate_size, sparse.intermediate_size) == (48, 2 * 16)


def test_a_mixture_in_transformers_own_code_is_one() -> None:
    """Its blocks are not compiled unless asked for, and errors of mixtures are stated."""
    kinds = {}
    for name in ("qwen3", "qwen3_moe"):
        model = build_model(name, "sdpa")
        spec = spec_of(model, model.model.layers)
        kinds[name] = (spec.compiled_by_default, kind_of(spec, float8=False))
    assert kinds == {"qwen3": (True, "of all weights"), "qwen3_moe": (False, "with experts")}


def test_a_model_that_keeps_its_attention_is_left_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its parts may have changed to ours."""
    model, asked = build_model("llama", "eager"), list[Any]()
    monkeypatch.setattr(model, "set_attn_implementation", asked.append)
    with pytest.raises(HuggingFaceError, match="computes attention itself"):
        prepare(model)
    assert asked == ["longctx", "eager"]


def test_a_model_can_change_to_it_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Blackwell, where torch's grouped product leaves gradients of experts without tokens as
    memory was."""
    model = build_model("qwen3_moe", "sdpa")
    documents = make_documents()
    loss, expected = unpacked(model, documents)
    expected = [gradient.clone() for gradient in expected]
    model.zero_grad()
    monkeypatch.setattr(hf_attention, "leaves_gradients", lambda: True)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", None)
    prepare(model)
    everything = [[Placement(document, 0, 1) for document in range(len(documents))]]
    (batch,), targets = pack_documents(placed_plan(LENGTHS, 1, everything), 0, documents)
    packed = model(**model_inputs(model, batch, targets)).loss
    packed.backward()
    assert packed.item() == pytest.approx(loss, abs=TOLERANCE)
    torch.testing.assert_close(gradients(model), expected, atol=TOLERANCE, rtol=0)
    without_loss = model(**model_inputs(model, batch))
    assert without_loss.loss is None and without_loss.logits.shape[:2] == (1, sum(LENGTHS))


@pytest.mark.parametrize("window", [None, 4096])
def test_no_mask_is_built_for_long_documents(window: int | None) -> None:
    """A dense mask of 131,072 tokens would take 16 GiB."""
    config = build_model("llama", "longctx", num_hidden_layers=1, sliding_window=window).config
    tokens = 131_072
    positions = torch.cat([torch.arange(100), torch.arange(tokens - 100)]).unsqueeze(0)
    create = (
        masking_utils.create_sliding_window_causal_mask
        if window
        else masking_utils.create_causal_mask
    )
    embedded = torch.empty(1, tokens, 0)
    mask = create(
        config,
        inputs_embeds=embedded,
        attention_mask=None,
        past_key_values=None,
        position_ids=positions,
    )
    assert mask == CausalMask(window)


def one_ring() -> Any:
    return one_document(build_model("llama", "longctx"))["ring_attention"]


def some_layer(**attributes: Any) -> Any:
    return SimpleNamespace(
        **{"is_causal": True, "config": SimpleNamespace(), "layer_idx": 0, **attributes}
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dropout": 0.1}, "uses attention dropout 0.1"),
        ({"position_bias": torch.zeros(1)}, "passes position_bias to its attention, which"),
        ({"head_mask": torch.zeros(1)}, "passes head_mask to its attention, which"),
        ({"output_attentions": True}, "passes output_attentions to its attention, which"),
        ({"cu_seq_lens_q": torch.zeros(1)}, "passes cu_seq_lens_q to its attention, which"),
        ({"is_causal": False}, "is not causal"),
        ({"attention_mask": torch.zeros(1, 1, 16, 16)}, "a dense attention mask was given"),
        (
            {"attention_mask": CausalMask(8), "sliding_window": 4},
            "window of 4, but its mask has a window of 8",
        ),
        (
            {"attention_mask": CausalMask(), "sliding_window": 4},
            "window of 4, but its mask has a window of None",
        ),
        ({"module": some_layer(is_causal=False)}, "is not causal"),
        ({"output_router_logits": True}, "passes output_router_logits to its attention, which"),
        ({"ring_attention": None}, "called without a layout"),
        ({"batch": 2}, "input_ids has batch size 2"),
    ],
)
def test_what_would_change_the_result_is_refused(arguments: dict[str, Any], message: str) -> None:
    arguments = {"module": some_layer(), "ring_attention": one_ring(), "batch": 1, **arguments}
    shape = arguments.pop("batch"), 2, 16, 8
    query, key, value = (torch.randn(shape) for _ in range(3))
    with pytest.raises(HuggingFaceError, match=message):
        attend(query=query, key=key, value=value, **arguments)


def test_harmless_arguments_pass() -> None:
    query, key, value = (torch.randn(1, 2, 16, 8) for _ in range(3))
    ring = one_ring()
    out, weights = attend(
        some_layer(),
        query,
        key,
        value,
        CausalMask(),
        scaling=0.3,
        dropout=0.0,
        position_ids=torch.zeros(1, 16),
        output_attentions=False,
        position_bias=None,
        ring_attention=ring,
    )
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=0.3
    )
    torch.testing.assert_close(out, expected.transpose(1, 2), atol=TOLERANCE, rtol=0)
    assert weights is None


def describe(mask_function: Any, attention_mask: torch.Tensor | None = None) -> CausalMask:
    return describe_mask(mask_function=mask_function, attention_mask=attention_mask)


def test_masks_are_described_by_what_they_are_made_of() -> None:
    causal = masking_utils.causal_mask_function
    assert describe(causal) == CausalMask()
    assert describe(causal, torch.ones(1, 8, dtype=torch.bool)) == CausalMask()
    assert describe(masking_utils.sliding_window_causal_mask_function(7)) == CausalMask(7)
    twice = masking_utils.and_masks(
        masking_utils.sliding_window_overlay(5),
        masking_utils.sliding_window_causal_mask_function(7),
    )
    assert describe(twice) == CausalMask(5)


@pytest.mark.parametrize(
    ("mask_function", "what"),
    [
        (masking_utils.bidirectional_mask_function, "bidirectional_mask_function"),
        (
            masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64)),
            "chunked_overlay",
        ),
        (masking_utils.or_masks(masking_utils.causal_mask_function, lambda *_: True), "or_masks"),
        (masking_utils.and_masks(masking_utils.causal_mask_function, lambda *_: True), "<lambda>"),
        (masking_utils.sliding_window_overlay(4), "sliding_window_overlay"),
    ],
)
def test_other_masks_are_refused(mask_function: Any, what: str) -> None:
    with pytest.raises(
        HuggingFaceError,
        match=f"the model uses a mask of .*{what}.*: 'longctx' supports only causal",
    ):
        describe(mask_function)


def test_padding_is_refused() -> None:
    model = build_model("llama", "longctx")
    with pytest.raises(HuggingFaceError, match="attention_mask hides tokens"):
        model(**one_document(model), attention_mask=torch.tensor([[0] + [1] * 15]))


@pytest.mark.slow
def test_without_transformers_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None; from longctx.hf.attention import "
        "prepare; prepare(None)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode and "pip install '.[huggingface]'" in process.stderr
