"""`longctx finetune`: prepares data, trains a checkpoint on them and exports the result for
transformers."""

import argparse
import math
import os
import signal
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longctx.commands import prepare
from longctx.commands.lengths import add_stand_in_options, stands_in
from longctx.commands.output import a_name, a_path
from longctx.config import Config, load
from longctx.config.problems import yaml_text
from longctx.config.reading import Values
from longctx.config.settings import LORA_RATE
from longctx.errors import UserError, raise_together, shell
from longctx.model.published import config_alone
from longctx.planning.layout import longest_document
from longctx.safe_yaml import parse, read_text

if TYPE_CHECKING:
    from longctx.data.store.store import Store

SUMMARY = (
    "Fine-tune a checkpoint on your data: prepare, train on all devices of this machine, export"
)
OVERRIDES = True

FULL_RATE = 1e-5
"""Default peak learning rate of all parameters."""
FEWEST_STEPS = 20
"""Steps are made smaller than 64 Ki tokens to reach about this number."""
WARMUP = 0.03
INTERRUPTED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit statuses of training that was stopped by a signal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        type=a_name,
        metavar="MODEL",
        help="transformers checkpoint: a folder, or OWNER/NAME on the hub",
    )
    data = (
        "JSONL, Parquet, a folder of them, or as `longctx prepare --source` takes; omit it with "
        "--lengths or --mix"
    )
    parser.add_argument("data", nargs="?", type=a_name, metavar="DATA", help=data)
    parser.add_argument(
        "--out", type=a_path, help="run folder; the result is OUT/export (default: runs/MODEL-DATA)"
    )
    parser.add_argument(
        "--lora",
        type=int,
        metavar="RANK",
        help="train LoRA adapters of this rank instead of all parameters",
    )
    parser.add_argument(
        "--epochs",
        type=float,
        default=1.0,
        help="passes over the data; --train.steps takes precedence",
    )
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="processes (default: one per GPU, or two on a CPU)",
    )
    parser.add_argument(
        "--config",
        type=a_path,
        metavar="YAML",
        help="settings that replace this command's defaults",
    )
    only = "write the store and the settings, and print the command to train"
    parser.add_argument("--prepare-only", action="store_true", help=only)
    dry = (
        "the same, and say how many steps a run on --processes has, how long they take and "
        "whether they fit, by prediction"
    )
    parser.add_argument("--dry-run", action="store_true", help=dry)
    add_stand_in_options(parser)
    prepare.add_data_arguments(parser)
    parser.set_defaults(tokenizer=None)
    parser.epilog = (
        "Settings of `longctx train` may follow, such as --optimizer.learning_rate 5e-6. "
        "--tokenizer is MODEL by default.\n"
        f"The default peak learning rate is {FULL_RATE:g}, or {LORA_RATE:g} with LoRA."
    )


def run(arguments: argparse.Namespace) -> int:
    _check_options(arguments)
    if not arguments.dry_run:
        return _finetune(arguments)
    with config_alone():
        return _finetune(arguments)


def _finetune(arguments: argparse.Namespace) -> int:
    """Prepares the data, and trains on them or predicts that. Returns the exit status."""
    model_name = Path(arguments.model).resolve().name
    data_name = prepare.default_name(arguments.data or "lengths")
    name = f"{model_name}-{data_name}"
    out = arguments.out or Path("runs", name)
    chosen = _given(arguments, out)
    from longctx.data.store.store import Store
    from longctx.training.checks import checks_of  # and torch, which takes seconds
    from longctx.training.data import RunData

    ranks = _processes(arguments)
    if arguments.data is None:
        from longctx.commands.dry_run import dry_run, stand_in_store

        lengths = stand_in_store(arguments, chosen)
        assert lengths is not None, "see `_check_options`"
        lengths = _as_prepared(lengths, arguments.long_documents, _longest(arguments, chosen))
        defaults = _defaults(arguments, chosen, store=lengths, ranks=ranks, out=out)
        dry_run(
            load(arguments.config, arguments.overrides, world_size=ranks, defaults=defaults),
            ranks,
            lengths,
        )
        return 0
    # The verdict is the first line of a dry run.
    with redirect_stdout(sys.stderr if arguments.dry_run else sys.stdout):
        _prepare(arguments, chosen, out)
    store = Store.open(out / "store")
    defaults = _defaults(arguments, chosen, store=store, ranks=ranks, out=out)
    config = load(arguments.config, arguments.overrides, world_size=ranks, defaults=defaults)
    data = RunData.open(config)
    raise_together(checks_of(config, data, config.model_source(data.vocab_size), ranks))
    settings = out / "finetune.yaml"
    settings.write_text(config.to_yaml(), "utf-8")
    if arguments.dry_run:
        from longctx.commands.dry_run import dry_run

        dry_run(config, ranks)
    if arguments.dry_run or arguments.prepare_only:
        print(f"to train: longctx train {shell(settings)} --processes {ranks} --resume-if-any")
        return 0
    print(_summary(config, store, ranks), flush=True)
    return _train(config, settings, ranks)


def _check_options(arguments: argparse.Namespace) -> None:
    """Raises UserError for options that cannot be."""
    given = stands_in(arguments)
    if arguments.data is None and not given:
        raise UserError(
            "DATA is missing: give a file or folder of documents, or with --dry-run --lengths or "
            "--mix in its place"
        )
    if arguments.data is not None and given:
        raise UserError(
            f"DATA is {arguments.data}, and --lengths or --mix would take its place: omit one of "
            "the two"
        )
    if arguments.lora is not None and arguments.lora < 1:
        raise UserError(
            f"--lora is {arguments.lora}: the rank must be at least 1; omit it to train all "
            "parameters"
        )
    if not (arguments.epochs > 0 and math.isfinite(arguments.epochs)):
        raise UserError(f"--epochs is {arguments.epochs}: must be a finite number above 0")
    if arguments.processes is not None and arguments.processes < 1:
        raise UserError(f"--processes is {arguments.processes}: must be at least 1")


def _processes(arguments: argparse.Namespace) -> int:
    """Returns the number of processes to start. Raises UserError in a process that a launcher
    started."""
    import torch
    from torch.distributed import is_torchelastic_launched

    from longctx.parallel.environment import is_task, other_tasks

    if is_torchelastic_launched():
        raise UserError(
            "torchrun started this process, but finetune starts its own: omit torchrun, and give "
            "--processes; on several machines, use --prepare-only without torchrun, and then "
            "torchrun .. -m longctx train OUT/finetune.yaml"
        )
    if is_task():
        raise UserError(other_tasks())
    given: int | None = arguments.processes
    return given or torch.cuda.device_count() or min(2, os.cpu_count() or 1)


def _given(arguments: argparse.Namespace, out: Path) -> Config:
    """Returns the given settings, after checks of model, adapters and folder, because reading the
    data takes long."""
    # MODEL takes the place of that of a file, such as a recipe, whose model may have been
    # downloaded.
    model = f"model.from_pretrained={yaml_text(arguments.model)}"
    for other in arguments.overrides:
        if other.startswith("model.from_pretrained=") and other != model:
            raise UserError(
                f"MODEL is {arguments.model}, but --{other} names another one: omit the option"
            )
    arguments.overrides = [model, *arguments.overrides]
    first: Values = {"optimizer": {"warmup_steps": 0}}
    if arguments.lora is not None:
        first["lora"] = {"rank": arguments.lora}
    # Its steps stay as they are, whatever --epochs is now.
    if _is_trained(out):
        first["batch"] = {
            "global_tokens": parse(read_text(out / "config.yaml"))["batch"]["global_tokens"]
        }
    chosen = load(arguments.config, arguments.overrides, defaults=first)
    if chosen.train.epochs is not None:
        raise UserError(
            f"train.epochs is {chosen.train.epochs:g}, but finetune has an option for it: give "
            "--epochs instead"
        )
    if "store" in chosen.data.model_fields_set:
        raise UserError(
            "data.store is set, but finetune trains on its DATA argument: omit the setting, or "
            "prepare each source (longctx prepare --tokenizer) and run `longctx train`"
        )
    _check_out(out, arguments.overwrite)
    return chosen


def _is_trained(out: Path) -> bool:
    """Returns whether a run in this folder has a checkpoint."""
    if not (out / "config.yaml").is_file():
        return False
    from longctx.training.saved import checkpoint

    return bool(checkpoint.steps(out))


def _prepare(arguments: argparse.Namespace, chosen: Config, out: Path) -> None:
    """Prepares the data, by the tokenizer of the model unless another one is given, with the new
    tokens."""
    from longctx.data.records.pretrained import save_with_tokens
    from longctx.data.store.manifest import StoreError

    tokenizer = arguments.tokenizer or arguments.model
    if chosen.model.new_tokens is not None and arguments.tokenizer is None:
        tokenizer = str(out / "tokenizer")
        save_with_tokens(arguments.model, chosen.model.new_tokens, Path(tokenizer))
    data = {
        "source": arguments.data,
        "max_length": _longest(arguments, chosen),
        "out": out / "store",
        "tokenizer": tokenizer,
        "vocab_size": None,
        "share": None,
        "ray": None,
        "upload": None,
        "in_place": False,
        "json": False,
    }
    try:
        prepare.run(argparse.Namespace(**{**vars(arguments), **data}))
    except StoreError:
        _check_out(out, overwrite=True)
        raise


def _longest(arguments: argparse.Namespace, chosen: Config) -> int | None:
    """Returns the length at which the preparation cuts, drops or refuses conversations."""
    given: int | None = arguments.max_length
    if arguments.long_documents == "error":
        return given
    return given or chosen.data.max_length


def _as_prepared(lengths: "Store", long_documents: str, longest: int | None) -> "Store":
    """Returns the lengths that are left after a preparation, as of conversations."""
    from longctx.comparison.steps import fit
    from longctx.data.store.store import Lengths

    if longest is None or long_documents == "error":
        return lengths
    left = fit(lengths.lengths.tolist(), longest, long_documents)
    return Lengths(left, lengths.description, lengths.tokenizer.vocab_size)


def _train(config: Config, settings: Path, ranks: int) -> int:
    """Starts the processes; tells how to go on if they were interrupted. Returns their exit
    status."""
    from longctx.parallel.launch import launch
    from longctx.training.saved import checkpoint

    status = launch(ranks, ["train", str(settings), "--resume-if-any"])
    if status in INTERRUPTED:
        kept = checkpoint.steps(config.train.run_dir)
        if kept:
            how = f"to resume from step {kept[-1]}"
        else:
            how = "to start again (no checkpoint was written yet)"
        print(f"run the same command {how}", file=sys.stderr)
    return status


def _check_out(out: Path, overwrite: bool) -> None:
    """Raises UserError if the data of a run that has been trained already would be replaced."""
    from longctx.training.saved import checkpoint

    if overwrite and (steps := checkpoint.steps(out)):
        raise UserError(
            f"{out} contains a run trained to step {steps[-1]}, whose data cannot be replaced: "
            "give the model and data of that run, without --overwrite, to resume it; or choose "
            "another --out, or remove the folder"
        )


def _defaults(
    arguments: argparse.Namespace, chosen: Config, store: "Store", ranks: int, out: Path
) -> Values:
    """Returns default settings for fine-tuning on this store, by section.

    Every document fits, and an epoch has about FEWEST_STEPS steps or more. Tokens per step and
    steps are taken from `chosen` if set there.
    """
    from longctx.parallel.device import choose_device

    tokens = store.tokens_in_all
    longest = store.longest
    step = max(longest, min(65536, math.ceil(arguments.epochs * tokens) // FEWEST_STEPS))
    if "global_tokens" in chosen.batch.model_fields_set:
        step = chosen.batch.global_tokens
    domain = chosen.domain(ranks) or 1  # 0 is refused with the other settings
    per_rank = max(2048, math.ceil(longest / domain))
    while longest_document(domain, per_rank) < longest:
        per_rank += 1
    if "tokens_per_rank" in chosen.batch.model_fields_set:
        changes = {}
    else:
        changes = {"batch.tokens_per_rank": per_rank}
    capacity = chosen.changed(changes).capacity(ranks) or longest
    steps = chosen.train.steps
    if "steps" not in chosen.train.model_fields_set:
        steps = _steps(
            arguments.epochs,
            chosen,
            store=store,
            global_tokens=step,
            longest=min(longest, capacity),
        )
    values: dict[str, dict[str, Any]] = {
        "data": {"store": str(store.path)},
        "batch": {"global_tokens": step, "tokens_per_rank": per_rank},
        "train": {"steps": steps, "fit_memory": True, "run_dir": str(out)},
        "optimizer": {
            "warmup_steps": math.ceil(WARMUP * steps),
            "weight_decay": 0.0,
            "clip_grad_norm": 1.0,
        },
        "checkpoint": {"every": max(1, steps // 3), "keep": 2, "export": str(out / "export")},
    }
    if choose_device(chosen.train.device, 0).type == "cpu":  # whose memory others use, too
        values["train"]["recompute"] = "selective"
    if arguments.lora is not None:
        values["lora"] = {"rank": arguments.lora}
    elif chosen.lora.rank is None:  # adapters have their own default
        values["optimizer"]["learning_rate"] = FULL_RATE
    return values


def _steps(epochs: float, chosen: Config, store: "Store", global_tokens: int, longest: int) -> int:
    """Returns the steps of `epochs`; documents above `longest` tokens are split or dropped."""
    from longctx.data.sampler import Sampler
    from longctx.training.data import steps_of_epochs, steps_of_run

    changes = {
        "batch.global_tokens": global_tokens,
        "data.max_length": chosen.data.max_length or longest,
    }
    # Their number does not matter where a length is set.
    steps = steps_of_run(chosen.changed(changes), store, ranks=1)
    assert isinstance(steps, Sampler), "there is one store"
    return steps_of_epochs(epochs, steps)


def _summary(config: Config, store: "Store", ranks: int) -> str:
    share = int(store.trained_tokens.sum()) / max(1, store.tokens_in_all)
    return (
        f"training  {config.train.steps} steps of {config.batch.global_tokens:,} tokens "
        f"({share:.0%} with loss) on {ranks} ranks; peak learning rate "
        f"{config.optimizer.learning_rate:g}; settings in {config.train.run_dir / 'finetune.yaml'}"
    )
