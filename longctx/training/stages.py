"""Stages of a run: each is trained by a trainer of its own, which begins from the last checkpoint of the one before.

So a run in stages is bit by bit the runs that go on from each other's checkpoints, and one that is cut off goes on anywhere.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from longctx.config import Config
from longctx.config.problems import yaml_text
from longctx.data.store import TOKENIZER, Store
from longctx.errors import UserError
from longctx.parallel.mesh import Mesh, StopSignal
from longctx.training import checkpoint
from longctx.training.checkpoint import Checkpoint, CheckpointError
from longctx.training.setup import open_data
from longctx.training.trainer import Trainer

Began = Callable[[Trainer, Store, Checkpoint | None], None]
"""Called on every rank before the first step of every stage, with what the stage reads and began from."""


def train_in_stages(
    config: Config, mesh: Mesh, found: Checkpoint | None, stop: StopSignal | None, began: Began
) -> tuple[bool, int]:
    """Trains all stages behind a checkpoint; a run without stages is one. All ranks call it.

    Returns whether the run came to its last step, and the step that it came to; see `Trainer.train`.
    """
    while True:
        store = open_data(config.at_stage(config.stage_after(found.step if found is not None else 0)))
        trainer = Trainer.start(config, mesh, store, found, stop)
        began(trainer, store, found)
        finished, done = trainer.train(), trainer.steps_done
        stopping = trainer.stopping
        del trainer, store  # weights and moments, before others are read
        gc.collect()
        at_end = done >= config.train.steps  # a run that is resumed with fewer steps than it has done is beyond it
        if not finished or at_end or stopping:
            return at_end, done
        found, _ = checkpoint.of_step(config.train.run_dir, done)
        if found is None:
            raise CheckpointError(f"the checkpoint of step {done}, where a stage ended, cannot be read: --resume tries again")


def open_stages(config: Config) -> Iterator[tuple[Config, Store]]:
    """Settings and data of every stage. Raises StoreError, or UserError if stages have different tokenizers."""
    first: Store | None = None
    for stage in range(len(config.stage_ends)):
        own = config.at_stage(stage)
        with named(config, stage):
            store = open_data(own)
            first = first or store
            if store.tokenizer.fingerprint != first.tokenizer.fingerprint:
                raise UserError(
                    f"store {store.path} was made with another tokenizer than store {first.path} of stage 1: prepare it with "
                    f"that one (`longctx prepare --tokenizer {first.path / TOKENIZER}`)"
                )
        yield own, store


@contextmanager
def named(config: Config, stage: int) -> Iterator[None]:
    """Puts the number of the stage before what is wrong with it."""
    try:
        yield
    except UserError as error:
        if not config.stages:
            raise
        raise UserError(f"stage {stage + 1}: {error}") from error


def stage_line(config: Config, stage: int) -> str:
    """Which stage it is, and what changes with it; empty for a run without stages."""
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
    return f"{line}: {', '.join(changes) or 'as before'}"
