"""`longctx estimate --trl`: what it predicts by a config alone is what the trainer itself would
take."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from trl import SFTConfig, SFTTrainer

from longctx.cli import main
from longctx.config import load
from longctx.data.store.store import Lengths
from longctx.memory.verdict import STEPS
from longctx.planning.plan import Plan
from longctx.trainers import kinds, prediction
from longctx.trainers.budget import Workload, bytes_beside
from longctx.trainers.kinds import Traits
from longctx.training.data import first_plans
from tests.trainer_cases import (
    VOCABULARY,
    adapters,
    arguments,
    as_rank_alone,
    documents,
    model,
    tokenizer,
)
from tests.whole_size import fake_ranks

A100 = ["--context.profile=a100-80gb", "--gpus=2"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    model().save_pretrained(folder)
    return folder


def estimate(capsys: pytest.CaptureFixture[str], *given: str) -> dict[str, Any]:
    assert main(["estimate", "--json", *given]) == 0
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("recomputes", [False, True])
def test_the_memory_is_what_the_trainer_estimates(
    tmp_path: Path,
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
    lora: bool,
    recomputes: bool,
) -> None:
    as_rank_alone()
    given = arguments(tmp_path, 1, 1, eval_strategy="no")
    del given["remove_unused_columns"]
    given["gradient_checkpointing"] = recomputes
    data = datasets.Dataset.from_list([{"input_ids": row["input_ids"]} for row in documents()])
    trainer = SFTTrainer(
        model(),
        args=SFTConfig(**given, max_length=None),
        train_dataset=data,
        processing_class=tokenizer(),
        peft_config=adapters(lora),
    )
    workload = Workload.of(Traits(trainer, False), "cpu-2core")
    assert workload.spec.own is not None  # which nothing fuses on GPUs either
    assert not workload.config.compiles("cuda", workload.spec)
    settings = [
        f"--model.from_pretrained={checkpoint}",
        f"--train.recompute={'full' if recomputes else 'none'}",
        "--train.device=cpu",
        "--train.dtype=float32",
        "--context.profile=cpu-2core",
        "--batch.tokens_per_rank=3000",
    ]
    if lora:
        config = trainer.model.peft_config["default"]
        targets = ", ".join(sorted(config.target_modules))
        settings += [f"--lora.rank={config.r}", f"--lora.target_modules=[{targets}]"]
    found = estimate(capsys, "--trl=ddp", *settings)
    assert found["needed"] == workload._needs(chunks=False).bytes(3000) > 0


def test_a_trainer_is_predicted_by_a_config_alone(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tokens per rank are those that fill the memory; documents are split over both ranks, where
    they are longer."""
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("9000\n" * 30)
    given = [f"--model.from_pretrained={checkpoint}", *A100, f"--lengths={lengths}"]
    assert main(["estimate", "--trl=fsdp2", *given]) == 0
    verdict, source, *_ = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"fits: [\d.]+ GiB of 74.51 GiB per A100 \(FSDP2, gradient checkpointing, [\d,]+ tokens per "
        r"rank, degrees? [12].*\); [\d.]+ s a step, [\d,]+ tokens/s per GPU, MFU \d+%, [\d.]+ "
        r"(seconds|minutes) for 100 steps, [\d.]+ GPU hours per billion tokens",
        verdict,
    )
    assert source == f"steps of {lengths}, of 65,536 tokens"
    few = estimate(capsys, "--trl=ddp", "--batch.tokens_per_rank=5000", *given)
    assert "(DDP, gradient checkpointing, 5,000 tokens per rank, degree 2)" in few["verdict"]
    sharded = estimate(capsys, "--trl=fsdp2", "--batch.tokens_per_rank=5000", *given)
    assert sharded["needed"] < few["needed"]
    whole = estimate(
        capsys, "--trl=ddp", "--batch.tokens_per_rank=5000", "--train.recompute=none", *given
    )
    assert whole["needed"] > few["needed"] and "(DDP, 5,000" in whole["verdict"]


def test_its_time_is_by_the_profile_of_trainers(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' code computes no query while K and V travel."""
    plans: list[Plan] = []

    def recorded(*given: Any, **named: Any) -> Iterator[Plan]:
        plans.extend(first_plans(*given, **named))
        yield from plans

    monkeypatch.setattr(prediction, "first_plans", recorded)
    overrides = [
        f"model.from_pretrained={checkpoint}",
        "train.device=cuda",
        "context.profile=a100-80gb",
        "batch.tokens_per_rank=5000",
    ]
    config = load(None, overrides)
    spec = config.model_source().spec
    documents = Lengths([9000] * 30, "lengths", VOCABULARY)
    found = prediction.predict_trl(config, spec, documents=documents, ranks=2, sharding="ddp")
    assert len(plans) == STEPS and {plan.profile.query_share for plan in plans} == {0}
    mean = sum(plan.makespan_s for plan in plans) / STEPS
    assert found.verdict.step_s == pytest.approx(mean)


def test_what_no_memory_holds_does_not_fit(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [f"--model.from_pretrained={checkpoint}", *A100, "--data.max_length=300000000"]
    assert main(["estimate", "--trl=ddp", *given]) == 0
    verdict, remark, *_ = capsys.readouterr().out.splitlines()
    assert verdict.startswith("does not fit: ") and "150,000,640 tokens per rank" in verdict
    assert remark.startswith("use FSDP2 (--trl fsdp2), adapters (--lora.rank 16), more GPUs")
    assert main(["estimate", "--trl=fsdp2", "--lora.rank=8", *given]) == 0
    verdict, remark, *_ = capsys.readouterr().out.splitlines()
    assert verdict.startswith("does not fit: ")
    assert remark.startswith("use more GPUs or shorter documents")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--parallel.tensor_parallel_size=2"], "trainers of TRL do not split the model so"),
        (["--train.recompute=mlp"], "gradient_checkpointing of trainers is full or none"),
        (["--all"], "--all is of `longctx train`"),
        (["--batch.tokens_per_rank=100", "--data.max_length=300"], "has 300 tokens, but 2 ranks"),
    ],
)
def test_settings_that_trainers_lack_are_refused(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], given: list[str], message: str
) -> None:
    model = f"--model.from_pretrained={checkpoint}"
    assert main(["estimate", "--trl=fsdp2", model, *A100, *given]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_trainer_is_of_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--trl=fsdp2"]) == 2
    assert "--trl is of a checkpoint: set --model.from_pretrained" in capsys.readouterr().err


@pytest.mark.slow
def test_more_tokens_need_more_memory_and_whole_gradients_count(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whether they divide a step or not: trainers keep gradients whole between micro-batches, which
    FSDP2 reduces at the end of a step. Of an 8B model on 8 H100s, at 4 bytes a weight."""
    given = ["--trl=fsdp2", "--gpus=8", "--context.profile=h100-nvlink-ib", "--mix=wlb_128k"]
    given += ["--model.from_pretrained=Qwen/Qwen3-8B", "--batch.global_tokens=1048576"]
    needed = []
    for tokens in (32_768, 65_536, 66_560, 131_072, 262_144):
        content = estimate(capsys, *given, f"--batch.tokens_per_rank={tokens}")
        needed.append(content["needed"])
    assert needed == sorted(needed)
    one = ["--batch.global_tokens=65536", "--batch.tokens_per_rank=32768"]
    assert estimate(capsys, *given, *one)["needed"] == needed[0], "of one micro-batch"
    assert needed[0] > 8.19e9 * 4, "the gradients alone"


def test_a_limit_on_documents_that_is_set_is_not_advised(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["--gpus=8", "--context.profile=h100-nvlink-ib", "--mix=wlb_128k"]
    given += ["--model.from_pretrained=Qwen/Qwen3-8B", "--trl=fsdp2"]
    said = []
    for more in ([], ["--data.max_length=40960"]):
        assert main(["estimate", *given, *more]) == 0
        said.append("or set data.max_length" in capsys.readouterr().out)
    assert said == [True, False]


@pytest.mark.parametrize(("fsdp", "expected"), [("full_shard", True), ("", False)])
def test_recomputation_that_accelerate_is_asked_for_counts(fsdp: str, expected: bool) -> None:
    """In `fsdp_config`, which nobody reads without `fsdp`."""
    config = {"version": 2, "activation_checkpointing": True}
    args = SimpleNamespace(fsdp=fsdp, fsdp_config=config, gradient_checkpointing=False)
    assert kinds._recomputes(args, model()) == (expected, False)


def test_a_sharded_model_beside_counts_with_its_share() -> None:
    """A teacher of 8 rows on 4 ranks has 2 rows of 3 numbers here."""
    with fake_ranks(0, 4):
        mesh = init_device_mesh("cpu", (4,))
        rows = torch.nn.Parameter(DTensor.from_local(torch.zeros(2, 3), mesh, [Shard(0)]))
        teacher = torch.nn.ParameterList([rows, torch.nn.Parameter(torch.zeros(5))])
        trainer = SimpleNamespace(teacher_model=teacher, ref_model=None)
        args = SimpleNamespace(device=torch.device("cuda"))
        traits: Any = SimpleNamespace(trainer=trainer, args=args)
        assert bytes_beside(traits) == 4 * (2 * 3 + 5)
