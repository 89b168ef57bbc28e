"""Groups of documents that follow each other: what the index of a store has of each, so that a
sampler need not look at all documents."""

import numpy as np

GROUP = 256
"""Documents of which the pieces are counted together."""
GROUPS = np.dtype(
    [("tokens", "<i8"), ("longest", "<i4"), ("learned", "<i4"), ("longest_of_all", "<i8")]
)
"""What is known of a group: tokens, greatest length and number of its documents with a target, and
the greatest length of all."""
