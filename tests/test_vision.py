"""Vision-language models: loss and gradients of transformers' own code, however documents and their images are split."""

from pathlib import Path

import pytest
import torch

from longctx.config import load
from longctx.model.vision import VISION_FAMILIES
from tests import vision_cases
from tests.marks import slow_unless
from tests.pretrained_cases import assert_step
from tests.workers import Workers

RANKS = [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_a_step_is_that_of_single_documents(workers: Workers, tmp_path: Path, family: str, ranks: int) -> None:
    folder = vision_cases.save_model(tmp_path / "model", family)
    assert_step(workers.run(vision_cases.vision_step, ranks, folder, family, []), vision_cases.reference(folder, family))


@pytest.mark.parametrize("family", ["llava", "qwen3_vl"])
def test_adapters_are_on_the_language_model(workers: Workers, tmp_path: Path, family: str) -> None:
    """With B = 0 the loss is that of the checkpoint; only adapters of the language model get gradients."""
    folder = vision_cases.save_model(tmp_path / "model", family)
    expected, *_ = vision_cases.reference(folder, family)
    for loss, gradients, _ in workers.run(vision_cases.vision_step, 2, folder, family, ["lora.rank=4"]):
        assert loss == pytest.approx(expected, rel=1e-5)
        trained = {name for name, gradient in gradients.items() if gradient.any()}
        assert trained and all(".language_model." in name and ".lora_B." in name for name in trained)


@pytest.mark.parametrize("family", slow_unless(lambda family: family in ("llava", "gemma3"), VISION_FAMILIES))
def test_a_pixel_reaches_its_own_document_only(workers: Workers, tmp_path: Path, family: str) -> None:
    folder = vision_cases.save_model(tmp_path / "model", family)
    before, after = (workers.run(vision_cases.row_losses, 2, folder, family, spoiled) for spoiled in (None, (0, 1)))
    first = vision_cases.places_of(family)[0][1].start
    for rank in range(2):
        for document, position, one, other in zip(*before[rank][:2], before[rank][2], after[rank][2], strict=True):
            if document or position < first - 1:
                assert one == other, (document, position)
    assert any(one != other for rank in range(2) for one, other in zip(before[rank][2], after[rank][2], strict=True))


WAYS = {
    "reduced after each": ("qwen3_vl", ["parallel.reduce_after=micro_batch"]),
    "gathered": ("qwen2_5_vl", ["parallel.reshard_after=step", "context.keep_kv=true"]),
    "recomputed": ("gemma3", ["train.recompute=full"]),
    "Ulysses": ("gemma3", ["context.ulysses_degree=2"]),
    "replicas": ("llava", ["parallel.shard_ranks=1"]),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_step_is_the_same_in_every_way(workers: Workers, tmp_path: Path, way: str) -> None:
    family, settings = WAYS[way]
    folder = vision_cases.save_model(tmp_path / "model", family)
    expected = vision_cases.reference(folder, family)
    assert_step(workers.run(vision_cases.vision_step, 2, folder, family, settings), expected)


@pytest.mark.parametrize("family", slow_unless(lambda family: family == "qwen3_vl", VISION_FAMILIES))
def test_a_step_in_bfloat16_is_close(workers: Workers, tmp_path: Path, family: str) -> None:
    folder = vision_cases.save_model(tmp_path / "model", family)
    loss, gradients, _ = vision_cases.reference(folder, family)
    for found, found_gradients, _ in workers.run(vision_cases.vision_step, 2, folder, family, ["train.dtype=bfloat16"]):
        assert found == pytest.approx(loss, rel=0.02)
        norms = [sum(float(part.norm()) ** 2 for part in parts.values()) for parts in (found_gradients, gradients)]
        assert norms[0] == pytest.approx(norms[1], rel=0.2)


def test_a_spec_has_all_parameters(tmp_path: Path) -> None:
    for family in VISION_FAMILIES:
        source = load(None, [f"model.from_pretrained={vision_cases.save_model(tmp_path / family, family)}"]).model_source()
        with torch.device("meta"):
            model = source.build()
        assert abs(source.spec.parameters - sum(weight.numel() for weight in model.parameters())) <= 64  # of norms
        tower = sum(weight.numel() for name, weight in model.named_parameters() if ".language_model." not in name)
        assert source.spec.tower_parameters == tower - (0 if source.spec.tie_word_embeddings else 96 * 32)
