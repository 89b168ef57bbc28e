"""Image work: what images cost, and which ranks of a ring encode them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

Grid = tuple[int, int, int]
"""Time, height and width of an image in patches, or in pixels if all images are alike."""


class ImageWork(NamedTuple):
    """Work of one image: its patches, the operations of forward and backward, and their time in
    nanoseconds."""

    patches: int
    flops: int
    time_ns: int


ImageWorks = Mapping[int, Sequence[ImageWork]]
"""Work of the images of documents, by document; documents without images are missing."""
NO_IMAGES: ImageWorks = {}


def spread_images(patches: Sequence[int], rings: Sequence[Sequence[int]]) -> list[int]:
    """Returns the rank that encodes each image of a micro-batch: large ones first, each on the rank
    with the fewest patches.

    `patches` and `rings` are the patches of every image, and the ranks of its document.
    """
    load, found = Counter[int](), [0] * len(patches)
    for image in sorted(range(len(patches)), key=lambda image: -patches[image]):
        found[image] = rank = min(rings[image], key=lambda rank: (load[rank], rank))
        load[rank] += patches[image]
    return found
