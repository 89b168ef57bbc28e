"""Blocks of transformers' own code on fake tensors: what they keep, and the peak of their backward,
beside the ledger."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaDecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3Config, Qwen3DecoderLayer
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeDecoderLayer

from longctx.config import load
from longctx.hf.spec import _composes_norms, _layer_spec
from longctx.memory.block import BlockMemory
from longctx.memory.loads import Load
from longctx.planning.cost.spec import ModelSpec
from tests.whole_size import Live

TOKENS = 65_536
LOAD = Load(TOKENS, remote=0, sent=0, held=0, fullest=0, micro_batches=1)
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
SMALL = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
BLOCKS: dict[str, tuple[Any, Any]] = {
    "Llama 8B": (
        LlamaDecoderLayer,
        LlamaConfig(hidden_size=4096, intermediate_size=14336, **HEADS),
    ),
    "Qwen3 0.6B": (
        Qwen3DecoderLayer,
        Qwen3Config(hidden_size=1024, intermediate_size=3072, **SMALL),
    ),
    "Qwen3 8B": (
        Qwen3DecoderLayer,
        Qwen3Config(hidden_size=4096, intermediate_size=12288, **HEADS),
    ),
    "Qwen3 30B-A3B": (
        Qwen3MoeDecoderLayer,
        Qwen3MoeConfig(
            hidden_size=2048,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
        ),
    ),
}
"""Real sizes of layers."""


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
    """Bytes of a block: kept between forward and backward, and at the peak of backward beside the
    block's input."""

    kept: int
    peak: int


def measured(name: str) -> tuple[Measured, ModelSpec]:
    kind, config = BLOCKS[name]
    AttentionInterface.register("of_sizes", attend)
    config._attn_implementation = "of_sizes"
    config._experts_implementation = "grouped_mm"
    torch.set_default_dtype(torch.bfloat16)
    try:
        with FakeTensorMode():
            block = kind(config, 0)
            x = torch.empty(1, TOKENS, config.hidden_size, requires_grad=True)
            turns = torch.empty(1, TOKENS, config.head_dim), torch.empty(1, TOKENS, config.head_dim)
            live = Live(torch.device("cpu"))
            for weight in block.parameters():
                live.add(weight)
            weights = live.now
            with live:
                out = block(x, position_embeddings=turns, attention_mask=None)
                kept = live.now - out.untyped_storage().nbytes() - weights
                gradient = torch.empty_like(out)
                live.peak = live.now
                torch.autograd.backward(out, gradient)
    finally:
        torch.set_default_dtype(torch.float32)
    layer = _layer_spec(config, block)
    spec = ModelSpec(
        layers=(layer,),
        hidden_size=config.hidden_size,
        vocab_size=1000,
        tie_word_embeddings=False,
        composed=_composes_norms([block]),
    )
    out_bytes = 2 * TOKENS * config.hidden_size
    return Measured(kept, live.peak - weights - out_bytes), spec


@pytest.mark.parametrize("name", BLOCKS)
def test_the_ledger_is_that_of_blocks_of_transformers(name: str) -> None:
    found, spec = measured(name)
    assert spec.composed
    config = load(None, ["train.dtype=bfloat16", "train.compile=false", "train.device=cuda"])
    block = BlockMemory(spec, config, spec.layers[0], LOAD, fused=True)
    kept = block.kept("none")
    peak = kept + block.mlp_gradients
    print(f"kept {kept / found.kept:.3f}, peak {peak / (found.peak):.3f}")
    assert kept == pytest.approx(found.kept, rel=0.02)
    assert peak == pytest.approx(found.peak, rel=0.02)
