"""Commands of tools that train, unchanged but for the launcher: what is exact, and CPU seconds.

    python -m bench.tools_commands --environment llamafactory=FOLDER --environment axolotl=FOLDER ..

A folder is a virtual environment with the tool and what longctx needs (`pip install '.[trainer]'`);
this checkout comes first on its path. Each tool reads a small random model, a tokenizer and
conversations of 50 to 4,000 tokens that are made here, in float32, padded and packed, all weights
and LoRA: three ways to start the same command, three steps of 8 conversations each.

one      the tool's command on one process, whose batch is the step
theirs   the tool's command on two processes, which it starts itself
longctx  torchrun, the launcher, and the tool's command

Losses and norms of `longctx` and `theirs` are compared with those of `one`. A process that waits
uses no CPU time: CPU seconds are those of the slowest rank of a step, without the first step.
Writes results/tools_commands.md, whose other rows stay.
"""

import argparse
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import yaml

from bench.harness import facts, markdown, options

ROOT = Path(__file__).parents[1]
RANKS = 2
STEPS = 3
DOCUMENTS_A_STEP = 8
SHORTEST, LONGEST = 50, 4000
ROW = 4096
"""Tokens of a packed row."""
ROWS_A_STEP = 2
"""Packed rows."""
VOCABULARY = 512
SECONDS = 300
CASES = ((False, False), (True, True), (False, True), (True, False))
"""Whether rows are packed, and whether adapters are trained."""
WAYS = ("one", "theirs", "longctx")
TARGETS = ("q_proj", "v_proj", "up_proj")
"""Of adapters, whose dropout is 0."""
LEARNING_RATE = 1e-3
HEAD = (
    "tool",
    "rows",
    "weights",
    "longctx from one: loss, norm",
    "theirs from one: loss, norm",
    "CPU s of a step: one",
    "theirs",
    "longctx",
    "longctx / theirs",
    "s to the first step: theirs",
    "longctx",
    "degrees",
)
NUMBERS_FROM = 3
KEYS = 3
"""Columns that say which row it is."""


@dataclass(frozen=True)
class Case:
    """What a tool trains.

    Attributes:
        packed: rows of several documents, by the tool's own packing.
        lora: adapters are trained, not all weights.
        folder: that of the run.
        data: with `model`, and `talks.json`.
        alone: one process runs, whose batch is the step.
    """

    packed: bool
    lora: bool
    folder: Path
    data: Path
    alone: bool

    @property
    def rows(self) -> int:
        """Rows of a batch."""
        a_step = ROWS_A_STEP if self.packed else DOCUMENTS_A_STEP
        if self.alone:
            return a_step
        return 1 if self.packed else 2

    @property
    def batches(self) -> int:
        """Batches of a process in a step."""
        if self.alone:
            return 1
        a_step = ROWS_A_STEP if self.packed else DOCUMENTS_A_STEP
        return a_step // self.rows // RANKS


@dataclass(frozen=True)
class Tool:
    """A tool's command.

    Attributes:
        packages: whose versions are said.
        words: the command.
        alone: words, and variables, with which it runs in one process.
        together: the same for processes that it starts itself.
    """

    packages: Sequence[str]
    words: Callable[[Case], list[str]]
    alone: tuple[Sequence[str], Mapping[str, str]]
    together: tuple[Sequence[str], Mapping[str, str]]


def llamafactory(case: Case) -> list[str]:
    tags = {"role_tag": "role", "content_tag": "content"}
    tags |= {"user_tag": "user", "assistant_tag": "assistant"}
    talks = {
        "file_name": str(case.data / "talks.json"),
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": tags,
    }
    (case.folder / "dataset_info.json").write_text(json.dumps({"talks": talks}))
    given: dict[str, Any] = {
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "lora" if case.lora else "full",
        "model_name_or_path": str(case.data / "model"),
        "dataset": "talks",
        "dataset_dir": str(case.folder),
        "template": "empty",
        "cutoff_len": ROW,
        "packing": case.packed,
        "neat_packing": case.packed,
        "output_dir": str(case.folder / "out"),
        "per_device_train_batch_size": case.rows,
        "gradient_accumulation_steps": case.batches,
        "learning_rate": LEARNING_RATE,
        "max_steps": STEPS,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "bf16": False,
        "use_cpu": True,
    }
    if case.lora:
        given |= {"lora_target": ",".join(TARGETS), "lora_dropout": 0.0}
    return ["llamafactory-cli", "train", written(case, given)]


def axolotl(case: Case) -> list[str]:
    given: dict[str, Any] = {
        "base_model": str(case.data / "model"),
        "plugins": ["on_cpus.OnCpus"],
        "datasets": [
            {"path": str(case.data / "talks.json"), "ds_type": "json", "type": "chat_template"}
        ],
        "sequence_len": ROW,
        "sample_packing": case.packed,
        "pad_to_sequence_len": False,
        "curriculum_sampling": True,
        "micro_batch_size": case.rows,
        "gradient_accumulation_steps": case.batches,
        "max_steps": STEPS,
        "learning_rate": LEARNING_RATE,
        "optimizer": "adamw_torch",
        "output_dir": str(case.folder / "out"),
        "dataset_prepared_path": str(case.folder / "prepared"),
        "save_strategy": "no",
        "logging_steps": 1,
        "attn_implementation": "sdpa",
        "ddp_backend": "gloo",
        "bf16": False,
        "fp16": False,
        "tf32": False,
        "dataset_num_proc": 1,
    }
    if case.lora:
        given |= {
            "adapter": "lora",
            "lora_r": 8,
            "lora_alpha": 16,
            "lora_dropout": 0.0,
            "lora_target_modules": list(TARGETS),
            "lora_qkv_kernel": False,
            "lora_mlp_kernel": False,
            "lora_o_kernel": False,
        }
    return ["axolotl", "train", written(case, given)]


def training(case: Case) -> dict[str, Any]:
    """Returns settings of transformers' trainer."""
    return {
        "output_dir": case.folder / "out",
        "per_device_train_batch_size": case.rows,
        "gradient_accumulation_steps": case.batches,
        "gradient_checkpointing": False,
        "learning_rate": LEARNING_RATE,
        "max_steps": STEPS,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
    }


def words_of(given: dict[str, Any]) -> list[str]:
    """Returns settings as options of a command."""
    words = []
    for name, value in given.items():
        words += [f"--{name}", str(value)]
    return words


def swift(case: Case) -> list[str]:
    given: dict[str, Any] = {
        "model": case.data / "model",
        "model_type": "qwen3",
        "template": "dummy",
        "dataset": case.data / "talks.json",
        "tuner_type": "lora" if case.lora else "full",
        "max_length": ROW,
        "packing": case.packed,
        "torch_dtype": "float32",
        "fp16": False,
        "attn_impl": "sdpa",
        **training(case),
        "split_dataset_ratio": 0,
        "dataset_num_proc": 1,
        "check_model": False,
        "use_cpu": True,
    }
    words = words_of(given)
    if case.lora:
        words += ["--lora_dropout", "0", "--target_modules", *TARGETS]
    return ["swift", "sft", *words]


def trl(case: Case) -> list[str]:
    given: dict[str, Any] = {
        "model_name_or_path": case.data / "model",
        "dataset_name": case.data / "talks",
        "max_length": ROW,
        "packing": case.packed,
        **training(case),
        "dtype": "float32",
        "bf16": False,
        "use_cpu": True,
    }
    words = words_of(given)
    if case.lora:
        words += ["--use_peft", "--lora_dropout", "0", "--lora_target_modules", *TARGETS]
    return ["trl", "sft", *words]


TOOLS = {
    "llamafactory": Tool(
        packages=("llamafactory", "transformers", "peft"),
        words=llamafactory,
        alone=((), {}),
        together=((), {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": str(RANKS)}),
    ),
    "axolotl": Tool(
        packages=("axolotl", "transformers", "peft"),
        words=axolotl,
        alone=(("--launcher", "python"), {}),
        together=(("--launcher", "torchrun", "--", "--nproc_per_node", str(RANKS)), {}),
    ),
    "swift": Tool(
        packages=("ms-swift", "transformers", "peft"),
        words=swift,
        alone=((), {}),
        together=((), {"NPROC_PER_NODE": str(RANKS)}),
    ),
    "trl": Tool(
        packages=("trl", "transformers", "peft"),
        words=trl,
        alone=(("--num_processes", "1"), {}),
        together=(("--multi_gpu", "--num_processes", str(RANKS)), {}),
    ),
}


def written(case: Case, given: Mapping[str, Any]) -> str:
    """Returns the name of a YAML file with settings."""
    file = case.folder / "run.yaml"
    file.write_text(yaml.safe_dump(dict(given)))
    return str(file)


def write_data(folder: Path) -> None:
    """Writes a model with random weights, a tokenizer of words, and conversations, of whose length
    the logarithm is uniform."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=96,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=2 * ROW,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    random = np.random.default_rng(0)
    logarithms = random.uniform(np.log(SHORTEST), np.log(LONGEST), 2 * STEPS * DOCUMENTS_A_STEP)
    talks = [{"messages": talk(random, int(length))} for length in np.exp(logarithms)]
    (folder / "talks.json").write_text(json.dumps(talks))
    (folder / "talks").mkdir()
    lines = "".join(json.dumps(each) + "\n" for each in talks)
    (folder / "talks" / "train.jsonl").write_text(lines)


def talk(random: np.random.Generator, length: int) -> list[dict[str, str]]:
    """Returns a question and its answer, of so many words."""
    words = [f"w{number}" for number in random.integers(0, VOCABULARY - 8, length)]
    asked = max(1, length // 5)
    question = {"role": "user", "content": " ".join(words[:asked])}
    answer = {"role": "assistant", "content": " ".join(words[asked:])}
    return [question, answer]


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = ["<pad>", "<end>", "<user>", "<assistant>", "<unknown>"]
    names += [f"w{number}" for number in range(VOCABULARY - len(names))]
    vocabulary = {name: number for number, name in enumerate(names)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>"
    )
    made.chat_template = (
        "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }}"
        "{% if message['role'] == 'assistant' %} <end>{% endif %} {% endfor %}"
    )
    return made


def command(
    tool: Tool, environment: Path, case: Case, way: str
) -> tuple[list[str], dict[str, str]]:
    """Returns the words that start a way, and variables."""
    words = tool.words(case)
    if way == "longctx":
        start = [str(environment / "bin" / "python"), "-m", "torch.distributed.run"]
        start += ["--standalone", "--nproc-per-node", str(RANKS), "-m", "longctx.trainers"]
        return [*start, *words], {
            "LONGCTX_OPTIONS": f"{{tokens_per_rank: {ROW}, profile: cpu-2core}}"
        }
    more, variables = tool.alone if way == "one" else tool.together
    words[0] = str(environment / "bin" / words[0])
    return [*words, *more], dict(variables)


def run(tool: Tool, environment: Path, case: Case, way: str) -> tuple[list[Any], str]:
    """Returns the reports of the ranks, and what was printed. Ends a run that has not in SECONDS."""
    words, variables = command(tool, environment, case, way)
    path = [str(Path(__file__).parent / "tools_watch")]
    if way == "longctx":
        path.append(str(ROOT))
    settings = {
        "PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(case.folder / "cache"),
        "USE_HF": "1",
        "ACCELERATE_USE_CPU": "true",
        "AXOLOTL_DO_NOT_TRACK": "1",
        "TOOLS_WATCH_OUT": str(case.folder),
        **variables,
    }
    printed = case.folder / "printed.txt"
    with printed.open("w") as out:
        process = subprocess.Popen(
            words,
            cwd=case.folder,
            env=os.environ | settings,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    reports = [json.loads(file.read_text()) for file in sorted(case.folder.glob("rank-*.json"))]
    return reports, printed.read_text(errors="replace")


def row(name: str, environment: Path, data: Path, *, packed: bool, lora: bool) -> list[str]:
    """Runs a case in all ways. Returns what the table says of it."""
    by_way: dict[str, list[Any]] = {}
    first_s: dict[str, float] = {}
    for way in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            case = Case(packed, lora, Path(folder), data, alone=way == "one")
            begun = time.time()
            reports, printed = run(TOOLS[name], environment, case, way)
        if not reports:
            print(printed[-4000:], file=sys.stderr)
        by_way[way] = reports
        first_s[way] = reports[0]["times"][1] - begun if reports else math.nan
    seconds = {way: step_cpu_s(reports) for way, reports in by_way.items()}
    degrees = {degree for report in by_way["longctx"] for degree in report["degrees"]}
    return [
        name,
        "packed" if packed else "padded",
        "LoRA" if lora else "all",
        differences(by_way["longctx"], by_way["one"]),
        differences(by_way["theirs"], by_way["one"]),
        *(f"{seconds[way]:.2f}" for way in WAYS),
        f"{seconds['longctx'] / seconds['theirs']:.2f}",
        *(f"{first_s[way]:.0f}" for way in WAYS[1:]),
        " ".join(map(str, sorted(degrees))),
    ]


def step_cpu_s(reports: Sequence[Any]) -> float:
    """Returns the mean CPU seconds of a step on its slowest rank, without the first step."""
    if not reports:
        return math.nan
    of_ranks = np.diff(np.array([report["cpu_s"] for report in reports]), axis=1)
    return float(of_ranks[:, 1:].max(axis=0).mean())


def differences(found: Sequence[Any], expected: Sequence[Any]) -> str:
    """Returns the largest relative differences of losses and norms that rank 0 has logged."""
    if not found or not expected:
        return "failed"
    texts = []
    for name in ("loss", "grad_norm"):
        here = [entry[name] for entry in found[0]["log"] if name in entry]
        there = [entry[name] for entry in expected[0]["log"] if name in entry]
        if len(here) != STEPS or len(there) != STEPS:
            return f"{len(here)} and {len(there)} steps"
        off = np.abs(np.array(here) / np.array(there) - 1)
        texts.append(f"{off.max():.0e}")
    return ", ".join(texts)


def rows_of(file: Path) -> dict[tuple[str, ...], list[str]]:
    """Returns the rows of a file that a run before has written, by their keys."""
    rows = {}
    if file.exists():
        for line in file.read_text("utf-8").splitlines():
            cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
            if len(cells) == len(HEAD) and cells[0] in TOOLS:
                rows[tuple(cells[:KEYS])] = cells
    return rows


def versions(environments: Mapping[str, Path]) -> Iterator[str]:
    """Yields a line on the versions of each tool."""
    script = "import sys; from importlib.metadata import version; "
    script += "print(', '.join(f'{name} {version(name)}' for name in sys.argv[1:]))"
    for name, environment in environments.items():
        python = str(environment / "bin" / "python")
        known = [python, "-c", script, *TOOLS[name].packages, "torch"]
        yield f"- {name}: {subprocess.check_output(known, text=True).strip()}"


def environment(text: str) -> tuple[str, Path]:
    """Returns the tool and the folder of `TOOL=FOLDER`."""
    name, _, folder = text.partition("=")
    if name not in TOOLS or not Path(folder, "bin", "python").exists():
        raise argparse.ArgumentTypeError(f"{text}: TOOL=FOLDER, a tool of {', '.join(TOOLS)}")
    return name, Path(folder).absolute()


def main() -> None:
    parser = options(__doc__, "tools_commands.md")
    parser.add_argument(
        "--environment", type=environment, action="append", required=True, metavar="TOOL=FOLDER"
    )
    arguments = parser.parse_args()
    environments = dict(arguments.environment)
    rows = rows_of(arguments.out)
    lines = [
        f"# {(__doc__ or '').splitlines()[0]}",
        "",
        "Made by `python -m bench.tools_commands`.",
    ]
    known = facts()
    lines += ["", f"{known['date']}, {known['machine']}:", "", *versions(environments), ""]
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder))
        for (packed, lora), name in itertools.product(CASES, environments):
            cells = row(name, environments[name], Path(folder), packed=packed, lora=lora)
            print(" | ".join(cells), flush=True)
            rows[tuple(cells[:KEYS])] = cells
            in_order = [rows[keys] for keys in sorted(rows)]
            table = markdown(HEAD, in_order, NUMBERS_FROM)
            arguments.out.write_text("\n".join([*lines, *table, ""]), "utf-8")


if __name__ == "__main__":
    main()
