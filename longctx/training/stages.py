"""Stages of a run: each has its own trainer, which starts from the last checkpoint of the previous stage.

A run in stages is therefore bit-identical to separate runs that start from each other's checkpoints, and resumes at any step.
"""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from longctx.config import Config
from longctx.config.problems import yaml_text
from longctx.data.manifest import TOKENIZER
from longctx.data.store import Store
from longctx.errors import UserError, shell
from longctx.parallel.mesh import Mesh
from longctx.training import checkpoint
from longctx.training.checkpoint import Checkpoint
from longctx.training.checkpoint_io import CheckpointError
from longctx.training.setup import open_data
from longctx.training.stop_signal import StopSignal
from longctx.training.trainer import Trainer

Began = Callable[[Trainer, Store, Checkpoint | None], None]
"""Called on every rank before the first step of every stage, with its trainer, its store and the checkpoint it starts from."""


def train_in_stages(
    config: Config, mesh: Mesh, found: Checkpoint | None, stop: StopSignal | None, began: Began
) -> tuple[bool, int]:
    """Trains all stages after a checkpoint, or after the one before it if it is damaged. All ranks call it.

    A run without stages has one. Returns whether the last step of the run is done, and the number of steps done; see
    `Trainer.train`.
    """
    while True:
        found, damaged = checkpoint.verified(config.train.run_dir, found, mesh.control)
        if mesh.world_rank == 0:
            print(*(f"longctx train: {sentence}" for sentence in damaged), sep="\n", end="\n" * bool(damaged), file=sys.stderr)
        store = open_data(config.at_stage(config.stage_after(found.step if found is not None else 0)))
        trainer = Trainer.start(config, mesh, store, found, stop)
        began(trainer, store, found)
        finished, done = trainer.train(), trainer.steps_done
        stopping = trainer.stopping
        del trainer, store  # frees weights and moments before the next ones are read
        gc.collect()
        at_end = done >= config.train.steps  # or beyond, if the run is resumed with fewer steps
        if not finished or at_end or stopping:
            return at_end, done
        found, _ = checkpoint.of_step(config.train.run_dir, done)
        if found is None:
            raise CheckpointError(
                f"the checkpoint of step {done}, the last of a stage, cannot be read: try again with --resume"
            )


def open_stages(config: Config) -> Iterator[tuple[Config, Store]]:
    """Yields settings and store of every stage. Raises StoreError, or UserError if stages have different tokenizers."""
    first: Store | None = None
    for stage in range(len(config.stage_ends)):
        own = config.at_stage(stage)
        with named(config, stage):
            store = open_data(own)
            first = first or store
            if store.tokenizer.fingerprint != first.tokenizer.fingerprint:
                raise UserError(
                    f"store {store.path} was made with another tokenizer than store {first.path} of stage 1: prepare it with "
                    f"that tokenizer (`longctx prepare --tokenizer {shell(first.path / TOKENIZER)}`)"
                )
        yield own, store


@contextmanager
def named(config: Config, stage: int) -> Iterator[None]:
    """Prefixes a UserError with the number of the stage."""
    try:
        yield
    except UserError as error:
        if not config.stages:
            raise
        raise UserError(f"stage {stage + 1}: {error}") from error


def stage_line(config: Config, stage: int) -> str:
    """Returns a line on the stage and the settings that change with it; empty for a run without stages."""
    if not config.stages:
        return ""
    first = config.stage_ends[stage] - config.steps_of(stage) + 1
    line = f"stage {stage + 1} of {len(config.stages)}, steps {first} to {config.stage_ends[stage]}"
    if stage == 0:
        return line
    before, now = (config.at_stage(number).model_dump() for number in (stage - 1, stage))
    changes = [
        f"{section}.{key} {yaml_text(before[section][key])} → {yaml_text(value)}"
        for section, values in now.items()
        if isinstance(values, dict)
        for key, value in values.items()
        if value != before[section][key]
    ]
    return f"{line}: {', '.join(changes) or 'settings unchanged'}"
