"""`longctx export`: writes a checkpoint of a run as a folder that transformers, vLLM and others
load."""

import argparse
import re

from longctx.commands.output import a_path, a_source
from longctx.errors import UserError
from longctx.paths import no_run

SUMMARY = (
    "Write a checkpoint of a run as a folder that transformers loads: safetensors, config, "
    "tokenizer"
)
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=a_path, metavar="RUN", help="run folder (train.run_dir)")
    parser.add_argument(
        "out",
        type=a_path,
        metavar="OUT",
        help="folder to write; must not exist unless --overwrite is given",
    )
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="step of the checkpoint (default: the newest complete one)",
    )
    parser.add_argument(
        "--max-shard-size",
        default="5GB",
        metavar="SIZE",
        help="maximum size of a file of weights, e.g. 500MB",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="dtype of the weights (default: that of the checkpoint the run started from; float32 "
        "for new weights)",
    )
    parser.add_argument(
        "--merge", action="store_true", help="LoRA: write the whole model with merged adapters"
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace OUT if longctx wrote it; other files there stay",
    )
    parser.add_argument(
        "--upload",
        type=a_source,
        metavar="ADDRESS",
        help="upload OUT to object storage too, such as s3://bucket/model",
    )
    parser.epilog = (
        "Runs in one process, whatever the number of processes of the run, and reads one block at "
        "a time. Then:\n\n"
        "    AutoModelForCausalLM.from_pretrained('OUT')"
    )


def run(arguments: argparse.Namespace) -> int:
    size = parse_size(arguments.max_shard_size)
    if not arguments.run.is_dir():
        raise UserError(no_run(arguments.run))
    import torch  # which takes seconds

    from longctx.training.saved.export import export, how_to_load
    from longctx.training.saved.upload import check_upload, upload_export

    there = None
    if arguments.upload is not None:
        there = check_upload(arguments.upload, overwrite=arguments.overwrite)
    dtype = None if arguments.dtype is None else getattr(torch, arguments.dtype)
    exported = export(
        arguments.run,
        arguments.out,
        step=arguments.step,
        max_shard_bytes=size,
        dtype=dtype,
        overwrite=arguments.overwrite,
        merge=arguments.merge,
    )
    print(exported, how_to_load(arguments.out), sep="\n")
    if there is not None:
        upload_export(arguments.out, there)
        print(f"{there}: uploaded")
    return 0


def parse_size(text: str) -> int:
    """Parses a size such as 5GB. Returns bytes; raises UserError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match and match[2].upper() in UNITS:
        size = int(float(match[1]) * UNITS[match[2].upper()])
    else:
        size = 0
    if size < 1:
        raise UserError(
            f"--max-shard-size is {text}: must be a number with KB, MB, GB, KiB, MiB or GiB, such "
            "as 5GB"
        )
    return size
