"""The HTML pages in a headless browser: wide and narrow, light and dark, with names that look like HTML."""

import io
import shutil
from collections.abc import Iterator
from pathlib import Path

import matplotlib.image
import pytest

from longctx.cli import main
from longctx.comparison.mixes import load_mix
from tests.browser import Browser, Opened, find_browser

pytestmark = pytest.mark.browser

RECORD = Path(__file__).parent / "recorded_metrics.jsonl"
EVIL = "<img src=x onerror=console.error(1)> & $x_1$"
"""A name that would load a picture and write to the console if it were not escaped."""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Page of a comparison and page of two runs."""
    folder = tmp_path_factory.mktemp("pages")
    lengths = folder / f"{EVIL}.txt"
    lengths.write_text("\n".join(map(str, load_mix("wlb_128k").draw(32, seed=0))))
    runs = [folder / EVIL, folder / "other"]
    for run in runs:
        run.mkdir()
        shutil.copy(RECORD, run / "metrics.jsonl")
    made = {name: folder / f"{name}.html" for name in ("compare", "runs")}
    assert main(["compare", "--lengths", str(lengths), "--ranks", "8,16", "--html", str(made["compare"])]) == 0
    assert main(["runs", *map(str, runs), "--html", str(made["runs"]), "--png", str(folder / "runs.png")]) == 0
    return made


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    executable = find_browser()
    if executable is None:
        pytest.skip("no Chromium is installed")
    with Browser(executable, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def brightness(opened: Opened) -> float:
    """Mean of all pixels of the page, figures included, from 0 (black) to 1 (white)."""
    return float(matplotlib.image.imread(io.BytesIO(opened.picture))[..., :3].mean())


@pytest.mark.parametrize("name", ["compare", "runs"])
@pytest.mark.parametrize("width", [1400, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_is_readable(name: str, width: int, scheme: str, pages: dict[str, Path], browser: Browser) -> None:
    opened = browser.open(pages[name], width, scheme)
    page = opened.measured
    assert opened.console == []
    assert (page["viewport"], page["width"], page["wide"]) == (width, width, []), "no horizontal overflow"
    assert page["pale"] == [], "contrast of text is at least 4.5"
    assert brightness(opened) > 0.85 if scheme == "light" else brightness(opened) < 0.3
    assert EVIL in page["text"] and page["scripts"] == 0
    assert len(page["sources"]) >= 6 and all(source.startswith("data:image/") for source in page["sources"])


def test_an_overflow_a_pale_text_and_an_error_are_found(tmp_path: Path, browser: Browser) -> None:
    """The checks above can fail."""
    page = tmp_path / "bad.html"
    bad = "<p style='width:500px;color:#ccc'>wide and pale</p><script>console.error('said')</script>"
    page.write_text(f"<body style='background:white'>{bad}")
    opened = browser.open(page, 390, "light")
    assert opened.measured["width"] > 390
    assert len(opened.measured["wide"]) == len(opened.measured["pale"]) == len(opened.console) == 1
