"""Media: texts with the mark of an image, a video or a sound, in records with a key for such files.

A text on `<image>` is a text. Beside a key for images, even an empty one, the mark stands for an
image that is not read.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

_KEYS = {
    *("image", "images", "img", "imgs", "pixel", "photo", "photos", "picture", "pictures"),
    *("video", "videos", "frames", "audio", "audios", "speech", "sound"),
}
"""Words in the names of keys for files."""
_KINDS = "image|img|vision|video|audio|speech|sound"
_MARK = re.compile(
    rf"<\|?/?(\w+_)?({_KINDS})[\w ]*\|?>|\[/?(IMG|IMAGE|VIDEO|AUDIO)(_\w+)?\]", re.IGNORECASE
)
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")


def mark_beside(record: Mapping[str, Any], texts: Iterable[str]) -> tuple[str, str] | None:
    """Returns a mark in one of the texts, and a key of the record for files; None: it does not have
    both."""
    for key in record:
        if any(word.lower() in _KEYS for word in _WORD.findall(key)):
            marks = filter(None, map(_MARK.search, texts))
            found = next(marks, None)
            if found is None:
                return None
            return (found[0], key)
    return None
