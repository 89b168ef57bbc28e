"""Rows of training_gpu.py, the most important first, and the settings with which each fits a GPU.

Memory is estimated by `longctx estimate`.
"""

import importlib.util
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from longctx.attention.kernels import KernelRequest
from longctx.attention.kernels.flash import Flash
from longctx.config import Config
from longctx.memory.changes import as_override
from longctx.memory.fitting import RunMemory
from longctx.model.presets import PRESETS, ModelShape
from longctx.planning.cost.spec import RECOMPUTE_MODES
from longctx.training.metrics import peak_flops

MODELS, LENGTHS = ("llama-3.2-1b", "llama-3.2-3b"), (32768, 131072, 524288)
# Few layers of the 8B model, as a step takes minutes per layer.
STACK_LAYERS, STACK_TOKENS = 2, 786_432
VOCABULARY = 4096
# Maximum estimate, as a share of GPU memory: it excludes fragmentation, CUDA contexts and
# libraries.
MEMORY_SHARE = 0.88
FASTEST = "fastest that fits"


@dataclass(frozen=True)
class Option:
    """Named settings of `longctx train`."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)

    def __add__(self, other: "Option") -> "Option":
        return Option(f"{self.name}, {other.name}", {**self.settings, **other.settings})


NONE, NORMS, MLP, SELECTIVE, FULL = (
    Option(mode, {"train.recompute": mode}) for mode in RECOMPUTE_MODES
)
TILES = Option("MLP in tiles", {"train.mlp_tile_tokens": 8192})
HOST_INPUTS = Option("inputs in host memory", {"train.offload_activations": True})
HOST_OPTIMIZER = Option("optimizer in host memory", {"train.offload_optimizer": True})
TRITON = Option("kernel triton", {"context.kernel": "triton"})
NOT_COMPILED = Option("not compiled", {"train.compile": False})
FLOAT8 = Option("float8", {"train.float8": "rowwise"})
FLOAT8_HERE = [FLOAT8] if importlib.util.find_spec("torchao") else []
MEMORY_OPTIONS = [
    *(SELECTIVE, NONE, NORMS, MLP, FULL),
    *(
        SELECTIVE + each
        for each in (NOT_COMPILED, *FLOAT8_HERE, TILES, HOST_INPUTS, HOST_OPTIMIZER)
    ),
]
LADDER = [
    NONE,
    NORMS,
    NONE + TILES,
    MLP,
    SELECTIVE,
    SELECTIVE + TILES,
    SELECTIVE + TILES + HOST_INPUTS,
    SELECTIVE + TILES + HOST_INPUTS + HOST_OPTIMIZER,
    FULL + TILES + HOST_INPUTS,
    FULL + TILES + HOST_INPUTS + HOST_OPTIMIZER,
]
"""From the fastest to the least memory, as expected before measuring."""
# Our own kernel needs less memory than some libraries.
LADDER_OF_TRITON = [SELECTIVE + TILES + TRITON, LADDER[-1] + TRITON]
CHECKPOINTING = Option("gradient checkpointing")  # option of the peer


@dataclass(frozen=True)
class Gpu:
    """The GPU: its memory in bytes, peak FLOP/s, and the kernel that `auto` chooses on it."""

    memory: float
    peak: float
    attention: str

    @classmethod
    def here(cls) -> "Gpu":
        """Returns the GPU of this machine. A CPU is assumed to have unlimited memory."""
        if not torch.cuda.is_available():
            return cls(math.inf, math.inf, "cpu")
        library = Flash().library(KernelRequest("cuda", torch.bfloat16, 128, 128))
        attention = "triton" if isinstance(library, str) else library.name
        peak = peak_flops(torch.cuda.get_device_name(), "bfloat16") or math.nan
        return cls(torch.cuda.get_device_properties(0).total_memory, peak, attention)

    def kernel(self, option: Option) -> str:
        return str(option.settings.get("context.kernel", self.attention))


@dataclass(frozen=True)
class Run:
    """A row to measure: system, model, number of layers (None: all) and document length.

    The first of `options` that fits is used.
    """

    system: str
    model: str
    tokens: int
    options: list[Option]
    layers: int | None = None

    @property
    def chosen(self) -> str:
        return FASTEST if len(self.options) > 1 else self.options[0].name

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
        """Returns the settings of `longctx train`, without its folders."""
        return {
            "model.preset": self.model,
            "model.vocab_size": VOCABULARY,
            "model.overrides.num_hidden_layers": self.shape.num_hidden_layers,
            "batch.global_tokens": self.tokens,
            "batch.tokens_per_rank": self.tokens,
            "train.steps": steps,
            "train.dtype": "bfloat16",
            "train.fit_memory": False,  # the row says what is measured
            "optimizer.warmup_steps": 1,
            "checkpoint.every": None,
            "log.tensorboard": False,
            **option.settings,
        }

    def arguments(self, option: Option, steps: int) -> list[str]:
        return [as_override(name, value) for name, value in self.settings(option, steps).items()]

    def bytes(self, option: Option) -> int:
        """Returns the memory by `longctx estimate`."""
        config = Config().changed(self.settings(option, 2))
        return RunMemory(self.shape.spec, None, 1, True).peak(config).total

    def fitting(self, gpu: Gpu) -> list[Option]:
        """Returns the options that fit in the memory of this GPU. The peer's memory is not
        estimated."""
        if self.system != "longctx":
            return self.options
        return [
            option for option in self.options if self.bytes(option) <= MEMORY_SHARE * gpu.memory
        ]


def runs(gpu: Gpu, *, smoke: bool = False, first: bool = False) -> Iterator[Run]:
    """Yields the rows, the most important first; with `smoke` those of a tiny model with one
    length.

    With `first`, only those of first_contact.py: one model, two lengths, and the choices of
    recomputation and compilation.
    """
    library = gpu.attention not in ("triton", "cpu")
    every = LADDER + LADDER_OF_TRITON if library else LADDER
    if first:
        model, lengths = ("tiny", (256,)) if smoke else (MODELS[0], LENGTHS[:2])
        yield from (Run("longctx", model, tokens, every) for tokens in lengths)
        options = (
            SELECTIVE,
            SELECTIVE + NOT_COMPILED,
            NORMS,
            *(SELECTIVE + each for each in FLOAT8_HERE),
            MLP,
            FULL,
        )
        # Every row starts a process, and the page reads all settings.
        for option in options[1::2] if smoke else options:
            yield Run("longctx", model, lengths[0], [option])
        return
    (model, *others), (shortest, *longer) = (("tiny",), (512,)) if smoke else (MODELS, LENGTHS)
    yield Run("longctx", model, shortest, every)
    yield Run("transformers", model, shortest, [CHECKPOINTING])
    yield from (Run("longctx", model, tokens, every) for tokens in longer)
    yield from (
        Run("longctx", other, tokens, every)
        for other in others
        for tokens in (shortest, *longer[:1])
    )
    for option in [*MEMORY_OPTIONS, *([SELECTIVE + TRITON] if library else [])]:
        yield Run("longctx", model, shortest, [option])
    if smoke:
        return
    yield Run("longctx", "llama-3.1-8b", STACK_TOKENS, every, layers=STACK_LAYERS)
    yield from (Run("transformers", model, tokens, [CHECKPOINTING]) for tokens in longer)
    yield from (
        Run("transformers", other, tokens, [CHECKPOINTING])
        for other in others
        for tokens in LENGTHS
    )
    yield from (Run("longctx", other, tokens, every) for other in others for tokens in longer[1:])
