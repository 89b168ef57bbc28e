"""Configs of checkpoints on the hub, for predictions, which need no weights.

Within `config_alone` the config of a name on the hub is downloaded without weights; where the hub
cannot be reached, that of a known checkpoint is written by its published sizes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}
LLAMA_70B = {
    **LLAMA,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "meta-llama/Meta-Llama-3-8B-Instruct": {**LLAMA, "max_position_embeddings": 8192},
    "meta-llama/Llama-3.1-8B": LLAMA,
    "meta-llama/Llama-3.1-8B-Instruct": LLAMA,
    "meta-llama/Llama-3.1-70B": LLAMA_70B,
    "Qwen/Qwen3-8B": {
        **QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "Qwen/Qwen3-30B-A3B-Base": {
        **QWEN3,
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
    "Qwen/Qwen3-Next-80B-A3B-Instruct": {"model_type": "qwen3_next", "tie_word_embeddings": False},
}
"""Sizes in the configs of checkpoints on the hub, which may ask for a login or be out of reach;
those of the last one are the defaults of transformers."""

_ALONE: ContextVar[bool] = ContextVar("config_alone", default=False)


@contextmanager
def config_alone() -> Iterator[None]:
    """Opens checkpoints on the hub without their weights."""
    before = _ALONE.set(True)
    try:
        yield
    finally:
        _ALONE.reset(before)


def is_config_alone() -> bool:
    """Returns whether checkpoints on the hub are opened without their weights."""
    return _ALONE.get()


def write_published(name: str, folder: Path) -> None:
    """Writes the config of a checkpoint of `PUBLISHED` into a folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(PUBLISHED[name])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.save_pretrained(folder)
