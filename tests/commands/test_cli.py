"""The command line: what it lists, what it imports, and how errors reach the user."""

import argparse
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import longctx
from longctx import cli
from longctx.config.names import SETTINGS
from longctx.config.run import SECTIONS
from longctx.errors import UserError


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`command(run)` puts a module with this `run` in the place of every command."""

    def replace(run: Callable[[argparse.Namespace], int], **attributes: Any) -> None:
        def add_arguments(parser: argparse.ArgumentParser) -> None:
            parser.add_argument("config", nargs="?")
            parser.add_argument("--ranks", type=int, default=3, help="how many")

        module = SimpleNamespace(
            SUMMARY="does things", add_arguments=add_arguments, run=run, **attributes
        )
        monkeypatch.setattr(cli, "_module", lambda name: module)

    return replace


def fails(error: BaseException) -> Callable[[argparse.Namespace], int]:
    def run(arguments: argparse.Namespace) -> int:
        raise error

    return run


def test_help_lists_every_command_without_importing_torch() -> None:
    code = (
        "import sys, longctx.cli as cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    for name in cli.COMMANDS:
        (line,) = [line for line in process.stdout.splitlines() if line.split()[:1] == [name]]
        assert len(line.split()) > 2, "a command has a summary"


REFUSED = [
    "train --nope",
    "train --batch.foo 1",
    "train no.yaml --dry-run",
    "train --dry-run --gpus 0",
    "train --mix wlb_128k",
    "train --trace-steps x",
    "finetune model",
    "finetune model data --lora 0",
    "finetune owner/model data --train.step 3",
    "train --model.from_pretrained owner/model --train.step 3",
    "eval run --documents 0",
    "eval runs/none",
    "eval /none",
    "export run out --max-shard-size x",
    "export runs/none out",
    "plan --lengths no.txt --ranks 8",
    "compare --lengths no.txt",
    "measure no.yaml",
    "check-step no.py",
    "check-step --data no.py --probe x",
    "calibrate no.yaml",
    "estimate --gpus 0",
    "estimate --batch.foo 1",
    "config nope",
]


def test_help_plans_and_refusals_come_before_torch_is_imported(tmp_path: Path) -> None:
    """It takes seconds, which nobody waits for who has mistyped an option."""
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("3000\n" * 9)
    told = [f"{name} --help" for name in cli.COMMANDS]
    told.append("check-step --template own")
    told.append(f"plan --lengths {lengths} --ranks 8 --tokens-per-rank 2048 --model llama-3.1-8b")
    code = f"""
import sys
from longctx.cli import main

def status(command):
    try:
        return main(command.split())
    except SystemExit as end:
        return end.code

for command in {told!r}:
    assert status(command) == 0, command
    assert "torch" not in sys.modules, command
for command in {REFUSED!r}:
    assert status(command) == 2, command
    assert "torch" not in sys.modules, command
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help_with_one_default_per_option(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([name, "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert f"usage: longctx {name}" in text
    for entry in re.split(r"\n\n|\n  (?=-)", text):
        assert entry.count("(default") <= 1, f"a doubled default: {entry}"
        assert "(default: [])" not in entry
    assert name != "plan" or "(default: " in text


@pytest.mark.slow
def test_libraries_say_nothing_before_a_command_does() -> None:
    """transformers imports torchao, which warns in five lines, on every rank."""
    code = "import longctx.cli; longctx.cli.main(['config', 'log']); import transformers.trainer"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 0 and process.stderr == ""


def test_shells_complete_commands_options_settings_and_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("shtab")
    assert cli.main(["--completion", "bash"]) == 0
    script = tmp_path / "completion.bash"
    script.write_text(capsys.readouterr().out)
    (tmp_path / "my run.yaml").write_text("")

    def completed(*words: str) -> list[str]:
        line = " ".join(f"'{word}'" for word in words)
        code = (
            f"source {script}; COMP_WORDS=(longctx {line}); COMP_CWORD={len(words)}; "
            'COMPREPLY=(); _shtab_longctx; printf "%s\\n" "${COMPREPLY[@]}"'
        )
        process = subprocess.run(
            ["bash", "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True
        )
        return process.stdout.split("\n")[:-1]

    assert completed("est") == ["estimate"]
    assert completed("train", "--batch.t") == ["--batch.tokens_per_rank"]
    assert completed("finetune", "--proc") == ["--processes"]
    assert completed("estimate", "--mi") == ["--mix"]
    assert completed("train", "my") == ["my run.yaml"]
    assert completed("plan", "--train.") == [""], "it takes no settings"


def test_the_schema_knows_every_setting_and_no_other(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["config", "--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    known = set()
    for section, content in schema["properties"].items():
        reference, null = content["anyOf"]
        assert null == {"type": "null"}, "a section whose lines are commented out"
        of_section = schema["$defs"][reference["$ref"].removeprefix("#/$defs/")]
        assert of_section["additionalProperties"] is False
        assert of_section["properties"].keys() == SECTIONS[section].model_fields.keys()
        known |= {f"{section}.{name}" for name in of_section["properties"]}
        assert all(each["description"] for each in of_section["properties"].values())
    assert known == SETTINGS.keys()
    for file in (repository / "examples" / "recipes").glob("*.yaml"):
        assert yaml.safe_load(file.read_text()).keys() <= schema["properties"].keys(), file
    assert cli.main(["config", "--schema", "train"]) == 2


def test_config_lists_the_settings_and_their_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    out = capsys.readouterr().out
    assert longctx.config.overview() in out and len(out.splitlines()) < 70
    assert cli.main(["config"]) == 0
    assert longctx.config.describe() == capsys.readouterr().out.strip()
    assert cli.main(["config", "batch", "log"]) == 0
    out = capsys.readouterr().out
    assert (
        "--batch.tokens_per_rank int" in out
        and "--log.tensorboard" in out
        and "--train.steps" not in out
    )
    assert cli.main(["config", "context.mode"]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if "--" in line][1:] == [
        "  --context.mode auto|static|bins"
    ]
    assert cli.main(["config", "examples/quickstart.yaml"]) == 0
    out = capsys.readouterr().out
    assert "  batch.tokens_per_rank: 2048  # default: 8192\n" in out and "train.steps" not in out
    assert cli.main(["config", "steps"]) == 2
    assert (
        "there is no section or setting 'steps', nor such a file: sections are model, lora"
        in capsys.readouterr().err
    )


def test_python_m_longctx_is_the_same_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["longctx", "--version"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("longctx", run_name="__main__")
    assert capsys.readouterr().out == f"longctx {longctx.__version__}\n"


DIGITS = "9" * 5000


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "commands:"),
        (["trian"], "no command 'trian': did you mean train?"),
        (["zzz"], "no command 'zzz': choose one of prepare, train, finetune"),
        (["--verbose"], "unrecognized arguments: --verbose"),
        (
            ["train", "--max-length", "4096"],
            "arguments: --max-length: did you mean --data.max_length?",
        ),
        (
            ["finetune", "a", "b", "--batch-size=4"],
            "arguments: --batch-size=4: did you mean --batch.global_tokens?",
        ),
        (["finetune", "a", "b", "--max_len", "4"], "did you mean --max-length?"),
        (
            ["export", "a", "b", "c"],
            "unrecognized arguments: c: `longctx export --help` lists what it takes",
        ),
        (["train", "--train.steps"], "--train.steps has no value: write --train.steps VALUE"),
        (
            ["train", "--train.steps", "--processes", "2"],
            "--train.steps has no value: write --train.steps VALUE",
        ),
        (["train", "run\0.yaml"], "an argument has a NUL character"),
        (["prepare", "--source", "texts\0"], "an argument has a NUL character"),
        (["train", "--trace-steps", f"{DIGITS}:{DIGITS}"], "--trace-steps is '9999"),
        (
            ["plan", "--ranks", "8", "--lengths", "nowhere", "--bins", f"8:{DIGITS}"],
            "is not LENGTH:DEGREE",
        ),
        (["compare", "--mix", "wlb_128k", "--ranks", DIGITS], "is not a list of whole numbers"),
        (
            ["compare", "--mix", "wlb_128k", "--baseline", f"static:{DIGITS}"],
            "is not static:DEGREE",
        ),
    ],
    ids=range(16),
)
def test_unknown_commands_and_odd_arguments(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: object = cli.main(argv)
    except SystemExit as end:
        status = end.code
    assert status == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (
            UserError("this, by that rule: do so"),
            2,
            "longctx plan: error: this, by that rule: do so\n",
        ),
        (
            FileNotFoundError(2, "No such file", "x.txt"),
            2,
            "longctx plan: error: [Errno 2] No such file: 'x.txt'\n",
        ),
        (KeyboardInterrupt(), 130, "longctx plan: interrupted\n"),
    ],
)
def test_user_errors_have_no_traceback(
    command: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    status: int,
    message: str,
) -> None:
    command(fails(error))
    assert cli.main(["plan"]) == status
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", message)


@pytest.mark.parametrize(
    ("ranks", "waits"),
    [((), []), (("0", "0"), []), (("1", "1"), [10.0]), (("8", "0"), [2.0]), (("9", "1"), [10.0])],
)
def test_one_rank_of_each_node_tells_an_error_of_all_ranks_first(
    command: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    ranks: tuple[str, ...],
    waits: list[float],
) -> None:
    waited: list[float] = []
    monkeypatch.setattr("longctx.parallel.environment.time.sleep", waited.append)
    for name, value in zip(("RANK", "LOCAL_RANK"), ranks or (None, None), strict=True):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(
            name, value
        )
    command(fails(UserError("this, by that rule: do so")))
    assert cli.main(["plan"]) == 2
    assert waited == waits


@pytest.mark.parametrize("error", [ValueError("a library's"), RuntimeError("a bug")])
def test_other_errors_keep_their_traceback(command: Callable[..., None], error: Exception) -> None:
    command(fails(error))
    with pytest.raises(type(error), match=str(error)):
        cli.main(["plan"])


def test_a_closed_pipe_is_not_an_error(repository: Path) -> None:
    code = (
        "import sys, types, longctx.cli as cli\n"
        "def run(arguments):\n"
        "    for line in range(100000): print(line)\n"
        "    return 0\n"
        "cli._module = lambda name: types.SimpleNamespace(SUMMARY='', add_arguments=lambda parser: "
        "None, run=run)\n"
        "sys.exit(cli.main(['plan']))\n"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "0\n"
    writer.stdout.close()
    assert writer.stderr is not None
    assert writer.stderr.read() == ""
    assert writer.wait() == 141


def test_settings_reach_the_commands_that_take_them(
    command: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[argparse.Namespace] = []

    def run(arguments: argparse.Namespace) -> int:
        seen.append(arguments)
        return int(arguments.ranks)

    argv = [
        "run.yaml",
        "--batch.tokens_per_rank",
        "4096",
        "--ranks",
        "8",
        "--context.bins={8192: 1}",
        "--a-b.c-d",
        "-1",
    ]
    command(run, OVERRIDES=True)
    assert cli.main(["measure", *argv]) == 8, "the exit status is the command's"
    assert (seen[0].config, seen[0].ranks) == ("run.yaml", 8)
    assert seen[0].overrides == [
        "batch.tokens_per_rank=4096",
        "context.bins={8192: 1}",
        "a-b.c-d=-1",
    ]
    command(run)
    assert cli.main(["plan", "--batch.tokens_per_rank", "4096"]) == 2
    assert "unrecognized arguments: --batch.tokens_per_rank" in capsys.readouterr().err
