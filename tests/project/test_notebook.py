"""examples/tour.ipynb runs from top to bottom, and says what it shows."""

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest

pytestmark = pytest.mark.slow

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "tour.ipynb"


def test_the_cells_run(capsys: pytest.CaptureFixture[str]) -> None:
    mpl.use("agg")
    cells: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "without outputs, which would be of another version"
            exec("".join(cell["source"]), names)
    printed = capsys.readouterr().out
    assert "20,000 tokens on ranks" in printed and "times as long" in printed
    assert len(names["steps"]) == 12 and names["steps"][-1]["loss"] < names["steps"][0]["loss"] - 1
