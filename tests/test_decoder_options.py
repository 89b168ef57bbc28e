"""The native decoder with each option against the model of transformers that has it, with the same weights."""

import re
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional as F

from longctx.attention import Mask, PackedAttention, RingAttention, by_layer
from longctx.model.decoder import Decoder
from longctx.model.presets import ModelShape
from longctx.planning.layout import Layout, Placement

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
LENGTH = 61
FIRST = 16
"""Original context length for RoPE scaling: shorter than LENGTH, so that scaling has an effect."""


def scaled(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **more}, "max_position_embeddings": 64}


GPT = {
    "norm": "layer",
    "mlp": "plain",
    "hidden_act": "gelu",
    "linear_bias": True,
    "position_embeddings": "learned",
    "max_position_embeddings": 128,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}
Case = tuple[str, dict[str, Any], dict[str, Any]]
"""Model type, its configuration besides SIZES, and the options of our shape."""
CASES: dict[str, Case] = {
    "Llama 2": ("llama", {}, {}),
    "Llama 3": (
        "llama",
        scaled("llama3", original_max_position_embeddings=FIRST, low_freq_factor=1.0, high_freq_factor=4.0),
        {"rope_scaling": "llama3", "rope_factor": 4.0, "rope_original_length": FIRST},
    ),
    "linear": ("llama", scaled("linear"), {"rope_scaling": "linear", "rope_factor": 4.0}),
    "YaRN": (
        "llama",
        scaled("yarn", original_max_position_embeddings=FIRST),
        {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_length": FIRST},
    ),
    "Qwen 2": ("qwen2", {"tie_word_embeddings": True}, {"qkv_bias": True, "tie_word_embeddings": True}),
    "Qwen 3": ("qwen3", {}, {"qk_norm": True}),
    "Mistral": ("mistral", {"sliding_window": 7}, {"sliding_window": 7}),
    "Mixtral": (
        "mixtral",
        {"num_local_experts": 6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {"num_experts": 6},
    ),
    "Qwen 3, experts": (
        "qwen3_moe",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "mlp_only_layers": [0]},
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "first_dense_layers": 1,
            "norm_topk_prob": False,
            "qk_norm": True,
        },
    ),
    "Phi 3, half of a head turned": ("phi3", {"partial_rotary_factor": 0.5}, {"partial_rotary_factor": 0.5}),
    "GPT-2": (
        "gpt2",
        {"n_embd": 32, "n_inner": 48, "n_layer": 4, "n_head": 4, "n_positions": 128},
        {
            **GPT,
        },
    ),
    "Gemma 2": (
        "gemma2",
        {"query_pre_attn_scalar": 4, "sliding_window": 7, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.3},
        {
            "sliding_window": 7,
            "full_attention_every": 2,
            "attention_scale": 0.5,
            "attention_softcap": 0.5,
            "logit_softcap": 0.3,
        },
    ),
    "Gemma 3": (
        "gemma3_text",
        {
            "query_pre_attn_scalar": 16,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
            },
        },
        {
            "qk_norm": True,
            "sliding_window": 7,
            "full_attention_every": 3,
            "attention_scale": 0.25,
            "rope_local_theta": 100.0,
            "rope_scaling": "linear",
            "rope_factor": 4.0,
        },
    ),
}
GPT_PARAMETERS = [name for name in GPT if name != "hidden_act"]
EXPERTS = ("num_experts", "moe_intermediate_size", "first_dense_layers")
GEMMA = {"hidden_act": "gelu", "output_norms": True, "embedding_scale": 32**0.5, "tie_word_embeddings": True}


def theirs_and_ours(name: str) -> tuple[torch.nn.Module, Decoder]:
    kind, given, options = CASES[name]
    torch.manual_seed(0)
    sizes = {**SIZES, "head_dim": 8, "vocab_size": 50, "pad_token_id": 49, "attn_implementation": "eager", **given}
    if "num_experts" in options:
        sizes |= {"experts_implementation": "eager"}  # torch's grouped product has no float64
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **sizes)).double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():  # biases and norms too: at their first values they would hide mistakes
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    if kind.startswith("gemma"):
        options = {**GEMMA, **options}
    eps = theirs.config.layer_norm_epsilon if kind == "gpt2" else theirs.config.rms_norm_eps
    options = {**SIZES, "head_dim": 8, "vocab_size": 50, "rope_theta": 1e4, "rms_norm_eps": eps, **options}
    ours = Decoder(ModelShape.model_validate(options)).double()
    loaded = ours.load_state_dict(renamed(kind, theirs.state_dict()), strict=False)
    assert not loaded.unexpected_keys and set(loaded.missing_keys) <= {"lm_head.weight"}
    return theirs, ours


def renamed(kind: str, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns weights of transformers under our names."""
    found = {}
    if kind == "gpt2":
        weights = from_gpt2(weights)
    for name, weight in weights.items():
        name = name.removeprefix("model.")
        if kind.startswith("gemma"):
            weight = weight + 1 if "norm" in name else weight
            name = name.replace("post_attention_layernorm", "attention_output_norm")
            name = name.replace("pre_feedforward_layernorm", "post_attention_layernorm")
            name = name.replace("post_feedforward_layernorm", "mlp_output_norm")
        if name.endswith("qkv_proj.weight"):
            parts = zip("qkv", weight.split([32, 16, 16]), strict=True)
            found |= {re.sub("qkv_proj", f"{part}_proj", name): matrix for part, matrix in parts}
        elif ".experts." in name or name.endswith("mlp.gate.weight"):
            name = name.replace("mlp.", "moe.")
            halves = zip(("gate_proj", "up_proj"), weight.chunk(2, dim=1), strict=True)
            of_name = (
                {name.replace("gate_up_proj", part): half for part, half in halves} if "gate_up" in name else {name: weight}
            )
            found |= {part: matrix.reshape(-1, matrix.shape[-1]) for part, matrix in of_name.items()}
        elif name.endswith("gate_up_proj.weight"):
            found |= {name.replace("gate_up", part): half for part, half in zip(("gate", "up"), weight.chunk(2), strict=True)}
        else:
            found[name] = weight
    return found


def from_gpt2(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns weights of GPT-2 under the names and with the layout of Llama's and Phi-3's."""
    ours = {"wte": "embed_tokens", "wpe": "embed_positions", "ln_f": "norm", "h": "layers", "ln_1": "input_layernorm"}
    ours |= {"ln_2": "post_attention_layernorm", "attn.c_proj": "self_attn.o_proj", "attn.c_attn": "self_attn.qkv_proj"}
    ours |= {"mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"}
    found = {}
    for name, weight in weights.items():
        weight = weight.t() if ".c_" in name and name.endswith("weight") else weight
        for theirs, module in ours.items():
            name = re.sub(rf"(^|\.){re.escape(theirs)}\.", rf"\1{module}.", name)
        name = name.removeprefix("transformer.")
        parts = zip("qkv", weight.chunk(3), strict=True) if "qkv_proj" in name else [("qkv", weight)]
        found |= {name.replace("qkv_proj", f"{part}_proj"): matrix for part, matrix in parts}
    return found


def attention_of(model: Decoder, length: int) -> PackedAttention:
    layout, spec = Layout.of([Placement(0, 0, 1)], [length], 0, 0), model.spec

    def attend(window: int | None) -> RingAttention:
        return RingAttention(layout, mask=Mask(window=window), scale=spec.attention_scale, softcap=spec.attention_softcap)

    return by_layer([layer.window for layer in spec.layers], attend)


@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_are_those_of_transformers(name: str) -> None:
    theirs, ours = theirs_and_ours(name)
    tokens = torch.randint(0, 49, (LENGTH,), generator=torch.Generator().manual_seed(1))
    wanted = theirs(tokens[None]).logits[0]
    attention = attention_of(ours, LENGTH)
    logits = ours(tokens, torch.arange(LENGTH), attention)
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5)
    for out in (logits, wanted):
        F.cross_entropy(out[:-1], tokens[1:]).backward()
    right = renamed(CASES[name][0], {key: weight.grad for key, weight in theirs.named_parameters()})
    for key, weight in ours.named_parameters():
        assert weight.grad is not None
        grad = right[key] - 1 if CASES[name][0].startswith("gemma") and "norm" in key else right[key]
        torch.testing.assert_close(weight.grad, grad, rtol=1e-3, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", CASES)
def test_an_option_changes_the_logits(name: str) -> None:
    """Otherwise the test above would pass without it."""
    _, _, options = CASES[name]
    _, ours = theirs_and_ours(name)
    tokens = torch.randint(0, 49, (LENGTH,), generator=torch.Generator().manual_seed(1))
    logits = ours(tokens, torch.arange(LENGTH), attention_of(ours, LENGTH))
    for option in options:
        if option in (
            "tie_word_embeddings",
            "rope_factor",
            "rope_original_length",
            "qkv_bias",
            "qk_norm",
            *EXPERTS,
            *GPT_PARAMETERS,
        ):
            continue  # would have other parameters, or goes with another option
        default = ModelShape.model_fields[option].default
        changed = {"rope_factor": 1.0} if option == "rope_scaling" else {}
        if option == "sliding_window":
            changed = {"full_attention_every": None}
        other = Decoder(ours.shape.model_copy(update={option: default, **changed})).double()
        other.load_state_dict(ours.state_dict())
        assert (other(tokens, torch.arange(LENGTH), attention_of(other, LENGTH)) - logits).abs().max() > 1e-3, option


def test_ntk_turns_the_slowest_frequency_as_linear_scaling_does() -> None:
    shape = ModelShape(**SIZES, head_dim=8, vocab_size=50)
    plain, ntk, linear = (
        Decoder(shape.model_copy(update={"rope_scaling": kind, "rope_factor": 4.0})).rope.frequencies(torch.device("cpu"))
        for kind in ("none", "ntk", "linear")
    )
    assert ntk[0] == plain[0] and float(ntk[-1]) == pytest.approx(float(linear[-1]), rel=1e-12)
    assert ((ntk[1:-1] < plain[1:-1]) & (ntk[1:-1] > linear[1:-1])).all()


@pytest.mark.parametrize("name", CASES)
def test_the_spec_counts_what_the_model_has(name: str) -> None:
    _, ours = theirs_and_ours(name)
    assert ours.spec.parameters == sum(parameter.numel() for parameter in ours.parameters())
    for layer, block in zip(ours.spec.layers, ours.layers, strict=True):
        assert layer.matrix_parameters + layer.idle_parameters == sum(
            weight.numel() for weight in block.parameters() if weight.dim() > 1
        )
        assert layer.other_parameters == sum(weight.numel() for weight in block.parameters() if weight.dim() == 1)
    lengths = [5, LENGTH]
    pairs = sum(
        min(length, at + 1, layer.window or length) for layer in ours.spec.layers for length in lengths for at in range(length)
    )
    counted = ours.spec.flops(lengths) - 2 * ours.spec.multiplied_parameters * sum(lengths)
    assert counted == pytest.approx(4 * 4 * 8 * pairs, rel=0.15), "a query's own key counts half"


def test_first_values_of_biases_are_0_and_of_norms_1() -> None:
    model = Decoder(ModelShape(**SIZES, head_dim=8, vocab_size=50, qkv_bias=True, qk_norm=True, output_norms=True))
    model.initialize(0)
    values = {name: weight.unique().tolist() for name, weight in model.named_parameters() if weight.dim() == 1}
    assert {name.rpartition(".")[2]: value for name, value in values.items()} == {"bias": [0.0], "weight": [1.0]}
    assert {tuple(value) for name, value in values.items() if name.endswith("bias")} == {(0.0,)}


def test_a_checkpoint_of_another_model_is_told_apart() -> None:
    model = Decoder(ModelShape(**SIZES, head_dim=8, vocab_size=50, qk_norm=True))
    older = {**SIZES, "head_dim": 8, "vocab_size": 50, "rope_theta": 1e4}
    assert model.differences(older) == ["qk_norm is True, was False", "rope_theta is 500000.0, was 10000.0"]
