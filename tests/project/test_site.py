"""The site in a browser, on a phone and on a desk: nothing is wider than the screen, search finds.

They need `.[docs]` and Chromium with its driver (Debian: `apt install chromium-driver`).
Screenshots lie beside the site.
"""

import functools
import shutil
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")
webdriver = pytest.importorskip("selenium.webdriver")
if not shutil.which("chromedriver"):
    pytest.skip("no chromedriver on the path", allow_module_level=True)

# After the skips: without these packages there is nothing to import.
from mkdocs.commands.build import build  # noqa: E402
from mkdocs.config import load_config  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.support.wait import WebDriverWait  # noqa: E402

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
WIDTHS = (390, 1400)
WIDER = """
const scrolls = e => e && (['auto', 'scroll', 'hidden'].includes(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
return [...document.body.querySelectorAll('table, pre, img, p, li, h1, h2, h3')]
  .filter(e => e.getBoundingClientRect().right > innerWidth + 1 && !scrolls(e.parentElement))
  .map(e => e.tagName + ' ' + e.textContent.slice(0, 60));
"""
"""Elements that end beyond the right edge, and that no parent lets one scroll to."""
BROKEN = "return [...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.src)"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        """Keeps the output of the tests free of requests."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True))
    return folder


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    options = webdriver.ChromeOptions()
    for word in (
        "headless",
        "no-sandbox",
        "disable-gpu",
        "disable-dev-shm-usage",
        "disable-background-networking",
        "disable-sync",
    ):
        options.add_argument(f"--{word}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(
        options=options, service=webdriver.ChromeService(shutil.which("chromedriver"))
    )
    yield driver
    driver.quit()


@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_fits_its_screen(
    browser: webdriver.Chrome, folder: Path, address: str, width: int
) -> None:
    screen = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    wrong = []
    pages = sorted(
        path.relative_to(folder)
        for path in folder.rglob("*.html")
        if "repository" not in path.parts
    )
    for page in pages:
        browser.get(f"{address}/{page}")
        broken = browser.execute_script(
            "return [...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => "
            "i.src)"
        )
        across = browser.execute_script("return document.documentElement.scrollWidth")
        log = browser.get_log("browser")
        errors = [
            entry["message"]
            for entry in log
            if entry["level"] == "SEVERE" and "favicon.ico" not in entry["message"]
        ]
        wider = browser.execute_script(WIDER)
        browser.save_screenshot(
            str(folder.parent / f"{width}-{'-'.join(page.with_suffix('').parts)}.png")
        )
        if broken or errors or wider or across > width:
            wrong.append((str(page), across, wider, broken, errors))
    assert len(pages) > 50 and wrong == [], f"screenshots: {folder.parent}"


CUT = """
return [...document.querySelectorAll('pre code')].filter(e => e.scrollWidth > e.clientWidth + 1)
  .map(e => e.textContent.slice(0, 60));
"""
"""Blocks of code of which one sees the rest by scrolling only."""


def test_code_is_read_whole_on_a_desk(
    browser: webdriver.Chrome, folder: Path, address: str
) -> None:
    screen = {"width": 1400, "height": 844, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    blocks = 0
    for page in sorted(folder.rglob("index.html")):
        browser.get(f"{address}/{page.relative_to(folder)}")
        assert browser.execute_script(CUT) == [], page
        blocks += browser.execute_script("return document.querySelectorAll('pre code').length")
    assert blocks > 100


def test_pictures_are_dark_on_dark_pages(browser: webdriver.Chrome, address: str) -> None:
    browser.get(f"{address}/how-it-works/index.html")
    filter_of = "return getComputedStyle(document.querySelector('.md-typeset img')).filter"
    assert browser.execute_script(filter_of) == "none"
    dark = "document.body.setAttribute('data-md-color-scheme', 'slate')"
    browser.execute_script(dark)
    assert browser.execute_script(filter_of).startswith("invert")


def test_install_is_a_page_and_evidence_is_folded(browser: webdriver.Chrome, address: str) -> None:
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.set_window_size(1400, 900)
    browser.get(f"{address}/index.html")
    links = browser.find_elements(By.CSS_SELECTOR, ".md-nav--primary a.md-nav__link")
    shown = [link.get_attribute("href") for link in links if link.is_displayed()]
    assert any("/install/" in str(link) for link in shown)
    assert any("/tour/" in str(link) for link in shown)
    of_evidence = [link for link in shown if "/evidence/" in str(link)]
    assert len(of_evidence) == 1, of_evidence


def test_search_finds(browser: webdriver.Chrome, address: str) -> None:
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.set_window_size(1400, 900)
    browser.get(address)
    browser.find_element(By.CSS_SELECTOR, "[data-md-component=search-query]").send_keys(
        "GRPOTrainer"
    )
    found = WebDriverWait(browser, 20).until(
        lambda driver: driver.find_elements(By.CSS_SELECTOR, ".md-search-result__link")
    )
    assert any("/trainers/" in (link.get_attribute("href") or "") for link in found)
