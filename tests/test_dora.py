"""DoRA: equal to plain peft and transformers for every split over ranks; its adapter file, and the merged model."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from longctx.config import load
from longctx.model.lora import LENGTHS, merge
from longctx.training.saved.export import export
from tests.lora_cases import (
    draw,
    gathered_losses,
    loaded_by_peft,
    make_checkpoint,
    reference,
    resumed,
    resuming_fails,
    run,
    run_with_checkpoints,
    settings_of,
)
from tests.memory_cases import peak_and_estimate
from tests.workers import Workers

DORA = ["lora.dora=true", "optimizer.weight_decay=0.0"]
SPLIT = ["batch.tokens_per_rank=200"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {kind: make_checkpoint(folder, kind) for kind in ("llama", "gpt2")}


@pytest.mark.parametrize(
    ("kind", "ranks", "settings"),
    [
        ("llama", 1, ["batch.tokens_per_rank=300"]),
        ("llama", 2, [*SPLIT, "parallel.shard_ranks=1", "train.recompute=norms"]),
        ("llama", 3, [*SPLIT, "train.recompute=full"]),
        ("gpt2", 2, SPLIT),
    ],
)
def test_steps_are_those_of_peft(
    workers: Workers, shorts: Path, checkpoints: dict[str, Path], tmp_path: Path, kind: str, ranks: int, settings: list[str]
) -> None:
    settings = settings_of(checkpoints[kind], *DORA, *settings)
    results = workers.run(run, ranks, shorts, tmp_path, settings)
    first = results[0]["first"]
    base = AutoModelForCausalLM.from_pretrained(checkpoints[kind], dtype=torch.float32)
    plain = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", use_dora=True))
    initial = {name.removeprefix("base_model.model."): weight for name, weight in plain.named_parameters()}
    assert any(name.endswith(LENGTHS) for name in first)
    for name, value in first.items():
        if name.endswith(LENGTHS):
            torch.testing.assert_close(value, initial[name].detach(), rtol=1e-6, atol=0)
    losses, last = reference(checkpoints[kind], shorts, settings, first, use_dora=True)
    assert gathered_losses(results) == pytest.approx(losses, rel=1e-5)
    assert ranks == 1 or all(result["split"] for result in results)
    for name, value in last.items():
        assert not torch.equal(value, first[name])
        assert (results[0]["last"][name] - value).norm() / value.norm() < 1e-3, name
    assert all(result["frozen stays"] for result in results)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peft_loads_the_adapter_and_merges_the_same(
    checkpoints: dict[str, Path], tmp_path: Path, kind: str, dtype: str
) -> None:
    given = settings_of(checkpoints[kind], *DORA, f"train.dtype={dtype}", "batch.tokens_per_rank=300")
    model = load(None, given).model_source().build()
    for name, length in model.named_parameters():
        if name.endswith(LENGTHS):  # of the weight as it is kept
            base = f"{name.removesuffix(LENGTHS)}.base_layer.weight"
            weight = model.initial_value(base, model.get_parameter(base).detach(), 3).float()
            expected_length = torch.linalg.norm(weight, dim=0 if kind == "gpt2" else 1)
            torch.testing.assert_close(model.initial_value(name, length.detach(), 3), expected_length, rtol=1e-6, atol=0)
    measured = [weight.numel() for name, weight in model.layers[0].named_parameters() if name.endswith("base_layer.weight")]
    assert model.spec.layers[0].largest_measured == max(measured)
    values = draw(model)
    loaded = loaded_by_peft(tmp_path, checkpoints[kind], model, values, dtype)
    assert loaded.peft_config["default"].use_dora
    merged, expected = merge(model, values), loaded.merge_and_unload()
    for name, weight in expected.named_parameters():
        assert torch.equal(merged[f"hf.{name}"], weight), name


def test_a_run_resumes_and_exports_what_it_trained(
    workers: Workers, shorts: Path, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    settings = settings_of(checkpoints["llama"], *DORA, *SPLIT, "train.steps=2", "checkpoint.every=1")
    ended = workers.run(run_with_checkpoints, 2, shorts, tmp_path / "run", settings)[0]
    export(tmp_path / "run", tmp_path / "adapters")
    export(tmp_path / "run", tmp_path / "merged", merge=True)
    base = AutoModelForCausalLM.from_pretrained(checkpoints["llama"], dtype=torch.float32)
    expected = PeftModel.from_pretrained(base, tmp_path / "adapters").merge_and_unload()
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert {name: weight.shape for name, weight in merged.items()} == {
        name: weight.shape for name, weight in expected.state_dict().items()
    }
    assert all(torch.equal(merged[name], weight) for name, weight in expected.state_dict().items())
    said = workers.run(resuming_fails, 1, shorts, tmp_path / "run", [*settings, "lora.dora=false", "batch.tokens_per_rank=400"])
    assert "lora.dora is False, was True" in said[0]
    last = tmp_path / "run" / "checkpoints" / "step-000002"
    last.rename(tmp_path / "moved")
    for name, value in workers.run(resumed, 2, shorts, tmp_path / "run", settings)[0].items():
        assert torch.equal(value, ended[name]), name


@pytest.mark.parametrize(
    ("ranks", "others"),
    [(1, ["train.recompute=none"]), (1, ["train.dtype=bfloat16"]), (2, ["train.recompute=full"])],
)
def test_the_memory_estimate_is_within_10_percent(
    workers: Workers, store: Path, tmp_path: Path, ranks: int, others: list[str]
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 384, "head_dim": 32}
    checkpoint = make_checkpoint(tmp_path / "larger", "llama", **sizes)
    given = settings_of(checkpoint, f"batch.tokens_per_rank={2048 // ranks}", "batch.global_tokens=4096", *DORA, *others)
    given.append("data.max_length=2048")
    measured, memory = peak_and_estimate(workers, store, tmp_path / "run", ranks, given)
    assert memory.total == pytest.approx(measured, rel=0.1), f"{memory}, measured {measured}"


def test_blocks_are_not_compiled(checkpoints: dict[str, Path]) -> None:
    """Peft's code looks for kinds of quantized weights in each pass, where torch.compile breaks the graph."""
    given = settings_of(checkpoints["llama"], "batch.tokens_per_rank=300")
    compiled, plain = (load(None, [*given, *more]).compiles("cuda") for more in ([], ["lora.dora=true"]))
    assert compiled and not plain
