"""From a checkpoint and a file of conversations to a checkpoint, by the command, on two
processes."""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import peft
import pytest
import torch
import transformers
import yaml

from longctx.cli import main
from longctx.commands import finetune as command
from longctx.config import Config, load
from longctx.data.records.tokenizer import same_tokens
from longctx.data.sampler import Sampler
from longctx.data.store.store import Store
from longctx.errors import UserError
from longctx.model.checkpoint_files import CheckpointFiles, PretrainedError
from longctx.training import data as run_data
from longctx.training.checks import check_model
from longctx.training.data import RunData, with_steps
from longctx.training.saved.checkpoint import steps
from tests import launched
from tests.evaluation_cases import save_checkpoint
from tests.huggingface_cases import build_model
from tests.marks import slow_unless
from tests.template_cases import FAMILIES
from tests.training_cases import make_store, pretend_checkpoints

SETTINGS = [
    "--train.steps=3",
    "--batch.global_tokens=2000",
    "--optimizer.learning_rate=0.01",
    "--log.tensorboard=false",
]
SIZES = [
    "--batch.tokens_per_rank=1100",
    "--data.held_out=0.3",
    "--eval.every=2",
    "--train.dtype=float32",
    "--train.compile=false",
]
"""Of an example of GPUs."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer and a chat template, all its weights in bfloat16."""
    folder = FAMILIES["SmolLM2"].save(tmp_path_factory.mktemp("checkpoint"))
    entries = len(transformers.AutoTokenizer.from_pretrained(folder))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "short.jinja").write_text("{{ messages[0].content }}")
    build_model("llama", "eager", vocab_size=entries).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations of very different lengths, so that degrees differ."""
    lines = [
        {
            "messages": [
                {"role": "user", "content": "word " * count},
                {"role": "assistant", "content": f"There are {count}."},
            ]
        }
        for count in (3, 5, 8, 11, 200, 14, 17, 400, 4, 6)
    ]
    file = tmp_path_factory.mktemp("data") / "counted.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return file


@pytest.fixture
def quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes torchrun's place."""
    monkeypatch.setattr("longctx.parallel.launch.launch", launched.launch)


def finetune(capfd: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What the command prints."""
    capfd.readouterr()
    assert main(["finetune", *map(str, arguments), "--processes", "2", *SETTINGS]) == 0
    return capfd.readouterr().out


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model.eval()(input_ids=torch.arange(40)[None] % 20).logits
    return out


@pytest.mark.usefixtures("quick_start")
def test_all_parameters(
    checkpoint: Path, conversations: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The example, with smaller data."""
    out = tmp_path / "my run"
    told = finetune(
        capfd,
        checkpoint,
        conversations,
        "--config",
        "examples/finetune_chat.yaml",
        "--out",
        out,
        *SIZES,
    )
    load_it = f"load with transformers: AutoModelForCausalLM.from_pretrained('{out}/export')"
    assert "with loss) on 2 ranks" in told and load_it in told
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3] and any(
        len(row["degrees"]) > 1 for row in rows
    )
    assert [row["validation_loss"] is not None for row in rows] == [False, True, True]
    before, after = (
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for folder in (checkpoint, out / "export")
    )
    assert (logits(after) - logits(before)).abs().max() > 0.01
    templates = [
        transformers.AutoTokenizer.from_pretrained(folder).chat_template
        for folder in (checkpoint, out / "export")
    ]
    assert templates[0] == templates[1] and templates[0].keys() == {"default", "short"}


@pytest.mark.usefixtures("quick_start")
def test_adapters(
    checkpoint: Path, conversations: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    finetune(
        capfd, checkpoint, conversations, "--config", "examples/lora.yaml", "--out", out, *SIZES
    )
    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    plain = logits(base)
    adapted = logits(peft.PeftModel.from_pretrained(base, out / "export"))
    assert (adapted - plain).abs().max() > 0.01
    assert (
        main(["export", str(out), str(tmp_path / "merged"), "--merge", "--dtype", "float32"]) == 0
    )
    merged = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", dtype=torch.float32
    )
    torch.testing.assert_close(logits(merged), adapted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nowhere/at/all", "data.jsonl"], "there is no folder nowhere/at/all"),
        (["{checkpoint}", "missing.jsonl"], "missing.jsonl"),
        (["{checkpoint}", "{data}", "--epochs", "0"], "--epochs is 0.0"),
        (["{checkpoint}", "{data}", "--processes", "-1"], "--processes is -1"),
        (
            ["{checkpoint}", "{data}", "--data.store=elsewhere"],
            "finetune trains on its DATA argument",
        ),
        (
            ["{checkpoint}", "{data}", "--data.store=[{{path: a, weight: 1}}]"],
            "finetune trains on its DATA argument",
        ),
        (["{checkpoint}", "{data}", "--lora", "0"], "--lora is 0: the rank must be at least 1"),
        (
            ["{checkpoint}", "{data}", "--lora", "4", "--lora.target_modules", "[wq]"],
            "no layer is called wq",
        ),
        (["{checkpoint}", "{data}", "--train.stepz", "4"], "did you mean train.steps?"),
        (["{no_tokenizer}", "{data}"], "there is no tokenizer in"),
        (
            ["{checkpoint}", "{data}", "--long-documents", "drop"],
            "is drop, but no length is set: give --max-length",
        ),
    ],
)
def test_invalid_requests_are_refused_before_the_run_starts(
    checkpoint: Path,
    conversations: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    named: str,
) -> None:
    if arguments[0].startswith("{no"):
        shutil.copytree(checkpoint, tmp_path / "none", ignore=shutil.ignore_patterns("tokenizer*"))
    places = {"checkpoint": checkpoint, "data": conversations, "no_tokenizer": tmp_path / "none"}
    given = [each.format(**places) for each in arguments]
    assert main(["finetune", *given, "--out", str(tmp_path / "run")]) == 2
    assert named in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_data_are_replaced_if_requested_and_not_trained_on_yet(
    checkpoint: Path, conversations: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fewer = tmp_path / "fewer.jsonl"
    fewer.write_text("".join(conversations.read_text().splitlines(keepends=True)[:6]))
    out = tmp_path / "run"
    command = [
        "finetune",
        str(checkpoint),
        "{data}",
        "--out",
        str(out),
        "--processes=2",
        "--prepare-only",
    ]

    def prepare(data: Path, *others: str) -> int:
        return main([each.format(data=data) for each in command] + list(others))

    assert prepare(conversations) == 0
    assert prepare(fewer) == 2
    assert "or replace it with --overwrite" in capsys.readouterr().err
    assert prepare(fewer, "--overwrite") == 0
    assert json.loads((out / "store" / "manifest.json").read_text())["documents"] == 6
    pretend_checkpoints(out, 3)
    assert prepare(conversations, "--overwrite") == 2
    assert (
        "contains a run trained to step 3, whose data cannot be replaced" in capsys.readouterr().err
    )


def test_a_tokenizer_may_have_more_entries_than_the_embedding(
    checkpoint: Path, conversations: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As that of Gemma 3; unless the data have such a token."""
    larger = shutil.copytree(checkpoint, tmp_path / "larger")
    tokenizer = transformers.AutoTokenizer.from_pretrained(larger)
    tokenizer.add_tokens(["<image>"])
    tokenizer.save_pretrained(larger)
    command = [
        "finetune",
        str(larger),
        "{data}",
        "--out",
        "{out}",
        "--processes=2",
        "--prepare-only",
        "--train-on=all",
    ]
    assert main([each.format(data=conversations, out=tmp_path / "a") for each in command]) == 0
    with_token = tmp_path / "pictures.jsonl"
    with_token.write_text(
        conversations.read_text() + conversations.read_text().replace("There", "<image>")
    )
    assert main([each.format(data=with_token, out=tmp_path / "b") for each in command]) == 2
    told = capsys.readouterr().err
    assert (
        f"token {len(tokenizer) - 1} of" in told and "('<image>') is beyond the embedding" in told
    )
    assert "add entries by model.new_tokens [<image>]" in told
    assert (
        main(
            [
                each.format(data=with_token, out=tmp_path / "c")
                for each in [*command, "--model.new_tokens=[<image>]"]
            ]
        )
        == 0
    )


def test_the_tokenizer_is_the_one_that_transformers_builds(
    tmp_path: Path, conversations: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Qwen 2's class makes its own pre-tokenizer, whatever tokenizer.json says."""
    folder = FAMILIES["Qwen 3"].save(tmp_path / "qwen")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**settings, "tokenizer_class": "Qwen2Tokenizer"})
    )
    entries = len(transformers.AutoTokenizer.from_pretrained(folder))
    build_model(
        "qwen2", "eager", vocab_size=entries, bos_token_id=None, eos_token_id=None
    ).save_pretrained(folder)
    built = transformers.AutoTokenizer.from_pretrained(folder)
    assert not same_tokens(
        built.backend_tokenizer.to_str(), (folder / "tokenizer.json").read_text()
    ), "nothing to show"
    finetune(capfd, folder, conversations, "--out", tmp_path / "run", "--prepare-only")
    messages = json.loads(conversations.read_text().splitlines()[0])["messages"]
    store = Store.open(tmp_path / "run" / "store")
    expected = built.apply_chat_template(messages, return_dict=False)
    assert store.tokens(0, 0, int(store.lengths[0]))[0].tolist() == expected
    raw = tmp_path / "raw"
    assert (
        main(
            [
                "prepare",
                "--source",
                str(conversations),
                "--tokenizer",
                str(folder / "tokenizer.json"),
                "--out",
                str(raw),
            ]
        )
        == 0
    )
    config = load(
        None,
        [f"model.from_pretrained={folder}", f"data.store={raw}", "batch.tokens_per_rank=1100"],
        world_size=1,
    )
    with pytest.raises(UserError, match="was prepared with another tokenizer than"):
        check_model(config, RunData.open(config), config.model_source(), 1)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_start")
def test_more_epochs_continue_and_another_base_does_not(
    checkpoint: Path,
    conversations: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Into a folder with a space, named by model and data."""
    monkeypatch.chdir(tmp_path)
    Path("a b").symlink_to(conversations.parent)
    base = shutil.copytree(checkpoint, tmp_path / "tiny llama")
    command = [
        "finetune",
        str(base),
        f"a b/{conversations.name}",
        "--processes=1",
        "--log.tensorboard=false",
    ]
    run, documents = Path("runs/tiny llama-counted"), 10

    def steps_done() -> int:
        return len((run / "metrics.jsonl").read_text().splitlines())

    assert main([*command, "--epochs=1"]) == 0
    first, tokens = (
        steps_done(),
        yaml.safe_load((run / "config.yaml").read_text())["batch"]["global_tokens"],
    )
    before = transformers.AutoModelForCausalLM.from_pretrained(run / "export")
    capfd.readouterr()
    assert main([*command, "--epochs=2"]) == 0
    told = capfd.readouterr().out
    assert f"from step {first}" in told and "exported to" in told
    assert yaml.safe_load((run / "config.yaml").read_text())["batch"]["global_tokens"] == tokens
    drawn = [
        json.loads(line)["documents"] for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    assert (
        sum(drawn[:first]) >= documents
        and sum(drawn) >= 2 * documents
        and sum(drawn[:-1]) < 2 * documents
    )
    after = transformers.AutoModelForCausalLM.from_pretrained(run / "export")
    assert not torch.equal(logits(before), logits(after))
    other = shutil.copytree(checkpoint, tmp_path / "other")
    model = transformers.AutoModelForCausalLM.from_pretrained(other)
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(1)
    model.save_pretrained(other)
    capfd.readouterr()
    assert main(["finetune", str(other), *command[2:], "--epochs=3", "--out", str(run)]) == 2
    assert (
        f"began from {base}, whose weights differ from those of {other}" in capfd.readouterr().err
    )
    shutil.rmtree(base)  # then an export may replace it
    export = shutil.copytree(run / "export", tmp_path / "export")
    assert main(["finetune", str(export), *command[2:], "--epochs=3", "--out", str(run)]) == 0
    assert steps_done() > len(drawn)


def test_torchrun_is_refused(
    checkpoint: Path,
    conversations: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert main(["finetune", str(checkpoint), str(conversations)]) == 2
    assert re.search(
        r"omit torchrun, and give --processes; .* -m longctx train OUT/finetune\.yaml",
        capsys.readouterr().err,
    )


def test_every_option_of_data_is_one_of_finetune(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"body": "Some text."}\n' * 3)
    given = [
        "--text-column=body",
        "--end-of-document=<|im_start|>",
        "--chat-template=chatml",
        "--prepare-only",
    ]
    assert (
        main(
            [
                "finetune",
                str(checkpoint),
                str(texts),
                "--out",
                str(tmp_path / "run"),
                "--processes=1",
                *given,
            ]
        )
        == 0
    )
    store = Store.open(tmp_path / "run" / "store")
    assert store.tokenizer.end_of_document_token == "<|im_start|>" and len(store) == 3
    texts.write_text('{"input_ids": [1, 2], "labels": [1, 2]}\n' * 2)
    given = ["--prepare-only", "--max-documents=1", "--max-bytes=99"]
    assert (
        main(
            [
                "finetune",
                str(checkpoint),
                str(texts),
                "--out",
                str(tmp_path / "other"),
                "--processes=1",
                *given,
            ]
        )
        == 0
    )
    assert "stopped    at --max-documents 1, --max-bytes 99" in capsys.readouterr().out
    assert Store.open(tmp_path / "other" / "store").tokens(0, 0, 2)[0].tolist() == [1, 2]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_start")
def test_documents_beyond_the_models_length_are_told(
    checkpoint: Path, conversations: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    short = shutil.copytree(checkpoint, tmp_path / "short")
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 300}))
    told = finetune(capfd, short, conversations, "--out", tmp_path / "run")
    assert (
        "and the checkpoint is made for 300 (max_position_embeddings): extend it by "
        "model.rope_scaling" in told
    )
    extended = ["--model.rope_scaling.rope_type=yarn", "--model.rope_scaling.factor=16"]
    assert "max_position_embeddings" not in finetune(
        capfd, short, conversations, "--out", tmp_path / "extended", *extended
    )


@pytest.mark.slow
def test_an_interrupt_keeps_a_checkpoint_and_prints_how_to_resume(
    checkpoint: Path, conversations: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "longctx",
        "finetune",
        str(checkpoint),
        str(conversations),
        "--out",
        str(out),
    ]
    command += [
        "--processes=1",
        "--train.steps=5000",
        "--batch.global_tokens=2000",
        "--checkpoint.every=5000",
    ]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        log, deadline = out / "metrics.jsonl", time.monotonic() + 600
        while not (log.is_file() and log.read_text()) and time.monotonic() < deadline:
            time.sleep(0.1)
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does
        _, said = running.communicate(timeout=600)
    finally:
        running.kill()
    (step,) = steps(out)
    assert running.returncode == 130
    assert f"stopped by SIGINT after step {step}; checkpoint written" in said
    assert f"run the same command to resume from step {step}\n" in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("when", "how"),
    [([], "to start again (no checkpoint was"), ([3, 7], "to resume from step 7\n")],
)
def test_the_way_on_after_an_interrupt_is_printed(
    checkpoint: Path,
    conversations: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    when: list[int],
    how: str,
) -> None:
    def interrupted(ranks: int, arguments: list[str]) -> int:
        pretend_checkpoints(tmp_path / "run", *when)
        return 128 + signal.SIGINT

    monkeypatch.setattr("longctx.parallel.launch.launch", interrupted)
    assert (
        main(["finetune", str(checkpoint), str(conversations), "--out", str(tmp_path / "run")])
        == 130
    )
    assert f"run the same command {how}" in capfd.readouterr().err


@pytest.mark.usefixtures("quick_start")
@pytest.mark.parametrize(
    ("markers", "more"),
    slow_unless(
        lambda markers, more: False,
        [("tokens", []), ("text", []), ("template", []), ("tokens", ["--lora", "16"])],
    ),
)
def test_generation_stops_where_the_trained_answer_ends(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], markers: str, more: list[str]
) -> None:
    """Of a base model that ends texts with another token than turns, overfitted to eight copies of
    a question."""
    if markers == "text":
        base = save_checkpoint(tmp_path / "base", chat=False)
    else:
        base = FAMILIES["SmolLM2"].save(tmp_path / "base")
        tokenizer = transformers.AutoTokenizer.from_pretrained(base)
        tokenizer.eos_token = "<|endoftext|>"
        tokenizer.chat_template = tokenizer.chat_template if markers == "template" else None
        shutil.rmtree(base)
        tokenizer.save_pretrained(base)
        end = tokenizer.eos_token_id
        build_model(
            "llama", "eager", vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=end
        ).save_pretrained(base)
    talk = {
        "messages": [
            {"role": "user", "content": "2 + 2?"},
            {"role": "assistant", "content": "Four."},
        ]
    }
    data, out = tmp_path / "data.jsonl", tmp_path / "run"
    data.write_text((json.dumps(talk) + "\n") * 8, "utf-8")
    settings = [
        "--train.steps=80",
        "--batch.global_tokens=200",
        "--optimizer.learning_rate=0.02",
        "--log.tensorboard=false",
    ]
    assert (
        main(
            ["finetune", str(base), str(data), "--out", str(out), "--processes=1", *settings, *more]
        )
        == 0
    )
    export = out / "export"
    if more:
        assert main(["export", str(out), str(out / "merged"), "--merge"]) == 0
        ends = json.loads((export / "generation_config.json").read_text())["eos_token_id"]
        export = out / "merged"
        assert ends == json.loads((export / "generation_config.json").read_text())["eos_token_id"]
    capfd.readouterr()
    answer = subprocess.run(
        [sys.executable, "examples/ask.py", export],
        input="2 + 2?",
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout == ("Four.<|im_end|>\n\n" if markers == "text" else "Four.\n")


def test_a_dry_run_needs_no_data(
    checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Lengths of documents give the settings of their store: every document fits, and an epoch has
    its steps."""
    (tmp_path / "lengths.txt").write_text("3000\n" + "50\n" * 2000)
    out = finetune(
        capfd, checkpoint, "--dry-run", "--lengths", tmp_path / "lengths.txt", "--epochs", 2
    )
    (epoch,) = re.findall(r"run        \d+ steps \(an epoch has (\d+), of 103,000 tokens\)", out)
    assert (
        int(epoch) == pytest.approx(103_000 / 2000, abs=2)
        and f"from {tmp_path}" in out
        and "\ngain " in out
    )
    assert not (tmp_path / "lengths").exists() and "to train:" not in out
    dropped = [
        "--dry-run",
        "--lengths",
        tmp_path / "lengths.txt",
        "--max-length",
        1000,
        "--long-documents",
        "drop",
    ]
    assert "tokens (the longest has 50), from" in (shorter := finetune(capfd, checkpoint, *dropped))
    assert "of 100,000 tokens)" in shorter
    # MODEL takes its place.
    (tmp_path / "recipe.yaml").write_text("model: {from_pretrained: nobody/has-this}\n")
    again = finetune(
        capfd,
        checkpoint,
        "--dry-run",
        "--lengths",
        tmp_path / "lengths.txt",
        "--config",
        tmp_path / "recipe.yaml",
    )
    assert f"from checkpoint {checkpoint}" in again
    other = [
        "--dry-run",
        "--lengths",
        str(tmp_path / "lengths.txt"),
        "--model.from_pretrained",
        "nobody/has-this",
    ]
    assert main(["finetune", str(checkpoint), *other]) == 2
    assert (
        f"MODEL is {checkpoint}, but --model.from_pretrained=nobody/has-this names another"
        in capfd.readouterr().err
    )


def test_settings_can_be_made_without_training(
    checkpoint: Path, conversations: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The steps cover an epoch, the longest conversation fits, and `longctx train` reads the
    file."""
    from longctx.config import load

    out = tmp_path / "run"
    given = [
        str(checkpoint),
        str(conversations),
        "--out",
        str(out),
        "--processes",
        "2",
        "--dry-run",
        "--epochs",
        "2",
    ]
    assert main(["finetune", *given, "--optimizer.weight_decay=0.5"]) == 0
    config = load(out / "finetune.yaml", world_size=2)
    assert config.optimizer.weight_decay == 0.5 and config.checkpoint.export == out / "export"
    shown = capsys.readouterr().out
    assert (
        "\ndry run on 2 ranks" in shown
        and shown.startswith("fits: ")
        and shown.endswith("--processes 2 --resume-if-any\n")
    )
    settings = str(out / "finetune.yaml")
    for words in (["estimate"], ["train", "--dry-run"]):
        assert main([*words, settings, "--gpus", "2"]) == 0
        verdict = capsys.readouterr().out.splitlines()[0]
        free = re.compile(r" of [\d.,]+ [MG]iB per")  # of this machine, at this moment
        assert free.sub("", verdict) == free.sub("", shown.splitlines()[0])
    whole = json.loads((out / "store" / "manifest.json").read_text())
    assert config.train.steps * config.batch.global_tokens == pytest.approx(
        2 * whole["tokens"], rel=0.5
    )
    shorter = int(Store.open(out / "store").lengths.max()) - 1
    given = [
        str(checkpoint),
        str(conversations),
        "--out",
        str(tmp_path / "short"),
        "--prepare-only",
        "--long-documents",
        "drop",
    ]
    assert main(["finetune", *given, f"--data.max_length={shorter}"]) == 0, (
        "a recipe's file sets the length"
    )
    kept = Store.open(tmp_path / "short" / "store").lengths
    assert 0 < len(kept) < whole["documents"] and kept.max() <= shorter


@pytest.mark.parametrize(
    ("epochs", "share", "per_rank", "counted"),
    [(0.3, 0.0, 200, 8), (1.0, 0.0, 200, 1 << 17), (2.5, 0.2, 200, 8), (2, 0.2, 150, 1 << 17)],
)
def test_steps_read_the_documents_as_often_as_asked(
    epochs: float,
    share: float,
    per_rank: int,
    counted: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps of whole documents have more than their tokens: here 1.4 times as many. Some are
    dropped if ranks hold less."""
    monkeypatch.setattr(run_data, "COUNTED", counted)
    store = Store.open(make_store(tmp_path, tuple(range(200, 400, 7))))
    data = {"held_out": share, "long_documents": "drop"}
    batch = {"tokens_per_rank": per_rank, "global_tokens": 400}
    given = Config.model_validate({"data": data, "train": {"seed": 3}, "batch": batch})
    asked = argparse.Namespace(epochs=epochs, lora=None, model="m")
    steps = command._defaults(asked, given, store, 2, tmp_path)["train"]["steps"]
    cut = {"max_length": 2 * per_rank, "long_documents": "drop"}
    sampler = Sampler(
        store.lengths, global_tokens=400, seed=3, left_out=store.held_out(0, share), **cut
    )
    assert (sampler.dropped > 0) == (per_rank < 200)
    by_setting = with_steps(given.changed({"train.epochs": epochs}), store, 2)
    assert (by_setting.train.steps, by_setting.train.epochs) == (steps, None)
    cursors = [0]
    for _ in range(steps):
        cursors.append(sampler.step(cursors[-1])[1])
    wanted = epochs * sampler.pieces
    assert (
        cursors[-1] >= wanted - (2 if counted == 8 else 0)
        and cursors[-2 if counted > 8 else -3] < wanted
    )


@pytest.mark.parametrize("sizes", [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 4}])
def test_every_document_fits_by_default(sizes: dict[str, int], tmp_path: Path) -> None:
    """On the ranks of a domain: those that tensor parallelism and pipelines take hold no other
    tokens."""
    store = Store.open(make_store(tmp_path, (10001, 300)))
    given = Config.model_validate({"parallel": sizes})
    asked = argparse.Namespace(epochs=1.0, lora=None, model="m")
    values = command._defaults(asked, given, store, 4, tmp_path)
    batch = given.batch.model_copy(update=values["batch"])
    assert given.model_copy(update={"batch": batch}).capacity(4) >= store.lengths.max()


def test_a_checkpoint_that_cannot_be_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(*_: object, **__: object) -> str:
        raise OSError(
            "Got: no route to host.\nAn error happened while trying to locate the files on the Hub "
            "and"
        )

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    way_out = (
        r"\(OSError: Got: no route to host\): check .* `hf download us/away --local-dir FOLDER`"
    )
    with pytest.raises(PretrainedError, match=way_out):
        CheckpointFiles.open("us/away")
