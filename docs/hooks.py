"""MkDocs hook: puts the list of all settings, as `longctx train --help` prints it, into the configuration guide."""

from typing import Any

from longctx.config import describe

MARK = "<!-- every setting -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    return markdown.replace(MARK, f"```text\n{describe()}\n```")
