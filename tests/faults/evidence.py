"""Faults: what damaged files and mistakes in its input do to longctx. Writes results/faults.md.

    python -m tests.faults.evidence               # every part
    python -m tests.faults.evidence flips --scale 0.1 --seed 7

Part `flips`: one bit of one file is flipped at a time, and the store is opened and read, or the
newest checkpoint is looked for, verified and loaded, as `train --resume` does. A fault is noticed
if it is refused with a message that names the file. Part `inputs`: mutated settings, YAML, lengths,
profiles, corpora, stores and runs are given to commands: inputs.py. Part `kills`: ranks are killed
at random moments and runs started again; see kills.py. Part `machine`: ranks that stand still, full
disks, cut links, two preparations at once; see machine.py. As root. Part `soak`: 2,000 steps with a
kill every 50 or so. These three need an idle machine, or patience.

Each part replaces its own section of the results, unless --scale is given. Kills need a temporary
folder that is quick: TMPDIR.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random

from longctx.data.store.store import Store
from longctx.errors import UserError
from longctx.training.saved import checkpoint
from tests.faults.inputs import FULL, LIMIT_S, LONGEST_MESSAGE, TINY, Fuzzer
from tests.faults.kills import Killer, Soak
from tests.faults.machine import FAULTS, PATIENCE_S, Machine
from tests.training_cases import make_store

HEAD = "# Faults\n\nMade by `python -m tests.faults.evidence`.\n"
RESULTS = Path(__file__).parents[2] / "bench" / "results" / "faults.md"
NOTICED, UNNAMED, HARMLESS = (
    "noticed, file named",
    "noticed, file not named",
    "unnoticed, same content",
)
WRONG, CRASH = "unnoticed, other content", "an error that is no message"


@contextmanager
def flipped(folder: Path, random: Random) -> Iterator[Path]:
    """Flips a random bit of a random file in a folder, and yields the file; puts it back
    afterwards.

    Files are drawn evenly, so that small ones are hit too.
    """
    file = random.choice(
        sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    )
    before = file.read_bytes()
    after = bytearray(before)
    after[random.randrange(len(after))] ^= 1 << random.randrange(8)
    file.write_bytes(after)
    try:
        yield file
    finally:
        file.write_bytes(before)


def read_store(path: Path) -> str:
    """Returns a digest of all that training reads of a store."""
    store, digest = Store.open(path), hashlib.sha256()
    for document, length in enumerate(store.lengths):
        for array in store.read(document, 0, int(length)):
            digest.update(array.tobytes())
        digest.update(
            f"{store.name(document)} {store.weights[document]} "
            f"{store.trained_tokens[document]}".encode()
        )
    return digest.hexdigest()


def read_checkpoint(run: Path) -> str:
    """Returns a digest of what is resumed from the newest checkpoint of a run. Raises UserError if
    it is damaged."""
    found, damaged = checkpoint.newest(run)
    if found is None or damaged:
        raise UserError("; ".join(damaged))
    if problem := found.damage():
        raise UserError(problem)
    saved = checkpoint.SavedWeights(found.folder)
    names = sorted(name.removeprefix("model.") for name in saved.names if name.startswith("model."))
    digest = hashlib.sha256(repr(found.state).encode())
    for name, value in saved.read(names).items():
        digest.update(name.encode() + value.numpy().tobytes())
    return digest.hexdigest()


def outcome(read: Callable[[Path], str], path: Path, file: Path, expected: str) -> str:
    """Says what reading does after `file` has changed."""
    try:
        return HARMLESS if read(path) == expected else WRONG
    except UserError as error:
        return NOTICED if file.name in str(error) else UNNAMED
    except Exception:
        return CRASH


def flips(
    read: Callable[[Path], str], path: Path, folder: Path, count: int, seed: int = 0
) -> Counter[tuple[str, str]]:
    """Flips `count` bits, one at a time, of the files in a folder. Returns how often (file,
    outcome) was seen."""
    expected, random = read(path), Random(seed)
    seen: Counter[tuple[str, str]] = Counter()
    for _ in range(count):
        with flipped(folder, random) as file:
            seen[file.name, outcome(read, path, file, expected)] += 1
    return seen


def make(folder: Path) -> tuple[Path, Path]:
    """Makes a small store and a run of two checkpoints. Returns both folders."""
    source, store, run = folder / "source", folder / "store", folder / "run"
    source.mkdir()
    for module in ("abc", "bisect", "copy", "glob", "heapq"):
        shutil.copy(Path(shutil.__file__).with_name(f"{module}.py"), source)
    longctx = [sys.executable, "-m", "longctx"]
    subprocess.run(
        [*longctx, "prepare", "--source", source, "--tokenizer", "bytes", "--out", store],
        check=True,
    )
    subprocess.run(
        [*longctx, "train", *TINY.split(), f"--data.store={store}", f"--train.run_dir={run}"],
        check=True,
    )
    return store, run


def table(title: str, seen: Counter[tuple[str, str]]) -> str:
    """Returns a table of files by outcomes."""
    columns = [
        name
        for name in (NOTICED, UNNAMED, HARMLESS, WRONG, CRASH)
        if any(found == name for _, found in seen)
    ]
    rows = [
        [file, *(str(seen[file, column]) for column in columns)]
        for file in sorted({file for file, _ in seen})
    ]
    rows.append(
        [
            "all",
            *(
                str(sum(seen[file, column] for file in {file for file, _ in seen}))
                for column in columns
            ),
        ]
    )
    lines = [["file", *columns], ["---"] * (len(columns) + 1), *rows]
    return "\n".join([f"### {title}", "", *(f"| {' | '.join(line)} |" for line in lines), ""])


def flips_part(folder: Path, seed: int, scale: float) -> str:
    (store, run), count = make(folder), max(1, round(500 * scale))
    newest = max((run / "checkpoints").iterdir())
    found = (
        table(
            f"{count} flips in the files of a store", flips(read_store, store, store, count, seed)
        ),
        table(
            f"{count} flips in the files of a checkpoint",
            flips(read_checkpoint, run, newest, count, seed),
        ),
    )
    return "One bit of one file is flipped at a time; files are drawn evenly.\n\n" + "\n".join(
        found
    )


def inputs_part(folder: Path, seed: int, scale: float) -> str:
    lines = [
        f"| input | tried | refused | tracebacks | over {LIMIT_S} s | over {LONGEST_MESSAGE:,} "
        "characters |",
        "|---" * 6 + "|",
    ]
    fuzzer = Fuzzer(folder, seed)
    for kind, count in FULL.items():
        found = fuzzer.run(kind, max(1, round(scale * count)))
        lines.append(
            f"| {kind} | {found.tried:,} | {found.refused:,} | {found.tracebacks} | {found.slow} | "
            f"{found.long} |"
        )
        print(*found.failures, sep="\n", end="", file=sys.stderr)
    said = (
        "Examples, mutated at random: settings and values deleted, swapped, repeated, of "
        "another type or size, damaged text."
    )
    return "\n".join([said, "", *lines, ""])


def short_documents(folder: Path) -> Path:
    return make_store(folder, (120, 250, 340, 60))


def kills_part(folder: Path, seed: int, scale: float) -> str:
    killer, random, most = (
        Killer(folder, short_documents(folder), seed),
        Random(seed),
        max(1, round(300 * scale)),
    )
    with suppress(KeyboardInterrupt):  # Ctrl-C: fewer runs
        while killer.tried < most:
            killer.run(random.choice([[2], [2], [2], [3], [1, 2, 3]]), most - killer.tried)
            print(killer.table, *killer.failures, sep="\n", file=sys.stderr, flush=True)
    return (
        f"{killer.runs} runs of {killer.steps} steps, on 2 ranks unless the number is said, with a "
        "checkpoint every 2 steps. "
        "A signal is sent at a random moment of every start, and the run is started again, until "
        "it is finished. A fault "
        "counts as survived if losses, gradient norms, weights and moments at the end are those of "
        "a run that nobody "
        "disturbed, bit by bit (on a changing number of ranks: losses to 1e-4), if no complete "
        "checkpoint was passed over, "
        f"and if the ranks that were left ended by themselves with an error.\n\n{killer.table}"
    )


def machine_part(folder: Path, seed: int, scale: float) -> str:
    machine, skipped = Machine(folder, short_documents(folder), seed), []
    for name, (why_not, count) in FAULTS.items():
        if reason := why_not():
            skipped.append(f"Not tried: {name.replace('_', ' ')}, because {reason}.\n")
            continue
        for _ in range(max(1, round(count * scale))):
            getattr(machine, name)()
        print(machine.table, *machine.failures, sep="\n", file=sys.stderr, flush=True)
    said = (
        "Survived: the run said what was wrong, and came to the same end, bit by bit, once the "
        "fault was over. Ranks that wait "
        f"for one that does not answer end after `train.timeout_s`, here {PATIENCE_S:.0f} s."
    )
    return "\n".join([said, "", machine.table, *skipped])


def soak_part(folder: Path, seed: int, scale: float) -> str:
    soak = Soak(folder, short_documents(folder), seed, steps=max(100, round(2000 * scale)))
    lines = soak.both()
    print(*soak.failures, sep="\n", file=sys.stderr)
    same = "are the same, bit by bit" if not soak.failures else "differ"
    said = (
        "Two ranks, a checkpoint every 10 steps. Losses, gradient norms, weights and moments of "
        f"both runs {same}. "
        "Medians over the first and the last quarter, of rank 0; with kills, of its processes just "
        "before each kill."
    )
    head = "| run | steps | kills | resident KiB | open files | threads |"
    return "\n".join([said, "", head, "|---" * 6 + "|", *lines, ""])


PARTS: dict[str, tuple[str, Callable[[Path, int, float], str]]] = {
    "flips": ("Single bits", flips_part),
    "inputs": ("Mistakes in inputs", inputs_part),
    "kills": ("Kills", kills_part),
    "machine": ("Machines", machine_part),
    "soak": ("A long run", soak_part),
}


def replaced(text: str, sections: Mapping[str, str]) -> str:
    """Returns the page with new sections by title, in the order of PARTS; its other sections are
    kept."""
    old = dict(section.split("\n", 1) for section in text.split("\n## ")[1:])
    sections = {title: body.strip("\n") for title, body in {**old, **sections}.items()}
    titles = [title for title, _ in PARTS.values() if title in sections]
    return HEAD + "".join(f"\n## {title}\n\n{sections[title]}\n" for title in titles)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="factor of the number of cases")
    arguments = parser.parse_args()
    sections = {}
    for part in arguments.parts or PARTS:
        title, run = PARTS[part]
        with tempfile.TemporaryDirectory() as folder:
            sections[title] = run(Path(folder), arguments.seed, arguments.scale)
        print(f"## {title}\n\n{sections[title]}", flush=True)
        if arguments.scale == 1:
            RESULTS.write_text(
                replaced(RESULTS.read_text("utf-8") if RESULTS.exists() else "", sections), "utf-8"
            )


if __name__ == "__main__":
    main()
