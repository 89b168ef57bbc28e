"""Image processor: a checkpoint's own processor of images, and the tokens that its processor writes for each image.

Only the backend on PIL is used: the same pixels on every machine, and no torchvision.
"""

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from longctx.data.chat import ChatError
from longctx.data.image_sources import ImageBytes, ImagePlace, Video
from longctx.data.template import Rendered
from longctx.data.tokenizer import TokenArray
from longctx.data.video_processor import VideoProcessor
from longctx.errors import UserError, brief
from longctx.planning.image_work import Grid
from longctx.tokenizer_files import read_json

if TYPE_CHECKING:
    from longctx.data.image_shares import Pixels

PROCESSORS = ("LlavaProcessor", "Qwen2VLProcessor", "Qwen2_5_VLProcessor", "Qwen3VLProcessor", "Gemma3Processor")
"""Classes of transformers whose images are supported."""
_NAMED_IN = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
WITH_VIDEOS = ("Qwen2VLProcessor", "Qwen2_5_VLProcessor", "Qwen3VLProcessor")
"""Those that also read videos."""
_ARGUMENTS = ("pixel_values", "image_grid_thw")
"""What a tower takes of what an image processor makes."""


class ImageError(UserError):
    """An image, or a processor of images, that cannot be used."""


def processor_class(folder: Path) -> str | None:
    """Returns the class of a checkpoint's processor; None if it has none."""
    found = next(filter(None, (read_json(folder / name).get("processor_class") for name in _NAMED_IN)), None)
    if found is None and any((folder / name).is_file() for name in _NAMED_IN[:2]):
        from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

        found = PROCESSOR_MAPPING_NAMES.get(read_json(folder / "config.json").get("model_type"))
    return None if found is None else str(found)


class Frames(NamedTuple):
    """Frames of one patch in time of a video, and the grid of their patches."""

    frames: Sequence[ImageBytes]
    grid: Grid


class Pictures:
    """Makes pixels of images and frames, by the files of processors in a folder."""

    limits_all_frames = False
    """See `VideoProcessor`; it matters where sizes are chosen."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def image_processor(self) -> Any:
        try:
            from transformers import AutoImageProcessor

            return AutoImageProcessor.from_pretrained(str(self.folder), backend="pil", trust_remote_code=False)
        except Exception as error:  # transformers may raise anything for damaged files
            raise ImageError(f"transformers cannot load the image processor in {self.folder}: {brief(error)}") from error

    def process(self, images: Sequence[ImageBytes]) -> dict[str, Any]:
        """Returns what the image processor makes of images, as arrays. Raises ImageError if one cannot be read."""
        made: dict[str, Any] = self.image_processor([_opened(image) for image in images], return_tensors="np")
        return made

    @cached_property
    def video_processor(self) -> VideoProcessor:
        return VideoProcessor(self.folder, self.limits_all_frames)

    def pixels(self, images: Sequence[ImageBytes | Frames]) -> "Pixels":
        """Returns the arguments of a tower for images and frames; for none of them those for a small blank one."""
        import torch  # to prepare a store, it is not needed

        pictures = [image for image in images if not isinstance(image, Frames)]
        if len(pictures) < len(images):
            parts = [self._frames(image) if isinstance(image, Frames) else self.pixels([image]) for image in images]
            return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        made = self.process(pictures) if pictures else self._blank
        return {name: torch.from_numpy(np.asarray(made[name])) for name in _ARGUMENTS if name in made}

    def _frames(self, given: Frames) -> "Pixels":
        import torch

        opened = [_opened(frame) for frame in given.frames]
        opened += opened[-1:] * (self.video_processor.temporal_patch_size - len(opened))
        return {"pixel_values": self.video_processor.pixels(opened, given.grid), "image_grid_thw": torch.tensor([given.grid])}

    @cached_property
    def _blank(self) -> dict[str, Any]:
        from PIL import Image

        blank: dict[str, Any] = self.image_processor([Image.new("RGB", (32, 32))], return_tensors="np")
        return blank


@cache
def pictures_of(folder: Path) -> Pictures:
    return Pictures(folder)


class ImageTokens(Pictures):
    """Writes the tokens of images into rendered conversations, as the checkpoint's processor does."""

    def __init__(self, folder: Path, name: str, tokenizer: Any) -> None:
        """`name` is the class of the processor, one of PROCESSORS."""
        super().__init__(folder)
        import transformers

        kind = getattr(transformers, name)
        if hasattr(kind, "replace_video_token") and name.startswith("Qwen"):  # only its video processor needs torchvision
            self._processor = kind.__new__(kind)
            self._processor.image_processor = self.image_processor
            self._processor.image_token = getattr(tokenizer, "image_token", None) or "<|image_pad|>"
        else:
            self._processor = kind.from_pretrained(str(folder), backend="pil", trust_remote_code=False)
        self.placeholder: str = self._processor.image_token
        """Text that the chat template writes for an image."""
        self.text: str = getattr(tokenizer, "image_token", None) or self.placeholder
        self.token: int = tokenizer.convert_tokens_to_ids(self.text)
        """The token of which an image has several, and its text."""
        self._name, self.video_text, self.video_token = name, "", -1
        self.limits_all_frames = name == "Qwen3VLProcessor"
        if name in WITH_VIDEOS:
            for part, default in (("video", "video_pad"), ("vision_start",) * 2, ("vision_end",) * 2):
                setattr(self._processor, f"{part}_token", getattr(tokenizer, f"{part}_token", None) or f"<|{default}|>")
            self.video_text = self._processor.video_token
            self.video_token = tokenizer.convert_tokens_to_ids(self.video_text)
        self._places = re.compile("|".join(map(re.escape, filter(None, (self.placeholder, self.video_text)))))

    def decoded(self, images: Sequence[ImageBytes | Video]) -> tuple[ImageBytes | Video, ...]:
        """Returns images and videos, of those in files the frames. Raises ChatError."""
        return tuple(
            self.video_processor.decoded(each) if self.video_text and isinstance(each, Video) and each.in_file else each
            for each in images
        )

    def written(self, rendered: Rendered, images: Sequence[ImageBytes | Video]) -> Rendered:
        """Returns a conversation with the tokens of its images and videos. Raises ChatError."""
        expected = [self.video_text if isinstance(image, Video) else self.placeholder for image in images]
        if "" in expected:
            raise ChatError(f"{self._name} reads no videos, only {', '.join(WITH_VIDEOS)} do: remove the record")
        found, texts = list(self._places.finditer(rendered.text)), self._places.split(rendered.text)
        if [match.group() for match in found] != expected:
            at = rendered.text.count(self.placeholder) == expected.count(self.placeholder)  # then videos differ
            text, kind = (self.video_text, "videos") if at else (self.placeholder, "images")
            raise ChatError(
                f"the chat template writes {rendered.text.count(text)} × {text} for {expected.count(text)} {kind}: give {kind} "
                f"only in messages that it shows, in its order, and no {text} in texts"
            )
        if not images:
            return rendered
        new, sizes = self._tokens_of(images)
        ends = np.array([match.end() for match in found])
        added = np.cumsum([0, *(len(tokens) - len(text) for tokens, text in zip(new, expected, strict=True))])
        spans = rendered.spans
        if spans is not None:  # each lies between two images
            moved = added[np.searchsorted(ends, [start for start, _ in spans], side="right")].tolist()
            spans = [(start + by, stop + by) for (start, stop), by in zip(spans, moved, strict=True)]
        text = texts[0] + "".join(tokens + after for tokens, after in zip(new, texts[1:], strict=True))
        return replace(rendered, text=text, spans=spans, images=sizes)

    def _tokens_of(self, images: Sequence[ImageBytes | Video]) -> tuple[list[str], list[ImagePlace]]:
        """Returns the text of every image and video, and their places without starts."""
        pictures = [image for image in images if not isinstance(image, Video)]
        made = self.process(pictures) if pictures else {}
        if any(made.get("num_crops", ())):
            raise ChatError("the processor cuts images into crops (do_pan_and_scan), which is not supported: set it to false")
        grids = _grids(made, len(pictures)) if pictures else []
        texts: list[str] = []
        places: list[ImagePlace] = []
        number = files = 0
        for image in images:
            if isinstance(image, Video):
                text, pairs = self._video(image, files)
                places += pairs
                files += len(image.frames)
            else:
                text = self._processor.replace_image_token(made, number)
                own = (files,) * (len(pictures) < len(images))
                places.append(ImagePlace(0, text.count(self.text), grids[number], own))
                number, files = number + 1, files + 1
            texts.append(text)
        return texts, places

    def _video(self, video: Video, first: int) -> tuple[str, list[ImagePlace]]:
        """Returns the text of a video whose frames are files `first`, .., and the places of its patches in time."""
        from transformers.video_utils import VideoMetadata

        count, sizes = len(video.frames), {_opened(frame).size for frame in video.frames}
        if len(sizes) > 1:
            raise ChatError(f"a video of {count} frames has frames of several sizes, {sizes}: give all the same size")
        processor, ((width, height),) = self.video_processor, sizes
        time, *size = processor.grid(count, height, width)
        self._processor.video_processor = processor
        indices = list(video.indices or range(count))
        metadata = VideoMetadata(total_num_frames=video.total or count, fps=video.fps, frames_indices=indices)
        fps = metadata.sampled_fps  # now, as writing the text adds a frame to an odd number
        made = {"video_grid_thw": np.array([[time, *size]]), "video_metadata": [metadata]}
        text: str = self._processor.replace_video_token(made, 0)
        tokens, step = text.count(self.video_text) // time, processor.temporal_patch_size
        files = [tuple(range(first + k * step, first + min((k + 1) * step, count))) for k in range(time)]
        return text, [ImagePlace(0, tokens, (1, size[0], size[1]), each, fps) for each in files]

    def among(self, tokens: TokenArray) -> NDArray[np.bool_]:
        """Returns which tokens are of images or videos."""
        return np.isin(tokens, [self.token, self.video_token])

    def places(self, tokens: TokenArray, sizes: Sequence[ImagePlace]) -> list[ImagePlace]:
        """Returns the places of images in a document, by places without starts; see `check`."""
        starts = np.cumsum([0, *(place.tokens for place in sizes)])
        at = np.append(np.flatnonzero(self.among(tokens)), np.full(starts[-1] + 1, -1))
        return [place._replace(start=int(at[start])) for start, place in zip(starts, sizes, strict=False)]

    def check(self, tokens: TokenArray, places: Sequence[ImagePlace], name: str) -> None:
        """Raises ChatError unless the document `name` has the tokens of images and videos exactly in these places."""
        for kind, text, token in (("images", self.text, self.token), ("videos", self.video_text, self.video_token)):
            own = [place for place in places if (place.fps > 0) == (kind == "videos")]
            expected = [np.arange(place.start, place.start + place.tokens) for place in own]
            found = np.flatnonzero(tokens == token)
            if not np.array_equal(found, np.concatenate([*expected, np.zeros(0, np.int64)])):
                raise ChatError(
                    f"{name} has {len(found)} × {text} for {len(own)} {kind} of {sum(map(len, expected))}: write no {text} "
                    "into texts"
                )


def _grids(made: Mapping[str, Any], images: int) -> list[Grid]:
    """Returns (time, height, width) of images in patches; in pixels if all are alike."""
    if "image_grid_thw" in made:
        return [(int(time), int(height), int(width)) for time, height, width in made["image_grid_thw"]]
    height, width = np.shape(made["pixel_values"])[-2:]
    return [(1, height, width)] * images


def _opened(image: ImageBytes) -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImageError("reading images needs Pillow, which is not installed: pip install pillow") from error
    try:
        with Image.open(io.BytesIO(image) if isinstance(image, bytes) else image) as opened:
            return opened.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        name = f"an image of {len(image):,} bytes" if isinstance(image, bytes) else str(image)
        raise ImageError(f"{name} cannot be read as an image: {brief(error)}") from error
