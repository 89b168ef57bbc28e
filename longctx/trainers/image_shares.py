"""Image shares: which rank encodes which images of a micro-batch, which features travel to which
ranks, and their positions.

Images are encoded by the ranks of their document's ring, evenly by patches. All of this is a pure
function of the plan and of the places of the images, so that every rank knows what it sends and
receives.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from longctx.attention.host_to_device import copy_to
from longctx.data.packing import MicroBatch
from longctx.errors import UserError
from longctx.hf.vision import IN_BOTH_DIRECTIONS, ImagePlace, Images, image_positions, video_token
from longctx.parallel.all_to_all import exchange_rows
from longctx.planning.image_work import spread_images
from longctx.planning.layout import Layout, Placement, Shard, Span
from longctx.planning.plan import Plan

Image = tuple[int, int]
"""Document of the plan, and number of the image in it."""
Pixels = Mapping[str, torch.Tensor]
"""What an image processor makes of some images: arguments of a tower."""
Places = Mapping[int, Sequence[ImagePlace]]
"""Places of the images of documents, by the document's index in the plan; documents without images
may be missing."""


@dataclass(frozen=True)
class ImageShare:
    """Images of a micro-batch, from the view of one rank.

    Attributes:
        pixels: of the images that this rank encodes, one after the other; of a blank image if there
            are none.
        sent_rows: int64 [sent]; features that travel, in the order of the ranks that they are sent
            to.
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


@dataclass(frozen=True, kw_only=True)
class WithImages(MicroBatch):
    """A micro-batch of which some rank has images."""

    images: ImageShare


def share_images(
    plan: Plan, layout: Layout, places: Places, read: Callable[[Sequence[Image]], Pixels]
) -> ImageShare | None:
    """Returns the images of a micro-batch for the rank of `layout`; None if no rank has any.

    `read` returns the pixels of images, or of a blank one if it is given none.
    """
    placements = {
        place.document: place
        for place in plan.micro_batches[layout.micro_batch]
        if places.get(place.document)
    }
    if not placements:
        return None
    rank = layout.rank
    shards = {shard.document: shard for shard in layout.shards}
    encoding = encoding_ranks(placements, places)
    none = np.zeros(0, np.int64)
    receivers: list[npt.NDArray[np.int64]] = [none]
    rows: list[list[npt.NDArray[np.int64]]] = [[none] for _ in range(plan.ranks)]
    for (document, number), sender in encoding.items():
        place = places[document][number]
        positions = np.arange(place.start, place.start + place.tokens)
        holders = _holders(placements[document], plan.lengths[document], positions)
        if sender == rank:
            receivers.append(holders)
        if document in shards:
            rows[sender].append(_rows_in_shard(shards[document], positions[holders == rank]))
    to = np.concatenate(receivers)
    arrived = [np.concatenate(parts) for parts in rows]
    order = np.argsort(np.concatenate(arrived), kind="stable")
    return ImageShare(
        pixels=read([image for image, sender in encoding.items() if sender == rank]),
        sent_rows=torch.from_numpy(np.argsort(to, kind="stable")),
        sent=tuple(np.bincount(to, minlength=plan.ranks).tolist()),
        received=tuple(map(len, arrived)),
        order=torch.from_numpy(order),
        places={document: places[document] for document in shards if places.get(document)},
    )


def _rows_in_shard(shard: Shard, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns the rows of a rank's buffer that hold positions of a document."""
    in_head = positions + shard.offset - shard.head[0]
    in_tail = positions + shard.offset + shard.head_tokens - shard.tail[0]
    rows: npt.NDArray[np.int64] = np.where(positions < shard.head[1], in_head, in_tail)
    return rows


def encoding_ranks(placements: Mapping[int, Placement], places: Places) -> dict[Image, int]:
    """Returns the rank that encodes each image: large ones first, each on the rank of the ring with
    the fewest patches."""
    images = [
        (document, number)
        for document in sorted(placements)
        for number in range(len(places[document]))
    ]
    patches = [places[document][number].patches for document, number in images]
    rings = [placements[document].ring for document, _ in images]
    return dict(zip(images, spread_images(patches, rings), strict=True))


def _holders(
    placement: Placement, length: int, positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Returns the ranks that hold positions of a document; see `longctx.planning.layout`."""
    chunks = 2 * placement.degree
    edges = np.arange(chunks + 1) * length // chunks
    chunk = np.searchsorted(edges, positions, side="right") - 1
    index = np.minimum(chunk, chunks - 1 - chunk)
    ranks: npt.NDArray[np.int64] = placement.first_rank + (
        placement.degree - 1 - index if placement.reversed else index
    )
    return ranks


def read_images(
    micro_batch: WithImages, hf: Any, group: dist.ProcessGroup | None, device: torch.device
) -> tuple[Images, torch.Tensor]:
    """Returns the images of a micro-batch, and the positions of its tokens, on the device.

    These are [tokens], or [axes, tokens] if the code of the model `hf` gives tokens of images
    several positions. `group` has the ranks of the domain; None: there is one.
    """
    share = micro_batch.images
    pixels = {name: copy_to(value, device) for name, value in share.pixels.items()}
    several = _positions(micro_batch, share, hf)
    images = Images(
        pixels, partial(_share, share, group), _rows_of_kinds(micro_batch.tokens, hf, device)
    )
    return images, copy_to(micro_batch.positions if several is None else several, device)


def _rows_of_kinds(
    tokens: torch.Tensor, hf: Any, device: torch.device
) -> dict[str, torch.Tensor | slice]:
    """Returns the rows of images and of videos among the features of `tokens`; all of them if there
    is one kind."""
    kinds = {"image": hf.config.image_token_id}
    video = video_token(hf)
    if video is not None:
        kinds["video"] = video
    shown = tokens[torch.isin(tokens, torch.tensor(list(kinds.values())))]
    rows = {}
    for kind, token in kinds.items():
        rows_of_kind = (shown == token).nonzero()[:, 0]
        if len(rows_of_kind):
            rows[kind] = rows_of_kind
    if len(rows) == 1:
        return {kind: slice(None) for kind in rows}
    return {kind: copy_to(rows_of_kind, device) for kind, rows_of_kind in rows.items()}


def blocks_of(micro_batch: MicroBatch, hf: Any) -> dict[int, list[Span]]:
    """Returns the spans of images, by document, whose tokens see each other in both directions: of
    Gemma 3 all images.

    `hf` is the model of transformers.
    """
    if not isinstance(micro_batch, WithImages) or hf.config.model_type not in IN_BOTH_DIRECTIONS:
        return {}
    held = micro_batch.images.places
    return {
        document: [(place.start, place.start + place.tokens) for place in places]
        for document, places in held.items()
    }


def _share(
    share: ImageShare, group: dist.ProcessGroup | None, features: torch.Tensor
) -> torch.Tensor:
    """Returns the features of this rank's rows [rows, hidden], given the features of the images
    that it encodes. Collective."""
    device = features.device
    expected = len(share.sent_rows)
    if expected and len(features) != expected:
        raise UserError(
            f"the model makes {len(features)} features of images that have {expected} tokens: "
            "make documents by the processor of the model"
        )
    rows = features[copy_to(share.sent_rows, device)]
    arrived = rows if group is None else exchange_rows(rows, share.sent, share.received, group)
    return arrived[copy_to(share.order, device)]


def _positions(micro_batch: MicroBatch, share: ImageShare, hf: Any) -> torch.Tensor | None:
    """Returns the positions [axes, tokens] of this rank's rows; None if each token has one
    position."""
    found = None
    for shard in micro_batch.layout.shards:
        if shard.document not in share.places:
            continue
        whole = image_positions(hf, shard.length, share.places[shard.document])
        if whole is None:
            return None
        found = micro_batch.positions.expand(len(whole), -1).clone() if found is None else found
        held = torch.cat([whole[:, slice(*shard.head)], whole[:, slice(*shard.tail)]], dim=1)
        found[:, shard.offset : shard.offset + shard.tokens] = held
    return found
