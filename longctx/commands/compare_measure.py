"""`longctx compare --measure`: trains the same documents under several modes in turn and compares the measured times."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from longctx.commands.lengths import DEFAULT_PROFILE
from longctx.commands.output import check_writable, given_options, said_once
from longctx.config import load
from longctx.errors import UserError

if TYPE_CHECKING:
    from longctx.comparison.measured import MeasuredComparison
    from longctx.parallel.environment import Launch

DEFAULT_STEPS = 10
DEFAULT_WARMUP = 2
DEFAULT_MODES = "auto,static"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of --measure."""
    group = parser.add_argument_group(
        "with --measure (and --processes N)",
        f"--steps is the number of measured steps (default: {DEFAULT_STEPS}); settings such as --context.profile my.yaml may "
        "follow.",
    )
    group.add_argument(
        "--modes",
        metavar="MODE,..",
        help="modes to measure: auto, bins, static (the best degree of every step by the cost model), static:DEGREE "
        f"(default: {DEFAULT_MODES})",
    )
    group.add_argument("--warmup", type=int, metavar="S", help=f"warm-up steps, not measured (default: {DEFAULT_WARMUP})")
    group.add_argument("--out", type=Path, metavar="F", help="write the measurements of every step and mode as JSON")


def refuse(arguments: argparse.Namespace) -> None:
    """Raises UserError for options that need --measure, or are not supported with it."""
    if arguments.measure is None:
        options = given_options(arguments, "modes", "warmup", "out", "processes")
        options += [f"--{override.split('=')[0]}" for override in arguments.overrides]
        if options:
            raise UserError(f"{', '.join(options)} requires --measure: omit it to compare by the cost model")
        return
    names = (
        *("ranks", "baseline", "long_documents", "documents", "global_tokens", "seed"),
        *("html", "csv", "model", "tokens_per_rank"),
    )
    options = given_options(arguments, *names)
    if arguments.profile != DEFAULT_PROFILE:
        options.append("--profile")
    if options:
        raise UserError(
            f"{', '.join(options)} is not supported with --measure: omit it, and use settings of the run and torchrun instead"
        )


def compare_steps(arguments: argparse.Namespace) -> int:
    """Trains under every mode and prints the times. Returns 1 if the losses of the modes differ, 143 after SIGTERM."""
    from longctx.parallel.environment import Launch

    launch = Launch.read()
    with said_once(launch):
        measured = _measure(arguments, launch)
    if not measured.losses_equal:
        return 1
    return 143 if measured.ended_early else 0


def _measure(arguments: argparse.Namespace, launch: "Launch") -> "MeasuredComparison":
    from longctx.comparison.measured import train_in_turn
    from longctx.training.build import join_run
    from longctx.training.checks import check_model
    from longctx.training.run import Run
    from longctx.training.run_profile import run_profile

    out: Path | None = arguments.out
    check_writable(out)
    show = launch.rank == 0
    config = load(arguments.measure or None, arguments.overrides, world_size=launch.world_size)
    run = Run.open(config)
    store = run.data.store
    if store.pairs or config.dpo.beta is not None:
        raise UserError(
            f"--measure does not support DPO, but data.store is {store.path} and dpo.beta is {config.dpo.beta}: use `longctx "
            f"compare --lengths {store.path}` for modelled times, or measure on a store without pairs"
        )
    if config.policy.loss is not None:
        raise UserError(f"--measure does not support rollouts, but policy.loss is {config.policy.loss}: measure on a store")
    check_model(config, run.data, run.source, launch.world_size)
    groups = join_run(config, launch, run.device)
    if show:
        print(*run_profile(config, launch.world_size, store.tokenizer.vocab_size).lines, sep="\n", file=sys.stderr, flush=True)
    measured = train_in_turn(
        config,
        groups,
        store,
        modes=tuple((arguments.modes or DEFAULT_MODES).split(",")),
        steps=DEFAULT_STEPS if arguments.steps is None else arguments.steps,
        warmup=DEFAULT_WARMUP if arguments.warmup is None else arguments.warmup,
        tell=(lambda line: print(line, flush=True)) if show and not arguments.json else lambda line: None,
    )
    groups.close()
    if show:
        content = measured.to_json()
        if out is not None:
            out.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
        if arguments.json:
            print(json.dumps(content))
        else:
            _draw(measured)
    return measured


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
        title=f"{steps} step{'s' * (steps > 1)} per mode on {measured.ranks} ranks, after {measured.warmup} warm-up steps",
        title_justify="left",
        title_style="bold",
        caption=f"Speedup: time of {baseline.mode} / time of the mode on the same documents, median over steps."
        + (" Mode static uses the best degree of every step by the cost model." if "static" in names else ""),
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
