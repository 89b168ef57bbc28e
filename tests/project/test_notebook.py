"""examples/tour.ipynb runs from top to bottom, and says what it shows."""

import json
import re
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
    assert "900 documents on 1 ranks each" in printed and "1 documents on 20 ranks each" in printed
    (gain,) = re.findall(r"s, (\d\.\d\d) times as long", printed)
    assert float(gain) > 1.3
    assert re.search(r"degrees (1-)?2 ", printed), "both processes share a document"
    assert len(names["steps"]) == 12 and names["steps"][-1]["loss"] < names["steps"][0]["loss"] - 1
