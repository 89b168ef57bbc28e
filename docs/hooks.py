"""MkDocs hooks: put linked files into the site.

Pages link to files by their place in the repository, `../examples/quickstart.yaml`, so that the
links work in a checkout. The site has these files under `repository/`; Markdown files are plain
text there, since their own links lead elsewhere.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

LINK = re.compile(r"(?<=\]\()((?:\.\./)+[^)#\s]+)(#[^)\s]*)?(?=\))")
DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent


def on_files(files: Files, config: Any) -> Files:
    """Adds the linked files, and the index of every linked folder."""
    linked = {
        _target(page.src_uri, link)
        for page in files.documentation_pages()
        for link, _ in LINK.findall(page.content_string)
    }
    for path in sorted(path for path in linked if path is not None):
        if path.is_dir():
            files.append(
                File.generated(
                    config,
                    _place(path),
                    content="\n".join(sorted(child.name for child in path.iterdir())),
                )
            )
        else:
            files.append(File.generated(config, _place(path), content=path.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    def replaced(link: re.Match[str]) -> str:
        path = _target(page.file.src_uri, link[1])
        return (
            link[0]
            if path is None
            else os.path.relpath(DOCS / _place(path), DOCS / Path(page.file.src_uri).parent)
        )

    return LINK.sub(replaced, markdown)


def _target(page: str, link: str) -> Path | None:
    """Returns the file of the repository that a page links to; None if it is a page, or does not
    exist: MkDocs reports that."""
    path = Path(os.path.normpath(DOCS / Path(page).parent / link))
    return path if path.exists() and not path.is_relative_to(DOCS) else None


def _place(path: Path) -> str:
    name = path.relative_to(ROOT)
    return f"repository/{name}" + (
        ".txt" if path.is_dir() or path.suffix == ".md" or path.suffix == "" else ""
    )
