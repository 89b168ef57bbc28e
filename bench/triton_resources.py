"""What the programs of kernel `triton` take of a GPU, which may be absent: Triton compiles for any GPU on any Linux machine.

    python bench/triton_resources.py                     # Hopper, bfloat16, head sizes 64, 128 and 256: half a minute
    python bench/triton_resources.py --gpus 80 89 100 --dtypes bfloat16 float32 --heads 128:128 192:128

Writes a line of CSV for each: registers a thread, bytes a thread keeps in memory since registers do not hold them (`spilled`),
and bytes of shared memory. It fails if a program wants more shared memory than the GPU has.
"""

import argparse
import csv
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Bytes that a program can have, by compute capability · 10 (CUDA C++ programming guide, table of technical specifications)."""

POINTERS_TO_FLOAT32 = ("lse", "statistics")
TENSORS = ("dout", "q", "k", "v", "out", "dq", "dk", "dv")
FACTORS = ("scale", "score_scale", "cap")
TYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Resources:
    """One line of the output."""

    gpu: int
    program: str
    dtype: str
    head_dim: int
    v_head_dim: int
    softcap: bool
    rows: int
    columns: int
    warps: int
    stages: int
    registers: int
    spilled: int
    shared: int
    shared_limit: int


def compile_program(gpu: int, program: str, dtype: torch.dtype, dim: int, v_dim: int, capped: bool) -> Resources:
    """Compiles one program as a call with contiguous tensors would."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from longctx.attention.kernels import triton, triton_device

    function = getattr(triton_device, f"{program}_kernel")
    blocks = triton.choose_blocks(program, dtype.itemsize, max(dim, v_dim), SHARED_MEMORY[gpu])
    constants = triton.constants(dim, v_dim, dtype, capped) | blocks.sides(program)
    signature, divisible = {}, [["tt.divisibility", 16]]
    attributes: dict[tuple[int, ...], Any] = {}
    for position, name in enumerate(function.arg_names):
        is_stride = name.endswith(("_row", "_head")) and not name.startswith("lse")
        if name in constants:
            signature[name] = "constexpr"
            continue
        if name in TENSORS:
            signature[name] = f"*{TYPE_NAMES[dtype]}"
        elif name in POINTERS_TO_FLOAT32:
            signature[name] = "*fp32"
        else:
            signature[name] = "*i32" if name == "tiles" else "fp32" if name in FACTORS else "i32"
        if is_stride or signature[name].startswith("*"):
            attributes[(position,)] = divisible
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
    compiled = compile(source, target=GPUTarget("cuda", gpu, 32), options=blocks.options)
    usage = resource_usage(compiled.asm["cubin"])
    return Resources(
        gpu, program, str(dtype).removeprefix("torch."), dim, v_dim, capped, *blocks, *usage, compiled.metadata.shared,
        SHARED_MEMORY[gpu],
    )  # fmt: skip


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[90], choices=SHARED_MEMORY, help="compute capability · 10")
    parser.add_argument("--programs", nargs="+", default=["forward", "dq", "dkv"])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--heads", nargs="+", default=["64:64", "128:128", "256:256"], help="head sizes of k and v")
    parser.add_argument("--softcap", action="store_true", help="with soft-capped scores")
    options = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)  # what is interpreted cannot be compiled
    writer = csv.DictWriter(sys.stdout, [field.name for field in fields(Resources)])
    writer.writeheader()
    too_large = []
    for gpu in options.gpus:
        for dtype in options.dtypes:
            for heads in options.heads:
                dim, v_dim = map(int, heads.split(":"))
                for program in options.programs:
                    found = compile_program(gpu, program, getattr(torch, dtype), dim, v_dim, options.softcap)
                    writer.writerow(asdict(found))
                    sys.stdout.flush()
                    if found.shared > found.shared_limit:
                        too_large.append(f"{program} for {dtype}, heads {heads}, gpu {gpu}")
    if too_large:
        sys.exit(f"more shared memory than there is: {'; '.join(too_large)}")


if __name__ == "__main__":
    main()
