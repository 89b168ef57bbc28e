"""Documents with videos, images and texts."""

from collections.abc import Sequence

import torch

from longctx.hf.vision import ImagePlace
from longctx.trainers.image_shares import Image, Pixels, Places
from tests.vision_cases import IMAGE, LENGTHS

VIDEO = 91
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
APART = 3
"""Tokens of text between the pairs of frames of Qwen3-VL."""
FPS = 0.75
"""Frames per second of all videos: tokens are more than a second apart."""


def pairs(start: int, count: int, height: int, width: int, apart: int = 0) -> list[ImagePlace]:
    """Returns the places of a video of `count` pairs of frames, with `apart` tokens between
    them."""
    tokens = height * width // 4
    return [
        ImagePlace(start + k * (tokens + apart), tokens, (1, height, width), FPS)
        for k in range(count)
    ]


def places_of(family: str) -> Places:
    """Returns a video among images, two videos, and a video alone; of Qwen3-VL, texts are between
    pairs of frames."""
    apart = APART if family == "qwen3_vl" else 0
    return {
        0: [ImagePlace(3, 12, (1, 6, 8)), *pairs(17, 4, 4, 8, apart), ImagePlace(70, 4, (1, 2, 8))],
        3: [*pairs(4, 2, 6, 8, apart), *pairs(40, 3, 4, 4, apart)],
        4: pairs(1, 5, 4, 4, apart),
    }


def documents(family: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = [torch.randint(0, 88, (length,), generator=generator) for length in LENGTHS]
    for document, places in places_of(family).items():
        for place in places:
            made[document][place.start : place.start + place.tokens] = VIDEO if place.fps else IMAGE
    return made


def labels(family: str) -> list[torch.Tensor]:
    return [
        torch.where((document == IMAGE) | (document == VIDEO), -100, document)
        for document in documents(family)
    ]


def pixels(family: str, images: Sequence[Image]) -> Pixels:
    """Returns random pixels of images and pairs of frames."""
    parts, grids = [], []
    for document, number in images or [(-1, 0)]:
        generator = torch.Generator().manual_seed(100 * document + number + 101)
        grid = places_of(family)[document][number].grid if document >= 0 else (1, 2, 2)
        parts.append(torch.randn(grid[1] * grid[2], 3 * 2 * 4 * 4, generator=generator))
        grids.append(grid)
    return {"pixel_values": torch.cat(parts), "image_grid_thw": torch.tensor(grids)}


def of_processor(family: str, numbers: Sequence[int]) -> Pixels:
    """Returns what transformers' processor makes of the images and videos of documents: pixels and
    grids of whole videos."""
    images, frames, grids, made = [], [], [], {}
    for number in numbers:
        end = -1  # of the pair of frames before
        for k, place in enumerate(places_of(family).get(number, ())):
            (frames if place.fps else images).append((number, k))
            if place.fps and place.start - end == (APART if family == "qwen3_vl" else 0):
                grids[-1][0] += 1
            elif place.fps:
                grids.append([1, *place.grid[1:]])
            end = place.start + place.tokens if place.fps else -1
    if images:
        made = dict(pixels(family, images))
    if frames:
        made |= {
            "pixel_values_videos": pixels(family, frames)["pixel_values"],
            "video_grid_thw": torch.tensor(grids),
        }
        if family == "qwen2_5_vl":
            made["second_per_grid_ts"] = torch.tensor([2 / FPS] * len(grids))
    return made


def types_of(tokens: torch.Tensor) -> torch.Tensor:
    """Returns the types of tokens: 0 for text, 1 for images, 2 for videos."""
    return (tokens == IMAGE).int() + 2 * (tokens == VIDEO).int()
