"""An 8B model on 64 ranks takes the memory that is estimated, with every way to save; not yet with split models or heads."""

import pytest
import torch

from longctx.config import load
from tests.whole_size import fullest, peak_of_step_2, plan_of

pytestmark = pytest.mark.slow
RANKS, VOCABULARY = 64, 128_256
LENGTHS = [131_072, 60_000, 30_000, 20_000, *[4096] * 20]
MODEL = [
    "model.preset=8b",
    "model.num_hidden_layers=8",  # all are alike
    "batch.tokens_per_rank=4096",
    "data.max_length=131072",
    "data.store=none",
    "train.dtype=bfloat16",
    "train.device=cpu",
    "context.profile=h100-nvlink-ib",
]
SELECTIVE, FULL = "train.recompute=selective", "train.recompute=full"
SETTINGS = {
    "nothing saved": [],
    "selective": [SELECTIVE],
    "full": [FULL],
    "keys kept": [SELECTIVE, "context.keep_kv=true"],
    "one level": [SELECTIVE, "context.two_level_exchange=false"],
    "weights gathered all step": [FULL, "parallel.reshard_after=step"],
    "copies in every node": [SELECTIVE, "parallel.shard_ranks=8"],
    "MLP in tiles": [SELECTIVE, "train.mlp_tile_tokens=1024"],
    "float32": [SELECTIVE, "train.dtype=float32"],
    "static": [SELECTIVE, "context.mode=static"],
}
TOO_HIGH = {"gradients reduced at once": [SELECTIVE, "parallel.reduce_after=micro_batch"]}
"""The estimate counts the copies that gloo makes when it reduces the vocabulary's gradients, which nothing makes here."""


@pytest.mark.parametrize("name", [*SETTINGS, *TOO_HIGH])
def test_memory_of_a_whole_model(name: str) -> None:
    torch.set_num_threads(1)
    config = load(None, [*MODEL, *(SETTINGS | TOO_HIGH)[name]], world_size=RANKS)
    plan = plan_of(config, RANKS, VOCABULARY, LENGTHS)
    place, memory = fullest(config, RANKS, config.model_source(VOCABULARY).spec, plan)
    peak = peak_of_step_2(config, RANKS, place, VOCABULARY, plan)
    print(f"{name}: {peak / 2**30:.2f} GiB, estimate {memory.total / 2**30:.2f} GiB, at {memory.moment}")
    assert 0.9 < memory.total / peak < (1.5 if name in TOO_HIGH else 1.1)
