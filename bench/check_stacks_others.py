"""Public trainers that need an environment of their own, for `python -m bench.check_stacks --stack
NAME`.

A stack's own command gets a small model, a tokenizer and a file of conversations, until it would
train: the stack reads and packs them, and builds the trainer that makes the step. Environments are
Python 3.11, `pip install --constraint constraints.txt torch`, and what each stack's wheel asks for
but libraries of CUDA:

llamafactory     transformers 5.6.0, accelerate 1.11.0, datasets 4.0.0, peft 0.18.1, trl 0.24.0; torchaudio has no build for it
axolotl          transformers 5.16.1, accelerate 1.13.0, datasets 4.8.4, peft 0.20.0, trl 1.9.0, bitsandbytes, fastcore, triton
swift            ms-swift 4.6.0 with all that it asks for
megatron         megatron-core 0.16.1, transformers
ring-flash-attn  ring-flash-attn 0.1.8, einops, transformers 5.15.0, ./extras/flash_attn_cpu
automodel        nemo-automodel 0.7.0, transformers
torchtune        torchtune 0.6.1, torchao 0.10.0, transformers
lightning        lightning 2.6.6, transformers
accelerate       as for the first table
openrlhf         the same, and openrlhf 0.11.2, pylatexenc; an empty module stands for DeepSpeed
deepspeed        deepspeed 0.19.8 (built with DS_BUILD_OPS=0), hjson, py-cpuinfo, msgpack, einops, transformers, ./extras/flash_attn_cpu
axolotl-parallel that of axolotl, ring-flash-attn 0.1.8, einops, ./extras/flash_attn_cpu
ringmaster       axolotl-ringmaster 0.2.7, transformers, ./extras/flash_attn_cpu
verl             verl 0.9.1, transformers 5.10.2, ray 2.55.0, tensordict 0.10.0, datasets 4.8.4, codetiming, hydra-core, ./extras/flash_attn_cpu
veomni           veomni 0.1.12, transformers 5.9.0, datasets 4.8.4, torchdata, einops, ./extras/flash_attn_cpu
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from bench.check_stacks import ASKED, Make, ours, ranks, tokenizer, without
from bench.check_stacks_deepspeed import DEEPSPEED
from bench.check_stacks_loops import ACCELERATE, AUTOMODEL, LIGHTNING, TORCHTUNE
from bench.check_stacks_megatron import megatron
from bench.check_stacks_ringmaster import AXOLOTL_PARALLEL, RINGMASTER
from bench.check_stacks_rings import PACKED, RING_FLASH_ATTN
from bench.check_stacks_rlhf import OPENRLHF
from bench.check_stacks_veomni import VEOMNI
from bench.check_stacks_verl import VERL
from longctx.check import Probe
from longctx.check.probe import END
from longctx.check.trainer import arguments

LENGTHS = (50, 44, 37, 29, 23, 18, 13, 11, 9, 7, 5, 3)
"""Of documents that fill four rows of 64 tokens, in the order in which each goes to the first row
with room for it."""
TALKS = (
    Probe("conversations", LENGTHS, prompt=0.4),
    Probe("two micro-batches", LENGTHS, prompt=0.4, micro_batches=2),
    Probe("texts", LENGTHS),
)
WITH_ENDS = tuple(replace(probe, ends=True) for probe in TALKS)
"""The same for a stack that ends each answer."""


class _Built(Exception):
    """A trainer that was about to train."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer


def trainer_of(run: Callable[[], Any]) -> Any:
    """Returns the trainer that `run` builds, when `run` calls its `train`."""
    from transformers import Trainer

    def train(self: Any, *_: Any, **__: Any) -> None:
        raise _Built(self)

    with (
        open(os.devnull, "w") as nowhere,
        patch.object(Trainer, "train", train),
        contextlib.redirect_stdout(nowhere),
    ):
        try:
            run()
        except _Built as built:
            return built.trainer
    raise RuntimeError("the stack did not train")


def saved(probe: Probe, kind: str = "qwen3", **sizes: Any) -> Path:
    """Returns a folder with a model and its tokenizer, and with the documents as questions and
    answers: one for all ranks."""
    names = [tempfile.mkdtemp()]
    if dist.is_initialized():  # then only rank 0 of transformers saves
        dist.broadcast_object_list(names)
    folder = Path(names[0])
    probe.model(kind, **sizes).save_pretrained(folder)
    made = tokenizer(probe)
    made.backend_tokenizer.pre_tokenizer = _by_spaces()
    made.save_pretrained(folder)
    talks = []
    for ids in probe.documents:
        words, cut = [f"<{token}>" for token in ids if token != END], int(probe.prompt * len(ids))
        talks.append(
            {"instruction": " ".join(words[:cut]), "input": "", "output": " ".join(words[cut:])}
        )
    (folder / "talks.json").write_text(json.dumps(talks))
    parts = [
        [
            {"label": bool(name == "output"), "text": talk[name]}
            for name in ("instruction", "output")
            if talk[name]
        ]
        for talk in talks
    ]
    (folder / "segments.json").write_text(json.dumps([{"segments": each} for each in parts]))
    if dist.is_initialized():
        dist.barrier()
    return folder


def _by_spaces() -> Any:
    from tokenizers.pre_tokenizers import WhitespaceSplit

    return WhitespaceSplit()


def rows_of(probe: Probe, rows: int) -> dict[str, int]:
    """Arguments for a step of this number of rows."""
    size = max(1, rows // probe.micro_batches // ranks())
    return {"per_device_train_batch_size": size, "gradient_accumulation_steps": probe.micro_batches}


def llamafactory(model: Any = ("qwen3", {}), **more: Any) -> Make:
    def make(probe: Probe) -> Any:
        without("torchaudio")
        from llamafactory.train.tuner import run_exp

        folder = saved(probe, model[0], **model[1])
        (folder / "dataset_info.json").write_text(
            json.dumps({"talks": {"file_name": "talks.json"}})
        )
        given = arguments(**rows_of(probe, 4 if more.get("packing") else 12)) | {
            "max_steps": 1,
            "report_to": "none",
        }
        given |= {
            "stage": "sft",
            "do_train": True,
            "finetuning_type": "full",
            "model_name_or_path": str(folder),
        }
        given |= {
            "dataset": "talks",
            "dataset_dir": str(folder),
            "template": "empty",
            "cutoff_len": 64,
            "overwrite_cache": True,
        }
        given |= {"disable_gradient_checkpointing": True, "train_on_prompt": not probe.prompt}
        return trainer_of(lambda: run_exp(given | more))

    return make


def axolotl(model: Any = ("qwen3", {}), **more: Any) -> Make:
    def make(probe: Probe) -> Any:
        # Else accelerate sees one process.
        os.environ |= {"AXOLOTL_DO_NOT_TRACK": "1", "ACCELERATE_USE_CPU": "true"}
        from axolotl.cli.args import TrainerCliArgs
        from axolotl.cli.config import load_cfg
        from axolotl.cli.train import do_train
        from axolotl.utils.dict import DictDefault

        folder = saved(probe, model[0], **model[1])
        packed = more.get("sample_packing")
        sizes = rows_of(probe, 4 if packed else 12)
        given = {
            "base_model": str(folder),
            "output_dir": str(folder / "out"),
            "sequence_len": 64,
            "learning_rate": 1e-3,
        }
        given |= {
            "datasets": [
                {"path": str(folder / "segments.json"), "ds_type": "json", "type": "input_output"}
            ]
        }
        given |= {
            "micro_batch_size": sizes["per_device_train_batch_size"],
            "max_steps": 1,
            "optimizer": "adamw_torch",
        }
        given |= {
            "gradient_accumulation_steps": probe.micro_batches,
            "dataset_prepared_path": str(folder / "prepared"),
        }
        given |= dict.fromkeys(("bf16", "fp16", "tf32", "pad_to_sequence_len"), False)
        given |= {"save_strategy": "no", "dataset_num_proc": 1}
        given |= {"attn_implementation": "sdpa", "special_tokens": {"pad_token": f"<{probe.pad}>"}}
        given |= {"curriculum_sampling": True, "ddp_backend": "gloo"}

        def run() -> None:
            chosen = load_cfg(DictDefault(given | more))
            chosen.device_map = {"": "cpu"}  # else a GPU for each rank
            do_train(chosen, TrainerCliArgs())

        return trainer_of(run)

    return make


def swift(model: Any = ("qwen3", {}), **more: Any) -> Make:
    """ms-swift wants flash attention for packed rows, which has no CPU build: SDPA reads the same
    `position_ids`."""

    def make(probe: Probe) -> Any:
        os.environ["USE_HF"] = "1"
        from swift.arguments import SftArguments
        from swift.pipelines import sft_main

        def padding_free(self: Any) -> None:
            self.padding_free = self.padding_free or self.packing

        folder = saved(probe, model[0], **model[1])
        rows = (4 if more.get("packing") else 12) * more.get("sequence_parallel_size", 1)
        given = arguments(**rows_of(probe, rows)) | {"model": folder, "model_type": model[0]}
        given |= {
            "template": "dummy",
            "dataset": folder / "talks.json",
            "max_length": 64,
            "tuner_type": "full",
            "torch_dtype": "float32",
        }
        given |= {
            "loss_scale": "default" if probe.prompt else "all",
            "attn_impl": "sdpa",
            "gradient_checkpointing": False,
        }
        given |= {
            "fp16": False,
            "report_to": "none",
            "dataset_num_proc": 1,
            "split_dataset_ratio": 0,
            "load_from_cache_file": False,
            "check_model": False,
        } | more
        given.pop("disable_tqdm")
        words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        with patch.object(SftArguments, "_check_padding_free", padding_free):
            return trainer_of(lambda: sft_main(words))

    return make


PACKAGES: dict[str, tuple[str, ...]] = {
    "llamafactory": ("accelerate", "trl", "llamafactory"),
    "axolotl": ("accelerate", "trl", "axolotl"),
}
PACKAGES |= {"swift": ("accelerate", "trl", "ms-swift"), "megatron": ("megatron-core",)}
PACKAGES |= {
    "ring-flash-attn": ("ring-flash-attn", "longctx-flash-attn-cpu"),
    "automodel": ("nemo-automodel",),
    "torchtune": ("torchtune", "torchao"),
    "lightning": ("lightning",),
    "accelerate": ("accelerate",),
    "verl": ("verl", "longctx-flash-attn-cpu"),
    "veomni": ("veomni", "longctx-flash-attn-cpu"),
    "deepspeed": ("deepspeed", "longctx-flash-attn-cpu"),
    "axolotl-parallel": ("axolotl", "ring-flash-attn", "longctx-flash-attn-cpu"),
    "ringmaster": ("axolotl-ringmaster", "longctx-flash-attn-cpu"),
    "openrlhf": ("openrlhf", "ring-flash-attn", "longctx-flash-attn-cpu"),
}
PROBES_OF: dict[str, Sequence[Probe]] = {
    "llamafactory": TALKS,
    "axolotl": TALKS,
    "swift": WITH_ENDS,
    "megatron": WITH_ENDS[2:],
}
PROBES_OF |= {"ring-flash-attn": PACKED, "automodel": TALKS}
PROBES_OF |= {"deepspeed": PACKED, "axolotl-parallel": PACKED}
PROBES_OF["ringmaster"] = [probe for probe in ASKED if not probe.ends]
PROBES_OF["torchtune"] = (*TALKS, Probe("texts in two micro-batches", LENGTHS, micro_batches=2))
NEAT = {"packing": True, "neat_packing": True}
WINDOWS = ("mistral", {"sliding_window": 16})
GEMMA, GPT_OSS = ("gemma3_text", WINDOWS[1]), ("gpt_oss", WINDOWS[1])
DOCUMENTS = dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), True)
OTHERS: dict[str, dict[str, Make]] = {
    "llamafactory": {
        "LLaMA-Factory, padded": llamafactory(),
        "LLaMA-Factory, padded, Mistral with windows": llamafactory(WINDOWS),
        "LLaMA-Factory, `packing`": llamafactory(packing=True),
        "LLaMA-Factory, `neat_packing`": llamafactory(**NEAT),
        "LLaMA-Factory, `neat_packing`, Mistral with windows": llamafactory(WINDOWS, **NEAT),
        "LLaMA-Factory, `neat_packing`, Gemma 3": llamafactory(GEMMA, **NEAT),
        "longctx in LLaMA-Factory, padded": ours(llamafactory()),
        "longctx in LLaMA-Factory, `neat_packing`": ours(llamafactory(**NEAT)),
        "longctx in LLaMA-Factory, `neat_packing`, Gemma 3": ours(llamafactory(GEMMA, **NEAT)),
    },
    "axolotl": {
        "Axolotl, padded": axolotl(),
        "Axolotl, `sample_packing`, SDPA": axolotl(sample_packing=True),
        "Axolotl, `sample_packing`, SDPA, Mistral with windows": axolotl(
            WINDOWS, sample_packing=True
        ),
        "Axolotl, `sample_packing`, eager, gpt-oss": axolotl(
            GPT_OSS, sample_packing=True, attn_implementation="eager"
        ),
        "longctx in Axolotl, padded": ours(axolotl()),
        "longctx in Axolotl, `sample_packing`": ours(axolotl(sample_packing=True)),
        "longctx in Axolotl, `sample_packing`, gpt-oss": ours(
            axolotl(GPT_OSS, sample_packing=True, attn_implementation="eager")
        ),
    },
    "swift": {
        "ms-swift, padded": swift(),
        "ms-swift, `packing`": swift(packing=True),
        "ms-swift, `padding_free`": swift(padding_free=True),
        "ms-swift, `padding_free`, Mistral with windows": swift(WINDOWS, padding_free=True),
        "longctx in ms-swift, padded": ours(swift()),
        "longctx in ms-swift, `packing`": ours(swift(packing=True)),
        **(
            {"ms-swift, `sequence_parallel_size=2`": swift(sequence_parallel_size=2)}
            if ranks() > 1
            else {}
        ),
    },
    "megatron": {
        "megatron-core, `calculate_per_token_loss`, masks of documents": megatron(**DOCUMENTS),
        "megatron-core, masks of documents": megatron(False, **DOCUMENTS),
        "megatron-core, `calculate_per_token_loss`, masks of documents but `eod_mask_loss`": megatron(
            **DOCUMENTS | {"eod_mask_loss": False}
        ),
        "megatron-core, `calculate_per_token_loss`": megatron(),
    },
    "ring-flash-attn": RING_FLASH_ATTN,
    "openrlhf": OPENRLHF,
    "verl": VERL,
    "veomni": VEOMNI,
    "ringmaster": RINGMASTER,
    "axolotl-parallel": AXOLOTL_PARALLEL,
    "deepspeed": DEEPSPEED,
    "automodel": AUTOMODEL,
    "torchtune": TORCHTUNE,
    "lightning": LIGHTNING,
    "accelerate": ACCELERATE,
}
