"""Conversations with images: their records, a store of them, and runs on it."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from longctx.config import load
from longctx.data.prepare import prepare
from longctx.data.store import Store
from longctx.parallel.mesh import make_groups
from longctx.training.assembly import assemble
from longctx.training.build import sizes_of_groups
from longctx.training.run import Run
from longctx.training.saved import checkpoint
from longctx.training.trainer import Trainer

SETTINGS = [
    f"context.profile={Path(__file__).parent / 'as_given.yaml'}",
    "batch.tokens_per_rank=160",
    "batch.global_tokens=900",
    "context.mode=static",
    "context.degree=2",
    "optimizer.warmup_steps=0",
    "train.steps=4",
    "log.tensorboard=false",
    "checkpoint.export=null",
]


def picture(number: int, width: int, height: int) -> bytes:
    """Returns a PNG of random pixels."""
    pixels = np.random.default_rng(number).integers(0, 255, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file := io.BytesIO(), "png")
    return file.getvalue()


def data_url(image: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def chat(question: Any, answer: str = "An answer.") -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def records() -> list[dict[str, Any]]:
    """Returns conversations with no, one and several images, among and between texts."""
    made = []
    for number in range(10):
        images = [data_url(picture(10 * number + k, 24 + 8 * number, 24 + 16 * k)) for k in range(number % 4)]
        question = "<image>".join(["Look: ", *["and then " * (number % 3)] * len(images)]) + "What is it?"
        made.append({"messages": chat(question, "It is this. " * (1 + number % 3)), **({"images": images} if images else {})})
    return made


def write(folder: Path, *made: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / "chats.jsonl"
    file.write_text("\n".join(map(json.dumps, made)), "utf-8")
    return file


def make_store(folder: Path, checkpoint: Path, *made: dict[str, Any], **options: Any) -> Store:
    source = write(folder / "source", *(made or records()))
    prepare(str(source), folder / "store", tokenizer=str(checkpoint), **options)
    return Store.open(folder / "store")


def own_losses(folder: Path, store: Store, family: str) -> list[float]:
    """Returns the sum of the losses of every document alone, by transformers' own code on the image's own bytes."""
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    processor, losses = AutoImageProcessor.from_pretrained(folder, backend="pil"), []
    for document in range(len(store)):
        tokens, labels = (torch.from_numpy(part) for part in store.read(document, 0, int(store.lengths[document])))
        inputs: dict[str, Any] = {"input_ids": tokens[None]}
        if places := store.image_places(document):
            images = [Image.open(io.BytesIO(store.image(document, k))).convert("RGB") for k in range(len(places))]
            made = processor(images, return_tensors="pt")
            inputs |= {name: made[name] for name in ("pixel_values", "image_grid_thw") if name in made}
            kinds = (tokens == model.config.image_token_id).int()[None]
            inputs |= {"llava": {}, "gemma3": {"token_type_ids": kinds}}.get(family, {"mm_token_type_ids": kinds})
        with torch.no_grad():
            losses.append(F.cross_entropy(model(**inputs).logits[0], labels, reduction="sum").item())
    return losses


def start(folder: Path, run: Path, settings: list[str], resume: bool = False) -> Trainer:
    """Starts a trainer on `folder`/model and `folder`/store on this rank."""
    everything = [*SETTINGS, f"model.from_pretrained={folder / 'model'}", f"data.store={folder / 'store'}", *settings]
    config = load(None, [*everything, f"train.run_dir={run}"], world_size=dist.get_world_size())
    mesh = make_groups(torch.device("cpu"), **sizes_of_groups(config), timeout_s=30.0)
    run.mkdir(parents=True, exist_ok=True)
    return assemble(Run.open(config, checkpoint=checkpoint.newest(run)[0] if resume else None), mesh)


def train(folder: Path, run: Path, settings: list[str], steps: int, resume: bool = False) -> tuple[list[float], list[Any]]:
    """Makes steps and a checkpoint. Returns losses and the weights of this rank."""
    trainer = start(folder, run, settings, resume)
    assert trainer.loader is not None
    with trainer.loader:
        losses = [trainer.step().loss for _ in range(steps)]
        trainer.save()
    weights = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in trainer.model.parameters()]
    return losses, [weight.detach().clone() for weight in weights]


def validated(folder: Path, run: Path, settings: list[str]) -> float | None:
    """Returns the validation loss after a step."""
    trainer = start(folder, run, ["train.steps=1", "checkpoint.every=null", "eval.every=1", *settings])
    assert trainer.validator is not None and trainer.loader is not None
    with trainer.loader:
        return trainer.validator.validate().validation_loss
