"""The pictures of README and docs show what the code draws now, and what the pages say of them.

docs/timeline.png is drawn by a command: one of the steps with seeds 0 to 4, whose gains README
names. Again:

    python -m tests.comparison.test_pictures
"""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import pictures
import tree_picture
from longctx.attention import Mask
from longctx.cli import main
from longctx.comparison.mixes import load_mix
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.planners.planner import make_plan

pytestmark = pytest.mark.slow

AGAIN = "draw it again: python bench/pictures.py docs"
ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
COMMAND = (
    "longctx plan --mix wlb_128k --ranks 64 --tokens-per-rank 16384 --seed 2 --png "
    "docs/timeline.png"
)


def shown(path: Path) -> tuple[str, np.ndarray]:
    """Returns the words and the hashes of plans that a picture carries, and its pixels."""
    with Image.open(path) as image:
        return image.info["Description"], np.asarray(image, np.float32)


def test_pictures_are_wide_and_opaque() -> None:
    """Pages are read in light and in dark."""
    for name in (*pictures.PICTURES, "trees", "timeline"):
        _, pixels = shown(DOCS / f"{name}.png")
        assert pixels.shape[1] >= 1600 and (pixels.shape[2] == 3 or pixels[..., 3].min() == 255), (
            name
        )


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_the_picture_is_that_of_the_code(name: str, tmp_path: Path) -> None:
    description, pixels = shown(DOCS / f"{name}.png")
    assert description == pictures.draw(name, tmp_path / "now.png"), AGAIN
    assert np.abs(pixels - shown(tmp_path / "now.png")[1]).mean() < 2, AGAIN


def test_the_timeline_is_what_the_command_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*shlex.split(COMMAND)[1:-1], str(tmp_path / "now.png")]
    assert main(words) == 0
    assert shown(DOCS / "timeline.png")[0] == shown(tmp_path / "now.png")[0], (
        "draw it again: python -m tests.comparison.test_pictures"
    )
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        for line in re.findall(
            r"^.*--png docs/timeline.*$", page.read_text(encoding="utf-8"), re.MULTILINE
        ):
            assert COMMAND in line, page


def test_readme_says_what_the_timeline_shows() -> None:
    """Its gain, and those of the five steps that it is one of, over the best single degree."""
    profile = HardwareProfile.load("h100-nvlink-ib")
    gains = []
    for seed in range(5):
        lengths = load_mix("wlb_128k").draw(256, seed)
        made = make_plan(lengths, ranks=64, tokens_per_rank=16384, profile=profile)
        single = make_plan(lengths, ranks=64, tokens_per_rank=16384, profile=profile, mode="static")
        gains.append(f"{single.makespan_s / made.makespan_s:.2f}")
        if seed == 2:
            degree = single.winner.removeprefix("static:")
            own = max(made.degrees)
            assert made.degrees == {1: 255, own: 1}
            longest = f"{max(lengths) // 1000}k"
    said = (
        f"gain {min(gains)} to {max(gains)}×: above, the best single degree of that step, "
        f"{degree} for all; below, a document of {longest} tokens takes {own} ranks, and each other "
        "stays on one"
    )
    assert said in (ROOT / "README.md").read_text("utf-8"), said
    description = json.loads(shown(DOCS / "timeline.png")[0])
    assert description["speedup"] == f"{gains[2]}×"


def test_the_tree_is_that_of_the_code() -> None:
    """Tokens see what attention lets them see."""
    description = json.loads(shown(DOCS / "trees.png")[0])
    assert description == json.loads(tree_picture.pictured()), (
        "draw it again: python bench/tree_picture.py docs/trees.png"
    )
    assert sorted(set(description["ranks"])) == ["0", "1", "2"] and len(
        description["ranks"]
    ) == sum(description["lengths"])
    tree = tree_picture.drawn()
    mask = np.zeros((tree.length, tree.length), np.int64)
    for area in Mask().tree_areas(0, tree):
        queries, keys = np.indices((area.q_stop - area.q_start, area.k_stop - area.k_start))
        mask[area.queries, area.keys] += keys - queries <= (
            tree.length if area.hi is None else area.hi
        )
    assert np.array_equal(mask, tree_picture.seen(tree))


def test_what_the_page_says() -> None:
    pairs = pictures.chunks()["pairs"]
    assert len(set(pairs)) == 1 and sum(pairs) == pictures.LENGTH * (pictures.LENGTH + 1) // 2
    assert [len(messages) for messages in pictures.received()["rounds"]] == [4, 4, 4], (
        "a message per rank and round"
    )
    heads, both = 8, 16
    for sender, receiver, count in (
        message for messages in pictures.received()["rounds"] for message in messages
    ):
        assert count == (heads if receiver > sender else both), (
            "heads to later ranks, heads and tails to earlier ones"
        )
    rows = {
        name: sum(rows for *_, rows in messages) for name, messages in pictures.across().items()
    }
    assert rows["direct"] == pictures.NODE * rows["two levels"]


if __name__ == "__main__":
    raise SystemExit(main(shlex.split(COMMAND)[1:]))
