"""LoRA on the encoder of images: named by its part, with the gradients and the outputs of peft's own code."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForImageTextToText

from longctx.config import load
from longctx.model.lora import find_targets, merge, write_adapter
from tests import vision_cases
from tests.lora_cases import draw
from tests.marks import slow_unless
from tests.pretrained_cases import assert_step
from tests.workers import Workers

TARGETS = {
    "llava": "[all-linear, vision_tower.q_proj, multi_modal_projector.linear_1]",
    "qwen2_vl": "[layers.1.mlp.up_proj, visual.all-linear]",
    "qwen2_5_vl": "[q_proj, visual.qkv, visual.merger.mlp.0]",
    "qwen3_vl": "[all-linear, visual.all-linear]",
    "gemma3": "[v_proj, vision_tower.fc1]",
}
PREFIX = "base_model.model."


def settings(family: str, *more: str) -> list[str]:
    return ["lora.rank=4", "lora.alpha=12", f"lora.target_modules={TARGETS[family]}", *more]


def built(folder: Path, family: str) -> Any:
    config = load(None, [f"model.from_pretrained={folder}", "batch.tokens_per_rank=300", *settings(family)])
    return config.model_source().build()


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("family", slow_unless(lambda family: family in ("qwen3_vl", "llava"), TARGETS))
def test_gradients_are_those_of_peft(workers: Workers, tmp_path: Path, family: str, ranks: int) -> None:
    """Of both matrices, as neither is zero."""
    folder = vision_cases.save_model(tmp_path / "model", family)
    model = built(folder, family)
    hf = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    lora = LoraConfig(r=4, lora_alpha=12, target_modules=list(model.adapted), lora_dropout=0.0)
    plain = get_peft_model(hf, lora).eval()
    values = {name.removeprefix("hf."): value for name, value in draw(model).items() if "lora_" in name}
    trained = {name.removeprefix(PREFIX): weight for name, weight in plain.named_parameters() if weight.requires_grad}
    assert trained.keys() == values.keys() and any(".language_model." not in name for name in values)
    with torch.no_grad():
        for name, weight in trained.items():
            weight.copy_(values[name])
    loss, gradients = vision_cases.own_step(plain, family), {}
    for name, weight in trained.items():
        gradients[name] = torch.zeros_like(weight) if weight.grad is None else weight.grad
    assert any(gradient.any() for name, gradient in gradients.items() if ".language_model." not in name)
    for found, found_gradients, _ in workers.run(vision_cases.adapted_step, ranks, folder, family, settings(family), values):
        of_adapters = {name: gradient for name, gradient in found_gradients.items() if name in gradients}
        assert not any(gradient.any() for name, gradient in found_gradients.items() if name not in gradients)
        assert_step([(found, of_adapters, {})], (loss, gradients, {}))


@pytest.mark.parametrize("family", slow_unless(lambda family: family in ("qwen2_5_vl", "llava"), TARGETS))
def test_peft_loads_the_adapter_and_merges_the_same(tmp_path: Path, family: str) -> None:
    folder = vision_cases.save_model(tmp_path / "model", family)
    model = built(folder, family)
    values = draw(model)
    write_adapter(tmp_path / "adapter", model, {name: value for name, value in values.items() if "lora_" in name})
    base = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    tokens = vision_cases.documents(family)[0]
    before = vision_cases.own_logits(base, family, 0, tokens)
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    adapted = vision_cases.own_logits(loaded, family, 0, tokens)
    assert (before - adapted).abs().max() > 0.05
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(values[name])
    model.finish(torch.device("cpu"), torch.float32)
    model.hf.set_attn_implementation("eager")
    assert torch.equal(vision_cases.own_logits(model.hf, family, 0, tokens), adapted)
    merged, expected = merge(model, values), loaded.merge_and_unload()
    assert {name.removeprefix("hf.") for name in merged} == dict(expected.named_parameters()).keys()
    for name, weight in expected.named_parameters():
        assert torch.equal(merged[f"hf.{name}"], weight), name


def test_a_spec_counts_adapters_of_the_encoder(tmp_path: Path) -> None:
    for family in TARGETS:
        model = built(vision_cases.save_model(tmp_path / family, family), family)
        assert model.spec.trained_parameters == sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
        assert model.spec.tower_adapters > 0 and model.spec.adapted
        assert abs(model.spec.parameters - sum(weight.numel() for weight in model.parameters())) <= 64  # of norms


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["visual.q_proj"], r"no layer is called visual.q_proj: .* fc1, .*qkv, and more under visual \(visual.NAME"),
        (["qkv"], r"no layer is called qkv: .*q_proj.*and more under visual \(visual.NAME, visual.all-linear\)"),
        (["visual.all-linear"], "documents without images would train nothing: name layers of the language model too"),
        (["visual.norm1"], r"visual.norm1 is a .*, which is not a linear layer"),
    ],
)
def test_layers_that_cannot_have_adapters(tmp_path: Path, targets: list[str], message: str) -> None:
    model = built(vision_cases.save_model(tmp_path, "qwen2_vl"), "qwen2_vl")
    with pytest.raises(ValueError, match=message):
        find_targets(model.conversion.twin, targets)
