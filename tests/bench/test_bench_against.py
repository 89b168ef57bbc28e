"""The benchmark of `longctx compare --against`: its rows are those of its settings, and pages say
what they hold."""

import csv
import sys
from pathlib import Path

import pytest

import against as bench
from figures_against import MIXES, TRL, figure_of, gains_of_mixes, mosts
from longctx.comparison.mixes import mix_names
from longctx.comparison.ways import read_ways

ROOT = Path(__file__).resolve().parents[2]


def test_steps_hold_a_row_for_each_rank() -> None:
    for setting in bench.settings(mix_names()):
        for documents in bench.draw_steps(setting, 3):
            assert sum(documents) == bench.STEP_TOKENS <= bench.RANKS * max(bench.MOST_TOKENS)
            assert max(documents) <= setting.most_tokens


def test_the_table_has_every_setting_and_the_index_its_range() -> None:
    assert {int(most) for most in mosts()} == set(bench.MOST_TOKENS) and set(MIXES) == set(
        mix_names()
    )
    gains = [
        float(figure_of(TRL, mix, most, "FSDP2")["speedup"]) for mix in MIXES for most in mosts()
    ]
    claim = f"{min(gains):.1f} to {max(gains):.1f}× over TRL's packing on 8"
    assert claim in (ROOT / "docs" / "evidence" / "index.md").read_text("utf-8")
    for way in ("batch-rebalance", "megatron"):
        low, _, high = gains_of_mixes(way, mosts()[-1]).rstrip("×").partition(" to ")
        values = [float(figure_of(way, mix, mosts()[-1])["speedup"]) for mix in MIXES]
        assert (float(low), float(high)) == (round(min(values), 2), round(max(values), 2))


@pytest.mark.slow
def test_rows_are_those_of_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one setting anew: its gains are those of the file, but for what a change of the constants
    since then does."""
    setting = bench.Setting("wlb_128k", 131072)
    monkeypatch.setattr(bench, "settings", lambda mixes: [setting])
    monkeypatch.setattr(sys, "argv", ["against.py", "--out", str(tmp_path / "against")])
    bench.main()
    with (tmp_path / "against.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 + len(read_ways(bench.WAYS))
    for row in rows:
        kind = row["way"].partition(":")[0]
        committed = figure_of(kind, setting.mix, str(setting.most_tokens), row["sharing"])
        assert float(row["speedup"]) == pytest.approx(float(committed["speedup"]), rel=0.1)
