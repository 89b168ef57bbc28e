"""Public trainers that need an environment of their own, for `python -m bench.check_stacks --stack NAME`.

Each stack's own command is run on a small model, a tokenizer and a file of conversations, up to the moment when it would train: it reads
and packs the data, and builds its trainer; the check takes the step with this trainer. `NEEDS` has what to install beside torch.
"""

import contextlib
import json
import os
import sys
import tempfile
import types
from collections.abc import Callable
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from bench.check_stacks_megatron import megatron
from bench.check_stacks import Make, ranks, tokenizer
from longctx.check import Probe
from longctx.check.probe import END
from longctx.check.trainer import arguments

LENGTHS = (50, 44, 37, 29, 23, 18, 13, 11, 9, 7, 5, 3)
"""Of documents that fill four rows of 64 tokens, in the order in which each goes to the first row with room for it."""
DOCUMENTS = dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), True)
WINDOW = {"sliding_window": 16}
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

    with open(os.devnull, "w") as nowhere, patch.object(Trainer, "train", train), contextlib.redirect_stdout(nowhere):
        try:
            run()
        except _Built as built:
            return built.trainer
    raise RuntimeError("the stack did not train")


def saved(probe: Probe, kind: str = "qwen3", **sizes: Any) -> Path:
    """Returns a folder with a model and its tokenizer, and with the documents as questions and answers: one for all ranks."""
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
        talks.append({"instruction": " ".join(words[:cut]), "input": "", "output": " ".join(words[cut:])})
    (folder / "talks.json").write_text(json.dumps(talks))
    parts = [[{"label": bool(name == "output"), "text": talk[name]} for name in ("instruction", "output") if talk[name]] for talk in talks]
    (folder / "segments.json").write_text(json.dumps([{"segments": each} for each in parts]))
    if dist.is_initialized():
        dist.barrier()
    return folder


def _by_spaces() -> Any:
    from tokenizers.pre_tokenizers import WhitespaceSplit

    return WhitespaceSplit()


def without(name: str) -> None:
    """Puts an empty module in the place of one that no CPU build has, and that only audio or GPUs need."""
    module = types.ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    sys.modules.setdefault(name, module)


def rows_of(probe: Probe, rows: int) -> dict[str, int]:
    """Arguments for a step of this number of rows."""
    size = max(1, rows // probe.micro_batches // ranks())
    return {"per_device_train_batch_size": size, "gradient_accumulation_steps": probe.micro_batches}


def llamafactory(model: Any = ("qwen3", {}), **more: Any) -> Make:
    def make(probe: Probe) -> Any:
        without("torchaudio")
        from llamafactory.train.tuner import run_exp

        folder = saved(probe, model[0], **model[1])
        (folder / "dataset_info.json").write_text(json.dumps({"talks": {"file_name": "talks.json"}}))
        given = arguments(**rows_of(probe, 4 if more.get("packing") else 12)) | {"max_steps": 1, "report_to": "none"}
        given |= {"stage": "sft", "do_train": True, "finetuning_type": "full", "model_name_or_path": str(folder)}
        given |= {"dataset": "talks", "dataset_dir": str(folder), "template": "empty", "cutoff_len": 64, "overwrite_cache": True}
        given |= {"disable_gradient_checkpointing": True, "train_on_prompt": not probe.prompt}
        return trainer_of(lambda: run_exp(given | more))

    return make


def axolotl(model: Any = ("qwen3", {}), **more: Any) -> Make:
    def make(probe: Probe) -> Any:
        os.environ["AXOLOTL_DO_NOT_TRACK"] = "1"
        from axolotl.cli.args import TrainerCliArgs
        from axolotl.cli.config import load_cfg
        from axolotl.cli.train import do_train
        from axolotl.utils.dict import DictDefault

        folder = saved(probe, model[0], **model[1])
        packed = more.get("sample_packing")
        sizes = rows_of(probe, 4 if packed else 12)
        given = {"base_model": str(folder), "output_dir": str(folder / "out"), "sequence_len": 64, "learning_rate": 1e-3}
        given |= {"datasets": [{"path": str(folder / "segments.json"), "ds_type": "json", "type": "input_output"}]}
        given |= {"micro_batch_size": sizes["per_device_train_batch_size"], "max_steps": 1, "optimizer": "adamw_torch"}
        given |= {"gradient_accumulation_steps": probe.micro_batches, "dataset_prepared_path": str(folder / "prepared")}
        given |= {"bf16": False, "fp16": False, "tf32": False, "save_strategy": "no", "dataset_num_proc": 1, "pad_to_sequence_len": False}
        given |= {"attn_implementation": "sdpa", "special_tokens": {"pad_token": f"<{probe.pad}>"}}
        given |= {"curriculum_sampling": True}
        return trainer_of(lambda: do_train(load_cfg(DictDefault(given | more)), TrainerCliArgs()))

    return make


def swift(model: Any = ("qwen3", {}), **more: Any) -> Make:
    """ms-swift wants flash attention for packed rows, which has no CPU build: SDPA reads the same `position_ids`."""

    def make(probe: Probe) -> Any:
        os.environ["USE_HF"] = "1"
        from swift.arguments import SftArguments
        from swift.pipelines import sft_main

        def padding_free(self: Any) -> None:
            self.padding_free = self.padding_free or self.packing

        folder = saved(probe, model[0], **model[1])
        given = arguments(**rows_of(probe, 4 if more.get("packing") else 12)) | {"model": folder, "model_type": model[0]}
        given |= {"template": "dummy", "dataset": folder / "talks.json", "max_length": 64, "tuner_type": "full", "torch_dtype": "float32"}
        given |= {"loss_scale": "default" if probe.prompt else "all", "attn_impl": "sdpa", "gradient_checkpointing": False}
        given |= {"fp16": False, "report_to": "none", "dataset_num_proc": 1, "split_dataset_ratio": 0, "load_from_cache_file": False, "check_model": False} | more
        given.pop("disable_tqdm")
        words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        with patch.object(SftArguments, "_check_padding_free", padding_free):
            return trainer_of(lambda: sft_main(words))

    return make


def accelerate(packed: bool = False) -> Make:
    """Context parallelism of accelerate in Trainer: its ring attention, rows split over two ranks."""

    def make(probe: Probe) -> Any:
        from accelerate import ParallelismConfig
        from transformers import DataCollatorForSeq2Seq, DataCollatorWithFlattening, Trainer, TrainingArguments

        given = {"per_device_train_batch_size": 12 // probe.micro_batches, "gradient_accumulation_steps": probe.micro_batches}
        os.environ["FSDP_VERSION"] = "2"
        given |= {"fsdp": "full_shard", "fsdp_config": {"fsdp_version": 2}, "parallelism_config": ParallelismConfig(cp_size=ranks())}
        collate = DataCollatorWithFlattening() if packed else DataCollatorForSeq2Seq(tokenizer(probe), pad_to_multiple_of=2 * ranks())
        return Trainer(probe.model("qwen3"), TrainingArguments(**arguments(**given)), collate, probe.rows)

    return make


OTHERS: dict[str, dict[str, Make]] = {
    "megatron": {
        "megatron-core, `calculate_per_token_loss`, all masks of documents": megatron(**DOCUMENTS),
        "megatron-core, without `calculate_per_token_loss`": megatron(False, **DOCUMENTS),
        "megatron-core, without `eod_mask_loss`": megatron(**DOCUMENTS | {"eod_mask_loss": False}),
        "megatron-core, without masks of documents": megatron(),
    },
    "accelerate": {
        "accelerate's context parallelism, padded": accelerate(),
        "accelerate's context parallelism, flattened": accelerate(True),
    },
    "swift": {
        "ms-swift, padded": swift(),
        "ms-swift, `packing`": swift(packing=True),
        "ms-swift, `padding_free`": swift(padding_free=True),
        "ms-swift, Ulysses": swift(sequence_parallel_size=2),
        "ms-swift, Ulysses, `padding_free`": swift(sequence_parallel_size=2, padding_free=True),
        "ms-swift, `loss_scale`": swift(loss_scale="last_round"),
    },
    "axolotl": {
        "Axolotl, padded": axolotl(),
        "Axolotl, `sample_packing`, SDPA": axolotl(sample_packing=True),
        "Axolotl, `sample_packing`, eager": axolotl(sample_packing=True, attn_implementation="eager"),
        "Axolotl, padded, Mistral's windows": axolotl(("mistral", WINDOW)),
        "Axolotl, `sample_packing`, SDPA, Mistral's windows": axolotl(("mistral", WINDOW), sample_packing=True),
        "Axolotl, `sample_packing`, SDPA, Gemma 3": axolotl(("gemma3_text", WINDOW), sample_packing=True),
        "Axolotl, `sample_packing`, eager, gpt-oss": axolotl(("gpt_oss", WINDOW), sample_packing=True, attn_implementation="eager"),
        "Axolotl, `sample_packing`, SDPA, LoRA": axolotl(sample_packing=True, adapter="lora", lora_r=4, lora_alpha=8, lora_dropout=0.0, lora_target_linear=True),
    },
    "llamafactory": {
        "LLaMA-Factory, padded": llamafactory(),
        "LLaMA-Factory, `packing`": llamafactory(packing=True),
        "LLaMA-Factory, `neat_packing`": llamafactory(packing=True, neat_packing=True),
        "LLaMA-Factory, `neat_packing`, Mistral's windows": llamafactory(("mistral", WINDOW), packing=True, neat_packing=True),
        "LLaMA-Factory, `neat_packing`, Gemma 3": llamafactory(("gemma3_text", WINDOW), packing=True, neat_packing=True),
        "LLaMA-Factory, `neat_packing`, gpt-oss": llamafactory(
            ("gpt_oss", WINDOW), packing=True, neat_packing=True, flash_attn="disabled"
        ),
        "LLaMA-Factory, padded, Mistral's windows": llamafactory(("mistral", WINDOW)),
    },
}
