"""Loop: builds the trainer of a loop of one's own, which has no store: `Trainer.step` takes what it learns from."""

from functools import partial

from longctx.config import Config, check
from longctx.parallel.device import prepare_device
from longctx.parallel.environment import Launch
from longctx.training.agreement import identity, require_same
from longctx.training.assembly import base_of, begin_folder, check_weights
from longctx.training.build import join_run
from longctx.training.saved import checkpoint
from longctx.training.saved.run_folder import open_run_folder
from longctx.training.trainer import Trainer


def start(config: Config, *, vocab_size: int | None = None, resume: bool = False) -> Trainer:
    """Joins the processes that torchrun started, or this process alone, and builds a trainer. Collective.

    The loop calls `Trainer.step`, `Trainer.log.write` on rank 0, `Trainer.weights`, and `Trainer.save`; `Trainer.mesh.close()`
    ends it. Settings of stores, and how often to save and validate, have no effect.

    Args:
        config: settings, from `longctx.load_config`.
        vocab_size: entries of the vocabulary, for a model with new weights.
        resume: continue from the newest complete checkpoint of `train.run_dir` if there is one.

    Raises UserError if settings or run folder cannot be used.
    """
    launch = Launch.read()
    check(config, world_size=launch.world_size)
    saved, damaged = open_run_folder(config.train.run_dir, resume=resume, or_begin=resume, checkpoint_bytes=0)
    device, source = prepare_device(config.train.device, launch), config.model_source(vocab_size)
    mesh = join_run(config, launch, device, partial(require_same, identity(config, (), saved)))
    saved, more = checkpoint.verified(saved, mesh.control)
    base = base_of(source)
    first = mesh.world_rank == 0
    if first:
        print(*damaged, *more, sep="\n", end="\n" * bool(damaged or more))
    trainer = Trainer.build(config, mesh, source, base=base, steps_done=0 if saved is None else saved.step)
    if saved is not None:
        check_weights(saved, trainer.model, base, resumes=True)
        checkpoint.load(saved, trainer.model, trainer.optimizer, mesh.control)
    if first:
        trainer.log = begin_folder(config, source, mesh, None, saved)
    if mesh.peers is not None:
        mesh.peers.position = trainer.position
    return trainer
