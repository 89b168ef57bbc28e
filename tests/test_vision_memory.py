"""The estimate of memory with an encoder of images, against the allocator's peak."""

from pathlib import Path
from typing import Any

import pytest

from longctx.config import load
from longctx.memory.advisor import heaviest
from longctx.memory.model import estimate
from longctx.training.data import RunData
from tests.image_cases import SETTINGS, chat, data_url, make_store, picture, start
from tests.marks import slow_unless
from tests.memory_cases import peak_of_second_step
from tests.vision_cases import CONFIGS, save_checkpoint
from tests.workers import Workers

LARGE = {"hidden_size": 96, "intermediate_size": 256}
TOWERS: dict[str, dict[str, Any]] = {
    "llava": {**CONFIGS["llava"]["vision_config"], **LARGE, "num_hidden_layers": 4},
    "qwen2_5_vl": {**CONFIGS["qwen2_5_vl"]["vision_config"], **LARGE, "depth": 4},
    "qwen3_vl": {**CONFIGS["qwen3_vl"]["vision_config"], **LARGE, "depth": 4},
}
"""Encoders that are larger than the language models."""


def peak(folder: Path, run: Path, settings: list[str]) -> int:
    return peak_of_second_step(lambda: start(folder, run, settings))


ADAPTERS = ["lora.rank=8", "lora.target_modules=[all-linear, visual.all-linear]"]
CASES = [*((family, []) for family in TOWERS), ("qwen3_vl", ADAPTERS)]


@pytest.mark.parametrize(("family", "others"), slow_unless(lambda family, others: others or family == "qwen3_vl", CASES))
def test_the_estimate_is_the_peak_of_the_allocator(workers: Workers, tmp_path: Path, family: str, others: list[str]) -> None:
    checkpoint = save_checkpoint(tmp_path / "model", family, vision_config=TOWERS[family])
    images = [data_url(picture(number, 40, 40)) for number in range(6)]
    make_store(
        tmp_path, checkpoint, *[{"messages": chat("<image>" * 6 + "?" * number), "images": images} for number in range(16)]
    )
    settings = ["batch.tokens_per_rank=400", "batch.global_tokens=1600", "context.degree=1", *others]
    everything = [*SETTINGS, f"model.from_pretrained={checkpoint}", f"data.store={tmp_path / 'store'}", *settings]
    config = load(None, everything, world_size=2)
    store = RunData.open(config).store
    spec = config.model_source(store.tokenizer.vocab_size).spec
    expected = estimate(spec, config, 2, heaviest(config, store, 2), fused=False).total
    for measured in workers.run(peak, 2, tmp_path, tmp_path / "run", settings):
        assert 0.75 * expected < measured < 1.25 * expected, (measured / expected, expected)
