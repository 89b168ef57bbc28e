"""Objectives: target and weight of every token, from what the output layer returned and ∂loss/∂ of
that; and what the objective is where it is not cross-entropy.

∂loss/∂logits of a token is w (softmax(logits) - e(y)) where the objective is cross-entropy: its
smallest entry, or with a negative weight its largest, tells the target y, the size the weight w,
and what is left whether it is that objective.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Listed
from typing import Any, NamedTuple

import torch

CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Names in configs of what `final_logits` does; of no others."""
TEMPERATURES = 0.05, 20.0
"""Between which one is looked for."""


def final_logits(output: torch.Tensor, config: Any) -> torch.Tensor:
    """Returns logits as most models of transformers make them from what the output layer returns: a
    scale, then a cap."""
    scale = getattr(config, "logit_scale", None)
    if scale:
        output = output * scale
    divisor = getattr(config, "logits_scaling", None)
    if divisor:
        output = output / divisor
    cap = getattr(config, "final_logit_softcapping", None)
    if cap:
        output = cap * torch.tanh(output / cap)
    return output


class Objectives(NamedTuple):
    """Of each token [tokens].

    Attributes:
        targets: the id with a loss, or another one where a token has no weight.
        weights: of its cross-entropy.
        left: what is left of ∂loss/∂logits without it, relative to all of it.
        chances: how likely the model has the target.
        beside: what the objective of all tokens is that are off, in words: several where logits are
            nearly alike.
    """

    targets: torch.Tensor
    weights: torch.Tensor
    left: torch.Tensor
    chances: torch.Tensor
    beside: list[str]


class _Slopes(NamedTuple):
    """Some tokens' ∂loss/∂ of what the output layer returned [tokens, V], and the column of their
    cross-entropy: its slopes for a weight of 1."""

    found: torch.Tensor
    targets: torch.Tensor
    column: torch.Tensor

    def left(self, *terms: torch.Tensor) -> torch.Tensor:
        """Returns what the nearest sum of terms [tokens, V] leaves, relative to all [tokens]."""
        basis = torch.stack(list(terms), dim=2)
        weights = torch.linalg.lstsq(basis, self.found[:, :, None], driver="gelsd").solution
        rest: torch.Tensor = self.found - (basis @ weights)[:, :, 0]
        left: torch.Tensor = rest.norm(dim=1) / self.found.norm(dim=1).clamp_min(1e-300)
        return left

    def entropy_of(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns the column of the cross-entropy of logits [tokens, V]."""
        column = torch.softmax(logits, dim=1)
        column[range(len(column)), self.targets] -= 1
        return column


def objectives(
    output: torch.Tensor, slopes: torch.Tensor, *, config: Any, limit: float
) -> Objectives:
    """Returns the objectives of tokens, of what the output layer returned and ∂loss/∂ of that
    [tokens, V]. `limit`: most that may be left of a token's ∂loss/∂logits."""
    given = output.detach().requires_grad_()
    final = final_logits(given, config)
    (inner,) = torch.autograd.grad(final.sum(), given)  # each logit follows from its own output
    final = final.detach()
    sizes = slopes.norm(dim=1)
    most = slopes.max(1)
    least = slopes.min(1)
    negative = most.values > -least.values
    targets = torch.where(negative, most.indices, least.indices)
    tokens = torch.arange(len(targets))
    column = torch.softmax(final, dim=1)
    chances = column[tokens, targets].clone()
    column[tokens, targets] -= 1
    column *= inner
    weights = (slopes * column).sum(1) / (column * column).sum(1)
    left = (slopes - weights[:, None] * column).norm(dim=1) / sizes.clamp_min(1e-300)
    silent = sizes <= 1e-9 * float(sizes.max())
    weights = weights.masked_fill(silent, 0.0)
    left = left.masked_fill(silent, 0.0)
    off = ~(left <= limit)
    beside = list[str]()
    if off.any():
        some = _Slopes(slopes[off], targets[off], column=column[off])
        words = (
            *_with_a_term(some, final[off], inner=inner[off], limit=limit),
            *_of_other_logits(
                some, output.detach()[off], final[off], inner=inner[off], limit=limit
            ),
        )
        beside = list(dict.fromkeys(words))
    return Objectives(targets, weights, left=left, chances=chances, beside=beside)


def _with_a_term(
    some: _Slopes, logits: torch.Tensor, *, inner: torch.Tensor, limit: float
) -> Iterator[str]:
    """Yields terms that explain slopes beside cross-entropy."""
    likely = torch.softmax(logits, dim=1)
    logarithms = likely.clamp_min(1e-300).log()
    entropy = -(likely * logarithms).sum(1, keepdim=True)
    projected = (some.found * some.column).sum(1) / some.column.square().sum(1)
    residual = some.found - projected[:, None] * some.column
    second = torch.zeros_like(likely)
    second[range(len(second)), residual.abs().argmax(1)] = 1.0
    terms = {
        "label smoothing": likely - 1 / likely.shape[1],
        "a z-loss (the square of log-sum-exp)": likely * logits.logsumexp(1, keepdim=True),
        "entropy": likely * (logarithms + entropy),
        "the cross-entropy of a second id": likely - second,
        "squares of logits": logits,
    }
    for name, term in terms.items():
        if _all_within(some.left(some.column, term * inner), limit):
            yield name


def _of_other_logits(
    some: _Slopes,
    output: torch.Tensor,
    logits: torch.Tensor,
    *,
    inner: torch.Tensor,
    limit: float,
) -> Iterator[str]:
    """Yields what logits would explain slopes as cross-entropy."""
    changes = not torch.equal(output, logits)
    if changes and _all_within(some.left(some.entropy_of(output)), limit):
        yield "logits that are not scaled or capped as the config says"
    absent = ~some.found.any(0)
    if absent.any():
        kept = some.entropy_of(logits.masked_fill(absent, float("-inf"))) * inner
        if _all_within(some.left(kept), limit):
            yield f"a softmax without {int(absent.sum())} of {len(absent)} ids"
    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16")):
        if _all_within(some.left(some.entropy_of(logits.to(dtype).double()) * inner), limit):
            yield f"logits that are rounded to {name}"
    divisor = _temperature(some, logits, inner)
    if _all_within(some.left(some.entropy_of(logits / divisor) * inner), limit):
        yield f"logits that are divided by {divisor:.4g}"


def _temperature(some: _Slopes, logits: torch.Tensor, inner: torch.Tensor) -> float:
    """Returns by what logits are divided if they are divided by something."""
    first = min(len(logits), 16)
    few = _Slopes(some.found[:first], some.targets[:first], column=some.column[:first])

    def left(divisor: float) -> float:
        column = few.entropy_of(logits[:first] / divisor) * inner[:first]
        return float(few.left(column).norm())

    return nearest(left, between=TEMPERATURES)


def nearest(
    apart: Callable[[float], float], *, between: tuple[float, float], steps: int = 24
) -> float:
    """Returns the positive number between two for which a function is least: on a grid of powers
    first, then by halving."""
    low, high = between
    ratio = (high / low) ** (1 / steps)
    grid: list[float] = [low * ratio**step for step in range(steps + 1)]
    best = min(range(1, steps), key=lambda at: apart(grid[at]))
    below = grid[best - 1]
    above = grid[best + 1]
    for _ in range(60):
        third = (above - below) / 3
        if apart(below + third) < apart(above - third):
            above -= third
        else:
            below += third
    return (below + above) / 2


def _all_within(left: torch.Tensor, limit: float) -> bool:
    return bool((left <= limit).all())


def focus(weights: Listed[float], chances: Listed[float], *, limit: float) -> float:
    """Returns γ, if weights are those of a focal loss, (1 - p)^γ log(p): ∂ of it is that of
    cross-entropy times (1 - p)^γ - γ p (1 - p)^(γ - 1) log(p); 0 if they are not."""
    p = torch.tensor(chances, dtype=torch.float64)
    found = torch.tensor(weights, dtype=torch.float64)
    if len(found) < 2 or not bool(((p > 0) & (p < 1)).all()):
        return 0.0

    def apart(gamma: float) -> float:
        right: torch.Tensor = (1 - p) ** gamma - gamma * p * (1 - p) ** (gamma - 1) * p.log()
        return float((found / found.norm() - right / right.norm()).abs().max() * len(p) ** 0.5)

    gamma: float = nearest(apart, between=(0.1, 10.0))
    constant = float((found / found.norm() - 1 / len(found) ** 0.5).abs().max()) * len(p) ** 0.5
    left = apart(gamma)
    if left <= limit and left < constant / 10:
        return gamma
    return 0.0
