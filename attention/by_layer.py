"""Attention of a micro-batch in a model whose layers see different windows: one ring attention for each window."""

from collections.abc import Callable, Sequence

from longctx.attention.ring import RingAttention
from longctx.attention.ulysses import HybridAttention

Attend = Callable[[int | None], RingAttention | HybridAttention]
"""From a window to the attention of layers that have it."""


class LayerAttention:
    """The attention of every layer; `windows` are those of all layers of the model."""

    def __init__(self, windows: Sequence[int | None], attend: Attend) -> None:
        self.windows = windows
        self.of_window = {window: attend(window) for window in windows}

    def of_layer(self, layer: int) -> RingAttention | HybridAttention:
        return self.of_window[self.windows[layer]]

    @property
    def last(self) -> str:
        """Layer and pass that this rank entered last for every window, for error messages."""
        return ", ".join(f"{attention.last} (window {window})" for window, attention in self.of_window.items())


PackedAttention = RingAttention | HybridAttention | LayerAttention
"""Attention of all layers of a micro-batch."""


def by_layer(windows: Sequence[int | None], attend: Attend) -> PackedAttention:
    """One attention for all layers, unless their windows differ."""
    return LayerAttention(windows, attend) if len(set(windows)) > 1 else attend(windows[0])
