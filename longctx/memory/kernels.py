"""Memory of a GPU beside the tensors of a run: the workspace of attention kernels, the CUDA context and NCCL's buffers.

The workspace, which the backward of a kernel allocates and frees, is read from the sources of the libraries (see
`longctx.attention.kernels.flash_libraries`). The rest others have measured, not we: on 8 H100s a context with a communicator
took 1.06 GB, and 4.34 GB once every pair of ranks had sent messages (NVIDIA/nccl, issue 1685); on 4 A100s a communicator took
0.69 GB (issue 964). Other nodes add little, as messages share few buffers.
"""

from functools import cache

import torch

from longctx.attention.kernels import KERNELS, KernelError, KernelRequest
from longctx.attention.kernels.flash import Flash
from longctx.attention.kernels.flash_libraries import LIBRARIES
from longctx.config import Config
from longctx.planning.cost.spec import LayerSpec
from longctx.planning.cost.work import ELEMENT_BYTES

FLOAT32, FLOAT64 = 4, 8
REFERENCE_SCORES = 6
"""Matrices of scores that the reference kernel has at once, with a soft cap."""

MULTIPROCESSORS = 132
"""Of an H100, over which flash-attn 2 splits the keys for a deterministic dQ."""

PLAIN = LIBRARIES[-1].name
"""Torch's own library, which is assumed on machines without a GPU: it is always there, and needs the most memory."""
CONTEXT, COLLECTIVES, PEER = 500_000_000, 560_000_000, 470_000_000
"""Bytes of the CUDA context, of the communicator that gathers weights, and for one rank of the node that K and V go to."""
NODE = 8
"""GPUs of a node."""


@cache
def kernel_on_gpus(kernel: str, request: KernelRequest) -> str:
    """Returns the kernel or flash library that the setting `context.kernel` chooses on this machine's GPU, or without one."""
    if kernel not in ("auto", "flash"):
        return kernel
    flash = KERNELS["flash"]
    if torch.cuda.is_available() and isinstance(flash, Flash):
        library = flash.library(request)
        return "triton" if isinstance(library, str) else library.name
    return "triton" if request.dtype == torch.float32 else PLAIN


def kernel_workspace(config: Config, layer: LayerSpec, tokens: int, keys: int) -> int:
    """Returns the bytes that the backward of a layer allocates on a GPU in one call of `tokens` queries and `keys` keys.

    Raises KernelError for a kernel whose workspace is not known.
    """
    context, split = config.context, config.parallel.tensor_parallel_size
    q_heads, kv_heads, dim = layer.num_attention_heads // split, layer.num_key_value_heads // split, layer.head_dim
    request = KernelRequest("cuda", getattr(torch, config.dtype), dim, dim, deterministic=context.deterministic)
    kernel = kernel_on_gpus(context.kernel, request)
    dq, grouped = FLOAT32 * tokens * q_heads * dim, q_heads > kv_heads
    if kernel in ("flash-attn 2", PLAIN):
        splits = -(-MULTIPROCESSORS // q_heads) if context.deterministic else 1
        per_query_head = 2 * ELEMENT_BYTES[config.dtype] * keys * q_heads * dim
        return splits * dq + (per_query_head if grouped else 0)
    if kernel in ("flash-attn 3", "flash-attn 4"):
        return dq + (2 * FLOAT32 * keys * kv_heads * dim if grouped else 0)
    if kernel == "triton":
        return 2 * FLOAT32 * tokens * q_heads
    if kernel == "reference":  # q, dout, dq, out and k, v, dk, dv per query head, and dense scores of the longest document
        longest = min(keys, config.data.max_length or keys)
        return FLOAT64 * q_heads * (4 * (tokens + keys) * dim + REFERENCE_SCORES * tokens * longest)
    if kernel == "cpu":
        return 0  # it runs on no GPU
    raise KernelError(f"kernel is {kernel!r}: say in longctx/memory/kernels.py what its backward allocates")


def outside_allocator(config: Config, ranks: int) -> int:
    """Returns the bytes that a GPU needs beside the tensors of a run."""
    split = config.domain(ranks) > 1 and (config.context.mode, config.context.degree) != ("static", 1)
    peers = min(config.domain(ranks), max(1, NODE // config.parallel.tensor_parallel_size)) - 1
    return CONTEXT + (COLLECTIVES if ranks > 1 else 0) + (PEER * peers if split else 0)
