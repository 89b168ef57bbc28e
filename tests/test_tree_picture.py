"""docs/trees.png shows what bench/tree_picture.py draws now: the tree, the rank of every token, and what each token sees."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import tree_picture
from longctx.attention import Mask

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]


def test_the_picture_is_that_of_the_code() -> None:
    with Image.open(ROOT / "docs" / "trees.png") as image:
        shown = json.loads(image.info["Description"])
        assert image.size[0] >= 1600 and np.asarray(image)[..., -1].min() == 255, "wide, and opaque for light and dark pages"
    assert shown == json.loads(tree_picture.pictured()), "draw it again: python bench/tree_picture.py docs/trees.png"
    assert sorted(set(shown["ranks"])) == ["0", "1", "2"] and len(shown["ranks"]) == sum(shown["lengths"])


def test_tokens_see_what_attention_lets_them_see() -> None:
    tree = tree_picture.drawn()
    mask = np.zeros((tree.length, tree.length), np.int64)
    for area in Mask().tree_areas(0, tree):
        queries, keys = np.indices((area.q_stop - area.q_start, area.k_stop - area.k_start))
        mask[area.queries, area.keys] += keys - queries <= (tree.length if area.hi is None else area.hi)
    assert np.array_equal(mask, tree_picture.seen(tree))
