"""Agents with environments and tools train inside GRPO as in plain TRL: what the environment wrote
is not trained."""

from pathlib import Path

import pytest
import torch

from tests.agent_cases import act
from tests.workers import Workers

pytestmark = pytest.mark.slow


def test_environments_and_tools(workers: Workers, tmp_path: Path) -> None:
    theirs = workers.run(act, 2, tmp_path / "plain", False)
    ours = workers.run(act, 2, tmp_path / "ours", True)
    assert max(ours[0]["degrees"]) == 2
    for run, expected in zip(ours, theirs, strict=True):
        called = 0.0
        for mine, plain in zip(run["log"][:-1], expected["log"][:-1], strict=True):
            assert mine.keys() - {"tokens_after_merging"} == plain.keys()
            called += plain["tools/call_frequency"]
            for name in plain:
                if not name.endswith(("time", "per_second", "flos")):
                    assert mine[name] == pytest.approx(plain[name], rel=1e-5, abs=1e-6), name
        assert called > 1, "the tool was called"
        for name, each in expected["weights"].items():
            assert torch.allclose(run["weights"][name], each, rtol=0, atol=1e-6), name
