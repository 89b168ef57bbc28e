"""Images of documents in the batches of a trainer: found beside their tokens, sent to the ranks
that encode them, and read.

A collator returns the pixels of all images of a batch one after the other, and then the pixels of
all videos, as TRL's DataCollatorForVisionLanguageModeling does; so they are in the order of their
tokens. A pair of frames is encoded as an image.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from longctx.hf.vision import (
    FRAMES_APART,
    IN_BOTH_DIRECTIONS,
    ImagePlace,
    Images,
    encoded,
    tokens_of_image,
    video_token,
)
from longctx.parallel.all_to_all import exchange_rows
from longctx.planning.image_work import Grid
from longctx.planning.plan import Plan
from longctx.trainers.exchange import DocumentInfo
from longctx.trainers.image_shares import Image, Pixels, encoding_ranks
from longctx.trainers.refusals import TrainerError

PIXELS = ("pixel_values", "pixel_values_videos")
"""Fields of a batch with the pixels of images and of videos."""


@dataclass(frozen=True)
class DocumentImages:
    """Images of a document, and pairs of frames of its videos: their places, and the pixels of
    each.

    Pixels are [patches, values] of models that take images of any size, or else [1, channels,
    height, width].
    """

    places: tuple[ImagePlace, ...]
    pixels: tuple[torch.Tensor, ...]

    @property
    def kind(self) -> torch.Tensor:
        """The pixels of no image. Raises TrainerError if images have several kinds."""
        return pixels_of_none(self.pixels)


class _Shown(NamedTuple):
    """What a run of tokens shows: an image, or pairs of frames, with the grid and the number of
    tokens of each."""

    pixels: Sequence[torch.Tensor]
    grid: Grid
    tokens: int
    fps: float = 0.0


NOTHING_SHOWN = _Shown(pixels=(), grid=(0, 0, 0), tokens=0)


def fields_of_images(hf: Any) -> tuple[str, ...]:
    """Returns the fields of a batch that tell of images or videos; the types of tokens follow from
    the token ids."""
    image_fields = ("pixel_values", "image_grid_thw", "token_type_ids", "mm_token_type_ids")
    video_fields = ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts")
    return image_fields if video_token(hf) is None else image_fields + video_fields


def pixels_of_none(pixels: Iterable[torch.Tensor]) -> torch.Tensor:
    """Returns the pixels of no image, an empty tensor. Raises TrainerError for images with pixels
    of several kinds."""
    kinds = {(image.shape[1:], image.dtype): image for image in pixels}
    if len(kinds) > 1:
        named = " and ".join(f"{list(shape)} of {dtype}" for shape, dtype in kinds)
        raise TrainerError(
            f"images have pixels {named}: make those of all documents by one image processor"
        )
    ((shape, _), kind), *_ = kinds.items()
    return kind.new_empty(0, *shape)


def rows_of_image(place: ImagePlace, pixels: torch.Tensor) -> int:
    """Returns how many rows of `pixels` an image has."""
    return place.patches if pixels.dim() == 2 else 1


def images_of_rows(
    hf: Any, batch: Mapping[str, Any], rows: Sequence[npt.NDArray[Any]]
) -> list[DocumentImages | None]:
    """Returns the images and videos of every row of a batch, from the token ids of `rows` without
    padding.

    Raises TrainerError if pixels and tokens of images do not match.
    """
    if hf.config.model_type in IN_BOTH_DIRECTIONS and batch.get("token_type_ids") is None:
        raise TrainerError(
            f"the data collator returns no token_type_ids, by which {type(hf).__name__} lets the "
            "tokens of an image see each other: return them, as its processor does"
        )
    waiting = {hf.config.image_token_id: _images(hf, batch)}
    video = video_token(hf)
    if video is not None:
        waiting[video] = _videos(hf, batch)
    # Others would take two images side by side for one, in positions or in attention.
    side_by_side = hf.config.model_type == "llava"
    found: list[DocumentImages | None] = []
    for row, ids in enumerate(rows):
        places: list[ImagePlace] = []
        pixels: list[torch.Tensor] = []
        tokens = np.flatnonzero(np.isin(ids, list(waiting)))
        end = -1
        while len(tokens):
            shown = next(waiting[ids[tokens[0]]], NOTHING_SHOWN)
            count = shown.tokens * len(shown.pixels)
            run = tokens[:count]
            if not _is_one_run(ids, run, count) or (run[0] == end and not side_by_side):
                raise TrainerError(
                    f"the tokens of images or videos in row {row} of a batch are not those of its "
                    "pixels: do not cut documents (max_length=None), and let the processor of the "
                    "model write these tokens"
                )
            for start in run[:: shown.tokens].tolist():
                places.append(ImagePlace(start, shown.tokens, shown.grid, fps=shown.fps))
            pixels += shown.pixels
            tokens = tokens[count:]
            end = run[-1] + 1
        found.append(DocumentImages(tuple(places), tuple(pixels)) if places else None)
    if any(next(shown, None) is not None for shown in waiting.values()):
        raise TrainerError(
            "a batch has more images or videos than its tokens need: do not cut documents "
            "(max_length=None)"
        )
    return found


def _is_one_run(ids: npt.NDArray[Any], run: npt.NDArray[Any], count: int) -> bool:
    """Returns whether places of tokens are `count` ones, side by side, of one kind."""
    if not count or len(run) < count or run[-1] - run[0] != count - 1:
        return False
    return not np.ptp(ids[run])


def _images(hf: Any, batch: Mapping[str, Any]) -> Iterator[_Shown]:
    """Yields the images of a batch; without grids they are alike."""
    pixels = batch.get("pixel_values")
    grids = batch.get("image_grid_thw")
    if pixels is None:
        return
    if grids is None:
        grid = (1, *pixels.shape[-2:])
        for image in pixels.cpu().split(1):
            yield _Shown([image], grid, tokens_of_image(hf))
        return
    parts = _parts(pixels, grids.prod(-1))
    for (time, height, width), image in zip(grids.tolist(), parts, strict=True):
        tokens = time * height * width // merge_size(hf) ** 2
        yield _Shown([image], (time, height, width), tokens)


def _videos(hf: Any, batch: Mapping[str, Any]) -> Iterator[_Shown]:
    """Yields the videos of a batch, or their pairs of frames if texts are between these."""
    pixels = batch.get("pixel_values_videos")
    grids = batch.get("video_grid_thw")
    if pixels is None or grids is None:
        return
    seconds = batch.get("second_per_grid_ts")
    seconds = torch.ones(len(grids)) if seconds is None else torch.as_tensor(seconds)
    rates = hf.config.vision_config.temporal_patch_size / seconds.double()
    parts = _parts(pixels, grids[:, 1:].prod(-1).repeat_interleave(grids[:, 0]))
    for (count, height, width), rate in zip(grids.tolist(), rates.tolist(), strict=True):
        pairs = list(itertools.islice(parts, count))
        runs = [pairs]
        if hf.config.model_type in FRAMES_APART:
            runs = [[pair] for pair in pairs]
        tokens = height * width // merge_size(hf) ** 2
        for run in runs:
            yield _Shown(run, (1, height, width), tokens, fps=rate)


def _parts(pixels: torch.Tensor, patches: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the pixels of images with so many patches. Raises TrainerError if they are not as many
    as the pixels."""
    if int(patches.sum()) != len(pixels):
        raise TrainerError(
            f"pixels of {len(pixels):,} patches have grids of {int(patches.sum()):,}: return all "
            "that the processor of the model makes of a batch"
        )
    yield from pixels.cpu().split(patches.tolist())


def merge_size(hf: Any) -> int:
    """Returns how many patches, along each side, become one token."""
    return int(hf.config.vision_config.spatial_merge_size)


def exchange_pixels(
    hf: Any,
    plan: Plan,
    documents: Sequence[DocumentInfo],
    own: Mapping[int, DocumentImages],
    rank: int,
    group: Any,
) -> Callable[[Sequence[Image]], Pixels]:
    """Sends the pixels of a step to the ranks that encode them. Collective.

    Args:
        hf: the model of transformers.
        plan: plan of the step.
        documents: the plan's, of which some have images.
        own: images of the documents that this rank has drawn, by number.
        rank: this rank.
        group: group of all ranks that exchanges tensors of the CPU; None for one process.

    Returns read(images): their pixels; for no image, a blank one's. Raises TrainerError on all
    ranks if pixels are of several kinds.
    """
    kind = pixels_of_none(info.pixels for info in documents if info.pixels is not None)
    places = {number: info.places for number, info in enumerate(documents) if info.places}
    sent, received = _travelling(plan, documents, places=places, rank=rank)
    order = list(itertools.chain.from_iterable(received))
    sizes = {}
    for document, image in order:
        sizes[document, image] = rows_of_image(places[document][image], kind)
    sent_rows = [kind]
    sent_counts = []
    for images in sent:
        parts = [own[documents[document].drawn_index].pixels[image] for document, image in images]
        sent_rows += parts
        sent_counts.append(sum(map(len, parts)))
    rows = torch.cat(sent_rows)
    if group is not None:
        received_counts = [sum(sizes[image] for image in images) for images in received]
        rows = exchange_rows(rows, sent_counts, received_counts, group)
    pixels = dict(zip(order, rows.split(list(sizes.values())), strict=True))

    def read(images: Sequence[Image]) -> Pixels:
        """Returns the pixels of images that this rank encodes; for no image, a blank one's."""
        parts = [pixels[image] for image in images]
        grids = [places[document][image].grid for document, image in images]
        if kind.dim() > 2:
            blank = kind.new_zeros(1, *kind.shape[1:])
            return {"pixel_values": torch.cat(parts) if parts else blank}
        side = merge_size(hf)
        if not parts:
            parts = [kind.new_zeros(side**2, *kind.shape[1:])]
            grids = [(1, side, side)]
        return {"pixel_values": torch.cat(parts), "image_grid_thw": torch.tensor(grids)}

    return read


def _travelling(
    plan: Plan,
    documents: Sequence[DocumentInfo],
    *,
    places: Mapping[int, Sequence[ImagePlace]],
    rank: int,
) -> tuple[list[list[Image]], list[list[Image]]]:
    """Returns the images that a rank sends to each rank, and those that it receives from each, in
    the order of the plan. Images that stay are among both."""
    sent: list[list[Image]] = [[] for _ in range(plan.ranks)]
    received: list[list[Image]] = [[] for _ in range(plan.ranks)]
    for micro_batch in plan.micro_batches:
        placements = {
            placed.document: placed for placed in micro_batch if placed.document in places
        }
        for (document, image), encoder in encoding_ranks(placements, places).items():
            drawn_by = documents[document].rank
            if drawn_by == rank:
                sent[encoder].append((document, image))
            if encoder == rank:
                received[drawn_by].append((document, image))
    return sent, received


def reading_images(
    own: Callable[..., Any], hf: Any, *arguments: Any, images: Images | None = None, **named: Any
) -> Any:
    """Calls the `own` forward of a model; `images` are encoded inside, where sharded weights are
    gathered."""
    if images is None:
        return own(hf, *arguments, **named)
    with encoded(hf, images) as outputs:
        return own(hf, *arguments, mm_encoder_outputs=outputs, **named)
