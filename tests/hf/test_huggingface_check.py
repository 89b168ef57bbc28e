"""`prepare` and `model_inputs` refuse everything that would make results depend on how documents
are packed and split."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from longctx.data.packing import pack_documents
from longctx.hf import exactness
from longctx.hf.attention import HuggingFaceError, model_inputs, prepare
from longctx.hf.exactness import Probe, longest_exact
from tests.data_cases import placed_plan
from tests.family_cases import build
from tests.huggingface_cases import (
    LENGTHS,
    PLACEMENTS,
    build_model,
    make_documents,
    one_document,
    ring_step,
    shard,
    unpacked,
)
from tests.workers import Workers

OWN = "computes attention itself, not through transformers' attention interface"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        *((kind, OWN) for kind in ("bloom", "gptj", "rwkv", "trocr", "xlnet")),
        (
            "doge",
            r"does not run on packed tokens with attention 'longctx' \(AttributeError: "
            r"'CausalMask'",
        ),
        (
            "minimax",
            "layers of type linear_attention.* of the classes BailingHybridDeltaAttention, "
            "BambaMixer",
        ),
        ("llama4_text", "layers of type chunked_attention"),
        ("xlstm", "never calls transformers' attention interface"),
        ("stablelm", "does not pass keyword arguments to its attention"),
        ("roberta", "does not count positions as 0, 1, 2, .."),
        ("whisper", "does not compute its loss as the sum over shift_labels"),
    ],
)
def test_unsupported_families_are_refused_with_the_reason(kind: str, message: str) -> None:
    model = build(kind, "eager")
    with pytest.raises(HuggingFaceError, match=message):
        prepare(model)
    assert model.config._attn_implementation == "eager" and model.training
    with pytest.raises(
        HuggingFaceError, match="is not prepared for packed documents: call prepare"
    ):
        one_document(model)


def test_linear_layers_are_not_checked_in_evaluation_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPUs those of bitsandbytes then pack their weights, once and for all, and have no backward
    any more."""
    model, modes, forward = build("llama", "eager").eval(), [], nn.Linear.forward
    monkeypatch.setattr(
        nn.Linear, "forward", lambda layer, x: (modes.append(layer.training), forward(layer, x))[1]
    )
    prepare(model)
    assert modes and all(modes) and not any(module.training for module in model.modules())


@pytest.mark.parametrize(
    "kind", ["falcon_h1", "lfm2", "mamba2", "minimax_m3_vl_text", "qwen3_next"]
)
def test_other_mixing_of_tokens_is_noticed_without_being_declared(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("longctx.hf.linear.LINEAR_LAYERS", ())
    monkeypatch.setattr("longctx.hf.indexed.CHILD", "no indexer")
    monkeypatch.setattr(exactness, "check_config", lambda config, types=(): None)
    monkeypatch.setattr("longctx.hf.attention.check_config", lambda config, types=(): None)
    expected = r"mixes tokens outside|never calls|passes .* to its attention|does not run on packed"
    with pytest.raises(HuggingFaceError, match=expected):
        prepare(build(kind, "eager"))


def test_a_model_without_head_is_refused() -> None:
    with pytest.raises(HuggingFaceError, match="LlamaModel does not return logits for every token"):
        prepare(build_model("llama", "sdpa").model)


def test_models_of_other_libraries_are_refused() -> None:
    with pytest.raises(HuggingFaceError, match="Linear is not a model of transformers"):
        prepare(nn.Linear(2, 2))


def with_previous_token(_module: nn.Module, _inputs: Any, out: torch.Tensor) -> torch.Tensor:
    """Acts as a convolution whose second weight is still zero: in the first step only gradients
    would be wrong."""
    return out + 0.0 * out.roll(1, 1)


def with_row_number(_module: nn.Module, _inputs: Any, out: torch.Tensor) -> torch.Tensor:
    return out + 0.1 * torch.arange(out.shape[1]).unsqueeze(1).to(out.dtype)


def with_mean_loss(_module: nn.Module, _inputs: Any, out: Any) -> Any:
    out.loss = None if out.loss is None else out.loss + 0.01
    return out


def with_loss_of_all_labels(
    _module: nn.Module, _inputs: Any, arguments: dict[str, Any], out: Any
) -> Any:
    if out.loss is not None:
        labels = arguments["shift_labels"][0].clamp(min=0)
        total = nn.functional.cross_entropy(out.logits[0].float(), labels, reduction="sum")
        out.loss = total / arguments["num_items_in_batch"]
    return out


def test_a_loss_that_counts_ignored_labels_is_refused() -> None:
    model = build_model("llama", "sdpa")
    model.register_forward_hook(with_loss_of_all_labels, with_kwargs=True)
    with pytest.raises(HuggingFaceError, match="does not compute its loss as the sum"):
        prepare(model)


@pytest.mark.parametrize("changed", [1.01, torch.nan])
def test_each_row_is_compared_by_its_own_size(changed: float) -> None:
    probe: Any = SimpleNamespace(tolerance=1e-3)
    rows = torch.tensor([[1e6, 0.0], [1.0, 0.0]])
    others = rows * torch.tensor([[1.0], [changed]])
    assert not Probe.differ(probe, [rows], [rows.clone()])
    assert Probe.differ(probe, [rows], [others])


@pytest.mark.parametrize(
    ("place", "hook", "message"),
    [
        (
            "model.layers.0.mlp",
            with_previous_token,
            "mixes tokens outside transformers' attention interface",
        ),
        (
            "model.embed_tokens",
            with_row_number,
            "derives positions from the index of a token in the row",
        ),
        ("", with_mean_loss, "does not compute its loss as the sum"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_with_a_flaw_is_refused(
    place: str, hook: Any, message: str, dtype: torch.dtype
) -> None:
    model = build_model("llama", "sdpa").to(dtype)
    model.get_submodule(place).register_forward_hook(hook)
    with pytest.raises(HuggingFaceError, match=message):
        prepare(model)


@pytest.mark.parametrize("kind", ["llama", "mixtral", "gpt_oss", "deepseek_v3"])
def test_rounding_is_no_flaw(kind: str) -> None:
    model = build_model(kind, "eager", num_hidden_layers=8).to(torch.bfloat16).train()
    before = [parameter.clone() for parameter in model.parameters()]
    random_state = torch.random.get_rng_state()
    prepare(model)
    assert torch.equal(torch.random.get_rng_state(), random_state)
    assert model.training and all(module.training for module in model.modules())
    torch.testing.assert_close(list(model.parameters()), before, atol=0, rtol=0)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_without_weights_is_refused() -> None:
    with torch.device("meta"):
        model = build_model("llama", "sdpa")
    with pytest.raises(
        HuggingFaceError, match="has no weights, as it is on the meta device: load them first"
    ):
        prepare(model)


def prepare_sharded() -> str:
    model = build_model("llama", "sdpa")
    shard(model)
    prepare(model)
    return str(model(**one_document(model)).loss.isfinite().item())


def prepare_damaged(
    name: str,
    value: float,
    row: int = 0,
    *,
    sharded: bool = False,
    dtype: torch.dtype = torch.float32,
) -> str:
    """Returns what `prepare` says of a model with such a number in a row of a parameter."""
    model = build_model("llama", "sdpa").to(dtype)
    with torch.no_grad():
        model.get_parameter(name)[row] = value
    if sharded:
        shard(model)
    with pytest.raises(HuggingFaceError) as refused:
        prepare(model)
    return str(refused.value)


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_with_nan_or_infinity_is_refused_by_its_parameter(
    name: str, value: float, dtype: torch.dtype
) -> None:
    """Also in the row of an entry that no token of the check has."""
    assert f"LlamaForCausalLM has NaN or infinity: {name} has " in prepare_damaged(
        name, value, -1, dtype=dtype
    )


@pytest.mark.slow
def test_a_sharded_model_with_nan_is_refused_on_all_ranks(workers: Workers) -> None:
    said = workers.run(
        partial(prepare_damaged, "model.embed_tokens.weight", torch.nan, 0, sharded=True), 2
    )
    assert (
        "model.embed_tokens.weight has 32 of" in said[0]
        and "model.embed_tokens.weight has some on another rank" in said[1]
    )


def test_numbers_that_are_too_large_to_compute_with_are_told() -> None:
    said = prepare_damaged("model.layers.0.mlp.down_proj.weight", 3e38)
    assert "computes NaN or infinity for ordinary tokens" in said and "mixes tokens" not in said


def test_a_sharded_model_can_be_prepared(workers: Workers) -> None:
    assert workers.run(prepare_sharded, 2) == ["True", "True"]


def test_a_model_that_left_ring_attention_is_refused() -> None:
    model = build_model("llama", "longctx")
    model.set_attn_implementation("sdpa")
    with pytest.raises(
        HuggingFaceError,
        match=r"the attention of LlamaForCausalLM was changed to 'sdpa', which would mix",
    ):
        one_document(model)
    prepare(model)
    assert one_document(nn.Sequential(model))["ring_attention"]


@pytest.mark.parametrize("kind", ["mixtral", "granitemoe"])
def test_the_auxiliary_loss_of_a_mixture_is_refused(kind: str) -> None:
    model = build(kind, "eager")
    prepare(model)
    with pytest.raises(HuggingFaceError, match="passes output_router_logits to its attention"):
        model(**one_document(model), output_router_logits=True)
    model.config.output_router_logits = True
    for ask in (prepare, one_document):
        with pytest.raises(
            HuggingFaceError,
            match=r"output_router_logits is set in the model's config: .* Set it to False",
        ):
            ask(model)


def test_layers_that_are_left_out_at_random_are_refused() -> None:
    model = build("opt", "eager")
    model.config.layerdrop = 0.1
    with pytest.raises(HuggingFaceError, match=r"layerdrop is 0\.1 in the model's config"):
        prepare(model)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "factor": 4.0,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
LONGEST = max(LENGTHS)


def rope_settings(kind: str, limit: int) -> dict[str, Any]:
    """Returns settings of a RoPE type whose frequencies change above `limit` tokens."""
    if kind == "dynamic":
        return {"rope_parameters": DYNAMIC, "max_position_embeddings": limit}
    return {
        "rope_parameters": {**LONGROPE, "original_max_position_embeddings": limit},
        "max_position_embeddings": 4 * limit,
    }


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_looks_at_the_row_is_exact_up_to_its_limit(workers: Workers, kind: str) -> None:
    settings = rope_settings(kind, LONGEST)
    model = build_model("llama", "sdpa", **settings)
    loss, expected = unpacked(model, make_documents())
    for ring_loss, ring_gradients in workers.run(ring_step, 2, "llama", False, False, settings):
        assert ring_loss == pytest.approx(loss, abs=1e-5)
        torch.testing.assert_close(ring_gradients, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_looks_at_the_row_is_refused_beyond_its_limit(kind: str) -> None:
    """Also on a rank whose own positions are below the limit."""
    settings = rope_settings(kind, LONGEST - 1)
    model = build_model("llama", "longctx", **settings)
    micro_batches, _ = pack_documents(placed_plan(LENGTHS, 2, PLACEMENTS), 1, make_documents())
    message = (
        f"a document has {LONGEST} tokens, but RoPE of type {kind} changes its frequencies for "
        "inputs of more than "
        f"{LONGEST - 1} tokens"
    )
    assert model_inputs(model, micro_batches[0])
    with pytest.raises(HuggingFaceError, match=message):
        model_inputs(model, micro_batches[1])


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({"rope_parameters": {"rope_type": "yarn"}}, None),
        ({"rope_scaling": {"type": "dynamic"}}, (64, "dynamic")),
        ({"rope_parameters": {"rope_type": "dynamic", "alpha": 1000.0}}, None),
        (
            {"rope_parameters": {"a": {"rope_type": "default"}, "b": {"rope_type": "longrope"}}},
            (64, "longrope"),
        ),
        (
            {"rope_scaling": {"rope_type": "longrope"}, "original_max_position_embeddings": 32},
            (32, "longrope"),
        ),
    ],
)
def test_the_limit_is_found_in_every_form_of_config(config: dict[str, Any], limit: Any) -> None:
    assert longest_exact(type("Config", (), {"max_position_embeddings": 64, **config})) == limit
