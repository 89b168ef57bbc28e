"""Images of documents in the batches of a trainer: found beside their tokens, sent to the ranks
that encode them, and read.

A collator returns the pixels of all images of a batch one after the other, and those of all videos,
as TRL's DataCollatorForVisionLanguageModeling does; so they are in the order of their tokens. A
pair of frames is encoded as an image.
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


def fields_of_images(hf: Any) -> tuple[str, ...]:
    """Returns the fields of a batch that tell of images or videos; the types of tokens follow from
    the token ids."""
    of_images = ("pixel_values", "image_grid_thw", "token_type_ids", "mm_token_type_ids")
    of_videos = ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts")
    return of_images if video_token(hf) is None else of_images + of_videos


def pixels_of_none(pixels: Iterable[torch.Tensor]) -> torch.Tensor:
    """Returns the pixels of no image, an empty tensor. Raises TrainerError if those of images are
    of several kinds."""
    kinds = {(each.shape[1:], each.dtype): each for each in pixels}
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
            "tokens of an image see each "
            "other: return them, as its processor does"
        )
    image = hf.config.image_token_id
    waiting = {image: _images(hf, batch)}
    # Others would take them for one, in positions or in attention.
    side_by_side = hf.config.model_type == "llava"
    if (video := video_token(hf)) is not None:
        waiting[video] = _videos(hf, batch)
    found: list[DocumentImages | None] = []
    for row, ids in enumerate(rows):
        places: list[ImagePlace] = []
        pixels: list[torch.Tensor] = []
        tokens, end = np.flatnonzero(np.isin(ids, list(waiting))), -1
        while len(tokens):
            shown = next(waiting[ids[tokens[0]]], _Shown((), (0, 0, 0), 0))
            count = shown.tokens * len(shown.pixels)
            run, tokens = tokens[:count], tokens[count:]
            if (
                not count
                or len(run) < count
                or run[-1] - run[0] != count - 1
                or (run[0] == end and not side_by_side)
                or np.ptp(ids[run])
            ):
                raise TrainerError(
                    f"the tokens of images or videos in row {row} of a batch are not those of its "
                    "pixels: do not cut "
                    "documents (max_length=None), and let the processor of the model write these "
                    "tokens"
                )
            starts = run[:: shown.tokens].tolist()
            places += [
                ImagePlace(start, shown.tokens, shown.grid, fps=shown.fps) for start in starts
            ]
            pixels += shown.pixels
            end = run[-1] + 1
        found.append(DocumentImages(tuple(places), tuple(pixels)) if places else None)
    if any(next(shown, None) is not None for shown in waiting.values()):
        raise TrainerError(
            "a batch has more images or videos than its tokens need: do not cut documents "
            "(max_length=None)"
        )
    return found


def _images(hf: Any, batch: Mapping[str, Any]) -> Iterator[_Shown]:
    """Yields the images of a batch; without grids they are alike."""
    pixels, grids = batch.get("pixel_values"), batch.get("image_grid_thw")
    if pixels is None:
        return
    if grids is None:
        yield from (
            _Shown([each], (1, *pixels.shape[-2:]), tokens_of_image(hf))
            for each in pixels.cpu().split(1)
        )
        return
    for (time, height, width), each in zip(
        grids.tolist(), _parts(pixels, grids.prod(-1)), strict=True
    ):
        yield _Shown([each], (time, height, width), time * height * width // merge_size(hf) ** 2)


def _videos(hf: Any, batch: Mapping[str, Any]) -> Iterator[_Shown]:
    """Yields the videos of a batch, or their pairs of frames if texts are between these."""
    pixels, grids, seconds = (
        batch.get(name) for name in ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts")
    )
    if pixels is None or grids is None:
        return
    seconds = torch.ones(len(grids)) if seconds is None else torch.as_tensor(seconds)
    rates = hf.config.vision_config.temporal_patch_size / seconds.double()
    parts = _parts(pixels, grids[:, 1:].prod(-1).repeat_interleave(grids[:, 0]))
    for (count, height, width), rate in zip(grids.tolist(), rates.tolist(), strict=True):
        pairs = list(itertools.islice(parts, count))
        for run in [[pair] for pair in pairs] if hf.config.model_type in FRAMES_APART else [pairs]:
            yield _Shown(run, (1, height, width), height * width // merge_size(hf) ** 2, rate)


def _parts(pixels: torch.Tensor, patches: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the pixels of images with so many patches. Raises TrainerError if they are not as many
    as the pixels."""
    if int(patches.sum()) != len(pixels):
        raise TrainerError(
            f"pixels of {len(pixels):,} patches have grids of {int(patches.sum()):,}: return all "
            "that the processor of the "
            "model makes of a batch"
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

    `documents` are those of the plan, of which some have images; `own` are the images of this
    rank's documents, by number. Returns a function of images that this rank encodes, which returns
    their pixels, or those of a blank image for none. Raises TrainerError on all ranks if pixels are
    of several kinds.
    """
    kind = pixels_of_none(each.pixels for each in documents if each.pixels is not None)
    places = {
        number: document.places for number, document in enumerate(documents) if document.places
    }
    sent: list[list[torch.Tensor]] = [[] for _ in range(plan.ranks)]
    received: list[list[Image]] = [[] for _ in range(plan.ranks)]
    for micro_batch in plan.micro_batches:
        placements = {
            placed.document: placed for placed in micro_batch if placed.document in places
        }
        for (document, image), encoder in encoding_ranks(placements, places).items():
            known = documents[document]
            if known.rank == rank:
                sent[encoder].append(own[known.drawn_index].pixels[image])
            if encoder == rank:
                received[known.rank].append((document, image))
    sizes = [
        [rows_of_image(places[document][image], kind) for document, image in images]
        for images in received
    ]
    rows = torch.cat([kind, *(part for parts in sent for part in parts)])
    if group is not None:
        rows = exchange_rows(
            rows, [sum(map(len, parts)) for parts in sent], list(map(sum, sizes)), group
        )
    order = [image for images in received for image in images]
    pixels = dict(zip(order, rows.split([size for each in sizes for size in each]), strict=True))

    def read(images: Sequence[Image]) -> Pixels:
        grids = [places[document][image].grid for document, image in images]
        parts = [pixels[image] for image in images]
        if kind.dim() > 2:
            return {
                "pixel_values": torch.cat(parts) if parts else kind.new_zeros(1, *kind.shape[1:])
            }
        side = merge_size(hf)
        return {
            "pixel_values": torch.cat(parts) if parts else kind.new_zeros(side**2, *kind.shape[1:]),
            "image_grid_thw": torch.tensor(grids or [(1, side, side)]),
        }

    return read


def reading_images(
    own: Callable[..., Any], hf: Any, *arguments: Any, images: Images | None = None, **named: Any
) -> Any:
    """Calls the `own` forward of a model; `images` are encoded inside, where sharded weights are
    gathered."""
    if images is None:
        return own(hf, *arguments, **named)
    with encoded(hf, images) as outputs:
        return own(hf, *arguments, mm_encoder_outputs=outputs, **named)
