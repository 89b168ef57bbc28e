"""Images in trainers of transformers and TRL: what one plain process computes from documents one by one."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from longctx.model.vision import VISION_FAMILIES
from tests import vision_cases
from tests.marks import slow_unless
from tests.test_trainers import assert_equal
from tests.vision_trainer_cases import finetune, train
from tests.workers import Workers


def assert_step(runs: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Loss of a step, and gradients of all ranks."""
    assert runs[0]["log"][0]["loss"] == pytest.approx(expected["log"][0]["loss"], rel=1e-5)
    norm = sum(float((each.double() ** 2).sum()) for each in expected["gradients"].values()) ** 0.5
    for run in runs:
        assert run["gradients"].keys() == expected["gradients"].keys()
        for name, gradient in expected["gradients"].items():
            error = float((run["gradients"][name] - gradient).norm())
            assert error <= 1e-4 * float(gradient.norm()) + 1e-6 * norm, (name, error, float(gradient.norm()))


QUICK = {("qwen2_5_vl", 1), ("qwen3_vl", 3), ("gemma3", 3)}


@pytest.mark.parametrize(
    ("family", "ranks"),
    slow_unless(lambda *case: case in QUICK or case[1] == 2, product(VISION_FAMILIES, (1, 2, 3))),
)
def test_a_step_is_that_of_single_documents(workers: Workers, tmp_path: Path, family: str, ranks: int) -> None:
    model = vision_cases.save_model(tmp_path / "model", family)
    (expected,) = workers.run(train, 1, tmp_path / "plain", model, family, False, {})
    runs = workers.run(train, ranks, tmp_path / "ours", model, family, True, {})
    assert_step(runs, expected)


@pytest.mark.parametrize(("family", "ranks"), [("llava", 2), ("qwen3_vl", 3), ("gemma3", 2)])
def test_sft_with_the_collator_of_trl(workers: Workers, tmp_path: Path, family: str, ranks: int) -> None:
    """Two epochs, whose last steps are not full, and evaluations; logs, metrics and weights."""
    model = vision_cases.save_checkpoint(tmp_path / "model", family)
    (expected,) = workers.run(finetune, 1, tmp_path / "plain", model, family, False, {})
    runs = workers.run(finetune, ranks, tmp_path / "ours", model, family, True, {})
    assert_equal(runs, expected)
    assert max(runs[0]["degrees"]) >= 2
