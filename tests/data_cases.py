"""Small sources, stores and plans for the data tests."""

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet

from longctx.data.records.formats import Document
from longctx.data.records.sources import open_corpus
from longctx.data.store.prepare import prepare
from longctx.data.store.store import IGNORED_LABEL, Store
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.layout import Placement
from longctx.planning.plan import Plan, PlanCost

PROFILE = HardwareProfile.load("h100-nvlink-ib")

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Grüße? <|im_end|>"},
    {"role": "assistant", "content": "Grüße."},
    {"role": "user", "content": "Again"},
    {"role": "assistant", "content": "And again, and again."},
]


def text_of(length: int, seed: int = 0) -> str:
    """Returns random letters, determined by the seed."""
    return "".join(Random(seed).choices("abcdefghijklmnopqrstuvwxyz \n", k=length))


def write_jsonl(path: Path, records: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return path


def written(folder: Path, records: Sequence[Any], suffix: str = "jsonl") -> Path:
    """Writes records as JSON lines, Parquet or a saved dataset."""
    path = folder / f"s.{suffix}"
    if suffix == "jsonl":
        return write_jsonl(path, records)
    if suffix == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(records)), path)
    else:
        datasets.Dataset.from_list(list(records)).save_to_disk(str(path))
    return path


def documents(
    folder: Path, records: Sequence[Any], suffix: str = "jsonl", **options: Any
) -> list[Document]:
    return list(open_corpus(str(written(folder, records, suffix)), **options).documents())


def byte_store(
    folder: Path, lengths: Sequence[int], *, conversations: int = 0, name: str = "store"
) -> Store:
    """Makes a store of plain bytes with documents of `lengths` tokens (end tokens included), then
    conversations."""
    records: list[Any] = [
        {"text": text_of(length - 1, seed)} for seed, length in enumerate(lengths)
    ]
    records += [{"messages": CONVERSATION}] * conversations
    source = write_jsonl(folder / f"{name}.jsonl", records)
    prepare(open_corpus(str(source)), folder / name, tokenizer="bytes")
    return Store.open(folder / name)


def made(
    folder: Path,
    records: Sequence[Any],
    tokenizer: str | Path = "bytes",
    template: str | None = None,
    suffix: str = "jsonl",
    **options: Any,
) -> Store:
    """Makes a store of these records, over one that is there, with the text of a chat template if
    one is given."""
    if template is not None:
        (folder / "t.jinja").write_text(template)
        options["chat_template"] = str(folder / "t.jinja")
    prepare(
        written(folder, records, suffix),
        folder / "store",
        tokenizer=str(tokenizer),
        overwrite=True,
        **options,
    )
    return Store.open(folder / "store")


def whole(store: Store, document: int = 0) -> str:
    return store.tokenizer.decode(store.read(document, 0, int(store.lengths[document]))[0])


def learnt(store: Store, document: int = 0) -> str:
    """Returns the text with loss, without the end of a document, which ChatML as text trains after
    a trained last answer."""
    _, labels = store.read(document, 0, int(store.lengths[document]))
    text = store.tokenizer.decode(label for label in labels.tolist() if label != IGNORED_LABEL)
    return text.removesuffix("\n<|endoftext|>")


def interrupt(stage: str, share: float) -> None:
    """Ends a preparation that reports its progress here when more than half of the documents are
    tokenized."""
    if stage == "tokenizing" and share > 0.6:
        raise KeyboardInterrupt


def random_plan(lengths: Sequence[int], ranks: int, seed: int) -> Plan:
    """Returns a plan with documents on random rings of random micro-batches: any plan that I1
    allows, sensible or not."""
    random = Random(seed)
    micro_batches: list[list[Placement]] = [[] for _ in range(random.randint(1, 3))]
    for document in range(len(lengths)):
        degree = random.randint(1, ranks)
        placement = Placement(
            document, random.randint(0, ranks - degree), degree, reversed=random.random() < 0.5
        )
        random.choice(micro_batches).append(placement)
    return placed_plan(lengths, ranks, micro_batches)


def placed_plan(
    lengths: Sequence[int], ranks: int, micro_batches: Sequence[Sequence[Placement]]
) -> Plan:
    """Returns a plan with these placements; its times are meaningless."""
    return Plan(
        mode="static",
        winner="given",
        ranks=ranks,
        tokens_per_rank=sum(lengths),
        lengths=tuple(lengths),
        micro_batches=tuple(map(tuple, micro_batches)),
        profile=PROFILE,
        cost=PlanCost(makespan_s=1.0, lower_bound_s=1.0, exposed_share=0.0, idle_share=0.0),
    )
