"""Variants of models whose matrices are split over ranks: what tensor parallelism computed
otherwise."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from .variant import Setting, Variant

ROUNDED_SUMS = "outputs of ranks are rounded before they are summed"
OTHER_COLUMNS = "columns of the gate meet other columns of the up projection"
EMBEDDED = "ids of other ranks' shares of the embedding are not masked"
KINDS = (ROUNDED_SUMS, OTHER_COLUMNS, EMBEDDED)


def split_variants(modules: list[Any], ranks: int) -> Iterator[Variant]:
    """Yields variants of matrices that so many ranks share."""
    yield from _rounded_sums(modules, ranks)
    yield from _other_columns(modules, ranks)
    embeddings = [module for module in modules if isinstance(module, torch.nn.Embedding)]
    settings = list[Setting]()
    for module in embeddings:
        settings.append(Setting(module, "forward", partial(_embedded_by_all, module, ranks)))
    yield Variant(EMBEDDED, f"of {ranks} ranks", settings)


def _rounded_sums(modules: list[Any], ranks: int) -> Iterator[Variant]:
    """Yields that ranks' parts of what a projection out of a part returns are rounded."""
    for name in ("down_proj", "o_proj"):
        settings = list[Setting]()
        for module in modules:
            linear = getattr(module, name, None)
            if type(linear) is torch.nn.Linear:
                forward = partial(_summed_rounded, linear, ranks)
                settings.append(Setting(linear, "forward", forward))
        yield Variant(ROUNDED_SUMS, "to bfloat16", settings, rounds=True)


def _summed_rounded(linear: Any, ranks: int, hidden: torch.Tensor) -> torch.Tensor:
    shares = zip(hidden.chunk(ranks, dim=-1), linear.weight.chunk(ranks, dim=1), strict=True)
    parts = [F.linear(own, weight).to(torch.bfloat16).to(own.dtype) for own, weight in shares]
    total = torch.stack(parts).sum(0)
    if linear.bias is not None:
        total += linear.bias
    return total


def _other_columns(modules: list[Any], ranks: int) -> Iterator[Variant]:
    """Yields that each rank multiplies its columns of the gate by another rank's of the up
    projection."""
    for by in range(1, ranks):
        settings = list[Setting]()
        for module in modules:
            weight = getattr(getattr(module, "up_proj", None), "weight", None)
            if hasattr(module, "gate_proj") and weight is not None:
                shares = weight.data.chunk(ranks)
                rolled = torch.cat([*shares[by:], *shares[:by]])
                settings.append(Setting(weight, "data", rolled))
        yield Variant(OTHER_COLUMNS, f"those of the rank {by} after", settings)


def _embedded_by_all(module: Any, ranks: int, ids: torch.Tensor) -> torch.Tensor:
    """Returns the sum over ranks of rows of their shares, of other ids the first or last one."""
    share = -(-module.weight.shape[0] // ranks)
    found = torch.zeros(*ids.shape, module.weight.shape[1], dtype=module.weight.dtype)
    for rank in range(ranks):
        rows = module.weight[rank * share : (rank + 1) * share]
        found = found + rows[(ids - rank * share).clamp(0, len(rows) - 1)]
    return found
