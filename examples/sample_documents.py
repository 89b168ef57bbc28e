"""Documents of very different lengths for the examples: pieces of Python's standard library, one
token per byte."""

import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist

from longctx.planning.plan import Plan

# Two of each short length: on two ranks none must be split.
LENGTHS = (2400, 600, 300, 120, 40, 600, 300, 120, 40)


def read_documents(step: int) -> list[torch.Tensor]:
    """Returns token ids [length] for each of LENGTHS, other pieces at every step."""
    files = [
        Path(sysconfig.get_path("stdlib"), name).read_bytes()
        for name in ("argparse.py", "datetime.py", "typing.py")
    ]
    pieces = [
        files[(step + i) % 3][500 * step : 500 * step + length] for i, length in enumerate(LENGTHS)
    ]
    return [torch.tensor(list(piece)) for piece in pieces]


def report(step: int, loss: float, plan: Plan) -> None:
    """Prints one line per step on rank 0, with the number of documents by degree."""
    if dist.get_rank() == 0:
        degrees = ", ".join(f"{count} on {degree}" for degree, count in plan.degrees.items())
        print(
            f"step {step} loss {loss:.4f} micro-batches {len(plan.micro_batches)} documents on "
            f"ranks: {degrees}",
            flush=True,
        )
