"""A loop of torchtitan 0.3, with its Llama 3 on CPUs: longctx check-step FILE --processes 2."""

from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.attention.flex_attention import create_mask
from torch.nn.functional import scaled_dot_product_attention
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.distributed.fsdp import disable_fsdp_gradient_division
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.llama3 import Llama3Model
from torchtitan.models.llama3.model import Llama3TransformerBlock
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter

from longctx.check import Probe, Step
from longctx.check.loop import packed_batches, place, targets_of
from longctx.check.recording import reference_of
from longctx.check.tensors import whole


def make(probe: Probe) -> Step:
    _, ranks = place()

    # PUT YOURS HERE: the rows of this rank, as your data set makes them of `probe.rows`.
    batches = packed_batches(probe)

    llama = probe.model("llama")
    config = config_of(llama.config)
    model = config.build()
    model.init_states()
    adapter = Llama3StateDictAdapter(config, hf_assets_path=None)
    model.load_state_dict(adapter.from_hf(llama.state_dict()))
    if ranks > 1:
        # PUT YOURS HERE: your parallelism.
        mesh = init_device_mesh("cpu", (ranks,))
        for part in (*model.layers.values(), model):
            fully_shard(part, mesh=mesh)
            part.set_force_sum_reduction_for_comms(True)  # gloo has no other sum
        disable_fsdp_gradient_division(model)

    # PUT YOURS HERE: forward and backward of all micro-batches, without clipping.
    loss_of = CrossEntropyLoss(CrossEntropyLoss.Config())
    targets = targets_of(batches, shifted=True)
    calls = []
    with patch.object(FlexAttention, "compiled_flex_attn", staticmethod(flex_attention_on_cpu)):
        for batch in batches:
            masks = model.get_attention_masks(batch["positions"])
            logits = model(batch["input_ids"], batch["positions"], masks)
            loss, _ = loss_of(logits, batch["labels"], targets)
            loss.backward()
            calls.append(batch["input_ids"])

    gradients = {}
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            gradients[name] = whole(weight.grad)
    return Step(reference_of(llama), adapter.to_hf(gradients), calls)


def config_of(llama: Any) -> Llama3Model.Config:
    """Returns torchtitan's config of a small Llama of transformers."""
    size = llama.hidden_size
    ours = {"weight": torch.nn.init.ones_}  # weights of transformers take the place
    rope = ComplexRoPE.Config(
        dim=llama.head_dim,
        max_seq_len=llama.max_position_embeddings,
        theta=llama.rope_parameters["rope_theta"],
    )
    norm = RMSNorm.Config(normalized_shape=size, eps=llama.rms_norm_eps, param_init=ours)
    layers = []
    for _ in range(llama.num_hidden_layers):
        attention = make_gqa_config(
            dim=size,
            n_heads=llama.num_attention_heads,
            n_kv_heads=llama.num_key_value_heads,
            head_dim=llama.head_dim,
            inner_attention=FlexAttention.Config(),
            rope=rope,
            wqkv_param_init=ours,
            wo_param_init=ours,
        )
        feed_forward = make_ffn_config(
            dim=size,
            hidden_dim=llama.intermediate_size,
            w1_param_init=ours,
            w2w3_param_init=ours,
        )
        layer = Llama3TransformerBlock.Config(
            attention_norm=norm, ffn_norm=norm, attention=attention, feed_forward=feed_forward
        )
        layers.append(layer)
    words = llama.vocab_size
    return Llama3Model.Config(
        dim=size,
        vocab_size=words,
        tok_embeddings=Embedding.Config(num_embeddings=words, embedding_dim=size, param_init=ours),
        norm=norm,
        lm_head=Linear.Config(in_features=size, out_features=words, param_init=ours),
        layers=layers,
    )


def flex_attention_on_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    block_mask: Any,
    scale: float | None,
    enable_gqa: bool,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    """Takes the place of flex_attention, which has no backward on CPUs, with the same mask."""
    rows, _, length, _ = q.shape
    mask = create_mask(block_mask.mask_mod, rows, None, length, length, device="cpu")
    seen = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
    return seen, None
