"""What `longctx check-step` says of set-ups with one fault each, after published faults, and of
right ones that look odd:

python -m bench.check_mutants                                               # one process
torchrun --standalone --nproc-per-node 2 -m bench.check_mutants             # two
python -m bench.check_mutants --dtype bfloat16                              # of weights

Each row of `MUTANTS` has words that a right name of its fault has; none: the set-up is right.
Writes bench/results/check_mutants.md.
"""

import argparse
import re
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path

from transformers.utils import logging

from bench.check_mutants_split import BY_HAND, rank, ranks, split
from bench.check_mutants_trainer import MUTANTS
from longctx.check import PROBES, CheckError, check_step

LOCATED = ("attention is wrong", "hidden states ")
"""How faults begin that say where attention is wrong, with several causes."""
RESULTS = Path(__file__).parent / "results" / "check_mutants.md"
for way, zigzag, fault, words in BY_HAND:
    name = (
        f"{'zigzag ' * zigzag}{way}, {fault}"
        if words
        else f"right: {'zigzag ' * zigzag}{way}{fault and ', '}{fault}"
    )
    MUTANTS[name] = split(way, fault, zigzag), fault if words else "", 2, words


def judged(kinds: list[str], unnamed: bool, words: str) -> str:
    """Returns what became of a mutant; "located": its tokens are found, and several causes are
    named."""
    if not words:
        return "false alarm" if kinds else "right"
    if any(re.search(words, kind) for kind in kinds if not kind.startswith(LOCATED)):
        return "named"
    if any(kind.startswith(LOCATED) for kind in kinds):
        return "located"
    return (
        "missed"
        if not kinds
        else "unnamed"
        if unnamed or kinds == ["weights of predictions differ"]
        else "misnamed"
    )


def write(found: dict[str, str], dtype: str) -> None:
    """Puts rows into the results, in place of those of the same set-ups."""
    title = f"## {ranks()} process{'es' * (ranks() > 1)}"
    if dtype != "float32":
        title += f", {dtype}"
    parts = (
        {
            part.splitlines()[0]: part
            for part in re.split("(?m)^(?=## )", RESULTS.read_text())
            if part
        }
        if RESULTS.exists()
        else {}
    )
    rows = {
        row.split(" | ")[0][2:]: row
        for row in parts.get(title, "").splitlines()
        if row.startswith("| ")
    } | found
    rows = {name: rows[name] for name in MUTANTS if name in rows}
    counts = Counter(row.split(" | ")[-1].rstrip("| ") for row in rows.values())
    head = [
        title,
        "",
        ", ".join(f"{n} {name}" for name, n in counts.most_common()),
        "",
        "| set-up | fault | verdict | |",
        "|---|---|---|---|",
    ]
    parts[title] = "\n".join([*head, *rows.values(), ""])
    RESULTS.write_text("\n".join(parts[key].rstrip() + "\n" for key in sorted(parts)))


def main() -> None:
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pattern", nargs="?", default="", help="of names of set-ups")
    parser.add_argument("--dtype", default="float32", help="of weights")
    arguments = parser.parse_args()
    asked = PROBES[:4] if ranks() == 1 else (*PROBES[:2], PROBES[4])
    asked = tuple(replace(probe, dtype=arguments.dtype) for probe in asked)
    for name, (make, fault, processes, words) in MUTANTS.items():
        if processes != ranks() or not re.search(arguments.pattern, name):
            continue
        try:
            report = check_step(make, asked)
            kinds = list(
                dict.fromkeys(each.kind for verdict in report.verdicts for each in verdict.findings)
            )
            became = judged(kinds, report.status == 2, words)
        except (CheckError, ValueError) as error:
            kinds, became = [f"refused: {str(error).splitlines()[0]}"], "refused"
        row = f"| {name} | {fault or '-'} | {'; '.join(kinds) or 'right'} | {became} |"
        if rank() == 0:
            print(row, flush=True)
            write({name: row}, arguments.dtype)


if __name__ == "__main__":
    main()
