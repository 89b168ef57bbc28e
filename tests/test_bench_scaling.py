"""bench/scaling.py: a small setting, and the page of its rows."""

from dataclasses import asdict

import pytest

import scaling
from longctx.comparison.layouts.cost import Machine
from longctx.errors import UserError


def test_a_node_of_eight() -> None:
    machine = Machine.load(scaling.PROFILE)
    row = scaling.predict(machine, "8B", 8)
    assert row.tp * row.pp * row.domain == row.gpus == 8
    assert row.documents == 32
    assert 0.3 < row.static_mfu <= row.mfu < 0.55
    assert row.static_step_s / row.step_s == pytest.approx(row.mfu / row.static_mfu), "the same documents"
    with pytest.raises(UserError, match="no split of 8 GPUs can hold this model"):
        scaling.predict(machine, "1T", 8)
    found = {name: str(value) for name, value in asdict(row).items()} | {"refused": ""}
    page = scaling.page([{**found, "model": "1T", "refused": "too large"}, found], {"command": "python ..."})
    assert f"| 8B | 8 | 0.1M | {row.tp} × {row.pp} × {row.domain} |" in page
    assert f"**{row.speedup:.2f}×**" in page
    assert "- 1T on 8 GPUs: too large" in page
