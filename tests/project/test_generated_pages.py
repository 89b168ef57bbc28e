"""Pages that repeat what the code says are written anew when it changes."""

import pytest

from tools.pages import DOCS, PAGES


@pytest.mark.parametrize("name", PAGES)
def test_the_page_says_what_the_code_says(name: str) -> None:
    assert (DOCS / name).read_text("utf-8") == PAGES[name](), "run python -m tools.pages"
