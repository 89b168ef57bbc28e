"""Writes long conversations about source code as JSONL: a file of the standard library, a question,
and its answer.

    python examples/code_conversations.py data/conversations

writes train.jsonl and held_out.jsonl with conversations of about 200 to 8,000 tokens, many short
and few long, as in real chats. The assistant lists the definitions of a module, with the first line
of each docstring.
"""

import argparse
import ast
import hashlib
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

QUESTION = (
    "List the public classes and functions of this module, each with the first line of its "
    "docstring."
)
SMALLEST, LARGEST = 400, 26_000
"""Limits on the size of a file in bytes."""
HELD_OUT = 8
"""One of this many conversations is held out, by a hash of its name."""


def conversations() -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Yields the name and conversation of every suitable module, sorted by name."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idlelib",
        "lib2to3",
        "__pycache__",
    }
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root).as_posix()
        if (
            left_out.isdisjoint(file.relative_to(root).parts)
            and SMALLEST <= file.stat().st_size <= LARGEST
        ):
            source = file.read_text("utf-8", errors="replace")
            if answer := _answer(source):
                asked = {"role": "user", "content": question(name, source)}
                yield name, [asked, {"role": "assistant", "content": answer}]


def question(name: str, source: str) -> str:
    return f"{QUESTION}\n\n{name}:\n\n{source}"


def _answer(source: str) -> str:
    """Returns one line per definition; empty if there are none, or if the file cannot be parsed."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return ""
    found = []
    for node in body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            said = (ast.get_docstring(node) or "no docstring").strip().splitlines()[0]
            found.append(f"- {kind} `{node.name}`: {said}")
    return "\n".join(found[:20])


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Write conversations about the standard library's source code"
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("out", type=Path, nargs="?", help="folder of train.jsonl and held_out.jsonl")
    what.add_argument(
        "--ask", type=Path, metavar="FILE", help="only print the question about this file"
    )
    arguments = parser.parse_args()
    if arguments.ask is not None:
        print(question(arguments.ask.name, arguments.ask.read_text("utf-8")))
        return
    folder = arguments.out
    folder.mkdir(parents=True, exist_ok=True)
    lines: dict[str, list[str]] = {"train": [], "held_out": []}
    for name, messages in conversations():
        held_out = hashlib.sha256(name.encode()).digest()[0] % HELD_OUT == 0
        lines["held_out" if held_out else "train"].append(json.dumps({"messages": messages}))
    for part, texts in lines.items():
        (folder / f"{part}.jsonl").write_text("\n".join(texts) + "\n", "utf-8")
        print(f"{folder / part}.jsonl: {len(texts)} conversations")


if __name__ == "__main__":
    main()
