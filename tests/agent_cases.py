"""Agents in TRL's GRPO: environments whose methods are tools, and an engine that calls them."""

import importlib
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.trainer_cases import PROFILE, arguments, as_rank, report

MOST = 400
"""Tokens of a completion with its turns, about a byte each beside the special ones."""
POSITIONS = 4096


class Box:
    """An environment: a box that opens if it is told its number."""

    def reset(self, **row: Any) -> None:
        self.number = row["number"]
        self.opened = 0

    def open_box(self, key: str) -> str:
        """Opens the box.

        Args:
            key: what to try
        """
        self.opened += key == str(self.number)
        return f"open: {self.opened}"

    def get_reward(self) -> float:
        return float(self.opened) + self.number / 7


def byte_tokenizer() -> Any:
    """Qwen 3's template and ends, and a token for every byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    template = resources.files("trl") / "chat_templates" / "qwen3.jinja"
    tokenizer.chat_template = template.read_text("utf-8")
    return tokenizer


class Player:
    """Stands for vLLM: every second row calls the tool, once with a wrong key, and all end."""

    def __init__(self, model: Any, **named: Any) -> None:
        self.tokenizer = named["processing_class"]
        settings = SimpleNamespace(max_model_len=POSITIONS)
        self.llm = SimpleNamespace(llm_engine=SimpleNamespace(model_config=settings))

    def sync_weights(self) -> None:
        """Reads nothing: what is played depends on the prompt alone."""

    def generate(self, prompts: list[list[int]], **_: Any) -> tuple[Any, ...]:
        made = []
        for place, ids in enumerate(prompts):
            text = self.tokenizer.decode(ids)
            tried = text.count("<tool_response>\n")
            number = text.partition("number ")[2].split()[0]
            if tried < 2 and (tried or place % 2):
                call = f'{{"name": "open_box", "arguments": {{"key": "{number if tried else 9}"}}}}'
                said = f"<tool_call>\n{call}\n</tool_call><|im_end|>"
            else:
                said = f"done {number * (1 + place % 3)}<|im_end|>"
            made.append(self.tokenizer(said, add_special_tokens=False)["input_ids"])
        return prompts, made, [[[-4.0]] * len(ids) for ids in made], None


def act(folder: Path, dynamic: bool) -> dict[str, Any]:
    """Trains agents by GRPO on as many ranks as there are; returns what is compared."""
    import datasets
    import transformers
    import trl

    from longctx.trainers import dynamic_context_parallel

    ranks = as_rank()
    words = byte_tokenizer()
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=POSITIONS,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
    )
    if dist.get_rank() == 0:
        transformers.Qwen3ForCausalLM(config).save_pretrained(folder / "base")
    dist.barrier()
    importlib.import_module("trl.trainer.grpo_trainer").VLLMGeneration = Player
    given = arguments(
        folder, ranks, 1, max_steps=2, eval_strategy="no", optim="sgd", learning_rate=0.05
    )
    given |= {
        "per_device_train_batch_size": 4,
        "include_num_input_tokens_seen": "no",
        "max_grad_norm": 0.0,
        "num_generations": 4,
        "max_completion_length": MOST,
        "use_vllm": True,
        "beta": 0.04,
    }
    del given["remove_unused_columns"]
    rows = [
        {"prompt": [{"role": "user", "content": f"Open number {n} ."}], "number": n}
        for n in range(1, 9)
    ]
    trainer = trl.GRPOTrainer(
        model=str(folder / "base"),
        args=trl.GRPOConfig(**given),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=words,
        environment_factory=Box,
    )
    if dynamic:
        dynamic_context_parallel(trainer, profile=PROFILE, tokens_per_rank=768)
    trainer.train()
    return report(trainer)
