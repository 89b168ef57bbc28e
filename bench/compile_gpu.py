"""Compiles the attention kernels of what first_contact.py measures, and writes the seconds to FILE,
as JSON: some libraries compile for minutes, which no later part should take for its own.

    python bench/compile_gpu.py FILE [--smoke]
"""

import json
import sys
import time
from pathlib import Path

import torch

from attention_times import FIRST, SMOKE
from longctx.attention.kernels import KernelError, KernelRequest, kernel_name
from longctx.attention.kernels.compilation import compile_variants
from longctx.errors import UserError
from longctx.model.presets import PRESETS

TRAINED = "llama-3.2-1b"
"""Model of the rows that train."""


def main(path: Path, *, small: bool) -> None:
    sizes = SMOKE if small else FIRST
    shape = PRESETS[TRAINED]
    trained = shape.num_attention_heads, shape.num_key_value_heads
    timed = sizes.heads, sizes.kv_heads
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kinds = {"attention": (sizes.head_dim, timed)}
    if not small:
        kinds["training"] = (shape.head_dim, trained)
    found = {}
    for part, (head_dim, heads) in kinds.items():
        request = KernelRequest(device.type, sizes.dtype, head_dim, head_dim)
        started = time.monotonic()
        try:
            name = kernel_name("auto", request)
            compile_variants("auto", request, heads, window=False)
        except (KernelError, UserError) as error:
            found[part] = {"kernel": f"none: {error}", "seconds": ""}
            continue
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = round(time.monotonic() - started, 1)
        found[part] = {"kernel": name, "seconds": seconds}
        print(f"{part}, head size {head_dim}: {name} compiled in {seconds} s", flush=True)
    path.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), small="--smoke" in sys.argv)
