"""Bases of 4 bits by bitsandbytes in trainers: what one plain process computes. Runs where
bitsandbytes is installed."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.marks import slow_unless
from tests.trainer_cases import (
    PROFILE,
    TOKENS_PER_RANK,
    adapters,
    arguments,
    as_rank,
    conversations,
    model,
    report,
    select_fsdp_on_cpus,
    tokenizer,
)
from tests.workers import Workers

pytest.importorskip("bitsandbytes")

SHARDED = {"fsdp": "full_shard auto_wrap"}
SHARDED["fsdp_config"] = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"]}  # type: ignore[assignment]


def finetune(folder: Path, dynamic: bool, storage: str, options: dict[str, Any]) -> dict[str, Any]:
    """Fine-tunes adapters on a base of 4 bits, whose bytes are kept as numbers of the type
    `storage`."""
    import datasets
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig
    from trl import SFTConfig, SFTTrainer

    from longctx.trainers import dynamic_context_parallel

    ranks = as_rank()
    if options:
        select_fsdp_on_cpus()
    if dist.get_rank() == 0:
        model().save_pretrained(folder)
    dist.barrier()
    bits = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_quant_storage=storage
    )
    given = arguments(folder, ranks, 1, max_length=None, eval_strategy="no", max_steps=2, **options)
    del given["remove_unused_columns"]
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=bits, dtype=torch.float32),
        args=SFTConfig(**given),
        train_dataset=datasets.Dataset.from_list(conversations()),
        processing_class=tokenizer(),
        peft_config=adapters(True),
    )
    if dynamic:
        dynamic_context_parallel(trainer, profile=PROFILE, tokens_per_rank=TOKENS_PER_RANK)
    trainer.train()
    return {name: value for name, value in report(trainer).items() if name in ("log", "degrees")}


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "copies": ("uint8", {}),
    "sharded": ("float32", SHARDED),
    "bytes": ("uint8", SHARDED),
}


@pytest.mark.parametrize("way", slow_unless(lambda way: way == "copies", WAYS))
def test_a_base_of_4_bits(workers: Workers, tmp_path: Path, way: str) -> None:
    """Adapters are in bfloat16, as TRL makes them, so the second step is as after a rounded one."""
    storage, options = WAYS[way]
    (expected,) = workers.run(finetune, 1, tmp_path / "plain", False, "uint8", {})
    for run in workers.run(finetune, 2, tmp_path / "ours", True, storage, options):
        assert max(run["degrees"]) == 2
        steps = zip(run["log"][:2], expected["log"][:2], (1e-6, 1e-5), (1e-5, 1e-2), strict=True)
        for ours, theirs, loss, norm in steps:
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=loss)
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=norm)
