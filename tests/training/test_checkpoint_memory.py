"""Peak memory of reading and of exporting a checkpoint of a gigabyte: a shard, a block and a tenth
more."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import transformers

from longctx.config import load
from longctx.hf.model import TransformersModel
from longctx.model.decoder import Decoder
from longctx.parallel.mesh import make_groups
from longctx.training.build import build_model
from longctx.training.optimizer import make_optimizer
from longctx.training.saved.export import export
from longctx.training.saved.saving import Saver
from tests.workers import Workers

HIDDEN, MLP, LAYERS, VOCABULARY = 1024, 4096, 16, 4096
BLOCK = 4 * (4 * HIDDEN**2 + 3 * HIDDEN * MLP + 2 * HIDDEN)
"""Bytes of a block in float32."""
WHOLE = LAYERS * BLOCK + 4 * (2 * VOCABULARY * HIDDEN + HIDDEN)
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCABULARY,
}
SIZES["num_attention_heads"] = 8
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 300,
}
ROOT = Path(__file__).resolve().parents[2]


def status(field: str) -> int:
    """Bytes of this process, by the system."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines[field].split()[0])


class Peak:
    """How much more this process has held, at most, since it was made."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self.before = status("VmRSS")

    @property
    def growth(self) -> int:
        return status("VmHWM") - self.before


def make_checkpoint(folder: Path, sizes: dict[str, int], dtype: torch.dtype) -> None:
    config = transformers.LlamaConfig(**sizes, dtype=dtype)
    transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)


def read(folder: Path, run: Path, settings: list[str]) -> int:
    """On each rank: the growth while weights are read, up to the first forward pass; then a
    checkpoint is written."""
    given = [f"model.from_pretrained={folder}", *settings]
    config = load(None, given, world_size=dist.get_world_size())
    mesh = make_groups(
        torch.device("cpu"), tensor=config.parallel.tensor_parallel_size, timeout_s=120.0
    )
    source = config.model_source()
    assert source.spec.parameters
    peak, growth = Peak(), []
    finish = Decoder.finish
    for kind in (Decoder, TransformersModel):
        patch.object(kind, "finish", _watched(kind.finish, peak, growth)).start()
    model, _ = build_model(source, config, mesh)
    patch.stopall()
    assert Decoder.finish is finish
    optimizer = make_optimizer(model, config.optimizer, mesh.device)
    (run / "model").mkdir(parents=True, exist_ok=True)
    if dist.get_rank() == 0:
        source.files.describe(run / "model")
    saver = Saver(run, mesh.control)
    saver.start(model, optimizer, {"step": 0, "model": model.describe(), "data": {"max_length": 8}})
    saver.finish()
    return growth[0]


def _watched(finish: Any, peak: Peak, growth: list[int]) -> Any:
    def watched(*arguments: Any) -> None:
        growth.append(peak.growth)
        finish(*arguments)

    return watched


def write(small: Path, run: Path, out: Path) -> int:
    """The growth while a run is exported to files of a block, by a process that has exported a
    small one."""
    export(small, out.with_name("small-out"))
    peak = Peak()
    export(run, out, max_shard_bytes=BLOCK)
    return peak.growth


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("split", ["transformers", "native", "tensor parallel"])
def test_a_shard_a_block_and_a_tenth(
    workers: Workers, tmp_path: Path, split: str, dtype: torch.dtype
) -> None:
    """Of float32, in which weights are trained; an export holds a block as it was saved, as it is
    written, and a file."""
    make_checkpoint(tmp_path / "large", SIZES, dtype)
    make_checkpoint(tmp_path / "small", SMALL, dtype)
    settings = [
        "parallel.tensor_parallel_size=2"
        if split == "tensor parallel"
        else f"model.implementation={split}"
    ]
    runs = [tmp_path / "small-run", tmp_path / "large-run"]
    # Libraries are loaded once.
    workers.run(read, 2, tmp_path / "small", runs[0], settings, timeout_s=120.0)
    reading = workers.run(read, 2, tmp_path / "large", runs[1], settings, timeout_s=120.0)
    code = (
        f"from pathlib import *; from {__name__} import write; "
        f"print(write(*{[*runs, tmp_path / 'out']}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    writing = int(done.stdout.splitlines()[-1])
    figures = {"read": max(reading), "written": writing, "shard": WHOLE // 2, "block": BLOCK}
    print(split, dtype, *(f"{name} {size / 1e6:,.0f} MB" for name, size in figures.items()))
    assert max(reading) < 1.1 * (WHOLE / 2 + BLOCK)
    assert writing < 1.1 * 3 * BLOCK
