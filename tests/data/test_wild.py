"""Data as they come: records as public trainers write them are used, or what is not used of them is
named; files of many kinds.

Each record is written by hand after a format that users of other trainers have.
"""

import gzip
import io
import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.feather
import pytest

from longctx.cli import main
from longctx.config import load
from longctx.data.mixture import make_steps
from longctx.data.pieces import Piece, SamplerError
from longctx.data.records.chat import ChatError
from longctx.data.records.corpus import CorpusError
from longctx.data.records.sources import open_corpus
from longctx.data.records.tokenizer import TokenizerError
from longctx.data.sampler import Sampler
from longctx.data.store.prepare import prepare
from longctx.data.store.store import IGNORED_LABEL, Store
from longctx.training.data import steps_of_run
from tests.data.test_refused import BAD, GOOD, IDS, LABELS, MASK, SHARED, Q
from tests.data_cases import documents, learnt, made, whole, write_jsonl, written
from tests.template_cases import SMOLLM2


def labels_of(store: Store, document: int = 0) -> list[int]:
    return store.read(document, 0, int(store.lengths[document]))[1].tolist()


# --- token ids


USED: list[tuple[str, dict[str, Any], list[int], Sequence[str]]] = [
    ("ids alone", {"input_ids": IDS}, [105, 33, 10, 256, -100], ()),
    (
        "axolotl",
        {"input_ids": IDS, "attention_mask": [1] * 5, "labels": LABELS},
        [-100, 33, 10, 256, -100],
        ["attention_mask"],
    ),
    ("loss_mask", {"input_ids": IDS, "loss_mask": MASK}, [-100, 33, 10, 256, -100], ()),
    (
        "TRL, prompt and completion",
        {"input_ids": IDS, "completion_mask": MASK},
        [-100, 33, 10, 256, -100],
        (),
    ),
    (
        "TRL, assistant only",
        {"input_ids": IDS, "assistant_masks": MASK},
        [-100, 33, 10, 256, -100],
        (),
    ),
    (
        "verl",
        {"input_ids": IDS, "loss_mask": MASK, "position_ids": [*range(5)]},
        [-100, 33, 10, 256, -100],
        ["position_ids"],
    ),
    (
        "with its name",
        {"input_ids": IDS, "id": 7, "length": 5},
        [105, 33, 10, 256, -100],
        ["id", "length"],
    ),
    (
        "no end",
        {"input_ids": IDS[:-1], "token_type_ids": [0] * 4},
        [105, 33, 10, -100],
        ["token_type_ids"],
    ),
    (
        "packed, of one",
        {"input_ids": IDS, "seq_lengths": [5]},
        [105, 33, 10, 256, -100],
        ["seq_lengths"],
    ),
]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "arrow", "dataset"])
@pytest.mark.parametrize(
    ("record", "labels", "unused"), [case[1:] for case in USED], ids=[case[0] for case in USED]
)
def test_token_ids_are_used(
    tmp_path: Path, record: dict[str, Any], labels: list[int], unused: list[str], suffix: str
) -> None:
    """Exactly as they are, without an end of their own; what is not used is named."""
    if suffix == "arrow":
        pyarrow.feather.write_feather(
            pyarrow.Table.from_pylist([record] * 2), tmp_path / "s.arrow", compression="zstd"
        )
    source = tmp_path / "s.arrow" if suffix == "arrow" else written(tmp_path, [record] * 2, suffix)
    prepare(open_corpus(str(source)), tmp_path / "store", tokenizer="bytes")
    store = Store.open(tmp_path / "store")
    assert [labels_of(store, document) for document in (0, 1)] == [labels] * 2
    assert store.tokens(0, 0, len(record["input_ids"]))[0].tolist() == record["input_ids"]
    assert store.trained_tokens.tolist() == [sum(label != IGNORED_LABEL for label in labels)] * 2
    assert store.manifest is not None and store.manifest.unused == dict.fromkeys(unused, 2)
    assert store.manifest.formats == {"token-ids": 2} and not store.manifest.conversations


@pytest.mark.parametrize("ids", [[72, 257], [-1, 72]])
def test_token_ids_must_be_of_the_tokenizer_that_is_named(tmp_path: Path, ids: list[int]) -> None:
    with pytest.raises(
        TokenizerError,
        match=r"s\.jsonl:1 has token (257|-1) at position [01], but the tokenizer has 257 tokens",
    ):
        made(tmp_path, [{"input_ids": ids}])
    with pytest.raises(
        TokenizerError, match="has token ids: name the tokenizer that they are from"
    ):
        made(tmp_path, [{"text": "some text"}, {"input_ids": IDS}], tokenizer="bpe", vocab_size=300)


def test_what_has_no_loss_is_counted_and_texts_come_first(tmp_path: Path) -> None:
    silent = {"input_ids": IDS, "labels": [IDS[0], *[IGNORED_LABEL] * 4]}
    store = made(
        tmp_path,
        [
            silent,
            {"input_ids": []},
            {"text": "Hi!\n", "input_ids": IDS, "weight": 2},
            {"input_ids": IDS},
        ],
    )
    assert store.manifest is not None and (
        store.manifest.untrained_documents,
        store.manifest.empty_documents,
    ) == (1, 1)
    assert store.manifest.formats == {"text": 1, "token-ids": 1} and store.manifest.unused == {
        "input_ids": 1
    }
    assert whole(store, 0) == whole(store, 1), "the end of the document is added to the text alone"
    with pytest.raises(CorpusError, match="1 switch off the loss of everything"):
        made(tmp_path, [silent])


# --- conversations


WILD: list[tuple[str, dict[str, Any], list[str], Sequence[str]]] = [
    (
        "OpenAI",
        {"messages": [{"role": "system", "content": "S"}, Q, {**GOOD, "weight": 1}]},
        ["good"],
        (),
    ),
    (
        "OpenAI, nulls",
        {"messages": [Q, {**GOOD, "tool_calls": None, "refusal": None}]},
        ["good"],
        (),
    ),
    (
        "UltraChat",
        {"prompt": "Q", "prompt_id": "f00", "messages": [Q, GOOD]},
        ["good"],
        ["prompt", "prompt_id"],
    ),
    (
        "Alpaca",
        {"instruction": "Q", "input": "", "output": "good", "text": "Below is"},
        ["good"],
        ["text"],
    ),
    (
        "Dolly",
        {"instruction": "Q", "context": "C", "response": "good", "category": "qa"},
        ["good"],
        ["category", "context"],
    ),
    (
        "LlamaFactory, alpaca",
        {
            "instruction": "Q",
            "input": "I",
            "output": "good",
            "system": "S",
            "history": [["a", "b"]],
        },
        ["b", "good"],
        (),
    ),
    (
        "LlamaFactory, sharegpt",
        {"conversations": SHARED, "system": "S", "tools": "[]"},
        ["good"],
        (),
    ),
    ("LlamaFactory, KTO", {"messages": [Q, GOOD], "kto_tag": True}, ["good"], ()),
    ("TRL, KTO", {"prompt": "Q", "completion": "good", "label": True}, ["good"], ()),
    ("TRL, KTO of messages", {"prompt": [Q], "completion": [GOOD], "label": True}, ["good"], ()),
    (
        "ms-swift",
        {"query": "Q", "response": "good", "history": [["a", "b"]], "system": "S"},
        ["good"],
        (),
    ),
    (
        "ms-swift, loss by message",
        {"messages": [Q, {**BAD, "loss": False}, Q, {**GOOD, "loss": True}]},
        ["good"],
        (),
    ),
    (
        "Axolotl, training by message",
        {"messages": [Q, {**BAD, "training": False}, Q, {**GOOD, "training": True}]},
        ["good"],
        (),
    ),
    (
        "Axolotl, weight of ShareGPT",
        {"conversations": [SHARED[0], {"from": "gpt", "value": "bad", "weight": 0}, *SHARED]},
        ["good"],
        (),
    ),
    (
        "OpenHermes",
        {"conversations": SHARED, "title": "T", "views": 3},
        ["good"],
        ["title", "views"],
    ),
    ("ShareGPT, as JSON", {"conversations": json.dumps(SHARED), "id": "x"}, ["good"], ["id"]),
]


@pytest.mark.parametrize(
    ("record", "answers", "unused"), [case[1:] for case in WILD], ids=[case[0] for case in WILD]
)
def test_records_of_other_trainers_are_used_or_named(
    tmp_path: Path, record: dict[str, Any], answers: list[str], unused: Sequence[str]
) -> None:
    (document,) = documents(tmp_path, [record], "parquet")
    assert sorted(document.unused) == sorted(unused)
    store = made(tmp_path, [record])
    assert "".join(map(learnt_text, [store] * len(store), range(len(store)))) == "".join(answers)
    assert (
        store.manifest is not None
        and sorted(store.manifest.unused) == sorted(unused)
        and not store.manifest.left_out
    )


def learnt_text(store: Store, document: int) -> str:
    return learnt(store, document).replace("<|im_end|>", "")


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_has_the_name_that_the_template_reads(
    tmp_path: Path, checkpoints: dict[str, Path], key: str, name: str
) -> None:
    template = SMOLLM2.replace(
        "message['content']", f"(message.{name} | default('')) + message['content']"
    )
    store = made(
        tmp_path, [{"messages": [Q, {**GOOD, key: "Hm. "}]}], checkpoints["SmolLM2"], template
    )
    assert (
        learnt(store) == "Hm. good<|im_end|>"
        and store.manifest is not None
        and not store.manifest.left_out
    )


# --- files


TEXT_LINES = "".join(json.dumps({"text": text}) + "\n" for text in ("one", "two")).encode()


def zstd(content: bytes) -> bytes:
    return bytes(pyarrow.Codec("zstd").compress(content, asbytes=True))


@pytest.mark.parametrize("pack", [gzip.compress, zstd], ids=["gz", "zst"])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("s.jsonl", TEXT_LINES),
        ("s.json", b'[{"text": "one"}, {"text": "two"}]'),
        ("s.ndjson", TEXT_LINES),
        ("s.json", TEXT_LINES),
        ("s.csv", b"text\none\ntwo\n"),
        ("s.tsv", b"text\tid\none\t1\ntwo\t2\n"),
    ],
)
def test_compressed_records_are_read_as_the_others(
    tmp_path: Path, name: str, content: bytes, pack: Any
) -> None:
    ending = ".gz" if pack is gzip.compress else ".zst"
    (tmp_path / (name + ending)).write_bytes(pack(content))
    for source in (tmp_path / (name + ending), tmp_path):
        assert [document.text for document in open_corpus(str(source)).documents()] == [
            "one",
            "two",
        ]
    (tmp_path / (name + ending)).write_bytes(pack(content)[:-9])
    with pytest.raises(
        CorpusError, match=r"is damaged, or not compressed as its ending says: .*; write it again"
    ):
        list(open_corpus(str(tmp_path)).documents())


def test_other_compressed_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "code.py.gz").write_bytes(gzip.compress(b"x = 1"))
    write_jsonl(tmp_path / "s.jsonl", [{"text": "one"}])
    assert open_corpus(str(tmp_path)).not_read == {".gz beside records": 1}
    with pytest.raises(CorpusError, match="only records may be compressed"):
        open_corpus(str(tmp_path / "code.py.gz"))


def test_streams_of_arrow_are_read_and_damage_is_refused(tmp_path: Path) -> None:
    stream = io.BytesIO()
    table = pyarrow.table({"text": ["one", "two"], "id": [1, 2]})
    with pyarrow.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table, max_chunksize=1)
    (tmp_path / "s.arrow").write_bytes(stream.getvalue())
    read = [
        (document.text, document.name, document.unused)
        for document in open_corpus(str(tmp_path)).documents()
    ]
    assert read == [("one", "s.arrow:0", ("id",)), ("two", "s.arrow:1", ("id",))]
    for damaged in (b"", stream.getvalue()[:100], b"ARROW1\0\0" + bytes(99)):
        (tmp_path / "s.arrow").write_bytes(damaged)
        with pytest.raises(CorpusError, match="is not an Arrow file, or damaged"):
            list(open_corpus(str(tmp_path)).documents())


def megatron(
    folder: Path, documents: Sequence[Sequence[Sequence[int]]], kind: str = "<u2", code: int = 8
) -> Path:
    """Writes documents of sequences of tokens, by the published format of Megatron's indexed data
    sets."""
    sequences = [np.array(tokens, kind) for document in documents for tokens in document]
    sizes = np.array([len(tokens) for tokens in sequences], "<i4")
    ends = np.cumsum([0, *(tokens.nbytes for tokens in sequences)])
    firsts = np.cumsum([0, *map(len, documents)]).astype("<i8")
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(firsts))
    (folder / "m_document.idx").write_bytes(
        head + sizes.tobytes() + ends[:-1].astype("<i8").tobytes() + firsts.tobytes()
    )
    (folder / "m_document.bin").write_bytes(b"".join(tokens.tobytes() for tokens in sequences))
    return folder / "m_document.idx"


@pytest.mark.parametrize(("kind", "code"), [("<u2", 8), ("<i4", 4), ("<i8", 5), ("<i2", 3)])
def test_documents_of_megatron_are_read(tmp_path: Path, kind: str, code: int) -> None:
    """A document is one sequence, or several (sentences)."""
    (tmp_path / "m").mkdir()
    index = megatron(tmp_path / "m", [[IDS], [], [[72], [105, 33]]], kind, code)
    for source in (index, index.with_suffix(".bin"), index.parent):
        corpus = open_corpus(str(source))
        manifest = prepare(corpus, tmp_path / "store", tokenizer="bytes", overwrite=True).manifest
        store = Store.open(tmp_path / "store")
        read = [
            store.tokens(document, 0, int(length))[0].tolist()
            for document, length in enumerate(store.lengths)
        ]
        assert read == [IDS, [72, 105, 33]] and list(store.names) == [
            "m_document.idx:0",
            "m_document.idx:2",
        ]
        assert manifest.empty_documents == 1 and not corpus.not_read and len(corpus.files) == 2
    first = corpus.fingerprint()
    megatron(tmp_path / "m", [[IDS[::-1]], [], [[72], [105, 33]]], kind, code)
    assert open_corpus(str(source)).fingerprint() != first, "of both files"


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda index: b"", "does not begin as Megatron's"),
        (lambda index: index[:-8], "bytes, but 3 sequences and 3 indices need"),
        (lambda index: index + bytes(3), "its sequences have modes: only text is supported"),
        (lambda index: index[:17] + bytes([7]) + index[18:], "type 7 of tokens"),
        (lambda index: index[:9] + bytes([2]) + index[10:], "it has version 2"),
        (
            lambda index: index[:34] + bytes([99]) + index[35:],
            r"end after the 16 bytes of m_document\.bin",
        ),
        (lambda index: index[:-8] + bytes(8), "its documents are not in order"),
    ],
)
def test_damaged_files_of_megatron_are_refused(
    tmp_path: Path, damage: Callable[[bytes], bytes], says: str
) -> None:
    index = megatron(tmp_path, [[IDS], [[72], [105, 33]]])
    index.write_bytes(damage(index.read_bytes()))
    with pytest.raises(CorpusError, match=says):
        list(open_corpus(str(index)).documents())


def test_of_megatron_both_files_are_needed(tmp_path: Path) -> None:
    index = megatron(tmp_path, [[IDS]])
    index.with_suffix(".bin").rename(tmp_path / "weights.bin")
    with pytest.raises(CorpusError, match=r"NAME\.idx and NAME\.bin"):
        list(open_corpus(str(index)).documents())
    index.unlink()
    with pytest.raises(CorpusError, match=r"folder without files to read; 1 × ending \.bin"):
        open_corpus(str(tmp_path))


# --- limits, and the hub


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"max_documents": 2}, ["one", "three"]),
        ({"max_bytes": 3}, ["one"]),
        ({"max_bytes": 4}, ["one", "three"]),
        ({"max_documents": 3, "max_bytes": 1 << 20}, ["one", "three", "more"]),
        ({"max_documents": 9}, ["one", "three", "more"]),
    ],
)
def test_reading_stops_at_a_limit(tmp_path: Path, options: dict[str, int], kept: list[str]) -> None:
    """Documents that are left out do not count."""
    source = write_jsonl(
        tmp_path / "s.jsonl", [{"text": text} for text in ("one", "", "three", "more")]
    )
    limited, whole_source = open_corpus(str(source), **options), open_corpus(str(source))
    assert [document.text for document in limited.documents()] == kept
    assert limited.fingerprint() != whole_source.fingerprint()
    assert prepare(limited, tmp_path / "store", tokenizer="bytes").manifest.limits == options


def test_limits_count_token_ids_by_four(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "ids.jsonl", [{"input_ids": IDS}] * 3)
    assert len(list(open_corpus(str(source), max_bytes=21).documents())) == 2
    with pytest.raises(CorpusError, match="max_documents is 0: must be a whole number ≥ 1"):
        open_corpus(str(source), max_documents=0)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A hub with the data set own/set, which `datasets` loads from a folder. Returns the options of
    every call, when made."""
    (tmp_path / "hub").mkdir()
    for split in ("train", "test"):
        write_jsonl(
            tmp_path / "hub" / f"{split}.jsonl",
            [{"text": f"{split} {number}", "id": number} for number in range(5)],
        )
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for name in ("load_dataset", "load_dataset_builder"):
        real = getattr(datasets, name)

        def loads(
            path: str,
            subset: str | None,
            real: Any = real,
            revision: str | None = None,
            **options: Any,
        ) -> Any:
            if path != "own/set":
                raise ConnectionError(f"Couldn't reach {path!r} on the Hub")
            calls.append({"subset": subset, "revision": revision, **options})
            return real(str(tmp_path / "hub"), subset, cache_dir=str(tmp_path / "cache"), **options)

        monkeypatch.setattr(datasets, name, loads)
    return calls


def test_a_data_set_of_the_hub_is_read(
    tmp_path: Path, hub: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "prepare",
        "--source",
        "own/set",
        "--tokenizer",
        "bytes",
        "--out",
        str(tmp_path / "store"),
        "--split",
        "test",
    ]
    assert main([*command, "--revision", "v1"]) == 0
    assert "not used   id in 5 records" in capsys.readouterr().out
    store = Store.open(tmp_path / "store")
    assert [whole(store, document) for document in range(5)] == [
        f"test {number}<|endoftext|>" for number in range(5)
    ]
    assert [call["revision"] for call in hub] == ["v1"] * len(hub) and hub[-1]["streaming"] is False
    assert main([*command, "--revision", "v1"]) == 0
    assert "up to date" in capsys.readouterr().out
    assert main([*command, "--overwrite", "--max-documents", "2", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["documents"], summary["limits"], hub[-1]["streaming"]) == (
        2,
        {"max_documents": 2},
        True,
    )
    corpus = open_corpus("own/set", max_bytes=10)
    assert [document.text for document in corpus.documents()] == ["train 0", "train 1"]
    assert prepare(corpus, tmp_path / "bpe", vocab_size=300).manifest.documents == 2


@pytest.mark.parametrize(
    ("source", "options", "says"),
    [
        (
            "no/one",
            {},
            r"(?s)source 'no/one' is no file or folder, .*Couldn't reach.*Without a network, "
            r".*save_to_disk",
        ),
        ("own/set", {"split": "val"}, "--split or --revision"),
        ("own/set", {"subset": "x"}, "BuilderConfig 'x' not found"),
        ("own/set", {"as_text": True}, "omit --as-text, or correct it"),
        (
            "python-stdlib",
            {"revision": "v1"},
            "'python-stdlib' is no OWNER/NAME of the hub: omit --subset and --revision",
        ),
        ("a/b/c", {}, "does not exist"),
    ],
)
def test_what_is_not_on_the_hub_is_refused(
    hub: list[dict[str, Any]], source: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(CorpusError, match=says):
        list(open_corpus(source, **options).documents())


def test_the_order_of_documents_has_a_seed_of_its_own(tmp_path: Path) -> None:
    store = made(tmp_path, [{"text": f"text {number}"} for number in range(30)])

    def order(*settings: str) -> tuple[Piece, ...]:
        config = load(None, [f"data.store={store.path}", "batch.global_tokens=240", *settings])
        return steps_of_run(config, store, 1).step(0)[0]

    assert (
        order()
        == order("data.seed=0")
        == order("data.seed=0", "train.seed=5")
        != order("data.seed=5")
    )
    assert order("data.seed=5") == order("train.seed=5")


# --- documents that are too long


def test_a_truncated_piece_without_a_target_is_left_out(tmp_path: Path) -> None:
    """The store is read as training reads it."""
    store = made(
        tmp_path, [{"input_ids": [65] * 40 + IDS, "labels": [-100] * 40 + IDS}, {"input_ids": IDS}]
    )
    options: dict[str, Any] = {
        "global_tokens": 1,
        "seed": 0,
        "max_length": 8,
        "held_out_share": 0.0,
    }
    left, right = (
        make_steps(store, long_documents=f"truncate_{side}", **options)
        for side in ("left", "right")
    )
    assert isinstance(left, Sampler) and isinstance(right, Sampler)
    assert (left.pieces, right.pieces) == (2, 1)
    with pytest.raises(SamplerError, match="has 45 tokens, and 1 of 1 conversations"):
        make_steps(store, long_documents=None, **options)


@pytest.mark.parametrize(
    ("side", "dropped", "truncated", "read"),
    [
        ("drop", 1, 0, ["short"]),
        ("truncate_left", 0, 1, ["good" * 9, "short"]),
        ("truncate_right", 1, 0, ["short"]),
    ],
)
def test_prepare_has_the_same_words(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    side: str,
    dropped: int,
    truncated: int,
    read: list[str],
) -> None:
    """Cut at its end, the long conversation has no target left, so it is dropped. Texts stay as
    they are."""
    short = [{**Q, "content": "q"}, {**GOOD, "content": "short"}]
    records = [
        {"messages": [{**Q, "content": "Q" * 300}, {**GOOD, "content": "good" * 9}]},
        {"messages": short},
    ]
    source = write_jsonl(tmp_path / "s.jsonl", [*records, {"text": "x" * 300}])
    command = [
        "prepare",
        "--source",
        str(source),
        "--tokenizer",
        "bytes",
        "--out",
        str(tmp_path / "store"),
        "--max-length=120",
    ]
    assert main(command) == 2
    assert (
        "s.jsonl:1 has 398 tokens, more than --max-length 120: give --long-documents drop"
        in capsys.readouterr().err
    )
    assert main([*command, "--long-documents", side]) == 0
    told, store = capsys.readouterr().out, Store.open(tmp_path / "store")
    assert [learnt_text(store, document) for document in range(len(store) - 1)] == read
    assert ("dropped    1 conversations of more than 120 tokens" in told) == bool(dropped)
    assert ("truncated  1 conversations to 120 tokens" in told) == bool(truncated)
    assert store.lengths.max() == 301 and store.lengths[:-1].max() <= 120


def test_long_conversations_are_not_split(tmp_path: Path) -> None:
    with pytest.raises(
        ChatError, match="it must be one of error, drop, truncate_left, truncate_right"
    ):
        made(tmp_path, [{"messages": [Q, GOOD]}], max_length=100, long_documents="split")
