"""Published runs of other trainers: which are held out, and how far the predictions of their time
are off."""

from collections import Counter
from statistics import median

import pytest

from bench.published import Row, errors_of, run_rows
from bench.published_runs import Run, peak_bytes, runs, step_s


def test_every_second_run_of_a_source_is_held_out_but_trls() -> None:
    seen: Counter[str] = Counter()
    for run in runs():
        seen[run.source] += 1
        assert run.held_out == (run.source != "TRL" and seen[run.source] % 2 == 0), run
    assert sum(seen.values()) >= 60 and sum(run.held_out for run in runs()) >= 40


def test_an_error_is_positive_where_a_run_is_predicted_to_take_longer() -> None:
    slower, longer = (
        Row("a", "b", "tokens/s per GPU", 100, 80),
        Row("a", "b", "s per step", 80, 100),
    )
    assert slower.error == pytest.approx(0.25) and longer.error == pytest.approx(0.25)
    assert (
        Row("a", "b", "GB per GPU", 50, 40).error == pytest.approx(-0.2)
        and Row("a", "b", "s per step", 1, None).error is None
    )
    worst = errors_of(
        [slower, Row("a", "c", "s per step", 10, 4), Row("a", "d", "s per step", 1, None)]
    )
    assert worst == ["2", "42%", "-60% (c)"]


def one(source: str, model: str, **wanted: int) -> Run:
    (run,) = (
        r
        for r in runs()
        if (r.source, r.model) == (source, model)
        and all(getattr(r, k) == v for k, v in wanted.items())
    )
    return run


def test_a_document_of_a_million_tokens_takes_what_trl_measured() -> None:
    assert step_s(one("TRL", "qwen3-8b", gpus=8)) == pytest.approx(364, rel=0.05)
    assert peak_bytes(one("TRL", "qwen3-8b", gpus=8)) == pytest.approx(56.2e9, rel=0.1)


@pytest.mark.slow
def test_the_median_error_of_held_out_runs_is_below_ten_per_cent() -> None:
    held = [
        row
        for row in run_rows()
        if row.held_out == "yes" and row.kind == "time, bfloat16" and row.error is not None
    ]
    assert len(held) >= 30 and median(abs(row.error or 0) for row in held) <= 0.1
