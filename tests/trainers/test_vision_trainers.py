"""Images in trainers of transformers and TRL: what one plain process computes from documents one by
one."""

import io
import re
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import ExifTags, Image

from longctx.hf.vision import VISION_FAMILIES, ImagePlace, weights_of_images
from longctx.planning.planners.planner import make_plan
from longctx.trainers import TrainerError, dynamic_context_parallel, restore
from longctx.trainers.documents import DOCUMENTS_IN_ROWS, Document, cut_rows
from longctx.trainers.exchange import DocumentInfo
from longctx.trainers.families import AttentionOptions, Vision
from longctx.trainers.images import DocumentImages, exchange_pixels, images_of_rows
from longctx.trainers.step import Planning, StepExchange
from tests import launched, video_cases, vision_cases
from tests.data_cases import placed_plan, write_jsonl
from tests.marks import slow_unless
from tests.planning.test_vision_work import FREE, imbalance, operations
from tests.trainer_cases import PROFILE
from tests.trainers.test_trainers import assert_equal
from tests.vision_trainer_cases import (
    MANY_IMAGES,
    alone,
    chat,
    finetune,
    picture,
    plan_with_images,
    prefer,
    sft,
    train,
)
from tests.workers import Workers


def assert_step(runs: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Loss of a step, and gradients of all ranks."""
    assert runs[0]["log"][0]["loss"] == pytest.approx(expected["log"][0]["loss"], rel=1e-5)
    norm = sum(float((each.double() ** 2).sum()) for each in expected["gradients"].values()) ** 0.5
    for run in runs:
        assert run["gradients"].keys() == expected["gradients"].keys()
        for name, gradient in expected["gradients"].items():
            error = float((run["gradients"][name] - gradient).norm())
            assert error <= 1e-4 * float(gradient.norm()) + 1e-6 * norm, (
                name,
                error,
                float(gradient.norm()),
            )


QUICK = {("qwen2_5_vl", 1), ("qwen3_vl", 3), ("gemma3", 3), ("llava", 2)}


@pytest.mark.parametrize(
    ("family", "ranks"),
    slow_unless(lambda *case: case in QUICK, product(VISION_FAMILIES, (1, 2, 3))),
)
def test_a_step_is_that_of_single_documents(
    workers: Workers, tmp_path: Path, family: str, ranks: int
) -> None:
    model = vision_cases.save_model(tmp_path / "model", family)
    (expected,) = workers.run(train, 1, tmp_path / "plain", model, family, False, {})
    runs = workers.run(train, ranks, tmp_path / "ours", model, family, True, {})
    assert_step(runs, expected)


@pytest.mark.parametrize(
    ("family", "ranks"),
    slow_unless(lambda *case: case == ("qwen2_5_vl", 3), product(video_cases.FAMILIES, (1, 2, 3))),
)
def test_a_step_with_videos_is_that_of_single_documents(
    workers: Workers, tmp_path: Path, family: str, ranks: int
) -> None:
    """Images and videos in a document, and documents without, cut by the edges of rings."""
    model = vision_cases.save_model(tmp_path / "model", family)
    (expected,) = workers.run(train, 1, tmp_path / "plain", model, family, False, {"videos": True})
    assert_step(
        workers.run(train, ranks, tmp_path / "ours", model, family, True, {"videos": True}),
        expected,
    )


WRAPPED = {
    "fsdp_version": 2,
    "transformer_layer_cls_to_wrap": ["Qwen3VLTextDecoderLayer", "Qwen3VLVisionBlock"],
}
RECOMPUTED = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "images and videos, fully sharded": (
        "qwen3_vl",
        {
            "videos": True,
            "fsdp": "full_shard auto_wrap",
            "fsdp_config": WRAPPED,
            "gradient_checkpointing": True,
        },
    ),
    "first layers frozen": ("qwen3_vl", {"frozen": r"language_model\.(embed|layers\.0)"}),
    "recomputed": ("gemma3", {**RECOMPUTED, "ddp_find_unused_parameters": True}),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_step_is_the_same_in_every_way(workers: Workers, tmp_path: Path, way: str) -> None:
    family, options = WAYS[way]
    model = vision_cases.save_model(tmp_path / "model", family)
    plain = {name: options[name] for name in ("frozen", "videos") if name in options}
    (expected,) = workers.run(train, 1, tmp_path / "plain", model, family, False, plain)
    assert_step(workers.run(train, 3, tmp_path / "ours", model, family, True, options), expected)


SFT: dict[str, tuple[str, int, dict[str, Any]]] = {
    "images": ("llava", 2, {}),
    "adapters": ("gemma3", 2, {"lora": r".*language_model.*\.(q_proj|v_proj)"}),
    "videos": ("qwen2_5_vl", 3, {"videos": True}),
    "adapters on the encoder": ("qwen2_vl", 2, {"lora": "all-linear"}),
}


@pytest.mark.parametrize("case", slow_unless(lambda case: case == "images", SFT))
def test_sft_with_the_collator_of_trl(workers: Workers, tmp_path: Path, case: str) -> None:
    """An epoch, whose last step is not full, and an evaluation; logs, metrics and weights."""
    family, ranks, options = SFT[case]
    model = vision_cases.save_checkpoint(tmp_path / "model", family)
    (expected,) = workers.run(finetune, 1, tmp_path / "plain", model, family, False, options)
    runs = workers.run(finetune, ranks, tmp_path / "ours", model, family, True, options)
    assert_equal(runs, expected)
    assert max(runs[0]["degrees"]) >= 2


LORA = {"lora": r".*language_model.*\.(q_proj|v_proj)"}
SEQUENCES: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "DPO": ("DPO", "qwen2_5_vl", 3, {}),
    "DPO with adapters": ("DPO", "gemma3", 2, LORA),
    "DPO, of which a rank has only texts": ("DPO", "gemma3", 3, {"texts": True}),
    "DPO on one": ("DPO", "llava", 1, {}),
    "KTO, of which ranks have only texts": ("KTO", "qwen2_vl", 3, {"texts": True}),
    "GRPO with KL": ("GRPO", "llava", 2, {"beta": 0.04}),
    "GRPO": ("GRPO", "qwen3_vl", 3, {}),
    "RLOO": ("RLOO", "qwen2_5_vl", 2, {}),
}


@pytest.mark.parametrize(
    "case",
    slow_unless(lambda case: case == "GRPO with KL", SEQUENCES),
)
def test_trainers_that_need_sequences(workers: Workers, tmp_path: Path, case: str) -> None:
    """Logs, completions included, and weights are those of plain training on as many ranks; rows
    without images are merged."""
    kind, family, ranks, options = SEQUENCES[case]
    model = vision_cases.save_checkpoint(tmp_path / "model", family)
    theirs = workers.run(prefer, ranks, tmp_path / "plain", model, family, kind, False, options)
    ours = workers.run(prefer, ranks, tmp_path / "ours", model, family, kind, True, options)
    assert max(ours[0]["degrees"]) >= min(ranks, 2) and (ours[0]["trees"] > 0) == (
        "texts" in options
    )
    for run, expected in zip(ours, theirs, strict=True):
        for mine, entry in zip(run["log"][:-1], expected["log"][:-1], strict=True):
            assert mine.keys() - {"tokens_after_merging"} == entry.keys()
            for name in (
                name for name in entry if not name.endswith(("time", "per_second", "flos"))
            ):
                assert mine[name] == pytest.approx(entry[name], rel=1e-5, abs=1e-5), name
        assert all(
            torch.allclose(run["weights"][name], each, rtol=0, atol=1e-6)
            for name, each in expected["weights"].items()
        )


MARKS = [("llava", "<image>"), ("qwen2_vl", "<|image_pad|>"), ("gemma3", "<start_of_image>")]


@pytest.mark.parametrize(
    ("family", "mark"), slow_unless(lambda family, _: family == "llava", MARKS)
)
def test_images_that_a_camera_turned_and_marks_in_texts(
    tmp_path: Path, family: str, mark: str
) -> None:
    """An image is upright by its EXIF orientation, as in plain TRL; the mark of an image in a text
    needs one too."""
    model = vision_cases.save_checkpoint(tmp_path / "model", family)
    exif, files = Image.Exif(), (io.BytesIO(), io.BytesIO())
    exif[ExifTags.Base.Orientation] = 6
    picture(1, 40, 24).save(files[0], "PNG")
    picture(1, 40, 24).transpose(Image.Transpose.ROTATE_90).save(files[1], "PNG", exif=exif)
    upright, turned = (file.getvalue() for file in files)
    losses = []
    for image, dynamic in ((turned, True), (turned, False), (upright, False)):
        trainer = sft(tmp_path, model, family, [([image], "What?"), ([], "And?")], dynamic)
        batch = trainer.data_collator([*trainer.train_dataset])
        losses.append(trainer.prediction_step(trainer.model, batch, True)[0].item())
    assert losses == pytest.approx(losses[:1] * 3, abs=1e-5)
    for images in ([], [upright]):
        trainer = sft(tmp_path, model, family, [(images, f"What is {mark}?")], True)
        with pytest.raises(ValueError, match=f"Found (total )?[12] {re.escape(mark)} tokens"):
            trainer.train()


@pytest.mark.parametrize(
    ("freeze", "share"),
    slow_unless(lambda freeze, _: freeze is None, [(None, 1.0), (".visual.", 0.0)]),
)
def test_a_step_is_balanced_by_the_work_of_images(
    workers: Workers, tmp_path: Path, freeze: str | None, share: float
) -> None:
    """The busiest rank computes 1.00 times the mean instead of 1.37 times, or 1.25 times if the
    encoder is frozen."""
    large = {**vision_cases.CONFIGS["qwen2_5_vl"]["vision_config"], "depth": 16}
    model = vision_cases.save_model(tmp_path / "model", "qwen2_5_vl", vision_config=large)
    plans = workers.run(plan_with_images, 3, tmp_path / "run", model, freeze)
    plan, tower = plans[0]
    assert len({plan.hash for plan, _ in plans}) == 1
    document = plan.lengths.index(max(plan.lengths))
    images = {document: [ImagePlace(start, 80, (1, 16, 20)) for start in MANY_IMAGES]}
    without = make_plan(plan.lengths, ranks=3, tokens_per_rank=4000, profile=FREE)
    assert (
        imbalance(operations(plan, images, tower))
        < 1.01
        < 1.2
        < imbalance(operations(without, images, tower))
    )
    assert tower.trained == share


# --- one process, without a group


def attached(folder: Path, family: str, **changed: Any) -> Any:
    """Returns a trainer with dynamic context parallelism; `changed` are fields of its batches."""
    ours = alone(folder, family)
    collate = ours.data_collator
    ours.data_collator = lambda rows: {**collate(rows), **changed}
    dynamic_context_parallel(ours, tokens_per_rank=90, profile=PROFILE)
    return ours


def test_pixels_that_are_not_those_of_the_tokens_are_refused(tmp_path: Path) -> None:
    more = dict(vision_cases.pixels("qwen2_vl", [(0, 0), (0, 1), (0, 2), (3, 0), (4, 0), (4, 0)]))
    fewer = dict(vision_cases.pixels("qwen2_vl", [(0, 0), (0, 1)]))
    packed = torch.zeros(6, 90, dtype=torch.int64)
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("qwen2_vl", more, "more images or videos than its tokens need: do not cut documents"),
        (
            "qwen2_vl",
            fewer,
            "tokens of images or videos in row .* are not those of its pixels: do not cut "
            "documents",
        ),
        (
            "gemma3",
            {"token_type_ids": None},
            "returns no token_type_ids, by which Gemma3ForConditionalGeneration lets",
        ),
        (
            "llava",
            {"position_ids": packed},
            "images or videos and packed rows: leave out packing",
        ),
        (
            "llava",
            {"pixel_values_videos": torch.zeros(1)},
            "returns pixel_values_videos, which splitting documents would lose",
        ),
    ]
    for family, changed, message in cases:
        with pytest.raises(TrainerError, match=message):
            attached(tmp_path / family, family, **changed).train()


def test_images_side_by_side(tmp_path: Path) -> None:
    """Of LLaVA, whose images all have as many tokens; cut ones are refused."""
    ours = alone(tmp_path, "llava")
    plain, ids = ours.model, torch.arange(50)[None] % 80
    ids[:, 3:35] = vision_cases.IMAGE
    batch = {"input_ids": ids, "labels": torch.where(ids == vision_cases.IMAGE, -100, ids)}
    batch |= vision_cases.pixels("llava", [(0, 0), (0, 1)])
    expected = plain(**batch).loss.item()
    dynamic_context_parallel(ours, tokens_per_rank=90, profile=PROFILE)
    assert ours.prediction_step(ours.model, batch, True)[0].item() == pytest.approx(
        expected, rel=1e-6
    )
    batch["input_ids"][:, 33:35] = 5
    with pytest.raises(
        TrainerError,
        match="tokens of images or videos in row 0 of a batch are not those of its pixels",
    ):
        ours.prediction_step(ours.model, batch, True)


def reads(family: str, tokens: list[torch.Tensor], **changed: Any) -> list[DocumentImages | None]:
    """Returns the images of rows of `video_cases`; `changed` are fields of their batch."""
    sizes = SimpleNamespace(spatial_merge_size=2, temporal_patch_size=2)
    config = SimpleNamespace(
        model_type=family, image_token_id=90, video_token_id=91, vision_config=sizes
    )
    batch = {**video_cases.of_processor(family, range(len(tokens))), **changed}
    return images_of_rows(SimpleNamespace(config=config), batch, [ids.numpy() for ids in tokens])


@pytest.mark.parametrize("family", video_cases.FAMILIES)
def test_a_pair_of_frames_is_an_image(family: str) -> None:
    found = reads(family, video_cases.documents(family))
    expected, numbers = video_cases.places_of(family), range(len(found))
    fps = video_cases.FPS if family == "qwen2_5_vl" else 2.0  # of the others it does not matter
    for number, images in zip(numbers, found, strict=True):
        places, ours = expected.get(number, ()), images.places if images else ()
        assert [place[:3] for place in ours] == [place[:3] for place in places]
        assert [place.fps for place in ours] == pytest.approx(
            [fps * (place.fps > 0) for place in places], rel=1e-6
        )
        for image, pixels in enumerate(images.pixels if images else ()):
            assert torch.equal(
                pixels, video_cases.pixels(family, [(number, image)])["pixel_values"]
            )


def test_videos_that_are_not_those_of_the_tokens_are_refused() -> None:
    of, cut = video_cases.of_processor("qwen2_vl", range(6)), video_cases.documents("qwen2_vl")
    cut[0] = cut[0][:40]
    pixels, fewer = of["pixel_values_videos"], of["video_grid_thw"].clone()
    fewer[-1, 0] -= 1
    whole, apart = (video_cases.documents(family) for family in ("qwen2_vl", "qwen3_vl"))
    wrong = "tokens of images or videos in row . of a batch are not those of its pixels"
    cases: list[tuple[str, list[torch.Tensor], dict[str, Any], str]] = [
        ("qwen2_vl", cut, {}, wrong),
        ("qwen2_vl", whole, {"pixel_values_videos": pixels[:-16], "video_grid_thw": fewer}, wrong),
        ("qwen2_vl", whole[:4], of, "more images or videos than its tokens need"),
        ("qwen2_vl", apart, {}, wrong),
        ("qwen3_vl", whole, {}, wrong),
        ("qwen2_vl", whole, {"pixel_values_videos": None}, wrong),
        (
            "qwen2_vl",
            whole,
            {"pixel_values_videos": pixels[1:]},
            "351 patches have grids of 352: return all",
        ),
    ]
    for family, tokens, changed, message in cases:
        with pytest.raises(TrainerError, match=message):
            reads(family, tokens, **changed)
    (images, *_) = reads("qwen2_vl", whole, pixel_values_videos=pixels.half())
    with pytest.raises(
        TrainerError,
        match=r"\[96\] of torch.float32 and \[96\] of torch.float16: .*one image processor",
    ):
        assert images and images.kind


@pytest.mark.parametrize(
    "packing",
    [
        {"position_ids": torch.arange(4)[None]},
        {DOCUMENTS_IN_ROWS: torch.ones(1, dtype=torch.int64)},
    ],
    ids=["positions", "joined examples"],
)
def test_packed_rows_with_images_are_refused(packing: dict[str, torch.Tensor]) -> None:
    config = SimpleNamespace(model_type="llava", image_token_id=90)
    ids = torch.tensor([[90, 1, 2, 3]])
    batch = {"input_ids": ids, "labels": ids, "pixel_values": torch.zeros(1, 3, 4, 4)}
    model = torch.nn.Module()
    vars(model)["config"] = config
    family = Vision(model, None)
    with pytest.raises(TrainerError, match="images or videos and packed rows: leave out packing"):
        family.rows_of(batch | packing)


def test_the_loss_of_routers_beside_images_is_refused(tmp_path: Path) -> None:
    ours = alone(tmp_path, "llava")
    ours.aux_loss_enabled = True  # as in TRL's trainers of mixtures
    with pytest.raises(TrainerError, match="loss of routers is not computed beside images"):
        dynamic_context_parallel(ours, tokens_per_rank=90, profile=PROFILE)


def test_text_models_refuse_images() -> None:
    with pytest.raises(
        TrainerError,
        match=r"pixel_values, which splitting documents would lose.*images only for llava",
    ):
        cut_rows(
            {
                "input_ids": torch.zeros(1, 2),
                "labels": torch.zeros(1, 2),
                "pixel_values": torch.zeros(1, 3, 2, 2),
            }
        )


def pixels_of_two_kinds_on_a_rank() -> str:
    """Returns the error that this rank raises, if the first one has drawn such a document."""
    ids = np.arange(5)
    images = None
    if dist.get_rank() == 0:
        places = (ImagePlace(0, 1, (1, 1, 1)), ImagePlace(2, 1, (1, 1, 1)))
        images = DocumentImages(places, (torch.zeros(1, 3, 16, 16), torch.zeros(1, 3, 8, 8)))
    world = dist.group.WORLD
    attention = AttentionOptions(torch.device("cpu"), group=world)
    exchange = StepExchange(Planning(PROFILE, 200), attention, ids_group=world)
    with pytest.raises(TrainerError) as raised:
        exchange.plan_and_exchange([[Document(ids, ids, images=images)]])
    exchange.undo.close()
    return str(raised.value)


def test_pixels_of_two_kinds_on_a_rank_end_all(workers: Workers) -> None:
    first, second = workers.run(pixels_of_two_kinds_on_a_rank, 2, timeout_s=60.0)
    assert "by one image processor" in first
    assert second.startswith("rank 0 cannot train: ") and "by one image processor" in second


def test_pixels_of_two_kinds_are_refused() -> None:
    kinds = [torch.zeros(0, 3, 16, 16), torch.zeros(0, 3, 8, 8)]
    known = [
        DocumentInfo(0, number, 20, 1, None, vision_cases.PLACES[4], kind)
        for number, kind in enumerate(kinds)
    ]
    with pytest.raises(
        TrainerError,
        match=r"\[3, 16, 16\] of torch.float32 and \[3, 8, 8\].*by one image processor",
    ):
        exchange_pixels(None, placed_plan([20, 20], 1, []), known, {}, 0, None)


def test_dropout_of_the_encoder_is_refused(tmp_path: Path) -> None:
    ours = alone(tmp_path, "llava")
    ours.model.config.vision_config.attention_dropout = 0.1
    with pytest.raises(TrainerError, match="attention_dropout is"):
        dynamic_context_parallel(ours, tokens_per_rank=90, profile=PROFILE)


def test_means_of_batches_become_the_mean_of_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = alone(tmp_path, "llava")
    # As in most of these models.
    ours.model.accepts_loss_kwargs = ours.model_accepts_loss_kwargs = False
    dynamic_context_parallel(ours, tokens_per_rank=90, profile=PROFILE)
    said = (
        "the mean over the tokens of a step; that of LlavaForConditionalGeneration would be a "
        "mean of means of batches"
    )
    assert said in capsys.readouterr().out and ours.model_accepts_loss_kwargs


def test_an_encoder_without_gradients_is_refused_if_ddp_waits_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = alone(tmp_path, "llava", **RECOMPUTED)
    monkeypatch.setattr(type(ours.args), "world_size", 2)
    with pytest.raises(
        TrainerError, match="ddp_find_unused_parameters is off, but documents without images"
    ):
        dynamic_context_parallel(ours, tokens_per_rank=90, profile=PROFILE)


def test_the_model_generates_from_images_with_its_own_attention(tmp_path: Path) -> None:
    """Also between steps, after which the encoder has its own attention again."""
    ours = alone(tmp_path, "gemma3", max_steps=2, learning_rate=0.0)
    ids, model = vision_cases.documents("gemma3")[4][None, :30], ours.model
    inputs = {
        "input_ids": ids,
        "token_type_ids": (ids == 90).int(),
        **vision_cases.pixels("gemma3", [(4, 0)]),
    }
    expected = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    forward = model.forward
    dynamic_context_parallel(ours, tokens_per_rank=90, profile=PROFILE)
    assert torch.equal(model.generate(**inputs, max_new_tokens=4, do_sample=False), expected)
    ours.train()
    assert torch.equal(model.generate(**inputs, max_new_tokens=4, do_sample=False), expected)
    restore(ours)
    assert model.forward == forward and model.config.vision_config._attn_implementation == "sdpa"
    assert torch.equal(model.generate(**inputs, max_new_tokens=4, do_sample=False), expected)


def test_memory_counts_the_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(
        "longctx.trainers.dynamic.Workload.tokens_that_fit",
        lambda work, *_, **__: seen.append(work.spec) or 1024,
    )
    ours = alone(tmp_path, "llava")
    dynamic_context_parallel(ours, profile=PROFILE)
    assert (
        seen[0].tower_parameters
        == sum(weight.numel() for weight in weights_of_images(ours.model))
        > 0
    )
    restore(ours)


@pytest.mark.slow
def test_the_program_of_the_page_runs(tmp_path: Path, repository: Path) -> None:
    page = (repository / "docs" / "vision.md").read_text("utf-8")
    (program,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    model = vision_cases.save_checkpoint(tmp_path / "model", "llava")
    for number in range(4):
        picture(number, 20, 24 + number).save(tmp_path / f"{number}.png")
    records = [
        {"messages": chat("What? " * (1 + n)), "images": [str(tmp_path / f"{n}.png")]}
        for n in range(4)
    ]
    write_jsonl(tmp_path / "chats.jsonl", records)
    settings = (
        'SFTConfig("run", max_length=None, bf16=False, use_cpu=True, max_steps=2, report_to="none")'
    )
    changes = {
        "Qwen/Qwen2.5-VL-3B-Instruct": str(model),
        "chats.jsonl": str(tmp_path / "chats.jsonl"),
    }
    changes |= {
        'SFTConfig("run", max_length=None)': settings,
        '"run"': f'"{tmp_path / "run"}"',
        "bfloat16": "float32",
    }
    for old, new in changes.items():
        assert old in program
        program = program.replace(old, new)
    (tmp_path / "program.py").write_text(program)
    printed, _ = launched.run(tmp_path / "program.py", ranks=2)
    assert "a document is split over up to 2 ranks" in printed and "'train_loss'" in printed
