"""Paths: `~` and `$NAME` are expanded in settings, commands and Python, and addresses of storage
are refused by name."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import longctx
from longctx.cli import main
from longctx.config import load
from longctx.config.problems import ConfigError
from longctx.data.records.pretrained import Pretrained
from longctx.data.records.sources import open_corpus
from longctx.data.store.request import StoreRequest
from longctx.errors import UserError
from longctx.model.checkpoint_files import CheckpointFiles
from longctx.paths import PathError, expanded, local_path
from longctx.training.saved.export import export

SETTINGS = (
    "train.run_dir",
    "checkpoint.export",
    "data.store",
    "eval.store",
    "model.from_pretrained",
    "context.profile",
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home, a scratch folder and an empty working folder, in which no test may leave anything."""
    here = tmp_path / "here"
    for folder in (tmp_path / "home", tmp_path / "scratch", here):
        folder.mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.delenv("NOT_SET", raising=False)
    monkeypatch.chdir(here)
    yield tmp_path
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("~", "home"),
        ("~/x", "home/x"),
        ("$HOME/x", "home/x"),
        ("${SCRATCH}/a$HOME", "scratch/a"),
        ("$SCRATCH", "scratch"),
    ],
)
def test_homes_and_variables_are_expanded(given: str, meant: str, home: Path) -> None:
    assert expanded(given).startswith(str(home / meant))


@pytest.mark.parametrize(
    "given", ["a/~b", "x~", "a$", "$", "C:/x", "a:b", "http", "", "bpe", "OWNER/NAME"]
)
def test_other_names_stay_as_they_are(given: str) -> None:
    assert expanded(given) == given


def test_what_exists_stays_as_it_is_written(tmp_path: Path) -> None:
    odd = tmp_path / "a$NOT_SET"
    odd.mkdir()
    assert local_path(odd) == odd


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("s3://bucket/x", "s3://"),
        (Path("s3://bucket/x"), "s3://"),
        ("GS://bucket/x", "gs://"),
        ("hf://owner/name", "OWNER/NAME"),
        ("https://host/x", "https://"),
        ("abfs+ssl://x", "abfs+ssl://"),
        ("file://host/x", "another machine"),
        ("$NOT_SET/x", "NOT_SET is not set"),
        ("x/${NOT_SET}", "NOT_SET is not set"),
        ("~nobody-of-this-name/x", "no home folder of ~nobody-of-this-name"),
        (b"x", "must be a text"),
    ],
)
def test_what_cannot_be_meant_is_refused(given: str, words: str) -> None:
    with pytest.raises(PathError, match=words.replace("+", r"\+")):
        expanded(given)


def test_an_empty_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH", "")
    with pytest.raises(PathError, match="empty"):
        expanded("$SCRATCH")


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_expand_and_refuse(setting: str, home: Path) -> None:
    section, key = setting.split(".")
    reads_it = setting in ("model.from_pretrained", "context.profile")
    expected = str(home / "scratch/x")
    if reads_it:
        with pytest.raises(ConfigError, match=re.escape(expected)):
            load(None, [f"{setting}=$SCRATCH/x"])
    else:
        config = load(None, [f"{setting}=$SCRATCH/x"])
        assert str(getattr(getattr(config, section), key)) == expected
    scheme = "ftp" if key == "store" else "s3"  # stores may be in object storage
    with pytest.raises(ConfigError) as error:
        load(None, [f"{setting}={scheme}://bucket/x"])
    [problem] = error.value.problems
    assert (problem.key, problem.value) == (setting, f"{scheme}://bucket/x")
    assert f"{scheme}://" in problem.rule and "folder" in problem.fix


def test_settings_of_several_stores_expand_and_refuse(home: Path) -> None:
    config = load(None, ["data.store=[{path: ~/a, weight: 1}]"])
    assert config.data.paths == [home / "home/a"]
    with pytest.raises(ConfigError, match=r"data\.store "):
        load(None, ["data.store=[{path: gs://a, weight: 1}]"])


def test_files_of_settings_are_found_at_home(home: Path) -> None:
    (home / "home/run.yaml").write_text("train: {run_dir: ~/runs, steps: 3}\n")
    assert load("~/run.yaml").train.run_dir == home / "home/runs"


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--train.run_dir", "s3://bucket/run"],
        ["train", "gs://bucket/run.yaml"],
        ["train", "--continue", "s3://bucket/run"],
        ["train", "--resume", "s3://bucket/run.yaml"],
        ["prepare", "--out", "s3://bucket/store"],
        ["prepare", "--tokenizer", "az://bucket/model", "--out", "x"],
        ["prepare", "--chat-template", "$NOT_SET/t.jinja", "--out", "x"],
        ["finetune", "s3://bucket/model", "data.jsonl"],
        ["finetune", "model", "$NOT_SET/data.jsonl"],
        ["finetune", "model", "data.jsonl", "--out", "hf://owner/name"],
        ["export", "run", "hf://owner/name"],
        ["export", "$NOT_SET", "out"],
        ["eval", "s3://bucket/run"],
        ["eval", "run", "--store", "ftp://bucket/store"],
        ["plan", "--lengths", "s3://bucket/lengths", "--ranks", "8"],
        ["plan", "--mix", "wlb_128k", "--ranks", "8", "--profile", "s3://bucket/p.yaml"],
        ["compare", "--mix", "wlb_128k", "--csv", "$NOT_SET/x.csv"],
        ["measure", "--out", "s3://bucket/x.json"],
        ["calibrate", "--out", "s3://bucket/x.yaml"],
        ["estimate", "s3://bucket/x.yaml"],
        ["check-step", "s3://bucket/x.py"],
    ],
)
def test_commands_refuse_what_no_layer_reads_or_writes(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(words)
    except SystemExit as end:  # of argparse
        status = end.code  # type: ignore[assignment]
    said = capsys.readouterr().err
    assert status == 2
    assert "://" in said or "NOT_SET is not set" in said
    assert (
        "folder of this machine" in said
        or "folders of this machine" in said
        or "OWNER/NAME" in said
        or "is not set" in said
    )


def test_calls_expand_and_refuse(home: Path) -> None:
    (home / "home/a.jsonl").write_text('{"text": "one two three"}\n' * 3)
    longctx.prepare("~/a.jsonl", "$SCRATCH/store", tokenizer="bytes")
    assert len(longctx.Store.open("~/../scratch/store").lengths) == 3
    calls = [
        lambda: longctx.prepare("~/a.jsonl", "s3://bucket/store"),
        lambda: longctx.Store.open("s3://bucket/store"),
        lambda: longctx.load_config("s3://bucket/run.yaml"),
        lambda: longctx.HardwareProfile.load("s3://bucket/profile.yaml"),
        lambda: longctx.train(load(None), continued=Path("s3://bucket/run")),
        lambda: export(Path("s3://bucket/run"), Path("out")),
        lambda: export(Path("run"), Path("s3://bucket/out")),
        lambda: CheckpointFiles.open("s3://bucket/model"),
        lambda: Pretrained.load("s3://bucket/model"),
        lambda: StoreRequest(open_corpus("~/a.jsonl"), tokenizer="s3://bucket/tokenizer.json"),
    ]
    for call in calls:
        with pytest.raises(UserError, match="s3://"):
            call()
