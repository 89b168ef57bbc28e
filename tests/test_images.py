"""Conversations with images: read from every form of record, trained, resumed, evaluated and exported; or refused."""

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from longctx.cli import main
from longctx.data.image_processor import pictures_of
from longctx.data.loader import read_step
from longctx.data.prepare import prepare
from longctx.data.sampler import Piece, held_out
from longctx.data.store import Store
from longctx.errors import UserError
from longctx.model.vision import VISION_FAMILIES
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.planners.planner import make_plan
from longctx.trainers.documents import rows_of
from longctx.training.saved.export import export
from tests.image_cases import SETTINGS, chat, data_url, make_store, own_losses, picture, train, validated, write
from tests.marks import slow_unless
from tests.vision_cases import save_checkpoint
from tests.workers import Workers

WITH_PROCESSOR = ["llava", "gemma3"]
"""Families whose processor needs no torchvision."""
CAT = picture(1, 40, 24)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {family: save_checkpoint(folder / family, family) for family in VISION_FAMILIES}


@pytest.mark.parametrize("family", WITH_PROCESSOR)
def test_tokens_and_pixels_are_those_of_the_processor(checkpoints: dict[str, Path], tmp_path: Path, family: str) -> None:
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What is"}, {"type": "image", "image": "a.png"}]
    conversation = chat([*parts, {"type": "text", "text": "it?"}]) + chat("Sure?", "Yes.")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a.png").write_bytes(CAT)
    store = make_store(tmp_path, checkpoints[family], {"messages": conversation})
    as_parts = [
        {**m, "content": m["content"] if isinstance(m["content"], list) else [{"type": "text", "text": m["content"]}]}
        for m in conversation
    ]
    opened = Image.open(tmp_path / "source" / "a.png")
    for part in (part for message in as_parts for part in message["content"] if part["type"] == "image"):
        part["image"] = opened
    processor = AutoProcessor.from_pretrained(checkpoints[family], backend="pil")
    expected = processor.apply_chat_template(as_parts, tokenize=True, return_dict=True, return_tensors="pt")
    length = int(store.lengths[0])
    assert store.tokens(0, 0, length)[0].tolist() == expected["input_ids"][0].tolist()
    found = pictures_of(store.image_folder).pixels([store.image(0, 0), store.image(0, 1)])
    assert torch.equal(found["pixel_values"], expected["pixel_values"])
    learnt = store.tokenizer.decode(store.tokens(0, 0, length)[0][store.tokens(0, 0, length)[1]])
    assert learnt.replace("</s>", "").replace("<end_of_turn>", "") == "An answer.Yes."


def test_every_form_of_an_image_gives_the_same_store(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Paths, data URLs, parts as OpenAI has them, bytes in Parquet, and `datasets`."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "cat.png").write_bytes(CAT)
    place, text = {"type": "image"}, {"type": "text", "text": "What?"}
    lines = [
        {"messages": chat([{"type": "image", "image": "cat.png"}, text])},
        {"messages": chat([{"type": "image_url", "image_url": {"url": data_url(CAT)}}, text])},
        {"messages": chat([place, text]), "images": ["cat.png"]},
        {"messages": chat("<image>What?"), "images": ["cat.png"]},
        {
            "conversations": [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "An answer."}],
            "image": "cat.png",
        },
    ]
    write(source, *lines)
    column = [{"bytes": CAT, "path": None}]
    messages = [chat("<image>What?")]
    pyarrow.parquet.write_table(pyarrow.table({"messages": messages, "images": [column]}), source / "more.parquet")
    features = {"prompt": datasets.Value("string"), "completion": datasets.Value("string"), "image": datasets.Image()}
    rows = {"prompt": ["<image>What?"], "completion": ["An answer."], "image": [str(source / "cat.png")]}
    datasets.Dataset.from_dict(rows, features=datasets.Features(features)).save_to_disk(tmp_path / "saved")
    stores = []
    for number, given in enumerate([source, tmp_path / "saved"]):
        prepared = prepare(str(given), tmp_path / f"store{number}", tokenizer=str(checkpoints["qwen2_vl"]))
        stores.append(Store.open(tmp_path / f"store{number}"))
        assert prepared.manifest.images == len(stores[-1])
        assert not prepared.manifest.not_read
    first = stores[0].tokens(0, 0, int(stores[0].lengths[0]))[0].tolist()
    for store in stores:
        for document in range(len(store)):
            assert store.tokens(document, 0, int(store.lengths[document]))[0].tolist() == first
            assert store.image_places(document) == [[first.index(first[7]), 15, 1, 6, 10]]
    assert stores[0].image(0, 0) == stores[0].image(5, 0) == CAT
    (source / "cat.png").write_bytes(picture(2, 40, 24))  # no record has changed
    with pytest.raises(UserError, match="holds a store of another source"):
        prepare(str(source), tmp_path / "store0", tokenizer=str(checkpoints["qwen2_vl"]))


def test_a_chat_template_of_the_processor_alone_is_used(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """As LLaVA 1.5 has it, and Qwen2-VL's image processor without the name of its class, which the config tells."""
    other = tmp_path / "other"
    other.mkdir()
    for file in checkpoints["qwen2_vl"].iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    template = (other / "chat_template.jinja").read_text()
    (other / "chat_template.jinja").unlink()
    (other / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    record = {"messages": chat("<image>?"), "images": [data_url(CAT)]}
    (tmp_path / "a").mkdir()
    stores = make_store(tmp_path, other, record), make_store(tmp_path / "a", checkpoints["qwen2_vl"], record)
    tokens = [store.tokens(0, 0, int(store.lengths[0]))[0].tolist() for store in stores]
    assert tokens[0] == tokens[1] and stores[0].image_places(0) == stores[1].image_places(0)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": chat("<image>?"), "images": ["no.png"]}, "image no.png is not in"),
    ({"messages": chat("<image>?"), "images": ["chats.jsonl"]}, "cannot be read as an image"),
    ({"messages": chat("<image>?"), "images": [data_url(b"not")]}, "an image of 3 bytes cannot be read as an image"),
    ({"messages": chat("<image>?"), "images": ["data:image/png;base64,?"]}, "an image has a damaged data URL"),
    ({"messages": chat("<image>?"), "images": ["https://a.b/c.png"]}, "is on the web: download it"),
    ({"messages": chat("<image>?"), "images": [5]}, "an image is of type int"),
    ({"messages": chat("<image><image>"), "images": [data_url(CAT)]}, "there are 1 images, but the messages have 2 places"),
    ({"messages": chat("?"), "images": [data_url(CAT)]}, "there are 1 images, but the messages have 0 places"),
    ({"messages": chat([{"type": "image"}])}, "there are 0 images, but the messages have 1 places"),
    ({"messages": chat([{"type": "audio", "audio": "a.mp3"}])}, "only text, images and videos are supported"),
    ({"messages": chat("?", "<image>"), "images": [data_url(CAT)]}, "message 1, of the assistant, has an image"),
    ({"messages": chat("<|image_pad|> <image>"), "images": [data_url(CAT)]}, r"writes 2 × <\|image_pad\|> for 1 images"),
    ({"messages": chat("\U0010fffd")}, "which stand for images and videos: remove it"),
    (
        {"prompt": "<image>?", "chosen": "A", "rejected": "B", "images": [data_url(CAT)]},
        "preference pairs with images are not supported",
    ),
]


@pytest.mark.parametrize(("record", "says"), REFUSED)
def test_what_cannot_be_read_is_refused_by_name(
    checkpoints: dict[str, Path], tmp_path: Path, record: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=rf"chats\.jsonl:1.*{says}"):
        make_store(tmp_path, checkpoints["qwen2_vl"], record)


def test_what_does_not_fit_the_tokenizer_is_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    record = {"messages": chat("<image>?"), "images": [data_url(CAT)]}
    with pytest.raises(UserError, match=r"chats\.jsonl:1 has images: give --tokenizer the folder of a checkpoint that reads"):
        make_store(tmp_path, Path("bytes"), record)
    other = tmp_path / "other"
    other.mkdir()
    for file in checkpoints["qwen2_vl"].iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    (other / "processor_config.json").write_text(json.dumps({"processor_class": "Idefics3Processor"}))
    with pytest.raises(UserError, match=r"chats\.jsonl:1 has images, but .* has Idefics3Processor: images need one of"):
        make_store(tmp_path, other, record)
    for treatment, says in (("error", "more than --max-length 10"), ("truncate_left", "images cannot be cut")):
        with pytest.raises(UserError, match=says):
            make_store(tmp_path, checkpoints["qwen2_vl"], record, max_length=10, long_documents=treatment)
    with pytest.raises(UserError, match=r"chats\.jsonl:2: the chat template writes 1 × <\|image_pad\|> for 0"):
        make_store(tmp_path, checkpoints["qwen2_vl"], record, {"messages": chat("<|image_pad|>")})


def test_a_store_without_the_conversations_that_had_images_is_read(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    records = {"messages": chat("<image>" + "?" * 200), "images": [data_url(CAT)]}, {"messages": chat("?")}
    store = make_store(tmp_path, checkpoints["llava"], *records, max_length=100, long_documents="drop")
    assert len(store) == 1 and store.manifest is not None and not store.manifest.images
    lengths = store.lengths.tolist()
    plan = make_plan(lengths, ranks=1, tokens_per_rank=200, profile=HardwareProfile.load("cpu-2core"))
    (micro_batch,) = read_step(store, [Piece(0, 0, lengths[0])], plan, 0).micro_batches
    assert micro_batch.images is None and len(micro_batch.tokens) == lengths[0]


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_a_run_has_the_losses_of_single_documents(
    workers: Workers, checkpoints: dict[str, Path], tmp_path: Path, family: str
) -> None:
    """All documents are in the step, each split over both ranks; validation is over some of them."""
    (tmp_path / "model").symlink_to(checkpoints[family])
    store = make_store(tmp_path, checkpoints[family])
    losses = own_losses(checkpoints[family], store, family)
    expected, everything = sum(losses) / store.trained_tokens.sum(), int(store.lengths.sum())
    for found, _ in workers.run(train, 2, tmp_path, tmp_path / "run", [f"batch.global_tokens={everything}"], 1):
        assert found == pytest.approx([expected], rel=1e-5)
    if family == "llava":
        apart = np.flatnonzero(held_out(store.names, 0.4))
        expected = sum(losses[document] for document in apart) / store.trained_tokens[apart].sum()
        for found in workers.run(validated, 2, tmp_path, tmp_path / "validated", ["data.held_out=0.4"]):
            assert found == pytest.approx(expected, rel=1e-5)


OPTIMIZERS = ["optimizer.name=muon", "optimizer.name=adamw-8bit", "lora.rank=4"]


@pytest.mark.parametrize("setting", ["optimizer.name=adamw", *slow_unless(lambda _: False, OPTIMIZERS)])
def test_a_resumed_run_is_the_same(workers: Workers, checkpoints: dict[str, Path], tmp_path: Path, setting: str) -> None:
    """Some steps have no image; a part of the encoder never has a gradient, as LLaVA does not use its last layer."""
    (tmp_path / "model").symlink_to(checkpoints["llava"])
    make_store(tmp_path, checkpoints["llava"])
    settings = ["batch.global_tokens=10", "train.steps=6", setting]
    at_once = workers.run(train, 2, tmp_path, tmp_path / "once", settings, 6)
    first = workers.run(train, 2, tmp_path, tmp_path / "run", settings, 1)
    then = workers.run(train, 2, tmp_path, tmp_path / "run", settings, 5, True)
    for (losses, weights), (before, _), (after, resumed) in zip(at_once, first, then, strict=True):
        assert losses == before + after
        assert all(torch.equal(a, b) for a, b in zip(weights, resumed, strict=True))


@pytest.mark.parametrize("family", WITH_PROCESSOR)
def test_an_exported_run_answers_as_before(workers: Workers, checkpoints: dict[str, Path], tmp_path: Path, family: str) -> None:
    """Without a change of weights: greedy answers on an image, with the processor of the export, are those of the original."""
    (tmp_path / "model").symlink_to(checkpoints[family])
    make_store(tmp_path, checkpoints[family])
    workers.run(train, 2, tmp_path, tmp_path / "run", ["optimizer.learning_rate=1e-30", "optimizer.weight_decay=0"], 1)
    export(tmp_path / "run", tmp_path / "export")
    answers = []
    for folder in (checkpoints[family], tmp_path / "export"):
        model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        processor = AutoProcessor.from_pretrained(folder, backend="pil")
        content = [{"type": "image", "image": Image.fromarray(torch.zeros(20, 20, 3, dtype=torch.uint8).numpy())}]
        question = [{"role": "user", "content": [*content, {"type": "text", "text": "What?"}]}]
        inputs = processor.apply_chat_template(
            question, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
        )
        answers.append(model.generate(**inputs, do_sample=False, max_new_tokens=8).tolist())
    assert answers[0] == answers[1]
    assert {f.name for f in (tmp_path / "export").iterdir()} == {f.name for f in checkpoints[family].iterdir()}


def test_an_evaluation_has_the_losses_of_single_documents(
    checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = make_store(tmp_path, checkpoints["qwen3_vl"])
    expected = sum(own_losses(checkpoints["qwen3_vl"], store, "qwen3_vl")) / store.trained_tokens.sum()
    capsys.readouterr()
    assert main(["eval", str(checkpoints["qwen3_vl"]), "--store", str(store.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["overall"]["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_run_that_would_not_be_exact_is_refused(
    checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = make_store(tmp_path, checkpoints["llava"])
    given = [*SETTINGS[:3], f"data.store={store.path}", f"train.run_dir={tmp_path / 'run'}"]
    model = f"model.from_pretrained={checkpoints['llava']}"
    other = f"model.from_pretrained={checkpoints['qwen2_vl']}"
    for settings, says in (
        ([], "has images, but the model is new weights"),
        ([model, "data.max_length=100"], "images cannot be cut, so raise batch.tokens_per_rank"),
        ([model, "data.max_length=100", "data.long_documents=split"], "images cannot be cut"),
        ([other], "was prepared with another tokenizer"),
        ([model, "parallel.tensor_parallel_size=1", "model.implementation=native"], "the native decoder cannot run"),
    ):
        capsys.readouterr()
        assert main(["train", *(f"--{setting}" for setting in [*given, *settings])]) == 2
        assert says in capsys.readouterr().err


def test_generate_tells_what_reads_images(checkpoints: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(checkpoints["llava"]), "--chat", "What?"]) == 2
    assert "reads images (llava), which this command does not" in capsys.readouterr().err


def test_other_trainers_are_told(checkpoints: dict[str, Path]) -> None:
    batch = {"input_ids": torch.zeros(1, 4), "labels": torch.zeros(1, 4), "pixel_values": torch.zeros(1, 3, 16, 16)}
    with pytest.raises(UserError, match="the data collator returns pixel_values, which splitting documents would lose"):
        rows_of(batch)


def test_stores_with_and_without_images_are_mixed(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    texts = make_store(tmp_path / "a", checkpoints["qwen2_vl"], {"messages": chat("No image.")})
    images = make_store(tmp_path / "b", checkpoints["qwen2_vl"], {"messages": chat("<image>?"), "images": [data_url(CAT)]})
    assert not texts.has_images and images.has_images
    for stores, place in (([texts, images], 1), ([images, texts], 0)):
        joined = Store.join(stores, [1.0, 1.0])
        assert joined.image_places(place) == images.image_places(0) and not joined.image_places(1 - place)
        assert joined.image(place, 0) == CAT and joined.image_folder == images.image_folder
        assert joined.image_tokens.tolist() == [15 * (document == place) for document in range(2)]
