"""Stores whose messages and tokens have weights, runs over them, and the weighted loss of one
process in float64."""

from pathlib import Path
from random import Random
from typing import Any

import torch
from torch.nn import functional as F

from longctx.attention import RingAttention
from longctx.config import load
from longctx.data.records.sources import open_corpus
from longctx.data.store.prepare import prepare
from longctx.data.store.store import IGNORED_LABEL, Store
from longctx.planning.layout import Placement
from tests.data_cases import placed_plan, text_of, write_jsonl
from tests.training_cases import SMALL, start, whole

SETTINGS = [
    "data.max_length=300",
    "data.long_documents=split",
    "batch.global_tokens=2400",
    "train.steps=1",
    "eval.every=1",
]
SETTINGS += [
    "optimizer.warmup_steps=0",
    "optimizer.clip_grad_norm=null",
    "checkpoint.every=null",
    "data.held_out=0.2",
]


def records(seed: int = 0) -> list[dict[str, Any]]:
    """Texts, conversations and token ids, many of them with weights, of documents too."""
    random, made = Random(seed), list[dict[str, Any]]()
    for number in range(24):
        length = random.choice([20, 60, 150, 290, 500])
        ids = [random.randrange(256) for _ in range(length)]
        answers = [
            {"role": "assistant", "content": text_of(length // 2, number + side)}
            for side in (0, 100)
        ]
        asked = {"role": "user", "content": text_of(9, number)}
        weights = [random.choice([0, 0.25, 0.7, 1, 3]) for _ in ids]
        record = [
            {"text": text_of(length, number)},
            {"messages": [asked, {**answers[0], "weight": 0.3}, asked, answers[1]]},
            {"input_ids": ids, "weights": weights},
            {"input_ids": ids, "loss_mask": [float(weight > 0) for weight in weights]},
        ][number % 4]
        made.append({**record, "weight": 1 + number % 3})
    return made


def make_store(folder: Path, given: list[dict[str, Any]], name: str = "weighted") -> Path:
    prepare(
        open_corpus(str(write_jsonl(folder / f"{name}.jsonl", given))),
        folder / name,
        tokenizer="bytes",
    )
    return folder / name


def validation(store: Path, folder: Path, settings: list[str]) -> tuple[float, float]:
    """On each rank: the loss of validation before the first step, and Σ weight · -log p / Σ weight
    over documents apart."""
    trainer = start(store, folder, [*SETTINGS, *settings])
    trainer.loader.close()
    assert trainer.validator is not None
    pieces = trainer.validator.documents.pieces
    first = {name: whole(weight) for name, weight in trainer.model.named_parameters()}
    return trainer.validator.validate()["validation_loss"], plain(
        store, first, [(p.document, p.start, p.stop) for p in pieces]
    )


@torch.no_grad()
def plain(path: Path, first: dict[str, torch.Tensor], spans: list[tuple[int, int, int]]) -> float:
    """Returns the loss in float64, by what the records say."""
    store = Store.open(path)
    settings = [*SMALL, f"data.store={path}", f"model.vocab_size={store.tokenizer.vocab_size}"]
    model = load(None, settings).model_source().build().double()
    model.load_state_dict({name: weight.double() for name, weight in first.items()}, strict=False)
    total = weight = 0.0
    for document, start_, stop in spans:
        tokens, labels = map(torch.from_numpy, store.read(document, start_, stop, end=stop))
        layout = placed_plan([len(tokens)], 1, [[Placement(0, 0, 1)]]).layout(0, 0)
        logits = model(tokens, torch.arange(len(tokens)), RingAttention(layout), None)
        losses = F.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="none")
        of_tokens = torch.tensor(
            [*weights_said(store, document)[start_ + 1 : stop], 0.0], dtype=torch.float64
        )
        total += float((losses * of_tokens).sum())
        weight += float(of_tokens.sum())
    return total / weight


def weights_said(store: Store, document: int) -> list[float]:
    """Returns the weight of every token of a document of `records`, by its record."""
    record, length = (
        records()[int(store.name(document).rsplit(":", 1)[1]) - 1],
        int(store.lengths[document]),
    )
    own: list[float] = [1.0] * length
    if "weights" in record or "loss_mask" in record:
        own = record.get("weights") or record["loss_mask"]
    elif "messages" in record:
        labels = store.read(document, 0, length)[1]
        first = [0.0, *(labels[:-1] != IGNORED_LABEL).astype(float).tolist()]
        answer, text = (
            record["messages"][1]["content"] + "<|im_end|>",
            store.tokenizer.decode(store.tokens(document, 0, length)[0]),
        )
        begin = text.index(answer)  # letters: a byte is a token
        own = [
            0.3 * each if begin <= place < begin + len(answer) else each
            for place, each in enumerate(first)
        ]
    return [record["weight"] * each for each in own]
