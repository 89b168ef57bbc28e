"""Parts of the records of an encoder-decoder: what a token of a source, and of a target, costs."""

from typing import NamedTuple


class PartCosts(NamedTuple):
    """Costs of tokens relative to the mean of one of a source and one of a target, which a hardware
    profile describes.

    Attributes:
        attention: operations of the encoder's attention per pair of tokens, relative to the
            decoder's.
        products: operations of matrices per token of a source; one of a target has 2 - this.
        keys: bytes of K and V per token of a source, which its cross-attention needs too; one of a
            target has 2 - this.
    """

    attention: float = 1.0
    products: float = 1.0
    keys: float = 1.0


EQUAL_PARTS = PartCosts()
