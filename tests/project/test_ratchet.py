"""The ruler of density counts what it says, and lets no figure become worse."""

from pathlib import Path

import pytest

from tools.density import Room, product_files, room_of
from tools.ratchet import tightened, worse

DENSE = '''"""A module.

This line of a docstring is no code, however long it is: it has more than one hundred columns in all, see.
"""


def dense(x, y):
    a, b = x, y
    f(*x)
    f(1, 2, 3, 4, 5)
    c = a if b else 0
    # A comment, which is no code.
    return [[d for d in e] for e in c]  # ........................................................ 110
'''


def room_of_source(folder: Path, source: str) -> Room:
    path = folder / "module.py"
    path.write_text(source, "utf-8")
    room = Room()
    room.add(path, name="module.py")
    return room


def test_what_is_counted(tmp_path: Path) -> None:
    room = room_of_source(tmp_path, DENSE)
    assert dict(room.counts) == {"splat": 1, "five": 1, "several": 1, "conditional": 1, "nested": 1}
    assert ("conditional", "module.py:11") in room.places
    assert (room.lines, room.code_lines, room.long_lines) == (13, 6, 1)
    assert room.figures()["splat"] == pytest.approx(1000 / 6, abs=0.1)
    assert room.functions == [(room.figures()["largest"], "module.py:7 dense")]


def test_plain_code_counts_nothing(tmp_path: Path) -> None:
    room = room_of_source(tmp_path, "def f(x):\n    a = x\n    (b, c) = a\n    return g(a, b, c)\n")
    assert not room.counts
    assert room.nodes == 18


def test_links_are_not_counted_twice() -> None:
    files = product_files(Path(__file__).resolve().parents[2])
    assert Path("attention/operator.py") in files
    assert not any(path.parts[:2] == ("longctx", "attention") for path in files)
    assert {room_of(path) for path in files} >= {"attention", "data", "longctx", "trainers"}


def test_a_figure_that_became_worse_is_named() -> None:
    committed = {"all": {"splat": 2.0, "largest": 400.0}, "feature LoRA": {"files_elsewhere": 3.0}}
    better = {"all": {"splat": 1.0, "largest": 400.0}, "feature LoRA": {"files_elsewhere": 3.0}}
    assert worse(better, committed) == []
    denser = {
        "all": {"splat": 2.1, "largest": float("nan")},
        "feature LoRA": {"files_elsewhere": 4.0},
    }
    assert worse(denser, committed) == [
        "all: splat is 2.1, was 2",
        "all: largest is nan, was 400",
        "feature LoRA: files_elsewhere is 4, was 3",
    ]


def test_a_new_room_is_held_to_the_whole() -> None:
    committed = {"all": {"splat": 2.0}}
    now = {"all": {"splat": 2.0}, "new": {"splat": 2.5}, "feature new": {"files_elsewhere": 9.0}}
    assert worse(now, committed) == ["new: splat is 2.5, was 2"]


def test_figures_only_become_tighter() -> None:
    committed = {"all": {"splat": 2.0, "five": 1.0}, "gone": {"splat": 0.0}}
    now = {"all": {"splat": 1.5, "five": 3.0}, "new": {"splat": 0.5}}
    wanted = {"all": {"splat": 1.5, "five": 1.0}, "new": {"splat": 0.5}}
    assert tightened(now, committed) == wanted
