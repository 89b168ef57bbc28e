"""Image processor: a checkpoint's own processor of images, and the tokens that its processor writes for each image.

Only the backend on PIL is used: the same pixels on every machine, and no torchvision.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from longctx.data.chat import ChatError
from longctx.data.image_sources import ImageBytes, ImagePlace
from longctx.data.template import Rendered
from longctx.data.tokenizer import TokenArray
from longctx.errors import UserError, brief
from longctx.planning.image_work import Grid
from longctx.tokenizer_files import read_json

if TYPE_CHECKING:
    from longctx.data.image_shares import Pixels

PROCESSORS = ("LlavaProcessor", "Qwen2VLProcessor", "Qwen2_5_VLProcessor", "Qwen3VLProcessor", "Gemma3Processor")
"""Classes of transformers whose images are supported."""
_NAMED_IN = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
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


class Pictures:
    """Makes pixels of images, by the files of an image processor in a folder."""

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

    def pixels(self, images: Sequence[ImageBytes]) -> "Pixels":
        """Returns the arguments of a tower for images; for none of them those for a small blank one."""
        import torch  # to prepare a store, it is not needed

        made = self.process(images) if images else self._blank
        return {name: torch.from_numpy(np.asarray(made[name])) for name in _ARGUMENTS if name in made}

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

    def written(self, rendered: Rendered, images: Sequence[ImageBytes]) -> Rendered:
        """Returns a conversation with the tokens of its images. Raises ChatError."""
        texts = rendered.text.split(self.placeholder)
        if len(texts) - 1 != len(images):
            raise ChatError(
                f"the chat template writes {len(texts) - 1} × {self.placeholder} for {len(images)} images: give images only in "
                f"messages that it shows, and no {self.placeholder} in texts"
            )
        if not images:
            return rendered
        made = self.process(images)
        if any(made.get("num_crops", ())):
            raise ChatError("the processor cuts images into crops (do_pan_and_scan), which is not supported: set it to false")
        new = [self._processor.replace_image_token(made, number) for number in range(len(images))]
        ends = np.cumsum([len(text) + len(self.placeholder) for text in texts[:-1]])  # of the placeholders
        added = np.cumsum([0, *(len(tokens) - len(self.placeholder) for tokens in new)])
        spans = rendered.spans
        if spans is not None:  # each lies between two images
            moved = added[np.searchsorted(ends, [start for start, _ in spans], side="right")].tolist()
            spans = [(start + by, stop + by) for (start, stop), by in zip(spans, moved, strict=True)]
        text = texts[0] + "".join(tokens + after for tokens, after in zip(new, texts[1:], strict=True))
        sizes = [(tokens.count(self.text), grid) for tokens, grid in zip(new, _grids(made, len(new)), strict=True)]
        return replace(rendered, text=text, spans=spans, images=sizes)

    def places(self, tokens: TokenArray, sizes: Sequence[tuple[int, Grid]]) -> list[ImagePlace]:
        """Returns the places of images in a document, by the number of their tokens and their grids; see `check`."""
        starts = np.cumsum([0, *(count for count, _ in sizes)])
        at = np.append(np.flatnonzero(tokens == self.token), np.full(starts[-1] + 1, -1))
        return [ImagePlace(int(at[start]), count, grid) for start, (count, grid) in zip(starts, sizes, strict=False)]

    def check(self, tokens: TokenArray, places: Sequence[ImagePlace], name: str) -> None:
        """Raises ChatError unless the document `name` has the token of images exactly in these places."""
        expected = [np.arange(place.start, place.start + place.tokens) for place in places]
        found = np.flatnonzero(tokens == self.token)
        if not np.array_equal(found, np.concatenate([*expected, np.zeros(0, np.int64)])):
            raise ChatError(
                f"{name} has {len(found)} × {self.text} for {len(places)} images of {sum(map(len, expected))}: write no "
                f"{self.text} into texts"
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
