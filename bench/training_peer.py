"""The peer of training_gpu.py: trains a Llama of the same shape with transformers, one document per
step, in its own process.

    python bench/training_peer.py '{"shape": {...}, "tokens": 32768, "steps": 7, "metrics":
    "metrics.jsonl"}'

Precision is that of longctx: weights and optimizer state in float32, computation in bfloat16 (FSDP2
on one process), with gradient checkpointing and fused AdamW. Every attention implementation
available to transformers is timed on one layer, and the fastest is used. Appends a line to
`metrics` for each finished step.
"""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import import_utils

CUDNN_FIRST = "sdpa, cuDNN first"  # by default torch tries cuDNN last
CUDNN_ORDER = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
]
# Maximum tokens for timing the attention implementations; more would take minutes.
MOST_TRIED_TOKENS = 32768


def main() -> None:
    task: dict[str, Any] = json.loads(sys.argv[1])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    store = dist.HashStore()
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", rank=0, world_size=1, store=store
    )
    tokens = task["tokens"]
    attention = fastest_attention(task["shape"], min(tokens, MOST_TRIED_TOKENS), device)
    with Path(task["metrics"]).open("a", encoding="utf-8") as metrics:
        for seconds, parameters in train(task["shape"], tokens, task["steps"], attention, device):
            peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
            line = {
                "step_time_s": seconds,
                "peak_memory_bytes": peak,
                "attention": attention,
                "parameters": parameters,
            }
            print(json.dumps(line), file=metrics, flush=True)
    dist.destroy_process_group()


def fastest_attention(shape: dict[str, Any], tokens: int, device: torch.device) -> str:
    """Returns the attention with the fastest step of one layer; prints and skips those that fail
    here."""
    if device.type != "cuda":
        return "sdpa"
    names = ["sdpa", CUDNN_FIRST]
    for number in (2, 3, 4):
        if getattr(import_utils, f"is_flash_attn_{number}_available", lambda: False)():
            names.append(f"flash_attention_{number}")
    times = {}
    for name in names:
        try:
            times[name] = min(
                seconds
                for seconds, _ in train({**shape, "num_hidden_layers": 1}, tokens, 3, name, device)
            )
        except Exception as failure:  # any error: try the others
            print(f"{name} does not work here: {failure}", file=sys.stderr)
        torch.cuda.empty_cache()
    print(f"seconds of a step of one layer: {times}", file=sys.stderr)
    torch.cuda.reset_peak_memory_stats()
    return min(times, key=lambda name: times[name])


def train(
    shape: dict[str, Any], tokens: int, steps: int, attention: str, device: torch.device
) -> Iterator[tuple[float, int]]:
    """Yields the seconds of every step, and the number of parameters."""
    sizes = {name: size for name, size in shape.items() if name != "rope_theta"}
    rope = {"rope_type": "default", "rope_theta": shape["rope_theta"]}
    config = LlamaConfig(**sizes, rope_parameters=rope, max_position_embeddings=tokens)
    with device:
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention.partition(",")[0]
        )
    parameters = sum(weight.numel() for weight in model.parameters())
    model.gradient_checkpointing_enable()
    model.train()
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.model.layers, model):
        fully_shard(module, mp_policy=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")
    for _ in range(steps):
        ids = torch.randint(256, (1, tokens), device=device)  # bytes, as in longctx
        began = time.perf_counter()
        # Around backward as well, which recomputes forward.
        with (
            sdpa_kernel(CUDNN_ORDER, set_priority=True)
            if attention == CUDNN_FIRST
            else nullcontext()
        ):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if not torch.isfinite(loss):  # waits for the step
            raise ArithmeticError(f"error: loss is {loss.item()}")
        if device.type == "cuda":
            torch.cuda.synchronize()
        yield time.perf_counter() - began, parameters


if __name__ == "__main__":
    main()
