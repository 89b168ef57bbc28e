"""A store made tomorrow is the same: templates that ask for the day, and templates and tokenizers
that draw by chance."""

import json
from pathlib import Path
from typing import Any

import pytest

from longctx.cli import main
from longctx.data.records.chat import ChatError
from longctx.data.records.fixed import TemplateError
from longctx.data.records.tokenizer import TokenizerError
from longctx.data.store.store import Store
from tests.data_cases import learnt, made, whole, write_jsonl
from tests.template_cases import SMOLLM2, SMOLLM2_MARKED, chat

RECORD = {"messages": chat("Q", "A")}
THOUGHT = {
    "messages": [*chat("Q"), {"role": "assistant", "content": "A", "reasoning_content": "Hm"}]
}
TODAY = "{{ strftime_now('%d %B %Y') }}"
LLAMA = (  # as Llama 3.2's
    "{%- if not date_string is defined %}{%- if strftime_now is defined %}{%- set date_string = "
    "strftime_now('%d %b %Y') %}"
    "{%- else %}{%- set date_string = '26 Jul 2024' %}{%- endif %}{%- endif %}{{ date_string }}"
)
IN_A_MACRO = "{%- macro day() %}" + TODAY + "{% endmacro %}{{ day() }}"


@pytest.mark.parametrize("template", [SMOLLM2, SMOLLM2_MARKED])
@pytest.mark.parametrize("record", [RECORD, THOUGHT])
@pytest.mark.parametrize(
    ("head", "day"),
    [(TODAY, "31 January 2026"), (LLAMA, "31 Jan 2026"), (IN_A_MACRO, "31 January 2026")],
)
def test_a_template_that_asks_for_the_day_needs_one(
    checkpoints: dict[str, Path],
    tmp_path: Path,
    template: str,
    record: dict[str, Any],
    head: str,
    day: str,
) -> None:
    with pytest.raises(
        TemplateError,
        match=r"the chat template asks for the day .* \(--date YEAR-MONTH-DAY\), or set",
    ):
        made(tmp_path, [record], checkpoints["SmolLM2"], head + template)
    store = made(tmp_path, [record], checkpoints["SmolLM2"], head + template, date="2026-01-31")
    assert whole(store).startswith(f"{day}<|im_start|>") and learnt(store) == "A<|im_end|>"
    assert store.manifest is not None and ", on 2026-01-31; turns" in store.manifest.template
    kept = (store.path / "tokenizer" / "chat_template.jinja").read_text()
    assert kept == head + template, "exports ask for their own day"


def test_the_day_is_part_of_the_request(
    checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_jsonl(tmp_path / "s.jsonl", [RECORD])
    (tmp_path / "t.jinja").write_text(LLAMA + SMOLLM2)
    command = [
        "prepare",
        "--source",
        str(source),
        "--tokenizer",
        str(checkpoints["SmolLM2"]),
        "--out",
        str(tmp_path / "store"),
    ]
    command += ["--chat-template", str(tmp_path / "t.jinja")]
    assert main(command) == 2 and "asks for the day" in capsys.readouterr().err
    assert main([*command, "--date", "2026-01-31"]) == 0
    first = Store.open(tmp_path / "store").fingerprint
    assert main([*command, "--date", "2026-01-31"]) == 0 and "up to date" in capsys.readouterr().out
    assert (
        main([*command, "--date", "2026-02-01"]) == 2
        and "other settings" in capsys.readouterr().err
    )
    assert main([*command, "--date", "2026-02-01", "--overwrite"]) == 0
    assert Store.open(tmp_path / "store").fingerprint != first
    assert main([*command, "--template-set", 'date_string="today"', "--overwrite"]) == 0
    assert whole(Store.open(tmp_path / "store")).startswith("today<|im_start|>")


def test_a_day_that_is_none_or_not_asked_for_is_refused(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    for date in ("31.01.2026", "2026-02-30", "20260131", "today"):
        with pytest.raises(
            TemplateError, match=r"the date is '.*': it must be YEAR-MONTH-DAY, such as 2026-01-31"
        ):
            made(tmp_path, [RECORD], checkpoints["SmolLM2"], TODAY + SMOLLM2, date=date)
    for options in ({"template": SMOLLM2}, {"chat_template": "chatml"}):
        with pytest.raises(
            TemplateError, match=r"the chat template asks for no day: omit it \(--date\)"
        ):
            made(tmp_path, [RECORD], checkpoints["SmolLM2"], date="2026-01-31", **options)
    with pytest.raises(ChatError, match="the format %Q of the time is not known"):
        made(
            tmp_path,
            [RECORD],
            checkpoints["SmolLM2"],
            "{{ strftime_now('%Q') }}" + SMOLLM2,
            date="2026-01-31",
        )
    assert len(made(tmp_path, [{"text": "x"}], checkpoints["SmolLM2"], TODAY + SMOLLM2)) == 1, (
        "texts have no template"
    )


@pytest.mark.parametrize(
    "draw",
    [
        "{{ ['a', 'b'] | random }}",
        "{{ [['a', 'b']] | map('random') | join }}",
        "{{ lipsum(1) }}",
        "{% filter random %}ab{% endfilter %}",
    ],
)
@pytest.mark.parametrize("template", [SMOLLM2, SMOLLM2_MARKED])
def test_a_template_that_draws_is_refused(
    checkpoints: dict[str, Path], tmp_path: Path, draw: str, template: str
) -> None:
    with pytest.raises(
        TemplateError, match=r"the chat template draws by chance \((random|lipsum)\): remove that"
    ):
        made(tmp_path, [RECORD], checkpoints["SmolLM2"], template + draw)
    words = "{# random, lipsum #}{{ 'random ' | trim }}"
    assert "random" in whole(made(tmp_path, [RECORD], checkpoints["SmolLM2"], template + words))


@pytest.mark.parametrize("draw", ["{{ ''.join }}", "{{ cycler('a') }}"])
def test_a_template_that_prints_an_object_is_refused(
    checkpoints: dict[str, Path], tmp_path: Path, draw: str
) -> None:
    with pytest.raises(
        TemplateError,
        match=r"the chat template prints <.* at 0x.*>, an object of Python that is elsewhere",
    ):
        made(tmp_path, [RECORD], checkpoints["SmolLM2"], draw + SMOLLM2)
    seen = "<f object at 0x7f00>"
    assert seen in whole(
        made(tmp_path, [{"messages": chat(seen, "A")}], checkpoints["SmolLM2"], SMOLLM2)
    )


@pytest.mark.parametrize("as_checkpoint", [False, True])
def test_a_tokenizer_that_drops_merges_by_chance_is_refused(
    checkpoints: dict[str, Path], tmp_path: Path, as_checkpoint: bool
) -> None:
    folder = checkpoints["SmolLM2"]
    content = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    assert made(tmp_path, [RECORD], folder)
    (tmp_path / "c").mkdir()
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / "c" / name).write_bytes((folder / name).read_bytes())
    file = tmp_path / "c" / "tokenizer.json"
    tokenizer = file.parent if as_checkpoint else file
    content["model"]["dropout"] = 0.1
    file.write_text(json.dumps(content), "utf-8")
    with pytest.raises(
        TokenizerError,
        match=r"draws by chance \(dropout is 0\.1 in the model of its tokenizer\.json\).*to null",
    ):
        made(tmp_path, [{"text": "x"}], tokenizer)
    content["model"]["dropout"] = 0.0
    file.write_text(json.dumps(content), "utf-8")
    assert len(made(tmp_path, [{"text": "x"}], tokenizer)) == 1
