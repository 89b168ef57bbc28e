"""What a record says is obeyed, refused, or named with its count: flags on the loss, bad answers, systems, histories, tools."""

import json
from pathlib import Path
from typing import Any

import pytest

from longctx.cli import main
from longctx.data.records.chat import ChatError
from longctx.data.records.corpus import CorpusError, open_corpus
from longctx.data.records.formats import Document
from longctx.data.store.manifest import Manifest
from longctx.data.store.prepare import prepare
from longctx.data.store.store import Store
from tests import data_cases
from tests.data_cases import interrupt, written
from tests.template_cases import FAMILIES, TOOLS, chat

END = "<|im_end|>"
FUNCTION = TOOLS[0]["function"]


def documents(folder: Path, *records: dict[str, Any]) -> list[Document]:
    return list(open_corpus(str(written(folder, list(records)))).documents())


def learnt(store: Store, document: int = 0) -> str:
    """Returns the text with loss, without the end of the document, which ChatML as text trains after a trained last answer."""
    return data_cases.learnt(store, document).removesuffix("\n<|endoftext|>")


def made(folder: Path, records: list[dict[str, Any]], suffix: str = "jsonl", **options: Any) -> Store:
    if suffix == "jsonl":
        return data_cases.made(folder, records, **options)
    prepare(open_corpus(str(written(folder, records, suffix))), folder / "store", tokenizer="bytes", overwrite=True, **options)
    return Store.open(folder / "store")


def flagged(flag: dict[str, Any], kind: str) -> dict[str, Any]:
    """A conversation whose first answer has the flag, in a format."""
    asked, bad, again, good = chat("Q", "bad", "Again", "good")
    if kind == "messages":
        return {"messages": [asked, {**bad, **flag}, again, good]}
    if kind == "prompt-completion":
        return {"prompt": [asked], "completion": [{**bad, **flag}, again, good]}
    speakers = {"user": "human", "assistant": "gpt"}
    turns = [{"from": speakers[m["role"]], "value": m["content"], **m} for m in (asked, {**bad, **flag}, again, good)]
    return {"conversations": [{key: turn[key] for key in turn if key not in ("role", "content")} for turn in turns]}


# --- which messages have a loss


@pytest.mark.parametrize("flag", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": 0}, {"loss": False}])
@pytest.mark.parametrize("kind", ["messages", "conversations", "prompt-completion"])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_message_without_loss_is_not_learnt(tmp_path: Path, flag: dict[str, Any], kind: str, suffix: str) -> None:
    store = made(tmp_path, [flagged(flag, kind)], suffix)
    assert learnt(store) == f"good{END}"
    opposite = {key: type(value)(1) for key, value in flag.items()}
    assert learnt(made(tmp_path, [flagged(opposite, kind)], suffix)) == f"bad{END}good{END}"


@pytest.mark.parametrize("family", FAMILIES)
def test_templates_obey_it_too(tmp_path: Path, family: str, checkpoints: dict[str, Path]) -> None:
    checkpoint = checkpoints[family]
    both = learnt(made(tmp_path, [{"messages": chat("Q", "bad", "Again", "good")}], tokenizer=checkpoint))
    one = learnt(made(tmp_path, [flagged({"weight": 0}, "messages")], tokenizer=checkpoint))
    assert "bad" not in one and both.endswith(one) and "good" in one and "bad" in both[: -len(one)]


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ({"weight": -0.5}, "has `weight` -0.5: it must be 0 or false for no loss, or 1 or true; only a `weight` may be any"),
        ({"weight": float("nan")}, "has `weight` nan: it must be 0 or"),
        ({"weight": float("inf")}, "has `weight` inf: it must be 0 or"),
        ({"weight": 1e-50}, "has `weight` 1e-50: it must be 0 or"),
        ({"weight": "0.5"}, "has `weight` '0.5': it must be 0 or"),
        ({"weight": 10**400}, "has `weight` 1000"),
        ({"train": 0.5}, "has `train` 0.5: it must be 0 or"),
        ({"train": "no"}, "has `train` 'no': it must be 0 or false"),
        ({"mask": True}, "has `mask` True: tools differ in what it means: write `train: true` or `train: false`"),
        ({"masked": 1}, "has `masked` 1: tools differ"),
        ({"loss_mask": 0}, "has `loss_mask` 0: tools differ"),
        ({"train_detail": [{"begin_offset": 0}]}, "has `train_detail`"),
    ],
)
def test_flags_that_are_not_plain_are_refused(tmp_path: Path, flag: dict[str, Any], says: str) -> None:
    for kind in ("messages", "conversations", "prompt-completion"):
        with pytest.raises(CorpusError, match=r"s\.jsonl:1: message [01], of role assistant, has") as caught:
            documents(tmp_path, flagged(flag, kind))
        assert says in str(caught.value)


def test_only_the_assistant_has_a_loss(tmp_path: Path) -> None:
    asked, answered = chat("Q", "A")
    assert documents(tmp_path, {"messages": [{**asked, "weight": 0}, {**answered, "weight": 1}]})[0].messages == (
        asked,
        answered,
    )
    with pytest.raises(CorpusError, match=r"message 0, of role user, has `train` True, but only the assistant's"):
        documents(tmp_path, {"messages": [{**asked, "train": True}, answered]})


def test_conversations_without_loss_are_dropped_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked, answered = chat("Q", "A")
    silent = {"messages": [asked, {**answered, "weight": 0}]}
    source = written(tmp_path, [silent, {"messages": [asked, answered]}, silent])
    assert main(["prepare", "--source", str(source), "--tokenizer", "bytes", "--out", str(tmp_path / "store")]) == 0
    assert "dropped    2 documents that switch off the loss of everything" in capsys.readouterr().out
    store = Store.open(tmp_path / "store")
    assert (store.manifest.documents, store.manifest.untrained_documents) == (1, 2)
    with pytest.raises(CorpusError, match="has no document with text: 1 switch off the loss of everything"):
        made(tmp_path, [silent])
    with pytest.raises(ChatError, match=r"message 1 has no loss, but --train-on all trains on every token"):
        made(tmp_path, [flagged({"weight": 0}, "messages")], train_on="all")
    last = {"messages": [asked, answered, asked, {**answered, "weight": 0}]}
    with pytest.raises(ChatError, match=r"message 3 has no loss, but --train-on last trains on it alone"):
        made(tmp_path, [last], train_on="last")
    assert learnt(made(tmp_path, [flagged({"weight": 0}, "messages")], train_on="last")) == f"good{END}"


# --- marks of answers


def test_an_answer_marked_as_good_is_learnt(tmp_path: Path) -> None:
    store = made(tmp_path, [{"prompt": "Q", "completion": "good", "label": True}])
    assert (learnt(store), store.manifest.unused) == (f"good{END}", {})
    store = made(tmp_path, [{"prompt": "Q", "completion": "good", "label": "sports"}, {"text": "x", "label": 0}])
    assert store.manifest.unused == {"label": 2}, "classes are no marks of a bad answer"


def test_an_empty_rejected_answer_is_none(tmp_path: Path) -> None:
    (document,) = documents(tmp_path, {"messages": chat("Q", "A"), "rejected_response": ""})
    assert document.format == "messages" and not document.unused


# --- what stands before the question, and beside it


def test_history_and_system_are_obeyed(tmp_path: Path) -> None:
    history = [["Q1", "A1"], ["Q2", "A2"]]
    first, second, third, fourth = documents(
        tmp_path,
        {"instruction": "Q3", "input": "I", "output": "A3", "history": history, "system": "S"},
        {"prompt": "Q3", "completion": "A3", "history": history, "system": "S"},
        {"messages": chat("Q", "A"), "system": "S"},
        {"messages": chat("Q", "A", system="S"), "system": "S", "history": []},
    )
    assert list(first.messages) == chat("Q1", "A1", "Q2", "A2", "Q3\n\nI", "A3", system="S") and first.first_trained == 0
    assert list(second.messages) == chat("Q1", "A1", "Q2", "A2", "Q3", "A3", system="S") and second.first_trained == 6
    assert list(third.messages) == list(fourth.messages) == chat("Q", "A", system="S")
    assert not any(document.unused for document in (first, second, third, fourth))


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"messages": chat("Q", "A", system="S"), "system": "T"}, "`system` differs from the system message at the start"),
        ({"messages": chat("Q", "A"), "history": [["Q", "A"]]}, "`history` is only read before an instruction or a prompt"),
        ({"instruction": "Q", "output": "A", "history": [["Q"]]}, "`history` must be a list of questions and answers"),
        (
            {"instruction": "Q", "output": "A", "history": "Q"},
            "`history` is not JSON: Expecting value at column 1",
        ),
        ({"messages": chat("Q", "A"), "tools": TOOLS, "functions": [FUNCTION]}, "has both `tools` and `functions`"),
        ({"messages": chat("Q", "A"), "functions": ["add"]}, "`functions` must be a list of objects"),
        ({"messages": chat("Q", "A"), "documents": [{"text": "D"}]}, "`documents` is not supported: write the documents into"),
        ({"messages": chat("Q", "A"), "images": ["cat.png"]}, "`images` is not supported: train conversations with images"),
        ({"prompt": "Q", "completion": "A", "audio": "a.wav"}, "`audio` is not supported: only text is"),
        (
            {"conversations": [{"from": "human", "value": "Q"}], "video": "v.mp4"},
            "inside TRL's SFTTrainer, by longctx.trainers",
        ),
        ({"messages": chat("Q", "A"), "loss_mask": [0, 1]}, "`loss_mask` is not supported: tools differ in what it means"),
        ({"conversations": [{"from": "human", "value": "Q"}], "mask": "User"}, "`mask` is not supported: tools differ"),
        ({"messages": chat("Q", "A"), "chat_template_kwargs": {"x": 1}}, "`chat_template_kwargs` is not supported"),
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_what_is_not_supported_is_refused(tmp_path: Path, record: dict[str, Any], says: str, suffix: str) -> None:
    with pytest.raises(CorpusError) as caught:
        list(open_corpus(str(written(tmp_path, [record], suffix))).documents())
    assert says in str(caught.value)


def test_functions_are_tools(tmp_path: Path) -> None:
    bare, whole, as_text = documents(
        tmp_path,
        *({"messages": chat("Q", "A"), "functions": functions} for functions in ([FUNCTION], TOOLS, json.dumps([FUNCTION]))),
    )
    assert bare.tools == whole.tools == as_text.tools == TOOLS and not bare.unused


def test_speakers_have_many_names(tmp_path: Path) -> None:
    call_of_add = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    as_text = json.dumps({"name": "add", "arguments": {"a": 2}})
    turns = [("System", "S"), ("Human", "Q"), ("tool_call", as_text), ("tool_response", "5"), ("model", "A"), ("USER", "!")]
    (shared,) = documents(tmp_path, {"conversations": [{"from": role, "value": text} for role, text in turns]})
    (messages,) = documents(tmp_path, {"messages": [{"role": role, "content": text} for role, text in turns]})
    assert shared.messages == messages.messages
    assert [message["role"] for message in shared.messages] == ["system", "user", "assistant", "tool", "assistant", "user"]
    assert shared.messages[2] == {"role": "assistant", "tool_calls": [call_of_add]}
    store = made(tmp_path, [{"messages": [{"role": "developer", "content": "D"}, *chat("Q", "A")]}])
    assert "<|im_start|>developer\nD<|im_end|>" in store.tokenizer.decode(store.read(0, 0, int(store.lengths[0]))[0])
    with pytest.raises(ChatError, match=r"s\.jsonl:1: message 0 has role 'critic': it must be one of system, developer"):
        made(tmp_path, [{"messages": [{"role": "critic", "content": "D"}, *chat("Q", "A")]}])


def test_a_call_by_its_old_name_is_a_tool_call(tmp_path: Path) -> None:
    one = {"name": "add", "arguments": '{"a": 2}'}
    for content in ("", None):
        record = {"messages": [*chat("Q"), {"role": "assistant", "content": content, "function_call": one}]}
        (document,) = documents(tmp_path, record)
        assert document.messages[1]["tool_calls"] == [{"type": "function", "function": one}]
        assert "function_call" not in document.messages[1]
        with pytest.raises(ChatError, match="message 1 calls a tool, which ChatML does not support"):
            made(tmp_path, [record])
    (document,) = documents(tmp_path, {"messages": [*chat("Q"), {"role": "function", "name": "add", "content": "5"}]})
    assert document.messages[1] == {"role": "tool", "name": "add", "content": "5"}


# --- keys without a known meaning


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "dataset"])
def test_keys_that_are_not_used_are_counted(tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    records: list[dict[str, Any]] = [
        {"messages": chat("Q", "A"), "source": "web", "metadata": {"id": 3}, "text": "Q A"},
        {"messages": chat("Q", "B"), "source": "book", "metadata": {"id": 4}, "text": None},
    ]
    source = written(tmp_path, records, suffix)
    assert main(["prepare", "--source", str(source), "--tokenizer", "bytes", "--out", str(tmp_path / "store")]) == 0
    assert "not used   metadata in 2, source in 2, text in 1 records" in capsys.readouterr().out
    assert Manifest.load(tmp_path / "store").unused == {"metadata": 2, "source": 2, "text": 1}
    command = ["prepare", "--source", str(source), "--tokenizer", "bytes", "--out", str(tmp_path / "text"), "--text-column"]
    assert main([*command, "source"]) == 0
    told = capsys.readouterr().out
    assert "not used   messages in 2, metadata in 2, text in 1 records" in told or "text in 2 records" in told


def test_of_two_answers_one_is_named(tmp_path: Path) -> None:
    (document,) = documents(tmp_path, {"prompt": "Q", "completion": "A", "response": "B", "input": "I", "id": None})
    assert document.messages[1]["content"] == "A" and document.unused == ("response", "input")


@pytest.mark.parametrize("turn", [{"name": "Bob"}, {"reasoning_content": "Hm."}, {"thinking": "Hm."}, {"id": 7}])
def test_chatml_names_what_it_leaves_out(tmp_path: Path, turn: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    asked, answered = chat("Q", "A")
    records = [{"messages": [asked, {**answered, **turn}]}]
    records += [{"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A", **turn}]}]
    source = written(tmp_path, records)
    assert main(["prepare", "--source", str(source), "--tokenizer", "bytes", "--out", str(tmp_path / "store")]) == 0
    assert f"left out   {next(iter(turn))} in 2 conversations" in capsys.readouterr().out
    assert [learnt(Store.open(tmp_path / "store"), place) for place in (0, 1)] == [f"A{END}"] * 2
    if "name" not in turn and "id" not in turn:
        with pytest.raises(ChatError, match=r"s\.jsonl:1: message 1 would be an empty answer, as ChatML leaves out its"):
            made(tmp_path, [{"messages": [asked, {**answered, "content": "", **turn}]}])


# --- preparations that stopped


def test_an_interrupted_preparation_goes_on(
    tmp_path: Path, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the same bytes and counts, also after conversations that were dropped."""
    monkeypatch.setattr("longctx.data.store.writer.BATCH_DOCUMENTS", 2)
    monkeypatch.setattr("longctx.data.store.writer.PART_TOKENS", 50)
    asked, *_ = chat("Q")
    lengths = [200 if number % 3 == 0 else 20 for number in range(13)]
    records = [{"messages": [asked, {"role": "assistant", "content": "A " * n, "name": "Bob"}], "id": 1} for n in lengths]
    records[4]["messages"][1]["weight"] = 0
    corpus = open_corpus(str(written(tmp_path, records)))
    options: dict[str, Any] = {"tokenizer": str(checkpoints["SmolLM2"]), "max_length": 300, "long_documents": "drop"}
    with pytest.raises(KeyboardInterrupt):
        prepare(corpus, tmp_path / "store", **options, progress=interrupt)
    assert list((tmp_path / "store.partial").glob("data-*.arrow"))
    manifest = prepare(corpus, tmp_path / "store", **options).manifest
    assert (manifest.documents, manifest.dropped_documents, manifest.untrained_documents) == (7, 5, 1)
    assert (manifest.unused, manifest.left_out) == ({"id": 13}, {"name": 7})
    assert manifest == prepare(corpus, tmp_path / "whole", **options).manifest, "with checksums of all files"
    with pytest.raises(CorpusError, match=r"all 12 conversations of .* have more than 3 tokens: raise --max-length"):
        prepare(corpus, tmp_path / "none", **{**options, "max_length": 3})


def test_arguments_must_be_an_object_or_nothing(tmp_path: Path) -> None:
    for arguments, says in (("[1]", "arguments of type list"), ("x", "is not JSON"), ("null", "arguments of type NoneType")):
        with pytest.raises(CorpusError, match=says):
            documents(tmp_path, _arguments(arguments))
    documents(tmp_path, _arguments(""))


def _arguments(text: str) -> dict[str, Any]:
    return {"messages": [*chat("Q"), {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": text}}]}]}


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "Q", "response": "good", "output": "log"},
        {"instruction": "Q", "output": "good", "completion": "other"},
        {"conversations": json.dumps([{"from": "human", "value": "Q"}, {"from": "gpt", "value": "good"}]), "id": 7},
    ],
)
def test_the_answer_is_that_of_the_format(tmp_path: Path, record: dict[str, Any]) -> None:
    """Conversations may be their JSON."""
    store = made(tmp_path, [record])
    assert learnt(store) == "good<|im_end|>" and len(store.manifest.unused) == 1
