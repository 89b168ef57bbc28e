"""Sizes of a block with indexed attention: an indexer scores all pairs of tokens, and every query
attends to the keys with the best scores.

No fused kernel is used for both: all scores of attention are computed, in float32, and those of
other keys hidden. So it costs (1 + ι) · L² where dense attention costs L², ι being the share of the
indexer, whose scores have no gradient.
"""

from dataclasses import dataclass, fields
from typing import NamedTuple

from longctx.planning.cost.spec import LayerSpec

PASSES = 3.5
"""Operations of attention in forward and backward, relative to those of forward."""
INT32 = 4


class Index(NamedTuple):
    """What selects the keys of a block.

    Attributes:
        heads, dim: heads and head size of its indexer; 0: it uses what an earlier block selected.
        selected: keys of each query; 0: all.
        lent: whether later blocks use what its indexer selected.
    """

    heads: int = 0
    dim: int = 0
    selected: int = 0
    lent: bool = False


@dataclass(frozen=True, kw_only=True)
class IndexedLayer(LayerSpec):
    """`LayerSpec` of a block of a model with indexed attention."""

    index: Index

    def attention_in(self, other: LayerSpec) -> LayerSpec:
        return with_index(super().attention_in(other), self.index)

    def pair_values(self, float32: float = 1.0) -> float:
        dense = super().pair_values()
        if not self.index.selected:
            return dense
        scored = self.index.heads * self.index.dim / PASSES
        return float32 * (dense + scored)

    def attention_flops(self, length: int) -> int:
        dense = super().attention_flops(length)
        if length <= self.index.selected:
            return dense
        return dense + 2 * self.index.heads * self.index.dim * length**2

    def sent_values(self, tensor: int) -> int:
        # Index keys travel in one of the three passes that are counted.
        return super().sent_values(tensor) + -(-self.index.dim // 3)

    @property
    def selection_bytes(self) -> int:
        return self._bytes * (not self.index.lent)

    @property
    def lent_bytes(self) -> int:
        return self._bytes * self.index.lent

    @property
    def _bytes(self) -> int:
        own = self.index.heads > 0
        return own * INT32 * self.index.selected


def with_index(layer: LayerSpec, index: Index) -> IndexedLayer:
    """Returns a block with indexed attention, otherwise as `layer`."""
    sizes = {field.name: getattr(layer, field.name) for field in fields(LayerSpec)}
    return IndexedLayer(**sizes, index=index)
