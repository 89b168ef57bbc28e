"""The real flash-attn 4, compiled without a GPU by our own calls: minutes, and 500 MB from a
package registry."""

import json
import os
import subprocess
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
WHEELS = ROOT / "bench" / "first_contact_wheels.txt"
SCRIPT = Path(__file__).with_name("flash_4_kernels.py")
WITH_TORCH = {"cuda-bindings", "cuda-pathfinder"}
"""What PyTorch's CUDA build brings, and its CPU build does not."""
IN_IMAGES = {
    "einops",
    "filelock",
    "fsspec",
    "httpx",
    "huggingface-hub",
    "jinja2",
    "numpy",
    "nvidia-cutlass-dsl-libs-cu12",  # libs-cu13 is in its place
    "packaging",
    "pandas",
    "protobuf",
    "pyarrow",
    "pygments",
    "pyyaml",
    "requests",
    "safetensors",
    "torch",
    "tqdm",
    "transformers",
    "xxhash",
    *WITH_TORCH,
}
"""What the file says that images have: PyTorch, transformers, pandas, PyArrow, TensorBoard, einops,
and what they need."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with everything on the list."""
    folder = tmp_path_factory.mktemp("site")
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
    beside = [*sorted(WITH_TORCH), "einops", "protobuf"]
    subprocess.run([*install, "-r", str(WHEELS), *beside], check=True, timeout=900)
    return folder


def needs(distribution: Distribution) -> set[str]:
    """Returns the names of what a distribution requires here, without extras."""
    found = set()
    for line in distribution.requires or []:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            found.add(canonicalize_name(requirement.name))
    return found


def test_the_list_of_wheels_has_all_that_its_packages_require(site: Path) -> None:
    """Without a network, `pip install --no-deps` tells nobody what is missing."""
    installed = {canonicalize_name(each.name): each for each in distributions(path=[str(site)])}
    missing = {name: needs(each) - set(installed) - IN_IMAGES for name, each in installed.items()}
    assert {name: names for name, names in missing.items() if names} == {}


@pytest.mark.parametrize(
    ("arch", "layer", "sizes"),
    [
        ("sm_90", "full", "128,128"),
        ("sm_90", "window", "128,128"),
        ("sm_100", "full", "128,128"),
        ("sm_90", "window", "256,256"),
        ("sm_100", "full", "256,256"),
        ("sm_100", "full", "192,128"),
    ],
)
def test_all_kernels_are_compiled_ahead_once(
    site: Path, tmp_path: Path, arch: str, layer: str, sizes: str
) -> None:
    """700 random calls find no other, and a second process compiles none."""
    out = tmp_path / "found.json"
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(tmp_path / "kernels"),
    }
    command = [sys.executable, "-W", "ignore", str(SCRIPT), str(site), arch, layer]
    command += [sizes, str(out)]
    subprocess.run(command, check=True, timeout=900, env=environment)
    first = json.loads(out.read_text())
    assert first["compiled"] > 15 and first["by_random_calls"] == 0
    subprocess.run(command, check=True, timeout=300, env=environment)
    second = json.loads(out.read_text())
    assert second["compiled"] == second["by_random_calls"] == 0
