"""Vision-language models in `longctx train`: texts train their language model as transformers' own code does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from longctx.cli import main
from longctx.config import load
from longctx.data.store.prepare import prepare
from longctx.errors import UserError
from longctx.hf.lora import find_targets
from longctx.hf.vision import VISION_FAMILIES, tower_blocks, tower_sizes
from longctx.training.saved.export import how_to_load
from tests import launched, pretrained_cases
from tests.data_cases import learnt, made, whole, write_jsonl
from tests.huggingface_cases import make_documents, unpacked
from tests.marks import slow_unless
from tests.pretrained_cases import Step, assert_step
from tests.vision_cases import CONFIGS, pixels, places_of, save_checkpoint, save_model
from tests.vision_trainer_cases import chat
from tests.workers import Workers


def built(folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


def reference(folder: Path) -> Step:
    """Returns the loss over single documents of text, gradients and state of a model by transformers' own code."""
    model = built(folder)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    loss, _ = unpacked(model, make_documents())
    return loss, {n: torch.zeros_like(w) if w.grad is None else w.grad for n, w in model.named_parameters()}, state


@pytest.mark.parametrize("family", slow_unless(lambda family: family in ("qwen3_vl", "gemma3"), VISION_FAMILIES))
def test_a_step_on_texts_is_that_of_single_documents(workers: Workers, tmp_path: Path, family: str) -> None:
    folder = save_model(tmp_path / "model", family)
    assert_step(workers.run(pretrained_cases.step, 2, folder, []), reference(folder))


def test_adapters_are_on_the_language_model(workers: Workers, tmp_path: Path) -> None:
    """With B = 0 the loss is that of the checkpoint."""
    folder = save_model(tmp_path / "model", "qwen3_vl")
    expected, *_ = reference(folder)
    for loss, gradients, _ in workers.run(pretrained_cases.step, 2, folder, ["lora.rank=4"]):
        assert loss == pytest.approx(expected, rel=1e-5)
        trained = {name for name, gradient in gradients.items() if gradient.any()}
        assert trained and all(".language_model." in name and ".lora_B." in name for name in trained)
    twin = built(folder)
    assert all(".language_model." in name for name in find_targets(twin, "all-linear"))
    with pytest.raises(ValueError, match=r"no layer is called visual\.qkv: Qwen3VL.* has the linear layers down_proj"):
        find_targets(twin, ["visual.qkv"])


def test_a_spec_has_all_parameters(tmp_path: Path) -> None:
    for family in VISION_FAMILIES:
        source = load(None, [f"model.from_pretrained={save_model(tmp_path / family, family)}"]).model_source()
        with torch.device("meta"):
            model = source.build()
        assert abs(source.spec.parameters - sum(weight.numel() for weight in model.parameters())) <= 64  # of norms
        tower = sum(weight.numel() for name, weight in model.named_parameters() if ".language_model." not in name)
        assert source.spec.tower_parameters == tower - (0 if source.spec.tie_word_embeddings else 96 * 32)
        assert len(model.tower) == len(tower_blocks(model.hf)) == 3 and not source.spec.tower_values


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "qwen3_vl"])
def test_values_that_an_encoder_keeps_are_those_that_torch_saves(tmp_path: Path, family: str) -> None:
    large = {**CONFIGS[family]["vision_config"], "hidden_size": 96, "intermediate_size": 256}
    large |= {"num_hidden_layers": 4} if family == "llava" else {"depth": 4}
    model = built(save_model(tmp_path / "model", family, vision_config=large))
    own, kept = {weight.data_ptr() for weight in model.parameters()}, dict[int, int]()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        features = model.base_model.get_image_features(**pixels(family, [(3, 0)]), return_dict=True)
    assert features is not None
    tokens = places_of(family)[3][0].tokens
    assert sum(kept.values()) / 4 / tokens == pytest.approx(tower_sizes(model)[1], rel=0.35)


def test_models_that_read_images_are_told_where_these_are_trained(tmp_path: Path) -> None:
    parts = [{"type": "image", "image": "cat.png"}, {"type": "text", "text": "What is this?"}]
    records: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "A cat."}]},
        {"messages": [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "A."}], "images": ["cat.png"]},
        {"conversations": [{"from": "human", "value": "<video>?"}, {"from": "gpt", "value": "A."}], "video": "v.mp4"},
    ]
    for record in records:
        source = write_jsonl(tmp_path / "s.jsonl", [record])
        with pytest.raises(UserError, match=r"s\.jsonl:1: .*: train conversations with images or videos inside TRL's SFT"):
            prepare(str(source), tmp_path / "store", tokenizer="bytes")


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_templates_of_these_models_take_lists(tmp_path: Path, family: str) -> None:
    """Also a template that is beside the tokenizer alone, as LLaVA 1.5 has it."""
    checkpoint, record = save_checkpoint(tmp_path / "model", family), {"messages": chat("What?", "A cat.")}
    first = made(tmp_path, [record], tokenizer=checkpoint)
    template = (checkpoint / "chat_template.jinja").read_text()
    assert learnt(first).startswith("A cat.") and "What?" in whole(first, 0)
    (checkpoint / "chat_template.jinja").unlink()
    (checkpoint / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert whole(made(tmp_path, [record], tokenizer=checkpoint), 0) == whole(first, 0)


def test_texts_are_fine_tuned_and_exported_with_the_processor(tmp_path: Path) -> None:
    checkpoint, out = save_checkpoint(tmp_path / "model", "qwen3_vl"), tmp_path / "run"
    records = [{"messages": chat("What? " * number, "This.")} for number in range(1, 9)]
    source, options = write_jsonl(tmp_path / "chats.jsonl", records), ["--train.device", "cpu", "--log.tensorboard", "false"]
    assert main(["finetune", str(checkpoint), str(source), "--out", str(out), "--prepare-only", *options]) == 0
    printed, _ = launched.run("train", out / "finetune.yaml", "--train.steps=1", ranks=2)
    assert "load with transformers: AutoModelForImageTextToText.from_pretrained" in printed
    assert {file.name for file in (out / "export").iterdir()} == {file.name for file in checkpoint.iterdir()}
    trained, before = built(out / "export").state_dict(), built(checkpoint).state_dict()
    changed = {name for name, weight in trained.items() if not torch.equal(weight, before[name])}
    assert changed and all("language_model" in name or "lm_head" in name for name in changed)
    adapter = {"base_model_name_or_path": str(checkpoint), "task_type": "CAUSAL_LM"}
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(adapter))
    assert "PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(" in how_to_load(tmp_path / "adapter")
