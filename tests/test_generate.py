"""`longctx generate`: transformers' own generation on a tiny checkpoint, greedy, sampled and as a conversation."""

import io
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from longctx.cli import main
from tests.evaluation_cases import save_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def greedy(checkpoint: Path, text: str, tokens: int) -> str:
    """What follows a text, one forward pass over all of it for every token."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    given = ids = tokenizer(text, return_tensors="pt")["input_ids"]
    for _ in range(tokens):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return str(tokenizer.decode(ids[0, given.shape[1] :]))


def test_greedy_by_default(checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(checkpoint), "--prompt", "def main", "--max-new-tokens", "6", "--device", "cpu"]) == 0
    assert capfd.readouterr().out == greedy(checkpoint, "def main", 6) + "\n"


@pytest.mark.parametrize("typed", [False, True])
def test_a_message_goes_through_the_chat_template(
    checkpoint: Path, typed: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello"))
    message = [] if typed else ["Hello"]
    assert main(["generate", str(checkpoint), "--max-new-tokens=5", "--device=cpu", "--chat", *message]) == 0
    assert capfd.readouterr().out == greedy(checkpoint, "[user] Hello[assistant] ", 5) + "\n"


def test_sampling_goes_by_the_seed(checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def sampled(seed: int) -> str:
        given = ["--prompt=abc", "--max-new-tokens=12", "--temperature=3", f"--seed={seed}", "--device=cpu"]
        assert main(["generate", str(checkpoint), *given]) == 0
        return capfd.readouterr().out

    assert sampled(1) == sampled(1)
    assert len({sampled(seed) for seed in range(4)}) > 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{run}", "--prompt=a"], "export it first (longctx export {run} OUT)"),
        (["{adapters}", "--prompt=a"], "longctx export RUN OUT --merge"),
        (["{folder}", "--prompt=a"], "has no config.json"),
        (["{folder}/none", "--prompt=a"], "there is no folder"),
        (["{checkpoint}", "--prompt="], "--prompt is empty"),
        (["{checkpoint}", "--prompt=a", "--temperature=0"], "must be above 0; omit it for greedy"),
        (["{checkpoint}", "--prompt=a", "--max-new-tokens=0"], "--max-new-tokens is 0"),
        (["{plain}", "--chat=a"], "has no chat template: use --prompt"),
        (["{plain}", "--prompt=a"], "{plain} cannot be loaded: Error while deserializing header"),
    ],
)
def test_invalid_requests_are_refused(
    checkpoint: Path, tmp_path: Path, arguments: list[str], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("{}")
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "adapter_config.json").write_text("{}")
    names = {name: tmp_path / name for name in ("run", "adapters", "plain")} | {"folder": tmp_path, "checkpoint": checkpoint}
    if "{plain}" in arguments[0]:
        save_checkpoint(tmp_path / "plain", chat=False)
    if "--prompt=a" in arguments and "{plain}" in arguments:
        file = tmp_path / "plain" / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1000])
    assert main(["generate", *(text.format(**names) for text in arguments)]) == 2
    assert words.format(**names) in capfd.readouterr().err
