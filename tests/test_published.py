"""Others' measurements beside our predictions: the page has all of them, as they are predicted now."""

import pytest

from bench.published import PAGE, replaced, rows, table_of

pytestmark = pytest.mark.slow


def test_the_page_has_every_figure_as_it_is_predicted() -> None:
    published = rows()
    text = PAGE.read_text("utf-8")
    assert replaced(text, "published", table_of(published)) == text, "run python -m bench.published"
    assert {row.who for row in published} == {
        *("TRL", "torchtitan", "Megatron-LM", "Megatron-LM dev", "verl", "ALST", "MagiAttention")
    }
    speeds = [row for row in published if row.who in ("TRL", "torchtitan", "Megatron-LM") and row.unit[0] in "st" and row.ratio]
    speeds += [row for row in published if row.who == "Megatron-LM"]
    assert len(speeds) == 6 and all(0.86 <= row.ratio <= 1.14 for row in speeds if row.ratio), "the page says within 14 %"
