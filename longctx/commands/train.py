"""`longctx train`: checks settings, data and machine, joins the processes, and trains."""

import argparse
import logging
import math
import sys
import traceback
from contextlib import nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from longctx.commands.output import said_once
from longctx.config import Config, check, describe, load
from longctx.errors import UserError, shell
from longctx.units import format_count

if TYPE_CHECKING:
    import torch

    from longctx.data.store import Store
    from longctx.parallel.mesh import Launch
    from longctx.parallel.peers import Peers
    from longctx.training.checkpoint import Checkpoint
    from longctx.training.trainer import Trainer

SUMMARY = "Train a model on packed documents, with a context-parallel degree that changes by the document"
OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", type=Path, metavar="CONFIG", help="YAML file of settings (default: none)")
    parser.add_argument("--resume", action="store_true", help="continue from the newest complete checkpoint in train.run_dir")
    parser.add_argument(
        "--resume-if-any",
        action="store_true",
        help="continue if there is a checkpoint, otherwise start from scratch: for jobs that a scheduler restarts",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check settings and store, plan the first steps, print the plans and the memory estimate, and exit",
    )
    parser.add_argument(
        "--profile-steps",
        metavar="A:B",
        help="trace steps A to B into train.run_dir/traces: one file per rank, for https://ui.perfetto.dev",
    )
    parser.add_argument("--ranks", type=int, metavar="N", help="--dry-run: number of ranks to plan for")
    parser.epilog = (
        "On 8 GPUs: longctx train run.yaml --processes 8 --batch.tokens_per_rank 32768\n"
        "On every one of several machines: torchrun --nnodes 2 --nproc-per-node 8 .. -m longctx train run.yaml\n\n" + describe()
    )


def starts_processes(arguments: argparse.Namespace) -> bool:
    return not arguments.dry_run


def run(arguments: argparse.Namespace) -> int:
    from longctx.parallel.mesh import Launch
    from longctx.training.trace import parse_steps

    launch = Launch.read()
    if arguments.dry_run:
        from longctx.commands.dry_run import dry_run

        given = [ranks for ranks in (arguments.ranks, arguments.processes) if ranks is not None]
        ranks = given[0] if given else launch.world_size
        if ranks < 1:
            raise UserError(f"--{'ranks' if arguments.ranks is not None else 'processes'} is {ranks}: give 1 or more")
        dry_run(load(arguments.config, arguments.overrides, world_size=ranks), ranks)
        return 0
    with said_once(launch):
        if arguments.ranks is not None:
            raise UserError("--ranks requires --dry-run: to train on N processes of this machine, give --processes N")
        traced = None if arguments.profile_steps is None else parse_steps(arguments.profile_steps)
        config = load(arguments.config, arguments.overrides, world_size=launch.world_size)
        return train(config, resume=arguments.resume, resume_if_any=arguments.resume_if_any, profile_steps=traced)


def train(config: Config, *, resume: bool = False, resume_if_any: bool = False, profile_steps: range | None = None) -> int:
    """Trains a run in the processes that torchrun started, or in this process alone. Every process calls it.

    Args:
        config: settings of the run, from `longctx.load_config`.
        resume: continue from the newest complete checkpoint of `train.run_dir`.
        resume_if_any: the same if there is a checkpoint, else start from scratch.
        profile_steps: steps to trace, counted from 1, all of one stage; traces are written to `train.run_dir`/traces.

    Returns the exit status of this process: 0 after the last step, 128 + the signal's number if a signal ended the run, 2 or 1
    for an error after the processes joined, which is printed to standard error.
    Raises UserError for everything that is wrong before the processes join.
    """
    from longctx.parallel.mesh import Launch
    from longctx.training.agreement import identity

    launch = Launch.read()
    check(config, world_size=launch.world_size)
    _check_traced(config, profile_steps)
    device, available, found, fingerprints = _prepare(config, launch, resume, resume_if_any)
    mine = identity(config, fingerprints, found)
    return _train(config, launch, device, available, found, profile_steps, mine)


def _prepare(
    config: Config, launch: "Launch", resume: bool, resume_if_any: bool
) -> "tuple[torch.device, int | None, Checkpoint | None, list[str]]":
    """Checks everything that can be checked before processes join.

    Returns the device, the bytes that this rank can use (None: unknown), the checkpoint to continue from, and the fingerprints
    of the stores of all stages.
    """
    import torch

    from longctx.attention.kernels import choose_kernel
    from longctx.attention.kernels.compilation import compile_variants
    from longctx.memory.advisor import available_bytes, fitted, refuse_too_large
    from longctx.parallel.float8 import check_float8
    from longctx.parallel.mesh import check_device, choose_device, prepare_allocator
    from longctx.training.metrics import check_wandb
    from longctx.training.run_folder import open_run_folder
    from longctx.training.setup import attention_requests, check_model, check_pairs, check_vocabulary
    from longctx.training.stages import named, open_stages

    check_wandb(config.log.wandb)
    device = choose_device(config.train.device, launch.local_rank)
    prepare_allocator(device)
    check_device(device, launch.local_world_size)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # kernels are chosen by what the current device can do
    kernel_log = logging.getLogger("longctx.attention.kernels")
    if launch.local_rank > 0:
        kernel_log.setLevel(logging.ERROR)  # what local rank 0 says is the same
    elif device.type == "cuda" and not kernel_log.handlers:  # on a GPU, why the fastest kernel was not chosen
        kernel_log.setLevel(logging.INFO)
        kernel_log.addHandler(logging.StreamHandler())
    if config.train.float8 is not None:
        check_float8(device)
    available, on_gpu = available_bytes(device, launch.local_world_size), device.type == "cuda"
    config = fitted(config, launch.world_size, available, fused=on_gpu)
    fingerprints = []
    for stage, (own, store) in enumerate(open_stages(config)):
        fingerprints += [source.fingerprint for source in store.sources]
        with named(config, stage):
            spec = own.model_source(store.tokenizer.vocab_size).spec
            split = own.parallel.tensor_parallel_size
            for layer, request in attention_requests(own, spec, device.type).items():
                choose_kernel(own.context.kernel, request)
                if device.type == "cuda":
                    heads = layer.num_attention_heads // split, layer.num_key_value_heads // split
                    compile_variants(own.context.kernel, request, heads, window=layer.window is not None)
            check_vocabulary(own, spec)
            check_model(own, store, launch.world_size)
            check_pairs(own, store)
            refuse_too_large(spec, own, store, launch.world_size, available, fused=on_gpu)
    # Weights and two moments, in float32.
    size = 0 if config.checkpoint.every is None else 12 * spec.trained_parameters
    found, damaged = open_run_folder(
        config.train.run_dir, resume=resume or resume_if_any, or_begin=resume_if_any, checkpoint_bytes=size
    )
    _check_export(config.at_stage(-1), found)
    if launch.rank == 0:
        for sentence in damaged + _notes(config, device):
            print(f"longctx train: {sentence}", file=sys.stderr)
    return device, available, found, fingerprints


def _notes(config: Config, device: "torch.device") -> list[str]:
    """Returns notes on settings that have no effect or are changed."""
    notes = []
    if device.type == "cpu" and (config.train.offload_activations or config.train.offload_optimizer):
        notes.append("offloading has no effect: on a CPU everything is in host memory already")
    if device.type == "cuda" and config.dtype == "float32":
        notes.append("train.dtype is float32: on GPUs, matrix products and attention take many times as long as in bfloat16")
    if config.optimizer.warmup_steps > config.train.steps:
        notes.append(f"optimizer.warmup_steps {config.optimizer.warmup_steps} is shortened to train.steps {config.train.steps}")
    return notes


def _train(
    config: Config,
    launch: "Launch",
    device: "torch.device",
    available: int | None,
    found: "Checkpoint | None",
    traced: range | None,
    mine: dict[str, str],
) -> int:
    from longctx.memory.advisor import changes_said, fitted
    from longctx.model.source import lines_on
    from longctx.parallel.mesh import record_messages
    from longctx.training.agreement import RanksDiffer, require_same
    from longctx.training.checkpoint import NoCheckpoint
    from longctx.training.first_steps import mix_lines
    from longctx.training.run_folder import only_run_in
    from longctx.training.run_profile import ProfilesDiffer, run_profile
    from longctx.training.saving import NotWritten
    from longctx.training.setup import join_run, longest_of
    from longctx.training.stages import stage_line, train_in_stages
    from longctx.training.stop_signal import StopSignal
    from longctx.training.trace import Tracer
    from longctx.training.trainer import NonFiniteLoss

    def began(trainer: "Trainer", store: "Store", found: "Checkpoint | None") -> None:
        if traced is not None:
            trainer.tracer = Tracer(traced, config.train.run_dir / "traces", launch.rank, trainer.model)
        if launch.rank == 0:
            profile = run_profile(trainer.config, launch.world_size, store.tokenizer.vocab_size)
            mix = mix_lines(trainer.config, trainer.loader.sampler, config.steps_of(trainer.stage))
            line, first = stage_line(config, trainer.stage), _first_line(trainer, store, found)
            longest = min(trainer.loader.state_dict()["max_length"], longest_of(trainer.config, store))
            of_model = lines_on(trainer.config.model_source(), config.model.from_pretrained, longest)
            lines = [line] * bool(line), [first], [fit] * bool(fit), mix, of_model, _left_out(trainer, store), profile.lines
            print(*chain(*lines), sep="\n", flush=True)

    stop = StopSignal.install(interrupts=True)
    with only_run_in(config.train.run_dir) if launch.rank == 0 else nullcontext():
        record_messages(device, config.train.run_dir / "nccl")
        try:
            groups = join_run(config, launch, device, partial(require_same, mine))
        except RanksDiffer as error:
            if launch.rank == 0:
                print(f"longctx train: error: {error}", file=sys.stderr, flush=True)
            return 2
        except RuntimeError as error:
            return _failed(config, launch, error, None)
        least = min(groups.gather_objects(math.inf if available is None else available))  # all ranks decide the same
        given = config
        config = fitted(given, launch.world_size, None if math.isinf(least) else int(least), fused=device.type == "cuda")
        fit = changes_said(given, config)
        try:
            finished, steps_done = train_in_stages(config, groups, found, stop, began)
        except (UserError, OSError) as error:
            # Rank-local errors are printed by their rank. These are raised on every rank.
            if launch.rank == 0 or not isinstance(error, (NonFiniteLoss, ProfilesDiffer, NoCheckpoint, NotWritten)):
                print(f"longctx train: error on rank {launch.rank}: {error}", file=sys.stderr, flush=True)
            if groups.peers is not None:
                groups.peers.end(str(error))
            return 2
        except RuntimeError as error:
            return _failed(config, launch, error, groups.peers)
        groups.close()
        stop.release_interrupts()
        if finished and launch.rank == 0:
            _finish(config, steps_done, trained=found is None or steps_done > found.step)
    if not finished and launch.rank == 0:
        written = config.checkpoint.every is not None
        saved = "checkpoint written, --resume continues" if written else "no checkpoint, because checkpoint.every is null"
        print(f"stopped by {stop.number.name} after step {steps_done}; {saved}", file=sys.stderr)
    return 0 if finished else 128 + stop.number


def _failed(config: Config, launch: "Launch", error: RuntimeError, peers: "Peers | None") -> int:
    """Says where this rank failed, which peers are dead or stuck, and how to go on. Returns the exit status.

    A peer has died or is stuck, or this is a bug: then the traceback helps.
    """
    from longctx.training.checkpoint import newest

    traceback.print_exception(error)
    what = str(error).splitlines()[0][:300]
    where = "; ".join(getattr(error, "__notes__", [])) or f"rank {launch.rank}: {peers.where() if peers else 'joining'}"
    lines = [f"longctx train: error: {where}: {what}"]
    if peers is not None:
        lines.append(f"longctx train: rank {launch.rank}: {peers.report(what)}")
    found, run_dir = newest(config.train.run_dir)[0], config.train.run_dir
    again = (
        "no checkpoint: start again"
        if found is None
        else f"step {found.step} as newest checkpoint: --resume continues after it"
    )
    print(*lines, f"{run_dir} has {again}", sep="\n", file=sys.stderr, flush=True)
    return 1


def _check_traced(config: Config, traced: range | None) -> None:
    """Raises UserError if the traced steps belong to several stages, as each stage writes its own traces."""
    if traced is not None and config.stage_after(traced[0] - 1) != config.stage_after(traced[-1] - 1):
        end = config.stage_ends[config.stage_after(traced[0] - 1)]
        raise UserError(f"--profile-steps goes over step {end}, where a stage ends: give steps of one stage")


def _finish(config: Config, step: int, trained: bool) -> None:
    """Prints the mean speed, where everything is and the next commands; exports if set. The other ranks do not wait for it."""
    from longctx.commands.export import how_to_load
    from longctx.training.export import export
    from longctx.training.metrics import mean_speed

    run_dir, out, saves = config.train.run_dir, config.checkpoint.export, config.checkpoint.every is not None
    print(f"finished step {step}; mean over the run: {mean_speed(run_dir)}")
    if saves:
        print(f"  checkpoint   {run_dir / 'latest'}")
    print(f"  metrics      {run_dir / 'metrics.jsonl'}")
    if config.log.tensorboard:
        print(f"  TensorBoard  tensorboard --logdir {shell(run_dir / 'tensorboard')}")
    print(f"  pictures     longctx runs {shell(run_dir)}", flush=True)
    if saves and out is None:
        print(f"  export       {exportable(config)}")
    elif saves and out is not None and out.exists() and not (trained and out.is_relative_to(run_dir)):
        print(f"{out} exists and was not written again: longctx export {shell(run_dir, out)} --overwrite")
    elif saves and out is not None:
        print(export(run_dir, out, step=step, overwrite=out.exists()).said, how_to_load(out), sep="\n", flush=True)


def exportable(config: Config) -> str:
    """Returns the command that exports the run, or why nothing can; without transformers, which export needs, the command."""
    from longctx.model.family import NoNativeModel

    try:
        _check_family(config.at_stage(-1))
    except NoNativeModel as none:
        return f"not possible: {none}"
    except ModuleNotFoundError:
        pass
    return f"longctx export {shell(config.train.run_dir)} OUT"


def _check_family(config: Config) -> None:
    """Raises NoNativeModel if the model is new and no family of transformers has models of its shape."""
    from longctx.model.families import expressed

    if config.model.from_pretrained is None:
        sizes = config.model.sizes()
        expressed(sizes.model_copy(update={"vocab_size": sizes.vocab_size or 256}), longest=1)  # no family depends on it


def _check_export(config: Config, found: "Checkpoint | None") -> None:
    """Raises UserError for settings with which the export at the end of the run would fail."""
    from longctx.training.export import check_place

    out = config.checkpoint.export
    if out is None or (found is not None and found.step >= config.train.steps):
        return
    check_place(out, overwrite=found is not None and out.is_relative_to(config.train.run_dir))  # of this run, before
    if config.lora.rank is not None and config.model.changed_rope:
        raise UserError(
            "checkpoint.export is set, and adapters cannot carry the changed RoPE (model.rope_*): give checkpoint.export null, "
            f"and merge them later (longctx export {shell(config.train.run_dir)} OUT --merge)"
        )
    _check_family(config)


def _left_out(trainer: "Trainer", store: "Store") -> list[str]:
    """Returns a line on documents, or pairs, that are dropped because they are too long, if there are any."""
    if trainer.config.data.long_documents != "drop":
        return []
    together, what = (2, "pairs") if store.pairs else (1, "documents")
    longest = trainer.loader.state_dict()["max_length"]
    dropped = int((store.lengths.reshape(-1, together).max(axis=1) > longest).sum())
    return [f"{dropped:,} of {len(store) // together:,} {what} are dropped: longer than {longest:,} tokens"] if dropped else []


def _first_line(trainer: "Trainer", store: "Store", found: "Checkpoint | None") -> str:
    from longctx.training.setup import computed_by

    config, mesh = trainer.config, trainer.mesh
    source = config.model.from_pretrained
    start = "from new weights" if source is None else f"from checkpoint {source}"
    if found:
        start = f"from step {trainer.steps_done}"
    if trainer.steps_done >= config.train.steps:
        start += f", the last step by train.steps {config.train.steps}: nothing to do"
    parameters = f"{format_count(trainer.model.spec.parameters)} parameters"
    if config.lora.rank is not None:
        counts = [(parameter.numel(), parameter.requires_grad) for parameter in trainer.model.parameters()]
        trained, everything = sum(size for size, is_trained in counts if is_trained), sum(size for size, _ in counts)
        parameters = f"{trained:,} of {everything:,} parameters trained (LoRA of rank {config.lora.rank})"
    return (
        f"{parameters} on {mesh.world_size} ranks ({computed_by(config, trainer.model.spec, mesh.device.type)}), "
        f"{start}; {'store' if len(store.sources) == 1 else 'stores'} {store.said}: {len(store):,} "
        f"documents, {int(store.lengths.sum()):,} tokens; run folder {config.train.run_dir}"
    )
