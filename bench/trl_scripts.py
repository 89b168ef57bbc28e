"""TRL's own scripts with two lines added, as a new user runs them: what is exact, said and refused.

    python -m bench.trl_scripts    # some 15 minutes; the rows of 4 bits need `pip install bitsandbytes`

Copies of the installed `trl/scripts/*.py` run on two processes with tiny models and data that are made here, by torchrun, and
as they are: sft and reward on one process whose batch is the step, the others on as many processes. Options are TRL's
defaults but for float32, the learning rate, three steps, and no dropout of adapters where runs are compared. Compared are all
losses, norms of gradients and metrics of the steps but times. Writes results/trl_scripts.md.
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

RANKS, STEPS, TOKENS_PER_RANK, SECONDS = 2, 3, 64, 240
OF_STEPS = ("sft", "reward")
"""Scripts whose step does not depend on the number of processes."""
LINES = f"""    from longctx.trainers import dynamic_context_parallel
    dynamic_context_parallel(trainer, tokens_per_rank={TOKENS_PER_RANK})
"""
REPORT = '    print("highest degree:", max(max(plan.degrees) for plan in trainer.dynamic.plans))\n'
ADAPTERS = ["--use_peft", "--lora_target_modules", "q_proj", "v_proj"]
COMPARED = [*ADAPTERS, "--lora_dropout", "0"]
NO_ROUTERS = ["--router_aux_loss_coef", "0"]
WAYS: dict[str, tuple[str, list[str]]] = {
    "defaults": ("dense", []),
    "defaults, accelerate launch": ("dense", []),
    "--use_peft": ("dense", ADAPTERS),
    "--use_peft --lora_dropout 0": ("dense", COMPARED),
    "a mixture": ("mixture", []),
    "a mixture, --router_aux_loss_coef 0": ("mixture", NO_ROUTERS),
    "--use_peft --load_in_4bit": ("dense", ["--load_in_4bit", *COMPARED]),
}
"""Model and options."""
ONLY = {"a mixture, --router_aux_loss_coef 0": ("sft", "dpo", "kto", "grpo", "rloo")}
UNTIMED = ("runtime", "per_second", "flos", "time", "epoch", "tokens_after_merging", "degree", "split_documents", "balance")


def main() -> None:
    parser = options(__doc__, "trl_scripts.md")
    parser.add_argument("--scripts", nargs="+", default=["sft", "dpo", "kto", "grpo", "rloo", "reward"])
    parser.add_argument("--ways", nargs="+", default=list(WAYS))
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as made:
        prepare(folder := Path(made))
        for way in arguments.ways:
            for script in (each for each in arguments.scripts if each in ONLY.get(way, arguments.scripts)):
                rows.append([way, script, *found(folder, script, way)])
                print(*rows[-1], sep=" | ", flush=True)
    of_run = facts("torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "longctx")
    lines = ["# TRL's scripts with two lines added", "", "Made by `python -m bench.trl_scripts`. " + json.dumps(of_run), ""]
    lines += ["| options | script | highest degree | result | said |", "| --- | --- | ---: | --- | --- |"]
    arguments.out.write_text("\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]), "utf-8")


def prepare(folder: Path) -> None:
    """Writes models, data, scripts and a reward."""
    for name, kind in (("dense", "arcee"), ("mixture", "qwen3_moe")):
        made = model(kind)
        if name == "mixture":  # as checkpoints have it; the test's model asks for the loss by itself
            made.config.output_router_logits, made.config.router_aux_loss_coef = False, 0.001
        made.save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)
    (folder / "lengths.py").write_text(
        "def lengths(completions, **_):\n    return [float(len(set(text.split()))) for text in completions]\n"
    )
    data = {"sft": conversations(48), "reward": preferences("DPO") * 2, "dpo": preferences("DPO") * 2}
    data |= {"kto": preferences("KTO") * 2, "grpo": preferences("GRPO"), "rloo": preferences("RLOO")}
    for script, records in data.items():
        (folder / "data" / script).mkdir(parents=True)
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (folder / "data" / script / "train.jsonl").write_text(lines, "utf-8")
        text = (Path(trl.__file__).parent / "scripts" / f"{script}.py").read_text("utf-8")
        (folder / f"plain_{script}.py").write_text(text, "utf-8")
        before, after = text.split("    # Train the model\n")
        first, last = after.split("\n", 1)
        (folder / f"{script}.py").write_text(f"{before}{LINES}{first}\n{REPORT}{last}", "utf-8")


def found(folder: Path, script: str, way: str) -> list[str]:
    """Returns the highest degree, the result and the notes of a script."""
    launcher = "accelerate" if "accelerate" in way else "torchrun"
    kind, more = WAYS[way]
    code, text, ours = run(folder, script, kind, (*more,), launcher, RANKS, dynamic=True)
    said = "; ".join(dict.fromkeys(re.findall(r"^note: (.*)$", text, re.MULTILINE)))
    if code:
        refused = re.findall(r"^error: (.*)$", text, re.MULTILINE)
        return ["", f"refused: {'; '.join(refused)}" if refused else f"fails: {text.strip().splitlines()[-1][:200]}", said]
    degree = re.findall(r"highest degree: (\d+)", text)[0]
    if way == "--use_peft":
        return [degree, "runs, with masks of its own", said]
    _, text, theirs = run(folder, script, kind, (*more,), "torchrun", 1 if script in OF_STEPS else RANKS, dynamic=False)
    if not theirs:
        return [degree, f"runs; plain TRL fails: {text.strip().splitlines()[-1][:120]}", said]
    error, name = max(differences(ours, theirs))
    return [degree, f"{'exact' if error < 1e-4 else 'DIFFERS'}, to {error:.0e} ({name})", said]


@functools.cache
def run(
    folder: Path, script: str, kind: str, more: tuple[str, ...], launcher: str, ranks: int, dynamic: bool
) -> tuple[int, str, list[dict[str, float]]]:
    """Runs a script. Returns the exit code, what it printed, and the logs of its steps. Ends one that has not in SECONDS."""
    shutil.rmtree(out := folder / "out", ignore_errors=True)
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", ranks]
    if launcher == "accelerate":
        start = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", ranks]
        start = [*start, "--num_machines", 1, "--mixed_precision", "no", "--dynamo_backend", "no"]
    given = {
        "model_name_or_path": folder / kind,
        "dataset_name": folder / "data" / script,
        "output_dir": out,
        "report_to": "none",
    }
    given |= {"max_steps": STEPS, "logging_steps": 1, "bf16": "False", "learning_rate": 1e-3, "use_cpu": "True"}
    if script in ("grpo", "rloo"):
        given |= {"reward_funcs": "lengths.lengths", "max_completion_length": 24}
    if ranks == 1:
        given["per_device_train_batch_size"] = 8 * RANKS
    if script == "reward":
        more = (*more, *["--lora_task_type", "SEQ_CLS"] * ("--use_peft" in more))
    words = [word for name, value in given.items() for word in (f"--{name}", value)]
    name = f"{script}.py" if dynamic else f"plain_{script}.py"
    with (folder / "printed.txt").open("w") as printed:
        started = [*map(str, [*start, name, *words, *more])]
        process = subprocess.Popen(started, cwd=folder, stdout=printed, stderr=printed, start_new_session=True)
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
