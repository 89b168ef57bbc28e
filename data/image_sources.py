"""Image sources: the images of a record, in its messages or beside them, and their bytes.

A video is a list of frames, each given as an image is, with the number of frames per second (`fps`) that these are.

An image is a part of a message (`{"type": "image", "image": ..}`, or `image_url` as OpenAI has it), or it is in the list
`images` (or `image`) of the record, and its place is a part without an image, or `<image>` in a text. It is given by a path
relative to the file of the record, its bytes, an object with `bytes` or `path` (Parquet, `datasets`), or a data URL.
"""

import base64
import binascii
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from longctx.data.chat import Message
from longctx.data.messages import IMAGE, IMAGES, MEDIA, VIDEO, FormatError
from longctx.errors import shortened
from longctx.planning.image_work import Grid

IMAGE_KEYS, VIDEO_KEYS = ("images", "image"), ("videos", "video")
"""Keys of a record's images and videos."""
MEDIA_KEYS = (*IMAGE_KEYS, *VIDEO_KEYS, "fps")
PLACES = {IMAGE: "<image>", VIDEO: "<video>"}
"""What stands for an image or a video in the text of many data sets."""
_VIDEO_FILES = (".mp4", ".webm", ".avi", ".mov", ".mkv", ".m4v", ".mpg", ".mpeg")
ImageBytes = bytes | Path
"""An image, or the file that it is in."""
_DATA_URL = re.compile(r"data:[\w.+-]+/[\w.+-]+;base64,", re.IGNORECASE)


class Video(NamedTuple):
    """Frames of a video, of which so many are a second; or its file, until it is decoded.

    Attributes:
        frames: the frames, or the file.
        fps: frames per second; of a file those to take, 0 for as many as the processor of videos takes.
        indices, total: of a decoded file, the numbers of these frames, and of how many; empty and 0: they are all.
    """

    frames: tuple[Any, ...]
    fps: float
    indices: tuple[int, ...] = ()
    total: int = 0

    @property
    def in_file(self) -> bool:
        return _is_video_file(self.frames[0])


class ImagePlace(NamedTuple):
    """Place of an image, or of the frames of one patch in time of a video, in a document.

    Attributes:
        start, tokens: the first token, and the number of tokens.
        grid: the grid of patches.
        files: numbers of the image or the frames among those of the document.
        fps: frames per second of the video; 0: it is an image.
    """

    start: int
    tokens: int
    grid: Grid
    files: tuple[int, ...] = ()
    fps: float = 0.0

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers to store: start, tokens and grid; with a video in the document also the bits of `fps`, and the files."""
        of_video = (*struct.unpack("q", struct.pack("d", self.fps)), *self.files) if self.files else ()
        return (self.start, self.tokens, *self.grid, *of_video)

    @classmethod
    def of(cls, numbers: Sequence[int], image: int) -> "ImagePlace":
        """Returns the place with these numbers; without files it is that of file `image`."""
        start, tokens, time, height, width, *more = numbers
        fps, *files = (*struct.unpack("d", struct.pack("q", more[0])), *more[1:]) if more else (0.0, image)
        return cls(start, tokens, (time, height, width), tuple(files), fps)

    @property
    def patches(self) -> int:
        return math.prod(self.grid)


def place_images(record: Mapping[str, Any], messages: list[Message]) -> tuple[list[Message], list[Any]]:
    """Returns messages in which `IMAGE` or `VIDEO` stands for each image or video, and these as the record gives them.

    Raises FormatError if a record has more or fewer of them than places, or one in a message that has a loss.
    """
    parts = [part for message in messages for part in message.get(IMAGES, ())]
    contents = [message.get("content", "") for message in messages]
    kinds = MEDIA.findall("".join(contents))
    if len(kinds) != len(parts):
        raise FormatError(f"a text has the character {IMAGE!r} or {VIDEO!r}, which stand for images and videos: remove it")
    beside = {
        IMAGE: [image for key in IMAGE_KEYS if record.get(key) for image in _listed(record[key])],
        VIDEO: [_video(video, record) for key in VIDEO_KEYS if record.get(key) for video in _videos(record[key])],
    }
    found: dict[str, Iterator[Any]] = {}
    for kind, name, given in zip((IMAGE, VIDEO), ("image", "video"), beside.values(), strict=True):
        own = [part for part, of in zip(parts, kinds, strict=True) if of == kind]
        if given and not own:
            contents = [content.replace(PLACES[kind], kind) for content in contents]
            own = [None] * sum(content.count(kind) for content in contents)
        waiting = iter(given)
        filled = [next(waiting, None) if part is None else part for part in own]
        if None in filled or next(waiting, None) is not None:
            raise FormatError(
                f"there are {sum(part is not None for part in own) + len(given)} {name}s, but the messages have {len(own)} "
                f"places for them: write {PLACES[kind]} into a text, or a part of type {name}, where each {name} is"
            )
        found[kind] = iter([_video(part, record) if kind == VIDEO else part for part in filled])
    images = [next(found[kind]) for kind in MEDIA.findall("".join(contents))]
    if not images:
        return messages, []
    placed = [{key: value for key, value in message.items() if key != IMAGES} for message in messages]
    for index, (message, content) in enumerate(zip(placed, contents, strict=True)):
        if MEDIA.search(content) and message["role"] == "assistant":
            what = "an image" if IMAGE in content else "a video"
            raise FormatError(f"message {index}, of the assistant, has {what}, which no model writes: move it to the user's")
        message |= {"content": content} if "content" in message else {}
    return placed, images


def _videos(value: Any) -> list[Any]:
    """Returns the videos of a record, of which one alone may be a list of frames."""
    alone = isinstance(value, list) and not any(
        isinstance(each, list) or _has_frames(each) or _is_video_file(each) for each in value
    )
    return [value] if alone else _listed(value)


def _has_frames(value: Any) -> bool:
    return isinstance(value, Mapping) and ("video" in value or "frames" in value)


def _video(value: Any, record: Mapping[str, Any]) -> Video:
    """Returns a list of frames, or an object with one and its `fps`, which the record may have instead. Raises FormatError."""
    if isinstance(value, Video):
        return value
    fps = record.get("fps", 0)
    if _has_frames(value):
        fps, value = value.get("fps") or fps, value["video"] if "video" in value else value["frames"]
    files = [value] if _is_video_file(value) else value
    if not isinstance(files, list) or not files or (len(files) > 1 and any(map(_is_video_file, files))):
        raise FormatError(
            f"a video is {shortened(repr(value), 80)}: give a list of frames and how many are a second (fps), or the path of a "
            f"file ({', '.join(_VIDEO_FILES)})"
        )
    video = Video(tuple(files), fps)
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not (0 < fps < math.inf or (video.in_file and fps == 0)):
        raise FormatError(f"a video of {len(files)} frames has fps {fps!r}: give the number of frames per second, above 0")
    return video._replace(fps=float(fps))


def _is_video_file(frame: Any) -> bool:
    return isinstance(frame, str | Path) and str(frame).lower().endswith(_VIDEO_FILES)


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


def located_all(images: Iterable[Any], folders: list[Path]) -> Iterator[ImageBytes | Video]:
    """Yields images and videos with the bytes or files of their frames. Raises FormatError."""
    for image in images:
        if isinstance(image, Video):
            yield image._replace(frames=tuple(located(frame, folders) for frame in image.frames))
        else:
            yield located(image, folders)


def frames_of(images: Iterable[Any]) -> Iterator[Any]:
    """Yields images, and the frames of videos."""
    for image in images:
        yield from image.frames if isinstance(image, Video) else (image,)


def read_image(image: ImageBytes) -> bytes:
    return image if isinstance(image, bytes) else image.read_bytes()
