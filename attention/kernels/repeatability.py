"""Repeatability: whether the deterministic backward of a flash library really gives equal gradients
twice.

Flash-attn 3 up to 2.8.3 accepts `deterministic=True` and adds in any order with grouped heads or
windows (flash-attention pull request 1893), and no version number tells builds apart. So a few
calls decide, when the library is chosen.
"""

import torch
from torch import Tensor

from longctx.attention.kernels.contract import KernelRequest, Options
from longctx.attention.kernels.flash_library import Library, Sequences

TOKENS = 2048
"""Tokens of each of two documents: 16 blocks of keys, whose gradients of a query meet in dQ."""
HEADS, KV_HEADS = 8, 2
REPEATS = 8


def differs(library: Library, request: KernelRequest) -> str | None:
    """Returns why the deterministic backward of a library is not deterministic for a request, or
    None."""
    generator = torch.Generator(request.device).manual_seed(0)
    dim, v_dim = request.head_dim, request.v_head_dim

    def random(heads: int, dim: int) -> Tensor:
        shape = 2 * TOKENS, heads, dim
        return torch.randn(shape, generator=generator, device=request.device, dtype=request.dtype)

    q, k, v = random(HEADS, dim), random(KV_HEADS, dim), random(KV_HEADS, v_dim)
    dout = random(HEADS, v_dim)
    edges = torch.tensor([0, TOKENS, 2 * TOKENS], dtype=torch.int32, device=request.device)
    options = Options(dim**-0.5, 30.0 if request.softcap else 0.0, deterministic=True)
    for left, right in ((None, 0), (None, None), (TOKENS // 4, 0)):
        sequences = Sequences(
            edges, edges, longest_q=TOKENS, longest_k=TOKENS, left=left, right=right
        )
        out, lse = library.forward(q, k, v, sequences, options)
        runs = [
            library.backward(dout, q, k, v, out, lse, sequences, options) for _ in range(REPEATS)
        ]
        for i, name in enumerate(("dq", "dk", "dv")):
            if not all(torch.equal(runs[0][i], run[i]) for run in runs[1:]):
                return (
                    f"its deterministic backward gave another {name} for the same inputs: "
                    "install a newer version"
                )
    return None
