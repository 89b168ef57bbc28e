"""Quantized bases (QLoRA): equal to torchao and peft alone for every split over ranks; exports,
memory, refusals."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM

pytest.importorskip("torchao")

from longctx.cli import main
from longctx.config import ConfigError, load
from longctx.hf.lora import merge
from longctx.hf.quantized import QuantizedLinear
from tests.lora_cases import make_checkpoint, run_with_checkpoints, settings_of
from tests.marks import slow_unless
from tests.memory_cases import peak_and_estimate
from tests.quantized_cases import expanded
from tests.workers import Workers

BASES = ("nf4", "int8")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints"), "llama")


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize(("rows", "columns"), [(192, 576), (128, 1024), (3, 64)])
def test_values_are_those_of_torchao(base: str, rows: int, columns: int) -> None:
    """Bit by bit, and so are products and gradients in bfloat16."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * 0.02
    layer = QuantizedLinear(nn.Linear(columns, rows), base)
    layer.weight.copy_(layer.pack(weight))
    assert torch.equal(layer.unpack(layer.weight), expanded(weight, base))
    assert (layer.unpack(layer.weight) - weight).norm() < (
        0.1 if base == "nf4" else 0.01
    ) * weight.norm()
    x = torch.randn(2, 5, columns, dtype=torch.bfloat16, requires_grad=True)
    layer.bias = None
    layer(x).square().sum().backward()
    other = x.detach().clone().requires_grad_()
    nn.functional.linear(other, expanded(weight, base).bfloat16()).square().sum().backward()
    assert x.grad is not None and other.grad is not None and torch.equal(x.grad, other.grad)


@pytest.mark.parametrize(("base", "value"), [("nf4", 0.0), ("nf4", 0.25), ("int8", 0.0)])
def test_equal_weights_have_no_error(base: str, value: float) -> None:
    """torchao itself divides by zero here in NF4."""
    layer = QuantizedLinear(nn.Linear(64, 64), base)
    weight = torch.full((64, 64), value)
    torch.testing.assert_close(layer.unpack(layer.pack(weight)), weight)


@pytest.mark.parametrize("base", slow_unless(lambda base: base == "nf4", BASES))
def test_exports_are_adapters_of_the_plain_base_and_the_model_that_was_trained(
    workers: Workers, shorts: Path, checkpoint: Path, tmp_path: Path, base: str
) -> None:
    settings = settings_of(
        checkpoint,
        "batch.tokens_per_rank=300",
        "train.steps=2",
        f"lora.base={base}",
        "train.dtype=bfloat16",
    )
    ended = workers.run(run_with_checkpoints, 2, shorts, tmp_path / "run", settings)[0]
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "adapters")]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "merged"), "--merge"]) == 0
    plain = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(plain, tmp_path / "adapters")
    for name, weight in loaded.named_parameters():
        if "lora_" in name:
            assert torch.equal(weight, ended[name.removeprefix("base_model.model.")])
        elif "base_layer" in name:
            with torch.no_grad():
                weight.copy_(expanded(weight, base))
    merged = AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", dtype=torch.float32
    ).state_dict()
    for name, weight in loaded.merge_and_unload().state_dict().items():
        assert torch.equal(merged[name], weight), name


def test_layers_without_adapters_are_quantized_too(checkpoint: Path) -> None:
    given = settings_of(
        checkpoint, "lora.target_modules=[q_proj]", "lora.base=nf4", "batch.tokens_per_rank=300"
    )
    model = load(None, given).model_source().build()
    assert {
        name.split(".")[-2]
        for name, weight in model.named_parameters()
        if weight.dtype == torch.uint8
    } == {*("base_layer", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")}
    values = {
        name: model.initial_value(name, weight.detach(), 3)
        for name, weight in model.named_parameters()
    }
    merged = merge(model, values)
    for name, weight in AutoModelForCausalLM.from_pretrained(checkpoint).named_parameters():
        expected = expanded(weight, "nf4") if name.endswith("proj.weight") else weight
        torch.testing.assert_close(merged[f"hf.{name}"], expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (
            "llama",
            ["lora.rank=null", "lora.alpha=null"],
            "weights that are trained cannot be quantized",
        ),
        ("llama", ["model.implementation=native"], "the native decoder has no adapters"),
        (
            "llama",
            ["parallel.tensor_parallel_size=2"],
            "the frozen weights of LoRA are sharded over all ranks",
        ),
        ("llama", ["train.float8=rowwise"], "base weights are frozen"),
        ("llama", ["lora.base=fp4"], "fp4"),
        (
            "gpt2",
            [],
            "lora.base = nf4\n.*GPT2LMHeadModel has no linear layers of torch in its blocks",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, kind: str, settings: list[str], message: str
) -> None:
    checkpoint = make_checkpoint(tmp_path, kind)
    with pytest.raises(ConfigError, match=message):
        load(None, settings_of(checkpoint, "batch.tokens_per_rank=300", "lora.base=nf4", *settings))


@pytest.mark.parametrize(
    ("base", "ranks", "others"),
    [("nf4", 2, ["context.mode=auto"]), ("int8", 1, ["train.dtype=bfloat16"])],
)
@pytest.mark.slow
def test_the_memory_estimate_is_within_10_percent(
    workers: Workers, store: Path, tmp_path: Path, base: str, ranks: int, others: list[str]
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "head_dim": 32}
    checkpoint = make_checkpoint(tmp_path / "larger", "llama", **sizes)
    given = settings_of(
        checkpoint, f"batch.tokens_per_rank={2048 // ranks}", "batch.global_tokens=4096", *others
    )
    given += ["data.max_length=2048", f"lora.base={base}"]
    measured, memory = peak_and_estimate(workers, store, tmp_path / "run", ranks, given)
    assert memory.total == pytest.approx(measured, rel=0.1), f"{memory}, measured {measured}"
