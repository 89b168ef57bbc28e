"""Image shares: which rank encodes which images of a micro-batch, and which features travel to which ranks.

Images are encoded by the ranks of their document's ring, evenly by patches. All of this is a pure function of the plan and of
the places of the images, so that every rank knows what it sends and receives.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from longctx.data.image_sources import ImagePlace
from longctx.planning.image_work import spread_images
from longctx.planning.layout import Layout, Placement
from longctx.planning.plan import Plan

Image = tuple[int, int]
"""Document of the plan, and number of the image in it."""
Pixels = Mapping[str, torch.Tensor]
"""What an image processor makes of some images: arguments of a tower."""
Places = Mapping[int, Sequence[ImagePlace]]
"""Places of the images of documents, by the document's index in the plan; documents without images may be missing."""


@dataclass(frozen=True)
class ImageShare:
    """Images of a micro-batch, from the view of one rank.

    Attributes:
        pixels: of the images that this rank encodes, one after the other; of a blank image if there are none.
        sent_rows: int64 [sent]; features that travel, in the order of the ranks that they are sent to.
        sent, received: number of features sent to each rank of the domain, and received from it.
        order: int64 [received]; puts received features into the order of this rank's rows.
        places: of the images of the documents that this rank holds.
    """

    pixels: Pixels
    sent_rows: torch.Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]
    order: torch.Tensor
    places: Places


def share_images(plan: Plan, layout: Layout, places: Places, read: Callable[[Sequence[Image]], Pixels]) -> ImageShare | None:
    """Returns the images of a micro-batch for the rank of `layout`; None if no rank has any.

    `read` returns the pixels of images, or of a blank one if it is given none.
    """
    placements = {place.document: place for place in plan.micro_batches[layout.micro_batch] if places.get(place.document)}
    if not placements:
        return None
    encoding, rank, shards = encoding_ranks(placements, places), layout.rank, {shard.document: shard for shard in layout.shards}
    receivers: list[npt.NDArray[np.int64]] = []
    rows: list[list[npt.NDArray[np.int64]]] = [[] for _ in range(plan.ranks)]
    for (document, number), sender in encoding.items():
        place, placement = places[document][number], placements[document]
        positions = np.arange(place.start, place.start + place.tokens)
        holders = _holders(placement, plan.lengths[document], positions)
        if sender == rank:
            receivers.append(holders)
        if document in shards:
            shard, here = shards[document], positions[holders == rank]
            tail = shard.offset + shard.head_tokens - shard.tail[0]
            rows[sender].append(np.where(here < shard.head[1], here + shard.offset - shard.head[0], here + tail))
    to = np.concatenate([*receivers, np.zeros(0, np.int64)])
    arrived = [np.concatenate([*parts, np.zeros(0, np.int64)]) for parts in rows]
    return ImageShare(
        read([image for image, sender in encoding.items() if sender == rank]),
        torch.from_numpy(np.argsort(to, kind="stable")),
        tuple(np.bincount(to, minlength=plan.ranks).tolist()),
        tuple(map(len, arrived)),
        torch.from_numpy(np.argsort(np.concatenate(arrived), kind="stable")),
        {document: places[document] for document in shards if places.get(document)},
    )


def encoding_ranks(placements: Mapping[int, Placement], places: Places) -> dict[Image, int]:
    """Returns the rank that encodes each image: large ones first, each on the rank of the ring with the fewest patches."""
    images = [(document, number) for document in sorted(placements) for number in range(len(places[document]))]
    patches = [places[document][number].patches for document, number in images]
    return dict(zip(images, spread_images(patches, [placements[document].ring for document, _ in images]), strict=True))


def _holders(placement: Placement, length: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns the ranks that hold positions of a document; see `longctx.planning.layout`."""
    chunks = 2 * placement.degree
    edges = np.arange(chunks + 1) * length // chunks
    chunk = np.searchsorted(edges, positions, side="right") - 1
    index = np.minimum(chunk, chunks - 1 - chunk)
    ranks: npt.NDArray[np.int64] = placement.first_rank + (placement.degree - 1 - index if placement.reversed else index)
    return ranks
