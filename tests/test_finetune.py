"""From a checkpoint and a file of conversations to a checkpoint, by the command, on two processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from longctx.cli import main
from tests.template_cases import FAMILIES

transformers = pytest.importorskip("transformers")

from tests.huggingface_cases import build_model  # noqa: E402

SETTINGS = ["--train.steps=3", "--batch.global_tokens=2000", "--optimizer.learning_rate=0.01", "--log.tensorboard=false"]


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
    """Of very different lengths, so that degrees differ."""
    lines = [
        {"messages": [{"role": "user", "content": "word " * count}, {"role": "assistant", "content": f"There are {count}."}]}
        for count in (3, 5, 8, 11, 200, 14, 17, 400, 4, 6)
    ]
    file = tmp_path_factory.mktemp("data") / "counted.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return file


def finetune(*arguments: object) -> str:
    """What the command prints; the run is torchrun's."""
    command = [sys.executable, "-m", "longctx", "finetune", *map(str, arguments), "--processes", "2", *SETTINGS]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model.eval()(input_ids=torch.arange(40)[None] % 20).logits
    return out


def test_all_parameters(checkpoint: Path, conversations: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    told = finetune(checkpoint, conversations, "--out", out)
    assert "of them trained, on 2 ranks" in told and "longctx generate" in told
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3] and any(len(row["degrees"]) > 1 for row in rows)
    before, after = (
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for folder in (checkpoint, out / "export")
    )
    assert (logits(after) - logits(before)).abs().max() > 0.01
    templates = [transformers.AutoTokenizer.from_pretrained(folder).chat_template for folder in (checkpoint, out / "export")]
    assert templates[0] == templates[1] and templates[0].keys() == {"default", "short"}


def test_adapters(checkpoint: Path, conversations: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peft = pytest.importorskip("peft")
    out = tmp_path / "run"
    finetune(checkpoint, conversations, "--lora", "4", "--out", out)
    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    plain = logits(base)
    adapted = logits(peft.PeftModel.from_pretrained(base, out / "export"))
    assert (adapted - plain).abs().max() > 0.01
    assert main(["export", str(out), str(tmp_path / "merged"), "--merge", "--dtype", "float32"]) == 0
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(logits(merged), adapted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nowhere/at/all", "data.jsonl"], "there is no folder nowhere/at/all"),
        (["{checkpoint}", "missing.jsonl"], "missing.jsonl"),
        (["{checkpoint}", "{data}", "--epochs", "0"], "--epochs is 0.0"),
        (["{checkpoint}", "{data}", "--processes", "-1"], "--processes is -1"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(
    checkpoint: Path, conversations: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    given = [each.format(checkpoint=checkpoint, data=conversations) for each in arguments]
    assert main(["finetune", *given, "--out", str(tmp_path / "run")]) == 2
    assert named in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_settings_can_be_made_without_training(checkpoint: Path, conversations: Path, tmp_path: Path) -> None:
    """An epoch is so many steps, the longest conversation fits, and the file is what `longctx train` reads."""
    from longctx.config import load

    out = tmp_path / "run"
    given = [str(checkpoint), str(conversations), "--out", str(out), "--processes", "2", "--prepare-only", "--epochs", "2"]
    assert main(["finetune", *given, "--optimizer.weight_decay=0.5"]) == 0
    config = load(out / "finetune.yaml", world_size=2)
    assert config.optimizer.weight_decay == 0.5 and config.checkpoint.export == out / "export"
    total = int(json.loads((out / "store" / "manifest.json").read_text())["tokens"])
    assert config.train.steps * config.batch.global_tokens == pytest.approx(2 * total, rel=0.5)
