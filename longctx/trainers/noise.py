"""Dropout and NEFTune whose random numbers do not depend on how documents are split.

A number is a function of the seed, the step, the document, the token's place in it, the module and
the feature: the product of two odd numbers of 32 bits, one of the token and the module, and one of
the feature.
"""

import functools
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from longctx.attention.host_to_device import copy_to
from longctx.data.packing import MicroBatch
from longctx.hf.exactness import replaced
from longctx.planning.layout import Layout
from longctx.trainers.prepared import replaced_method
from longctx.trainers.riders import Rider


class Noise(Rider):
    """Random numbers of a trainer for the modules of its model.

    Attributes:
        rows: int64 [2, rows of the micro-batch]: random numbers, and lengths of documents.
    """

    rows: torch.Tensor

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.rows = torch.zeros(2, 0, dtype=torch.int64)

    def begin(self, batch: MicroBatch, call: int) -> None:
        """Makes the numbers of a micro-batch, if the model is trained."""
        if self.trainer.model.training:
            self.rows = copy_to(self._rows_of(batch.layout, call), self.trainer.args.device)

    def _rows_of(self, layout: Layout, call: int) -> torch.Tensor:
        seed = self.trainer.args.seed
        step = self.trainer.state.global_step
        rows = np.ones((2, max(1, layout.tokens)), np.uint64)
        for shard in layout.shards:
            name = repr((seed, step, call, shard.document))
            first = _mixed(np.uint64(zlib.crc32(name.encode())))
            places = np.r_[slice(*shard.head), slice(*shard.tail)].astype(np.uint64)
            held = slice(shard.offset, shard.offset + shard.tokens)
            rows[0, held] = first + places
            rows[1, held] = shard.longest
        rows[0] = _mixed(rows[0])
        return torch.from_numpy(rows.view(np.int64))

    @contextmanager
    def used_by(self, model: Any) -> Iterator[None]:
        """Makes the dropout of a model, and NEFTune if the trainer asks for it, use these
        numbers."""
        alpha = self.trainer.neftune_noise_alpha
        with ExitStack() as undo:
            # The trainer would add its own noise.
            undo.enter_context(replaced(self.trainer, "neftune_noise_alpha", None))
            if alpha is not None:
                noisy = functools.partial(self._embedded, alpha)
                undo.enter_context(replaced_method(model.get_input_embeddings(), "forward", noisy))
            for name, module in model.named_modules():
                if isinstance(module, nn.Dropout):
                    salt = 2 * zlib.crc32(name.encode()) + 1
                    dropping = functools.partial(self._dropped, salt)
                    undo.enter_context(replaced_method(module, "forward", dropping))
            yield

    def _dropped(self, salt: int, own: Any, module: Any, inputs: torch.Tensor) -> Any:
        """Returns the output of a dropout module; `salt` is odd, and another for each module."""
        if not self._are_tokens(module, inputs) or not 0 < module.p < 1:
            return own(module, inputs)
        limit = round((2 * module.p - 1) * 2**31)  # numbers are uniform in [-2**31, 2**31)
        kept = inputs.masked_fill(self._numbers(salt, inputs) < limit, 0)
        return kept / (1 - module.p)

    def _embedded(self, alpha: float, own: Any, module: Any, ids: torch.Tensor) -> Any:
        """Returns the output of an embedding, with the noise of NEFTune if it is trained."""
        output = own(module, ids)
        if not self._are_tokens(module, output):
            return output
        largest = alpha / (self.rows[1] * output.shape[-1]) ** 0.5
        noise = self._numbers(1, output) * (largest[:, None] / 2**31)
        return output + noise.to(output.dtype)

    def _are_tokens(self, module: nn.Module, values: torch.Tensor) -> bool:
        return module.training and values.numel() == self.rows.shape[1] * values.shape[-1]

    def _numbers(self, salt: int, like: torch.Tensor) -> torch.Tensor:
        """Returns int32 numbers of the shape of what a module gets."""
        rows = (self.rows[0] * salt >> 32).int() | 1
        return (rows[:, None] * _columns(like.shape[-1], like.device)).view(like.shape)


@functools.cache
def _columns(features: int, device: torch.device) -> torch.Tensor:
    numbers = torch.from_numpy(_mixed(np.arange(features, dtype=np.uint64)).view(np.int64))
    return copy_to((numbers >> 32).int() | 1, device)


def _mixed(numbers: Any) -> Any:
    """Returns numbers of 64 bits, mixed as by SplitMix64."""
    with np.errstate(over="ignore"):
        numbers = numbers + np.uint64(0x9E3779B97F4A7C15)
        numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return numbers ^ (numbers >> np.uint64(31))
