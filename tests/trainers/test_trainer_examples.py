"""The programs of the page of trainers and of the README run as they are printed, on tiny
checkpoints in float32 on a CPU."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from longctx.trainers import dynamic_context_parallel
from longctx.trainers.refusals import TrainerError
from tests.encoder_cases import build_encoder
from tests.trainer_cases import (
    Engine,
    as_rank_alone,
    conversations,
    model,
    play,
    preferences,
    tokenizer,
)

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGE, README_PAGE = ((ROOT / page).read_text("utf-8") for page in ("docs/trainers.md", "README.md"))
PROGRAMS, (README,) = (
    re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    for page in (PAGE, README_PAGE)
)
QUESTIONS = [{"prompt": f"w{n} w{n + 1} w2", "answer": "w5"} for n in range(8)]
TEXTS = [
    {"text": " ".join(f"w{n % 90}" for n in range(length))}
    for length in (3, 60, 9, 30, 5, 8, 12, 4)
]
EXAMPLES: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "README": ("chats.jsonl", conversations(8)),
    "SFT": ("chats.jsonl", conversations(8)),
    "DPO": ("pairs.jsonl", preferences("DPO")[:8]),
    "KTO": ("marked.jsonl", preferences("KTO")[:8]),
    "GRPO": ("questions.jsonl", QUESTIONS),
    "RLOO": ("questions.jsonl", QUESTIONS),
    "masked": ("papers.jsonl", TEXTS),
}
"""File and records of each program."""


def program(name: str) -> str:
    """Returns the program of a trainer."""
    if name == "README":
        return str(README)
    if name == "RLOO":
        return program("GRPO").replace("GRPO", "RLOO")
    if name == "KTO":
        return program("DPO").replace("DPO", "KTO").replace("pairs.jsonl", "marked.jsonl")
    word = {"masked": "DataCollatorForLanguageModeling", "laptop": "use_cpu=True"}.get(
        name, f"{name}Trainer("
    )
    return next(text for text in PROGRAMS if word in text)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, words = tmp_path_factory.mktemp("checkpoints"), tokenizer()
    model("arcee").save_pretrained(folder / "causal")  # Qwen's has a class of tokenizers of its own
    words.save_pretrained(folder / "causal")
    words.add_special_tokens({"mask_token": "[X]"})
    build_encoder("modernbert", vocab_size=128).save_pretrained(folder / "encoder")
    words.save_pretrained(folder / "encoder")
    return folder


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_runs_as_it_is_printed(
    name: str, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets
    import transformers
    import trl

    as_rank_alone()
    monkeypatch.chdir(tmp_path)
    file, records = EXAMPLES[name]
    Path(file).write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    names: dict[str, Any] = {
        "load_dataset": datasets.load_dataset,
        "dynamic_context_parallel": dynamic_context_parallel,
    }
    used = re.findall(r"\b[A-Z]\w+", program(name))
    names |= {
        each: getattr(of, each) for each in used for of in (transformers, trl) if hasattr(of, each)
    }
    less = {
        "bf16": False,
        "use_cpu": True,
        "max_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    for config in [
        each
        for each in names
        if each.endswith(("Config", "Arguments")) and f"{each}(" in program(name)
    ]:
        short = (
            {"max_completion_length": 6, "num_generations": 2}
            if config.startswith(("GRPO", "RLOO"))
            else {}
        )
        made = names[config]
        names[config] = lambda *given, made=made, short=short, **more: made(
            str(tmp_path), **{**more, **less, **short}
        )
    text = re.sub(r"^from .*\n", "", program(name), flags=re.M).replace(
        "Qwen/Qwen3-0.6B", str(checkpoints / "causal")
    )
    exec(text.replace("answerdotai/ModernBERT-base", str(checkpoints / "encoder")), names)
    assert (
        names["trainer"].state.global_step == 1
        and max(max(plan.lengths) for plan in names["trainer"].dynamic.plans) > 5
    )


def test_the_agent_runs_as_it_is_printed(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an engine and an environment that make completions of the prompt, on one process that
    holds what the page's eight do: a rank of those alone is refused."""
    import datasets
    import peft
    import trl

    as_rank_alone()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", Engine)
    page = (ROOT / "docs" / "agents.md").read_text("utf-8")
    (text,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)

    def config(**given: Any) -> Any:
        small = {
            "bf16": False,
            "use_cpu": True,
            "fsdp": None,  # of one process
            "fsdp_config": None,
            "max_steps": 1,
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
        }
        return trl.GRPOConfig(str(tmp_path), **{**given, **small})

    names: dict[str, Any] = {
        "GRPOTrainer": trl.GRPOTrainer,
        "GRPOConfig": config,
        "dynamic_context_parallel": dynamic_context_parallel,
        "solved": lambda completions, **_: [float(len(each)) for each in completions],
        "play": play,
        "LoraConfig": peft.LoraConfig,
        "tasks": datasets.Dataset.from_list(QUESTIONS),
    }
    program = text.replace("Qwen/Qwen3-8B", str(checkpoints / "causal"))
    with pytest.raises(
        TrainerError, match="max_completion_length is 131,072, but 1 ranks of 17,408"
    ):
        exec(program, names)
    exec(program.replace("tokens_per_rank=17_408", "tokens_per_rank=8 * 17_408"), names)
    trainer = names["trainer"]
    assert trainer.state.global_step == 1 and trainer.dynamic.plans
    assert trainer.vllm_mode == "colocate" and trainer.vllm_generation.read


def test_two_processes_on_a_laptop(tmp_path: Path) -> None:
    """The program runs as it is printed, by torchrun, with a model as large, and prints what the
    page says but for numbers."""
    config = {
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
    }
    config |= {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).to(
        torch.bfloat16
    ).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    rows = conversations(24)
    for row in rows[::8]:
        row["messages"][1]["content"] = " ".join(["w1 w2 w3"] * 200)
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    begins, more = program("SFT").split("trainer = ")[0], "from peft import LoraConfig\n"
    text = (
        begins
        + more
        + program("laptop").replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(tmp_path / "model"))
    )
    (tmp_path / "train.py").write_text(text, "utf-8")
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(
        start,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (said,) = re.findall(r"^```text\n(profile .*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    printed = re.sub(r"\d[\d,.e-]*", "0", done.stdout).splitlines()
    for number, line in enumerate(re.sub(r"\d[\d,.e-]*", "0", said).splitlines()):
        parts = line.replace("AMD EPYC", "..").split("..")
        assert re.match(".*".join(map(re.escape, parts)), printed[number]), (line, printed[number])
    # Three steps, and the end of training.
    assert "'highest_degree': 2" in done.stdout and len(printed) == 7


def test_the_script_for_two_gpus_runs_on_two_processes(tmp_path: Path) -> None:
    """As it is, but for the model and its device: with FSDP2, adapters and recomputation."""
    sizes = {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 40_960,
    }
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes)).save_pretrained(
        tmp_path / "model"
    )
    tokenizer().save_pretrained(tmp_path / "model")
    rows = conversations(24)
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    script = (ROOT / "examples" / "trl_two_gpus.py").read_text("utf-8")
    changed = (
        script.replace("Qwen/Qwen3-8B", str(tmp_path / "model"))
        .replace("bf16=True", "bf16=False, use_cpu=True, max_steps=2, report_to=[]")
        .replace('"dtype": "bfloat16"', '"dtype": "float32"')
    )
    begins = "from tests.trainer_cases import select_fsdp_on_cpus\n\nselect_fsdp_on_cpus()\n"
    ends = "print('sharded', trainer.is_fsdp_enabled, trainer.dynamic.plans[-1].ranks)\n"
    (tmp_path / "train.py").write_text(begins + changed + ends, "utf-8")
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(
        start,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("sharded True 2") == 2 and "'split_documents'" in done.stdout
    saved = tmp_path / "runs" / "qwen3-8b-lora"
    assert (saved / "adapter_model.safetensors").is_file()
