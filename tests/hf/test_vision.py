"""Vision-language models in `longctx train`: texts train their language model as transformers' own
code does."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from longctx.cli import main
from longctx.config import load
from longctx.data.store.prepare import prepare
from longctx.errors import UserError
from longctx.hf.lora import find_targets
from longctx.hf.vision import (
    VISION_FAMILIES,
    ImagePlace,
    class_of,
    image_positions,
    text_model,
    tower_blocks,
    tower_sizes,
)
from longctx.own_files import LIST
from longctx.training.saved.export import how_to_load
from tests import launched, pretrained_cases
from tests.data_cases import learnt, made, whole, write_jsonl
from tests.family_cases import make_config
from tests.huggingface_cases import make_documents, unpacked
from tests.marks import slow_unless
from tests.pretrained_cases import Step, assert_step
from tests.vision_cases import CONFIGS, pixels, places_of, save_checkpoint, save_model
from tests.vision_trainer_cases import chat
from tests.workers import Workers


def built(folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()


def reference(folder: Path) -> Step:
    """Returns the loss over single documents of text, gradients and state of a model by
    transformers' own code."""
    model = built(folder)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    loss, _ = unpacked(model, make_documents())
    return (
        loss,
        {n: torch.zeros_like(w) if w.grad is None else w.grad for n, w in model.named_parameters()},
        state,
    )


@pytest.mark.parametrize(
    "family", slow_unless(lambda family: family in ("qwen3_vl", "gemma3"), VISION_FAMILIES)
)
def test_a_step_on_texts_is_that_of_single_documents(
    workers: Workers, tmp_path: Path, family: str
) -> None:
    folder = save_model(tmp_path / "model", family)
    assert_step(workers.run(pretrained_cases.step, 2, folder, []), reference(folder))


def test_pairs_of_frames_side_by_side_are_one_video() -> None:
    """Not an image before them, nor what follows a token of text."""
    asked: list[Any] = []

    def get_rope_index(tokens: torch.Tensor, *given: Any, **more: Any) -> Any:
        asked.extend([*given, more])
        return tokens.unsqueeze(0), None

    config = SimpleNamespace(vision_config=SimpleNamespace(temporal_patch_size=2))
    model: Any = SimpleNamespace(
        base_model=SimpleNamespace(get_rope_index=get_rope_index), config=config
    )
    places = [
        ImagePlace(0, 2, (1, 4, 2)),
        ImagePlace(2, 2, (1, 4, 2), fps=4.0),
        ImagePlace(4, 2, (1, 4, 2), fps=4.0),
        ImagePlace(7, 2, (1, 4, 2), fps=4.0),
    ]
    image_positions(model, 9, places)
    kinds, images, videos, more = asked
    assert kinds.tolist() == [[1, 1, 2, 2, 2, 2, 0, 2, 2]]
    assert images.tolist() == [[1, 4, 2]] and videos.tolist() == [[2, 4, 2], [1, 4, 2]]
    assert more["second_per_grid_ts"].tolist() == [0.5, 0.5]


TEXTS_ALONE = (
    "mistral3",
    "mistral4",
    "kimi_k25",
    "qwen3_vl_moe",
    "minimax_m3_vl",
    "muse_glimmer",
    "internvl",
)
TEXTS_ALONE += (
    "llava_next",
    "llava_onevision",
    "idefics3",
    "smolvlm",
    "aya_vision",
    "cohere2_vision",
    "lighton_ocr",
)
TEXTS_ALONE += ("qwen3_omni_moe_thinker",)
"""Model types whose texts are trained, and not their images."""


def save_any(folder: Path, kind: str, **changes: Any) -> Path:
    """Saves a tiny model of a type that reads images, with `changes` of its language model's
    config."""
    config = make_config(kind)
    for name, value in changes.items():
        setattr(config.get_text_config(), name, value)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "kind", slow_unless(lambda kind: kind in ("idefics3", "kimi_k25"), TEXTS_ALONE)
)
def test_texts_of_other_models_that_read_images_are_those_of_single_documents(
    workers: Workers, tmp_path: Path, kind: str
) -> None:
    folder = save_any(tmp_path / "model", kind)
    assert_step(workers.run(pretrained_cases.step, 2, folder, []), reference(folder))


@pytest.mark.parametrize("kind", slow_unless(lambda kind: kind == "smolvlm", TEXTS_ALONE))
def test_these_are_exported_with_their_encoders_as_they_were(
    tmp_path: Path, store: Path, kind: str
) -> None:
    """In the class that they came from; adapters are on the language model alone."""
    folder = save_any(tmp_path / "model", kind, vocab_size=300, max_position_embeddings=4096)
    settings = [
        f"--data.store={store}",
        f"--model.from_pretrained={folder}",
        f"--train.run_dir={tmp_path / 'run'}",
    ]
    settings += [
        "--train.steps=1",
        "--data.long_documents=split",
        "--batch.tokens_per_rank=512",
        "--batch.global_tokens=900",
    ]
    settings += [
        "--log.tensorboard=false",
        "--train.device=cpu",
        f"--checkpoint.export={tmp_path / 'out'}",
    ]
    printed, _ = launched.run("train", *settings, ranks=2)
    trained, before = built(tmp_path / "out"), built(folder)
    assert type(trained) is type(before) and f"{class_of(kind)}.from_pretrained" in printed
    found = text_model(before)
    inside = () if found is None else (f"{found[0]}.", "lm_head.")
    values = trained.state_dict()
    changed = {
        name for name, value in before.state_dict().items() if not torch.equal(value, values[name])
    }
    assert changed and all(name.startswith(inside or "") for name in changed)
    targets = find_targets(before, "all-linear")
    assert targets and all(name.startswith(inside or "") for name in targets)


def test_adapters_are_on_the_language_model(workers: Workers, tmp_path: Path) -> None:
    """With B = 0 the loss is that of the checkpoint."""
    folder = save_model(tmp_path / "model", "qwen3_vl")
    expected, *_ = reference(folder)
    for loss, gradients, _ in workers.run(pretrained_cases.step, 2, folder, ["lora.rank=4"]):
        assert loss == pytest.approx(expected, rel=1e-5)
        trained = {name for name, gradient in gradients.items() if gradient.any()}
        assert trained and all(
            ".language_model." in name and ".lora_B." in name for name in trained
        )
    twin = built(folder)
    assert all(".language_model." in name for name in find_targets(twin, "all-linear"))
    with pytest.raises(
        ValueError,
        match=r"no layer is called visual\.qkv: Qwen3VL.* has the linear layers down_proj",
    ):
        find_targets(twin, ["visual.qkv"])


def test_a_spec_has_all_parameters(tmp_path: Path) -> None:
    for family in VISION_FAMILIES:
        source = load(
            None, [f"model.from_pretrained={save_model(tmp_path / family, family)}"]
        ).model_source()
        with torch.device("meta"):
            model = source.build()
        # Of norms.
        assert (
            abs(source.spec.parameters - sum(weight.numel() for weight in model.parameters())) <= 64
        )
        tower = sum(
            weight.numel()
            for name, weight in model.named_parameters()
            if ".language_model." not in name
        )
        assert source.spec.tower_parameters == tower - (
            0 if source.spec.tie_word_embeddings else 96 * 32
        )
        assert len(model.tower) == len(tower_blocks(model.hf)) == 3 and not source.spec.tower_values


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "qwen3_vl"])
def test_values_that_an_encoder_keeps_are_those_that_torch_saves(
    tmp_path: Path, family: str
) -> None:
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
        {
            "messages": [
                {"role": "user", "content": parts},
                {"role": "assistant", "content": "A cat."},
            ]
        },
        {
            "messages": [
                {"role": "user", "content": "<image>?"},
                {"role": "assistant", "content": "A."},
            ],
            "images": ["cat.png"],
        },
        {
            "conversations": [
                {"from": "human", "value": "<video>?"},
                {"from": "gpt", "value": "A."},
            ],
            "video": "v.mp4",
        },
    ]
    for record in records:
        source = write_jsonl(tmp_path / "s.jsonl", [record])
        with pytest.raises(
            UserError,
            match=r"s\.jsonl:1: .*: train conversations with images or videos inside TRL's SFT",
        ):
            prepare(str(source), tmp_path / "store", tokenizer="bytes")


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_templates_of_these_models_take_lists(tmp_path: Path, family: str) -> None:
    """Also a template that is beside the tokenizer alone, as LLaVA 1.5 has it."""
    checkpoint, record = (
        save_checkpoint(tmp_path / "model", family),
        {"messages": chat("What?", "A cat.")},
    )
    first = made(tmp_path, [record], tokenizer=checkpoint)
    template = (checkpoint / "chat_template.jinja").read_text()
    assert learnt(first).startswith("A cat.") and "What?" in whole(first, 0)
    (checkpoint / "chat_template.jinja").unlink()
    (checkpoint / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert whole(made(tmp_path, [record], tokenizer=checkpoint), 0) == whole(first, 0)


def test_texts_are_fine_tuned_and_exported_with_the_processor(tmp_path: Path) -> None:
    checkpoint, out = save_checkpoint(tmp_path / "model", "qwen3_vl"), tmp_path / "run"
    records = [{"messages": chat("What? " * number, "This.")} for number in range(1, 9)]
    source, options = (
        write_jsonl(tmp_path / "chats.jsonl", records),
        ["--train.device", "cpu", "--log.tensorboard", "false"],
    )
    assert (
        main(
            [
                "finetune",
                str(checkpoint),
                str(source),
                "--out",
                str(out),
                "--prepare-only",
                *options,
            ]
        )
        == 0
    )
    printed, _ = launched.run("train", out / "finetune.yaml", "--train.steps=1", ranks=2)
    assert "load with transformers: AutoModelForImageTextToText.from_pretrained" in printed
    assert {file.name for file in (out / "export").iterdir()} == {
        LIST,
        *(file.name for file in checkpoint.iterdir()),
    }
    trained, before = built(out / "export").state_dict(), built(checkpoint).state_dict()
    changed = {name for name, weight in trained.items() if not torch.equal(weight, before[name])}
    assert changed and all("language_model" in name or "lm_head" in name for name in changed)
    adapter = {"base_model_name_or_path": str(checkpoint), "task_type": "CAUSAL_LM"}
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(adapter))
    assert "PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(" in how_to_load(
        tmp_path / "adapter"
    )
