"""Blocks of transformers' own code on fake tensors: what they keep, and the peak of their backward,
beside the ledger."""

import importlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, T5Config
from transformers.models.t5.modeling_t5 import T5Block

from longctx.config import load
from longctx.hf import own_blocks
from longctx.hf.live import Live
from longctx.hf.own_blocks import BlockCode
from longctx.hf.spec import _layer_spec
from longctx.memory.block import BlockMemory
from longctx.memory.loads import Load
from longctx.planning.cost.spec import LayerSpec, ModelSpec
from tests.marks import slow_unless

TOKENS = 65_536
LOAD = Load(TOKENS, remote=0, sent=0, held=0, fullest=0, micro_batches=1)
SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 2,
}
EXPERTS = {
    **SIZES,
    "intermediate_size": 1024,
    "moe_intermediate_size": 1024,
    "num_experts": 64,
    "num_local_experts": 64,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 0,
}
FAMILIES: dict[str, tuple[str, dict[str, int]]] = {
    "llama": ("Llama", SIZES),
    "mistral": ("Mistral", SIZES),
    "qwen2": ("Qwen2", SIZES),
    "qwen3": ("Qwen3", SIZES),
    "gemma2": ("Gemma2", SIZES),
    "gemma3": ("Gemma3", SIZES),
    "phi3": ("Phi3", SIZES),
    "olmo2": ("Olmo2", SIZES),
    "granite": ("Granite", SIZES),
    "glm4": ("Glm4", SIZES),
    "smollm3": ("SmolLM3", SIZES),
    "seed_oss": ("SeedOss", SIZES),
    "starcoder2": ("Starcoder2", SIZES),
    "qwen3_moe": ("Qwen3Moe", EXPERTS),
    "mixtral": ("Mixtral", EXPERTS),
    "gpt_oss": ("GptOss", EXPERTS),
    "olmoe": ("Olmoe", EXPERTS),
    "glm4_moe": ("Glm4Moe", {**EXPERTS, "n_group": 1, "topk_group": 1}),
    "minimax_m2": ("MiniMaxM2", EXPERTS),
}
QUICK = ("qwen3", "gemma3", "mixtral")
WITHIN = {"phi3": 0.06, "seed_oss": 0.05, "starcoder2": 0.07}
"""How far attention of these families is from ours; others: 3 %."""


class Attention(torch.autograd.Function):
    """Keeps and makes the tensors of an attention kernel."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = q.new_empty(q.shape)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v, _, _ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """Attends to [1, heads, tokens, head size]; like ours, gives [1, tokens, heads, head size]."""
    q, k, v = (each.transpose(1, 2) for each in (query, key, value))
    return Attention.apply(q, k, v), None


@dataclass(frozen=True)
class Measured:
    """A block that was run on fake tensors: bytes kept between forward and backward, and at the
    peak of backward, both beside its input."""

    kept: int
    peak: int
    layer: LayerSpec
    code: BlockCode


def turns_of(family: str, config: Any) -> torch.Tensor:
    """Returns cosines or sines of positions."""
    width = config.head_dim
    if family == "gpt_oss":  # of halves
        width //= 2
    if family.startswith("glm4"):  # of a part of each head
        width = int(width * config.rope_parameters["partial_rotary_factor"])
    return torch.empty(1, TOKENS, width)


def measured(family: str, dtype: torch.dtype) -> Measured:
    name, sizes = FAMILIES[family]
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    configuration = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    kind = f"{name}TextConfig" if family == "gemma3" else f"{name}Config"
    config = getattr(configuration, kind)(**sizes)
    AttentionInterface.register("of_sizes", attend)
    config._attn_implementation = "of_sizes"
    config._experts_implementation = "grouped_mm"
    torch.set_default_dtype(dtype)
    try:
        with FakeTensorMode():
            block = getattr(module, f"{name}DecoderLayer")(config, 0)
            x = torch.empty(1, TOKENS, config.hidden_size, requires_grad=True)
            turns = turns_of(family, config), turns_of(family, config)
            live = Live()
            for weight in block.parameters():
                live.add(weight)
            weights = live.now
            with live:
                out = block(x, position_embeddings=turns, attention_mask=None)
                kept = live.now - out.nbytes - weights
                gradient = torch.empty_like(out)
                live.peak = live.now
                torch.autograd.backward(out, gradient)
    finally:
        torch.set_default_dtype(torch.float32)
    code = BlockCode.of([block], config)
    assert code is not None
    peak = live.peak - weights - out.nbytes
    return Measured(kept, peak, layer=_layer_spec(config, block), code=code)


@pytest.mark.parametrize("family", slow_unless(lambda name: name in QUICK, FAMILIES))
def test_the_ledger_is_that_of_blocks_of_transformers(family: str) -> None:
    found = measured(family, torch.bfloat16)
    spec = ModelSpec(
        layers=(found.layer,),
        hidden_size=found.layer.hidden_size,
        vocab_size=1000,
        tie_word_embeddings=False,
        own=found.code,
    )
    config = load(None, ["train.dtype=bfloat16", "train.compile=false", "train.device=cuda"])
    block = BlockMemory(spec, config, found.layer, LOAD, fused=True)
    assert block.own is not None
    assert found.code.composes_norms == (family != "starcoder2")
    kept = block.kept("none")
    peak = kept + block.mlp_gradients
    print(f"{family}: kept {kept / found.kept:.3f}, peak {peak / found.peak:.3f}")
    assert kept == pytest.approx(found.kept, rel=WITHIN.get(family, 0.03))
    assert peak == pytest.approx(found.peak, rel=WITHIN.get(family, 0.03))


def test_a_block_of_other_parts_is_left_to_the_formula() -> None:
    """T5's has a list of layers."""
    config = T5Config(d_model=64, d_kv=16, d_ff=128, num_heads=4, num_layers=1)
    block = T5Block(config)
    code = BlockCode.of([block], config)
    assert code is not None and code.composes_norms
    assert code.bytes_per_token("bfloat16", frozen=False) is None
    assert torch.get_default_dtype() == torch.float32


def test_frozen_norms_keep_less_than_trained_ones() -> None:
    """Their input in float32, without the normalized one; of 2,048 values of each of two norms."""
    code = measured("llama", torch.bfloat16).code
    trained = code.bytes_per_token("bfloat16", frozen=False)
    frozen = code.bytes_per_token("bfloat16", frozen=True)
    assert trained is not None and frozen is not None
    assert trained.norms == pytest.approx(2 * 6 * 2048, rel=0.01)
    assert frozen.norms == pytest.approx(2 * 4 * 2048, rel=0.01)
    assert trained.gradients == frozen.gradients


def test_rows_of_frozen_experts_are_not_kept() -> None:
    """Adapters are beside matrices, not beside stacked experts: rows into them, and products, are
    kept for the gradients of their weights alone."""
    code = measured("qwen3_moe", torch.bfloat16).code
    trained = code.bytes_per_token("bfloat16", frozen=False)
    frozen = code.bytes_per_token("bfloat16", frozen=True)
    assert trained is not None and frozen is not None
    rows, products = 4 * 2048, 4 * 1024
    assert trained.mlp - frozen.mlp == pytest.approx(2 * (rows + products), rel=0.02)


def test_a_trace_does_not_depend_on_what_surrounds_it() -> None:
    code = measured("smollm3", torch.bfloat16).code
    with torch.device("meta"), torch.inference_mode(), torch.autocast("cpu"):
        found = code.bytes_per_token("float32", frozen=False)
    own_blocks._traced.cache_clear()
    assert found is not None and found == code.bytes_per_token("float32", frozen=False)
    assert found.mlp > 4 * 3 * 8192
    assert torch.get_default_dtype() == torch.float32


def test_the_largest_of_the_blocks_is_traced() -> None:
    """After a dense block, which mixtures begin with."""
    _, sizes = FAMILIES["glm4_moe"]
    module = importlib.import_module("transformers.models.glm4_moe.modeling_glm4_moe")
    config = module.Glm4MoeConfig(**sizes | {"first_k_dense_replace": 1})
    config._attn_implementation = "sdpa"
    config._experts_implementation = "grouped_mm"
    with FakeTensorMode():
        blocks = [module.Glm4MoeDecoderLayer(config, number) for number in range(2)]
    code = BlockCode.of(blocks, config)
    assert code is not None and code.layer == 1
    assert code.bytes_per_token("float32", frozen=False) is None  # products of groups
    dense = BlockCode.of(blocks[:1], config)
    experts = code.bytes_per_token("bfloat16", frozen=False)
    alone = dense.bytes_per_token("bfloat16", frozen=False) if dense is not None else None
    assert experts is not None and alone is not None and experts != alone
