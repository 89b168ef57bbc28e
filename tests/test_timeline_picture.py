"""docs/timeline.png, the picture of the README, shows what the command draws now.

Of the steps with seeds 0 to 4 its speedup is closest to the mean that the README states. It is drawn again by

    python -m tests.test_timeline_picture
"""

import json
import re
import shlex
from pathlib import Path

import matplotlib.image
import pytest
from PIL import Image

from longctx.cli import main

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
PICTURE = "docs/timeline.png"
COMMAND = f"longctx plan --mix wlb_128k --ranks 64 --tokens-per-rank 16384 --seed 2 --png {PICTURE}"


def shown(path: Path) -> object:
    """Returns the words and the hashes of the plans that a picture carries."""
    with Image.open(path) as image:
        return json.loads(image.info["Description"])


def test_the_picture_is_what_the_command_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, *arguments = shlex.split(COMMAND)
    assert name == "longctx" and arguments[-1] == PICTURE
    assert main([*arguments[:-1], str(tmp_path / "now.png")]) == 0
    assert shown(ROOT / PICTURE) == shown(tmp_path / "now.png"), "draw it again: python -m tests.test_timeline_picture"


def test_a_picture_of_another_plan_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, *arguments = shlex.split(COMMAND)
    assert main([*arguments[:-1], str(tmp_path / "other.png"), "--seed", "3"]) == 0
    assert shown(ROOT / PICTURE) != shown(tmp_path / "other.png")


def test_the_picture_is_opaque_and_wide_enough() -> None:
    """A README is read in light and in dark."""
    pixels = matplotlib.image.imread(ROOT / PICTURE)
    assert pixels.shape[1] >= 1600
    assert pixels.shape[2] == 3 or float(pixels[..., 3].min()) == 1.0


def test_pages_that_quote_the_command_quote_this_one() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for line in re.findall(r"^.*--png docs/timeline.*$", page.read_text(encoding="utf-8"), re.MULTILINE):
            assert COMMAND in line, page


if __name__ == "__main__":
    raise SystemExit(main(shlex.split(COMMAND)[1:]))
