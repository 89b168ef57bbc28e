"""What a record says is obeyed, refused, or named with its count: flags on the loss, bad answers,
systems, histories, tools."""

import json
from pathlib import Path
from typing import Any

import pytest

from longctx.cli import main
from longctx.data.records.chat import ChatError
from longctx.data.records.corpus import CorpusError
from longctx.data.records.sources import open_corpus
from longctx.data.store.manifest import Manifest
from longctx.data.store.prepare import prepare
from longctx.data.store.store import Store
from tests.data_cases import documents, interrupt, learnt, made, whole, written
from tests.template_cases import FAMILIES, SMOLLM2, TOOLS, call, chat

END = "<|im_end|>"
FUNCTION = TOOLS[0]["function"]


def flagged(flag: dict[str, Any], kind: str) -> dict[str, Any]:
    """A conversation whose first answer has the flag, in a format."""
    asked, bad, again, good = chat("Q", "bad", "Again", "good")
    if kind == "messages":
        return {"messages": [asked, {**bad, **flag}, again, good]}
    if kind == "prompt-completion":
        return {"prompt": [asked], "completion": [{**bad, **flag}, again, good]}
    speakers = {"user": "human", "assistant": "gpt"}
    turns = [
        {"from": speakers[m["role"]], "value": m["content"], **m}
        for m in (asked, {**bad, **flag}, again, good)
    ]
    return {
        "conversations": [
            {key: turn[key] for key in turn if key not in ("role", "content")} for turn in turns
        ]
    }


# --- which messages have a loss


@pytest.mark.parametrize(
    "flag", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": 0}, {"loss": False}]
)
@pytest.mark.parametrize("kind", ["messages", "conversations", "prompt-completion"])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_message_without_loss_is_not_learnt(
    tmp_path: Path, flag: dict[str, Any], kind: str, suffix: str
) -> None:
    store = made(tmp_path, [flagged(flag, kind)], suffix=suffix)
    assert learnt(store) == f"good{END}"
    opposite = {key: type(value)(1) for key, value in flag.items()}
    assert learnt(made(tmp_path, [flagged(opposite, kind)], suffix=suffix)) == f"bad{END}good{END}"


@pytest.mark.parametrize("family", FAMILIES)
def test_templates_obey_it_too(tmp_path: Path, family: str, checkpoints: dict[str, Path]) -> None:
    checkpoint = checkpoints[family]
    both = learnt(
        made(tmp_path, [{"messages": chat("Q", "bad", "Again", "good")}], tokenizer=checkpoint)
    )
    one = learnt(made(tmp_path, [flagged({"weight": 0}, "messages")], tokenizer=checkpoint))
    assert "bad" not in one and both.endswith(one) and "good" in one and "bad" in both[: -len(one)]


def test_only_the_assistant_has_a_loss(tmp_path: Path) -> None:
    asked, answered = chat("Q", "A")
    (document,) = documents(
        tmp_path, [{"messages": [{**asked, "weight": 0}, {**answered, "weight": 1}]}]
    )
    assert document.messages == (asked, answered)


def test_conversations_without_loss_are_dropped_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, answered = chat("Q", "A")
    silent = {"messages": [asked, {**answered, "weight": 0}]}
    source = written(tmp_path, [silent, {"messages": [asked, answered]}, silent])
    assert (
        main(
            [
                "prepare",
                "--source",
                str(source),
                "--tokenizer",
                "bytes",
                "--out",
                str(tmp_path / "store"),
            ]
        )
        == 0
    )
    assert (
        "dropped    2 documents that switch off the loss of everything" in capsys.readouterr().out
    )
    store = Store.open(tmp_path / "store")
    assert (store.manifest.documents, store.manifest.untrained_documents) == (1, 2)
    with pytest.raises(
        CorpusError, match="has no document with text: 1 switch off the loss of everything"
    ):
        made(tmp_path, [silent])
    with pytest.raises(
        ChatError, match=r"message 1 has no loss, but --train-on all trains on every token"
    ):
        made(tmp_path, [flagged({"weight": 0}, "messages")], train_on="all")
    last = {"messages": [asked, answered, asked, {**answered, "weight": 0}]}
    with pytest.raises(
        ChatError, match=r"message 3 has no loss, but --train-on last trains on it alone"
    ):
        made(tmp_path, [last], train_on="last")
    assert (
        learnt(made(tmp_path, [flagged({"weight": 0}, "messages")], train_on="last"))
        == f"good{END}"
    )


# --- what stands before the question, and beside it


def test_history_and_system_are_obeyed(tmp_path: Path) -> None:
    given = {"history": [["Q1", "A1"], ["Q2", "A2"]], "system": "S"}
    records = [
        {"instruction": "Q3", "input": "I", "output": "A3", **given},
        {"prompt": "Q3", "completion": "A3", **given},
        {"messages": chat("Q", "A"), "system": "S"},
        {"messages": chat("Q", "A", system="S"), "system": "S", "history": []},
    ]
    first, second, third, fourth = documents(tmp_path, records)
    assert (
        list(first.messages) == chat("Q1", "A1", "Q2", "A2", "Q3\n\nI", "A3", system="S")
        and first.first_trained == 0
    )
    assert (
        list(second.messages) == chat("Q1", "A1", "Q2", "A2", "Q3", "A3", system="S")
        and second.first_trained == 6
    )
    assert list(third.messages) == list(fourth.messages) == chat("Q", "A", system="S")
    assert not any(document.unused for document in (first, second, third, fourth))


def test_functions_are_tools(tmp_path: Path) -> None:
    given = ([FUNCTION], TOOLS, json.dumps([FUNCTION]))
    bare, whole, as_text = documents(
        tmp_path, [{"messages": chat("Q", "A"), "functions": functions} for functions in given]
    )
    assert bare.tools == whole.tools == as_text.tools == TOOLS and not bare.unused


def test_speakers_have_many_names(tmp_path: Path) -> None:
    call_of_add = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    as_text = json.dumps({"name": "add", "arguments": {"a": 2}})
    turns = [
        ("System", "S"),
        ("Human", "Q"),
        ("tool_call", as_text),
        ("tool_response", "5"),
        ("model", "A"),
        ("USER", "!"),
    ]
    (shared,) = documents(
        tmp_path, [{"conversations": [{"from": role, "value": text} for role, text in turns]}]
    )
    (messages,) = documents(
        tmp_path, [{"messages": [{"role": role, "content": text} for role, text in turns]}]
    )
    assert shared.messages == messages.messages
    assert [message["role"] for message in shared.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
    ]
    assert shared.messages[2] == {"role": "assistant", "tool_calls": [call_of_add]}
    store = made(tmp_path, [{"messages": [{"role": "developer", "content": "D"}, *chat("Q", "A")]}])
    assert "<|im_start|>developer\nD<|im_end|>" in store.tokenizer.decode(
        store.read(0, 0, int(store.lengths[0]))[0]
    )
    with pytest.raises(
        ChatError,
        match=r"s\.jsonl:1: message 0 has role 'critic': it must be one of system, developer",
    ):
        made(tmp_path, [{"messages": [{"role": "critic", "content": "D"}, *chat("Q", "A")]}])


def test_a_turn_may_have_several_tool_calls(tmp_path: Path) -> None:
    calls = [{"name": "add", "arguments": {"a": number}} for number in (1, 2)]
    for said in (calls, calls[:1], calls[0]):
        turns = [
            {"from": "human", "value": "Q"},
            {"from": "function_call", "value": json.dumps(said)},
        ]
        (document,) = documents(tmp_path, [{"conversations": turns}])
        made_calls = document.messages[1]["tool_calls"]
        expected = said if isinstance(said, list) else [said]
        assert [each["function"]["name"] for each in made_calls] == ["add"] * len(expected)


def test_a_call_by_its_old_name_is_a_tool_call(tmp_path: Path) -> None:
    one = {"name": "add", "arguments": '{"a": 2}'}
    for content in ("", None):
        record = {
            "messages": [
                *chat("Q"),
                {"role": "assistant", "content": content, "function_call": one},
            ]
        }
        (document,) = documents(tmp_path, [record])
        assert document.messages[1]["tool_calls"] == [{"type": "function", "function": one}]
        assert "function_call" not in document.messages[1]
        with pytest.raises(
            ChatError, match="message 1 calls a tool, which ChatML does not support"
        ):
            made(tmp_path, [record])
    (document,) = documents(
        tmp_path, [{"messages": [*chat("Q"), {"role": "function", "name": "add", "content": "5"}]}]
    )
    assert document.messages[1] == {"role": "tool", "name": "add", "content": "5"}


# --- keys without a known meaning


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "dataset"])
def test_keys_that_are_not_used_are_counted(
    tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    records: list[dict[str, Any]] = [
        {"messages": chat("Q", "A"), "source": "web", "metadata": {"id": 3}, "text": "Q A"},
        {"messages": chat("Q", "B"), "source": "book", "metadata": {"id": 4}, "text": None},
    ]
    source = written(tmp_path, records, suffix)
    assert (
        main(
            [
                "prepare",
                "--source",
                str(source),
                "--tokenizer",
                "bytes",
                "--out",
                str(tmp_path / "store"),
            ]
        )
        == 0
    )
    assert "not used   metadata in 2, source in 2, text in 1 records" in capsys.readouterr().out
    assert Manifest.load(tmp_path / "store").unused == {"metadata": 2, "source": 2, "text": 1}
    command = [
        "prepare",
        "--source",
        str(source),
        "--tokenizer",
        "bytes",
        "--out",
        str(tmp_path / "text"),
        "--text-column",
    ]
    assert main([*command, "source"]) == 0
    told = capsys.readouterr().out
    assert (
        "not used   messages in 2, metadata in 2, text in 1 records" in told
        or "text in 2 records" in told
    )


def test_what_is_not_used_is_named(tmp_path: Path) -> None:
    given = {"prompt": "Q", "completion": "A", "response": "B", "input": "I", "id": None}
    two_answers, no_rejected = documents(
        tmp_path, [given, {"messages": chat("Q", "A"), "rejected_response": ""}]
    )
    assert two_answers.messages[1]["content"] == "A" and two_answers.unused == ("response", "input")
    assert no_rejected.format == "messages" and not no_rejected.unused


@pytest.mark.parametrize(
    "turn", [{"name": "Bob"}, {"reasoning_content": "Hm."}, {"thinking": "Hm."}, {"id": 7}]
)
def test_chatml_names_what_it_leaves_out(
    tmp_path: Path, turn: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    asked, answered = chat("Q", "A")
    records = [{"messages": [asked, {**answered, **turn}]}]
    records += [
        {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A", **turn}]}
    ]
    source = written(tmp_path, records)
    assert (
        main(
            [
                "prepare",
                "--source",
                str(source),
                "--tokenizer",
                "bytes",
                "--out",
                str(tmp_path / "store"),
            ]
        )
        == 0
    )
    assert f"left out   {next(iter(turn))} in 2 conversations" in capsys.readouterr().out
    assert [learnt(Store.open(tmp_path / "store"), place) for place in (0, 1)] == [f"A{END}"] * 2
    if "name" not in turn and "id" not in turn:
        with pytest.raises(
            ChatError,
            match=r"s\.jsonl:1: message 1 would be an empty answer, as ChatML leaves out its",
        ):
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
    records = [
        {"messages": [asked, {"role": "assistant", "content": "A " * n, "name": "Bob"}], "id": 1}
        for n in lengths
    ]
    records[4]["messages"][1]["weight"] = 0
    corpus = open_corpus(str(written(tmp_path, records)))
    options: dict[str, Any] = {
        "tokenizer": str(checkpoints["SmolLM2"]),
        "max_length": 300,
        "long_documents": "drop",
    }
    with pytest.raises(KeyboardInterrupt):
        prepare(corpus, tmp_path / "store", **options, progress=interrupt)
    assert list((tmp_path / "store.partial").glob("data-*.arrow"))
    manifest = prepare(corpus, tmp_path / "store", **options).manifest
    assert (manifest.documents, manifest.dropped_documents, manifest.untrained_documents) == (
        7,
        5,
        1,
    )
    assert (manifest.unused, manifest.left_out) == ({"id": 13}, {"name": 7})
    assert manifest == prepare(corpus, tmp_path / "whole", **options).manifest, (
        "with checksums of all files"
    )
    with pytest.raises(
        CorpusError, match=r"all 12 conversations of .* have more than 3 tokens: raise --max-length"
    ):
        prepare(corpus, tmp_path / "none", **{**options, "max_length": 3})


def test_classes_are_no_marks_of_a_bad_answer(tmp_path: Path) -> None:
    store = made(
        tmp_path,
        [{"prompt": "Q", "completion": "good", "label": "sports"}, {"text": "x", "label": 0}],
    )
    assert store.manifest.unused == {"label": 2}


# --- parts of a text


def part(text: str, **says: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **says}


def answered(*parts: dict[str, Any], **says: Any) -> dict[str, Any]:
    """A conversation whose contents are lists of parts, and whose last answer has these."""
    before = [
        {**message, "content": [part(message["content"])]} for message in chat("Q", "A", "Again")
    ]
    return {"messages": [*before, {"role": "assistant", "content": list(parts), **says}]}


OFF = [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": 0}, {"loss": False}]


@pytest.mark.parametrize("flag", OFF)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "dataset"])
def test_a_part_without_loss_is_not_learnt(
    tmp_path: Path, flag: dict[str, Any], suffix: str
) -> None:
    """The rest of its message is, and the end."""
    store = made(tmp_path, [answered(part("bad ", **flag), part("good"))], suffix=suffix)
    assert learnt(store) == f"A{END}good{END}" and "bad good" in whole(store)
    store = made(
        tmp_path, [answered(part("good"), part(" bad", **flag), part(" ü"))], suffix=suffix
    )
    assert learnt(store) == f"A{END}good ü{END}"
    opposite = {key: type(value)(1) for key, value in flag.items()}
    assert (
        learnt(made(tmp_path, [answered(part("bad ", **opposite), part("good"))], suffix=suffix))
        == f"A{END}bad good{END}"
    )


@pytest.mark.parametrize("kind", ["conversations", "completion"])
def test_parts_are_obeyed_in_every_format(tmp_path: Path, kind: str) -> None:
    content = [part("bad ", train=False), part("good", train=True)]
    if kind == "conversations":
        record: dict[str, Any] = {
            kind: [{"from": "human", "value": "Q"}, {"from": "gpt", "value": content}]
        }
    else:
        record = {
            "prompt": [{"role": "user", "content": [part("Q", train=False)]}],
            kind: {"role": "assistant", "content": content},
        }
    assert learnt(made(tmp_path, [record])) == f"good{END}"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bad", ["bad ", "bad", " bad\n"])
def test_templates_obey_parts_too(
    tmp_path: Path, family: str, bad: str, checkpoints: dict[str, Path]
) -> None:
    """Of a part without loss, only a token that it shares with the next one is learnt."""
    parts = [part(bad, weight=0), part("fine so")]
    store = made(tmp_path, [answered(*parts)], tokenizer=checkpoints[family])
    said, text = learnt(store), whole(store)
    assert bad.strip() in text and "bad" not in said and "fine so" in said
    both = made(tmp_path, [answered(part(bad + "fine so"))], tokenizer=checkpoints[family])
    assert whole(both) == text and learnt(both).endswith(said[said.index("fine so") :])


def test_a_part_may_have_any_weight(tmp_path: Path, checkpoints: dict[str, Path]) -> None:
    """It multiplies that of its message, whatever template the conversation gets."""
    record = answered(part("xx", weight=0.25), part("yyy", weight=2), part("zz"), weight=0.5)
    for tokenizer in ("bytes", checkpoints["SmolLM2"], checkpoints["SmolLM2, marked"]):
        store = made(tmp_path, [record], tokenizer)
        length = int(store.lengths[0])
        weights = store.token_weights(0, 0, length)
        texts = [store.tokenizer.decode([token]) for token in store.read(0, 0, length)[0]]
        place = "".join(texts).index("xxyyyzz")
        by_character = [
            weight for text, weight in zip(texts, weights.tolist(), strict=True) for _ in text
        ]
        assert by_character[place : place + 8] == [0.125, 0.125, 1, 1, 1, 0.5, 0.5, 0.5]
        assert store.manifest is not None and store.manifest.weighted_documents == 1


def test_the_end_after_a_template_has_the_weight_of_the_last_message(
    tmp_path: Path, checkpoints: dict[str, Path]
) -> None:
    """Of one that does not end the last turn itself."""
    template = (
        "{% for message in messages %}{% if not loop.first %}\n{% endif %}"
        "{{ message.role }}: {{ message.content }}{% endfor %}"
    )
    store = made(tmp_path, [answered(part("A"), weight=0.5)], checkpoints["SmolLM2"], template)
    weights = store.token_weights(0, 0, int(store.lengths[0]))
    assert weights[-2:].tolist() == [0.5, 0.5]


SILENT = [part("a", train=False), part("b", weight=0)]


def test_a_message_whose_parts_have_no_loss_has_none(tmp_path: Path) -> None:
    assert learnt(made(tmp_path, [answered(*SILENT)])) == f"A{END}"
    silent = {"messages": [*chat("Q"), {"role": "assistant", "content": SILENT}]}
    assert made(tmp_path, [silent, answered(part("x"))]).manifest.untrained_documents == 1
    with pytest.raises(
        ChatError, match="message 3 has no loss, but --train-on last trains on it alone"
    ):
        made(tmp_path, [answered(*SILENT)], train_on="last")
    for parts in (SILENT, [part("a"), part("b", weight=2)]):
        with pytest.raises(
            ChatError, match=r"message 3 has .*, but --train-on all trains on every token"
        ):
            made(tmp_path, [answered(*parts)], train_on="all")


def test_a_call_stays_where_its_text_has_no_loss(
    tmp_path: Path, checkpoints: dict[str, Path]
) -> None:
    calling = {
        "role": "assistant",
        "content": [part("bad", train=False)],
        "tool_calls": [call("add", a=2)],
    }
    store = made(
        tmp_path, [{"messages": [*chat("Q"), calling], "tools": TOOLS}], checkpoints["Qwen 3"]
    )
    assert (
        "bad" in whole(store)
        and "bad" not in learnt(store)
        and '"arguments": {"a": 2}' in learnt(store)
    )


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_parts_of_reasoning_are_obeyed(
    tmp_path: Path, checkpoints: dict[str, Path], key: str
) -> None:
    thought = {
        key: [part("wrong ", train=False), part("Let")],
        "role": "assistant",
        "content": "So.",
    }
    store = made(tmp_path, [{"messages": [*chat("Why?"), thought]}], checkpoints["Qwen 3"])
    assert "<think>\nwrong Let\n</think>" in whole(store)
    assert "wrong" not in learnt(store) and "Let\n</think>\n\nSo." in learnt(store)


def test_a_template_that_hides_parts_is_refused(
    tmp_path: Path, checkpoints: dict[str, Path]
) -> None:
    template = SMOLLM2.replace(
        "message['content'] +", "message['content'] | upper ~ message['content'] | length ~"
    )
    with pytest.raises(
        ChatError,
        match=r"s\.jsonl:1: message 3 has parts with a loss of their own, but the chat template "
        r"does",
    ):
        made(
            tmp_path,
            [answered(part("x", train=False), part("y"))],
            checkpoints["SmolLM2"],
            template,
        )


@pytest.mark.parametrize("content", [[part("x", train=False), part("y")], "x"])
def test_what_is_beside_the_text_of_a_part_is_counted(
    tmp_path: Path, content: Any, checkpoints: dict[str, Path]
) -> None:
    asked = {
        "role": "user",
        "content": [part("Q", cache_control={"type": "ephemeral"}, citations=None, name="")],
    }
    record = {"messages": [asked, {"role": "assistant", "content": content}]}
    for tokenizer in ("bytes", checkpoints["SmolLM2"]):
        manifest = made(tmp_path, [record], tokenizer).manifest
        assert manifest.left_out == {"cache_control of parts": 1}
