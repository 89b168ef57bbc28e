"""Verdicts on what an optimizer got: whether it is the gradients of backward, clipped as asked."""

from collections.abc import Iterator
from math import isnan, nan
from statistics import median

import torch

from .finding import Finding, suffixes
from .gathered import Record
from .tensors import Tensors
from .watched import Update

NOT_CLIPPED = "gradients are not clipped"
CLIPPED_OTHERWISE = "gradients are clipped otherwise"
CLIPPED_APART = "ranks clip gradients by different factors"
CLIPPED_BEFORE = "gradients are clipped before the mean over ranks"
LATE = "gradients change between backward and the optimizer"
KINDS = (NOT_CLIPPED, CLIPPED_OTHERWISE, CLIPPED_APART, CLIPPED_BEFORE, LATE)
CLIPPING = "clipping of gradients"
"""What may be not tested."""
LEAST_SHARE = 1e-3
"""Of the largest gradient's norm: smaller ones do not tell by what they are clipped."""


class Clipped:
    """What an optimizer got on each rank, beside the gradients of backward.

    Attributes:
        not_tested: what was not, with the reason, of what `findings` came to.
    """

    def __init__(self, record: Record, everyones: list[Update]) -> None:
        self.not_tested = dict[str, str]()
        self._record = record
        self._right = record.gradients
        self._given = [_in_float64(each.gradients) for each in everyones]
        self._groups = everyones[0].groups
        self._max_norm = everyones[0].asked.max_norm
        self._limit = record.tolerances.after
        self._norm = _norm_of(self._right)
        held = {name for group in self._groups for name in group.names}
        sizes = {name: float(self._right[name].norm()) for name in self._right if name in held}
        most = max(sizes.values(), default=0.0)
        self._large = [name for name, size in sizes.items() if size > LEAST_SHARE * most]

    def _is_before_mean(self) -> bool:
        """Returns whether the optimizer got the mean of what each rank clipped by itself."""
        if self._max_norm is None or not self._record.of_ranks:
            return False
        shares = [_share_of(self._max_norm, _norm_of(own)) for own in self._record.of_ranks]
        if min(shares) == 1.0:
            return False
        for name in self._large:
            parts = list[torch.Tensor]()
            for share, own in zip(shares, self._record.of_ranks, strict=True):
                if name in own:
                    parts.append(share * own[name])
            mean = torch.stack(parts).sum(0) / len(shares)
            if not is_same(self._given[0].get(name), mean, limit=self._limit):
                return False
        return True

    def findings(self) -> Iterator[Finding]:
        """Yields how what the optimizer got is not the clipped mean of ranks' gradients."""
        if self._record.apart:
            if self._is_before_mean():
                yield Finding(CLIPPED_BEFORE)
            return
        if not self._large:
            self.not_tested[CLIPPING] = "the optimizer holds no gradient of the model"
            return
        gone = [name for name in self._large if any(name not in each for each in self._given)]
        if gone:
            yield Finding(
                LATE, f"{len(gone)} of {len(self._large)} have none then: {suffixes(gone)}"
            )
            return
        one_each = list[float]()
        for rank, given in enumerate(self._given):
            factors = self._factors(given)
            factor = self._one(list(factors.values()))
            if factor is None:
                where = f", on rank {rank}" if self._record.ranks > 1 else ""
                yield self._by_parts(given, factors, where=where)
                return
            one_each.append(factor)
        factor = self._one(one_each)
        if factor is None:
            words = [f"rank {rank} by {each:.4g}" for rank, each in enumerate(one_each)]
            yield Finding(CLIPPED_APART, ", ".join(words[:4]))
            return
        yield from self._of_one(factor)

    def _factors(self, given: Tensors) -> dict[str, float]:
        """Returns by what each large gradient was multiplied; NaN where it is no multiple."""
        found = dict[str, float]()
        for name in self._large:
            right = self._right[name]
            factor = float((given[name] * right).sum() / right.square().sum())
            is_multiple = is_same(given[name], factor * right, limit=self._limit)
            found[name] = factor if is_multiple else nan
        return found

    def _one(self, factors: list[float]) -> float | None:
        """Returns the factor that all are; None if they differ."""
        mean = sum(factors) / max(len(factors), 1)
        if factors and all(self._equal(factor, mean) for factor in factors):
            return mean
        return None

    def _equal(self, one: float, other: float) -> bool:
        return abs(one - other) <= 10 * self._limit * abs(other)

    def _of_one(self, factor: float) -> Iterator[Finding]:
        """Yields what is wrong with one factor of all gradients of all ranks."""
        if self._max_norm is None:
            if self._equal(factor, 1.0):
                return
            if 0 < factor < 1:
                self.not_tested[CLIPPING] = f"gradients are multiplied by {factor:.4g} (max_norm=)"
            else:
                yield Finding(LATE, f"they are multiplied by {factor:.5g}")
            return
        right = _share_of(self._max_norm, self._norm)
        if self._equal(factor, right):
            if right == 1.0:
                self.not_tested[CLIPPING] = f"their norm is {self._norm:.3g}, below the limit"
            return
        if self._equal(factor, 1.0):
            yield Finding(NOT_CLIPPED, f"their norm is {self._norm:.4g}, over {self._max_norm:g}")
            return
        if not 0 < factor < 1:
            yield Finding(LATE, f"they are multiplied by {factor:.5g}")
            return
        words = f"multiplied by {factor:.4g} and not {right:.4g}, as for a norm of "
        norm = self._max_norm / factor
        causes = [each for each, value in self._norms() if self._equal(norm, value)]
        words += f"{norm:.4g}"
        if causes:
            words += f", {causes[0]}"
        yield Finding(CLIPPED_OTHERWISE, words)

    def _norms(self) -> Iterator[tuple[str, float]]:
        """Yields other norms with words for them."""
        numbers = torch.cat([value.flatten() for value in self._right.values()])
        calls = 1 + max(row.call for row in self._record.calls)
        if self._record.ranks > 1:
            yield "that of the sum over ranks", self._norm * self._record.ranks
        if calls > 1:
            yield "that of the sum over micro-batches", self._norm * calls
        yield "the sum of absolute values", float(numbers.abs().sum())
        yield "the largest absolute value", float(numbers.abs().max())
        yield "the square of the norm", self._norm**2
        yield "the sum of parameters' norms", sum(float(v.norm()) for v in self._right.values())

    def _by_parts(self, given: Tensors, factors: dict[str, float], *, where: str) -> Finding:
        """Returns how parameters came to factors of their own, or to gradients that are no
        multiples. `where`: words to add."""
        if self._max_norm is not None:
            for words, shares in self._shares(self._max_norm).items():
                if all(self._equal(factor, shares[name]) for name, factor in factors.items()):
                    details = f"each {words} to {self._max_norm:g} by itself{where}"
                    return Finding(CLIPPED_OTHERWISE, details)
            limit = self._max_norm
            clamped = {name: self._right[name].clamp(-limit, limit) for name in factors}
            if all(is_same(given[name], each, limit=self._limit) for name, each in clamped.items()):
                return Finding(CLIPPED_OTHERWISE, f"each number to ±{limit:g}{where}")
        known = [factor for factor in factors.values() if not isnan(factor)]
        usual = median(known) if known else nan
        off = [name for name, factor in factors.items() if not self._equal(factor, usual)]
        which = f"{len(off)} of {len(factors)} parameters{where}"
        return Finding(LATE, f"those of {which}: {suffixes(off)}")

    def _shares(self, max_norm: float) -> dict[str, dict[str, float]]:
        """Returns by what gradients are multiplied if parts of a model are clipped by themselves,
        by words for a part and name of the parameter."""
        by_parameter = dict[str, float]()
        by_group = dict[str, float]()
        for group in self._groups:
            own = {name: self._right[name] for name in group.names if name in self._right}
            for name, right in own.items():
                by_parameter[name] = _share_of(max_norm, float(right.norm()))
                by_group[name] = _share_of(max_norm, _norm_of(own))
        return {"parameter": by_parameter, "group": by_group}


def is_same(found: torch.Tensor | None, right: torch.Tensor, *, limit: float) -> bool:
    """Returns whether a tensor is the right one but for a relative difference."""
    if found is None:
        return False
    return float((found - right).norm()) <= limit * float(right.norm())


def _in_float64(tensors: Tensors) -> Tensors:
    return {name: value.double().cpu() for name, value in tensors.items()}


def _norm_of(tensors: Tensors) -> float:
    squares = [float(value.square().sum()) for value in tensors.values()]
    return float(sum(squares) ** 0.5)


def _share_of(max_norm: float, norm: float) -> float:
    """Returns by what torch's clipping multiplies gradients of a norm."""
    return min(1.0, max_norm / (norm + 1e-6))
