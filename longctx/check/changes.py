"""Changes: how a tensor that is wrong came from the right one, in words."""

from collections.abc import Mapping

import torch

ROUNDED = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
"""Types to which numbers may have been rounded, in words."""
CLEARLY = 0.3
"""Share of the difference from what is right that a cause has to leave at most."""
LEAST_ROW = 0.05
"""Share of the usual size of a gradient's rows: what is off by less than of that is no row's."""
FEWEST_ZEROS = 0.002
"""Share of elements that are 0 from which dropout is likelier than chance."""


def change_of_rows(found: torch.Tensor, right: torch.Tensor, *, limit: float) -> str:
    """Returns how rows [tokens, width] came from the right ones; "" where that is not known.
    `limit`: largest relative difference of equal ones."""
    if not found.any():
        return "0"
    ratio = float((found * right).sum() / right.square().sum())
    if explains(ratio * right, found, right, limit=limit):
        return f"{ratio:.6g} times what it should be"
    dtype = _rounded_to(found, right)
    if dtype:
        return f"rounded to {dtype}"
    zeros = (found == 0) & (right != 0)
    share = float(zeros.double().mean())
    if share > FEWEST_ZEROS:
        kept = right.masked_fill(zeros, 0.0)
        squares = kept.square().sum(1, keepdim=True).clamp_min(1e-300)
        scaled = (found * kept).sum(1, keepdim=True) / squares * kept
        if explains(scaled, found, right, limit=limit):
            return f"0 in {100 * share:.2g} % of its elements: dropout"
    return ""


def change_of_sizes(found: torch.Tensor, right: torch.Tensor, *, limit: float) -> str:
    """Returns by what rows [tokens, width] are multiplied, each by another number; "" if they are
    not."""
    squares = right.square().sum(1, keepdim=True).clamp_min(1e-300)
    sizes = (found * right).sum(1, keepdim=True) / squares
    if len(found) > 1 and explains(sizes * right, found, right, limit=limit):
        least = float(sizes.min())
        most = float(sizes.max())
        return f"multiplied by another number for each token, {least:.3g} to {most:.3g}"
    return ""


def change_of_order(found: torch.Tensor, everyones: torch.Tensor, *, limit: float) -> list[int]:
    """Returns of which token each row [tokens, width] is, by its index in the rows of all
    [all tokens, width]; -1 where a row is of no token."""
    distances = torch.cdist(found, everyones)
    nearest = distances.min(1)
    sizes = everyones.norm(dim=1)[nearest.indices]
    same = nearest.values <= limit * sizes
    return nearest.indices.masked_fill(~same, -1).tolist()


def change_of_gradient(
    found: torch.Tensor, right: torch.Tensor, others: Mapping[str, torch.Tensor], *, limit: float
) -> str:
    """Returns how a gradient came from the right one. `others`: right ones of parameters by
    name."""
    if not found.any():
        return "none"
    ratio = float((found * right).sum()) / max(float(right.norm()) ** 2, 1e-300)
    if _same(found, ratio * right, limit):
        return f"{ratio:.5g} times what it should be"
    if found.dim() == 2 and found.shape[0] == found.shape[1] and _same(found, right.T, limit):
        return "transposed"
    for name, other in others.items():
        if other.shape == found.shape and other.any() and _same(found, other, limit):
            return f"that of {name}"
    return (
        _in_some_rows(found, right, limit=limit)
        or _few_elements(found, right, limit=limit)
        or "another"
    )


def _in_some_rows(found: torch.Tensor, right: torch.Tensor, *, limit: float) -> str:
    """Returns by what some rows of a gradient [rows, ..] are multiplied, all by the same number; ""
    if they are not, or others are off, too."""
    if found.dim() < 2:
        return ""
    ones = found.flatten(1)
    wanted = right.flatten(1)
    sizes = wanted.norm(dim=1)
    usual = float(sizes.norm()) / len(sizes) ** 0.5
    off = (ones - wanted).norm(dim=1) > 3 * limit * sizes.clamp_min(LEAST_ROW * usual)
    rows = off.nonzero()[:, 0].tolist()
    if not rows or 2 * len(rows) >= len(ones) or not bool((sizes[off] > 0).all()):
        return ""
    ratio = float((ones[off] * wanted[off]).sum() / wanted[off].square().sum())
    candidate = torch.where(off[:, None], ratio * wanted, wanted)
    if not _same(ones, candidate, limit):
        return ""
    is_none = abs(ratio) <= limit
    if not is_none and not _same(ones[off], ratio * wanted[off], limit):
        return ""
    shown = ", ".join(map(str, rows[:4])) + (f" and {len(rows) - 4} more" if len(rows) > 4 else "")
    where = f"{len(rows)} of {len(ones)} rows ({shown})"
    if is_none:
        return f"none in {where}"
    return f"{ratio:.5g} times what it should be in {where}"


def _few_elements(found: torch.Tensor, right: torch.Tensor, *, limit: float) -> str:
    """Returns where a gradient is another, if that is in few elements or rows; "" otherwise."""
    wrong = (found - right).abs() > limit * right.norm() / right.numel() ** 0.5
    count = int(wrong.sum())
    if found.dim() < 2:
        if 2 * count < found.numel():
            return f"another in {count} of {found.numel()} elements"
        return ""
    rows = int(wrong.any(1).sum())
    if count == 1:
        return f"another in 1 of {found.numel()} elements"
    if 2 * rows < len(found):
        first = int(wrong.any(1).nonzero()[0])
        return f"another in {rows} of {len(found)} rows, first in row {first}"
    columns = int(wrong.any(0).sum())
    if 2 * columns < found.shape[1]:
        return f"another in {columns} of {found.shape[1]} columns"
    return ""


def explains(
    candidate: torch.Tensor, found: torch.Tensor, right: torch.Tensor, *, limit: float
) -> bool:
    """Returns whether a candidate is what was found, and the right tensor is clearly less so, as
    where limits are wide."""
    apart = float((found - candidate).norm())
    return apart <= CLEARLY * float((found - right).norm()) and _same(found, candidate, limit)


def _same(found: torch.Tensor, right: torch.Tensor, limit: float) -> bool:
    return bool(float((found - right).norm()) <= limit * float(right.norm()))


def _rounded_to(found: torch.Tensor, right: torch.Tensor) -> str:
    """Returns the dtype to which rows were rounded; "" if to none."""
    for dtype, name in ROUNDED.items():
        is_rounded = bool((found.float().to(dtype).double() == found).all())
        if is_rounded and _same(found, right, 2 * torch.finfo(dtype).eps):
            return name
    return ""
