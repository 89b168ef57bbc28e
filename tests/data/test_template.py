"""Conversations rendered by a checkpoint's template: tokens equal those of transformers, and tokens
to train on are those between generation marks of the same template, as transformers reads them."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.cli import main
from longctx.data import IGNORED_LABEL
from longctx.data.records.chat import ChatError
from longctx.data.records.pretrained import Pretrained
from longctx.data.records.sources import open_corpus
from longctx.data.records.template import Template
from longctx.data.records.tokenizer import TokenizerError
from longctx.data.store.manifest import StoreError
from longctx.data.store.prepare import prepare
from longctx.data.store.store import Store
from tests.data_cases import learnt, made, write_jsonl
from tests.template_cases import FAMILIES, SMOLLM2, SMOLLM2_MARKED, TOOLS, Family, call, chat

CASES = [(name, title) for name, family in FAMILIES.items() for title in family.conversations]


@pytest.fixture(scope="module")
def loaded(checkpoints: dict[str, Path]) -> dict[str, Any]:
    from transformers import AutoTokenizer

    return {name: AutoTokenizer.from_pretrained(folder) for name, folder in checkpoints.items()}


def record(family: Family, title: str) -> dict[str, Any]:
    messages = family.conversations[title]
    return {
        "messages": messages,
        **({"tools": TOOLS} if any("tool_calls" in message for message in messages) else {}),
    }


@pytest.fixture(scope="module")
def stores(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Store]:
    """Returns all conversations of a family, in order."""
    folder, made = tmp_path_factory.mktemp("stores"), {}
    for name, family in FAMILIES.items():
        source = write_jsonl(
            folder / f"{name}.jsonl", [record(family, title) for title in family.conversations]
        )
        prepare(
            open_corpus(str(source)),
            folder / name,
            tokenizer=str(checkpoints[name]),
            empty_thoughts=True,
        )
        made[name] = Store.open(folder / name)
    return made


def transformed(
    tokenizer: Any, family: Family, messages: Any, tools: Any = None
) -> tuple[list[int], list[bool]]:
    """Returns the tokens of a conversation, and which of them have a character of the assistant, by
    transformers."""
    marked = {
        "chat_template": family.marked,
        "return_assistant_tokens_mask": True,
        "return_dict": True,
    }
    encoded = tokenizer.apply_chat_template(messages, tools=tools, **marked)
    assert encoded["input_ids"] == tokenizer.apply_chat_template(
        messages, tools=tools, return_dict=False
    )
    return encoded["input_ids"], [bool(written) for written in encoded["assistant_masks"]]


def read(store: Store, document: int) -> tuple[list[int], list[bool]]:
    """Returns tokens, and which of them are targets; the first never is."""
    tokens, labels = store.read(document, 0, int(store.lengths[document]))
    return tokens.tolist(), [False, *(labels[:-1] != IGNORED_LABEL).tolist()]


@pytest.mark.parametrize(("name", "title"), CASES)
def test_tokens_are_those_of_transformers_and_the_assistants_are_learnt(
    stores: dict[str, Store], loaded: dict[str, Any], name: str, title: str
) -> None:
    family, given = FAMILIES[name], record(FAMILIES[name], title)
    tokens, trained = read(stores[name], list(family.conversations).index(title))
    assert (tokens, trained) == transformed(
        loaded[name], family, given["messages"], given.get("tools")
    )
    assert any(trained) and not all(trained)


TWO_TURNS = {"messages": chat("one", "two", "three", "four")}


@pytest.mark.parametrize("family", ["SmolLM2", "SmolLM2, marked", "Qwen 3", "Mistral"])
def test_the_last_turn_or_every_token(
    checkpoints: dict[str, Path], tmp_path: Path, family: str
) -> None:
    last = learnt(made(tmp_path, [TWO_TURNS], checkpoints[family], train_on="last"))
    assert last.strip().removeprefix("<think>\n\n</think>\n\n") in ("four<|im_end|>", "four</s>")
    store = made(tmp_path, [TWO_TURNS], checkpoints[family], train_on="all")
    assert store.trained_tokens.tolist() == [store.lengths[0] - 1]


@pytest.mark.parametrize("family", ["SmolLM2", "SmolLM2, marked"])
def test_only_the_completion_is_learnt(
    checkpoints: dict[str, Path], tmp_path: Path, family: str
) -> None:
    record = {
        "prompt": TWO_TURNS["messages"][:3],
        "completion": [{"role": "assistant", "content": "five"}],
    }
    assert learnt(made(tmp_path, [record], checkpoints[family])) == "five<|im_end|>"


def test_a_template_that_looks_at_contents_is_split_by_prefixes(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """The template writes the length of each content, which private-use characters would change."""
    template = SMOLLM2.replace(
        "message['content'] +", "message['content'] ~ message['content']|length +"
    )
    store = made(tmp_path, [TWO_TURNS], checkpoints["SmolLM2"], template)
    assert learnt(store) == "two3<|im_end|>four4<|im_end|>"
    assert (store.path / "tokenizer" / "chat_template.jinja").read_text() == template


@pytest.mark.parametrize(
    ("end", "shown"),
    [
        ("{% if loop.last %}<|im_end|>{% else %}\n{% endif %}", "twofour<|im_end|>"),
        ("{% if loop.last %}<|im_end|>{% else %}<|im_start|>{% endif %}", "twofour<|im_end|>"),
        (
            "{% if loop.last %}<|endoftext|>{% else %}<|im_start|>{% endif %}",
            "twofour<|endoftext|>",
        ),
        ("", "twofour<|im_end|>"),
        ("\n", "twofour\n<|im_end|>"),
    ],
    ids=[
        "last turn only",
        "another special token",
        "no token of the checkpoint's ends",
        "nothing",
        "white space",
    ],
)
def test_generation_stops_whatever_ends_a_turn(
    checkpoints: dict[str, Path], tmp_path: Path, end: str, shown: str
) -> None:
    """Where a template does not end every turn, the end of the last one is learnt, or else that of
    the document."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}" + end + "{% endfor %}"
    )
    prompt = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    assert learnt(made(tmp_path, [TWO_TURNS], checkpoints["SmolLM2"], template + prompt)) == shown


MARKERS = {"HEAD": "<|im_start|>A", "QUESTION": "<|im_start|>Q{{ m.content }}"}
ANSWERED = "HEAD{% generation %}ANSWER{% endgeneration %}"
ALTERNATING = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    + ANSWERED
    + "{% else %}QUESTION{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}PROMPT{% endif %}"
)


@pytest.mark.parametrize(
    "parts",
    [
        {
            **MARKERS,
            "ANSWER": "{{ m.content.split('</think>')[-1] }}<|im_end|>",
            "PROMPT": "<|im_start|>A<think>\n",
        },
        {
            "HEAD": "",
            "ANSWER": "{{ m.content }}<|im_end|>",
            "QUESTION": "{{ m.content + '\n' }}",
            "PROMPT": "",
        },
        {**MARKERS, "ANSWER": "{{ m.content }}", "PROMPT": "<|im_start|>A"},
    ],
    ids=["a prompt that begins a thought", "a line break before an answer", "nothing ends a turn"],
)
def test_the_loss_is_where_the_same_template_marks_it(
    checkpoints: dict[str, Path], loaded: dict[str, Any], tmp_path: Path, parts: dict[str, str]
) -> None:
    """Whatever white space the messages begin and end with."""
    template = ALTERNATING
    for part, text in parts.items():
        template = template.replace(part, text)
    messages = chat("one", "<think>\nHm.\n</think>\n\ntwo", " a\n", "\n b \n", "x", "y")
    given = {"chat_template": template, "return_assistant_tokens_mask": True, "return_dict": True}
    expected = loaded["SmolLM2"].apply_chat_template(messages, **given)
    plain = template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    tokens, trained = read(
        made(tmp_path, [{"messages": messages}], checkpoints["SmolLM2"], plain), 0
    )
    size = len(expected["input_ids"])
    assert (tokens[:size], trained[:size]) == (
        expected["input_ids"],
        [bool(own) for own in expected["assistant_masks"]],
    )
    assert tokens[size:] == [loaded["SmolLM2"].eos_token_id] * (
        parts["ANSWER"] == "{{ m.content }}"
    )


def test_a_template_that_does_not_show_its_turns_is_refused(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """The template begins with the length of the whole conversation, and writes the length of each
    content."""
    text = "{{ messages|length }}" + SMOLLM2.replace(
        "message['content'] +", "message['content'] ~ message['content']|length +"
    )
    with pytest.raises(
        ChatError,
        match=r"s\.jsonl:1: the chat template does not show .*--chat-template chatml.*--train-on "
        r"all",
    ):
        made(tmp_path, [TWO_TURNS], checkpoints["SmolLM2"], text)
    store = made(tmp_path, [TWO_TURNS], checkpoints["SmolLM2"], text, train_on="all")
    assert store.trained_tokens.tolist() == [store.lengths[0] - 1]
    assert (
        learnt(made(tmp_path, [TWO_TURNS], checkpoints["SmolLM2"], chat_template="chatml"))
        == "two<|im_end|>four<|im_end|>"
    )


@given(
    contents=st.lists(
        st.text(st.sampled_from("ab \n<|>é🦊\uf8ff\U00100000"), max_size=6), min_size=2, max_size=6
    ),
    name=st.sampled_from(["Llama 3", "Qwen 3", "SmolLM2", "Mistral"]),
)
@settings(deadline=None)
def test_any_contents(
    checkpoints: dict[str, Path], loaded: dict[str, Any], contents: list[str], name: str
) -> None:
    """Also with private-use characters in the source. Where prefixes apply, they give the same
    spans as the other methods."""
    family, messages = FAMILIES[name], chat(*contents[: len(contents) // 2 * 2])
    checkpoint = Pretrained.load(str(checkpoints[name]))
    assert checkpoint.templates is not None
    tokenizer = checkpoint.tokenizer
    template = Template(
        checkpoint.templates, checkpoint.variables, tokenizer, checkpoint.ends, empty_thoughts=True
    )
    try:
        rendered = template.render(messages, None)
    except ChatError:
        assert name == "Qwen 3" and "\U00100000" in "".join(contents)  # neither way applies
        return
    assert rendered.spans is not None
    tokens, trained, _ = tokenizer.encode_spans(rendered.text, rendered.spans)
    assert (tokens.tolist(), trained.tolist()) == transformed(loaded[name], family, messages)


def test_the_store_holds_what_an_export_needs(
    checkpoints: dict[str, Path], stores: dict[str, Store]
) -> None:
    for name, store in stores.items():
        copied = {file.name: file.read_bytes() for file in (store.path / "tokenizer").iterdir()}
        given = {file.name: file.read_bytes() for file in checkpoints[name].iterdir()}
        assert copied == given and {
            "tokenizer.json",
            "tokenizer_config.json",
            "chat_template.jinja",
        } <= set(copied)
        assert "tokenizer/chat_template.jinja" in store.manifest.files


def test_texts_begin_and_end_as_the_checkpoint_says(tmp_path: Path) -> None:
    """A tokenizer that begins texts with <bos>, and pads and cuts them if asked, and a generation
    config that names the end if the tokenizer does not."""
    folder = FAMILIES["Gemma 3"].save(tmp_path / "checkpoint", template="")
    content = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    bos = next(token["id"] for token in content["added_tokens"] if token["content"] == "<bos>")
    single = [
        {"SpecialToken": {"id": "<bos>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    special = {"<bos>": {"id": "<bos>", "ids": [bos], "tokens": ["<bos>"]}}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": single,
        "special_tokens": special,
    }
    padding = {
        "strategy": {"Fixed": 8},
        "direction": "Left",
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<unk>",
    }
    content["padding"] = {**padding, "pad_to_multiple_of": None}
    content["truncation"] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (folder / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    del config["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    turn = next(
        token["id"] for token in content["added_tokens"] if token["content"] == "<end_of_turn>"
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [turn, 3]}), "utf-8")
    source = write_jsonl(tmp_path / "s.jsonl", [{"text": "Hello <eos>"}])
    prepare(open_corpus(str(source)), tmp_path / "out", tokenizer=str(folder))
    store = Store.open(tmp_path / "out")
    tokens = store.read(0, 0, int(store.lengths[0]))[0]
    assert (tokens[0], tokens[-1]) == (bos, turn)
    assert store.tokenizer.decode(tokens[1:-1]) == "Hello <eos>" and len(tokens) == 5, (
        "the text's own <eos> is a token"
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**config, "split_special_tokens": True}), "utf-8"
    )
    with pytest.raises(
        TokenizerError,
        match=r"has split_special_tokens, by which .* remove it from tokenizer_config",
    ):
        prepare(open_corpus(str(source)), tmp_path / "out", tokenizer=str(folder))


def test_a_checkpoint_without_a_template_takes_chatml_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = FAMILIES["SmolLM2"].save(tmp_path / "checkpoint", template="")
    source = write_jsonl(tmp_path / "s.jsonl", [TWO_TURNS])
    command = [
        "prepare",
        "--source",
        str(source),
        "--out",
        str(tmp_path / "out"),
        "--tokenizer",
        str(folder),
    ]
    assert main(command) == 0
    assert "template   ChatML, as the tokenizer has no chat template" in capsys.readouterr().out
    assert learnt(Store.open(tmp_path / "out")) == "two<|im_end|>four<|im_end|>"


def test_a_template_can_be_asked_for_only_where_it_can_run(
    tmp_path: Path, checkpoints: dict[str, Path]
) -> None:
    with pytest.raises(
        TokenizerError,
        match=r"chat template .*nowhere\.jinja' cannot be read.*; give auto, chatml, or the path",
    ):
        made(
            tmp_path,
            [TWO_TURNS],
            checkpoints["SmolLM2"],
            chat_template=str(tmp_path / "nowhere.jinja"),
        )
    source = open_corpus(str(write_jsonl(tmp_path / "s.jsonl", [TWO_TURNS])))
    with pytest.raises(
        TokenizerError,
        match="needs the special tokens of a checkpoint: give its folder as --tokenizer",
    ):
        prepare(source, tmp_path / "out", tokenizer="bytes", chat_template="x.jinja")


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "there is no tokenizer in .* contains nothing"),
        ({"tokenizer.json": "no"}, "cannot load a tokenizer from .* contains tokenizer.json"),
        ({"tokenizer.json": "{}", "tokenizer_config.json": "{}"}, "cannot load a tokenizer from"),
        (
            {"config.json": '{"model_type": "llama"}'},
            "there is no tokenizer in .* contains config.json",
        ),
    ],
)
def test_folders_without_a_tokenizer(tmp_path: Path, files: dict[str, str], says: str) -> None:
    (tmp_path / "checkpoint").mkdir()
    for name, content in files.items():
        (tmp_path / "checkpoint" / name).write_text(content, "utf-8")
    with pytest.raises(TokenizerError, match=says):
        Pretrained.load(str(tmp_path / "checkpoint"))


def test_the_hub_is_asked_for_names(
    monkeypatch: pytest.MonkeyPatch, checkpoints: dict[str, Path]
) -> None:
    asked: list[str] = []

    def fetch(name: str, allow_patterns: list[str]) -> str:
        asked.append(name)
        if name == "us/away":
            raise OSError("no route to host")
        assert "tokenizer.json" in allow_patterns and not any(
            "safetensors" in pattern for pattern in allow_patterns
        )
        return str(checkpoints["SmolLM2"])

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert Pretrained.load("us/small").tokenizer.end_of_document_token == "<|im_end|>"
    with pytest.raises(
        TokenizerError,
        match=r"'us/away' is not a local file or folder, and cannot be downloaded .*no route to "
        r"host; give",
    ):
        Pretrained.load("us/away")
    with pytest.raises(TokenizerError, match="neither a file, nor a folder, nor a name on the hub"):
        Pretrained.load("../no/such/folder")
    assert asked == ["us/small", "us/away"]


def test_what_a_template_refuses_is_named(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    records = [TWO_TURNS, {"messages": TWO_TURNS["messages"][1:]}]
    with pytest.raises(
        ChatError,
        match=r"s\.jsonl:2: the chat template refuses .*TemplateError: roles must alternate",
    ):
        made(tmp_path, records, checkpoints["Gemma 3"])
    records = [
        {
            "messages": [
                *chat("2 + 3?"),
                {"role": "assistant", "tool_calls": [call("add"), call("add")]},
            ]
        }
    ]
    with pytest.raises(ChatError, match=r"s\.jsonl:1: .*one call at a time"):
        made(tmp_path, records, checkpoints["Llama 3"])
    with pytest.raises(
        ChatError, match=r"s\.jsonl:1: message 1 calls a tool, which ChatML does not support"
    ):
        made(tmp_path, records, checkpoints["SmolLM2"], chat_template="chatml")
    with pytest.raises(
        ChatError, match=r"s\.jsonl:1: the record has tools, which ChatML does not support"
    ):
        made(
            tmp_path,
            [{**TWO_TURNS, "tools": TOOLS}],
            checkpoints["SmolLM2"],
            chat_template="chatml",
        )


def test_conversations_without_a_token_to_learn_are_named(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    for template in ("auto", "chatml"):
        with pytest.raises(
            ChatError, match=r"s\.jsonl:2: the conversation has no assistant message"
        ):
            made(
                tmp_path,
                [TWO_TURNS, {"messages": chat("one")}],
                checkpoints["SmolLM2"],
                chat_template=template,
            )
    unmarked = "{% generation %}{% endgeneration %}{{ message['content'] + '<|im_end|>' }}"
    marked = "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    assert marked in SMOLLM2_MARKED
    with pytest.raises(
        ChatError, match=r"s\.jsonl:1: message 1 has role 'AI': it must be one of system"
    ):
        made(
            tmp_path,
            [{"messages": [*chat("one"), {"role": "AI", "content": "two"}]}],
            checkpoints["SmolLM2"],
        )
    with pytest.raises(
        ChatError, match=r"s\.jsonl:1: the template marks nothing of this conversation as generated"
    ):
        made(
            tmp_path, [TWO_TURNS], checkpoints["SmolLM2"], SMOLLM2_MARKED.replace(marked, unmarked)
        )


def test_settings_are_part_of_the_request(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    store = made(tmp_path, [TWO_TURNS], checkpoints["SmolLM2"])
    source, asked = (
        open_corpus(str(tmp_path / "s.jsonl")),
        {"tokenizer": str(checkpoints["SmolLM2"])},
    )
    (tmp_path / "other.jinja").write_text(SMOLLM2 + "\n")
    assert not prepare(source, store.path, **asked).made
    for name, value in (
        ("train_on", "last"),
        ("max_length", 99),
        ("chat_template", "chatml"),
        ("chat_template", str(tmp_path / "other.jinja")),
    ):
        with pytest.raises(StoreError, match="other settings"):
            prepare(source, store.path, **asked, **{name: value})
        another = prepare(
            source, tmp_path / "another", **asked, **{name: value}, overwrite=True
        ).manifest
        assert another.fingerprint != store.fingerprint


def test_only_checkpoints_need_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    write_jsonl(tmp_path / "s.jsonl", [{"text": "some text"}, TWO_TURNS])
    command = [
        "prepare",
        "--source",
        str(tmp_path / "s.jsonl"),
        "--out",
        str(tmp_path / "out"),
        "--tokenizer",
    ]
    assert [main([*command, tokenizer]) for tokenizer in ("bpe", str(tmp_path))] == [0, 2]
    assert (
        "needs transformers: pip install '.[huggingface]' in the folder of longctx's source code"
        in capsys.readouterr().err
    )


# --- contents that are lists of texts

LISTS = "{% for part in m.content %}{{ part.text | trim }}{% endfor %}"
CONTENTS = {
    "texts or lists": "{% if m.content is string %}{{ m.content }}{% else %}"
    + LISTS
    + "{% endif %}",
    "lists alone": "{% for part in m.content | selectattr('type', 'equalto', 'text') %}[{{ "
    "part.text }}]\n{% endfor %}",
    "lists by their kind": "{% if m.content is iterable and m.content is not string %}"
    + LISTS
    + "{% else %}{{ m.content }}{% endif %}",
}


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("marked", [False, True])
def test_a_list_of_texts_is_handed_over_as_it_is(
    checkpoints: dict[str, Path], loaded: dict[str, Any], tmp_path: Path, content: str, marked: bool
) -> None:
    """A template that trims or separates parts gives other tokens for their joined text."""
    answer = "{% generation %}" + CONTENTS[content] + "<|im_end|>{% endgeneration %}"
    template = (
        f"{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{{% if m.role == 'assistant' "
        f"%}}{answer}{{% else %}}"
        f"{CONTENTS[content]}<|im_end|>{{% endif %}}\n{{% endfor %}}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    messages = [
        {"role": role, "content": [{"type": "text", "text": text} for text in texts]}
        for role, texts in (
            ("user", (" one ", "two\n", "<image>")),
            ("assistant", ("three ", " four")),
            ("user", ("",)),
        )
    ]
    given = {"chat_template": template, "return_assistant_tokens_mask": True, "return_dict": True}
    expected = loaded["SmolLM2"].apply_chat_template(messages, **given)
    plain = (
        template
        if marked
        else template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    )
    store = made(tmp_path, [{"messages": messages}], checkpoints["SmolLM2"], plain)
    tokens, trained = read(store, 0)
    assert (tokens, trained) == (
        expected["input_ids"],
        [bool(own) for own in expected["assistant_masks"]],
    )
    assert not store.manifest.left_out
    said = chat("Q", "A")
    as_list = (
        [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in said]
        if content == "lists alone"
        else said
    )
    store = made(tmp_path, [{"messages": said}], checkpoints["SmolLM2"], plain)
    assert read(store, 0)[0] == loaded["SmolLM2"].apply_chat_template(
        as_list, chat_template=template, return_dict=False
    )


def test_a_template_of_texts_gets_the_joined_text(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """transformers would print the list into the text."""
    parts = [{"type": "text", "text": text} for text in ("one ", " two")]
    records = [
        {"messages": [{"role": "user", "content": content}, *chat("", "A")[1:]]}
        for content in (parts, "one  two")
    ]
    store = made(tmp_path, records, checkpoints["SmolLM2"], "{{ messages[0].role }}" + SMOLLM2)
    assert read(store, 0) == read(store, 1) and not store.manifest.left_out
