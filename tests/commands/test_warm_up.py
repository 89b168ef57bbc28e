"""`longctx warm-up` with a stand-in for flash-attn 4; tests/attention/test_flash_4_real.py has the
real one."""

import os
from pathlib import Path
from typing import Any

import pytest

from longctx.attention.kernels import ahead, flash_4
from longctx.attention.kernels.contract import KernelRequest
from longctx.cli import main


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Returns what is compiled; each layer's kernels are a file in the folder of this test."""
    monkeypatch.setenv(ahead.CACHE, str(tmp_path))

    def folder() -> Path:
        return Path(os.environ[ahead.CACHE])

    found: list[Any] = []

    def compile_ahead(request: KernelRequest, heads: tuple[int, int], *, window: bool) -> None:
        (folder() / f"{len(found)}.o").touch()
        found.append((request.head_dim, heads, window))

    monkeypatch.setattr(ahead, "compile_ahead", compile_ahead)
    monkeypatch.setattr(ahead, "choose_target", found.append)
    monkeypatch.setattr(ahead, "folder", folder)
    return found


def test_every_kind_of_layer_is_compiled_for_the_target(
    compiled: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "shared" / "kernels"
    given = ["--arch", "sm_90", "--cache", str(folder), "--model.preset", "gpt-oss-20b"]
    assert main(["warm-up", *given, "--multiprocessors", "114"]) == 0
    target, *layers = compiled
    assert (target.arch, target.capability, target.multiprocessors) == ("sm_90", (9, 0), 114)
    assert target.variables() == {
        "FLASH_ATTENTION_ARCH": "sm_90",
        "FLASH_ATTENTION_NUM_SMS": "114",
        "CUTE_DSL_ARCH": "sm_90a",
    }
    assert sorted(layers) == [(64, (64, 8), False), (64, (64, 8), True)]
    out = capsys.readouterr().out
    assert "sm_90, head size 64, 64/8 heads, windows: 1 kernels compiled in 0 s" in out
    assert f"2 kernels in {folder}\nstart the run with {ahead.CACHE}={folder}" in out


def test_heads_are_those_of_a_tensor_parallel_rank(compiled: list[Any]) -> None:
    given = ["--arch", "sm_100", "--model.preset", "llama-3.1-8b"]
    assert main(["warm-up", *given, "--parallel.tensor_parallel_size", "4"]) == 0
    assert compiled[0].multiprocessors == 148 and compiled[1:] == [(128, (8, 2), False)]


def test_what_flash_attn_4_does_not_run_is_said(
    compiled: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--arch", "sm_90", "--model.preset", "tiny", "--model.overrides.head_dim", "192"]
    assert main(["warm-up", *given]) == 0
    assert len(compiled) == 1, "the target"
    said = "not by flash-attn 4, which supports head sizes up to 128, not 192"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arch", "window", "count"), [("sm_90", True, 1), ("sm_100", False, 1), ("sm_100", True, 0)]
)
def test_large_heads_are_compiled_where_flash_attn_4_runs_them(
    compiled: list[Any], arch: str, window: bool, count: int
) -> None:
    given = ["--arch", arch, "--model.preset", "tiny", "--model.overrides.head_dim", "256"]
    if window:
        given += ["--model.overrides.sliding_window", "100"]
    assert main(["warm-up", *given]) == 0
    assert compiled[1:] == [(256, (4, 2), window)] * count


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--context.deterministic", "true"], "deterministic backward of flash-attn 4 compiles"),
        (["--multiprocessors", "0"], "--multiprocessors is 0: must be at least 1"),
    ],
)
def test_what_cannot_be_compiled_here_is_refused(
    compiled: list[Any], capsys: pytest.CaptureFixture[str], given: list[str], said: str
) -> None:
    assert main(["warm-up", "--arch", "sm_90", *given]) == 2
    assert said in capsys.readouterr().err and compiled == []


def test_without_flash_attn_4_the_command_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ahead.TARGETS["sm_90"].variables():
        monkeypatch.setenv(name, "as before")
    monkeypatch.setattr(flash_4, "missing", lambda: f"not installed: {flash_4.INSTALL}")
    assert main(["warm-up", "--arch", "sm_90"]) == 2
    assert "flash-attn 4 is not installed: pip install flash-attn-4" in capsys.readouterr().err


def test_an_architecture_is_chosen_before_flash_attn_is_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It reads the variables once."""
    monkeypatch.setitem(ahead.sys.modules, "flash_attn.cute.interface", ahead)
    assert main(["warm-up", "--arch", "sm_90"]) == 2
    assert "was imported before sm_90 was chosen" in capsys.readouterr().err
