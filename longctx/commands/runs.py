"""`longctx runs`: what happened in training runs, from their metrics.jsonl, as a table, a picture and an HTML page."""

import argparse
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path

from longctx.commands.output import check_picture, check_writable

SUMMARY = "Show training runs: loss, speed, degrees, predicted time and time split"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder (train.run_dir); several are overlaid")
    parser.add_argument(
        "--png", type=Path, metavar="F", help="picture of all figures, .png, .svg or .pdf (default: RUN/runs.png)"
    )
    parser.add_argument("--html", type=Path, metavar="F", help="page with all figures (default: RUN/runs.html)")


def run(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from longctx.plots.run_log import read_runs, summary
    from longctx.plots.run_page import SUMMARY_WORDS, render
    from longctx.plots.runs import draw_runs

    runs = read_runs(arguments.runs)
    picture: Path = arguments.png or runs[0].path / "runs.png"
    page: Path = arguments.html or runs[0].path / "runs.html"
    check_picture(picture)
    check_writable(page)
    draw_runs(runs).savefig(picture)
    about = {"made with": shlex.join(["longctx", "runs", *sys.argv[2:]]), "on": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"}
    page.write_text(render(runs, about), encoding="utf-8")
    console = Console()
    headings, lines = summary(runs)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(Text(heading), justify="right" if heading else "left", overflow="fold")
    for line in lines:
        table.add_row(*map(Text, line))
    console.print(table)
    console.print(SUMMARY_WORDS, style="dim", highlight=False)
    for remark in (remark for run in runs for remark in run.remarks()):
        console.print(remark, highlight=False, markup=False)
    print(f"written to {picture} and {page}")
    return 0
