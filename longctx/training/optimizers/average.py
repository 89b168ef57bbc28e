"""Average: an exponential moving average of the trained weights, sharded, saved and resumed as state of the optimizer.

It begins with the weights after the first step, like torch's `AveragedModel`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from longctx.parallel.sharding import local_part

AVERAGE = "average"
"""Name of the average of a parameter in the state of the optimizer."""


def keep_average(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Lets every step of the optimizer update the average: decay · average + (1 - decay) · weight."""
    averaged = get_ema_multi_avg_fn(decay)

    @torch.no_grad()
    def update(optimizer: torch.optim.Optimizer, arguments: Any, named: Any) -> None:
        old, new = [], []
        for parameter, state in optimizer.state.items():
            if AVERAGE in state:
                old.append(local_part(state[AVERAGE]))
                new.append(local_part(parameter))
            else:
                state[AVERAGE] = parameter.detach().clone()
        if old:
            averaged(old, new, 1)

    optimizer.register_step_post_hook(update)


@contextmanager
@torch.no_grad()
def averaged(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Exchanges the weights of a model, which must not be gathered, and their averages, if there are any."""

    def exchange() -> None:
        for parameter, state in optimizer.state.items():
            if AVERAGE in state:
                ours, theirs = local_part(parameter), local_part(state[AVERAGE])
                kept = ours.clone()
                ours.copy_(theirs)
                theirs.copy_(kept)

    exchange()
    try:
        yield
    finally:
        exchange()
