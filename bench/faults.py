"""Counts how longctx meets faults: mistakes in its input.

    python -m bench.faults inputs                # rows for bench/results/faults.md: thousands of mutated inputs
    python -m bench.faults inputs --seed 7 --scale 0.1

A part is a function in `PARTS`: it gets the seed and a factor of its counts, and returns the lines of a Markdown table.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.fuzz_inputs import FULL, LIMIT_S, LONGEST_MESSAGE, Fuzzer


def inputs(seed: int, scale: float) -> list[str]:
    """Gives mutated inputs to the commands; see `tests/fuzz_inputs.py`."""
    lines = [
        f"| input | tried | refused | tracebacks | over {LIMIT_S} s | over {LONGEST_MESSAGE:,} characters |",
        "|---" * 6 + "|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        fuzzer = Fuzzer(Path(folder), seed)
        for kind, count in FULL.items():
            found = fuzzer.run(kind, max(1, int(scale * count)))
            lines.append(f"| {kind} | {found.tried:,} | {found.refused:,} | {found.tracebacks} | {found.slow} | {found.long} |")
            print(*found.failures, sep="\n", end="", file=sys.stderr)
    return lines


PARTS: dict[str, Callable[[int, float], list[str]]] = {"inputs": inputs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="factor of the number of cases")
    arguments = parser.parse_args()
    print(*PARTS[arguments.part](arguments.seed, arguments.scale), sep="\n")


if __name__ == "__main__":
    main()
