"""What training_gpu.py measures, the most telling rows first, and what memory and time they are expected to take on a GPU.

Expected times assume a share of the GPU's peak, recomputation counted. Memory is that of `longctx estimate`, and what the
attention kernel needs beside it.
"""

import math
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

from longctx.attention.kernels import Request
from longctx.attention.kernels.flash import Flash
from longctx.config import Config
from longctx.memory.advisor import as_override, changed, heaviest
from longctx.memory.model import estimate
from longctx.model.presets import PRESETS, ModelShape
from longctx.training.utilisation import FORWARD_AND_BACKWARD, model_flops, peak_flops

VOCABULARY = 4096
PEAK_SHARE = 0.3  # of the GPU's operations a second, that steps are expected to reach, recomputation counted
MEMORY_SHARE = 0.88  # of the GPU's memory, that an estimate may come to: it knows nothing of fragments, contexts and libraries
ROW_S = 60.0  # time for the steps of a row, where they are short enough for two in it
FASTEST = "fastest that fits"
LONGEST = 1_048_576
STACK_LAYERS = 2  # of the 8B model at the longest length: a step takes minutes a layer
# Guesses, but for their order: where two options fit, the one with less to do is the faster one.
SLOWER = {"train.mlp_tile_tokens": 0.02, "train.offload_activations": 0.03, "context.kernel": 0.2}


@dataclass(frozen=True)
class Option:
    """Settings of `longctx train` under a name."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict, hash=False)

    def __add__(self, other: "Option") -> "Option":
        return Option(f"{self.name}, {other.name}", {**self.settings, **other.settings})


RECOMPUTE = [Option(mode, {"train.recompute": mode}) for mode in ("none", "selective", "full")]
NONE, SELECTIVE, FULL = RECOMPUTE
TILES = Option("MLP in tiles", {"train.mlp_tile_tokens": 8192})
HOST_INPUTS = Option("inputs in host memory", {"train.offload_activations": True})
HOST_OPTIMIZER = Option("optimizer in host memory", {"train.offload_optimizer": True})
TRITON = Option("kernel triton", {"context.kernel": "triton"})
COMPILED = Option("compiled", {"train.compile": True})
MEMORY_OPTIONS = [SELECTIVE, NONE, FULL, *(SELECTIVE + each for each in (TILES, HOST_INPUTS, HOST_OPTIMIZER, COMPILED))]
# What the peer does, in our words, for the time that it is expected to take.
CHECKPOINTING = Option("gradient checkpointing", {"train.recompute": "full"})


@dataclass(frozen=True)
class Gpu:
    """Where rows run, or shall run: its memory in bytes, operations a second, and what kernel auto comes to on it."""

    name: str
    memory: float
    peak: float
    attention: str

    @classmethod
    def here(cls, gib: float | None) -> "Gpu":
        """The GPU of this machine, or an H100 with `gib` of memory to make a list for. A CPU is taken to hold everything."""
        if gib is not None:
            return cls("H100", gib * 2**30, 989e12, "torch's flash operators")
        if not torch.cuda.is_available():
            return cls(f"CPU, {platform.machine()}, {os.cpu_count()} cores", math.inf, 1e11, "cpu")
        name = torch.cuda.get_device_name()
        library = Flash().library(Request("cuda", torch.bfloat16, 128, 128))
        attention = "triton" if isinstance(library, str) else library.name
        peak = peak_flops(name, "bfloat16") or 300e12
        return cls(name, torch.cuda.get_device_properties(0).total_memory, peak, attention)

    def kernel(self, option: Option) -> str:
        return str(option.settings.get("context.kernel", self.attention))


@dataclass(frozen=True)
class Run:
    """A row to be: who trains how many layers (None: all) of which model on documents of how many tokens, with which option."""

    system: str
    model: str
    tokens: int
    chosen: str
    options: tuple[Option, ...]
    layers: int | None = None

    @property
    def shape(self) -> ModelShape:
        shape = PRESETS[self.model]
        layers = self.layers or shape.num_hidden_layers
        return shape.model_copy(update={"vocab_size": VOCABULARY, "num_hidden_layers": layers})

    @property
    def label(self) -> str:
        layers = "" if self.layers is None else f" ({self.layers} layers)"
        return f"{self.system} {self.model}{layers} {self.tokens} {self.chosen}"

    def settings(self, option: Option, steps: int) -> dict[str, Any]:
        """Of `longctx train`, but for its folders."""
        return {
            "model.preset": self.model,
            "model.vocab_size": VOCABULARY,
            "model.num_hidden_layers": self.shape.num_hidden_layers,
            "batch.global_tokens": self.tokens,
            "batch.tokens_per_rank": self.tokens,
            "train.steps": steps,
            "train.dtype": "bfloat16",
            "optimizer.warmup_steps": 1,
            "checkpoint.every": None,
            "log.tensorboard": False,
            **option.settings,
        }

    def arguments(self, option: Option, steps: int) -> list[str]:
        return [as_override(name, value) for name, value in self.settings(option, steps).items()]

    def bytes(self, option: Option, gpu: Gpu) -> int:
        """Memory by `longctx estimate`, and what the kernel needs in backward beside it."""
        config = changed(Config(), self.settings(option, 2).items())
        memory = estimate(self.shape.spec, config, 1, heaviest(config, None, 1), fused=True).total
        return memory + kernel_bytes(self.shape, self.tokens, gpu.kernel(option))

    def step_s(self, option: Option, gpu: Gpu) -> float:
        """What a step is expected to take: attention is 1 part forward and 2.5 backward, the rest 1 and 2."""
        mode = option.settings.get("train.recompute", "none")
        linear = FORWARD_AND_BACKWARD * 2 * self.shape.spec.multiplied_parameters * self.tokens
        attention = model_flops(self.shape.spec, [self.tokens]) - linear
        flops = linear * (1 if mode == "none" else 4 / 3) + attention * (4.5 if mode == "full" else 3.5) / 3
        slower = 1.0 + sum(SLOWER.get(name, 0.0) for name in option.settings)
        host = 3e-9 * self.shape.spec.parameters if "train.offload_optimizer" in option.settings else 0.0
        return slower * flops / (PEAK_SHARE * gpu.peak) + host

    def steps(self, option: Option, gpu: Gpu, most: int) -> int:
        return max(min(2, most), min(most, int(ROW_S / self.step_s(option, gpu))))

    def fitting(self, gpu: Gpu) -> list[Option]:
        """The options that this GPU has the memory for, fastest first. The peer's memory is not estimated."""
        if self.system != "longctx":
            return list(self.options)
        found = [option for option in self.options if self.bytes(option, gpu) <= MEMORY_SHARE * gpu.memory]
        # Our own kernel where no other option is left.
        return sorted(found, key=lambda option: ("context.kernel" in option.settings, self.step_s(option, gpu)))

    def describe(self, gpu: Gpu) -> str:
        """A line of --list."""
        fitting = self.fitting(gpu)
        if not fitting:
            return f"{self.label}: does not fit"
        best = fitting[0]
        memory = f", {self.bytes(best, gpu) / 2**30:.1f} GiB" if self.system == "longctx" else ""
        return f"{self.label}: {best.name}{memory}, {self.steps(best, gpu, 7)} steps of about {self.step_s(best, gpu):.1f} s"


def kernel_bytes(shape: ModelShape, tokens: int, kernel: str) -> int:
    """What a kernel's deterministic backward allocates for itself (see attention/kernels/flash_libraries.py)."""
    queries = tokens * shape.num_attention_heads * shape.head_dim
    keys = tokens * shape.num_key_value_heads * shape.head_dim
    if kernel in ("flash-attn 2", "torch's flash operators"):
        splits = -(-132 // shape.num_attention_heads)
        return 4 * splits * queries + (2 * 2 * queries if keys < queries else 0)
    if kernel in ("flash-attn 3", "flash-attn 4"):
        return 4 * queries + 2 * 4 * keys
    return 2 * 4 * tokens * shape.num_attention_heads


def every_option(gpu: Gpu) -> tuple[Option, ...]:
    """All combinations of what saves memory; with our kernel as well, which needs less than some libraries."""
    kernels = (None,) if gpu.attention in ("triton", "cpu") else (None, TRITON)
    found = []
    for mode, *extras in product(RECOMPUTE, (None, TILES), (None, HOST_INPUTS), (None, HOST_OPTIMIZER), kernels):
        if mode is not NONE or HOST_INPUTS not in extras:
            found.append(sum((extra for extra in extras if extra), start=mode))
    return tuple(found)


def runs(
    models: Sequence[str], lengths: Sequence[int], gpu: Gpu, *, quick: bool = False, stack_layers: int = STACK_LAYERS
) -> Iterator[Run]:
    """The most telling rows first."""
    every, (model, *others), shortest = every_option(gpu), models, lengths[0]
    for tokens in lengths[: 1 if quick else None]:
        yield Run("longctx", model, tokens, FASTEST, every)
        if tokens == shortest:
            yield Run("transformers", model, tokens, CHECKPOINTING.name, (CHECKPOINTING,))
    if not quick:
        for other in others:
            yield from (Run("longctx", other, tokens, FASTEST, every) for tokens in lengths[:2])
    for option in [*MEMORY_OPTIONS, *([SELECTIVE + TRITON] if gpu.attention not in ("triton", "cpu") else [])]:
        yield Run("longctx", model, shortest, option.name, (option,))
    if quick or model == "tiny":
        return
    yield Run("longctx", "8b", LONGEST, FASTEST, every, layers=stack_layers)
    for each in models:
        for tokens in lengths if each != model else lengths[1:]:
            yield Run("transformers", each, tokens, CHECKPOINTING.name, (CHECKPOINTING,))
    for other in others:
        yield from (Run("longctx", other, tokens, FASTEST, every) for tokens in lengths[2:])
