"""Work overrides: what the planner takes documents to cost where their lengths do not say it, as in
trees and encoder-decoders."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longctx.planning.assignment import Integers
from longctx.planning.parts import EQUAL_PARTS, PartCosts
from longctx.planning.tree import NO_TREES, Trees

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class WorkOverrides:
    """Costs of documents; arrays [documents], or any shape that broadcasts with their lengths and
    degrees.

    Attributes:
        pairs: attention area: the length squared, or that of a tree (`Tree.pairs`); None: the
            former.
        products: tokens beyond the length, or below it, as which the matrices count; None: none.
        keys: tokens with as many bytes of K and V; None: the length.
    """

    pairs: Floats | None = None
    products: Floats | None = None
    keys: Floats | None = None

    @classmethod
    def of(
        cls,
        lengths: Integers,
        trees: Trees = NO_TREES,
        sources: Sequence[int] = (),
        parts: PartCosts = EQUAL_PARTS,
    ) -> "WorkOverrides":
        """Returns the overrides of documents, of which some are trees, or all have sources.

        A decoder's attention to its n tokens counts n², to a source of s tokens 2·n·s, and the
        encoder's, in both directions, 2·s², times its size relative to the decoder's.
        """
        s = lengths.astype(np.float64)
        if sources:
            read = np.array(sources, dtype=np.float64)
            uneven = 2 * read - s  # tokens of the source less those of the target
            return cls(
                pairs=(s - read) * (s + read) + 2 * parts.attention * read * read,
                products=(parts.products - 1) * uneven,
                keys=s + (parts.keys - 1) * uneven,
            )
        pairs = s * s
        keys = s.copy()
        for document, tree in trees.items():
            pairs[document] = tree.pairs
            keys[document] = tree.sent
        return cls(pairs, keys=keys if (keys < s).any() else None)

    def __getitem__(self, documents: Any) -> "WorkOverrides":
        """Returns the overrides of some documents, by an index of arrays."""
        return WorkOverrides(
            pairs=None if self.pairs is None else self.pairs[documents],
            products=None if self.products is None else self.products[documents],
            keys=None if self.keys is None else self.keys[documents],
        )


NO_OVERRIDES = WorkOverrides()
