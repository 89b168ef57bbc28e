"""TRL's own scripts with two lines added, as a new user runs them: what is exact, said and refused.

    python -m bench.trl_scripts    # some 15 minutes; the rows of 4 bits need `pip install bitsandbytes`

Copies of the installed `trl/scripts/*.py` run on two processes with tiny models and data that are
made here, and as they are: sft and reward on one process whose batch is the step, the others on as
many processes. The first two ways start by torchrun and `accelerate launch`, the others by a fork
of a process that has imported torch and TRL, with torchrun's variables. Options are TRL's defaults
but for float32, the learning rate, three steps, and no dropout of adapters where runs are compared.
Compared are all losses, norms of gradients and metrics of the steps but times. Writes
results/trl_scripts.md, whose other rows stay.
"""

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import trl

from bench.harness import facts, options
from tests import launched
from tests import vision_trainer_cases as vision
from tests.trainer_cases import conversations, model, preferences, tokenizer
from tests.vision_cases import save_checkpoint

RANKS, STEPS, SECONDS = 2, 3, 600
OF_STEPS = ("sft", "reward")  # their steps do not depend on the number of processes
LINES = (
    "    from longctx.trainers import dynamic_context_parallel\n    "
    "dynamic_context_parallel(trainer, {})\n"
)
REPORT = '    print("highest degree:", max(max(plan.degrees) for plan in trainer.dynamic.plans))\n'
FIXED = (
    f"--report_to none --max_steps {STEPS} --logging_steps 1 --bf16 False --use_cpu True "
    "--learning_rate 1e-3"
).split()
ADAPTERS = ("--use_peft", "--lora_target_modules", "q_proj", "v_proj")
COMPARED = (*ADAPTERS, "--lora_dropout", "0")
IN_FLOAT32 = (
    "    [setattr(each, 'data', each.data.float()) for each in trainer.model.parameters() "
    "if each.requires_grad]\n"
)
ALL, SEQUENCES = ("sft", "dpo", "kto", "grpo", "rloo", "reward"), ("dpo", "kto", "grpo", "rloo")


class Way(NamedTuple):
    """A base, options, how it starts, arguments of the two lines, another line of both scripts, and
    which scripts have it."""

    base: str = "dense"
    more: tuple[str, ...] = ()
    launcher: str = "fork"
    given: str = "tokens_per_rank=64"
    line: str = ""
    scripts: tuple[str, ...] = ALL


WAYS = {
    "defaults": Way(launcher="torchrun"),
    "defaults, accelerate launch": Way(launcher="accelerate"),
    "--use_peft, its dropout": Way(more=ADAPTERS),
    "--use_peft --lora_dropout 0": Way(more=COMPARED),
    "--use_peft --load_in_4bit": Way(more=("--load_in_4bit", *COMPARED)),
    "--use_peft --load_in_4bit, adapters in float32": Way(
        more=("--load_in_4bit", *COMPARED), line=IN_FLOAT32
    ),
    "a mixture": Way("mixture"),
    "a mixture, steps of one micro-batch": Way(
        "mixture", given='tokens_per_rank=512, mode="static", degree=2', scripts=("sft",)
    ),
    "a mixture, --router_aux_loss_coef 0": Way(
        "mixture", ("--router_aux_loss_coef", "0"), scripts=("sft", *SEQUENCES)
    ),
    "images": Way("images", given="tokens_per_rank=120", scripts=("sft", *SEQUENCES)),
}
HEAD = "| options | script | highest degree | result | said |"
UNTIMED = (
    "runtime",
    "per_second",
    "flos",
    "time",
    "epoch",
    "tokens_after_merging",
    "degree",
    "split_documents",
    "balance",
)


def main() -> None:
    parser = options(__doc__, "trl_scripts.md")
    parser.add_argument("--scripts", nargs="+", default=ALL)
    parser.add_argument("--ways", nargs="+", default=list(WAYS))
    arguments = parser.parse_args()
    written = arguments.out.read_text("utf-8").splitlines() if arguments.out.exists() else []
    rows = {
        tuple(line.split(" | ")[:2]): line
        for line in written
        if line.startswith("| ") and "---" not in line
    }
    head, line = rows.pop(("| options", "script"), HEAD), "| --- | --- | ---: | --- | --- |"
    about = "# TRL's scripts with two lines added\n\nMade by `python -m bench.trl_scripts`, "
    about += json.dumps(facts("torch", "transformers", "trl", "peft", "bitsandbytes")) + "\n"
    with tempfile.TemporaryDirectory() as made:
        prepare(folder := Path(made))
        for way in arguments.ways:
            for script in (each for each in arguments.scripts if each in WAYS[way].scripts):
                row = " | ".join([f"| {way}", script, *found(folder, script, way)]) + " |"
                rows[f"| {way}", script] = row
                print(row, flush=True)
                arguments.out.write_text(
                    "\n".join([about, head, line, *rows.values(), ""]), "utf-8"
                )


def prepare(folder: Path) -> None:
    """Writes models, data and a reward."""
    for name, kind in (("dense", "arcee"), ("mixture", "qwen3_moe")):
        made = model(kind)
        # As checkpoints have it; the test's model asks for the loss by itself.
        if name == "mixture":
            made.config.output_router_logits, made.config.router_aux_loss_coef = False, 0.001
        made.save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)
    save_checkpoint(folder / "images", "llava")
    reads = vision.processor(folder / "images", "llava")
    reads.tokenizer.padding_side = "left"  # as Qwen's; GRPO takes it for given
    reads.save_pretrained(folder / "images")
    (folder / "lengths.py").write_text(
        "def lengths(completions, **_):\n    return [len(set(str(each).split())) / 1 for each in "
        "completions]"
    )
    data = {
        "sft": conversations(48),
        "reward": preferences("DPO") * 2,
        "dpo": preferences("DPO") * 2,
    }
    data |= {
        "kto": preferences("KTO") * 2,
        "grpo": preferences("GRPO"),
        "rloo": preferences("RLOO"),
    }
    for script, records in data.items():
        for name in ("data", "images of"):
            (folder / name / script).mkdir(parents=True)
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (folder / "data" / script / "train.jsonl").write_text(lines, "utf-8")
        shown = (
            vision.conversations(48, False)
            if script == "sft"
            else vision.preferences(script.upper(), 48, False)
        )
        shown.to_parquet(folder / "images of" / script / "train.parquet")


def found(folder: Path, script: str, way: str) -> list[str]:
    """Returns the highest degree, the result and the notes of a script."""
    of = WAYS[way]
    code, text, ours = run(folder, script, of, RANKS, dynamic=True)
    said = "; ".join(dict.fromkeys(re.findall(r"^note: (.*)$", text, re.MULTILINE)))
    if code:
        refused = re.findall(r"^error: (.*)$", text, re.MULTILINE)
        raised = re.findall(r".*(?:Error|Exception): .{,150}|$", text)[0]
        fails = (
            "fails"
            if run(folder, script, of._replace(given=""), RANKS, dynamic=False)[2]
            else "fails in plain TRL too"
        )
        return ["", f"refused: {'; '.join(refused)}" if refused else f"{fails}: {raised}", said]
    (degree,) = set(re.findall(r"highest degree: (\d+)", text))
    if way == "--use_peft, its dropout":
        return [degree, "runs, with masks of its own", said]
    of = of._replace(launcher="fork", given="")
    _, text, theirs = run(folder, script, of, 1 if script in OF_STEPS else RANKS, dynamic=False)
    if not theirs:
        return [
            degree,
            f"runs; plain TRL fails: {re.findall(r'.*Error: .{,150}|$', text)[0]}",
            said,
        ]
    error, name = max(differences(ours, theirs))
    return [degree, f"{'exact' if error < 1e-4 else 'differs'}, to {error:.0e} ({name})", said]


@functools.cache
def run(
    folder: Path, script: str, way: Way, ranks: int, dynamic: bool
) -> tuple[int, str, list[dict[str, float]]]:
    """Runs a script. Returns the exit code, what it printed, and the logs of its steps. Ends one
    that has not in SECONDS."""
    shutil.rmtree(out := folder / "out", ignore_errors=True)
    text = (Path(trl.__file__).parent / "scripts" / f"{script}.py").read_text("utf-8")
    text = text.replace("    # Train the model\n", way.line + LINES.format(way.given) * dynamic)
    written = folder / f"{script}.py"
    written.write_text(text.replace("    # Log training complete\n", REPORT * dynamic), "utf-8")
    data = folder / ("images of" if way.base == "images" else "data") / script
    given = {"model_name_or_path": folder / way.base, "dataset_name": data, "output_dir": out}
    if script in ("grpo", "rloo"):
        given |= {"reward_funcs": "lengths.lengths", "max_completion_length": 24}
    given["per_device_train_batch_size"] = 8 * RANKS // ranks
    more = way.more + ("--lora_task_type", "SEQ_CLS") * (
        script == "reward" and "--use_peft" in way.more
    )
    words = [str(written), *(f"--{name}={value}" for name, value in given.items()), *FIXED, *more]
    code, printed = (forked if way.launcher == "fork" else started)(
        folder, words, ranks, way.launcher
    )
    state = out / f"checkpoint-{STEPS}" / "trainer_state.json"
    return code, printed, json.loads(state.read_text())["log_history"] if state.exists() else []


def started(folder: Path, words: list[str], ranks: int, launcher: str) -> tuple[int, str]:
    """Returns the exit code of a launcher, and what it printed."""
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    if launcher == "accelerate":
        start = [
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            "--multi_gpu",
            "--num_processes",
            str(ranks),
        ]
    with (folder / "printed.txt").open("w") as printed:
        process = subprocess.Popen(
            [*start, *words], cwd=folder, stdout=printed, stderr=printed, start_new_session=True
        )
        try:
            process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
    return process.returncode, (folder / "printed.txt").read_text()


def forked(folder: Path, words: list[str], ranks: int, _: str) -> tuple[int, str]:
    """Returns the highest exit code of processes, and what they printed. When one ends, others have
    20 s."""
    with contextlib.chdir(folder), tempfile.TemporaryDirectory() as output:
        group = launched.start([words] * ranks, Path(output) / "printed")
        group.until(lambda: False, SECONDS)
        for process in group.processes:
            process.join(20)
        codes = group.codes  # None: plain TRL's may hang when all is written
        group.end(0)
        return max(abs(code or 0) for code in codes), group.said


def differences(
    ours: Sequence[dict[str, float]], theirs: Sequence[dict[str, float]]
) -> Iterator[tuple[float, str]]:
    """Yields the relative difference of every number of the logs, and its name."""
    for mine, entry in zip(ours, theirs, strict=True):
        for name, value in entry.items():
            if not name.endswith(UNTIMED):
                yield abs(mine[name] - value) / max(abs(value), 1e-2), name


if __name__ == "__main__":
    main()
