"""Checkpoints of transformers that the native decoder runs, and one step of the trainer on them,
over several ranks that split matrices or layers."""

import math
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from longctx.attention import Mask, PackedAttention, RingAttention, by_layer
from longctx.model.decoder import Decoder
from longctx.model.pretrained_decoder import PretrainedDecoder
from longctx.planning.layout import Layout, Placement
from tests.huggingface_cases import SIZE, SPECIAL

Tensors = dict[str, torch.Tensor]
BASE = {**SIZE, "num_hidden_layers": 4, "bos_token_id": None, "eos_token_id": 1}
FIRST = 16
"""Original context length for RoPE scaling: shorter than the tests' documents, so that scaling has
an effect."""


def scaled(kind: str, **more: Any) -> dict[str, Any]:
    return {
        "rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **more},
        "max_position_embeddings": 64,
    }


Case = tuple[str, dict[str, Any], dict[str, Any]]
"""Model type, its configuration besides BASE, and the options of our shape."""
CASES: dict[str, Case] = {
    "Llama 2": ("llama", {}, {}),
    "Llama 3": (
        "llama",
        scaled(
            "llama3",
            original_max_position_embeddings=FIRST,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        ),
        {"rope_scaling": "llama3", "rope_factor": 4.0, "rope_original_length": FIRST},
    ),
    "linear": ("llama", scaled("linear"), {"rope_scaling": "linear", "rope_factor": 4.0}),
    "YaRN": (
        "llama",
        scaled(
            "yarn",
            original_max_position_embeddings=FIRST,
            attention_factor=0.1 * math.log(4.0) + 1,
        ),
        {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_length": FIRST},
    ),
    "Qwen 2": (
        "qwen2",
        {"tie_word_embeddings": True},
        {"qkv_bias": True, "tie_word_embeddings": True},
    ),
    "Qwen 3": ("qwen3", {}, {"qk_norm": True}),
    "Mistral": ("mistral", {"sliding_window": 7}, {"sliding_window": 7}),
    "Mixtral": (
        "mixtral",
        {"num_local_experts": 6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {"num_experts": 6},
    ),
    "Qwen 3, experts": (
        "qwen3_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "mlp_only_layers": [0],
        },
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "first_dense_layers": 1,
            "norm_topk_prob": False,
            "qk_norm": True,
        },
    ),
    "Phi 3": ("phi3", {}, {}),
    "Qwen 3, windows": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": [
                "sliding_attention",
                "sliding_attention",
                "full_attention",
                "sliding_attention",
            ],
        },
        {"qk_norm": True, "sliding_window": 7, "full_attention_every": 3},
    ),
}
EXPERTS = ("num_experts", "moe_intermediate_size", "first_dense_layers")


def build(name: str) -> Any:
    kind, given, _ = CASES[name]
    settings = {**BASE, **SPECIAL.get(kind, {}), **given}
    config = AutoConfig.for_model(kind, **settings)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        # Biases and norms too: at their first values they would hide mistakes.
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def as_saved(kind: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors with a tensor for each expert, named as in files; transformers joins them
    while it loads."""
    found = {}
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"} if kind == "mixtral" else {}
    for name, tensor in tensors.items():
        if kind == "mixtral":
            name = name.replace(".mlp.", ".block_sparse_moe.")
        module, joined, matrix = name.partition("experts.")
        parts = {matrix: tensor}
        if matrix == "gate_up_proj":
            parts = dict(zip(("gate_proj", "up_proj"), tensor.chunk(2, dim=1), strict=True))
        for part, each in parts.items():
            if joined:
                found |= {
                    f"{module}experts.{n}.{names.get(part, part)}.weight": one
                    for n, one in enumerate(each.unbind())
                }
            else:
                found[name] = each
    return found


def attention_of(model: Decoder, length: int) -> PackedAttention:
    layout, spec = Layout.of([Placement(0, 0, 1)], [length], 0, 0), model.spec

    def attend(window: int | None) -> RingAttention:
        return RingAttention(layout, mask=Mask(window=window))

    return by_layer([layer.window for layer in spec.layers], attend)


def everyones(model: PretrainedDecoder, tensors: Tensors) -> Tensors:
    """Returns the tensors of all ranks of a pipeline, by the names of transformers."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, model.to_checkpoint(tensors))
    found: Tensors = {}
    for part in parts:
        for name, tensor in part.items():
            torch.testing.assert_close(found.setdefault(name, tensor), tensor, rtol=0, atol=0)
    return found
