"""How dense the code is, by room: a folder of longctx, or attention, or data.

python -m tools.density             # the table, and the functions with most nodes
python -m tools.density list ROOM   # where the counted things of a room are, for whoever opens it

Columns: lines; nodes of the syntax tree per line; share of code lines over 100 columns in percent;
then, per 1,000 code lines (no blank lines, comments or docstrings), the constructs of `COUNTED`;
and the nodes of the largest function. Device code of Triton is left out: its argument lists are
those of the compiler. `python -m tools.ratchet` compares the table with the committed one.

Other codebases in August 2026: torchtitan has 2.6 nodes a line, TRL 3.0, nanoGPT 4.3, picotron 4.5;
per 1,000 code lines they have 1.3 to 2.2 splats, 1.2 to 4.3 calls with five positional arguments
and 7 to 25 conditional expressions.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = 100
LEFT_OUT = {"triton_device.py", "merge_device.py"}
COMPREHENSIONS = (ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COUNTED = {
    "splat": "a call that splats a tuple, f(*t)",
    "five": "a call with five and more positional arguments",
    "several": "several assignments at once, a, b = x, y",
    "conditional": "a conditional expression, x if c else y",
    "nested": "a comprehension in a comprehension",
}


@dataclass
class Room:
    """What is counted in the files of a room."""

    lines: int = 0
    code_lines: int = 0
    long_lines: int = 0
    nodes: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    places: list[tuple[str, str]] = field(default_factory=list)
    """Pairs of a construct and where it is, as path:line."""
    functions: list[tuple[int, str]] = field(default_factory=list)
    """Pairs of the nodes of a function and where it is, as path:line name."""

    def add(self, path: Path, name: str) -> None:
        """Counts one file, which is called `name` in places."""
        source = path.read_text("utf-8")
        tree = ast.parse(source)
        for node in ast.walk(tree):
            self._add_node(node, name)
        self._add_lines(source, documentation_lines(tree))

    def _add_node(self, node: ast.AST, name: str) -> None:
        self.nodes += not isinstance(node, ast.expr_context)
        if isinstance(node, FUNCTIONS):
            self.functions.append((nodes_of(node), f"{name}:{node.lineno} {node.name}"))
        for construct in constructs_of(node):
            self.counts[construct] += 1
            line = getattr(node, "lineno", 0)
            self.places.append((construct, f"{name}:{line}"))

    def _add_lines(self, source: str, documentation: set[int]) -> None:
        for number, line in enumerate(source.splitlines(), start=1):
            self.lines += 1
            text = line.strip()
            if text and not text.startswith("#") and number not in documentation:
                self.code_lines += 1
                self.long_lines += len(line.rstrip()) > COLUMNS

    def figures(self) -> dict[str, float]:
        """Returns the row of the table without `lines`: each figure is worse when it is larger."""
        code_lines = max(1, self.code_lines)
        rates = {name: round(1000 * self.counts[name] / code_lines, 1) for name in COUNTED}
        return {
            "nodes_per_line": round(self.nodes / max(1, self.lines), 2),
            "over_100": round(100 * self.long_lines / code_lines, 1),
            **rates,
            "largest": max((nodes for nodes, _ in self.functions), default=0),
        }


def nodes_of(tree: ast.AST) -> int:
    """Returns the number of nodes, without those that only say whether a name is read or written."""
    return sum(not isinstance(node, ast.expr_context) for node in ast.walk(tree))


def documentation_lines(tree: ast.AST) -> set[int]:
    """Returns the numbers of the lines of docstrings."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines.update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return lines


def constructs_of(node: ast.AST) -> Iterator[str]:
    """Yields the names in `COUNTED` that a node is."""
    if isinstance(node, ast.Call):
        if any(isinstance(argument, ast.Starred) for argument in node.args):
            yield "splat"
        if len(node.args) >= 5:
            yield "five"
    elif isinstance(node, ast.Assign):
        if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield "several"
    elif isinstance(node, ast.IfExp):
        yield "conditional"
    elif isinstance(node, COMPREHENSIONS):
        inside = (child for child in ast.walk(node) if child is not node)
        if any(isinstance(child, COMPREHENSIONS) for child in inside):
            yield "nested"


def room_of(path: Path) -> str:
    """Returns the room of a product file: its folder below longctx, or attention or data."""
    parts = path.parts
    if parts[0] == "longctx":
        return parts[1] if len(parts) > 2 else "longctx"
    return parts[0]


def product_files(root: Path) -> list[Path]:
    """Returns the paths of all product files, from `root`; links are left out."""
    found = []
    for folder in ("attention", "data", "longctx"):
        for path in sorted((root / folder).rglob("*.py")):
            within = path.relative_to(root)
            linked = any((root / parent).is_symlink() for parent in within.parents)
            if not linked and path.name not in LEFT_OUT:
                found.append(within)
    return found


def measure(root: Path = ROOT) -> dict[str, Room]:
    """Returns what is counted by room, and in "all" what is counted in all of them."""
    rooms = {"all": Room()}
    for path in product_files(root):
        name = room_of(path)
        rooms.setdefault(name, Room())
        for room in (rooms[name], rooms["all"]):
            room.add(root / path, name=str(path))
    return rooms


def table(rooms: dict[str, Room]) -> Iterator[str]:
    """Yields the lines of the table: the rooms with most code first."""
    columns = list(rooms["all"].figures())
    yield "  ".join(["room".ljust(14), "lines".rjust(6), *columns])
    for name, room in sorted(rooms.items(), key=lambda item: -item[1].lines):
        figures = room.figures()
        cells = [str(figures[column]).rjust(len(column)) for column in columns]
        yield "  ".join([name.ljust(14), f"{room.lines:6}", *cells])


def main(arguments: list[str]) -> None:
    rooms = measure()
    if arguments:
        room = rooms[arguments[1]]
        for construct, place in sorted(room.places):
            print(f"{construct:12} {place}")
        return
    print(*table(rooms), sep="\n")
    largest = sorted(rooms["all"].functions, reverse=True)[:12]
    print("functions with most nodes:")
    for nodes, place in largest:
        print(f"  {nodes} {place}")


if __name__ == "__main__":
    main(sys.argv[1:])
