"""Images: a tiny vision-language model learns to read digits, on two processes that share every conversation.

    python examples/digit_images.py FOLDER [--steps 500]

Draws digits in several fonts, sizes and angles, and writes conversations of four images, each with a question; a model like
LLaVA with new weights (a vision transformer and a decoder of two layers each); and a store. Then it trains on two CPU processes
between which each conversation is split, through its images, exports the model, and reads digits that it has not seen, with
transformers. Needs matplotlib.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

SIDE, PATCH = 32, 8
"""Pixels of an image and of a patch."""
PER_CHAT = 4
QUESTION = "?"
TEMPLATE = (
    "{% for m in messages %}{% for part in m['content'] %}{% if part['type'] == 'image' %}<image>{% elif m['role'] == 'user' %}"
    "{{ part['text'] }}{% else %}{% generation %}{{ part['text'] + '</s>' }}{% endgeneration %}{% endif %}{% endfor %}"
    "{% endfor %}"
)
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"initializer_range": 0.1}  # 0.02 is for wider models: this one would take hundreds of steps to leave chance
FONTS = ("DejaVu Sans", "DejaVu Serif", "DejaVu Sans Mono", "STIXGeneral")


def draw(folder: Path, count: int, random: Random) -> list[tuple[str, str]]:
    """Draws digits. Returns the file and the digit of each."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib.figure import Figure

    figure, drawn = Figure(figsize=(1, 1), dpi=SIDE), []
    for number in range(count):
        figure.clear()
        digit = str(random.randrange(10))
        figure.text(
            random.uniform(0.4, 0.6),
            random.uniform(0.4, 0.6),
            digit,
            ha="center",
            va="center",
            fontsize=random.uniform(36, 56),
            rotation=random.uniform(-15, 15),
            family=random.choice(FONTS),
            weight=random.choice(("normal", "bold")),
        )
        figure.savefig(folder / f"{number}.png")
        drawn.append((f"{number}.png", digit))
    return drawn


def write_chats(folder: Path, drawn: list[tuple[str, str]]) -> None:
    """Writes conversations of `PER_CHAT` images each."""
    with (folder / "chats.jsonl").open("w") as file:
        for start in range(0, len(drawn), PER_CHAT):
            messages = []
            for name, digit in drawn[start : start + PER_CHAT]:
                asked = [{"type": "image", "image": name}, {"type": "text", "text": QUESTION}]
                messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": digit}]
            file.write(json.dumps({"messages": messages}) + "\n")


def write_model(folder: Path) -> None:
    """Writes a model with new weights, a tokenizer of bytes and a processor."""
    inner = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.add_special_tokens(["</s>", "<image>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
    images = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    options = {"patch_size": PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    LlavaProcessor(images, tokenizer, chat_template=TEMPLATE, **options).save_pretrained(folder)
    config = LlavaConfig(
        text_config={"model_type": "llama", "vocab_size": len(tokenizer), "max_position_embeddings": 256, **SIZES},
        vision_config={"model_type": "clip_vision_model", "image_size": SIDE, "patch_size": PATCH, **SIZES},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=(SIDE // PATCH) ** 2,
        vision_feature_layer=-1,
    )
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).save_pretrained(folder)


@torch.no_grad()
def accuracy(checkpoint: Path, folder: Path, drawn: list[tuple[str, str]]) -> float:
    """Returns the share of digits that a model reads right."""
    model: Any = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(checkpoint, backend="pil")
    images = [Image.open(folder / name).convert("RGB") for name, _ in drawn]
    inputs = processor(images=images, text=[f"<image>{QUESTION}"] * len(images), return_tensors="pt")
    answers = processor.batch_decode(model(**inputs).logits[:, -1].argmax(-1)[:, None])
    return sum(answer == digit for answer, (_, digit) in zip(answers, drawn, strict=True)) / len(drawn)


def longctx(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "longctx", *map(str, arguments)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--images", type=int, default=6000)
    arguments = parser.parse_args()
    folder, began = arguments.folder, time.perf_counter()
    train, test = folder / "train", folder / "test"
    for part, count, seed in ((train, arguments.images, 0), (test, 500, 1)):
        part.mkdir(parents=True)
        drawn = draw(part, count, Random(seed))
        write_chats(part, drawn)
    write_model(folder / "model")
    longctx("prepare", "--source", train, "--tokenizer", folder / "model", "--out", folder / "store")
    print(f"before training {accuracy(folder / 'model', test, drawn):.1%} of {len(drawn)} digits are read right", flush=True)
    settings = {
        "model.from_pretrained": folder / "model",
        "data.store": folder / "store",
        "batch.tokens_per_rank": 2048,
        "batch.global_tokens": 3000,
        "context.mode": "static",
        "context.degree": 2,
        "optimizer.learning_rate": 1e-3,
        "optimizer.warmup_steps": 50,
        "train.steps": arguments.steps,
        "train.run_dir": folder / "run",
        "checkpoint.every": arguments.steps,
        "checkpoint.export": folder / "trained",
        "log.every": 20,
    }
    options = [part for name, value in settings.items() for part in (f"--{name}", value)]
    longctx("train", "--processes", 2, *options)
    print(f"after training {accuracy(folder / 'trained', test, drawn):.1%}; {time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
