"""Memory of a GPU outside of torch's allocator: the CUDA context and NCCL's buffers, as others measured them, not we.

On 8 H100s a context with a communicator took 1.06 GB, and 4.34 GB once every pair of ranks had sent messages (NVIDIA/nccl,
issue 1685); on 4 A100s a communicator took 0.69 GB (issue 964). Other nodes add little, as messages share few buffers.
"""

from longctx.config import Config

CONTEXT = 500_000_000
COLLECTIVES = 560_000_000
"""Buffers of the communicator that gathers weights and reduces gradients."""
PEER = 470_000_000
"""Buffers for one rank of the node that K and V are sent to and received from."""
NODE = 8
"""GPUs of a node."""


def outside_allocator(config: Config, ranks: int) -> int:
    """Returns the bytes that a GPU needs beside the tensors of a run."""
    split = config.domain(ranks) > 1 and (config.context.mode, config.context.degree) != ("static", 1)
    peers = min(config.domain(ranks), max(1, NODE // config.parallel.tensor_parallel_size)) - 1
    return CONTEXT + (COLLECTIVES if ranks > 1 else 0) + (PEER * peers if split else 0)
