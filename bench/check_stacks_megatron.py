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

from longctx.check import Probe, Step
from longctx.check.probe import END
from longctx.check.recording import reference_of

LENGTH = 64


def stream(probe: Probe) -> list[list[int]]:
    """Returns rows of whole documents, filled up with padding."""
    rows: list[list[int]] = []
    for ids in sorted(probe.documents, key=len, reverse=True):
        row = next((row for row in rows if len(row) + len(ids) <= LENGTH), None)
        if row is None:
            rows.append(row := [])
        row += ids
    return [[*row, *[probe.pad] * (LENGTH + 1 - len(row))] for row in rows]


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

        from longctx.check.templates.check_megatron import (
            OnCpu,
            gradients_of,
            model_with_weights_of,
        )

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
            llama = probe.model("llama")
            plain = model_with_weights_of(llama, calculate_per_token_loss=per_token)
            config = plain.config
            model = DistributedDataParallel(config, DistributedDataParallelConfig(), plain)
            config.finalize_model_grads_func = finalize_model_grads
            rows = stream(probe)[dist.get_rank() :: dist.get_world_size()]
            model.zero_grad_buffer()
            step = {"num_microbatches": len(rows), "seq_length": LENGTH, "micro_batch_size": 1}
            get_forward_backward_func()(
                forward_step_func=forward_step, data_iterator=iter(rows), model=[model], **step
            )
        reference = reference_of(llama)
        return Step(reference, gradients_of(model, reference), calls)

    return make
