"""What templates leave out is named, what they refuse in parts is rendered whole, and arguments
reach them as given."""

import json
from pathlib import Path
from typing import Any

import pytest

from longctx.cli import main
from longctx.data.records.chat import ChatError
from longctx.data.records.left_out import left_out
from longctx.data.records.tokenizer import TokenizerError
from longctx.data.store.store import Store
from tests.data_cases import learnt, made, whole, write_jsonl
from tests.template_cases import FAMILIES, QWEN3, SMOLLM2, SMOLLM2_MARKED, TOOLS, call, chat

END = "<|im_end|>"
CALLING = [
    *chat("What is 2 + 3?", system="Calculate."),
    {"role": "assistant", "content": "I ask.", "tool_calls": [call("add", a=2, word="drei 🦊")]},
    {"role": "tool", "name": "add", "content": "5", "tool_call_id": "abcdefghi"},
    {"role": "assistant", "content": "It is 5."},
]


def applied(
    checkpoint: Path, messages: list[dict[str, Any]], template: str | None = None, **options: Any
) -> str:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    return str(
        tokenizer.apply_chat_template(messages, tokenize=False, chat_template=template, **options)
    )


# --- what is left out


@pytest.mark.parametrize("template", [SMOLLM2, SMOLLM2_MARKED])
@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_a_template_of_roles_and_contents_leaves_out_tools(
    checkpoints: dict[str, Path],
    tmp_path: Path,
    template: str,
    train_on: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    checkpoint = checkpoints["SmolLM2"]
    options = {"tokenizer": checkpoint, "template": template, "train_on": train_on}
    store = made(
        tmp_path, [{"messages": CALLING, "tools": TOOLS}, {"messages": chat("Q", "A")}], **options
    )
    names = ["name", "tool_call_id", "tool_calls", "tool_calls.id", "tools"]
    assert store.manifest.left_out == dict.fromkeys(names, 1)
    command = [
        "prepare",
        "--source",
        str(tmp_path / "s.jsonl"),
        "--out",
        str(store.path),
        "--tokenizer",
        str(checkpoint),
    ]
    assert (
        main([*command, "--chat-template", str(tmp_path / "t.jinja"), "--train-on", train_on]) == 0
    )
    line = (
        "left out   name in 1, tool_call_id in 1, tool_calls in 1, tool_calls.id in 1, tools in "
        "1 conversations\n"
    )
    assert line in capsys.readouterr().out
    silent = [*CALLING[:2], {**CALLING[2], "content": ""}, *CALLING[3:]]
    says = (
        r"s\.jsonl:1: message 2 would be an empty answer, as the chat template leaves out its "
        r"tool_calls: use a template"
    )
    with pytest.raises(ChatError, match=says):
        made(tmp_path, [{"messages": silent}], **options)
    old = {
        "role": "assistant",
        "content": "",
        "function_call": CALLING[2]["tool_calls"][0]["function"],
    }
    with pytest.raises(ChatError, match=says.replace("message 2", "message 1")):
        made(tmp_path, [{"messages": [*chat("Q"), old]}], **options)


def test_systems_and_results_of_tools_that_are_left_out(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """The result "5" is not taken for the 5 of the answer."""
    template = (
        "{% for message in messages if message.role in ('user', 'assistant') %}"
        "<|im_start|>{{ message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    store = made(tmp_path, [{"messages": CALLING}], checkpoints["SmolLM2"], template)
    assert {"content of system messages", "content of tool messages", "tool_calls"} <= set(
        store.manifest.left_out
    )
    assert "content of assistant messages" not in store.manifest.left_out
    assert learnt(store) == f"I ask.{END}It is 5.{END}"


@pytest.mark.parametrize("name", list(FAMILIES))
def test_nothing_is_named_that_is_there(
    checkpoints: dict[str, Path], tmp_path: Path, name: str
) -> None:
    family = FAMILIES[name]
    records = [
        {"messages": messages, "tools": TOOLS}
        for messages in family.conversations.values()
        if messages[-1]["content"]
    ]
    records = [
        record if "tool_calls" in str(record["messages"]) else {"messages": record["messages"]}
        for record in records
    ]
    missing = set(made(tmp_path, records, checkpoints[name]).manifest.left_out)
    empty = {"all but the end of answers that say nothing"}
    assert (
        empty
        < missing | {""}
        <= {"", *empty, "name", "tool_call_id", "tool_calls.id", "reasoning", "reasoning_content"}
    )
    assert ("reasoning_content" in missing) == (name == "Qwen 3")


def test_reasoning_of_earlier_turns_is_named_and_not_refused(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    conversations = FAMILIES["Qwen 3"].conversations
    for title, name in (("reasoning", "reasoning_content"), ("reasoning in the text", "reasoning")):
        store = made(tmp_path, [{"messages": conversations[title]}], checkpoints["Qwen 3"])
        assert store.manifest.left_out == {name: 1}
    alone = [
        *chat("Why?"),
        {"role": "assistant", "content": "", "reasoning_content": "Hm."},
        *chat("And?", "So."),
    ]
    with pytest.raises(
        ChatError,
        match="message 1 would be an empty answer, as the chat template leaves out its "
        "reasoning_content",
    ):
        made(tmp_path, [{"messages": alone}], checkpoints["Qwen 3"])


def test_texts_are_looked_for_and_each_place_counts_once() -> None:
    messages = chat("one two", "  three\n")
    for rendering in ("user: one two assistant: three", "three one two"):
        assert left_out(rendering, messages, None, (), "it") == set()
    for rendering in ("user: one two", "one two thr ee"):
        assert left_out(rendering, messages, None, (), "it") == {"content of assistant messages"}
    messages = chat("5", "5", "5 and 5")
    assert left_out("5 5 5 and 5", messages, None, (), "it") == set()
    assert left_out("5 and 5 and 5", messages, None, (), "it") == {"content of user messages"}
    weather = "It is sunny in Paris today."
    sunny = [*chat("Q"), {"role": "tool", "content": weather}, *chat("", f"{weather} Go!")]
    assert left_out("Q: It is sunny in Paris today. Go!", sunny, None, [3], "it") == {
        "content of tool messages"
    }
    escaped = [{"role": "tool", "content": 'a "word"\nß'}]
    for ascii_only in (False, True):
        assert (
            left_out(json.dumps(escaped, ensure_ascii=ascii_only), escaped, None, (), "it") == set()
        )
    cut = chat("Q", "[THINK]Hm.[/THINK]So.")
    assert left_out("Q So.", cut, None, [1], "it") == {"content of assistant messages"}, (
        "named, but no empty answer"
    )
    assert left_out("Q Hm. So.", cut, None, [1], "it") == set()
    for messages in (cut, chat("Q", "?!")):
        with pytest.raises(ChatError, match="message 1 would be an empty answer"):
            left_out("Q", messages, None, [1], "it")
    long = "a line of some length\n\n  another line of some length"
    assert (
        left_out(
            "> a line of some length\n> another line of some length", chat(long), None, (), "it"
        )
        == set()
    )


# --- templates that refuse parts of a conversation

STRICT = (
    "{% if not messages | selectattr('role', 'equalto', 'user') | list %}{{ raise_exception('no "
    "user') }}{% endif %}"
    "{% if messages[-1].role == 'system' %}{{ raise_exception('a system message at the end') }}{% "
    "endif %}"
    "{% if add_generation_prompt and messages[-1].role == 'assistant' %}{{ raise_exception('an "
    "answer') }}{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role + '\n' + message.content + "
    "'<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GREETING = [{"role": "assistant", "content": "Hello."}, *chat("Q", "A")]
PARTS = {
    "an answer before the first question": [{"role": "system", "content": "S"}, *GREETING],
    "an answer at the beginning": GREETING,
    "a system message before the answer": [
        *chat("Q"),
        {"role": "system", "content": "Now"},
        *chat("", "A")[1:],
    ],
    "an answer after an answer": [*chat("Q", "A"), {"role": "assistant", "content": "B"}],
}


@pytest.mark.parametrize("title", list(PARTS))
@pytest.mark.parametrize("thinking", [False, True])
def test_a_refused_part_is_not_a_refused_conversation(
    checkpoints: dict[str, Path], tmp_path: Path, title: str, thinking: bool
) -> None:
    """Also where the generation prompt has more text than an answer that is finished."""
    prompt = "<|im_start|>assistant\n{% endif %}"
    template = STRICT.replace(prompt, prompt.replace("\n", "\n<think>\n")) if thinking else STRICT
    store = made(tmp_path, [{"messages": PARTS[title]}], checkpoints["SmolLM2"], template)
    assert whole(store) == applied(checkpoints["SmolLM2"], PARTS[title], template)
    answers = [message["content"] for message in PARTS[title] if message["role"] == "assistant"]
    assert learnt(store) == "".join(answer + END for answer in answers)


def test_answers_in_a_row_without_a_generation_prompt(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    messages = [*chat("Q", "A"), {"role": "assistant", "content": "B"}, *chat("Q", "C")]
    template = (
        "{% if add_generation_prompt and messages[-1].role == 'assistant' %}{{ "
        "raise_exception('no') }}{% endif %}"
        "{{ bos_token }}{% for message in messages %}"
        "{{ '[INST] ' + message.content + '[/INST]' if message.role == 'user' else ' ' + "
        "message.content + eos_token }}"
        "{% endfor %}"
    )
    store = made(tmp_path, [{"messages": messages}], checkpoints["Mistral"], template)
    assert whole(store).replace(" ", "") == applied(
        checkpoints["Mistral"], messages, template
    ).replace(" ", "")
    assert learnt(store).replace(" ", "") == "A</s>B</s>C</s>"


def test_a_turn_that_nothing_shows_is_refused_with_the_reason(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """The template writes the length of each content, so only prefixes would show the turn."""
    template = STRICT.replace("message.content +", "message.content ~ message.content|length +")
    messages = PARTS["a system message before the answer"]
    says = (
        r"s\.jsonl:1: .* does not show where the assistant's turn \(message 2\) .* \(a system "
        r"message at the end\): use"
    )
    with pytest.raises(ChatError, match=says):
        made(tmp_path, [{"messages": messages}], checkpoints["SmolLM2"], template)
    assert whole(
        made(tmp_path, [{"messages": messages}], checkpoints["SmolLM2"], template, train_on="all")
    )


# --- arguments of tool calls

AS_TEXT = QWEN3.replace(
    "(call.function.arguments | tojson)",
    "(call.function.arguments if call.function.arguments is string else call.function.arguments | "
    "tojson)",
)


def asked(arguments: Any) -> list[dict[str, Any]]:
    function = {"name": "add", "arguments": arguments}
    return [
        *chat("Q"),
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": function}],
        },
    ]


@pytest.mark.parametrize(
    "arguments",
    ['{"a": 1e5}', '{"a":2,"b":  0.10}', "", "{}", '{"a": 2}', {"a": 100000.0}, {"a": "ß"}],
)
def test_a_template_that_takes_texts_gets_the_arguments_as_given(
    checkpoints: dict[str, Path], tmp_path: Path, arguments: Any
) -> None:
    for tools in (None, TOOLS):
        record = {"messages": asked(arguments), **({"tools": tools} if tools else {})}
        store = made(tmp_path, [record], checkpoints["Qwen 3"], AS_TEXT)
        assert whole(store) == applied(
            checkpoints["Qwen 3"], asked(arguments), AS_TEXT, tools=tools
        )
        assert learnt(store).endswith(whole(store).partition("<tool_call>")[2].rstrip())


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"a": 1e5, "b": [1e5, -2.50E-3, 7]}', '{"a": 100000.0, "b": [100000.0, -0.0025, 7]}'),
        ('{"a":2}', '{"a": 2}'),
        ("", "{}"),
        (" ", "{}"),
        ('{"a": 123456789012345678901234567890}', '{"a": 123456789012345678901234567890}'),
    ],
)
@pytest.mark.parametrize("marked", [False, True])
def test_other_templates_get_objects(
    checkpoints: dict[str, Path], tmp_path: Path, arguments: str, shown: str, marked: bool
) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role + '\n' }}{% generation %}{{ m.content }}"
        "{% for call in m.tool_calls or [] %}{{ call.function.name + call.function.arguments | "
        "tojson }}{% endfor %}<|im_end|>"
        "{% endgeneration %}\n{% endfor %}"
    )
    template = template if marked else QWEN3
    store = made(tmp_path, [{"messages": asked(arguments)}], checkpoints["Qwen 3"], template)
    assert shown in whole(store) and shown in learnt(store)
    assert learnt(store).endswith(f"{shown}{END}" if marked else f"{shown}}}\n</tool_call>{END}")
    if arguments.startswith('{"a":2'):
        assert whole(store) == applied(
            checkpoints["Qwen 3"], asked(json.loads(arguments)), template
        )
    turn = {
        "from": "function_call",
        "value": json.dumps({"name": "add"})[:-1] + f', "arguments": {shown}}}',
    }
    shared = [{"from": "human", "value": "Q"}, turn]
    if not marked:
        assert shown in learnt(
            made(tmp_path, [{"conversations": shared}], checkpoints["Qwen 3"], template)
        )


@pytest.mark.parametrize("content", ["", "I ask."])
def test_an_empty_content_before_a_call(
    checkpoints: dict[str, Path], tmp_path: Path, content: str
) -> None:
    """Qwen 3 writes a line break between content and call, if there is a content."""
    messages = [
        *chat("Q"),
        {"role": "assistant", "content": content, "tool_calls": [call("add", a=2)]},
    ]
    messages += [
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "It is 5."},
        *chat("And?", "So."),
    ]
    template = QWEN3.replace(
        "content or not loop.first", "(loop.first and content) or not loop.first"
    )
    store = made(tmp_path, [{"messages": messages}], checkpoints["Qwen 3"], template)
    assert whole(store) == applied(checkpoints["Qwen 3"], messages, template)
    begin = f"{content}\n" if content else ""
    call_of_add = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
    assert learnt(store) == f"{begin}{call_of_add}{END}It is 5.{END}So.{END}"


def test_a_call_is_learnt_to_its_end_where_turns_have_none(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content }}"
        "{% for call in m.tool_calls or [] %}<call>{{ call.function.name }}</call>{% endfor %}{% "
        "endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    messages = [
        *asked({}),
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "It is 5."},
    ]
    assert (
        learnt(made(tmp_path, [{"messages": messages}], checkpoints["SmolLM2"], template))
        == "<call>add</call>It is 5.<|im_end|>"
    )


# --- roles


def test_roles_are_those_of_the_template(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    for role in ("developer", "critic"):
        messages = [{"role": role, "content": "Be brief."}, *chat("Q", "A")]
        named = SMOLLM2.replace(
            "message.role != 'system'", f"message.role not in ['system', '{role}']"
        )
        store = made(tmp_path, [{"messages": messages}], checkpoints["SmolLM2"], named)
        assert whole(store) == applied(checkpoints["SmolLM2"], messages, named)
        assert f"<|im_start|>{role}\nBe brief." in whole(store) and learnt(store) == f"A{END}"
    with pytest.raises(
        ChatError,
        match=r"s\.jsonl:1: message 0 has role 'critic': it must be one of .*, or in the chat "
        r"template",
    ):
        made(tmp_path, [{"messages": messages}], checkpoints["SmolLM2"])
    store = made(
        tmp_path,
        [{"messages": [{"role": "developer", "content": "D."}, *chat("Q", "A")]}],
        checkpoints["Qwen 3"],
    )
    assert store.manifest.left_out == {"content of developer messages": 1}


# --- variables, and what the template itself writes


def test_a_prompt_may_begin_a_line_that_empty_reasoning_lacks(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    template = SMOLLM2.replace(
        "'\n' + message['content']",
        "'\n' + ('<think></think>' if message.role == 'assistant' else '') + message['content']",
    )
    template = template.replace(
        "{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n<think>\n' }}"
    )
    store = made(
        tmp_path, [{"messages": chat("Q", "A", "R", "B")}], checkpoints["SmolLM2"], template
    )
    assert learnt(store) == f"A{END}B{END}" and store.manifest.empty_thoughts == 2
    store = made(
        tmp_path,
        [{"messages": chat("Q", "A", "R", "B")}],
        checkpoints["SmolLM2"],
        template,
        empty_thoughts=True,
    )
    assert learnt(store) == f"</think>A{END}</think>B{END}"
    template = template.replace(
        "'<think></think>'",
        "'<think>' + ('\n' + message.reasoning if message.reasoning else '') + '</think>'",
    )
    messages = [*chat("Q", "A", "R"), {"role": "assistant", "content": "B", "reasoning": "Hm."}]
    store = made(tmp_path, [{"messages": messages}], checkpoints["SmolLM2"], template)
    assert learnt(store) == f"A{END}Hm.</think>B{END}"


def test_the_loss_begins_where_the_generation_prompt_ends(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Qwen 3's empty reasoning, which the template writes, is learnt if that is asked for, unless
    the prompt contains it."""
    messages, block = chat("Q", "A"), "<think>\n\n</think>\n\n"
    store = made(tmp_path, [{"messages": messages}], checkpoints["Qwen 3"], empty_thoughts=True)
    assert learnt(store) == f"{block}A{END}" and store.manifest.empty_thoughts == 0
    store = made(tmp_path, [{"messages": messages}], checkpoints["Qwen 3"])
    assert (
        learnt(store) == f"A{END}" and block in whole(store) and store.manifest.empty_thoughts == 1
    )
    own = [
        {"messages": chat("Q", f"{block}A")},
        {"messages": [*chat("Q"), {**chat("Q", "A")[1], "reasoning_content": "Hm."}]},
    ]
    store = made(tmp_path, own, checkpoints["Qwen 3"])
    assert (
        learnt(store, 1) == f"<think>\nHm.\n</think>\n\nA{END}"
        and store.manifest.empty_thoughts == 0
    )
    store = made(
        tmp_path,
        [{"messages": messages}],
        checkpoints["Qwen 3"],
        template_variables={"enable_thinking": False},
    )
    assert learnt(store) == f"A{END}" and block in whole(store)
    prompt = "'<|im_start|>assistant\\n' }}\n    {%- if enable"
    begun = QWEN3.replace(prompt, prompt.replace("assistant\\n", "assistant\\n<think>\\n"))
    assert begun != QWEN3
    assert (
        learnt(made(tmp_path, [{"messages": messages}], checkpoints["Qwen 3"], begun)) == f"A{END}"
    )
    store = made(
        tmp_path, [{"messages": messages}], checkpoints["Qwen 3"], begun, empty_thoughts=True
    )
    # One token is two lines.
    assert learnt(store).lstrip() == f"</think>\n\nA{END}" and store.manifest.straddling_tokens == 1


def test_variables_are_kept_for_exports(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    messages = chat("Q", "A")
    template = (
        "\n  {% if names %}{{ names[0] ~ names[1].k ~ deep ~ off ~ nothing }}\n{% endif %}"
        + SMOLLM2
    )
    variables = {"names": ["ß'\"", {"k": 1}], "deep": 1.5, "off": False, "nothing": None}
    store = made(
        tmp_path,
        [{"messages": messages}],
        checkpoints["SmolLM2"],
        template,
        template_variables=variables,
    )
    assert whole(store) == applied(checkpoints["SmolLM2"], messages, template, **variables)
    kept = (store.path / "tokenizer" / "chat_template.jinja").read_text()
    assert applied(checkpoints["SmolLM2"], messages, kept) == whole(store)
    assert applied(checkpoints["SmolLM2"], messages, kept, deep=2) == applied(
        checkpoints["SmolLM2"], messages, template, **{**variables, "deep": 2}
    )
    with pytest.raises(TokenizerError, match="--template-set needs one chat template"):
        made(
            tmp_path,
            [{"messages": messages}],
            checkpoints["SmolLM2"],
            chat_template="chatml",
            template_variables=variables,
        )


def test_variables_on_the_command_line(
    checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_jsonl(tmp_path / "s.jsonl", [{"messages": chat("Q", "A")}])
    command = [
        "prepare",
        "--source",
        str(source),
        "--tokenizer",
        str(checkpoints["Qwen 3"]),
        "--out",
        str(tmp_path / "store"),
    ]
    assert main(command) == 0
    asked = ["--template-set", "enable_thinking=false"]
    assert main([*command, *asked]) == 2, "another request"
    assert main([*command, *asked, "--overwrite"]) == 0
    assert learnt(Store.open(tmp_path / "store")) == f"A{END}"
    assert main([*command, *asked]) == 0
    capsys.readouterr()
    for setting in ("enable_thinking", "a b=1", "=1"):
        assert main([*command, "--template-set", setting]) == 2
        assert "must be NAME=VALUE, such as enable_thinking=false" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [{"level": 12345}, {"on": True}, {"a": {"b": 7.5}}])
def test_arguments_that_are_no_texts_are_looked_for(
    checkpoints: dict[str, Path], tmp_path: Path, arguments: dict[str, Any]
) -> None:
    names_only = SMOLLM2.replace(
        "message['content'] +",
        "message['content'] ~ (message.tool_calls or [])|map(attribute='function.name')|join +",
    )
    messages = [
        *chat("Q"),
        {"role": "assistant", "content": "I ask.", "tool_calls": [call("add", **arguments)]},
    ]
    assert (
        "tool_calls"
        in made(
            tmp_path, [{"messages": messages}], checkpoints["SmolLM2"], names_only
        ).manifest.left_out
    )
    whole_calls = names_only.replace(
        "|map(attribute='function.name')|join", "|map(attribute='function')|map('tojson')|join"
    )
    assert (
        "tool_calls"
        not in made(
            tmp_path, [{"messages": messages}], checkpoints["SmolLM2"], whole_calls
        ).manifest.left_out
    )
