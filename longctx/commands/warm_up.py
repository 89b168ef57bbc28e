"""`longctx warm-up`: compiles a run's kernels of flash-attn 4 on a machine without a GPU."""

import argparse
import os
import time
from pathlib import Path

from longctx.commands.output import a_path
from longctx.config import load, overview
from longctx.errors import UserError
from longctx.model.published import config_alone

SUMMARY = "Compile a run's kernels of flash-attn 4 ahead of time, without a GPU"
OVERRIDES = True
ARCHITECTURES = ("sm_90", "sm_100")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config",
        nargs="?",
        type=a_path,
        metavar="CONFIG",
        help="YAML file of settings, as for `longctx train`",
    )
    parser.add_argument(
        "--arch",
        choices=ARCHITECTURES,
        required=True,
        help="architecture of the GPUs: sm_90 is Hopper (H100, H200), sm_100 Blackwell (B200)",
    )
    parser.add_argument(
        "--multiprocessors",
        type=int,
        metavar="N",
        help="multiprocessors of the GPU, by which variants are chosen (default: 132 on sm_90, 148 "
        "on sm_100; an H100 PCIe has 114)",
    )
    parser.add_argument(
        "--cache",
        type=a_path,
        metavar="FOLDER",
        help="folder for compiled kernels that the nodes of the run see (default: that of this "
        "user in the folder of temporary files)",
    )
    parser.epilog = (
        "Needs flash-attn 4 (the extra `flash`), not its GPU. About a minute of CPU time; without "
        "it every process of a run compiles the same before its first step.\n"
        "Kernels depend on the sizes of the model's heads, on windows, and on the versions of "
        "Python and flash-attn.\n"
        "\n" + overview()
    )


def run(arguments: argparse.Namespace) -> int:
    config = load(arguments.config, ["train.device=cuda", *arguments.overrides])
    if config.context.deterministic:
        raise UserError(
            "context.deterministic is true, but the deterministic backward of flash-attn 4 "
            "compiles only where a GPU is: omit it here; the run compiles what is missing"
        )
    if arguments.multiprocessors is not None and arguments.multiprocessors < 1:
        raise UserError(f"--multiprocessors is {arguments.multiprocessors}: must be at least 1")
    if arguments.cache is not None:
        _use_cache(arguments.cache)
    with config_alone():  # imports torch, which takes seconds
        spec = config.model_source(1).spec
    from dataclasses import replace

    from longctx.attention.kernels import ahead, flash_4
    from longctx.training.kernels import attention_requests

    target = ahead.TARGETS[arguments.arch]
    if arguments.multiprocessors is not None:
        target = replace(target, multiprocessors=arguments.multiprocessors)
    ahead.choose_target(target)
    tensor = config.parallel.tensor_parallel_size
    for layer, request in attention_requests(config, spec, "cuda").items():
        heads = layer.num_attention_heads // tensor, layer.num_key_value_heads // tensor
        windows = ""
        if layer.window is not None:
            windows = ", windows"
        what = f"{target.arch}, head size {request.head_dim}, {heads[0]}/{heads[1]} heads{windows}"
        why = flash_4.refusal(request, target.capability)
        if why is not None:
            print(f"{what}: not by flash-attn 4, which {why}")
            continue
        before = ahead.kept_kernels()
        started = time.monotonic()
        ahead.compile_ahead(request, heads, window=layer.window is not None)
        compiled = ahead.kept_kernels() - before
        seconds = time.monotonic() - started
        print(f"{what}: {compiled} kernels compiled in {seconds:.0f} s")
    folder = ahead.folder()
    if folder is None:
        print("nothing was kept: FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED is not 1")
        return 0
    print(f"{ahead.kept_kernels()} kernels in {folder}")
    if arguments.cache is not None:
        print(f"start the run with {ahead.CACHE}={folder}")
    return 0


def _use_cache(folder: Path) -> None:
    """Lets flash-attn 4 keep compiled kernels in a folder, which it reads when it is imported."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] = str(folder.resolve())
