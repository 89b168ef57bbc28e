"""A profile for tests whose bounds are about particular plans: they stay when shipped constants
change."""

from dataclasses import replace

from longctx.planning.hardware_profile import HardwareProfile

PINNED = replace(
    HardwareProfile.load("h100-nvlink-ib"),
    linear_s_per_token=8.9e-5,
    attention_s_per_token2=1.74e-9,
    launch_s=0.05,
    step_s=0.3,
    query_share=0.0477,
)
"""The H100's constants of November 2026, before published runs set them by source."""
