"""The names of `import longctx`: they are imported when they are used, and a plan needs no
torch."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import longctx
from longctx.config import ConfigError
from tests.training_cases import SMALL

pytestmark = pytest.mark.slow


def test_every_public_name_is_there() -> None:
    assert set(longctx.__all__) == set(dir(longctx))
    exposed = (
        (Path(longctx.__file__).parents[1] / "docs" / "api.md")
        .read_text("utf-8")
        .split("\n\n")[1]
        .split(".\n")[0]
    )
    assert {*re.findall(r"`(\w+)`", exposed), "__version__"} == set(longctx.__all__)
    for name in longctx.__all__:
        assert getattr(longctx, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'make_plans'"):
        _ = longctx.make_plans  # type: ignore[attr-defined]


def test_a_plan_needs_no_torch() -> None:
    code = """
import sys, longctx
assert not {"torch", "numpy", "yaml"} & set(sys.modules), "import longctx alone imports nothing"
profile = longctx.HardwareProfile.load("cpu-2core")
plan = longctx.make_plan([3000, 100, 100], ranks=2, tokens_per_rank=2048, profile=profile)
assert isinstance(plan, longctx.Plan) and sum(plan.degrees.values()) == 3
assert not {"torch", "pydantic", "datasets"} & set(sys.modules)
longctx.Store, longctx.load_config, longctx.prepare
assert "torch" not in sys.modules
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


def test_prepare_and_train_from_python(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(8):
        (tmp_path / "texts" / f"{number}.txt").write_text(
            "To be, or not to be. " * (10 + 5 * number)
        )
    assert longctx.prepare(tmp_path / "texts", tmp_path / "store", tokenizer="bytes").made
    settings = [
        *SMALL,
        "train.steps=3",
        f"data.store={tmp_path / 'store'}",
        f"train.run_dir={tmp_path / 'run'}",
    ]
    assert longctx.train(longctx.load_config(None, settings)) == 0
    steps = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [step["step"] for step in steps] == [1, 2, 3]


def test_training_checks_the_rules_that_depend_on_the_processes() -> None:
    config = longctx.load_config(None, ["parallel.tensor_parallel_size=2"])
    with pytest.raises(ConfigError, match="must divide the number of processes"):
        longctx.train(config)
