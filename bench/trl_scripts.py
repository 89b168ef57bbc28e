"""TRL's own scripts with two lines added, as a new user runs them: what is exact, said and refused.

    python -m bench.trl_scripts    # some 15 minutes; the rows of 4 bits need `pip install bitsandbytes`

Copies of the installed `trl/scripts/*.py` run on two processes with tiny models and data that are made here, by torchrun, and
as they are: sft and reward on one process whose batch is the step, the others on as many processes. Options are TRL's
defaults but for float32, the learning rate, three steps, and no dropout of adapters where runs are compared. Compared are all
losses, norms of gradients and metrics of the steps but times. Writes results/trl_scripts.md, whose other rows stay.
"""

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

import trl

from bench.harness import facts, options
from tests.trainer_cases import conversations, model, preferences, tokenizer

RANKS, STEPS, TOKENS_PER_RANK, SECONDS = 2, 3, 64, 90
OF_STEPS = ("sft", "reward")  # their steps do not depend on the number of processes
LINES = "    from longctx.trainers import dynamic_context_parallel\n"
LINES += f"    dynamic_context_parallel(trainer, tokens_per_rank={TOKENS_PER_RANK})\n"
REPORT = '    print("highest degree:", max(max(plan.degrees) for plan in trainer.dynamic.plans))\n'
FIXED = f"--report_to none --max_steps {STEPS} --logging_steps 1 --bf16 False --use_cpu True --learning_rate 1e-3".split()
ADAPTERS = ["--use_peft", "--lora_target_modules", "q_proj", "v_proj"]
COMPARED = [*ADAPTERS, "--lora_dropout", "0"]
WAYS: dict[str, tuple[str, list[str]]] = {
    "defaults": ("dense", []),
    "defaults, accelerate launch": ("dense", []),
    "--use_peft": ("dense", ADAPTERS),
    "--use_peft --lora_dropout 0": ("dense", COMPARED),
    "a mixture": ("mixture", []),
    "a mixture, --router_aux_loss_coef 0": ("mixture", ["--router_aux_loss_coef", "0"]),
    "--use_peft --load_in_4bit": ("dense", ["--load_in_4bit", *COMPARED]),
}
ONLY = {"a mixture, --router_aux_loss_coef 0": ("sft", "dpo", "kto", "grpo", "rloo")}
HEAD = "| options | script | highest degree | result | said |"
UNTIMED = ("runtime", "per_second", "flos", "time", "epoch", "tokens_after_merging", "degree", "split_documents", "balance")


def main() -> None:
    parser = options(__doc__, "trl_scripts.md")
    parser.add_argument("--scripts", nargs="+", default=["sft", "dpo", "kto", "grpo", "rloo", "reward"])
    parser.add_argument("--ways", nargs="+", default=list(WAYS))
    arguments = parser.parse_args()
    written = arguments.out.read_text("utf-8").splitlines() if arguments.out.exists() else []
    rows = {tuple(line.split(" | ")[:2]): line for line in written if line.startswith("| ") and "---" not in line}
    head, line = rows.pop(("| options", "script"), HEAD), "| --- | --- | ---: | --- | --- |"
    about = "# TRL's scripts with two lines added\n\nMade by `python -m bench.trl_scripts`, "
    about += json.dumps(facts("torch", "transformers", "trl", "peft", "bitsandbytes")) + "\n"
    with tempfile.TemporaryDirectory() as made:
        prepare(folder := Path(made))
        for way in arguments.ways:
            for script in (each for each in arguments.scripts if each in ONLY.get(way, arguments.scripts)):
                row = " | ".join([f"| {way}", script, *found(folder, script, way)]) + " |"
                rows[f"| {way}", script] = row
                print(row, flush=True)
                arguments.out.write_text("\n".join([about, head, line, *rows.values(), ""]), "utf-8")


def prepare(folder: Path) -> None:
    """Writes models, data, scripts and a reward."""
    for name, kind in (("dense", "arcee"), ("mixture", "qwen3_moe")):
        made = model(kind)
        if name == "mixture":  # as checkpoints have it; the test's model asks for the loss by itself
            made.config.output_router_logits, made.config.router_aux_loss_coef = False, 0.001
        made.save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)
    (folder / "lengths.py").write_text(
        "def lengths(completions, **_):\n    return [len(set(each.split())) / 1 for each in completions]"
    )
    data = {"sft": conversations(48), "reward": preferences("DPO") * 2, "dpo": preferences("DPO") * 2}
    data |= {"kto": preferences("KTO") * 2, "grpo": preferences("GRPO"), "rloo": preferences("RLOO")}
    for script, records in data.items():
        (folder / "data" / script).mkdir(parents=True)
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (folder / "data" / script / "train.jsonl").write_text(lines, "utf-8")
        text = (Path(trl.__file__).parent / "scripts" / f"{script}.py").read_text("utf-8")
        (folder / f"plain_{script}.py").write_text(text, "utf-8")
        ours = text.replace("    # Train the model\n", LINES).replace("    # Log training complete\n", REPORT)
        (folder / f"{script}.py").write_text(ours, "utf-8")


def found(folder: Path, script: str, way: str) -> list[str]:
    """Returns the highest degree, the result and the notes of a script."""
    launcher = "accelerate" if "accelerate" in way else "torchrun"
    kind, more = WAYS[way]
    code, text, ours = run(folder, script, kind, (*more,), launcher, RANKS, dynamic=True)
    said = "; ".join(dict.fromkeys(re.findall(r"^note: (.*)$", text, re.MULTILINE)))
    if code:
        refused = re.findall(r"^error: (.*)$", text, re.MULTILINE)
        raised = re.findall(r".*(?:Error|Exception): .{,150}|$", text)[0]
        return ["", f"refused: {'; '.join(refused)}" if refused else f"fails: {raised}", said]
    (degree,) = set(re.findall(r"highest degree: (\d+)", text))
    if way == "--use_peft":
        return [degree, "runs, with masks of its own", said]
    _, text, theirs = run(folder, script, kind, (*more,), "torchrun", 1 if script in OF_STEPS else RANKS, dynamic=False)
    if not theirs:
        return [degree, "runs; plain TRL fails", said]
    error, name = max(differences(ours, theirs))
    words = "exact" if error < 1e-4 else "as adapters in bfloat16 are rounded" if "4bit" in way else "differs"
    return [degree, f"{words}, to {error:.0e} ({name})", said]


@functools.cache
def run(
    folder: Path, script: str, kind: str, more: tuple[str, ...], launcher: str, ranks: int, dynamic: bool
) -> tuple[int, str, list[dict[str, float]]]:
    """Runs a script. Returns the exit code, what it printed, and the logs of its steps. Ends one that has not in SECONDS."""
    shutil.rmtree(out := folder / "out", ignore_errors=True)
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", ranks]
    if launcher == "accelerate":
        start = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", ranks]
    given = {"model_name_or_path": folder / kind, "dataset_name": folder / "data" / script, "output_dir": out}
    if script in ("grpo", "rloo"):
        given |= {"reward_funcs": "lengths.lengths", "max_completion_length": 24}
    given["per_device_train_batch_size"] = 8 * RANKS // ranks
    more += ("--lora_task_type", "SEQ_CLS") * (script == "reward" and "--use_peft" in more)
    words = [f"{script}.py" if dynamic else f"plain_{script}.py", *(f"--{name}={value}" for name, value in given.items())]
    with (folder / "printed.txt").open("w") as printed:
        words = [*map(str, [*start, *words, *FIXED, *more])]
        process = subprocess.Popen(words, cwd=folder, stdout=printed, stderr=printed, start_new_session=True)
        try:
            process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
    state, text = out / f"checkpoint-{STEPS}" / "trainer_state.json", (folder / "printed.txt").read_text()
    return process.returncode, text, json.loads(state.read_text())["log_history"] if state.exists() else []


def differences(ours: Sequence[dict[str, float]], theirs: Sequence[dict[str, float]]) -> Iterator[tuple[float, str]]:
    """Yields the relative difference of every number of the logs, and its name."""
    for mine, entry in zip(ours, theirs, strict=True):
        for name, value in entry.items():
            if not name.endswith(UNTIMED):
                yield abs(mine[name] - value) / max(abs(value), 1e-2), name


if __name__ == "__main__":
    main()
