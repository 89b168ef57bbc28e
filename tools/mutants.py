"""Small faults put into the code one at a time: which test finds each? `tools/mutants.json` is the
list.

python -m tools.mutants repeat              # the test that found a fault must find it again; exit status 1 if one does not
python -m tools.mutants find [tests/ -k ..] # looks for a test where it is "unknown", or "missing" by now: among these, or by
                                            # default among the cheapest ones that call the function

The list was drawn by chance before the code became a third smaller: one line of a function, with
another operator or number, a condition reversed or a call left out. It is a contract: what was
found is found after a change of code or tests, unless the function is gone. A function is looked
for in all files, as it may have moved. "changed" is one without the line, "survives" a fault that
none of the tests found that call the function, the cheapest first, for two minutes.
"""

import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

ROOT, LIST = Path(__file__).resolve().parents[1], Path(__file__).with_name("mutants.json")
LEFT_OUT = shutil.ignore_patterns(".venv", ".git", "runs", "stores", "checkpoints", ".*_cache")
LIMIT_S = 900.0


def functions(root: Path, wanted: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yields file and definition of every product function of this qualified name."""

    def inside(node: ast.AST, name: str) -> Iterator[ast.FunctionDef]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield from inside(child, f"{name}{child.name}.")
            elif isinstance(child, ast.FunctionDef) and name + child.name == wanted:
                yield child

    for path in sorted(
        path for part in ("attention", "data", "longctx") for path in (root / part).rglob("*.py")
    ):
        for function in inside(ast.parse(path.read_text("utf-8")), ""):
            yield str(path.relative_to(root)), function


def killed_by(root: Path, fault: dict[str, str], tests: list[str]) -> str:
    """Puts a fault into a copy and runs tests. Returns the first one that fails, or what became of
    the fault."""
    same = sorted(functions(root, fault["function"]), key=lambda found: found[0] != fault["file"])
    for file, function in same:
        lines = (text := (root / file).read_text("utf-8")).split("\n")
        for at in range(function.lineno - 1, function.end_lineno or 0):
            if lines[at].strip() == fault["before"]:
                lines[at] = lines[at].replace(fault["before"], fault["after"])
                (root / file).write_text("\n".join(lines), "utf-8")
                try:
                    return failing(root, tests)
                finally:
                    (root / file).write_text(text, "utf-8")
    return "changed" if same else "gone"


def failing(root: Path, tests: list[str]) -> str:
    """Returns the first test that fails or hangs, "survives" if none does, "missing" if there is no
    such test."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return tests[0]
    if done.returncode not in (1, 2):
        return "missing" if done.returncode else "survives"
    failed = [
        line.split(" ", 1)[1]
        for line in done.stdout.splitlines()
        if line.startswith(("FAILED tests", "ERROR tests"))
    ]
    return failed[0].split(" - ")[0] if failed else tests[0]


def main(command: str, *arguments: str) -> int:
    listed, lost, lock = json.loads(LIST.read_text("utf-8")), [], Lock()
    repeats = command == "repeat"
    waiting = [
        fault
        for fault in listed
        if ("::" in fault["by"] if repeats else fault["by"] in ("unknown", "missing"))
    ]

    def worker(folder: str) -> None:
        root = Path(shutil.copytree(ROOT, Path(folder, "copy"), symlinks=True, ignore=LEFT_OUT))
        while waiting:
            fault = waiting.pop()
            found = killed_by(
                root,
                fault,
                [fault["by"]] if repeats else [*arguments] or fault.get("tests", ["tests"]),
            )
            with lock:
                if repeats and found in ("survives", "missing", "changed"):
                    lost.append(fault)
                    print(f"{found}: {json.dumps(fault, indent=1)}", flush=True)
                if not repeats or found in ("missing", "gone"):
                    fault["by"] = found
                    fault.pop("tests", None)
                    LIST.write_text(json.dumps(listed, indent=1) + "\n", "utf-8")

    with (
        tempfile.TemporaryDirectory() as one,
        tempfile.TemporaryDirectory() as two,
        ThreadPoolExecutor(2) as pool,
    ):
        list(pool.map(worker, (one, two)))
    print(f"{len(lost)} of {len(listed)} are found no longer")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
