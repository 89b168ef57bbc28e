"""Trainers of transformers and TRL on documents with images, on one process and on several."""

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForImageTextToText
from transformers.processing_utils import VideosKwargs
from transformers.video_utils import make_batched_videos

from longctx.planning.cost.tower import TowerSpeed
from longctx.planning.plan import Plan
from longctx.trainers import step
from tests import video_cases, vision_cases
from tests.data_cases import placed_plan
from tests.host_waits import waits_of_a_trainer
from tests.trainer_cases import PROFILE, arguments, as_rank, report, select_fsdp_on_cpus

MANY_IMAGES, LENGTHS_BESIDE = range(0, 972, 81), [250] * 26
"""First tokens of the images of a document, and tokens of the texts beside it."""
STEP = {
    "optim": "sgd",
    "learning_rate": 100.0,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "max_steps": 1,
}
"""One step whose change of the weights is 100 times their gradient."""


def rows(family: str, videos: bool = False) -> list[dict[str, Any]]:
    """The documents of `vision_cases`, or of `video_cases`, as a data set in memory."""
    cases = video_cases if videos else vision_cases
    parts = zip(cases.documents(family), cases.labels(family), strict=True)
    return [
        {"number": number, "input_ids": ids, "labels": labels}
        for number, (ids, labels) in enumerate(parts)
    ]


def collator(family: str, videos: bool = False) -> Any:
    """Returns a data collator like TRL's: with pixels of all images, and types of tokens under the
    name of the family."""

    def collate(batch: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        longest = max(len(row["input_ids"]) for row in batch)

        def padded(name: str, filler: int) -> torch.Tensor:
            fill = [torch.full((longest - len(row[name]),), filler) for row in batch]
            return torch.stack(
                [torch.cat([row[name], end]) for row, end in zip(batch, fill, strict=True)]
            )

        made = {name: padded(name, filler) for name, filler in (("input_ids", 0), ("labels", -100))}
        lengths = torch.tensor([len(row["input_ids"]) for row in batch])
        made["attention_mask"] = (torch.arange(longest) < lengths[:, None]).long()
        numbers = [row["number"] for row in batch]
        if videos:
            made["mm_token_type_ids"] = video_cases.types_of(made["input_ids"])
            return made | dict(video_cases.of_processor(family, numbers))
        images = [
            (number, k)
            for number in numbers
            for k in range(len(vision_cases.places_of(family).get(number, ())))
        ]
        kinds = (made["input_ids"] == vision_cases.IMAGE).int()
        if family == "gemma3":
            made["token_type_ids"] = kinds
        elif family != "llava":
            made["mm_token_type_ids"] = kinds
        return made | (dict(vision_cases.pixels(family, images)) if images else {})

    return collate


@contextlib.contextmanager
def placed() -> Iterator[None]:
    """Plans of the documents are those of `vision_cases`, in whatever order they are drawn: no two
    have the same length."""

    def make_plan(lengths: Sequence[int], ranks: int, **_: Any) -> Plan:
        order = [vision_cases.LENGTHS.index(length) for length in lengths]
        placements = vision_cases.PLACEMENTS[ranks]
        return placed_plan(
            lengths,
            ranks,
            [[replace(p, document=order.index(p.document)) for p in each] for each in placements],
        )

    own, step.make_plan = step.make_plan, make_plan
    try:
        yield
    finally:
        step.make_plan = own


def train(
    folder: Path, model: Path, family: str, dynamic: bool, options: dict[str, Any]
) -> dict[str, Any]:
    """Trains one step with `transformers.Trainer` on all documents, one by one without
    `dynamic`."""
    from transformers import Trainer, TrainingArguments

    from longctx.trainers import dynamic_context_parallel

    ranks, options = as_rank(), dict(options)
    frozen, videos, watched = (options.pop(name, False) for name in ("frozen", "videos", "watched"))
    if "fsdp" in options:
        select_fsdp_on_cpus()
    given = arguments(folder, ranks, 1, **{"eval_strategy": "no", **STEP, **options})
    each = 1 if not dynamic else len(vision_cases.LENGTHS) // ranks
    given |= {
        "per_device_train_batch_size": each,
        "gradient_accumulation_steps": len(vision_cases.LENGTHS) // each // ranks,
    }
    hf = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    for name, weight in hf.named_parameters():
        weight.requires_grad_(not frozen or not re.search(frozen, name))
    before = {name: weight.detach().clone() for name, weight in hf.named_parameters()}
    data = {"data_collator": collator(family, videos), "train_dataset": rows(family, videos)}
    trainer = Trainer(hf, TrainingArguments(**given), **data)
    trainer.model_accepts_loss_kwargs = True
    if dynamic:
        dynamic_context_parallel(trainer, tokens_per_rank=90, profile=PROFILE)
    with placed():
        if watched:
            return {"waits": waits_of_a_trainer(trainer)}
        trainer.train()
    found = report(trainer)
    found["gradients"] = {
        name: (before[name] - weight) / STEP["learning_rate"]
        for name, weight in found.pop("weights").items()
    }
    return found


def plan_with_images(folder: Path, model: Path, freeze: str | None) -> tuple[Plan, TowerSpeed]:
    """Returns the plan of a step with a document of twelve images beside 26 of text, and the
    encoder that it was made for."""
    from transformers import Trainer, TrainingArguments

    from longctx.trainers import dynamic_context_parallel
    from tests.planning.test_vision_work import FREE

    ranks = as_rank()
    hf = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    for name, weight in hf.named_parameters():
        weight.requires_grad_(freeze is None or freeze not in name)
    texts, ids = [torch.arange(length) % 80 for length in LENGTHS_BESIDE], torch.arange(1000) % 80
    for start in MANY_IMAGES:
        ids[start : start + 80] = vision_cases.IMAGE
    data = [{"input_ids": each} for each in [*texts[:13], ids, *texts[13:]]]

    def collate(batch: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        padded = torch.nn.utils.rnn.pad_sequence(
            [row["input_ids"] for row in batch], batch_first=True, padding_value=95
        )
        made = {
            "input_ids": padded,
            "labels": padded.masked_fill(padded >= vision_cases.IMAGE, -100),
        }
        made["attention_mask"] = (padded != 95).long()
        if (padded == vision_cases.IMAGE).any():
            made |= {
                "pixel_values": torch.randn(12 * 320, 96),
                "image_grid_thw": torch.tensor([[1, 16, 20]] * 12),
            }
        return made

    given = arguments(folder, ranks, 1, **{"eval_strategy": "no", **STEP})
    given |= {"per_device_train_batch_size": -(-len(data) // ranks), "learning_rate": 1e-3}
    trainer = Trainer(hf, TrainingArguments(**given), data_collator=collate, train_dataset=data)
    trainer.model_accepts_loss_kwargs = True
    dynamic_context_parallel(trainer, tokens_per_rank=4000, profile=FREE)
    trainer.train()
    (plan,) = trainer.dynamic.plans
    return plan, trainer.dynamic.family.tower


def alone(folder: Path, family: str, **options: Any) -> Any:
    """Returns a plain trainer of a new model, without a group."""
    from transformers import Trainer, TrainingArguments

    from tests.trainer_cases import as_rank_alone

    as_rank_alone()
    saved = vision_cases.save_model(folder / "model", family)
    hf = AutoModelForImageTextToText.from_pretrained(saved, dtype=torch.float32)
    given = TrainingArguments(**arguments(folder, 2, 1, **{"eval_strategy": "no", **options}))
    return Trainer(hf, given, data_collator=collator(family), train_dataset=rows(family))


class Videos:
    """Stands for a processor of videos: the name of a video is its number of pairs of frames, which
    are random."""

    merge_size, temporal_patch_size, valid_kwargs = 2, 2, VideosKwargs
    model_input_names = ("pixel_values_videos", "video_grid_thw")

    def __call__(self, videos: Any, **_: Any) -> dict[str, Any]:
        counts = [int(name) for name in make_batched_videos(videos)]
        rows = [
            torch.randn(count * 32, 96, generator=torch.Generator().manual_seed(count))
            for count in counts
        ]
        grids, shown = (
            torch.tensor([[count, 4, 8] for count in counts]),
            [SimpleNamespace(sampled_fps=0.3 * c) for c in counts],
        )
        return {
            "pixel_values_videos": torch.cat(rows),
            "video_grid_thw": grids,
            "video_metadata": shown,
        }


def processor(folder: Path, family: str) -> Any:
    """Returns the processor of a checkpoint; of Qwen with `Videos`, as its own part for videos
    needs torchvision."""
    import transformers
    from transformers import AutoImageProcessor, AutoTokenizer

    names = {"llava": "LlavaProcessor", "gemma3": "Gemma3Processor", "qwen2_vl": "Qwen2VLProcessor"}
    kind = getattr(transformers, names.get(family, "Qwen2_5_VLProcessor"))
    if not family.startswith("qwen"):
        return kind.from_pretrained(str(folder), backend="pil")
    made = kind.__new__(kind)
    made.tokenizer = AutoTokenizer.from_pretrained(folder)
    made.image_processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    made.chat_template, made.video_processor = made.tokenizer.chat_template, Videos()
    for what in ("image", "video"):
        setattr(made, f"{what}_token", f"<|{what}_pad|>")
        setattr(made, f"{what}_token_id", made.tokenizer.convert_tokens_to_ids(f"<|{what}_pad|>"))
    return made


def picture(number: int, width: int, height: int) -> Any:
    """Returns an image of random pixels."""
    from PIL import Image

    return Image.fromarray(
        np.random.default_rng(number).integers(0, 255, (height, width, 3), dtype=np.uint8)
    )


def chat(question: Any, answer: str = "An answer.") -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def conversations(count: int, videos: bool) -> Any:
    """Returns a data set of conversations with none, one and two images, and with `videos` also
    these."""
    import datasets

    def opened(number: int, k: int) -> Any:
        return picture(10 * number + k, 24 + 8 * (number % 4), 24 + 16 * k)

    images = [[opened(number, k) for k in range(number % 3)] for number in range(count)]
    messages = [
        chat("What is this? " * (1 + number % 3), "It is this. " * (1 + number % 4))
        for number in range(count)
    ]
    text = content = datasets.Value("string")
    if videos:
        content = datasets.List({"type": text, "text": text, "video": text})
        for number, turns in enumerate(messages):
            for turn in turns:
                turn["content"] = [{"type": "text", "text": turn["content"]}]
            shown = [{"type": "video", "video": str(1 + number % 5)}] * (number % 4 // 2)
            turns[0]["content"] = (
                [{"type": "image"}] * len(images[number]) + shown + turns[0]["content"]
            )
    kinds = datasets.Features(
        {
            "images": datasets.List(datasets.Image()),
            "messages": datasets.List({"role": text, "content": content}),
        }
    )
    return datasets.Dataset.from_dict({"images": images, "messages": messages}, features=kinds)


def sft(
    folder: Path, model: Path, family: str, data: Sequence[tuple[list[bytes], str]], dynamic: bool
) -> Any:
    """Returns TRL's trainer of the images (PNG) and questions of some conversations."""
    import datasets
    from trl import SFTConfig, SFTTrainer

    from longctx.trainers import dynamic_context_parallel
    from tests.trainer_cases import as_rank_alone

    as_rank_alone()
    given = arguments(folder, 1, 1, max_length=None, eval_strategy="no")
    del given["remove_unused_columns"]
    rows = [
        {"messages": chat(text), "images": [{"bytes": image, "path": None} for image in images]}
        for images, text in data
    ]
    trainer = SFTTrainer(
        AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32),
        args=SFTConfig(**given),
        train_dataset=datasets.Dataset.from_list(rows).cast_column(
            "images", datasets.List(datasets.Image())
        ),
        processing_class=processor(model, family),
    )
    trainer.model_accepts_loss_kwargs = True
    if dynamic:
        dynamic_context_parallel(trainer, tokens_per_rank=400, profile=PROFILE)
    return trainer


def finetune(
    folder: Path, model: Path, family: str, dynamic: bool, options: dict[str, Any]
) -> dict[str, Any]:
    """Fine-tunes with `trl.SFTTrainer` and its own collator, whose batches are padded without
    `dynamic`."""
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    from longctx.trainers import dynamic_context_parallel

    ranks, options = as_rank(), dict(options)
    targets, videos = options.pop("lora", None), options.pop("videos", False)
    adapters = LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM") if targets else None
    given = arguments(folder, ranks, 1, **{"max_length": None, "num_train_epochs": 1, **options})
    del given["remove_unused_columns"]
    trainer = SFTTrainer(
        AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32),
        args=SFTConfig(**given),
        train_dataset=conversations(38, videos),
        eval_dataset=conversations(14, videos),
        processing_class=processor(model, family),
        peft_config=adapters,
    )
    trainer.model_accepts_loss_kwargs = True
    if dynamic:
        dynamic_context_parallel(
            trainer, tokens_per_rank=240 if ranks == 1 else 128, profile=PROFILE
        )
    trainer.train()
    return report(trainer)


def prefer(
    folder: Path, model: Path, family: str, kind: str, dynamic: bool, options: dict[str, Any]
) -> dict[str, Any]:
    """Trains on images with one of TRL's trainers that need whole sequences."""
    import trl
    from peft import LoraConfig

    from longctx.trainers import dynamic_context_parallel

    ranks, options = as_rank(), dict(options)
    targets, texts = options.pop("lora", None), options.pop("texts", False)
    adapters = LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM") if targets else None
    given = arguments(
        folder,
        ranks,
        1,
        max_steps=2,
        eval_strategy="no",
        optim="sgd",
        learning_rate=0.05,
        max_grad_norm=0.0,
    )
    given |= {
        "per_device_train_batch_size": 4,
        "include_num_input_tokens_seen": "no",
        "lr_scheduler_type": "constant",
    }
    given["train_sampling_strategy"] = "sequential"
    del given["remove_unused_columns"]
    more: dict[str, Any] = {}
    if kind in ("GRPO", "RLOO"):
        given |= {"num_generations": 2, "max_completion_length": 8}
        more["reward_funcs"] = lambda completions, **_: [
            float(len(set(each[0]["content"]))) for each in completions
        ]
    else:
        given["max_length"] = None
    reads = processor(model, family)
    reads.tokenizer.padding_side = "left"  # as Qwen's; GRPO takes it for given
    trainer = getattr(trl, f"{kind}Trainer")(
        model=str(model),
        args=getattr(trl, f"{kind}Config")(
            **{**given, "model_init_kwargs": {"dtype": "float32"}, **options}
        ),
        train_dataset=preferences(kind, 8 * ranks, texts),
        processing_class=reads,
        peft_config=adapters,
        **more,
    )
    if dynamic:
        dynamic_context_parallel(
            trainer, tokens_per_rank=240 if ranks == 1 else 80, profile=PROFILE
        )
    trainer.train()
    return report(trainer)


def preferences(kind: str, count: int, texts: bool) -> Any:
    """Returns prompts with one and two images, with `texts` four and four also without, and the
    completions that a trainer of this kind needs."""
    import datasets

    rows: list[dict[str, Any]] = []
    for number in range(count):
        shown = (number % 3 if number // 4 % 2 else 0) if texts else 1 + number % 2
        images = [
            picture(10 * number + k, 24 + 8 * (number % 4), 24 + 16 * k) for k in range(shown)
        ]
        (prompt, answer), other = (
            chat("What is this? " * (1 + number % 3), "It is. " * (1 + number % 4)),
            chat("", "No." * (number % 5)),
        )
        rows.append({"images": images, "prompt": [prompt]})
        if kind == "DPO":
            rows[-1] |= {"chosen": [answer], "rejected": other[1:]}
        if kind == "KTO":
            rows[-1] |= {"completion": [answer], "label": bool(number % 2)}
    kinds = {
        name: datasets.Dataset.from_list([{name: row[name]} for row in rows]).features[name]
        for name in rows[0]
    }
    features = datasets.Features(kinds | {"images": datasets.List(datasets.Image())})
    return datasets.Dataset.from_dict(
        {name: [row[name] for row in rows] for name in rows[0]}, features=features
    )
