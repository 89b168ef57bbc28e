"""A stage of torch's pipelines with receive buffers only while their micro-batch is in flight.

Torch 2.13 keeps buffers for every micro-batch of a step. Remove this module from torch 2.15 on,
which allocates them late.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage


class LeanStage(PipelineStage):
    """A stage that allocates its receive buffers, as `hidden` makes them, before a message and
    frees them after backward."""

    def __init__(
        self, hidden: Callable[[torch.device], torch.Tensor], *arguments: Any, **named: Any
    ) -> None:
        super().__init__(*arguments, **named)
        self.hidden = hidden

    def _allocate(self, received: Any, micro_batch: int) -> None:
        for info in _buffered(received[micro_batch]):
            info.buffer = self.hidden(self.device).requires_grad_(info.buffer.requires_grad)

    def _free(self, received: Any, *micro_batches: int) -> None:
        for micro_batch in micro_batches:
            for info in _buffered(received.get(micro_batch, ())):
                info.buffer = info.buffer.new_empty(0).requires_grad_(info.buffer.requires_grad)

    def _prepare_forward_infra(self, *arguments: Any, **named: Any) -> Any:
        prepared = super()._prepare_forward_infra(*arguments, **named)
        self._free(self.args_recv_info, *self.args_recv_info)
        return prepared

    def _prepare_backward_infra(self, *arguments: Any, **named: Any) -> Any:
        prepared = super()._prepare_backward_infra(*arguments, **named)
        self._free(self.grad_recv_info, *self.grad_recv_info)
        return prepared

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
        if not self.is_first:
            self._allocate(self.args_recv_info, fwd_chunk_id)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
        if not self.is_last:
            self._allocate(self.grad_recv_info, bwd_chunk_id)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **named: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *arguments, **named)
        if not self.is_first:
            self._free(self.args_recv_info, bwd_chunk_id)
        self._free(self.grad_recv_info, bwd_chunk_id)


def _buffered(received: Any) -> list[Any]:
    """Returns the entries that have a buffer: not the step's own inputs, nor those for which torch
    2.15 allocates it later."""
    return [info for info in received if getattr(info, "buffer", None) is not None]
