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
from longctx.hf.exactness import replaced
from longctx.planning.layout import Layout
from longctx.trainers.prepared import replaced_method


class Noise:
    """Random numbers of a trainer for the modules of its model.

    `rows` are of those that the model computes: random int64 numbers, and lengths of documents.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.rows = trainer, torch.zeros(2, 0, dtype=torch.int64)

    def begin(self, layout: Layout, call: int) -> None:
        """Makes the numbers of a micro-batch, of a call of the model in its step."""
        seed = self.trainer.args.seed, self.trainer.state.global_step, call
        rows = np.ones((2, max(1, layout.tokens)), np.uint64)
        for shard in layout.shards:
            first = _mixed(np.uint64(zlib.crc32(repr((*seed, shard.document)).encode())))
            places = np.r_[slice(*shard.head), slice(*shard.tail)].astype(np.uint64)
            rows[0, shard.offset :][: shard.tokens], rows[1, shard.offset :][: shard.tokens] = (
                first + places,
                shard.longest,
            )
        rows[0] = _mixed(rows[0])
        self.rows = copy_to(torch.from_numpy(rows.view(np.int64)), self.trainer.args.device)

    @contextmanager
    def used_by(self, model: Any) -> Iterator[None]:
        """Makes the dropout of a model, and NEFTune if the trainer asks for it, use these
        numbers."""
        alpha = self.trainer.neftune_noise_alpha

        def dropped(salt: int, own: Any, module: Any, inputs: torch.Tensor) -> Any:
            if not self._are_tokens(module, inputs) or not 0 < module.p < 1:
                return own(module, inputs)
            return inputs.masked_fill(
                self._numbers(salt, inputs) < round((2 * module.p - 1) * 2**31), 0
            ) / (1 - module.p)

        def noisy(own: Any, module: Any, ids: torch.Tensor) -> Any:
            output = own(module, ids)
            if not self._are_tokens(module, output):
                return output
            largest = alpha / (self.rows[1] * output.shape[-1]) ** 0.5
            return output + (self._numbers(1, output) * (largest[:, None] / 2**31)).to(output.dtype)

        with ExitStack() as undo:
            # It would add its own.
            undo.enter_context(replaced(self.trainer, "neftune_noise_alpha", None))
            if alpha is not None:
                undo.enter_context(replaced_method(model.get_input_embeddings(), "forward", noisy))
            for name, module in model.named_modules():
                if isinstance(module, nn.Dropout):
                    salt = 2 * zlib.crc32(name.encode()) + 1
                    undo.enter_context(
                        replaced_method(module, "forward", functools.partial(dropped, salt))
                    )
            yield

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
