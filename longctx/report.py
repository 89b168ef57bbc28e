"""Report: what rank 0 prints when a run starts and when it is finished."""

from longctx.config import Config
from longctx.errors import shell
from longctx.hf.source import lines_on
from longctx.model.presets import NoNativeModel
from longctx.training.checks import check_family
from longctx.training.data import mix_lines
from longctx.training.kernels import computed_by
from longctx.training.metrics import mean_speed
from longctx.training.run import Run
from longctx.training.run_profile import run_profile
from longctx.training.saved.export import export, how_to_load
from longctx.training.trainer import Trainer
from longctx.units import format_count


def print_start(run: Run, trainer: Trainer) -> None:
    """Prints what is trained on what, from where, and what may surprise."""
    config = run.config
    store = run.data.store
    ranks = trainer.mesh.world_size
    assert trainer.loader is not None
    max_length = trainer.loader.state_dict()["max_length"]
    begin = run.checkpoint.step if run.checkpoint is not None and not run.resumes else 0
    print(
        _first_line(run, trainer),
        *filter(None, [run.changes]),
        *mix_lines(config, trainer.loader.sampler, config.train.steps - begin),
        *lines_on(run.source, config.model.from_pretrained, min(max_length, run.data.longest)),
        *filter(None, [_dropped(run, max_length), waiting(config, trainer)]),
        *run_profile(config, ranks, store.tokenizer.vocab_size).lines,
        sep="\n",
        flush=True,
    )


def _first_line(run: Run, trainer: Trainer) -> str:
    config = run.config
    store = run.data.store
    model = trainer.model
    if config.model.from_pretrained is None:
        start = "from new weights"
    else:
        start = f"from checkpoint {config.model.from_pretrained}"
    if run.checkpoint is not None:
        start = f"from step {trainer.steps_done}" + (
            "" if run.resumes else f" of {run.checkpoint.run}"
        )
    if trainer.steps_done >= config.train.steps:
        start += f", the last step by train.steps {config.train.steps}: nothing to do"
    parameters = f"{format_count(model.spec.parameters)} parameters"
    if config.lora.rank is not None:
        total = model.spec.parameters
        trained = sum(
            parameter.numel() for parameter in model.parameters() if parameter.requires_grad
        )
        parameters = (
            f"{trained:,} of {total:,} parameters trained (LoRA of rank {config.lora.rank})"
        )
        parameters += f", peak learning rate {config.optimizer.learning_rate:g}"
    stores = "store" if len(store.sources) == 1 else "stores"
    return (
        f"{parameters} on {run.launch.world_size} ranks "
        f"({computed_by(config, model.spec, run.device.type)}), {start}; {stores} "
        f"{store.description}: {len(store):,} documents, {store.tokens_in_all:,} tokens; run "
        f"folder {config.train.run_dir}"
    )


def _dropped(run: Run, max_length: int) -> str:
    """Returns a line on documents that are dropped or truncated, as they are too long; empty if
    there are none."""
    store = run.data.store
    dropped = store.longer_than(max_length)
    done = {
        "drop": "dropped",
        "truncate_left": "cut at their beginning",
        "truncate_right": "cut at their end",
    }.get(run.config.data.long_documents or "split")
    if done is None or not dropped:
        return ""
    return f"{dropped:,} of {len(store):,} documents are {done}: longer than {max_length:,} tokens"


def waiting(config: Config, trainer: Trainer) -> str:
    """Returns a line on an optimizer that the host of a GPU waits before; empty for others."""
    if trainer.ahead or trainer.mesh.device.type == "cpu":
        return ""
    if config.train.offload_optimizer:
        setting = "train.offload_optimizer"
    else:
        setting = f"optimizer.name {config.optimizer.name}"
    return f"every step waits for its gradient norm before the update, because of {setting}"


def print_end(config: Config, step: int, *, trained: bool) -> None:
    """Prints the mean speed, where everything is and the next commands; exports if set. The other
    ranks do not wait for it."""
    run_dir = config.train.run_dir
    out = config.checkpoint.export
    saves = config.checkpoint.every is not None
    print(f"finished step {step}; mean over the run: {mean_speed(run_dir)}")
    if saves:
        print(f"  checkpoint   {run_dir / 'latest'}")
    print(f"  metrics      {run_dir / 'metrics.jsonl'}", flush=True)
    if config.log.tensorboard:
        print(f"  TensorBoard  tensorboard --logdir {shell(run_dir / 'tensorboard')}", flush=True)
    if saves and out is None:
        print(f"  export       {how_to_export(config)}")
    elif (
        saves and out is not None and out.exists() and not (trained and out.is_relative_to(run_dir))
    ):
        print(
            f"{out} exists and was not written again: longctx export {shell(run_dir, out)} "
            "--overwrite"
        )
    elif saves and out is not None:
        print(
            export(run_dir, out, step=step, overwrite=out.exists()),
            how_to_load(out),
            sep="\n",
            flush=True,
        )


def how_to_export(config: Config) -> str:
    """Returns the command that exports the run, or why nothing can; without transformers, which
    export needs, the command."""
    try:
        check_family(config)
    except NoNativeModel as none:
        return f"not possible: {none}"
    except ModuleNotFoundError:
        pass
    return f"longctx export {shell(config.train.run_dir)} OUT"
