"""Documents with videos, images and texts, in one process by transformers' own code, and over several ranks."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import AutoModelForImageTextToText

from longctx.data.image_shares import Image, Pixels, Places
from longctx.data.image_sources import ImagePlace
from longctx.data.packing import StepBatch
from tests.data_cases import placed_plan
from tests.pretrained_cases import Step, step
from tests.vision_cases import IMAGE, LENGTHS, PLACEMENTS, batch_of

VIDEO = 91
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
FPS = 0.75
"""Frames per second of all videos: tokens are more than a second apart."""


def pairs(start: int, count: int, height: int, width: int, apart: int = 0) -> list[ImagePlace]:
    """Returns the places of a video of `count` pairs of frames, with `apart` tokens between them."""
    tokens = height * width // 4
    return [ImagePlace(start + k * (tokens + apart), tokens, (1, height, width), (2 * k,), FPS) for k in range(count)]


def places_of(family: str) -> Places:
    """Returns a video among images, two videos, and a video alone; of Qwen3-VL, texts are between pairs of frames."""
    apart = 3 if family == "qwen3_vl" else 0
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
    return [torch.where((document == IMAGE) | (document == VIDEO), -100, document) for document in documents(family)]


def pixels(family: str, images: Sequence[Image], spoiled: Image | None = None) -> Pixels:
    """Returns random pixels of images and pairs of frames; of `spoiled` one is changed."""
    parts, grids = [], []
    for document, number in images or [(-1, 0)]:
        generator = torch.Generator().manual_seed(100 * document + number + 101)
        grid = places_of(family)[document][number].grid if document >= 0 else (1, 2, 2)
        parts.append(torch.randn(grid[1] * grid[2], 3 * 2 * 4 * 4, generator=generator))
        parts[-1][0, 5] += (document, number) == spoiled
        grids.append(grid)
    return {"pixel_values": torch.cat(parts), "image_grid_thw": torch.tensor(grids)}


def of_processor(family: str, numbers: Sequence[int]) -> Pixels:
    """Returns what transformers' processor makes of the images and videos of documents: pixels and grids of whole videos."""
    images, frames, grids, made = [], [], [], {}
    for number in numbers:
        for k, place in enumerate(places_of(family).get(number, ())):
            (frames if place.fps else images).append((number, k))
            if place.fps and place.files == (0,):
                grids.append([1, *place.grid[1:]])
            elif place.fps:
                grids[-1][0] += 1
    if images:
        made = dict(pixels(family, images))
    if frames:
        made |= {"pixel_values_videos": pixels(family, frames)["pixel_values"], "video_grid_thw": torch.tensor(grids)}
        if family == "qwen2_5_vl":
            made["second_per_grid_ts"] = torch.tensor([2 / FPS] * len(grids))
    return made


def types_of(tokens: torch.Tensor) -> torch.Tensor:
    """Returns the types of tokens: 0 for text, 1 for images, 2 for videos."""
    return (tokens == IMAGE).int() + 2 * (tokens == VIDEO).int()


def own_logits(model: Any, family: str, number: int, tokens: torch.Tensor) -> torch.Tensor:
    """Returns the logits of a document alone, by transformers' own code, to which whole videos are given."""
    arguments: dict[str, Any] = {"input_ids": tokens[None], "use_cache": False, **of_processor(family, [number])}
    if number in places_of(family):
        arguments["mm_token_type_ids"] = types_of(tokens)[None]
    logits: torch.Tensor = model(**arguments).logits[0]
    return logits


def reference(folder: Path, family: str) -> Step:
    """Returns the loss over single documents, gradients and state of a model by transformers' own code."""
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    targets, loss = sum(int((label[1:] != -100).sum()) for label in labels(family)), torch.zeros(())
    for number, (tokens, label) in enumerate(zip(documents(family), labels(family), strict=True)):
        part = F.cross_entropy(own_logits(model, family, number, tokens)[:-1], label[1:], reduction="sum") / targets
        if part.requires_grad:
            part.backward()
        loss += part.detach()
    return loss.item(), {n: torch.zeros_like(w) if w.grad is None else w.grad for n, w in model.named_parameters()}, state


def make_batch(family: str, ranks: int, rank: int, spoiled: Image | None = None) -> StepBatch:
    plan, read = placed_plan(LENGTHS, ranks, PLACEMENTS[ranks]), partial(pixels, family, spoiled=spoiled)
    return batch_of(plan, rank, documents(family), labels(family), places_of(family), read)


def video_step(folder: Path, family: str, settings: list[str]) -> Step:
    """Returns the same from the trainer, packed, split and sharded."""
    dist.barrier()
    return step(folder, settings, lambda ranks, rank: make_batch(family, ranks, rank))


def row_losses(folder: Path, family: str, spoiled: Image | None) -> tuple[list[int], list[int], list[float]]:
    """Returns document, position and log p of every row of this rank; a pixel of the frame `spoiled` is changed."""
    from longctx.training.objectives.loss import log_probabilities
    from longctx.training.objectives.objective import documents_of
    from tests.pretrained_cases import make_trainer

    batch = make_batch(family, dist.get_world_size(), dist.get_rank(), spoiled)
    values = make_trainer(folder, []).passes.look(batch, log_probabilities)
    rows = [
        (documents_of(m).tolist(), m.positions.tolist(), v.tolist()) for m, v in zip(batch.micro_batches, values, strict=True)
    ]
    of_documents, positions, logps = ([value for part in parts for value in part] for parts in zip(*rows, strict=True))
    return of_documents, positions, logps
