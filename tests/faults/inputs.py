"""Mutated inputs: settings, YAML, overrides, lengths, profiles, corpora, stores and runs with
mistakes, given to the commands.

Whatever is wrong with an input, a command must end with a message and not with a traceback, and
within seconds. A case depends only on its kind, the seed and its number.
`tests/project/test_fuzz_inputs.py` runs some, `python -m tests.faults.evidence inputs` counts many.
"""

import contextlib
import copy
import io
import json
import math
import os
import random
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import yaml

from longctx.cli import main
from longctx.config import Config
from longctx.config.names import SETTINGS
from longctx.config.problems import plain

FULL = {
    "configs": 2000,
    "YAML texts": 500,
    "overrides": 300,
    "lengths files": 200,
    "profiles": 200,
    "corpus files": 200,
    "saved files": 600,
}
"""Cases of each kind in the long form."""
TINY = (
    "--model.overrides.hidden_size=32 --model.overrides.intermediate_size=64 "
    "--model.overrides.num_hidden_layers=1 --model.overrides.num_attention_heads=2 "
    "--model.overrides.num_key_value_heads=1 --model.overrides.head_dim=16 --model.vocab_size=257 "
    "--batch.global_tokens=2000 "
    "--batch.tokens_per_rank=2000 --train.steps=2 --checkpoint.every=1 --train.device=cpu"
)
LIMIT_S = 5
LONGEST_MESSAGE = 4000
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

KEYS: tuple[Any, ...] = (
    8192,
    -1,
    1.5,
    True,
    None,
    "",
    "8192",
    "mode",
    "steps",
    "größe",
    "a.b",
    "\x00",
    "x" * 5000,
)
# fmt: off
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 17, 1 << 20, 17179869184, (1 << 40) + 1, 1 << 63, -(1 << 63), 10**400, 0.5, -0.1,
    1e-300, 1e300, math.nan, math.inf, -math.inf, "", " ", "auto", "null", "1e5", "0x10", "2001-13-45", "x" * 9000, ".", "/",
    "/dev/null", "nowhere.yaml", "a\x00b", "\ud800", "größe → 🎲", "\x1b[31m", "{{x}}", "%s %d", "../..", "~", [], [1], [[]],
    [[[[]]]], ["q_proj"], [None, "a", 1.5], list(range(3000)), {}, {8192: 1}, {"a": {"b": {}}}, {None: []}, {32768: 4, 8192: 1},
    [{"path": "x", "weight": 1}], [{"steps": 1}], {key: key for key in range(500)},
)
SNIPPETS = (
    "2001-13-45", "2001-01-01", "? [a]\n", "? {a: b}\n: c\n", "!!int abc", "!!float x", "!!timestamp x", "!!binary ///",
    "!!set {a}", "!!python/object/apply:os.getcwd []", "!!omap [a]", "!!pairs [a]", "!!bool x", "!!null x", "!x y", "&a [*a]",
    "*a", "&a", "<<: 3\n", "<<: {mode: static}\n", "9" * 5000, "[" * 400, "{" * 400, "- " * 400, "\t", "\ufeff", "\r\n", "\r",
    "\x00", "\x85", "\u2028", "\x1b[0m", "'", '"', ": ", " #", "|", ">", "---\n", "...\n", "%YAML 9.9\n", "@", "`", "~", "=",
    "0o9", "1_0", "1:60", "  8192: 1\n  32768: 4\n", "8192: 1\n", "    8192: 1\n", "1e400", "0x" + "f" * 400, "\\", '"\\x"',
    '"\\ud800"', "𝕏", "{a: 1, a: 2}",
)
# fmt: on


@dataclass
class Tally:
    """Counts of one kind of input. `failures` has a line for every traceback, slow case and long
    message."""

    tried: int = 0
    refused: int = 0
    tracebacks: int = 0
    slow: int = 0
    long: int = 0
    failures: list[str] = field(default_factory=list)


class TooSlow(BaseException):
    """Raised in a command that exceeds the limit; no handler of the command catches it."""


def run_case(argv: list[str], tally: Tally, name: str) -> None:
    """Runs a command and counts how it ended."""
    out, err = io.StringIO(), io.StringIO()

    def stop(*_: object) -> None:
        raise TooSlow

    previous = signal.signal(signal.SIGPROF, stop)
    # Of this process: other work on the machine does not count.
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    began = time.process_time()
    status, wrong = 0, ""
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(argv)
    except SystemExit as ended:  # argparse
        status = int(ended.code or 0)
    except TooSlow:
        wrong = "slow " + traceback.format_exc()[-1500:]
    except BaseException:
        wrong = "traceback " + traceback.format_exc()[-2000:]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)
    seconds = time.process_time() - began
    message = err.getvalue()
    if not wrong and seconds > LIMIT_S:
        wrong = f"slow: {seconds:.1f} s"
    elif not wrong and len(message) > LONGEST_MESSAGE:
        wrong = f"long: {len(message)} characters: {message[:1000]}"
    elif not wrong and status not in (0, 2):
        wrong = f"traceback: exit status {status}"
    elif not wrong and status == 2 and not message.strip():
        wrong = "traceback: exit status 2 without a message"
    tally.tried += 1
    tally.refused += status == 2
    tally.tracebacks += wrong.startswith("traceback")
    tally.slow += wrong.startswith("slow")
    tally.long += wrong.startswith("long")
    if wrong:
        tally.failures.append(f"{name}: {' '.join(argv)[:300]}\n{wrong}")


class Fuzzer:
    """Makes and runs the cases of every kind. `folder` gets a store, and the file of the current
    case."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.folder, self.seed = folder, seed
        texts = [
            {"text": "lorem ipsum dolor sit amet " * count}
            for count in (1, 3, 10, 30, 100, 300, 2, 5)
        ]
        source = folder / "source.jsonl"
        source.write_text("".join(json.dumps(text) + "\n" for text in texts), "utf-8")
        self.store = folder / "store"
        with contextlib.redirect_stdout(io.StringIO()):
            assert (
                main(
                    [
                        "prepare",
                        "--source",
                        str(source),
                        "--tokenizer",
                        "bytes",
                        "--out",
                        str(self.store),
                    ]
                )
                == 0
            )
            # Imports what the commands import, outside the time limit of a case.
            assert main(["train", "--dry-run", "--gpus", "2", "--data.store", str(self.store)]) == 0
            self.trained = folder / "run"
            assert (
                main(
                    [
                        "train",
                        *TINY.split(),
                        f"--data.store={self.store}",
                        f"--train.run_dir={self.trained}",
                    ]
                )
                == 0
            )
        self.settings = self._settings()
        self.profile = yaml.safe_load((EXAMPLES / "slow_network.yaml").read_text("utf-8"))
        self.records = [
            {"text": "lorem ipsum " * 9},
            {
                "messages": [
                    {"role": "user", "content": "Hello"},
                    {"role": "assistant", "content": "Hi."},
                ]
            },
            {"instruction": "Add", "input": "2 + 3", "output": "5", "weight": 2},
            {"prompt": "Hello", "completion": "Hi."},
            {
                "conversations": [
                    {"from": "human", "value": "Hello"},
                    {"from": "gpt", "value": "Hi."},
                ]
            },
        ]

    def run(self, kind: str, count: int) -> Tally:
        """Runs the first `count` cases of a kind, in `folder`."""
        tally = Tally()
        with contextlib.chdir(self.folder):
            for number in range(count):
                rng = random.Random(f"{self.seed}/{kind}/{number}")
                argv = self.KINDS[kind](self, rng)
                run_case(argv, tally, f"{kind} {number}")
        return tally

    def _settings(self) -> list[dict[str, Any]]:
        """Returns valid settings to mutate: the examples, on the small store, and one with every
        setting."""
        texts = [path.read_text("utf-8") for path in sorted(EXAMPLES.glob("*.yaml"))]
        found = [
            yaml.safe_load(text)
            for text in texts
            if "\ntrain:" in text and "from_pretrained:" not in text
        ]
        everything = plain(Config().model_dump())
        assert isinstance(everything, dict)
        everything["stages"] = [
            {"steps": 60, "data": {"max_length": 500}},
            {"steps": 40, "batch": {"global_tokens": 9000}},
        ]
        for settings in (*found, everything):
            settings.setdefault("data", {})["store"] = str(self.store)
            settings.setdefault("model", {})["from_pretrained"] = None
            settings.setdefault("context", {})["profile"] = "cpu-2core"
        return [*found, everything]

    def config(self, rng: random.Random) -> list[str]:
        settings = copy.deepcopy(rng.choice(self.settings))
        for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
            mutate(settings, rng)
        return self._dry_run(rng, dumped(settings).encode("utf-8", "surrogatepass"))

    def yaml_text(self, rng: random.Random) -> list[str]:
        return self._dry_run(
            rng, mutated_text(yaml.safe_dump(rng.choice(self.settings), sort_keys=False), rng)
        )

    def override(self, rng: random.Random) -> list[str]:
        overrides = []
        for _ in range(rng.choice((1, 1, 2, 4))):
            name = rng.choice(list(SETTINGS))
            if rng.random() < 0.3:
                name = mutated_word(name, rng)
            value = rng.choice(
                (
                    dumped(rng.choice(VALUES), flow=True),
                    rng.choice(SNIPPETS),
                    str(rng.randint(-3, 99)),
                )
            )
            overrides.append(f"--{name}={value}" if rng.random() < 0.7 else f"--{name}")
            if "=" not in overrides[-1]:
                overrides.append(value)
        return ["train", "--dry-run", "--gpus", "2", "--data.store", str(self.store), *overrides]

    def _dry_run(self, rng: random.Random, content: bytes) -> list[str]:
        path = self.folder / "run.yaml"
        path.write_bytes(content)
        return ["train", str(path), "--dry-run", "--gpus", rng.choice(("1", "2", "4", "64"))]

    def lengths(self, rng: random.Random) -> list[str]:
        lines = [str(rng.choice((1, 17, 500, 8192, 30000))) for _ in range(rng.randint(1, 40))]
        path = self.folder / "lengths.txt"
        for _ in range(rng.choice((0, 1, 1, 2))):
            odd = (
                "0",
                "-1",
                "1.5",
                "1e3",
                "٣",
                "9" * 5000,
                "1 2",
                "#",
                "",
                "nan",
                "0x10",
                "1_000",
                str(10**18),
                str(1 << 40),
            )
            lines.insert(rng.randrange(len(lines) + 1), rng.choice(odd))
        content = "\n".join(lines)
        path.write_bytes(mutated_text(content, rng) if rng.random() < 0.5 else content.encode())
        ranks = (
            rng.choice(("0", "-1", "x", "1048576", str(1 << 70)))
            if rng.random() < 0.1
            else rng.choice(("1", "3", "4", "64"))
        )
        tokens = rng.choice(("8192", "8192", "8192", "1", "7"))
        more = rng.choice(
            (
                [],
                ["--bins", "8192:1,32768:4"],
                ["--mode", "bins"],
                ["--mode", "static", "--degree", "2"],
                ["--json"],
            )
        )
        return [
            "plan",
            "--lengths",
            str(path),
            "--ranks",
            ranks,
            "--tokens-per-rank",
            tokens,
            *more,
        ]

    def hardware_profile(self, rng: random.Random) -> list[str]:
        values = copy.deepcopy(self.profile)
        path = self.folder / "profile.yaml"
        if rng.random() < 0.6:
            for _ in range(rng.choice((1, 1, 2, 5))):
                mutate(values, rng)
            path.write_bytes(dumped(values).encode("utf-8", "surrogatepass"))
        else:
            path.write_bytes(mutated_text(yaml.safe_dump(values), rng))
        (self.folder / "lengths.txt").write_text("100\n20000\n300\n8000\n", "utf-8")
        model = rng.choice(([], ["--model", "llama-3.1-8b"], ["--pipeline-ranks", "2"]))
        tokens = ["--ranks", "8", "--tokens-per-rank", "8192"]
        return [
            "plan",
            "--lengths",
            str(self.folder / "lengths.txt"),
            *tokens,
            "--profile",
            str(path),
            *model,
        ]

    def corpus(self, rng: random.Random) -> list[str]:
        folder = self.folder / "corpus"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        records = copy.deepcopy(
            self.records if rng.random() < 0.5 else [rng.choice(self.records)] * 3
        )
        kind = rng.choice(("jsonl", "parquet", "txt", "dataset"))
        if kind == "jsonl" and rng.random() < 0.5:
            mutate(records, rng)
        source = folder / f"corpus.{kind}"
        if kind == "jsonl":
            text = "\n".join(json.dumps(record, default=str) for record in records)
            odd = (
                "9" * 5000,
                "[" * 100_000,
                '{"a":' * 5000,
                '{"text": 1e999}',
                '{"text": NaN}',
                "null",
                '{"text": "\\ud800"}',
            )
            text += "\n" + rng.choice(("", '{"text": ' + rng.choice(odd) + "}", rng.choice(odd)))
            source.write_bytes(mutated_text(text, rng) if rng.random() < 0.5 else text.encode())
        elif kind == "parquet":
            import pyarrow
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), source)
            source.write_bytes(mutated_bytes(source.read_bytes(), rng))
        elif kind == "dataset":
            import datasets

            datasets.Dataset.from_list(records).save_to_disk(str(source))
            victim = rng.choice(sorted(source.iterdir()))
            if victim.suffix == ".json" and rng.random() < 0.7:
                content = json.loads(victim.read_text("utf-8"))
                if rng.random() < 0.3:
                    content = rng.choice([value for value in VALUES if value != "\ud800"])
                else:
                    mutate(content, rng)
                victim.write_text(
                    json.dumps(content, default=str, skipkeys=True), "utf-8", errors="replace"
                )
            else:
                victim.write_bytes(mutated_bytes(victim.read_bytes(), rng))
        else:
            source.write_bytes(mutated_bytes(b"lorem ipsum\n" * rng.randint(0, 9), rng))
            if rng.random() < 0.3:
                odd_name = rng.choice((b"\xff\xfe.txt", b"a\nb.txt", b"\x1b[2J.txt"))
                Path(folder, os.fsdecode(odd_name)).write_text("x y z")
                source = folder
        name = str(source)
        if rng.random() < 0.1:
            name = rng.choice(
                (
                    name + "\x00",
                    "",
                    str(self.folder / "nothing"),
                    "x" * 5000,
                    name + "/",
                    name + "/x",
                )
            )
        column = rng.choice(([], [], [], ["--text-column", "text"], ["--text-column", "x" * 5000]))
        tokenizer = rng.choice(("bytes", "bytes", "bpe"))
        out = str(folder / "out") if source != folder else str(self.folder / "corpus-out")
        return [
            "prepare",
            "--source",
            name,
            "--out",
            out,
            "--tokenizer",
            tokenizer,
            "--overwrite",
            *column,
        ]

    def saved(self, rng: random.Random) -> list[str]:
        """Damages manifest, state or metrics of a copy of the store or the run."""
        whole = rng.choice((self.store, self.trained))
        folder = self.folder / "saved"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder, symlinks=True)
        small = [
            path
            for path in sorted(folder.rglob("*"))
            if path.suffix in (".json", ".jsonl", ".yaml", ".metadata")
        ]
        victim = rng.choice([path for path in small if not path.is_symlink()])
        if victim.suffix == ".json" and rng.random() < 0.5:
            content = json.loads(victim.read_text("utf-8"))
            mutate(content, rng)
            victim.write_text(
                json.dumps(content, default=str, skipkeys=True), "utf-8", errors="replace"
            )
        elif rng.random() < 0.5:
            victim.write_bytes(mutated_text(victim.read_text("utf-8", errors="replace"), rng))
        else:
            victim.write_bytes(mutated_bytes(victim.read_bytes(), rng))
        if whole == self.store:
            return ["train", "--dry-run", "--gpus", "2", "--data.store", str(folder)]
        resume = [
            "train",
            *TINY.split(),
            f"--data.store={self.store}",
            f"--train.run_dir={folder}",
            "--resume",
        ]
        export = ["export", str(folder), str(self.folder / "exported"), "--overwrite"]
        return rng.choice((export, resume))

    KINDS: ClassVar[dict[str, Callable[[Any, random.Random], list[str]]]] = {
        "configs": config,
        "YAML texts": yaml_text,
        "overrides": override,
        "lengths files": lengths,
        "profiles": hardware_profile,
        "corpus files": corpus,
        "saved files": saved,
    }


def mutate(tree: Any, rng: random.Random) -> None:
    """Changes one place of a tree of mappings and lists."""
    holder, key = rng.choice(list(places(tree)))
    match rng.randrange(6):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):  # under another key
            holder[rng.choice((*KEYS, mutated_word(str(key), rng)))] = holder.pop(key)
        case 2 if isinstance(holder, dict):
            holder[rng.choice(KEYS)] = copy.deepcopy(rng.choice(VALUES))
        case 3:  # swapped with another place
            other, at = rng.choice(list(places(tree)))
            holder[key], other[at] = copy.deepcopy(other[at]), copy.deepcopy(holder[key])
        case 4 if isinstance(holder[key], (int, float)):
            factors = (-1, 0, 0.5, 3, 1e9, 1 << 40, 1e308)
            with suppress(OverflowError):
                holder[key] *= rng.choice(factors)
        case _:
            holder[key] = copy.deepcopy(rng.choice(VALUES))


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yields every (mapping or list, key or index) of a tree."""
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
        yield tree, key
        if isinstance(tree[key], (dict, list)):
            yield from places(tree[key])


def mutated_word(word: str, rng: random.Random) -> str:
    """Returns a word with a typing mistake."""
    at = rng.randrange(len(word) + 1)
    longer = word[:at] + rng.choice("aex-_.\x00ß=") + word[at:]
    return rng.choice((word[:at] + word[at + 1 :], longer, word.upper(), word[::-1]))


def mutated_text(text: str, rng: random.Random) -> bytes:
    """Returns a text with some mistakes, as bytes."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        lines = text.split("\n")
        at, position = rng.randrange(len(lines)), rng.randrange(len(text) + 1)
        match rng.randrange(8):
            case 0:
                text = text[:position] + rng.choice(SNIPPETS) + text[position:]
            case 1:
                lines[at] = rng.choice(("  ", "\t", "    ", "- ")) + lines[at]
                text = "\n".join(lines)
            case 2:
                lines[at] = lines[at].lstrip() if lines[at] != lines[at].lstrip() else ""
                text = "\n".join(lines)
            case 3:
                lines.insert(at, lines[rng.randrange(len(lines))])
                text = "\n".join(lines)
            case 4:
                text = text[:position]
            case 5:
                name, colon, _ = lines[at].partition(":")
                lines[at] = f"{name}{colon} {rng.choice(SNIPPETS)}"
                text = "\n".join(lines)
            case 6:
                text = text[:position] + text[position + rng.randint(1, 5) :]
            case _:
                text = rng.choice(
                    (
                        "\ufeff" + text,
                        text.replace("\n", "\r\n"),
                        text.replace("  ", "\t"),
                        text + "\n" + text,
                    )
                )
    encoded = text.encode("utf-8", "surrogatepass")
    return mutated_bytes(encoded, rng) if rng.random() < 0.1 else encoded


def mutated_bytes(content: bytes, rng: random.Random) -> bytes:
    """Returns bytes of which some are lost, changed or added."""
    at = rng.randrange(len(content) + 1)
    match rng.randrange(5):
        case 0:
            return content[:at]
        case 1:
            return content[:at] + rng.randbytes(rng.randint(1, 9)) + content[at:]
        case 2:
            return content[:at] + rng.randbytes(rng.randint(1, 9)) + content[at + 9 :]
        case 3:
            return b"" if rng.random() < 0.2 else content[at:]
        case _:
            return content.decode("latin-1").encode(rng.choice(("utf-16", "utf-8", "utf-7")))


def dumped(value: Any, *, flow: bool = False) -> str:
    """Returns any plain value as YAML, also one that PyYAML cannot write."""
    try:
        text: str = yaml.safe_dump(
            value,
            sort_keys=False,
            allow_unicode=True,
            default_flow_style=flow or None,
            width=math.inf,
        )
    except (yaml.YAMLError, ValueError, UnicodeError):
        return repr(value)
    return text
