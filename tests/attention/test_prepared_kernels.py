"""Attention kernels are chosen, compiled and named before the first step, in every command and in
trainers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longctx.attention.kernels import KERNELS, KernelError, KernelRequest
from longctx.cli import main
from longctx.hf.spec import spec_of
from longctx.parallel.device import ALLOCATOR_SETTINGS
from longctx.trainers import dynamic
from longctx.training import build, kernels
from tests.evaluation_cases import FOR_CHECKPOINTS, save_checkpoint
from tests.trainer_cases import model
from tests.training_cases import make_store


class OnAnyDevice:
    """A kernel that no machine needs to have."""

    def refusal(self, request: KernelRequest) -> None:
        return None


ANY: Any = OnAnyDevice()


@pytest.mark.parametrize(
    ("kind", "heads", "dims", "windows"),
    [
        ("qwen2", (4, 2), (8, 8), {False}),
        ("gemma3", (4, 2), (8, 8), {False, True}),
        ("deepseek_v3", (4, 4), (16, 12), {False}),
        ("mamba2", None, None, set()),
    ],
)
def test_kernels_of_trainers_are_compiled_and_named(
    monkeypatch: pytest.MonkeyPatch, kind: str, heads: Any, dims: Any, windows: set[bool]
) -> None:
    """On GPUs, for the sizes of heads that calls have."""
    compiled: list[tuple[Any, ...]] = []

    def compile_variants(name: str, request: KernelRequest, heads: Any, *, window: bool) -> None:
        compiled.append(
            (
                name,
                request.device,
                request.dtype,
                (request.head_dim, request.v_head_dim),
                heads,
                window,
            )
        )

    monkeypatch.setattr(kernels, "compile_variants", compile_variants)
    monkeypatch.setitem(KERNELS, "any", ANY)
    for name in ALLOCATOR_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    hf = model(kind)
    trainer = SimpleNamespace(
        args=SimpleNamespace(device=torch.device("cuda"), bf16=True, fp16=False), model=hf
    )
    spec = spec_of(hf, hf.base_model.layers)
    line, note = dynamic._prepare_kernels(trainer, spec, "any")
    assert line == f"attention on cuda in bfloat16: {'any' if windows else 'none in this model'}"
    assert "start the program with PYTORCH_ALLOC_CONF=expandable_segments:True" in note
    assert set(compiled) == {
        ("any", "cuda", torch.bfloat16, dims, heads, window) for window in windows
    }
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    assert list(dynamic._prepare_kernels(trainer, spec, "any")) == [line]


@pytest.mark.parametrize("command", ["calibrate", "eval"])
def test_commands_choose_kernels_before_processes_join(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    command: str,
) -> None:
    given = ["--out", str(tmp_path / "profile.yaml"), "--base", "cpu-2core"]
    if command == "eval":
        given = [
            str(save_checkpoint(tmp_path / "hf")),
            "--store",
            str(make_store(tmp_path, (40, 20))),
        ]
        given += [
            *(
                part
                for setting in FOR_CHECKPOINTS
                for part in (f"--{setting.split('=')[0]}", setting.split("=")[1])
            )
        ]

    def refuse(kernel: str, *_: Any) -> str:
        raise KernelError(f"no kernel is {kernel}")

    monkeypatch.setattr(build, "join_run", lambda *_: pytest.fail("the processes have joined"))
    monkeypatch.setattr(kernels, "prepare_kernels", refuse)
    assert main([command, *given]) == 2
    assert "no kernel is auto" in capsys.readouterr().err
