"""Ways to train that people have today, as `longctx compare --against` names them."""

from dataclasses import dataclass

from longctx.errors import UserError
from longctx.units import whole_number

SIZES = {
    "trl-packing": "ROW_TOKENS",
    "batch-rebalance": "",
    "padding": "DOCUMENTS",
    "megatron": "",
    "cp": "DEGREE",
}
"""Way → the number that may follow its name after a colon; empty if none may."""
NEEDS_SIZE = ("cp",)
AUTO = ("trl-packing", "batch-rebalance", "padding", "megatron")
"""Ways that `auto` stands for."""


@dataclass(frozen=True)
class Way:
    """A way to train, and its number: tokens of a row, documents of a rank in a micro-batch, or the
    degree; None: chosen."""

    kind: str
    size: int | None = None


def read_ways(text: str) -> tuple[Way, ...]:
    """Reads `trl-packing,cp:8`, or `auto`, each way once. Raises UserError for unknown ways and
    wrong numbers."""
    ways: list[Way] = []
    for word in text.split(","):
        if word.strip() == "auto":
            ways += [Way(kind) for kind in AUTO]
        else:
            ways.append(_read_way(word.strip()))
    return tuple(dict.fromkeys(ways))


def _read_way(word: str) -> Way:
    kind, colon, number = word.partition(":")
    if kind not in SIZES:
        raise UserError(f"{word!r} is no way to train that is known: give {known_ways()}")
    if kind in NEEDS_SIZE and not colon:
        raise UserError(f"{word!r} has no {SIZES[kind].lower()}: write it as in {kind}:8")
    if not colon:
        return Way(kind)
    if not SIZES[kind]:
        raise UserError(f"{word!r}: {kind} takes no number: write {kind}")
    size = whole_number(number)
    if not size:
        raise UserError(f"{word!r}: {number!r} is not a whole number ≥ 1, as in {kind}:8")
    return Way(kind, size)


def known_ways() -> str:
    """Returns all ways as a user writes them."""
    words = []
    for kind, size in SIZES.items():
        if not size:
            words.append(kind)
        elif kind in NEEDS_SIZE:
            words.append(f"{kind}:{size}")
        else:
            words.append(f"{kind}[:{size}]")
    return f"{', '.join(words)} or auto"
