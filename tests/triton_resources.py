"""Resources of the Triton kernel's programs. Needs no GPU: Triton compiles for any GPU on any Linux
machine.

    python tests/triton_resources.py --heads 64:64 128:128 256:256    # Hopper; --gpus 80 89 for others, --softcap for soft caps

Writes a line of CSV per program in bfloat16: registers per thread, bytes per thread spilled to
memory (`spilled`), and bytes of shared memory. It is a script, because a process in which Triton
interprets cannot compile.
"""

import argparse
import os
import re
import subprocess
import tempfile
from itertools import product
from pathlib import Path

import torch

SHARED_MEMORY = {
    80: 163 << 10,
    86: 99 << 10,
    89: 99 << 10,
    90: 227 << 10,
    100: 227 << 10,
    120: 99 << 10,
}
"""Shared memory per program in bytes, by compute capability · 10 (CUDA C++ programming guide,
technical specifications)."""

ARGUMENT_TYPES = dict.fromkeys(("dout", "q", "k", "v", "out", "dq", "dk", "dv"), "*bf16")
ARGUMENT_TYPES |= dict.fromkeys(("lse", "statistics"), "*fp32") | {"tiles": "*i32"}
ARGUMENT_TYPES |= dict.fromkeys(("scale", "score_scale", "cap"), "fp32")
"""Types of a program's arguments that are not sizes."""
COLUMNS = "gpu,program,head_dim,v_head_dim,rows,columns,warps,stages,registers,spilled,shared,shared_limit"


def compile_program(gpu: int, program: str, dim: int, v_dim: int, capped: bool) -> tuple[int, ...]:
    """Compiles one program as for contiguous tensors; returns its blocks, registers, and spilled
    and shared bytes."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from longctx.attention.kernels import triton, triton_device

    function = getattr(triton_device, f"{program}_kernel")
    blocks = triton.choose_blocks(
        program, torch.bfloat16.itemsize, max(dim, v_dim), SHARED_MEMORY[gpu]
    )
    constants = triton.constants(dim, v_dim, torch.bfloat16, capped) | blocks.sides(program)
    types = ARGUMENT_TYPES | dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "i32") for name in function.arg_names}
    attributes = {}
    for position, (name, kind) in enumerate(signature.items()):
        is_stride = name.endswith(("_row", "_head")) and not name.startswith("lse")
        if kind.startswith("*") or (is_stride and kind != "constexpr"):
            attributes[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
    compiled = compile(source, target=GPUTarget("cuda", gpu, 32), options=blocks.options)
    return *blocks, *resource_usage(compiled.asm["cubin"]), compiled.metadata.shared


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Returns the registers and stack bytes per thread of a compiled program."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    registers, stack = (
        re.search(rf"{field}:(\d+)", done.stdout + done.stderr) for field in ("REG", "STACK")
    )
    assert registers and stack
    return int(registers[1]), int(stack[1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gpus",
        type=int,
        nargs="+",
        default=[90],
        choices=SHARED_MEMORY,
        help="compute capability · 10",
    )
    parser.add_argument(
        "--heads", nargs="+", default=["64:64", "128:128", "256:256"], help="head sizes of k and v"
    )
    parser.add_argument("--softcap", action="store_true", help="with soft-capped scores")
    given = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)
    print(COLUMNS)
    for gpu, heads, program in product(given.gpus, given.heads, ("forward", "dq", "dkv")):
        dim, v_dim = map(int, heads.split(":"))
        line = (
            gpu,
            program,
            dim,
            v_dim,
            *compile_program(gpu, program, dim, v_dim, given.softcap),
            SHARED_MEMORY[gpu],
        )
        print(",".join(map(str, line)), flush=True)


if __name__ == "__main__":
    main()
