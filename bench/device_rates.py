"""Writes what a device is and its best rates to FILE, as JSON: nothing on it runs faster than a
large product and a copy."""

import json
import subprocess
import sys
from pathlib import Path

import torch

from harness import device_facts, median_s
from training_rows import Gpu

PRODUCT_ROWS, SMALL_ROWS = 8192, 64


def main(path: Path, rows: int) -> None:
    device, here = torch.device("cuda" if torch.cuda.is_available() else "cpu"), Gpu.here()
    about = {
        **device_facts(),
        "driver": driver(),
        "memory": here.memory,
        "peak": here.peak,
        "attention": here.attention,
    }
    a, b, c = (torch.randn(rows, rows, device=device, dtype=torch.bfloat16) for _ in range(3))
    product_s = median_s(lambda: torch.mm(a, b, out=c), device, 0.3)
    about["matrix product"] = f"{2 * rows**3 / product_s / 1e12:.4g} TFLOP/s"
    source, target = (
        torch.randn(8 * rows * rows, device=device, dtype=torch.bfloat16) for _ in range(2)
    )
    copy_s = median_s(lambda: target.copy_(source), device, 0.3)
    about["copy"] = f"{2 * source.nbytes / copy_s / 1e9:.4g} GB/s"
    path.write_text(json.dumps(about), encoding="utf-8")
    print(about)


def driver() -> str:
    """Returns the version of NVIDIA's driver; "" if nobody says it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return said.stdout.splitlines()[0] if said.stdout else ""


if __name__ == "__main__":
    main(Path(sys.argv[1]), SMALL_ROWS if "--smoke" in sys.argv else PRODUCT_ROWS)
