"""Writes what pages repeat of the code: docs/settings.md, every setting, docs/names.md, every
public name, docs/install.md and docs/tour.md, sections of the README, docs/evidence/claims.md
(`tools.claims`), and what commands print (`tools.outputs`).

python -m tools.pages            # tests/project/test_generated_pages.py fails until it was run
"""

import importlib
import inspect
import itertools
import re
from pathlib import Path
from typing import Any

from longctx.config.combinations import ROWS
from longctx.config.describe import type_name
from longctx.config.names import FIELDS
from longctx.config.problems import yaml_text
from longctx.config.run import SECTIONS
from tools import claims, outputs

DOCS = Path(__file__).resolve().parents[1] / "docs"
WRITTEN = "Written by `python -m tools.pages`."
LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
NULL = re.compile(r" \(null: (.*)\)$")


def settings() -> str:
    """Returns the page of all settings, a table for each section, and those that do not go
    together."""
    lines = [
        "# Every setting",
        "",
        "`longctx config SECTION` prints the same. [Configuration](configuration.md) is the guide.",
        "",
        WRITTEN,
    ]
    for section, of in SECTIONS.items():
        lines += [
            "",
            f"## {section}",
            "",
            f"{of.__doc__}.",
            "",
            "| setting | type | default | meaning |",
            "|---|---|---|---|",
        ]
        for name, setting in FIELDS.items():
            if not name.startswith(f"{section}."):
                continue
            meaning = NULL.sub(r"; null: \1", setting.description or "")
            row = (
                f"`{name}`",
                f"`{type_name(setting.annotation)}`",
                f"`{yaml_text(setting.default)}`",
                meaning,
            )
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    lines += [
        "",
        "## What does not go together",
        "",
        "| setting | not where | because | way out |",
        "|---|---|---|---|",
    ]
    for (where, why, fix), rows in itertools.groupby(
        ROWS, key=lambda row: (row.where.condition, row.why, row.fix)
    ):
        lines.append(
            f"| {', '.join(f'`{row.refused}`' for row in rows)} | `{where}` | {why} | {fix} |"
        )
    return "\n".join([*lines, ""])


def names() -> str:
    """Returns the page of the public names: those of docs/api.md, with their parameters and the
    first paragraph on them."""
    lines = [
        "# Public names",
        "",
        "The site has whole docstrings, as [API reference](api.md).",
        "",
        WRITTEN,
    ]
    for line in (DOCS / "api.md").read_text("utf-8").splitlines():
        if line.startswith("## "):
            lines += ["", line]
        elif line.startswith("::: "):
            path = line.removeprefix("::: ").strip()
            lines += [
                "",
                f"### {path.rpartition('.')[2]}",
                "",
                "```text",
                f"{path}{parameters(named(path))}",
                "```",
                "",
            ]
            lines.append(" ".join(inspect.getdoc(named(path)).split("\n\n")[0].split()))  # type: ignore[union-attr]
    return "\n".join([*lines, ""])


def named(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def parameters(value: Any) -> str:
    """Returns the names of the parameters, each with its default, without types."""
    shown = []
    star = False
    for each in inspect.signature(value).parameters.values():
        if each.kind is each.KEYWORD_ONLY and not star:
            shown.append("*")
            star = True
        name = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "") + each.name
        simple = each.default is None or isinstance(each.default, (bool, int, float, str))
        default = "" if each.default is each.empty else f"={each.default!r}" if simple else "=.."
        shown.append(name + default)
    return f"({', '.join(shown)})"


def section(title: str) -> str:
    """Returns a section of the README as a page of docs/, with links from there."""
    readme = (DOCS.parent / "README.md").read_text("utf-8")
    _, _, rest = readme.partition(f"\n## {title}\n")
    text = rest.partition("\n## ")[0].strip()
    moved = LINK.sub(lambda link: _from_docs(link[1]), text)
    return f"# {title}\n\n{moved}\n\n{WRITTEN}\n"


def _from_docs(link: str) -> str:
    """Returns a link of the README as it is from docs/."""
    if link.startswith(("http", "#")):
        return link
    if link.startswith("docs/"):
        return link.removeprefix("docs/")
    return f"../{link}"


def install() -> str:
    """Returns the page on installing."""
    return section("Install")


def tour() -> str:
    """Returns the page of the tour."""
    return section("Tour")


def of_claims() -> str:
    """Returns the page of the README's claims."""
    return "\n".join([*claims.page(), "", WRITTEN, ""])


PAGES = {
    "settings.md": settings,
    "names.md": names,
    "install.md": install,
    "tour.md": tour,
    "evidence/claims.md": of_claims,
}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), "utf-8")
    for path in outputs.PAGES:
        text = path.read_text("utf-8")
        path.write_text(outputs.filled(text), "utf-8")
