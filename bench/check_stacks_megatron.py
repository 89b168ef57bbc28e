"""megatron-core on a CPU, for `bench.check_stacks`: model, masks of packed rows, schedule, data
parallelism, loss scaling.

Rows, and sums over a loss mask, which megatron-core leaves to training scripts, are as in
Megatron-LM's `pretrain_gpt.py`.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from longctx.check import Probe, Step
from longctx.check.probe import END
from longctx.check.record import reference_of

LENGTH = 64


class OnCpu(TorchFunctionMode):
    """Puts on the CPU what names CUDA devices."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if "cuda" in str(given.get("device")):
            given["device"] = "cpu"
        return args[0] if func is torch.Tensor.cuda else func(*args, **given)


def stream(probe: Probe) -> list[list[int]]:
    """Returns rows of whole documents, filled up with padding."""
    rows: list[list[int]] = []
    for ids in sorted(probe.documents, key=len, reverse=True):
        row = next((row for row in rows if len(row) + len(ids) <= LENGTH), None)
        if row is None:
            rows.append(row := [])
        row += ids
    return [[*row, *[probe.pad] * (LENGTH + 1 - len(row))] for row in rows]


def built(probe: Probe, per_token: bool) -> tuple[Any, Any, torch.nn.Module]:
    """Returns a GPTModel with the weights of a small Llama, its config, and the reference."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    llama = probe.model("llama")
    given = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 8,
    }
    given |= {
        "ffn_hidden_size": 48,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "normalization": "RMSNorm",
    }
    given |= {
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "layernorm_epsilon": llama.config.rms_norm_eps,
    }
    given |= {
        "use_cpu_initialization": True,
        "masked_softmax_fusion": False,
        "calculate_per_token_loss": per_token,
    }
    config = TransformerConfig(**given)
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    made = {
        "vocab_size": probe.vocab_size,
        "max_sequence_length": LENGTH,
        "position_embedding_type": "rope",
    }
    model = GPTModel(config, spec, **made, share_embeddings_and_output_weights=False)
    weights = {name: weight.detach() for name, weight in llama.named_parameters()}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.cat([weights[theirs][rows] for theirs, rows in parts(name)]))
    return model, config, reference_of(llama)


NAMES = {
    "embedding.word_embeddings": "model.embed_tokens",
    "decoder.final_layernorm": "model.norm",
    "output_layer": "lm_head",
}
OF_LAYERS = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}
OF_LAYERS |= {"self_attention.linear_proj": "self_attn.o_proj", "mlp.linear_fc2": "mlp.down_proj"}


def parts(name: str) -> list[tuple[str, slice]]:
    """Returns what a parameter of a GPTModel consists of: parameters of transformers, and their
    rows."""
    name, every = name.removeprefix("module.").removesuffix(".weight"), slice(None)
    if name in NAMES:
        return [(f"{NAMES[name]}.weight", every)]
    _, _, layer, kind = name.split(".", 3)
    if kind == "mlp.linear_fc1":
        found = [(f"mlp.{each}_proj", every) for each in ("gate", "up")]
    elif (
        kind == "self_attention.linear_qkv"
    ):  # group after group: two heads of queries, keys, values
        heads = [(("q", 16), ("k", 8), ("v", 8))] * 2
        found = [
            (f"self_attn.{each}_proj", slice(n * size, (n + 1) * size))
            for n, group in enumerate(heads)
            for each, size in group
        ]
    else:
        found = [(OF_LAYERS[kind], every)]
    return [(f"model.layers.{layer}.{each}.weight", rows) for each, rows in found]


def gradients_of(model: Any, reference: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the gradients in Megatron's buffers, by the names of transformers."""
    found = {
        name: torch.zeros_like(weight, dtype=torch.float32)
        for name, weight in reference.named_parameters()
    }
    for name, weight in model.named_parameters():
        at = 0
        for theirs, rows in parts(name):
            size = len(found[theirs][rows])
            found[theirs][rows] = weight.main_grad[at : at + size]
            at += size
    return found


def megatron(per_token: bool = True, **masks: bool) -> Callable[[Probe], Step]:
    """A loop; `masks` are those of GPTDataset: reset_position_ids, reset_attention_mask,
    eod_mask_loss."""

    def make(probe: Probe) -> Step:
        from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

        calls: list[torch.Tensor] = []

        def forward_step(batches: Iterator[list[int]], model: Any) -> Any:
            text = torch.tensor(next(batches))
            tokens, labels = text[:-1], text[1:]
            mask = {
                "reset_position_ids": False,
                "reset_attention_mask": False,
                "eod_mask_loss": False,
            } | masks
            seen, loss_mask, positions = _get_ltor_masks_and_position_ids(
                tokens, END, create_attention_mask=True, **mask
            )
            loss_mask = loss_mask * (labels != probe.pad)
            calls.append(tokens[None])
            output = model(tokens[None], positions[None], seen[None], labels=labels[None])

            def loss(losses: torch.Tensor) -> Any:
                total, count = (
                    (losses.view(-1).float() * loss_mask).sum(),
                    loss_mask.sum().to(torch.int),
                )
                return total, count, {}

            return output, loss

        of_cpu = patch.object(torch.cuda, "current_device", lambda: torch.device("cpu"))
        with OnCpu(), of_cpu, patch.object(CudaRNGStatesTracker, "fork", lambda *_: nullcontext()):
            plain, config, reference = built(probe, per_token)
            model = DistributedDataParallel(config, DistributedDataParallelConfig(), plain)
            config.finalize_model_grads_func = finalize_model_grads
            rows = stream(probe)[dist.get_rank() :: dist.get_world_size()]
            model.zero_grad_buffer()
            step = {"num_microbatches": len(rows), "seq_length": LENGTH, "micro_batch_size": 1}
            get_forward_backward_func()(
                forward_step_func=forward_step, data_iterator=iter(rows), model=[model], **step
            )
        return Step(reference, gradients_of(model, reference), calls)

    return make
