"""The HTML page of `compare`: it loads nothing, shows names as text, and is legible."""

import base64
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from longctx.cli import main
from longctx.comparison.mixes import load_mix
from longctx.plots.charts import INK, QUIET

pytestmark = pytest.mark.slow

CSS = Path(__file__).parents[1] / "longctx" / "plots" / "page.css"
EVIL = "<img src=x onerror=console.error(1)> & $x_1$"
"""A name that would load a picture and write to the console if it were not escaped."""


class Page(HTMLParser):
    """Collects tags, what a browser would fetch, the texts, and pictures and tables that no parent scrolls."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.content = path.read_text("utf-8")
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self.wide: list[str] = []
        self.text, self._last = "", ""
        self.feed(self.content)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [value or "" for name, value in attributes if name in ("src", "href", "srcset", "data", "poster")]
        if (tag == "img" or ("class", "numbers") in attributes) and self._last != "scroll":
            self.wide.append(tag)
        self._last = dict(attributes).get("class") or ""

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    folder = tmp_path_factory.mktemp("pages")
    lengths = folder / f"{EVIL}.txt"
    lengths.write_text("\n".join(map(str, load_mix("wlb_128k").draw(32, seed=0))))
    assert main(["compare", "--lengths", str(lengths), "--ranks", "8,16", "--html", str(folder / "compare.html")]) == 0
    return Page(folder / "compare.html")


def test_the_page_is_whole_and_asks_nobody(page: Page) -> None:
    assert len(page.content) < 2_000_000 and len(page.fetched) == page.tags.count("img") >= 3
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert "@import" not in page.content and "url(" not in page.content
    assert EVIL in page.text, "names are escaped"
    assert page.wide == [], "a narrow screen scrolls pictures and tables, not the page"
    assert page.tags.count("figcaption") == page.tags.count("figure") == page.tags.count("img")
    for address in page.fetched:
        kind, _, data = address.partition(",")
        assert kind == "data:image/svg+xml;base64"
        picture = base64.b64decode(data).decode()
        ElementTree.fromstring(picture)
        assert not re.search(r"href=.https?:|<script|@import", picture)


def contrast(ink: str, paper: str) -> float:
    """The contrast of WCAG 2, from 1 (the same colour) to 21 (black on white)."""

    def light(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    brighter, darker = sorted((light(ink), light(paper)), reverse=True)
    return (brighter + 0.05) / (darker + 0.05)


def test_texts_are_legible() -> None:
    colours = dict(re.findall(r"--(\w+): (#\w{6})", CSS.read_text("utf-8")))
    for ink in ("ink", "quiet", "blue"):
        assert contrast(colours[ink], colours["paper"]) >= 4.5, ink
    assert contrast(colours["ink"], colours["desk"]) >= 4.5 and contrast(colours["ink"], colours["tint"]) >= 4.5
    assert contrast(INK, colours["paper"]) >= 4.5 and contrast(QUIET, colours["paper"]) >= 4.3
    assert contrast("#999999", "#ffffff") < 3
