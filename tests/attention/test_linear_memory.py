"""The memory estimate of models with linear attention is that of the allocator."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from longctx.hf.linear_costs import linear_costs
from tests.lora_cases import make_checkpoint
from tests.marks import slow_unless
from tests.memory_cases import peak_and_estimate
from tests.training_cases import SMALL, make_store
from tests.workers import Workers

COMMON = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2}
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "mlp_only_layers": [0, 1],
    },
    "kimi_linear": {
        "linear_num_heads": 4,
        "linear_head_dim": 32,
        "mlp_layer_types": ["dense", "dense"],
    },
    "mamba2": {"num_heads": 8, "head_dim": 32},
}
QUICK = (("qwen3_next", "full"), ("kimi_linear", "none"))
CASES = [(kind, recompute) for kind in SIZES for recompute in ("none", "selective", "full")]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "recompute"), slow_unless(lambda *case: case in QUICK, CASES))
def test_the_estimate_is_within_6_percent_of_the_allocators_peak(
    workers: Workers, tmp_path: Path, kind: str, recompute: str
) -> None:
    store, checkpoint = (
        make_store(tmp_path),
        make_checkpoint(tmp_path / "checkpoint", kind, **COMMON, **SIZES[kind]),
    )
    none = [f"{each.partition('=')[0]}=null" for each in SMALL if each.startswith("model.")]
    sizes = ["batch.tokens_per_rank=2048", "batch.global_tokens=4096", "data.max_length=2048"]
    given = [*none, *sizes, f"model.from_pretrained={checkpoint}", f"train.recompute={recompute}"]
    measured, memory = peak_and_estimate(workers, store, tmp_path / "run", 1, given)
    print(f"{kind}, {recompute}: measured {measured}, estimate {memory.total}: {memory}")
    assert memory.total == pytest.approx(measured, rel=0.06)


class Exponential(nn.Linear):
    """Keeps its output for backward, which needs the gradients of output, product and input beside
    it."""

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        return (self.weight * x).exp()


class OfOpposite(nn.Linear):
    """Keeps its output, and the factor of a trained weight."""

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        return (self.weight * -x).exp()


def test_what_a_layer_keeps_and_needs_in_backward_is_counted() -> None:
    assert linear_costs(Exponential(1, 1).requires_grad_(False), Exponential, 8)[:2] == (
        8 * 4,
        3 * 8 * 4,
    )
    for is_trained, kept in ((True, 2 * 8 * 4), (False, 8 * 4)):
        layer = OfOpposite(1, 1).requires_grad_(is_trained)
        assert linear_costs(layer, OfOpposite, 8).kept == kept
