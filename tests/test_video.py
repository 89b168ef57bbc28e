"""Videos: loss and gradients of transformers' own code, and tokens and pixels of the checkpoint's own processor."""

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.nn import functional as F
from transformers import AutoModelForImageTextToText

from longctx.data.image_processor import Frames, pictures_of
from longctx.data.image_sources import ImagePlace
from longctx.data.prepare import prepare
from longctx.data.store import Store
from longctx.data.video_processor import VideoProcessor
from longctx.errors import UserError
from longctx.model.vision import image_positions
from tests import video_cases
from tests.image_cases import chat, data_url, make_store, picture, train
from tests.marks import slow_unless
from tests.pretrained_cases import assert_step
from tests.vision_cases import save_checkpoint, save_model
from tests.workers import Workers

RANKS = [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("family", video_cases.FAMILIES)
def test_a_step_is_that_of_single_documents(workers: Workers, tmp_path: Path, family: str, ranks: int) -> None:
    folder = save_model(tmp_path / "model", family)
    assert_step(workers.run(video_cases.video_step, ranks, folder, family, []), video_cases.reference(folder, family))


@pytest.mark.parametrize("family", slow_unless(lambda family: family == "qwen2_5_vl", video_cases.FAMILIES))
def test_a_pixel_reaches_its_own_document_only(workers: Workers, tmp_path: Path, family: str) -> None:
    folder = save_model(tmp_path / "model", family)
    before, after = (workers.run(video_cases.row_losses, 2, folder, family, spoiled) for spoiled in (None, (0, 2)))
    first = video_cases.places_of(family)[0][2].start
    for rank in range(2):
        for document, position, one, other in zip(*before[rank][:2], before[rank][2], after[rank][2], strict=True):
            if document or position < first - 1:
                assert one == other, (document, position)
    assert any(one != other for rank in range(2) for one, other in zip(before[rank][2], after[rank][2], strict=True))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {family: save_checkpoint(folder / family, family) for family in video_cases.FAMILIES}


def frames(count: int, width: int, height: int) -> list[bytes]:
    return [picture(50 + number, width, height) for number in range(count)]


def record(*videos: dict[str, Any]) -> dict[str, Any]:
    """Returns a conversation with videos, between which is an image."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": "Look: "}]
    for video in videos:
        parts += [{"type": "video", **video}, {"type": "image", "image": data_url(CAT)}]
    return {"messages": chat([*parts, {"type": "text", "text": "What happens?"}])}


CAT = picture(1, 40, 24)
SHORT = {"video": [*map(data_url, frames(5, 24, 16))], "fps": 2}
LONG = {"video": [*map(data_url, frames(4, 50, 30))], "fps": 0.5}


@pytest.mark.parametrize("family", video_cases.FAMILIES)
def test_tokens_and_pixels_of_frames(checkpoints: dict[str, Path], tmp_path: Path, family: str) -> None:
    """A frame has the patches that it has as an image, each in its own turn; the last one of an odd number is repeated."""
    store = make_store(tmp_path, checkpoints[family], record(SHORT))
    text = store.tokenizer.decode(store.tokens(0, 0, int(store.lengths[0]))[0])
    pad = 6 * "<|video_pad|>"
    if family == "qwen3_vl":
        shown = "".join(f"<{second} seconds><|vision_start|>{pad}<|vision_end|>" for second in ("0.2", "1.2", "2.0"))
    else:
        shown = 3 * pad
    assert f"Look: <|vision_start|>{shown}<|vision_end|><|vision_start|><|image_pad|>" in text
    places = [ImagePlace.of(numbers, k) for k, numbers in enumerate(store.image_places(0))]
    assert [place.files for place in places] == [(0, 1), (2, 3), (4,), (5,)] and [p.fps for p in places] == [2, 2, 2, 0]
    assert [store.image(0, k) for k in range(6)] == [*frames(5, 24, 16), CAT]
    pictures = pictures_of(store.image_folder)
    given = [Frames([store.image(0, k) for k in place.files], place.grid) for place in places[:3]]
    found = pictures.pixels([given[2], CAT, given[0]])
    assert found["image_grid_thw"].tolist() == [[1, 4, 6], [1, 6, 10], [1, 4, 6]]
    last, cat, first = found["pixel_values"].split([24, 60, 24])
    assert torch.equal(cat, pictures.pixels([CAT])["pixel_values"])
    for part, shown_frames in ((first, (0, 1)), (last, (4, 4))):
        for turn, frame in enumerate(shown_frames):
            alone = pictures.pixels([frames(5, 24, 16)[frame]])["pixel_values"]
            torch.testing.assert_close(part.view(24, 3, 2, 16)[:, :, turn], alone.view(24, 3, 2, 16)[:, :, turn])


@pytest.mark.parametrize("family", video_cases.FAMILIES)
def test_tokens_and_pixels_are_those_of_the_processor(checkpoints: dict[str, Path], tmp_path: Path, family: str) -> None:
    """Also of frames that are resized, exactly; the processor needs torchvision."""
    pytest.importorskip("torchvision")
    import transformers
    from transformers import AutoImageProcessor, AutoTokenizer, AutoVideoProcessor

    given = record(SHORT, LONG)
    store = make_store(tmp_path, checkpoints[family], given)
    name = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[family]
    tokenizer = AutoTokenizer.from_pretrained(checkpoints[family])
    parts = AutoImageProcessor.from_pretrained(checkpoints[family], backend="pil"), tokenizer
    own = getattr(transformers, f"{name}Processor")(
        *parts, AutoVideoProcessor.from_pretrained(checkpoints[family]), chat_template=tokenizer.chat_template
    )
    opened = [[Image.open(io.BytesIO(frame)) for frame in each] for each in (frames(5, 24, 16), frames(4, 50, 30))]
    expected = own(
        text=[own.apply_chat_template(given["messages"], tokenize=False)],
        images=[Image.open(io.BytesIO(CAT))] * 2,
        videos=opened,
        video_metadata=[
            {"fps": video["fps"], "total_num_frames": len(video["video"]), "frames_indices": list(range(len(video["video"])))}
            for video in (SHORT, LONG)
        ],
        do_sample_frames=False,
        return_tensors="pt",
    )
    length = int(store.lengths[0])
    assert store.tokens(0, 0, length)[0].tolist()[:-1] == expected["input_ids"][0].tolist()[: length - 1]
    places = [ImagePlace.of(numbers, k) for k, numbers in enumerate(store.image_places(0))]
    videos = [Frames([store.image(0, k) for k in place.files], place.grid) for place in places if place.fps]
    found = pictures_of(store.image_folder).pixels(videos)
    assert torch.equal(found["pixel_values"], expected["pixel_values_videos"])
    model = AutoModelForImageTextToText.from_pretrained(checkpoints[family])
    options = {"second_per_grid_ts": expected["second_per_grid_ts"]} if family == "qwen2_5_vl" else {}
    kinds, grids = expected["mm_token_type_ids"], (expected["image_grid_thw"], expected["video_grid_thw"])
    positions, _ = model.base_model.get_rope_index(expected["input_ids"], kinds, *grids, **options)
    ours = image_positions(model, length, places)
    assert ours is not None and torch.equal(ours[:, : length - 1], positions[:, 0, : length - 1])


def own_losses(folder: Path, store: Store, family: str) -> list[float]:
    """Returns the sum of the losses of every document, with at most one video, alone by transformers' own code."""
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    config, pictures, losses = model.config, pictures_of(store.image_folder), []
    for document in range(len(store)):
        tokens, label = (torch.from_numpy(part) for part in store.read(document, 0, int(store.lengths[document])))
        places = [ImagePlace.of(numbers, k) for k, numbers in enumerate(store.image_places(document))]
        videos = [Frames([store.image(document, k) for k in place.files], place.grid) for place in places if place.fps]
        images = [store.image(document, place.files[0]) for place in places if not place.fps]
        inputs: dict[str, Any] = {"input_ids": tokens[None], **(pictures.pixels(images) if images else {})}
        if videos:
            inputs["pixel_values_videos"] = pictures.pixels(videos)["pixel_values"]
            inputs["video_grid_thw"] = torch.tensor([[len(videos), *videos[0].grid[1:]]])
            if family == "qwen2_5_vl":
                inputs["second_per_grid_ts"] = torch.tensor([2 / next(place.fps for place in places if place.fps)])
        if places:
            kinds = (tokens == config.image_token_id).int() + 2 * (tokens == config.video_token_id).int()
            inputs["mm_token_type_ids"] = kinds[None]
        with torch.no_grad():
            losses.append(F.cross_entropy(model(**inputs).logits[0], label, reduction="sum").item())
    return losses


@pytest.mark.parametrize("family", slow_unless(lambda family: family == "qwen2_5_vl", video_cases.FAMILIES))
def test_a_run_has_the_losses_of_single_documents(
    workers: Workers, checkpoints: dict[str, Path], tmp_path: Path, family: str
) -> None:
    """Videos beside the messages or in them, images and texts; each document is split over both ranks."""
    (tmp_path / "model").symlink_to(checkpoints[family])
    urls = [*map(data_url, frames(6, 32, 32))]
    records = [
        {"messages": chat("<video>What happens?"), "videos": [{"video": urls, "fps": 1.5}]},
        {"messages": chat("<image>Then <video>?", "This. " * 5), "videos": [urls[:3]], "images": [urls[0]], "fps": 4},
        {"messages": chat("No video.")},
        {"messages": chat("<image>?"), "images": [urls[1]]},
        record(LONG),
    ]
    store = make_store(tmp_path, checkpoints[family], *records)
    assert store.manifest is not None and store.manifest.images == 6 + 4 + 1 + 5
    expected = sum(own_losses(checkpoints[family], store, family)) / store.trained_tokens.sum()
    settings = [f"batch.global_tokens={int(store.lengths.sum())}", "batch.tokens_per_rank=400"]
    for found, _ in workers.run(train, 2, tmp_path, tmp_path / "run", settings, 1):
        assert found == pytest.approx([expected], rel=1e-5)


FRAME = data_url(CAT)
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("qwen2_vl", {"video": "a.gif"}, "a video is 'a.gif': give a list of frames"),
    ("qwen2_vl", {"video": []}, r"a video is \[\]: give a list of frames"),
    ("qwen2_vl", {"video": [FRAME, "a.mp4"], "fps": 1}, "give a list of frames"),
    ("qwen2_vl", {"video": "a.mp4", "fps": -1}, "has fps -1: give the number of frames per second, above 0"),
    ("qwen2_vl", {"video": "a.mp4"}, r"image a\.mp4 is not in"),
    ("qwen2_vl", {"video": [FRAME]}, "a video of 1 frames has fps 0: give the number of frames per second"),
    ("qwen2_vl", {"video": [FRAME, "b.png"], "fps": 1}, r"image b\.png is not in"),
    ("qwen2_vl", {"video": [FRAME, data_url(picture(1, 24, 24))], "fps": 1}, "frames of several sizes"),
    ("qwen2_vl", {}, "there are 0 videos, but the messages have 1 places"),
    ("qwen3_vl", {"video": [FRAME], "fps": 1}, "a video of 1 frames of 40 × 24 pixels is refused: t:1 must be larger"),
    ("llava", {"video": [FRAME], "fps": 1}, "LlavaProcessor reads no videos, only Qwen2VLProcessor, Qwen2_5_VLProcessor"),
    ("gemma3", {"video": [FRAME], "fps": 1}, "Gemma3Processor reads no videos"),
]


@pytest.mark.parametrize(("family", "video", "says"), REFUSED)
def test_what_cannot_be_exact_is_refused(tmp_path: Path, family: str, video: dict[str, Any], says: str) -> None:
    checkpoint = save_checkpoint(tmp_path / "model", family)
    with pytest.raises(UserError, match=rf"chats\.jsonl:1.*{says}"):
        make_store(tmp_path, checkpoint, {"messages": chat([{"type": "video", **video}])})


def test_settings_of_a_processor_that_are_not_supported_are_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(checkpoints["qwen3_vl"], tmp_path / "model")
    file = tmp_path / "model" / "video_preprocessor_config.json"
    settings = json.loads(file.read_text())
    for change, says in (
        ({"resample": 2}, "has {'resample': 2}, which is not supported"),
        ({"cap_pixels_per_frame": True}, "has {'cap_pixels_per_frame': True}"),
        ({"patch_size": None}, "has no processor of videos: patch_size is not in its settings"),
    ):
        file.write_text(json.dumps({**settings, **change}))
        with pytest.raises(UserError, match=re.escape(says)):
            make_store(tmp_path, tmp_path / "model", record(SHORT))


def video_file(file: Path, count: int) -> Path:
    """Writes a video of random frames at 10 frames per second."""
    av = pytest.importorskip("av")
    with av.open(str(file), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        for frame in frames(count, 48, 32):
            shown = av.VideoFrame.from_image(Image.open(io.BytesIO(frame)))
            container.mux(stream.encode(shown))
        container.mux(stream.encode(None))
    return file


@pytest.mark.parametrize(("fps", "indices"), [(2, [0, 5, 10, 15, 20, 25]), (None, None)])
@pytest.mark.parametrize("family", video_cases.FAMILIES)
def test_files_are_read_as_by_the_processor(
    checkpoints: dict[str, Path], tmp_path: Path, family: str, fps: int | None, indices: list[int] | None
) -> None:
    """Without `fps`, Qwen3-VL takes two frames a second and the others all; those of a file are stored as they are encoded."""
    from transformers.video_utils import read_video_pyav

    source = tmp_path / "source"
    source.mkdir()
    file = video_file(source / "a.mp4", 30)
    given = {"messages": chat([{"type": "video", "video": "a.mp4", **({"fps": fps} if fps else {})}])}
    store = make_store(tmp_path, checkpoints[family], given)
    places = [ImagePlace.of(numbers, k) for k, numbers in enumerate(store.image_places(0))]
    of_all = family == "qwen3_vl"
    taken = [round(k * 29 / 5) for k in range(6)] if of_all else indices or list(range(30))
    assert store.manifest is not None and store.manifest.images == len(taken) and len(places) == len(taken) // 2
    assert places[0].fps == pytest.approx(10 * len(taken) / 30)
    text = store.tokenizer.decode(store.tokens(0, 0, int(store.lengths[0]))[0])
    assert not of_all or f"<{(taken[2] + taken[3]) / 20:.1f} seconds><|vision_start|><|video_pad|>" in text
    whole, _ = read_video_pyav(str(file), lambda metadata: list(range(30)))
    processor = VideoProcessor(store.image_folder)
    found = pictures_of(store.image_folder).pixels([Frames([store.image(0, k) for k in p.files], p.grid) for p in places])
    own = [processor.pixels([whole[k] for k in taken[2 * n : 2 * n + 2]], place.grid) for n, place in enumerate(places)]
    assert torch.equal(found["pixel_values"], torch.cat(own))
    file.write_bytes(b"no video")
    with pytest.raises(UserError, match=r"chats\.jsonl:1: .*a\.mp4 cannot be read as a video"):
        prepare(str(source), tmp_path / "other", tokenizer=str(checkpoints[family]))


def test_a_file_without_its_reader_is_refused(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a.mp4").write_bytes(b"video")
    monkeypatch.setattr("longctx.data.video_processor.importlib.util.find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"chats\.jsonl:1: reading .*a\.mp4 needs PyAV: pip install"):
        make_store(tmp_path, checkpoints["qwen2_vl"], {"messages": chat("<video>?"), "videos": ["a.mp4"]})


def test_frames_of_a_file_are_those_that_the_processor_samples(checkpoints: dict[str, Path]) -> None:
    """For Qwen2-VL, whose processor needs torchvision; that of Qwen3-VL chooses them itself."""
    pytest.importorskip("torchvision")
    from transformers import AutoVideoProcessor
    from transformers.video_utils import VideoMetadata

    own, ours = AutoVideoProcessor.from_pretrained(checkpoints["qwen2_vl"]), VideoProcessor(checkpoints["qwen2_vl"])
    for total in range(4, 90):
        for fps in (0.7, 1, 2, 3.3, 24):
            metadata = VideoMetadata(total_num_frames=total, fps=23.976)
            expected = [
                frame for frame in own.sample_frames(metadata, fps=fps).tolist() if frame < total
            ]  # rounding may add one
            assert ours._sampled(metadata, fps, False).tolist() == expected, (total, fps)
