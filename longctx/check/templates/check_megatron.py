"""A loop of Megatron-LM, with megatron-core 0.16 on CPUs: longctx check-step FILE --processes 2."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import TransformerConfig
from torch.nn.functional import silu
from torch.overrides import TorchFunctionMode

from longctx.check import Probe, Step
from longctx.check.loop import IGNORED, padded_batches
from longctx.check.recording import reference_of

LENGTH = 128


def make(probe: Probe) -> Step:
    # PUT YOURS HERE: the micro-batches of this rank, as your data set makes them of `probe.rows`.
    batches = padded_batches(probe)

    calls: list[torch.Tensor] = []
    without_cuda = patch.object(torch.cuda, "current_device", lambda: torch.device("cpu"))
    without_states = patch.object(CudaRNGStatesTracker, "fork", lambda *_: nullcontext())
    with OnCpu(), without_cuda, without_states:
        llama = probe.model("llama")
        # PUT YOURS HERE: without it the loss is a mean of means of micro-batches.
        plain = model_with_weights_of(llama, calculate_per_token_loss=True)
        model = DistributedDataParallel(plain.config, DistributedDataParallelConfig(), plain)
        plain.config.finalize_model_grads_func = finalize_model_grads
        model.zero_grad_buffer()
        get_forward_backward_func()(
            forward_step_func=partial(forward_step, calls),
            data_iterator=iter(batches),
            model=[model],
            num_microbatches=len(batches),
            seq_length=LENGTH,
            micro_batch_size=1,
        )
    reference = reference_of(llama)
    return Step(reference, gradients_of(model, reference), calls)


def forward_step(
    calls: list[torch.Tensor], batches: Iterator[dict[str, torch.Tensor]], model: Any
) -> tuple[torch.Tensor, Callable[..., Any]]:
    # PUT YOURS HERE: your forward_step and loss_func. `calls` gets the ids of each call.
    batch = next(batches)
    tokens = batch["input_ids"]
    calls.append(tokens)
    labels = batch["labels"].roll(-1, dims=1)
    labels[:, -1] = IGNORED
    loss_mask = (labels != IGNORED).float()
    length = tokens.shape[1]
    positions = torch.arange(length).expand_as(tokens)
    later = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    losses = model(tokens, positions, later, labels=labels.clamp(min=0))
    return losses, partial(loss_func, loss_mask)


def loss_func(
    loss_mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Returns the sum of the losses of targets, and their number."""
    return (losses.float() * loss_mask).sum(), loss_mask.sum().int(), {}


def model_with_weights_of(llama: Any, **settings: Any) -> Any:
    """Returns a GPTModel with the weights of a small Llama of transformers, and settings of
    TransformerConfig."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    of_llama = llama.config
    config = TransformerConfig(
        num_layers=of_llama.num_hidden_layers,
        hidden_size=of_llama.hidden_size,
        num_attention_heads=of_llama.num_attention_heads,
        num_query_groups=of_llama.num_key_value_heads,
        kv_channels=of_llama.head_dim,
        ffn_hidden_size=of_llama.intermediate_size,
        layernorm_epsilon=of_llama.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        **settings,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=of_llama.vocab_size,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    weights = {name: weight.detach() for name, weight in llama.named_parameters()}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.cat([weights[theirs][rows] for theirs, rows in parts(name, config)]))
    return model


NAMES = {
    "embedding.word_embeddings": "model.embed_tokens",
    "decoder.final_layernorm": "model.norm",
    "output_layer": "lm_head",
}
OF_LAYERS = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "self_attention.linear_proj": "self_attn.o_proj",
    "mlp.linear_fc2": "mlp.down_proj",
}


def parts(name: str, config: Any) -> list[tuple[str, slice]]:
    """Returns what a parameter of a GPTModel consists of: parameters of transformers, and their
    rows."""
    name = name.removeprefix("module.").removesuffix(".weight")
    every = slice(None)
    if name in NAMES:
        return [(f"{NAMES[name]}.weight", every)]
    _, _, layer, kind = name.split(".", 3)
    prefix = f"model.layers.{layer}"
    if kind == "mlp.linear_fc1":
        return [(f"{prefix}.mlp.{each}_proj.weight", every) for each in ("gate", "up")]
    if kind != "self_attention.linear_qkv":
        return [(f"{prefix}.{OF_LAYERS[kind]}.weight", every)]
    found = []
    keys = config.kv_channels
    queries = config.num_attention_heads // config.num_query_groups * keys
    for group in range(config.num_query_groups):
        for each, size in (("q", queries), ("k", keys), ("v", keys)):
            rows = slice(group * size, (group + 1) * size)
            found.append((f"{prefix}.self_attn.{each}_proj.weight", rows))
    return found


def gradients_of(model: Any, reference: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the gradients in Megatron's buffers, by the names of transformers."""
    found = {
        name: torch.zeros_like(weight, dtype=torch.float32)
        for name, weight in reference.named_parameters()
    }
    for name, weight in model.named_parameters():
        first = 0
        for theirs, rows in parts(name, model.config):
            size = len(found[theirs][rows])
            found[theirs][rows] = weight.main_grad[first : first + size]
            first += size
    return found


class OnCpu(TorchFunctionMode):
    """Puts on the CPU what names CUDA devices."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if "cuda" in str(given.get("device")):
            given["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*args, **given)
