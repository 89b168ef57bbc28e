"""Memory of a GPU beside the tensors of a run: the workspace of attention kernels, the CUDA context
and NCCL's buffers.

Every kernel counts its workspace, which its backward allocates and frees. The rest others have
measured, not we: on 8 H100s a context with a communicator took 1.06 GB, and 4.34 GB once every pair
of ranks had sent messages (NVIDIA/nccl, issue 1685); on 4 A100s a communicator took 0.69 GB (issue
964). Other nodes add little, as messages share few buffers.
"""

from functools import cache

import torch

from longctx.attention.kernels import KERNELS, Kernel, KernelRequest, selected
from longctx.attention.kernels.contract import BackwardSizes
from longctx.config import Config
from longctx.planning.cost.indexed import IndexedLayer
from longctx.planning.cost.spec import LayerSpec

FLOAT32 = 4
CONTEXT, COLLECTIVES, PEER = 500_000_000, 560_000_000, 470_000_000
"""Bytes of the CUDA context, of the communicator that gathers weights, and for one rank of the node
that K and V go to."""
NODE = 8
"""GPUs of a node."""


@cache
def kernel_on_gpus(name: str, request: KernelRequest) -> Kernel:
    """Returns the kernel of the setting `context.kernel`; for auto and flash the first one that
    this machine's GPU can run.

    Without a GPU, flash is taken to run all but float32.
    """
    if name not in ("auto", "flash"):
        return KERNELS[name]
    if not torch.cuda.is_available():
        return KERNELS["triton" if request.dtype == torch.float32 else "flash"]
    return next(kernel for kernel in KERNELS.values() if kernel.refusal(request) is None)


def kernel_workspace(config: Config, layer: LayerSpec, tokens: int, keys: int) -> int:
    """Returns the bytes that the backward of a layer allocates on a GPU in one call of `tokens`
    queries and `keys` keys."""
    if isinstance(layer, IndexedLayer):
        return selected.workspace(
            tokens,
            keys=keys,
            heads=layer.num_attention_heads,
            head_dim=layer.head_dim,
        )
    context = config.context
    split = config.parallel.tensor_parallel_size
    request = KernelRequest(
        "cuda",
        getattr(torch, config.dtype),
        head_dim=layer.head_dim,
        v_head_dim=layer.head_dim,
        deterministic=context.deterministic,
    )
    sizes = BackwardSizes(
        request,
        tokens,
        keys=keys,
        longest=config.data.max_length or keys,
        heads=layer.num_attention_heads // split,
        kv_heads=layer.num_key_value_heads // split,
    )
    return kernel_on_gpus(context.kernel, request).workspace(sizes)


def outside_allocator(config: Config, ranks: int) -> int:
    """Returns the bytes that a GPU needs beside the tensors of a run."""
    split = config.domain(ranks) > 1 and (config.context.mode, config.context.degree) != (
        "static",
        1,
    )
    peers = min(config.domain(ranks), max(1, NODE // config.parallel.tensor_parallel_size)) - 1
    return CONTEXT + (COLLECTIVES if ranks > 1 else 0) + (PEER * peers if split else 0)
