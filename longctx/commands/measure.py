"""`longctx measure`: trains the same documents under several modes in turn and compares the
measured times."""

import argparse
import json
import sys
from typing import TYPE_CHECKING

from longctx.commands.output import a_path, check_writable
from longctx.config import load, overview
from longctx.errors import raise_together

if TYPE_CHECKING:
    from longctx.comparison.measured import MeasuredComparison

SUMMARY = (
    "Train the same documents with dynamic and static degrees in turn, and compare the "
    "measured times"
)
OVERRIDES = PROCESSES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config",
        nargs="?",
        type=a_path,
        metavar="CONFIG",
        help="YAML file of settings, as for `longctx train`",
    )
    parser.add_argument(
        "--modes",
        default="auto,static",
        metavar="MODE,..",
        help="modes to measure: auto, bins, static (the best degree of every step by the cost "
        "model), static:DEGREE",
    )
    parser.add_argument(
        "--steps", type=int, default=10, metavar="N", help="measured steps of each mode"
    )
    parser.add_argument(
        "--warmup", type=int, default=2, metavar="N", help="warm-up steps, not measured"
    )
    parser.add_argument(
        "--out",
        type=a_path,
        metavar="FILE",
        help="write the measurements of every step and mode as JSON",
    )
    parser.add_argument(
        "--json", action="store_true", help="print them as JSON instead of the table"
    )
    parser.epilog = (
        "Nothing is saved. Give the profile of this machine, for predictions: longctx measure "
        "run.yaml --processes 8 --context.profile my.yaml\n"
        "\n" + overview()
    )


def run(arguments: argparse.Namespace) -> int:
    """Trains under every mode and prints the times. Returns 1 if the losses of the modes differ,
    143 after SIGTERM."""
    from longctx.parallel.environment import Launch

    check_writable(arguments.out)
    launch = Launch.to_join()
    show = launch.rank == 0
    config = load(arguments.config, arguments.overrides, world_size=launch.world_size)
    from longctx.comparison.measured import train_in_turn  # and torch: settings may be wrong
    from longctx.training.build import join_run
    from longctx.training.checks import checks_of
    from longctx.training.run import Run
    from longctx.training.run_profile import run_profile

    run = Run.open(config)
    store = run.data.store
    raise_together(checks_of(config, run.data, run.source, launch.world_size))
    with join_run(config, launch, run.device) as mesh:
        if show:
            profile = run_profile(config, launch.world_size, store.tokenizer.vocab_size)
            print("\n".join(profile.lines), file=sys.stderr, flush=True)
        measured = train_in_turn(
            config,
            mesh,
            store,
            modes=tuple(arguments.modes.split(",")),
            steps=arguments.steps,
            warmup=arguments.warmup,
            tell=(lambda line: print(line, flush=True))
            if show and not arguments.json
            else lambda line: None,
        )
    if show:
        content = measured.to_json()
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
        if arguments.json:
            print(json.dumps(content))
        else:
            _draw(measured)
    if not measured.losses_equal:
        return 1
    if measured.ended_early:
        return 143
    return 0


def _draw(measured: "MeasuredComparison") -> None:
    """Prints one row per mode, and whether the losses agree."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    baseline = measured.baseline
    names = [mode.mode for mode in measured.modes]
    steps = len(baseline.steps)
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"{steps} step{'s' * (steps > 1)} per mode on {measured.ranks} ranks, after "
        f"{measured.warmup} warm-up steps",
        title_justify="left",
        title_style="bold",
        caption=f"Speedup: time of {baseline.mode} / time of the mode on the same documents, "
        "median over steps."
        + (
            " Mode static uses the best degree of every step by the cost model."
            if "static" in names
            else ""
        ),
        caption_justify="left",
    )
    table.add_column("mode")
    for title in ("median step", "speedup", "predicted", "prediction error", "data wait"):
        table.add_column(title, justify="right")
    for mode in measured.modes:
        table.add_row(
            mode.mode,
            f"{mode.median_s:.3f} s",
            f"{mode.times_as_fast_as(baseline):.2f}×",
            f"{mode.times_as_fast_as(baseline, 'predicted_s'):.2f}×",
            f"{mode.prediction_error:+.1%}",
            f"{sum(mode.column('data_wait_s')) / mode.total_s:.1%}",
        )
    console = Console()
    console.print(table)
    word = "equal" if measured.losses_equal else "DIFFERENT"
    console.print(
        f"losses {word}: relative difference at most {measured.loss_difference:.1e} "
        f"(tolerance for rounding {measured.loss_tolerance:.0e})",
        style=None if measured.losses_equal else "red",
        highlight=False,
    )
