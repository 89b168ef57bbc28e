"""Masks: which tokens of a document see which, as the few areas of queries and keys that a schedule cuts up.

A token always sees itself, and never a token of another document. Every mask is a union of disjoint rectangles of (query, key)
positions, each with a band along the diagonal; a rank's part of it is such a rectangle cut to the chunks that it holds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from longctx.attention.segments import Segment
from longctx.errors import UserError


class MaskError(UserError):
    """A mask that contradicts itself."""


@dataclass(frozen=True)
class Mask:
    """Who sees whom inside a document.

    Attributes:
        causal: a token sees itself and earlier ones; otherwise later ones too (encoders).
        window: a token sees the `window` nearest tokens only, itself counted: window - 1 before it and, if not causal, as many
            after it. None: all.
        sinks: so many first tokens of the document are seen (by all later ones if causal) whatever the window.
        prefix: {document: tokens}, by the plan's number of the document: so many first tokens (a prompt) see each other in both
            directions, whatever the window.
    """

    causal: bool = True
    window: int | None = None
    sinks: int = 0
    prefix: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise MaskError(f"window is {self.window}: a token sees at least itself, so give 1 or more, or None for no window")
        if self.sinks < 0 or any(tokens < 0 for tokens in self.prefix.values()):
            raise MaskError(f"sinks is {self.sinks}, prefix {dict(self.prefix)}: numbers of tokens are 0 or more")
        if self.sinks and self.window is None:
            raise MaskError(
                f"sinks is {self.sinks} without a window: every token is seen anyway; give a window or leave it out"
            )
        if any(self.prefix.values()) and not self.causal:
            raise MaskError("prefix with causal=False: tokens see each other in both directions anyway; leave one of them out")

    def areas(self, document: int, length: int) -> list[Segment]:
        """Disjoint areas of [queries, keys] positions that together are all that is visible in a document of that length."""
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
        """Boolean [length, length]: which keys each query sees; dense, for references and small documents."""
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
