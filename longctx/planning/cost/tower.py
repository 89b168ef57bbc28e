"""Tower: the work of an encoder of images, and the time that it takes on a ring.

An image is encoded whole by one rank. Its matrices multiply every patch, its attention reaches over
a frame or a window, and what merges patches multiplies every token. The planner takes a tower to be
as fast, per operation, as the model's matrices.
"""

import heapq
import math
from dataclasses import dataclass

import numpy as np

from longctx.planning.assignment import Integers
from longctx.planning.image_work import NO_IMAGES, Grid, ImageWork, ImageWorks


@dataclass(frozen=True)
class TowerSpec:
    """Sizes of an encoder of images and of what projects its features.

    Attributes:
        patch_weights, block_weights, token_weights: parameters that multiply every patch before the
            blocks, every patch in a block, and every token of an image after them.
        blocks, windowed, unused: number of blocks, of blocks with attention in windows, and of the
            last ones, whose output is not used: they have no backward.
        width: query heads × head size.
        merge, window: patches along the edge of a token, and tokens along the edge of a window.
        patches: patches of every image, if all are alike; None: those of its grid.
        more: rows beside the patches, such as that of a class.
    """

    patch_weights: int
    block_weights: int
    token_weights: int
    blocks: int
    width: int
    windowed: int = 0
    unused: int = 0
    merge: int = 1
    window: int = 0
    patches: int | None = None
    more: int = 0

    def flops(self, tokens: int, grid: Grid, trained: float) -> int:
        """Returns the operations of forward and backward for an image of so many tokens.

        `trained` is the share of the parameters with gradients, by which backward counts. Patches
        need no gradient of pixels.
        """
        time, height, width = grid if self.patches is None else (1, 1, self.patches)
        frame = height * width + self.more
        seen = (self.blocks - self.windowed) * frame * frame
        if self.windowed:
            edge = self.merge * self.window
            seen += self.windowed * _squares(height, edge) * _squares(width, edge)
        before = 2 * self.patch_weights * time * height * width
        after = 2 * self.token_weights * tokens
        blocks = 2 * time * (self.blocks * self.block_weights * frame + 2 * self.width * seen)
        backward = before + 2 * (blocks * (self.blocks - self.unused) // self.blocks + after)
        return before + blocks + after + round(trained * backward)


def _squares(length: int, part: int) -> int:
    """Returns the sum of the squared sizes of the parts that a length is cut into."""
    return length // part * part**2 + (length % part) ** 2


@dataclass(frozen=True)
class TowerSpeed:
    """A tower of whose parameters a share is `trained`, and its seconds per operation."""

    spec: TowerSpec
    trained: float
    s_per_flop: float

    def work(self, tokens: int, grid: Grid) -> ImageWork:
        flops = self.spec.flops(tokens, grid, self.trained)
        return ImageWork(math.prod(grid), flops, math.ceil(flops * (self.s_per_flop * 1e9)))


class EncodingTimes:
    """Time that the images of documents take on the ranks of a ring, which has no other images."""

    def __init__(self, images: ImageWorks) -> None:
        self.works = images
        # Largest first.
        self._images = {
            document: sorted(works, key=lambda work: -work.patches)
            for document, works in images.items()
        }
        self.whole_ns = sum(work.time_ns for works in images.values() for work in works)
        """Sum over all images."""
        # Of images, by document.
        self._counts = np.zeros(1 + max(images, default=0), dtype=np.int64)
        for document, works in images.items():
            self._counts[document] = len(works)
        # By number of ranks.
        self._found = np.full((len(self._counts), 1 + int(self._counts.max())), -1, dtype=np.int64)
        self._found[:, 0] = 0

    def ring_ns(self, documents: Integers, degrees: Integers) -> Integers:
        """Returns the nanoseconds of the rank that encodes longest, for documents at degrees; both
        may be broadcast."""
        documents, degrees = np.broadcast_arrays(documents, degrees)
        if not self.whole_ns:
            return np.zeros(documents.shape, dtype=np.int64)
        last = len(self._counts) - 1
        rows = np.minimum(documents, last)
        ranks = np.where(documents <= last, np.minimum(degrees, self._counts[rows]), 0)
        result: Integers = self._found[rows, ranks]
        new = result < 0
        if new.any():
            for document, count in set(zip(rows[new].tolist(), ranks[new].tolist(), strict=True)):
                self._found[document, count] = self._busiest_ns(document, count)
            result = self._found[rows, ranks]
        return result

    def _busiest_ns(self, document: int, ranks: int) -> int:
        """As `spread_images` spreads the images of one document, which is quicker with a heap of
        patches · ranks + rank."""
        works = self._images[document]
        times = [work.time_ns for work in works[:ranks]]
        loads = [work.patches * ranks + rank for rank, work in enumerate(works[:ranks])]
        heapq.heapify(loads)
        for work in works[ranks:]:
            load = loads[0]
            heapq.heapreplace(loads, load + work.patches * ranks)
            times[load % ranks] += work.time_ns
        return max(times)


NO_ENCODING = EncodingTimes(NO_IMAGES)
