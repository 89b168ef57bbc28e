"""`longctx runs`: numbers of a recorded run, its pictures and page, and errors about folders that hold no run."""

import json
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest

from longctx.cli import main
from longctx.plots.run_log import PARTS, RunLog, read_run, read_runs, summary
from longctx.plots.runs import POLICY, draw_runs
from longctx.training.metrics import StepMetrics

RECORD = Path(__file__).parent / "recorded_metrics.jsonl"
"""Metrics of a run of examples/quickstart.yaml in two processes, with held-out documents."""
STEPS: list[dict[str, Any]] = [json.loads(line) for line in RECORD.read_text("utf-8").splitlines()]


def make_run(folder: Path, text: str | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(RECORD.read_text("utf-8") if text is None else text, "utf-8")
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "quick")


def figures(folder: Path) -> dict[str, str]:
    _, lines = summary([read_run(folder, "quick")])
    return {line[0]: line[1] for line in lines}


def test_the_record_has_the_metrics_of_today() -> None:
    """A metric that `longctx runs` reads and training no longer writes would be missed here."""
    written = set(StepMetrics.__dataclass_fields__)
    assert set(STEPS[0]) <= written
    read = {*PARTS} - {"data_s"} | {"step", "loss", "degrees", "tokens", "step_time_s", "predicted_s", "peak_memory_bytes"}
    assert read | {"validation_loss"} <= written


def test_the_table_holds_the_numbers_of_the_log(run: Path) -> None:
    found = figures(run)
    warm = STEPS[1:]
    assert found["steps"] == f"1 to {len(STEPS)}"
    assert found["loss, last 10 steps"] == f"{fmean(step['loss'] for step in STEPS[-10:]):.3f}"
    assert found["loss, validation"] == f"{[s['validation_loss'] for s in STEPS if s['validation_loss']][-1]:.3f}"
    assert found["tokens/s, all ranks"] == f"{median(step['tokens'] / step['step_time_s'] for step in warm):,.0f}"
    assert found["measured / predicted"] == f"{median(step['step_time_s'] / step['predicted_s'] for step in warm):.2f}×"
    seconds = fmean(step["step_time_s"] for step in warm)
    assert found["attention"] == f"{fmean(step['attention_s'] for step in warm) / seconds:.1%}"
    assert found["degrees"] == " ".join(sorted({degree for step in STEPS for degree in step["degrees"]}))
    assert "pipeline bubble" not in found, "no run has a pipeline"


def test_a_pause_is_not_part_of_the_times(run: Path) -> None:
    before = figures(run)
    paused = {**STEPS[5], "step": len(STEPS) + 1, "step_time_s": 1000.0, "optimizer_s": 990.0}
    with (run / "metrics.jsonl").open("a") as log:
        log.write(json.dumps(paused) + "\n")
    same = ("attention", "optimizer", "rest", "step time", "measured / predicted")
    assert {name: figures(run)[name] for name in same} == {name: before[name] for name in same}


def test_the_parts_are_the_whole_step(run: Path) -> None:
    parts = read_run(run, "quick").time_parts()
    assert sum(parts.values()) == pytest.approx(fmean(step["step_time_s"] for step in STEPS[1:]))
    assert all(seconds >= 0 for seconds in parts.values())


def test_degrees_count_every_document(run: Path) -> None:
    counts = read_run(run, "quick").degrees()
    assert [sum(column) for column in zip(*counts.values(), strict=True)] == [step["documents"] for step in STEPS]


def test_runs_are_drawn_and_written_beside_the_first(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = make_run(tmp_path / "runs [b]" / "<other> $x_1$ _")
    assert main(["runs", str(run), str(other)]) == 0
    out = capsys.readouterr().out
    assert f"written to {run / 'runs.png'} and {run / 'runs.html'}" in " ".join(out.split())
    assert "tokens/s, all ranks" in out and "quick" in out and "<other>" in out
    assert (run / "runs.png").read_bytes().startswith(b"\x89PNG")
    assert "&lt;other&gt; $x_1$ _" in (run / "runs.html").read_text("utf-8")


@pytest.mark.parametrize(("factor", "said"), [(1.0, ""), (1.6, "1.60 times"), (0.5, "0.50 times")])
def test_a_profile_that_is_far_off_is_doubted(run: Path, factor: float, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    log = run / "metrics.jsonl"
    steps = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    log.write_text("".join(json.dumps({**step, "predicted_s": step["step_time_s"] / factor}) + "\n" for step in steps))
    assert main(["runs", str(run)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert (f"steps take {said} the predicted time" in out) == bool(said)
    assert ("longctx calibrate CONFIG --out FILE" in out) == bool(said)


def test_a_last_line_that_is_being_written_is_left_out(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Damaged lines in between are counted."""
    with (run / "metrics.jsonl").open("a") as log:
        log.write('{"step": 99, "loss": 1.0, "grad')
    assert figures(run)["steps"] == f"1 to {len(STEPS)}"
    assert main(["runs", str(run)]) == 0
    assert "damaged" not in capsys.readouterr().out
    lines = RECORD.read_text("utf-8").splitlines()
    lines[3] = lines[3][:40]
    lines[4] = "[1, 2]"
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert len(read_run(run, "quick").steps) == len(STEPS) - 2
    assert main(["runs", str(run)]) == 0
    assert "2 damaged lines of metrics.jsonl left out" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_run_of_few_steps(steps: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "short", "".join(f"{line}\n" for line in RECORD.read_text().splitlines()[:steps]))
    assert main(["runs", str(run)]) == 0
    assert len(RunLog("short", run, STEPS[:steps]).usual()) == min(steps, 2)


def test_a_long_run_a_loss_that_is_not_finite_and_old_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """1,000 steps in few bins; NaN as json writes it; a log from before some metrics were written."""
    steps = [{**STEPS[i % len(STEPS)], "step": i + 1} for i in range(1000)]
    steps[500]["loss"] = float("nan")
    for step in steps:
        for name in ("validation_loss", "exchange_wait_s", "peak_memory_bytes"):
            step.pop(name, None)
    run = make_run(tmp_path / "long", "".join(f"{json.dumps(step)}\n" for step in steps))
    assert main(["runs", str(run)]) == 0
    found = figures(run)
    assert found["steps"] == "1 to 1,000" and "peak memory" not in found and "loss, validation" not in found


def test_steps_without_targets_are_counted_and_not_averaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also in logs of earlier versions, which wrote a loss of 0."""
    without = {"loss": None, "target_tokens": 0, "skipped": True}, {"loss": 0.0, "target_tokens": 0, "skipped": True}
    steps = [*STEPS[:8], *({**STEPS[8], **changed, "step": 9 + place} for place, changed in enumerate(without))]
    run = make_run(tmp_path / "some", "".join(f"{json.dumps(step)}\n" for step in steps))
    assert main(["runs", str(run)]) == 0
    mean = sum(step["loss"] for step in STEPS[:8]) / 8
    found = figures(run)
    assert found["steps without update"] == "2" and found["loss, last 10 steps"] == f"{mean:.3f}"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "missing: no such folder; give the folder of a run"),
        ("file", "file: it is a file; give the folder of a run"),
        ("empty", "empty holds no metrics.jsonl, which training writes after its first step: give the folder of a run"),
        ("parent", "parent holds no metrics.jsonl, which training writes after its first step: give {}/parent/a"),
        ("begun", "begun/metrics.jsonl holds no complete step yet: wait for the first one"),
        ("cut", "cut/metrics.jsonl holds no complete step yet"),
    ],
)
def test_folders_without_a_run_are_named(name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    make_run(tmp_path / "parent" / "a")
    make_run(tmp_path / "begun", "")
    make_run(tmp_path / "cut", '{"step": 1, "lo')
    assert main(["runs", str(tmp_path / name)]) == 2
    captured = capsys.readouterr()
    assert message.format(tmp_path) in captured.err and captured.out == ""


def test_names_and_places(run: Path, tmp_path: Path) -> None:
    """Places may be given; runs of the same name are told by their paths."""
    assert main(["runs", str(run), "--png", str(tmp_path / "a.svg"), "--html", str(tmp_path / "a.html")]) == 0
    assert b"<svg" in (tmp_path / "a.svg").read_bytes() and (tmp_path / "a.html").exists()
    assert not (run / "runs.png").exists()
    folders = [make_run(tmp_path / group / "run") for group in ("a", "b")]
    assert [one.name for one in read_runs(folders)] == [str(folder) for folder in folders]


def test_contradictions_are_named(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(run), f"{run}/"]) == 2
    assert "is given twice" in capsys.readouterr().err
    assert main(["runs", str(run), "--png", "runs.doc"]) == 2
    assert "runs.doc: the file name must end in one of .png" in capsys.readouterr().err
    assert main(["runs", str(run), "--html", str(tmp_path / "missing" / "a.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_run_on_rollouts_shows_its_rewards(tmp_path: Path) -> None:
    policy = {"completion_tokens": 40.0, "ratio": 1.0, "clip_share": 0.02, "kl": 0.0, "entropy": 2.0}
    steps = [step | policy | {"reward": 0.1 * step["step"]} for step in STEPS]
    folder = make_run(tmp_path / "rl", "".join(json.dumps(step) + "\n" for step in steps))
    shown = figures(folder)
    assert shown["reward, first step"] == "0.100"
    assert shown["reward, last 10 steps"] == f"{fmean(step['reward'] for step in steps[-10:]):.3f}"
    titles = [axes.get_title("left") for axes in draw_runs([read_run(folder, "rl")]).axes]
    assert "Mean reward" in titles and "Share of clipped tokens" in titles and "KL divergence to the reference" not in titles
    assert len(titles) == len(set(titles)) == 5 + 5
    assert set(POLICY) <= set(StepMetrics.__dataclass_fields__)
