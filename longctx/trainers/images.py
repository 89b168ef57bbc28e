"""Images of documents in the batches of a trainer: found beside their tokens, sent to the ranks that encode them, and read.

A collator returns the pixels of all images of a batch one after the other, as TRL's DataCollatorForVisionLanguageModeling
does; so they are in the order of the image tokens.
"""

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from longctx.data.image_shares import Image, Pixels, encoding_ranks
from longctx.data.image_sources import ImagePlace
from longctx.model.vision import IN_BOTH_DIRECTIONS, Images, encoded
from longctx.parallel.all_to_all import exchange_rows
from longctx.planning.image_work import Grid
from longctx.planning.plan import Plan
from longctx.trainers.exchange import Known
from longctx.trainers.refusals import TrainerError

OF_IMAGES = ("pixel_values", "image_grid_thw", "token_type_ids", "mm_token_type_ids")
"""Fields of a batch that tell of images; the types of tokens follow from the token ids."""


@dataclass(frozen=True)
class DocumentImages:
    """Images of a document: their places, and their pixels, one image after the other.

    `pixels` are [patches, values] of models that take images of any size, or else [images, channels, height, width].
    """

    places: tuple[ImagePlace, ...]
    pixels: torch.Tensor

    @property
    def kind(self) -> torch.Tensor:
        """The pixels of no image: an empty tensor of the same type."""
        return self.pixels.new_empty(0, *self.pixels.shape[1:])

    def of(self, image: int) -> torch.Tensor:
        """Returns the pixels of an image."""
        sizes = [rows_of_image(place, self.pixels) for place in self.places]
        return self.pixels[sum(sizes[:image]) : sum(sizes[: image + 1])]


def rows_of_image(place: ImagePlace, pixels: torch.Tensor) -> int:
    """Returns how many rows of `pixels` an image has."""
    return place.patches if pixels.dim() == 2 else 1


def images_of_rows(hf: Any, batch: Mapping[str, Any], rows: Sequence[npt.NDArray[Any]]) -> list[DocumentImages | None]:
    """Returns the images of every row of a batch, from the token ids of `rows` without padding.

    Raises TrainerError if images and tokens of images do not match.
    """
    pixels, grids = batch["pixel_values"].cpu(), batch.get("image_grid_thw")
    at = [np.flatnonzero(ids == hf.config.image_token_id) for ids in rows]
    sizes: list[tuple[Grid, int]] = [((1, *pixels.shape[-2:]), sum(map(len, at)) // len(pixels))] * len(pixels)
    if grids is not None:
        sizes = [(tuple(grid), np.prod(grid) // merge_size(hf) ** 2) for grid in grids.tolist()]
    if hf.config.model_type in IN_BOTH_DIRECTIONS and batch.get("token_type_ids") is None:
        raise TrainerError(
            f"the data collator returns no token_type_ids, by which {type(hf).__name__} lets the tokens of an image see each "
            "other: return them, as its processor does"
        )
    found: list[DocumentImages | None] = []
    images, first = iter(sizes), 0
    for row, tokens in enumerate(at):
        places: list[ImagePlace] = []
        while len(tokens):
            grid, count = next(images, ((0, 0, 0), 0))
            run, tokens = tokens[:count], tokens[count:]
            after = places[-1].start + places[-1].tokens if places else -1
            if not count or len(run) < count or run[-1] - run[0] != count - 1 or run[0] == after:
                raise TrainerError(
                    f"the tokens of images in row {row} of a batch are not those of its images: do not cut documents "
                    "(max_length=None), and let the processor of the model write these tokens"
                )
            places.append(ImagePlace(int(run[0]), int(count), grid))
        last = first + sum(rows_of_image(place, pixels) for place in places)
        found.append(DocumentImages(tuple(places), pixels[first:last]) if places else None)
        first = last
    if next(images, None) is not None:
        raise TrainerError("a batch has more images than its tokens of images need: do not cut documents (max_length=None)")
    return found


def merge_size(hf: Any) -> int:
    """Returns how many patches, along each side, become one token."""
    return int(hf.config.vision_config.spatial_merge_size)


def exchange_pixels(
    hf: Any, plan: Plan, documents: Sequence[Known], own: Mapping[int, DocumentImages], rank: int, group: Any
) -> Callable[[Sequence[Image]], Pixels]:
    """Sends the pixels of a step to the ranks that encode them. Collective.

    `documents` are those of the plan, of which some have images; `own` are the images of this rank's documents, by number.
    Returns a function of images that this rank encodes, which returns their pixels, or those of a blank image for none.
    Raises TrainerError on all ranks if pixels are of several kinds.
    """
    kinds = {(each.pixels.shape, each.pixels.dtype): each.pixels for each in documents if each.pixels is not None}
    if len(kinds) > 1:
        named = " and ".join(f"{list(shape[1:])} of {dtype}" for shape, dtype in kinds)
        raise TrainerError(f"images have pixel_values {named}: make those of all documents by one image processor")
    (kind,) = kinds.values()
    places = {number: document.places for number, document in enumerate(documents) if document.places}
    sent: list[list[torch.Tensor]] = [[] for _ in range(plan.ranks)]
    received: list[list[Image]] = [[] for _ in range(plan.ranks)]
    for micro_batch in plan.micro_batches:
        placements = {placed.document: placed for placed in micro_batch if placed.document in places}
        for (document, image), encoder in encoding_ranks(placements, places).items():
            known = documents[document]
            if known.rank == rank:
                sent[encoder].append(own[known.number].of(image))
            if encoder == rank:
                received[known.rank].append((document, image))
    sizes = [[rows_of_image(places[document][image], kind) for document, image in images] for images in received]
    rows = torch.cat([kind, *(part for parts in sent for part in parts)])
    if group is not None:
        rows = exchange_rows(rows, [sum(map(len, parts)) for parts in sent], list(map(sum, sizes)), group)
    order = [image for images in received for image in images]
    pixels = dict(zip(order, rows.split([size for each in sizes for size in each]), strict=True))

    def read(images: Sequence[Image]) -> Pixels:
        grids = [places[document][image].grid for document, image in images]
        parts = [pixels[image] for image in images]
        if kind.dim() > 2:
            return {"pixel_values": torch.cat(parts) if parts else kind.new_zeros(1, *kind.shape[1:])}
        side = merge_size(hf)
        return {
            "pixel_values": torch.cat(parts) if parts else kind.new_zeros(side**2, *kind.shape[1:]),
            "image_grid_thw": torch.tensor(grids or [(1, side, side)]),
        }

    return read


@contextlib.contextmanager
def reading_images(hf: Any) -> Iterator[None]:
    """Makes the forward of a model take `images`, which it encodes inside, where sharded weights are gathered."""
    own = hf.forward

    @functools.wraps(type(hf).forward)  # trainers look at the signature
    def forward(_: Any, *arguments: Any, images: Images | None = None, **named: Any) -> Any:
        if images is None:
            return own(*arguments, **named)
        with encoded(hf, images) as outputs:
            return own(*arguments, mm_encoder_outputs=outputs, **named)

    hf.forward = types.MethodType(forward, hf)
    try:
        yield
    finally:
        hf.forward = own
