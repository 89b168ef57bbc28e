"""Attention for models with different sliding windows per layer: one ring attention per window."""

from collections.abc import Callable, Sequence

from longctx.attention.ring import RingAttention
from longctx.attention.ulysses import HybridAttention

Attend = Callable[[int | None], RingAttention | HybridAttention]
"""Builds the attention for layers with a given window."""


class LayerAttention:
    """The attention of every layer of a micro-batch; `windows` has one window per layer of the
    model."""

    def __init__(self, windows: Sequence[int | None], attend: Attend) -> None:
        self.windows = windows
        self.of_window = {window: attend(window) for window in windows}

    def of_layer(self, layer: int) -> RingAttention | HybridAttention:
        return self.of_window[self.windows[layer]]

    @property
    def last(self) -> str:
        """Layer and pass that this rank entered last, per window; for error messages."""
        return ", ".join(
            f"{attention.last} (window {window})" for window, attention in self.of_window.items()
        )


PackedAttention = RingAttention | HybridAttention | LayerAttention
"""Attention of all layers of a micro-batch."""


def by_layer(windows: Sequence[int | None], attend: Attend) -> PackedAttention:
    """Builds one attention for all layers, or one per window if the windows differ."""
    return LayerAttention(windows, attend) if len(set(windows)) > 1 else attend(windows[0])
