"""Kernels of flash-attn 4, compiled ahead of time for a GPU that is not here.

Flash-attn 4 compiles from fake tensors for the architecture that its environment variables name
(flash_attn/cute/interface.py of the tested version), and keeps what it compiled in a folder, by the
sizes and the architecture, for processes that find the GPU.
"""

import os
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from longctx.attention.kernels import flash_4
from longctx.attention.kernels.compilation import run_variants
from longctx.attention.kernels.contract import Gradients, KernelRequest, Options
from longctx.attention.kernels.flash import library_calls
from longctx.attention.kernels.flash_library import Capability, Sequences
from longctx.attention.segments import Segments
from longctx.errors import UserError

CACHE = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
"""Environment variable of the folder with compiled kernels."""


@dataclass(frozen=True)
class Target:
    """A GPU that kernels are compiled for.

    Attributes:
        arch: its architecture, as in `sm_90`.
        multiprocessors: number of its multiprocessors, by which variants are chosen.
    """

    arch: str
    capability: Capability
    multiprocessors: int

    def variables(self) -> dict[str, str]:
        """Returns the environment variables by which flash-attn 4 compiles for it."""
        return {
            "FLASH_ATTENTION_ARCH": self.arch,
            "FLASH_ATTENTION_NUM_SMS": str(self.multiprocessors),
            "CUTE_DSL_ARCH": f"{self.arch}a",
        }


TARGETS = {
    "sm_90": Target("sm_90", (9, 0), 132),
    "sm_100": Target("sm_100", (10, 0), 148),
}
"""Hopper (H100, H200) and Blackwell (B200)."""


def choose_target(target: Target) -> None:
    """Lets flash-attn 4 compile for a GPU in this process, which must not have imported it.

    Raises UserError if it has, or without the tested version.
    """
    if "flash_attn.cute.interface" in sys.modules:
        raise UserError(
            f"flash-attn 4 was imported before {target.arch} was chosen, which it reads only then: "
            "start another process"
        )
    for name, value in target.variables().items():
        os.environ[name] = value
    with suppress(ImportError):  # `missing` says what is not installed
        _say_multiprocessors(target.multiprocessors)
    why = flash_4.missing()
    if why is not None:
        raise UserError(f"flash-attn 4 is {why}")


def _say_multiprocessors(count: int) -> None:
    """Lets CUTLASS, which asks the driver, take a GPU to have so many multiprocessors: kernels for
    Blackwell contain their number."""
    utilities = import_module("cutlass.utils")
    module = import_module("cutlass.utils.hardware_info")

    class Known(module.HardwareInfo):  # type: ignore[name-defined,misc]  # not installed where types are checked
        def __init__(self, device_id: int = 0) -> None:
            pass

        def get_device_multiprocessor_count(self) -> int:
            return count

    for each in (module, utilities):
        vars(each)["HardwareInfo"] = Known


def folder() -> Path | None:
    """Returns the folder in which flash-attn 4 keeps compiled kernels; None if it keeps none."""
    module = import_module("flash_attn.cute.cache_utils")
    if not module.CUTE_DSL_CACHE_ENABLED:
        return None
    return Path(module.get_cache_path())


def kept_kernels() -> int:
    """Returns the number of compiled kernels in the folder."""
    found = folder()
    if found is None:
        return 0
    return sum(1 for _ in found.rglob("*.o"))


def compile_ahead(request: KernelRequest, heads: tuple[int, int], *, window: bool) -> None:
    """Compiles every variant of flash-attn 4 that a layer calls, for the chosen target.

    Args:
        request: what the kernel must support, on `cuda`. A deterministic backward is compiled on a
            GPU only: its semaphores are real tensors.
        heads: heads of the queries and of the keys.
        window: whether the layer has a window.
    """
    with FakeTensorMode():
        run_variants(Ahead(), request, heads, window=window)


class Ahead:
    """Calls flash-attn 4 as the kernel `flash` does, with fake tensors of a GPU."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, options: Options
    ) -> tuple[Tensor, Tensor]:
        out = torch.empty(*q.shape[:2], v.shape[2], dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        for sequences in _sequences(q, k, segments):
            flash_4.forward(q, k, v, sequences, options)
        return out, lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        segments: Segments,
        options: Options,
    ) -> Gradients:
        rows, q_heads = lse.shape
        heads_lse = torch.empty(q_heads, rows, dtype=lse.dtype, device=lse.device)
        for sequences in _sequences(q, k, segments):
            flash_4.backward(dout, q, k, v, out, heads_lse, sequences, options)
        return q, k, v


def _sequences(q: Tensor, k: Tensor, segments: Segments) -> list[Sequences]:
    """Returns the sequences of the calls for segments, with fake boundaries on the GPU."""
    found = []
    for call in library_calls(tuple(segments), len(q), len(k), device=torch.device("cpu")):
        sequences = call.sequences
        edges_q = torch.empty_like(sequences.edges_q, device=q.device)
        edges_k = torch.empty_like(sequences.edges_k, device=q.device)
        found.append(replace(sequences, edges_q=edges_q, edges_k=edges_k))
    return found
