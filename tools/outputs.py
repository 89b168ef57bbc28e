"""Writes what commands print into the pages that show it: a fence after `<!-- output -->` has what
the fence of bash above it prints, or so many first lines of it with `<!-- output: 1 -->`.

python -m tools.pages            # writes them; tests/project/test_outputs.py fails until it was run
"""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from longctx import cli

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
BLOCK = re.compile(
    r"(^```bash\n(?P<commands>[^`]+)^```\n\n<!-- output(?:: (?P<lines>\d+))? -->\n```text\n)"
    r"(?P<shown>.*?)(^```\n<!-- end of output -->)",
    re.DOTALL | re.MULTILINE,
)


def filled(text: str) -> str:
    """Returns a page with what its commands print now."""
    return BLOCK.sub(_written, text)


def _written(block: re.Match[str]) -> str:
    lines = printed(block["commands"]).splitlines()
    if block["lines"] is not None:
        lines = lines[: int(block["lines"])]
    shown = "\n".join(line.rstrip() for line in lines)
    return f"{block[1]}{shown}\n{block[5]}"


def printed(commands: str) -> str:
    """Returns what commands print to standard output in the repository's folder: `longctx`, or
    Python and torchrun, one a line."""
    outputs = []
    for line in commands.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[0] == "longctx":
            outputs.append(_of_longctx(words[1:]))
        else:
            outputs.append(_of_process(words))
    return "".join(outputs)


def _of_longctx(arguments: list[str]) -> str:
    out = io.StringIO()
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(out):
        cli.main(arguments)
    return out.getvalue()


def _of_process(words: list[str]) -> str:
    """Runs a program by the Python of this process."""
    program, *arguments = words
    if program == "torchrun":
        arguments = ["-m", "torch.distributed.run", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode:
        raise RuntimeError(f"{shlex.join(words)} ended with {done.returncode}: {done.stderr}")
    return done.stdout
