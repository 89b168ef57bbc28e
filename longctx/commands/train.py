"""`longctx train`: checks everything that can be checked, joins the processes, trains."""

import argparse
import sys
from pathlib import Path

from longctx.config import Config, describe, load
from longctx.errors import UserError

SUMMARY = "Train a model on packed documents, with a context-parallel degree that changes by the document"
OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", type=Path, metavar="CONFIG", help="YAML file of settings; defaults without one")
    parser.add_argument("--resume", action="store_true", help="go on from the newest complete checkpoint of train.run_dir")
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything, plan some steps, print figures, train nothing"
    )
    parser.add_argument("--ranks", type=int, metavar="N", help="with --dry-run: pretend to be this many processes")
    parser.epilog = (
        "on several processes: torchrun --nproc-per-node 8 -m longctx train run.yaml --batch.tokens_per_rank 32768\n\n"
        + describe()
    )


def run(arguments: argparse.Namespace) -> int:
    from longctx.parallel.mesh import Launch

    launch = Launch.read()
    try:
        if arguments.dry_run:
            ranks = launch.world_size if arguments.ranks is None else arguments.ranks
            return _dry_run(load(arguments.config, arguments.overrides, world_size=ranks), ranks)
        if arguments.ranks is not None:
            raise UserError("--ranks goes with --dry-run: to train on N processes, start them with torchrun --nproc-per-node N")
        return _train(load(arguments.config, arguments.overrides, world_size=launch.world_size), arguments.resume)
    except (UserError, OSError):
        # All processes of a node meet the same mistake: one of them says so.
        if launch.local_rank == 0:
            raise
        return 2


def _dry_run(config: Config, ranks: int) -> int:
    from longctx.training.dry_run import dry_run

    dry_run(config, ranks)
    return 0


def _train(config: Config, resume: bool) -> int:
    from longctx.attention.kernels import choose_kernel
    from longctx.data.store import Store
    from longctx.parallel import mesh
    from longctx.training.run_folder import open_run_folder
    from longctx.training.trainer import Trainer

    launch = mesh.Launch.read()
    device = mesh.choose_device(config.train.device, launch.local_rank)
    store = Store.open(config.data.store, tokenizer=config.data.tokenizer)
    shape = config.model.shape(store.tokenizer.vocab_size)
    choose_kernel(config.context.kernel, device, shape.head_dim, shape.head_dim)
    # Weights and two moments, in float32.
    found, damaged = open_run_folder(config.train.run_dir, resume=resume, checkpoint_bytes=12 * shape.parameters())
    if launch.rank == 0:
        for sentence in damaged:
            print(f"longctx train: {sentence}", file=sys.stderr)
    groups = mesh.join(
        launch,
        device,
        tensor=config.parallel.tensor_parallel_size,
        pipeline=config.parallel.pipeline_parallel_size,
        timeout_s=config.train.timeout_s,
    )
    trainer = Trainer.start(config, groups, store, found)
    if launch.rank == 0:
        start = f"from step {trainer.steps_done}" if found else "from new weights"
        print(
            f"{shape.parameters() / 1e6:.1f}M parameters on {groups.ranks} ranks ({device.type}, {config.train.dtype}), "
            f"{start}; store {config.data.store}: {len(store.lengths):,} documents, {int(store.lengths.sum()):,} tokens; "
            f"run folder {config.train.run_dir}",
            flush=True,
        )
    finished = trainer.train()
    groups.close()
    if not finished and launch.rank == 0:
        print(f"stopped by SIGTERM after step {trainer.steps_done}; checkpoint written, --resume goes on", file=sys.stderr)
    return 0 if finished else 143
