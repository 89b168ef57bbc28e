"""Assembly: builds the trainer of a run on a rank, with the weights and the place in the data of
its checkpoint."""

import sys
from collections.abc import Mapping
from pathlib import Path

from longctx.model.protocol import Model, differences_but_rope
from longctx.parallel.mesh import Mesh
from longctx.training.data import build_loader, choose_max_length
from longctx.training.kernels import computed_by
from longctx.training.metrics import MetricsLog
from longctx.training.run import Run
from longctx.training.runner import ModelRunner
from longctx.training.saved import checkpoint
from longctx.training.saved.checkpoint import Checkpoint
from longctx.training.saved.checkpoint_io import CheckpointError
from longctx.training.saved.model_folder import keep_model_files
from longctx.training.saved.run_folder import restore_best, set_aside, settings_header
from longctx.training.stop_signal import StopSignal
from longctx.training.trace import Tracer
from longctx.training.trainer import RunParts, Trainer
from longctx.training.validation import Validator, validation_documents


def assemble(run: Run, mesh: Mesh, stop: StopSignal | None = None) -> Trainer:
    """Builds the trainer of a run, and loads its checkpoint if it has one. Rank 0 writes config,
    model files and log.

    The run stops after the current step if `stop` has received its signal on any rank. Collective.
    """
    config = run.config
    saved = run.checkpoint
    resumed = saved if run.resumes else None
    max_length = choose_max_length(config, mesh.world_size, resumed, run.data.longest)
    loader = build_loader(run.data.store, config, mesh, max_length)
    runner = ModelRunner(config, mesh, run.source)
    optimizer = runner.make_optimizer()
    validator = None
    if config.eval.every is not None:
        documents = validation_documents(config, run.data, max_length)
        validator = Validator(documents, runner, loader.planner)
    base = None
    if run.source.files is not None:
        files = run.source.files
        base = {"folder": str(files.folder), "fingerprint": files.fingerprint}
    if saved is not None:
        check_weights(saved, runner.model, base, resumes=run.resumes)
        if run.resumes:
            loader.load_state_dict(saved.state["data"])
        else:
            loader.continue_from(saved.state["data"])
        checkpoint.load(saved, runner.model, optimizer, mesh.control)
    # Nothing refuses the run any more.
    if run.rewinds and saved is not None and mesh.world_rank == 0:
        for sentence in set_aside(config.train.run_dir, saved):
            print(f"longctx train: {sentence}", file=sys.stderr)
    best = None
    if resumed is not None and config.checkpoint.best and mesh.world_rank == 0:
        best = restore_best(resumed)
    best = mesh.gather_objects(best)[0]
    log = begin_folder(run, mesh) if mesh.world_rank == 0 else None
    tracer = None
    if run.traced is not None:
        traces = config.train.run_dir / "traces"
        tracer = Tracer(run.traced, traces, rank=mesh.world_rank, model=runner.model)
    parts = RunParts(
        validator=validator,
        log=log,
        tracer=tracer,
        base=base,
        best=best,
        steps_done=0 if saved is None else saved.step,
    )
    return Trainer(runner, optimizer, loader, stop=stop, parts=parts)


def check_weights(
    saved: Checkpoint, model: Model, base: Mapping[str, str] | None, *, resumes: bool
) -> None:
    """Raises CheckpointError if a checkpoint is of another model; reads no weights.

    The model of a run that this run continues, rather than `resumes`, may have another RoPE.
    """
    different = model.differences(saved.state["model"])
    if not resumes:
        different = differences_but_rope(different)
    if different:
        raise CheckpointError(
            f"{saved.folder} contains another model: {'; '.join(different)}. Use the model of that "
            "run"
        )
    began = saved.state.get("base")  # a folder that is gone may be replaced by an export
    if (
        began
        and base
        and began["fingerprint"] != base["fingerprint"]
        and Path(began["folder"]).is_dir()
    ):
        raise CheckpointError(
            f"{saved.folder} belongs to a run that began from {began['folder']}, whose weights "
            f"differ from those of {base['folder']}: give that checkpoint, or choose another run "
            "folder (finetune: --out)"
        )


def begin_folder(run: Run, mesh: Mesh) -> MetricsLog:
    """Writes settings and model files of a run into its folder, and opens its log."""
    config = run.config
    folder = run.config.train.run_dir
    keep_model_files(folder, run.source, run.data.store)
    computed = computed_by(config, run.source.spec, mesh.device.type)
    header = settings_header(mesh.world_size, computed) + (
        f"# {run.changes}\n" if run.changes else ""
    )
    (folder / "config.yaml").write_text(header + config.to_yaml(), "utf-8")
    return MetricsLog(config, after_step=0 if run.checkpoint is None else run.checkpoint.step)
