"""Dry runs without data: documents of a file of lengths or of a mix in place of a store."""

import re
from pathlib import Path

import pytest

from longctx.cli import main

TINY = [
    "--model.preset=tiny",
    "--batch.global_tokens=4000",
    "--batch.tokens_per_rank=500",
    "--train.device=cpu",
]


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.txt"
    path.write_text("900\n" + "40\n" * 300)
    return path


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    status = main(list(arguments))
    out, err = capsys.readouterr()
    return out if status == 0 else "refused: " + " ".join(err.split())


def test_lengths_stand_in_for_a_store(lengths: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        "--dry-run",
        "--gpus",
        "2",
        "--processes",
        "3",
        "--train.steps=100",
        "--model.vocab_size=256",
        f"--lengths={lengths}",
        *TINY,
    ]
    out = said(capsys, "train", *given)
    assert "\ndry run on 2 ranks" in out, "of the GPUs, if the start of processes is given"
    assert f"from {lengths}" in out and "memory     " in out
    (count,) = re.findall(r"run        100 steps \(an epoch has (\d+), of 12,900 tokens\)", out)
    assert 1 <= int(count) <= 4, "steps of at least 4,000 tokens"
    verdict = out.splitlines()[0]
    assert re.search(r" for 100 steps, [\d.,]+ process hours per billion tokens$", verdict)
    saved = re.findall(
        r"gain       steps take (\d+)% less time than with one degree for all documents of a step",
        out,
    )
    steps = [line.split() for line in out.splitlines() if re.match(r" +\d+ ", line)]
    ours, best = (sum(float(line[place]) for line in steps) for place in (4, 9))
    assert float(saved[0] if saved else 0) == pytest.approx(100 * (1 - ours / best), abs=1)


def test_a_mix_stands_in_for_a_store(capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        "--dry-run",
        "--gpus",
        "64",
        "--model.vocab_size=256",
        "--mix=magi_192k",
        *TINY,
        "--data.max_length=4000",
    ]
    out = said(capsys, "train", *given)
    assert "documents of the mix magi_192k" in out and "\nrun " in out and "\ngain " in out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--mix=magi_192k"], "--lengths and --mix need --dry-run"),
        (
            ["--mix=magi_192k", "--dry-run"],
            "model.vocab_size is null, model.preset tiny has no published vocabulary",
        ),
        (
            ["--mix=magi_192k", "--dry-run", "--data.merge_prefixes=true"],
            "data.merge_prefixes is true, which needs tokens",
        ),
        (["--mix=magi_192k", "--dry-run", "--lengths=a.txt"], "not allowed with argument"),
    ],
)
def test_what_lengths_cannot_be_is_refused(
    capsys: pytest.CaptureFixture[str], given: list[str], message: str
) -> None:
    try:
        found = said(capsys, "train", *given, *TINY)
    except SystemExit:
        found = capsys.readouterr().err
    assert message in " ".join(found.split())


def test_finetune_needs_data_or_lengths(capsys: pytest.CaptureFixture[str], lengths: Path) -> None:
    assert "DATA is missing: give a file or folder" in said(
        capsys, "finetune", "owner/model", "--dry-run"
    )
    both = said(
        capsys, "finetune", "owner/model", "data.jsonl", "--dry-run", f"--lengths={lengths}"
    )
    assert "DATA is data.jsonl, and --lengths or --mix would take its place: omit one" in both


def test_without_a_store_a_dry_run_names_what_can_stand_in(
    tmp_path: Path,
    repository: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Somebody with 64 GPUs tries a recipe first, which has no data: what the error says to type is
    a plan."""
    monkeypatch.chdir(tmp_path)
    command = [
        "train",
        str(repository / "examples/recipes/pretrain-8b-128k.yaml"),
        "--dry-run",
        "--gpus",
        "64",
    ]
    assert main(command) == 2
    refused = capsys.readouterr().err
    assert "longctx prepare" in refused and "--mix wlb_128k or --lengths FILE" in refused


def test_every_command_says_one_verdict(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a recipe without a store, whose preset brings its vocabulary."""
    path = tmp_path / "lengths.txt"
    path.write_text("60000\n" + "700\n" * 2000)
    recipe = str(repository / "examples/recipes/pretrain-8b-128k.yaml")
    smaller = ["--batch.global_tokens=524288", "--train.steps=1000"]
    given = [recipe, "--gpus", "16", f"--lengths={path}", *smaller]
    verdicts = []
    for command in (["train", "--dry-run"], ["estimate"]):
        verdicts.append(said(capsys, *command, *given).splitlines()[0])
    assert verdicts[0] == verdicts[1]
    assert re.fullmatch(
        r"fits: [\d.]+ GiB of 74.51 GiB per H100 \(recompute none, degrees \d+ to \d+\); "
        r"[\d.]+ s a step, [\d,]+ tokens/s per GPU, MFU \d+%, [\d.]+ (hours|minutes) for 1,000 "
        r"steps, [\d.]+ GPU hours per billion tokens",
        verdicts[0],
    )


def test_predictions_download_no_weights(
    repository: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And where the hub cannot be reached, a checkpoint of a recipe has its published sizes; a run
    is refused, also after the prediction in one process."""
    wanted = []

    def fetch(name: str, allow_patterns: list[str]) -> str:
        wanted.append((name, allow_patterns))
        raise OSError("no route to host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    path = tmp_path / "lengths.txt"
    path.write_text("30000\n" + "700\n" * 2000)
    recipe = str(repository / "examples/recipes/chat-lora-a100-80gb.yaml")
    model = "meta-llama/Llama-3.1-8B-Instruct"
    given = [recipe, "--gpus=2", f"--lengths={path}", "--batch.global_tokens=131072"]
    shown = said(capsys, "estimate", *given)
    assert shown.startswith("fits: ") and "of 74.51 GiB per A100 (" in shown
    assert f"{model}: its published sizes, as its config cannot be downloaded (OSError)" in shown
    dry = said(capsys, "train", "--dry-run", *given)
    assert dry.splitlines()[0] == shown.splitlines()[0]
    assert wanted == [(model, ["config.json"])]
    finetuned = [model, f"--lengths={path}", "--processes=2", "--dry-run", "--lora=16"]
    on_gpus = ["--train.device=cuda", "--context.profile=a100-80gb"]
    assert said(capsys, "finetune", *finetuned, *on_gpus).startswith("fits: ")
    assert said(capsys, "train", recipe).startswith("refused: ")
    assert "*.safetensors" in wanted[-1][1]
    another = said(capsys, "estimate", "--model.from_pretrained=some/other")
    assert "some/other is not a local folder, and cannot be downloaded" in another


@pytest.mark.slow
def test_what_a_dry_run_without_a_store_is_told_to_type_is_a_plan(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "train",
        str(repository / "examples/recipes/pretrain-8b-128k.yaml"),
        "--dry-run",
        "--gpus",
        "64",
    ]
    assert main([*command, "--mix", "wlb_128k"]) == 0
    assert "GPU hours per billion tokens" in capsys.readouterr().out
