"""Parts of an HTML page in one file that needs nothing else: no network, no script; pictures and numbers are inside."""

from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files


def page(title: str, sections: Sequence[str]) -> str:
    """Returns the whole page as HTML text. `title` is plain text, `sections` are HTML."""
    style = files("longctx.plots").joinpath("page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(sections)
        + "\n</main>\n</body>\n</html>\n"
    )


def figure(uri: str, title: str, words: str) -> str:
    """Returns a picture with plain-text title and caption; on a narrow screen the picture scrolls, to stay readable."""
    title, words = escape(title), escape(words)
    picture = f'<div class=scroll><img src="{uri}" alt="{title}"></div>'
    return f"<figure><h3>{title}</h3>{picture}<figcaption>{words}</figcaption></figure>"


def numbers(headings: Sequence[str], lines: Sequence[Sequence[str]], looks: Mapping[str, str] | None = None) -> str:
    """Returns a table of plain-text cells whose first column holds names. `looks` maps a name to the CSS class of its row."""
    rows = [f"<tr>{''.join(f'<th>{escape(heading)}' for heading in headings)}</tr>"]
    for name, *cells in lines:
        look = f" class={looks[name]}" if looks and name in looks else ""
        rows.append(f"<tr{look}><th>{escape(name)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    return f"<div class=scroll><table class=numbers>{''.join(rows)}</table></div>"


def facts(values: Mapping[str, object]) -> str:
    """Returns a table of names and values."""
    lines = "".join(f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in values.items())
    return f"<table class=facts>{lines}</table>"


def cards(values: Sequence[tuple[str, str]]) -> str:
    """Returns boxes of a large figure and the words below it."""
    boxes = "".join(f"<div class=card><b>{escape(value)}</b><span>{escape(words)}</span></div>" for value, words in values)
    return f"<div class=cards>{boxes}</div>"
