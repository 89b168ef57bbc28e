"""What the programs of kernel `triton` take of a GPU, which may be absent: Triton compiles for any GPU on any Linux machine.

    python bench/triton_resources.py                     # Hopper, bfloat16, head sizes 64, 128 and 256: half a minute
    python bench/triton_resources.py --gpus 80 89 100 --dtypes bfloat16 float32 --heads 128:128 192:128

Writes a line of CSV for each: registers a thread, bytes a thread keeps in memory since registers do not hold them (`spilled`),
and bytes of shared memory. It fails if a program wants more shared memory than the GPU has.
"""

import os
import re
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import torch

from harness import options

SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Bytes that a program can have, by compute capability · 10 (CUDA C++ programming guide, table of technical specifications)."""

TYPE_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
ARGUMENT_TYPES = dict.fromkeys(("lse", "statistics"), "*fp32") | {"tiles": "*i32"}
ARGUMENT_TYPES |= dict.fromkeys(("scale", "score_scale", "cap"), "fp32")
"""Of a program's arguments that are neither tensors in the dtype of q nor sizes."""
TENSORS = ("dout", "q", "k", "v", "out", "dq", "dk", "dv")
COLUMNS = (
    *("gpu", "program", "dtype", "head_dim", "v_head_dim", "softcap", "rows", "columns", "warps", "stages"),
    *("registers", "spilled", "shared", "shared_limit"),
)


def compile_program(gpu: int, program: str, dtype: str, dim: int, v_dim: int, capped: bool) -> list[Any]:
    """A line of the output: compiles one program as a call with contiguous tensors would."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from longctx.attention.kernels import triton, triton_device

    function, torch_dtype = getattr(triton_device, f"{program}_kernel"), getattr(torch, dtype)
    blocks = triton.choose_blocks(program, torch_dtype.itemsize, max(dim, v_dim), SHARED_MEMORY[gpu])
    constants = triton.constants(dim, v_dim, torch_dtype, capped) | blocks.sides(program)
    types = ARGUMENT_TYPES | dict.fromkeys(TENSORS, f"*{TYPE_NAMES[dtype]}") | dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "i32") for name in function.arg_names}
    attributes = {}
    for position, (name, kind) in enumerate(signature.items()):
        is_stride = name.endswith(("_row", "_head")) and not name.startswith("lse")
        if kind.startswith("*") or (is_stride and kind != "constexpr"):
            attributes[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
    compiled = compile(source, target=GPUTarget("cuda", gpu, 32), options=blocks.options)
    registers, spilled = resource_usage(compiled.asm["cubin"])
    asked = gpu, program, dtype, dim, v_dim, capped
    return [*asked, *blocks, registers, spilled, compiled.metadata.shared, SHARED_MEMORY[gpu]]


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of stack, of a thread of a compiled program."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    registers, stack = (re.search(rf"{field}:(\d+)", done.stdout + done.stderr) for field in ("REG", "STACK"))
    assert registers and stack
    return int(registers[1]), int(stack[1])


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--gpus", type=int, nargs="+", default=[90], choices=SHARED_MEMORY, help="compute capability · 10")
    parser.add_argument("--programs", nargs="+", default=["forward", "dq", "dkv"])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=TYPE_NAMES)
    parser.add_argument("--heads", nargs="+", default=["64:64", "128:128", "256:256"], help="head sizes of k and v")
    parser.add_argument("--softcap", action="store_true", help="with soft-capped scores")
    given = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)  # what is interpreted cannot be compiled
    print(",".join(COLUMNS))
    too_large = []
    for gpu, dtype, heads, program in product(given.gpus, given.dtypes, given.heads, given.programs):
        line = compile_program(gpu, program, dtype, *map(int, heads.split(":")), given.softcap)
        print(",".join(map(str, line)), flush=True)
        *_, shared, limit = line
        if shared > limit:
            too_large.append(f"{program} for {dtype}, heads {heads}, gpu {gpu}")
    if too_large:
        sys.exit(f"more shared memory than there is: {'; '.join(too_large)}")


if __name__ == "__main__":
    main()
