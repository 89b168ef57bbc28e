"""Image sources: the images of a record, in its messages or beside them, and their bytes.

An image is a part of a message (`{"type": "image", "image": ..}`, or `image_url` as OpenAI has it), or it is in the list
`images` (or `image`) of the record, and its place is a part without an image, or `<image>` in a text. It is given by a path
relative to the file of the record, its bytes, an object with `bytes` or `path` (Parquet, `datasets`), or a data URL.
"""

import base64
import binascii
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from longctx.data.chat import Message
from longctx.data.messages import IMAGE, IMAGES, FormatError
from longctx.planning.image_work import Grid

IMAGE_KEYS = ("images", "image")
"""Keys of a record's images."""
PLACE = "<image>"
"""What stands for an image in the text of many data sets."""
ImageBytes = bytes | Path
"""An image, or the file that it is in."""
_DATA_URL = re.compile(r"data:[\w.+-]+/[\w.+-]+;base64,", re.IGNORECASE)


class ImagePlace(NamedTuple):
    """Place of an image in a document: its first token, its number of tokens, and its grid."""

    start: int
    tokens: int
    grid: Grid

    @property
    def patches(self) -> int:
        return math.prod(self.grid)


def place_images(record: Mapping[str, Any], messages: list[Message]) -> tuple[list[Message], list[Any]]:
    """Returns messages in which `IMAGE` stands for each image, and the images as the record gives them.

    Raises FormatError if a record has more or fewer images than places, or an image in a message that has a loss.
    """
    given = [image for key in IMAGE_KEYS if record.get(key) for image in _listed(record[key])]
    parts = [part for message in messages for part in message.get(IMAGES, ())]
    contents = [message.get("content", "") for message in messages]
    if sum(content.count(IMAGE) for content in contents) != len(parts):
        raise FormatError(f"a text has the character {IMAGE!r}, which stands for images: remove it")
    if given and not parts:
        contents = [content.replace(PLACE, IMAGE) for content in contents]
    places = sum(content.count(IMAGE) for content in contents)
    if not (places or given):
        return messages, []
    beside = iter(given)
    images = [next(beside, None) if part is None else part for part in parts or [None] * places]
    if len(images) != places or None in images or next(beside, None) is not None:
        raise FormatError(
            f"there are {sum(part is not None for part in parts) + len(given)} images, but the messages have {places} places "
            f"for them: write {PLACE} into a text, or a part of type image, where each image is"
        )
    placed = [{key: value for key, value in message.items() if key != IMAGES} for message in messages]
    for index, (message, content) in enumerate(zip(placed, contents, strict=True)):
        if IMAGE in content and message["role"] == "assistant":
            raise FormatError(f"message {index}, of the assistant, has an image, which no model writes: move it to the user's")
        message |= {"content": content} if "content" in message else {}
    return placed, images


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def located(image: Any, folders: list[Path]) -> ImageBytes:
    """Returns the bytes of an image, or its file in one of `folders` (none: there are no files). Raises FormatError."""
    if isinstance(image, Mapping):
        image = image.get("bytes") or image.get("path") or image.get("url")
    if isinstance(image, bytes):
        return image
    if not isinstance(image, str) or not image:
        raise FormatError(f"an image is of type {type(image).__name__}: give its path, its bytes, or a data URL")
    if inline := _DATA_URL.match(image):
        try:
            return base64.b64decode(image[inline.end() :], validate=True)
        except binascii.Error as error:
            raise FormatError(f"an image has a damaged data URL: {error}") from error
    if re.match(r"https?://", image):
        raise FormatError(f"image {image} is on the web: download it, and give its path")
    if not folders:
        raise FormatError(f"image {image} is a file beside a data set of the hub: give its bytes, as datasets' Image does")
    for folder in folders:
        if (file := folder / image.removeprefix("file://")).is_file():
            return file
    raise FormatError(f"image {image} is not in {folders[0]}: give a path relative to the file of the record")


def read_image(image: ImageBytes) -> bytes:
    return image if isinstance(image, bytes) else image.read_bytes()
