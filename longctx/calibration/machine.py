"""Describes the machine that a profile was measured on."""

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import longctx
from longctx.parallel.mesh import Mesh


def describe_machine(mesh: Mesh) -> dict[str, Any]:
    """Returns CPU, GPU, software versions and date as plain data."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads_per_rank": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else None,
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {"longctx": longctx.__version__, "torch": str(torch.__version__), "python": platform.python_version()},
        "date": datetime.now(UTC).date().isoformat(),
    }


def _cpu() -> str:
    """Returns the CPU's name if the system reports it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
