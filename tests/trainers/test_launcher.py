"""The launcher: programs that train by transformers' Trainer, as they are, and what it refuses."""

import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

from longctx.errors import UserError
from longctx.parallel.device import ALLOCATOR_SETTINGS
from longctx.trainers import launcher
from longctx.trainers.launcher import LauncherError, main, read_options, run
from longctx.trainers.starters import Program, run_here
from tests.trainer_cases import TOKENS_PER_RANK, conversations, model, tokenizer, train_by_launcher
from tests.trainer_cases import train as train_plain
from tests.trainers.test_trainers import assert_equal, plain
from tests.workers import Workers

ROOT = Path(__file__).parents[2]


def test_trainers_of_a_program_compute_what_one_plain_process_computes(
    workers: Workers, tmp_path: Path
) -> None:
    """Each once: a second `train` of the same trainer is planned by the first."""
    options = {"tokens_per_rank": TOKENS_PER_RANK}
    runs = workers.run(train_by_launcher, 2, tmp_path, "qwen2", options)
    assert_equal(runs, plain(workers, tmp_path, train_plain, "qwen2", {}))
    assert max(runs[0]["degrees"]) == 2
    for found in runs:
        assert found["trained"] == ["Trainer"]
        assert found["restored"]


def test_a_trainer_with_a_train_of_its_own_runs_it_once(workers: Workers, tmp_path: Path) -> None:
    """As that of ms-swift, which prepares the model before."""
    options = {"tokens_per_rank": TOKENS_PER_RANK}
    runs = workers.run(train_by_launcher, 2, tmp_path, "qwen2", options, True)
    assert_equal(runs, plain(workers, tmp_path, train_plain, "qwen2", {}))
    for found in runs:
        assert found["trained"] == ["Around"]
        assert found["own_trains"] == 2
        assert found["restored"]


def test_options_of_a_file_or_of_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("tokens_per_rank: 4096\nmode: static\n")
    expected = {"tokens_per_rank": 4096, "mode": "static"}
    assert read_options(file, None) == expected
    variable = "{tokens_per_rank: 4096, mode: static}"
    assert read_options(None, variable) == expected
    assert read_options(None, None) == {}
    assert read_options(None, "") == {}
    with pytest.raises(LauncherError, match="are both given: leave one out"):
        read_options(file, variable)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "tokens_per_rnk: 4096",
            "'tokens_per_rnk', which is no option: did you mean tokens_per_rank",
        ),
        ("1: 2", "has 1, which is no option: use tokens_per_rank, profile, mode"),
        ("4096", "must be a mapping, such as `tokens_per_rank: 16384`"),
        ("[", "LONGCTX_OPTIONS is not valid YAML"),
    ],
)
def test_options_that_make_no_sense(text: str, said: str) -> None:
    with pytest.raises(UserError) as raised:
        read_options(None, text)
    assert said in str(raised.value)


def test_a_file_of_options_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match=r"none.yaml cannot be read: No such file"):
        read_options(tmp_path / "none.yaml", None)


@pytest.fixture
def own_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.usefixtures("own_arguments")
def test_a_script_runs_as_python_runs_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With modules beside it, its own arguments, and as __main__."""
    (tmp_path / "beside_the_script.py").write_text("VALUE = 7\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom beside_the_script import VALUE\nprint(__name__, VALUE, sys.argv[1:])\n"
    )
    run(Program(str(script), ["--lr", "1"]))
    assert capsys.readouterr().out == "__main__ 7 ['--lr', '1']\n"


@pytest.mark.usefixtures("own_arguments")
def test_gpus_are_prepared_before_the_program_starts_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the commands of longctx do: torch's allocator and the queues of streams."""
    names = "PYTORCH_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS"
    for name in (*ALLOCATOR_SETTINGS, *names):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    script = tmp_path / "script.py"
    script.write_text(f"import os\nprint([name in os.environ for name in {names}])")
    try:
        main([str(script)])
    finally:
        for name in names:
            os.environ.pop(name, None)
    assert "[True, True]" in capsys.readouterr().out


@pytest.mark.usefixtures("own_arguments")
def test_a_module_runs_as_python_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a_module.py").write_text("import sys\nprint(__name__, sys.argv[1:])\n")
    monkeypatch.chdir(tmp_path)
    run(Program("a_module", ["-m", "x"], is_module=True))
    assert capsys.readouterr().out == "__main__ ['-m', 'x']\n"


@pytest.mark.usefixtures("own_arguments")
def test_a_command_of_a_package_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its status is that of the process."""
    called = []

    def tool() -> int:
        called.append(sys.argv)
        return 3

    class Command:
        def load(self) -> Any:
            return tool

    monkeypatch.setattr(launcher, "_command", lambda name: Command())
    with pytest.raises(SystemExit) as exited:
        run(Program("some-tool", ["train"]))
    assert exited.value.code == 3 and called == [["some-tool", "train"]]


@pytest.mark.parametrize(
    ("given", "runs"),
    [
        ("trl sft --packing", "-m trl.scripts.sft --packing"),
        ("trl reward", "-m trl.scripts.reward"),
        ("trl env", "trl env"),
        ("trl", "trl"),
        ("llamafactory-cli train sft.yaml", "-m llamafactory.launcher sft.yaml"),
        ("llamafactory-cli version", "llamafactory-cli version"),
        ("axolotl train sft.yaml", "axolotl train sft.yaml --launcher python"),
        (
            "axolotl train sft.yaml --launcher torchrun -- --nproc_per_node 8",
            "axolotl train sft.yaml --launcher torchrun --launcher python",
        ),
        ("axolotl preprocess sft.yaml", "axolotl preprocess sft.yaml"),
        ("sft train", "sft train"),
        ("-m trl sft", "-m trl sft"),
    ],
)
def test_commands_that_would_start_processes_run_what_those_run(given: str, runs: str) -> None:
    """Also on a machine with several GPUs, on which LLaMA-Factory starts torchrun."""
    assert _words(run_here(_program(given))) == runs


def _program(words: str) -> Program:
    name, *arguments = words.removeprefix("-m ").split()
    return Program(name, arguments, is_module=words.startswith("-m "))


def _words(program: Program) -> str:
    words = " ".join([program.name, *program.arguments])
    return f"-m {words}" if program.is_module else words


def test_a_file_that_the_command_of_swift_reads_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes get options, not the file."""

    def parse_yaml_args(arguments: list[str]) -> None:
        assert arguments == ["sft.yaml", "--seed", "1"]
        arguments[0:1] = ["--model", "m"]

    main_of_swift = types.ModuleType("swift.cli.main")
    vars(main_of_swift)["parse_yaml_args"] = parse_yaml_args
    monkeypatch.setitem(sys.modules, main_of_swift.__name__, main_of_swift)
    program = run_here(_program("swift sft sft.yaml --seed 1"))
    assert _words(program) == "-m swift.cli.sft --model m --seed 1"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["no-such-tool", "train"], "'no-such-tool' is neither a file nor a command"),
        (["-m", "no_such.module"], "no module 'no_such.module' can be imported here"),
        (["-m", "no_such_module"], "no module 'no_such_module' can be imported here"),
    ],
)
@pytest.mark.usefixtures("own_arguments")
def test_what_is_no_program(
    given: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own = Trainer.train
    with pytest.raises(SystemExit) as exited:
        main(given)
    assert exited.value.code == 2
    assert words in capsys.readouterr().err
    assert Trainer.train is own


@pytest.mark.usefixtures("own_arguments")
def test_a_tool_that_is_not_installed_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "swift", None)
    with pytest.raises(SystemExit) as exited:
        main(["swift", "sft", "sft.yaml"])
    assert exited.value.code == 2
    assert "no module 'swift.cli.sft' can be imported here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("tokens_per_rank: lots", "tokens_per_rank is 'lots': must be a whole number"),
        ("mode: fast", "mode is 'fast': must be one of"),
        ("{mode: static, degree: 2}", "degree is 2: must be a whole number in 1..1"),
        ("merge_prefixes: 1", "merge_prefixes is 1"),
    ],
)
@pytest.mark.usefixtures("own_arguments")
def test_wrong_options_are_said_before_the_program_runs(
    options: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('started')\n")
    monkeypatch.setenv("LONGCTX_OPTIONS", options)
    with pytest.raises(SystemExit) as exited:
        main([str(script)])
    said = capsys.readouterr()
    assert exited.value.code == 2
    assert words in said.err
    assert said.out == ""


@pytest.mark.usefixtures("own_arguments")
def test_a_program_that_trains_nothing_here_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('done')\n")
    main([str(script)])
    said = capsys.readouterr()
    assert said.out == "done\n"
    assert "has trained no Trainer in this process" in said.err


def test_the_command_line_without_a_program() -> None:
    """By itself, as torchrun starts it."""
    command = [sys.executable, "-m", "longctx.trainers"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 2
    assert "the following arguments are required: PROGRAM" in done.stderr


@pytest.mark.slow
def test_a_script_of_trl_computes_on_two_processes_what_it_computes_on_one(tmp_path: Path) -> None:
    """As the page of trainers starts it: every logged digit of losses and norms."""
    model("arcee").save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    data = tmp_path / "data"
    data.mkdir()
    rows = "".join(json.dumps(row) + "\n" for row in conversations(24))
    (data / "chats.jsonl").write_text(rows, "utf-8")
    script = ["--model_name_or_path", "model", "--dataset_name", "data"]
    script += ["--max_length", "2048", "--use_cpu", "True", "--bf16", "False", "--dtype", "float32"]
    script += ["--max_steps", "3", "--logging_steps", "1", "--report_to", "none"]
    script += ["--disable_tqdm", "True", "--save_strategy", "no", "--output_dir", "out"]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "longctx.trainers"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["LONGCTX_OPTIONS"] = "{tokens_per_rank: 60, profile: cpu-2core}"
    found = []
    for start, rows_of_rank in ((["-m", "trl.scripts.sft"], "8"), ([*torchrun, "trl", "sft"], "4")):
        command = [sys.executable, *start, *script, "--per_device_train_batch_size", rows_of_rank]
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=300
        )
        assert done.returncode == 0, done.stderr
        found.append(re.findall(r"'(?:loss|grad_norm)': '([^']+)'", done.stdout))
    assert len(found[0]) == 6
    assert found[0] == found[1]
    assert "SFTTrainer trains with dynamic context parallelism" in done.stdout
    assert "'highest_degree': 2" in done.stdout
