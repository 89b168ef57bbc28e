"""Dropout and NEFTune whose random numbers do not depend on how documents are split.

A number is a function of the seed, the step, the document, the token's place in it, the module and the feature: the product of
two odd numbers of 32 bits, one of the token and the module, and one of the feature.
"""

import functools
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn

from longctx.planning.layout import Layout
from longctx.trainers.prepared import replaced_method


class Rows(NamedTuple):
    """Of the rows of a rank: random int64 numbers, and the lengths of their documents."""

    keys: torch.Tensor
    lengths: torch.Tensor


class Noise:
    """Random numbers for the modules of a model, by the attention that it gets for a micro-batch."""

    def __init__(self) -> None:
        self._rows: WeakKeyDictionary[Any, Rows] = WeakKeyDictionary()
        self._current: Rows | None = None
        """Those of the model's forward or backward that is running."""

    def add(self, attention: Any, layout: Layout, seed: tuple[int, ...], device: torch.device) -> None:
        """Makes the numbers of a micro-batch."""
        keys, lengths = np.zeros(max(1, layout.tokens), np.uint64), np.ones(max(1, layout.tokens), np.int64)
        for shard in layout.shards:
            first = _mixed(np.uint64(zlib.crc32(repr((*seed, shard.document)).encode())))
            keys[shard.offset :][: shard.tokens] = _mixed(
                first + np.r_[slice(*shard.head), slice(*shard.tail)].astype(np.uint64)
            )
            lengths[shard.offset :][: shard.tokens] = shard.longest
        self._rows[attention] = Rows(*(torch.from_numpy(each.view(np.int64)).to(device) for each in (keys, lengths)))

    @contextmanager
    def used_by(self, model: Any, alpha: float | None) -> Iterator[None]:
        """Makes the dropout of a model use these numbers, and its embedding if NEFTune has an `alpha`."""

        def running(own: Any, this: Any, *arguments: Any, **named: Any) -> Any:
            attention = named.get("ring_attention")
            rows = self._current = None if attention is None else self._rows.get(attention)
            output = own(this, *arguments, **named)
            for value in vars(output).values() if rows is not None else ():
                if isinstance(value, torch.Tensor) and value.requires_grad:  # recomputed parts run after other calls
                    value.register_hook(lambda _: setattr(self, "_current", rows))
            return output

        def dropped(salt: int, own: Any, module: Any, inputs: torch.Tensor) -> Any:
            numbers = self._numbers(salt, inputs) if module.training and 0 < module.p < 1 else None
            if numbers is None:
                return own(module, inputs)
            return inputs.masked_fill(numbers < round((2 * module.p - 1) * 2**31), 0) / (1 - module.p)

        def noisy(own: Any, module: Any, ids: torch.Tensor) -> Any:
            output = own(module, ids)
            numbers = self._numbers(1, output) if module.training else None
            if numbers is None or self._current is None:
                return output
            largest = alpha / (self._current.lengths * output.shape[-1]) ** 0.5
            return output + (numbers * (largest[:, None] / 2**31)).to(output.dtype)

        with ExitStack() as undo:
            undo.enter_context(replaced_method(model, "forward", running))
            for name, module in model.named_modules():
                if isinstance(module, nn.Dropout):
                    salt = 2 * zlib.crc32(name.encode()) + 1
                    undo.enter_context(replaced_method(module, "forward", functools.partial(dropped, salt)))
            if alpha is not None:
                undo.enter_context(replaced_method(model.get_input_embeddings(), "forward", noisy))
            yield

    def _numbers(self, salt: int, like: torch.Tensor) -> torch.Tensor | None:
        """Returns int32 numbers of the shape of a module's input, or None if its rows are not those of tokens."""
        if self._current is None or like.numel() != len(self._current.keys) * like.shape[-1]:
            return None
        rows = (self._current.keys * salt >> 32).int() | 1
        return (rows[:, None] * _columns(like.shape[-1], like.device)).view(like.shape)


@functools.lru_cache(64)
def _columns(features: int, device: torch.device) -> torch.Tensor:
    numbers = torch.from_numpy(_mixed(np.arange(features, dtype=np.uint64)).view(np.int64))
    return ((numbers >> 32).int() | 1).to(device)


def _mixed(numbers: Any) -> Any:
    """Returns numbers of 64 bits, mixed as by SplitMix64."""
    with np.errstate(over="ignore"):
        numbers = numbers + np.uint64(0x9E3779B97F4A7C15)
        numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return numbers ^ (numbers >> np.uint64(31))
