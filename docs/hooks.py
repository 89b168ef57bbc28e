"""MkDocs hooks: put linked files into the site.

Pages link to files by their place in the repository, `../examples/quickstart.yaml`, so that the links work in a checkout. The
site has these files under `repository/`; Markdown files are plain text there, since their own links lead elsewhere.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

LINK = re.compile(r"(?<=\]\()\.\./([^)#\s]+)(#[^)\s]*)?(?=\))")
ROOT = Path(__file__).resolve().parents[1]


def on_files(files: Files, config: Any) -> Files:
    """Adds the linked files, and the index of every linked folder."""
    pages = [file.content_string for file in files.documentation_pages()]
    for name in sorted({name for page in pages for name, _ in LINK.findall(page)}):
        path, source = ROOT / name, _place(name)
        if path.is_dir():
            files.append(File.generated(config, source, content="\n".join(sorted(child.name for child in path.iterdir()))))
        elif path.exists():  # a link to nowhere is left for MkDocs to report
            files.append(File.generated(config, source, content=path.read_bytes()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return LINK.sub(lambda link: _place(link[1]) if (ROOT / link[1]).exists() else link[0], markdown)


def _place(name: str) -> str:
    path = ROOT / name
    return f"repository/{name}" + (".txt" if path.is_dir() or path.suffix == ".md" or path.suffix == "" else "")
