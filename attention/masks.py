"""Masks: visibility between the tokens of a document, as a few areas of queries and keys that a schedule cuts up.

A token always sees itself, and never a token of another document. Every mask is a union of disjoint rectangles of (query, key)
positions, each with a band along the diagonal; a rank's part is a rectangle cut to the chunks of the rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from longctx.attention.segments import Segment
from longctx.errors import UserError


class MaskError(UserError):
    """A mask with invalid or contradictory settings."""


@dataclass(frozen=True)
class Mask:
    """The visibility of tokens inside a document.

    Attributes:
        causal: whether a token sees only itself and earlier tokens; if False it also sees later tokens (encoders).
        window: number of nearest tokens that a token sees, including itself: window - 1 before it and, if not causal, as many
            after it. None: all tokens.
        sinks: number of first tokens of a document that are visible (with `causal`, to later tokens) outside the window too.
        prefix: {document: tokens}, with the document's index in the plan: number of first tokens (a prompt) that see each other
            in both directions, regardless of the window.
    """

    causal: bool = True
    window: int | None = None
    sinks: int = 0
    prefix: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise MaskError(f"window is {self.window}: must be at least 1, as a token sees itself, or None for no window")
        if self.sinks < 0 or any(tokens < 0 for tokens in self.prefix.values()):
            raise MaskError(f"sinks is {self.sinks}, prefix is {dict(self.prefix)}: numbers of tokens must be 0 or more")
        if self.sinks and self.window is None:
            raise MaskError(
                f"sinks is {self.sinks} without a window, so every token is visible anyway: set a window, or leave sinks out"
            )
        if any(self.prefix.values()) and not self.causal:
            raise MaskError(
                "prefix is given with causal=False, where tokens see each other in both directions anyway: leave one out"
            )

    def areas(self, document: int, length: int) -> list[Segment]:
        """Returns disjoint areas of (query, key) positions that cover exactly what is visible in a document."""
        prompt = min(self.prefix.get(document, 0), length)
        sinks = min(self.sinks, length)
        lo = None if self.window is None else 1 - self.window
        hi = 0 if self.causal else None if self.window is None else self.window - 1
        whole = Segment(0, length, 0, length, lo, hi)
        rest = prompt, length
        areas = [
            Segment(0, prompt, 0, prompt),
            Segment(0, length, 0, length, None, 0 if self.causal else None).cut(rest, (0, sinks)),
            whole.cut(rest, (sinks, length)),
        ]
        return [area for area in areas if not area.empty]

    def visible(self, document: int, length: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Returns a boolean tensor [length, length]: the keys that each query sees. Dense, for references and tests."""
        query = torch.arange(length, device=device).unsqueeze(1)
        key = torch.arange(length, device=device).unsqueeze(0)
        seen = torch.ones(length, length, dtype=torch.bool, device=device)
        if self.window is not None:
            seen &= ((query - key).abs() < self.window) | (key < self.sinks)
        if self.causal:
            seen &= key <= query
        prompt = self.prefix.get(document, 0)
        return seen | ((query < prompt) & (key < prompt))


CAUSAL = Mask()
EVERYTHING = Mask(causal=False)
