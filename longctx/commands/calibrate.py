"""`longctx calibrate`: measures the constants of the cost model on this machine, and writes them as
a hardware profile."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longctx.commands.output import a_name, a_path, check_writable
from longctx.config import load, overview
from longctx.errors import UserError

if TYPE_CHECKING:
    from longctx.calibration import Measured

SUMMARY = "Measure the hardware profile of this machine for a model"
OVERRIDES = PROCESSES = True
VOCABULARY = 4096
"""Default vocabulary, that of `longctx prepare`."""
FAR_OFF = 0.2
"""Relative error of the predicted step above which a warning is given."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config",
        nargs="?",
        type=a_path,
        metavar="CONFIG",
        help="YAML file of settings, as for `longctx train`",
    )
    parser.add_argument(
        "--out",
        type=a_path,
        default=Path("profile.yaml"),
        metavar="FILE",
        help="profile to write or replace",
    )
    parser.add_argument(
        "--base",
        type=a_name,
        metavar="PROFILE",
        help="profile for constants that are not measured: overlap, the penalty of splitting, on "
        "one process the network (default: by device, as for context.profile)",
    )
    parser.epilog = (
        "No store is needed: tokens are drawn at random from a vocabulary of model.vocab_size "
        f"(default: {VOCABULARY}).\n"
        "Use the settings of the run: the profile depends on model, dtype, recomputation and "
        "tokens per rank.\n"
        "On several processes, to measure the exchange as well: longctx calibrate run.yaml "
        "--processes 8 --out my.yaml\n"
        "\n" + overview()
    )


def run(arguments: argparse.Namespace) -> int:
    from longctx.parallel.environment import Launch

    launch = Launch.to_join()
    # Ignore context.profile: it may name the file to be written.
    settings = [*arguments.overrides, "context.profile=null"]
    config = load(arguments.config, settings, world_size=launch.world_size)
    if config.pipeline.ranks > 1:
        raise UserError(
            f"parallel.pipeline_parallel_size is {config.pipeline.ranks}, but profiles are "
            "measured without a pipeline, and scaled to the layers of each rank in training: omit "
            "it"
        )
    if config.model.from_pretrained is not None:
        raise UserError(
            f"model.from_pretrained is {config.model.from_pretrained}, but profiles are measured "
            "with the native decoder, and scaled to the checkpoint in training: omit it, and set "
            "similar sizes, such as --model.overrides.hidden_size"
        )
    import torch  # takes seconds, and settings may be wrong

    from longctx.calibration import measure_profile
    from longctx.parallel.device import prepare_device
    from longctx.planning.hardware_profile import HardwareProfile
    from longctx.training.build import join_run
    from longctx.training.kernels import prepare_run_kernels
    from longctx.training.run_profile import default_profile

    device = prepare_device(config.train.device, launch)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    base = arguments.base or default_profile(device.type, gpu)
    HardwareProfile.load(base)
    if launch.rank == 0:
        check_writable(arguments.out)
    shape = config.model.shape(config.model.vocab_size or VOCABULARY)
    prepare_run_kernels(config, shape.spec, launch, device)

    def tell(part: str) -> None:
        if launch.rank == 0:
            print(f"measuring: {part}", file=sys.stderr, flush=True)

    with join_run(config, launch, device) as mesh:
        measured = measure_profile(
            config, mesh, shape, base=base, local_rank=launch.local_rank, tell=tell
        )
    if launch.rank == 0:
        arguments.out.write_text(measured.to_yaml(), "utf-8")
        _draw(measured, arguments.out)
    return 0


def _said_of(name: str, value: Any) -> str:
    """Returns a constant as the table has it."""
    if name == "attention_efficiency":
        (shortest, least), (longest, most) = value[0], value[-1]
        return f"{least:.2g} at {shortest:,} … {most:.2g} at {longest:,}"
    if name == "slow_ranks":
        return ", ".join(f"{rank}: × {relative:.2f}" for rank, relative in value) or "none"
    return f"{value:,.4g}"


def _draw(measured: "Measured", out: Path) -> None:
    """Prints the constants as a table: value and source."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(
        box=None, pad_edge=False, title=measured.about, title_justify="left", title_style="bold"
    )
    table.add_column("constant", no_wrap=True)
    table.add_column("value", no_wrap=True)
    table.add_column("from")
    for name, value in measured.profile.to_dict().items():
        style = None if name in measured.how else "dim"
        table.add_row(name, _said_of(name, value), measured.sources[name], style=style)
    console.print(table, highlight=False)
    check = measured.check
    console.print(
        "\n"
        f"one step of {check['documents']} documents, {check['tokens']:,} tokens: predicted "
        f"{check['predicted_s']:.4g} s, measured {check['measured_s']:.4g} s "
        f"({check['error']:+.1%})",
        highlight=False,
    )
    if not abs(check["error"]) <= FAR_OFF:
        console.print(
            "warning: that is far off: stop other load on the machine and measure again",
            style="yellow",
        )
    written = f"written to {out}: use it with --context.profile {out}"
    console.print(written, highlight=False, soft_wrap=True)
