"""Tiny models of transformers, trained with ring attention over several ranks and in one process
without packing."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from longctx.data.packing import pack_documents
from longctx.hf.attention import NAME, model_inputs, prepare
from longctx.planning.layout import Placement
from tests.data_cases import placed_plan

LENGTHS = (61, 1, 24, 90, 13, 2)
PLACEMENTS = (
    (Placement(0, 0, 2), Placement(1, 0, 1), Placement(2, 1, 1)),
    (Placement(3, 0, 2, reversed=True), Placement(4, 1, 1)),
    (Placement(5, 0, 1),),
)
"""Degrees 1 and 2 side by side, and a micro-batch without tokens on rank 1."""

SIZE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": None,
}
SPECIAL: dict[str, dict[str, Any]] = {
    "gemma": {"head_dim": 16},
    "gpt2": {
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    "mistral": {"sliding_window": 16},
    "gemma2": {
        "sliding_window": 16,
        "attn_logit_softcapping": 2.0,
        "query_pre_attn_scalar": 4,
        "attention_dropout": 0.0,
    },
    "gpt_oss": {
        "sliding_window": 16,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "eos_token_id": None,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}
"""Special settings of model types: custom scale, sliding windows, soft caps, sinks, unequal head
sizes."""


def build_model(kind: str, attention: str, **settings: Any) -> PreTrainedModel:
    """Builds a model of a type, prepared if `attention` is "longctx". Its weights depend only on
    the type and are large enough for attention to matter."""
    config = AutoConfig.for_model(kind, **{**SIZE, **SPECIAL.get(kind, {}), **settings})
    torch.manual_seed(0)
    plain = "eager" if attention == NAME else attention
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=plain)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    if attention == NAME:
        prepare(model)
    return model


def make_documents(lengths: tuple[int, ...] = LENGTHS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(0, SIZE["vocab_size"], (length,), generator=generator) for length in lengths
    ]


def one_document(model: Any, length: int = 16, **options: Any) -> dict[str, Any]:
    """Returns the inputs of a prepared model for one document on one rank."""
    (batch,), targets = pack_documents(
        placed_plan([length], 1, [[Placement(0, 0, 1)]]), 0, make_documents((length,))
    )
    return model_inputs(model, batch, targets, **options)


def unpacked(
    model: PreTrainedModel, documents: list[torch.Tensor]
) -> tuple[float, list[torch.Tensor]]:
    """Returns loss and gradients of one process that trains one document at a time."""
    targets = sum(len(document) - 1 for document in documents)
    loss = torch.zeros(())
    for document in documents:
        ids = document.unsqueeze(0)
        part = model(input_ids=ids, labels=ids, num_items_in_batch=targets, use_cache=False).loss
        part.backward()
        loss += part.detach()
    return loss.item(), gradients(model)


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


def ring_step(
    kind: str,
    recompute: bool = False,
    sharded: bool = False,
    settings: dict[str, Any] | None = None,
) -> tuple[float, list[torch.Tensor]]:
    """Runs on each rank: returns loss and gradients of all micro-batches, summed over ranks.

    With `recompute`, all forward passes come before the first backward, which recomputes the
    layers. `sharded` uses FSDP2.
    """
    model = build_model(kind, "longctx", **settings or {}).train()
    if recompute:
        model.gradient_checkpointing_enable()
    if sharded:
        shard(model)
    plan = placed_plan(LENGTHS, dist.get_world_size(), PLACEMENTS)
    micro_batches, targets = pack_documents(plan, dist.get_rank(), make_documents())
    parts = []
    for batch in micro_batches:
        parts.append(model(**model_inputs(model, batch, targets)).loss)
        if not recompute:
            parts[-1].backward()
    if recompute:
        for part in reversed(parts):
            part.backward()
    loss = torch.stack(parts).detach().sum()
    dist.all_reduce(loss)
    found = gradients(model)
    if sharded:
        return loss.item(), [gradient.full_tensor() for gradient in found]
    for gradient in found:
        dist.all_reduce(gradient)
    return loss.item(), found


def shard(model: PreTrainedModel) -> None:
    """Shards the layers and the rest, and sums gradients instead of averaging them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
