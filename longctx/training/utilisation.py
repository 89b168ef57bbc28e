"""Model FLOP utilization (MFU): FLOP/s that the model needs as a share of the devices' peak.

Counts what an ideal implementation computes: two operations per matrix weight and token, attention inside each document (to
earlier tokens, in encoders to all), and twice that in backward, less the gradients of frozen weights. Recomputation and padding
are not counted, so they lower MFU.
"""

import re
from collections.abc import Sequence

from longctx.planning.cost.spec import ModelSpec

FORWARD_AND_BACKWARD = 3
PEAK_FLOPS: dict[str, tuple[float, float | None]] = {
    "H100 PCIe": (756e12, 51e12),
    "H100 NVL": (835e12, 60e12),
    "H100": (989e12, 67e12),
    "H200 NVL": (835e12, 60e12),
    "H200": (989e12, 67e12),
    "H800": (989e12, 67e12),
    "GB200": (2500e12, None),
    "B200": (2250e12, None),
    "A100": (312e12, 19.5e12),
    "A800": (312e12, 19.5e12),
    "L40S": (362e12, 91.6e12),
    "MI300X": (1307e12, 163.4e12),
}
"""Peak dense FLOP/s in bfloat16 and float32 (without TF32), by part of the device's name; from data sheets."""


def model_flops(spec: ModelSpec, lengths: Sequence[int]) -> int:
    """Returns the FLOPs of forward and backward over documents of these lengths. `spec` must have `vocab_size`."""
    frozen = spec.multiplied_parameters - spec.trained_parameters if spec.adapted else 0
    return FORWARD_AND_BACKWARD * spec.flops(lengths) - 2 * frozen * sum(lengths)


def gpu_kind(device_name: str) -> str | None:
    """Returns the key of `PEAK_FLOPS` for a device name; None if not in the table."""
    return next((kind for kind in PEAK_FLOPS if re.search(rf"\b{kind}\b", device_name)), None)


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Returns the peak FLOP/s of a device by its name; None if not in the table."""
    kind = gpu_kind(device_name)
    if kind is None:
        return None
    bfloat16, float32 = PEAK_FLOPS[kind]
    return bfloat16 if dtype == "bfloat16" else float32
