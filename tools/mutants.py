"""Small faults put into the code one at a time: which test finds each? `tools/mutants.json` is the
list.

python -m tools.mutants find [tests/ -k ..] # looks for a test where it is "unknown", or "missing" by now: among these, or by
                                            # default among those that the fault names
python -m tools.mutants repeat              # the test that found a fault must find it again; exit status 1 if one does not.
                                            # Faults that survived are tried again: one that is found now is said and recorded
python -m tools.mutants score               # prints how many were found, room by room

The first 120 were drawn by chance before the code became a third smaller, the others by somebody
who had not seen the tests. A fault is a part of a function (a class, a table of a module) with
another text: `before` occurs exactly once in it. The list is a contract: what was found is found
after a change of code or tests, unless the function is gone. A function is looked for in all files,
as it may have moved.

`by` is the test that found a fault, or "unknown" (not tried yet), "survives" (none of `tests` fails),
"timed out" (they did not end, not even alone with more time), "missing" (there is no such test),
"changed" (the function lacks the text) or "gone" (there is no such function).
"""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

Fault = dict[str, Any]

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_name("mutants.json")
PRODUCT = ("attention", "data", "longctx")
OUTPUTS = shutil.ignore_patterns(".venv", ".git", "runs", "stores", "checkpoints", ".*_cache")
QUICK = "not slow and not gpu"  # what `make test` runs
LIMIT_S = 240.0
LIMIT_ALONE_S = 900.0  # of a fault whose tests did not end beside another one
# A line of pytest's summary; parameters may have spaces, also " - ".
FAILED = re.compile(r"(?:FAILED|ERROR) (tests/[^\[\s]+(?:\[.*?\](?= - |$))?)")
COPY = "LONGCTX_MUTANTS_COPY"  # names the copy in the environment of its processes


def definitions(node: ast.AST, wanted: str, inside: str = "") -> Iterator[ast.stmt]:
    """Yields every function, class or assigned name of this qualified name ("Class.method")."""
    for child in ast.iter_child_nodes(node):
        names: list[str] = []
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            names = [child.name]
        elif isinstance(child, ast.Assign | ast.AnnAssign):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
        if isinstance(child, ast.stmt) and wanted in [inside + name for name in names]:
            yield child
        if isinstance(child, ast.ClassDef):
            yield from definitions(child, wanted, f"{inside}{child.name}.")


def with_fault(text: str, wanted: str, before: str, after: str) -> str | None:
    """Returns a module's text with a part of one definition replaced, None where no definition of
    this name has that part exactly once."""
    lines = text.split("\n")
    for definition in definitions(ast.parse(text), wanted):
        start = definition.lineno - 1
        end = definition.end_lineno
        part = "\n".join(lines[start:end])
        if part.count(before) == 1:
            replaced = part.replace(before, after)
            return "\n".join([*lines[:start], replaced, *lines[end:]])
    return None


def is_defined(root: Path, wanted: str) -> bool:
    """Says whether any product module defines this qualified name."""
    for path in modules(root):
        if any(definitions(ast.parse(path.read_text("utf-8")), wanted)):
            return True
    return False


def modules(root: Path) -> list[Path]:
    """Returns the paths of all product modules."""
    return sorted(path for room in PRODUCT for path in (root / room).rglob("*.py"))


def outputs(folder: str, names: list[str]) -> set[str]:
    """Returns what a copy leaves out of a folder: outputs in the root, but not files of tests."""
    return OUTPUTS(folder, names) if Path(folder) == ROOT else set()


class Copy:
    """A copy of the repository, with one fault at a time.

    Attributes:
        root: its folder.
        sound: tests that pass in it without a fault, as far as that has been asked.
        broken: tests that fail in it without a fault, and so tell nothing.
    """

    def __init__(self, folder: Path) -> None:
        shutil.copytree(ROOT, folder, symlinks=True, ignore=outputs)
        self.root = folder
        self.sound: set[str] = set()
        self.broken: set[str] = set()

    def result(self, fault: Fault, tests: list[str], limit_s: float) -> str:
        """Returns what `by` says of a fault: tests run with it until one fails that passes without
        it."""
        place = self._place(fault)
        if place is None:
            return "changed" if is_defined(self.root, fault["function"]) else "gone"
        path, faulty = place
        while True:
            text = path.read_text("utf-8")
            path.write_text(faulty, "utf-8")
            try:
                left_out = [f"--deselect={test}" for test in sorted(self.broken)]
                result = run_tests(self.root, [*tests, *left_out], limit_s)
            finally:
                path.write_text(text, "utf-8")
            if result in self.broken:  # pytest cannot leave it out
                return "missing"
            if not is_test(result) or self._is_sound(result):
                return result

    def _place(self, fault: Fault) -> tuple[Path, str] | None:
        """Returns the module that has the function of a fault, and its text with the fault."""
        first = self.root / fault["file"]
        elsewhere = [path for path in modules(self.root) if path != first]
        for path in [first, *elsewhere]:
            if not path.exists():
                continue
            text = path.read_text("utf-8")
            faulty = with_fault(text, fault["function"], fault["before"], fault["after"])
            if faulty is not None:
                return path, faulty
        return None

    def _is_sound(self, test: str) -> bool:
        """Says whether a test passes without a fault."""
        if test not in self.sound:
            passes = run_tests(self.root, [test], LIMIT_S) == "survives"
            (self.sound if passes else self.broken).add(test)
        return test in self.sound


def run_tests(root: Path, tests: list[str], limit_s: float) -> str:
    """Runs tests of a copy until one fails. Returns what `by` says of the fault in it."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider", *tests]
    own = {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", COPY: str(root)}
    try:
        done = subprocess.run(
            command,
            cwd=root,
            env=os.environ | own,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        return "timed out"
    finally:
        end_processes(root)
    return classified(done.returncode, done.stdout, tests)


def classified(status: int, output: str, tests: list[str]) -> str:
    """Returns the first failed test of a pytest run by its exit status and summary, "survives" if
    none failed, "missing" if there is no such test.

    A run that died (a negative status) or that names no test counts for the first of `tests`.
    """
    if status == 0:
        return "survives"
    if status > 2:
        return "missing"
    for line in output.splitlines():
        failed = FAILED.match(line)
        if failed is not None:
            return failed[1]
    return tests[0]


def end_processes(root: Path) -> None:
    """Ends what the tests of a copy left running, such as the processes of a launcher."""
    mark = f"{COPY}={root}".encode()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in environment.read_bytes().split(b"\0"):
                os.kill(int(environment.parent.name), signal.SIGKILL)
        except OSError:  # it ended meanwhile, or is another user's
            continue


def try_all(
    faults: list[Fault],
    tests_of: Callable[[Fault], list[str]],
    done: Callable[[Fault, str], None],
) -> None:
    """Tries faults in two copies at a time, then those that timed out again, alone.

    Args:
        faults: in the order in which they are tried.
        tests_of: Returns pytest's arguments for a fault.
        done: Is told what became of a fault, one at a time.
    """
    waiting = list(faults)
    late: list[Fault] = []
    copies: list[Copy] = []
    lock = Lock()

    def worker(folder: str) -> None:
        copy = Copy(Path(folder, "copy"))
        copies.append(copy)
        while True:
            with lock:
                if not waiting:
                    return
                fault = waiting.pop(0)
            result = copy.result(fault, tests=tests_of(fault), limit_s=LIMIT_S)
            with lock:
                if result == "timed out":
                    late.append(fault)
                else:
                    done(fault, result)

    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        with ThreadPoolExecutor(2) as pool:
            for _ in pool.map(worker, (one, two)):
                pass
        for fault in late:
            result = copies[0].result(fault, tests=tests_of(fault), limit_s=LIMIT_ALONE_S)
            done(fault, result)


def is_test(result: str) -> bool:
    """Says whether a result is the test that found a fault."""
    return result.startswith("tests/")


def is_found(fault: Fault) -> bool:
    return is_test(fault["by"])


def quick_tests(fault: Fault) -> list[str]:
    """Returns pytest's arguments for the quick ones of the tests that a fault names."""
    return [*fault.get("tests", ["tests"]), "-m", QUICK]


def write(listed: list[Fault]) -> None:
    LIST.write_text(json.dumps(listed, indent=1) + "\n", "utf-8")


def find(listed: list[Fault], arguments: list[str]) -> int:
    """Looks for a test where none is known, and writes it into the list."""

    def tests_of(fault: Fault) -> list[str]:
        return [*arguments, "-m", QUICK] if arguments else quick_tests(fault)

    def done(fault: Fault, result: str) -> None:
        fault["by"] = result
        print(f"{fault['function']}: {result}", flush=True)
        write(listed)

    try_all([fault for fault in listed if fault["by"] in ("unknown", "missing")], tests_of, done)
    return 0


def repeat(listed: list[Fault]) -> int:
    """Tries every fault again that has been tried. Returns 1 if one is found no longer."""
    lost: list[Fault] = []

    def tests_of(fault: Fault) -> list[str]:
        return [fault["by"]] if is_found(fault) else quick_tests(fault)

    def done(fault: Fault, result: str) -> None:
        found_now = is_test(result)
        if is_found(fault) and not found_now:
            print(f"{result}: {json.dumps(fault, indent=1)}", flush=True)
            lost.append(fault)
        if result in ("missing", "gone") or not is_found(fault):
            if found_now:
                print(f"{fault['function']}: survived, is found by {result}", flush=True)
            fault["by"] = result
            write(listed)

    try_all([fault for fault in listed if fault["by"] != "unknown"], tests_of, done)
    print(f"{len(lost)} of {len(listed)} are found no longer")
    return 1 if lost else 0


def room_of(file: str) -> str:
    """Returns the folder that a module belongs to: "attention", "data", or the one in longctx/."""
    parts = Path(file).parts
    return parts[1] if parts[0] == "longctx" and len(parts) > 2 else parts[0]


def score(listed: list[Fault]) -> int:
    """Prints how many faults of each room were found, survived, timed out, or have no result."""
    kinds = ("found", "survives", "timed out", "no result")
    counts: dict[str, Counter[str]] = {}
    for fault in listed:
        kind = "found" if is_found(fault) else fault["by"]
        if kind not in kinds:
            kind = "no result"
        for room in (room_of(fault["file"]), "all"):
            counts.setdefault(room, Counter())[kind] += 1
    all_rooms = counts.pop("all", Counter())
    print("| room | found | survived | timed out | no result |")
    print("|---|---:|---:|---:|---:|")
    for room in [*sorted(counts), "all"]:
        count = counts.get(room, all_rooms)
        print(f"| {room} | " + " | ".join(str(count[kind]) for kind in kinds) + " |")
    return 0


def main(command: str, *arguments: str) -> int:
    listed: list[Fault] = json.loads(LIST.read_text("utf-8"))
    if command == "find":
        return find(listed, list(arguments))
    if command == "repeat":
        return repeat(listed)
    if command == "score":
        return score(listed)
    raise SystemExit(f"{command}: is none of find, repeat, score")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
