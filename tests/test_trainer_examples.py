"""The programs of the page of trainers and of the README run as they are printed, on tiny checkpoints in float32 on a CPU."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from longctx.trainers import dynamic_context_parallel
from tests.encoder_cases import build_encoder
from tests.test_trainers import as_rank_alone
from tests.trainer_cases import conversations, model, preferences, tokenizer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PROGRAMS, (README,) = (
    re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text("utf-8"), re.MULTILINE | re.DOTALL)
    for page in ("docs/trainers.md", "README.md")
)
QUESTIONS = [{"prompt": f"w{n} w{n + 1} w2", "answer": "w5"} for n in range(8)]
TEXTS = [{"text": " ".join(f"w{n % 90}" for n in range(length))} for length in (3, 60, 9, 30, 5, 8, 12, 4)]
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
    word = {"masked": "DataCollatorForLanguageModeling"}.get(name, f"{name}Trainer(")
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
def test_it_runs_as_it_is_printed(name: str, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import transformers
    import trl

    as_rank_alone()
    monkeypatch.chdir(tmp_path)
    file, records = EXAMPLES[name]
    Path(file).write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    names: dict[str, Any] = {"load_dataset": datasets.load_dataset, "dynamic_context_parallel": dynamic_context_parallel}
    used = re.findall(r"\b[A-Z]\w+", program(name))
    names |= {each: getattr(of, each) for each in used for of in (transformers, trl) if hasattr(of, each)}
    less = {"bf16": False, "use_cpu": True, "max_steps": 1, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    for config in [each for each in names if each.endswith(("Config", "Arguments")) and f"{each}(" in program(name)]:
        short = {"max_completion_length": 6, "num_generations": 2} if config.startswith(("GRPO", "RLOO")) else {}
        made = names[config]
        names[config] = lambda *given, made=made, short=short, **more: made(str(tmp_path), **{**more, **less, **short})
    text = re.sub(r"^from .*\n", "", program(name), flags=re.M).replace("Qwen/Qwen3-0.6B", str(checkpoints / "causal"))
    exec(text.replace("answerdotai/ModernBERT-base", str(checkpoints / "encoder")), names)
    assert names["trainer"].state.global_step == 1 and max(max(plan.lengths) for plan in names["trainer"].dynamic.plans) > 5
