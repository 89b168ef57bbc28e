"""Hardware profiles as files: shipped profiles, and errors for invalid files."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from longctx.cli import main
from longctx.planning.hardware_profile import (
    SHIPPED,
    HardwareProfile,
    ProfileError,
    shipped_profiles,
)
from longctx.training.described import read_described
from longctx.training.metrics import peak_flops

H100 = HardwareProfile.load("h100-nvlink-ib")


@pytest.mark.parametrize("name", shipped_profiles())
def test_a_shipped_profile_says_where_it_comes_from(name: str) -> None:
    HardwareProfile.load(name)
    content = yaml.safe_load((SHIPPED / f"{name}.yaml").read_text(encoding="utf-8"))
    assert ("measured" in content) != ("None of it was measured" in content["about"])


def test_an_h200_differs_from_an_h100_in_what_memory_makes_faster() -> None:
    h200 = HardwareProfile.load("h200-nvlink-ib")
    differing = {name for name, value in h200.to_dict().items() if value != H100.to_dict()[name]}
    assert differing == {"linear_s_per_token", "memory_bytes_per_s", "query_share"}
    _, described = read_described("h200-nvlink-ib")
    assert described is not None
    moved = sum(described.work.traffic)
    saved = moved / H100.memory_bytes_per_s - moved / h200.memory_bytes_per_s
    assert h200.linear_s_per_token == pytest.approx(H100.linear_s_per_token - saved, rel=5e-3)


SHEETS = {
    "a100-80gb": (312, 2.039, 80, 300, 25),
    "a100-40gb": (312, 1.555, 40, 300, 25),
    "h100-pcie": (756, 2.0, 80, 64, 25),
    "b200": (2250, 8.0, 180, 900, 50),
    "l40s": (362, 0.864, 48, 32, 12.5),
    "rtx-4090": (165.2, 1.008, 24, 32, 12.5),
    "mi300x": (1307, 5.3, 192, 448, 50),
}
"""By data sheet: dense bf16 TFLOP/s, TB/s and GB of memory, GB/s per direction inside a node; and
the assumed GB/s of a NIC."""


@pytest.mark.parametrize("name", SHEETS)
def test_other_gpus_have_the_numbers_of_their_data_sheets(name: str) -> None:
    """Memory and links reach their shares of an H100; bench/published_fit.py has the others."""
    peak, bandwidth, memory, link, card = SHEETS[name]
    profile, described = read_described(name)
    assert described is not None
    assert described.from_data_sheets
    assert described.memory_gb == memory
    assert described.gpu is not None
    assert peak_flops(described.gpu, "bfloat16") == peak * 1e12
    expected = {
        "memory_bytes_per_s": H100.memory_bytes_per_s / 3.35 * bandwidth,
        "intra_node_bytes_per_s": H100.intra_node_bytes_per_s / 450 * link,
        "inter_node_bytes_per_s": H100.inter_node_bytes_per_s / 50 * card,
    }
    of_shares = ("linear_s_per_token", "attention_s_per_token2", "query_share")
    for constant, value in {**H100.to_dict(), **expected}.items():
        if constant not in of_shares:
            close = pytest.approx(value, rel=5e-3) if constant in expected else value
            assert profile.to_dict()[constant] == close, constant


def test_help_lists_the_shipped_profiles(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    # Argparse breaks lines at hyphens.
    out = " ".join(capsys.readouterr().out.split()).replace("- ", "-")
    assert {"cpu-2core", "h100-nvlink-ib", "h200-nvlink-ib", *SHEETS} == set(shipped_profiles())
    assert all(name in out for name in shipped_profiles())


@pytest.mark.parametrize("write", [json.dumps, yaml.safe_dump])
def test_a_profile_survives_its_file(tmp_path: Path, write: Any) -> None:
    """JSON writes 2e-05 without a decimal point, which YAML 1.1 reads as text."""
    path = tmp_path / "profile"
    path.write_text(write({**H100.to_dict(), "linear_s_per_token": 2e-5, "step_s": 1e-3}))
    assert HardwareProfile.load(path) == HardwareProfile(
        **{**H100.__dict__, "linear_s_per_token": 2e-5, "step_s": 1e-3}
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"overlap": None, "launch_s": None},
            "missing launch_s, overlap. The constants of a profile are: attention_eff",
        ),
        ({"latency": 1}, "unknown latency"),
        (
            {"linear_s_per_token": 0, "inter_node_bytes_per_s": -1},
            "linear_s_.* is 0: must be a positive number; inter_.*-1",
        ),
        ({"latency_s": -0.5}, "latency_s is -0.5: must be a number ≥ 0"),
        ({"overlap": "much"}, r"overlap is 'much': must be in \[0, 1\]"),
        ({"query_share": 1.5}, r"query_share is 1.5: must be in \[0, 1\]"),
        ({"ranks_per_node": 2.5}, "ranks_per_node is 2.5: must be a whole number"),
        ({"attention_efficiency": 0.5}, "attention_efficiency is 0.5: must be a list"),
        (
            {"attention_efficiency": [[64, 0.5], [32, 0.6]]},
            r".*tokens \[64, 32\] must be ≥ 1 and strictly ascending",
        ),
        (
            {"attention_efficiency": [[64, 0.5], [128, 0.4]]},
            ".* fall .* longer.*replace each value with the maximum so far",
        ),
        ("", "is empty: must be a mapping of constants"),
        ("- 1\n", "contains a list: must be a mapping"),
        ("a: [1\n", "is not valid YAML or JSON"),
        ("step_s: 1.0\nstep_s: 2.0\n", ".*key 'step_s' is given twice"),
    ],
)
def test_errors_name_the_file_and_the_constant(
    tmp_path: Path, given: dict[str, Any] | str, message: str
) -> None:
    """What is given is the text of a file, or what is changed in a profile (None: omitted)."""
    path = tmp_path / "mine.yaml"
    if isinstance(given, dict):
        values = {**H100.to_dict(), **given}
        given = yaml.safe_dump({name: value for name, value in values.items() if value is not None})
    path.write_text(given)
    with pytest.raises(ProfileError, match=f"^{re.escape(str(path))}:? {message}"):
        HardwareProfile.load(path)


def test_a_profile_that_is_not_there_is_refused() -> None:
    with pytest.raises(
        ProfileError,
        match=r"no hardware profile 'h900': give .* one of a100-40gb, .*cpu-2core, h100-nvlink-ib",
    ):
        HardwareProfile.load("h900")
