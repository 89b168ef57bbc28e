"""The pictures of docs/how-it-works.md show what bench/pictures.py draws now, and what the page says of them."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import pictures

pytestmark = pytest.mark.slow

AGAIN = "draw it again: python bench/pictures.py docs"
DOCS = Path(__file__).resolve().parents[1] / "docs"


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_the_picture_is_that_of_the_code(name: str, tmp_path: Path) -> None:
    with Image.open(DOCS / f"{name}.png") as image:
        assert image.info["Description"] == pictures.draw(name, tmp_path / "now.png"), AGAIN
        assert image.size[0] >= 1600 and np.asarray(image)[..., -1].min() == 255, "wide, and opaque for light and dark pages"
        with Image.open(tmp_path / "now.png") as now:
            pixels = [np.asarray(each, np.float32) for each in (image, now)]
    assert np.abs(pixels[0] - pixels[1]).mean() < 2, AGAIN


def test_what_the_page_says() -> None:
    pairs = pictures.chunks()["pairs"]
    assert len(set(pairs)) == 1 and sum(pairs) == pictures.LENGTH * (pictures.LENGTH + 1) // 2
    assert [len(messages) for messages in pictures.received()["rounds"]] == [4, 4, 4], "a message per rank and round"
    heads, both = 8, 16
    for sender, receiver, count in (message for messages in pictures.received()["rounds"] for message in messages):
        assert count == (heads if receiver > sender else both), "heads to later ranks, heads and tails to earlier ones"
    rows = {name: sum(rows for *_, rows in messages) for name, messages in pictures.across().items()}
    assert rows["direct"] == pictures.NODE * rows["two levels"]
