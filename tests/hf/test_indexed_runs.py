"""Models with indexers in `longctx train` and in `transformers.Trainer`: steps, memory, costs, and
what runs save."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from longctx.config import load
from longctx.planning.cost.indexed import IndexedLayer
from longctx.planning.cost.spec import ModelSpec
from longctx.planning.cost.work import work_of
from tests import launched
from tests.data_cases import byte_store
from tests.family_cases import build
from tests.marks import slow_unless
from tests.pretrained_cases import SETTINGS, assert_step, reference, step
from tests.workers import Workers

KINDS = ("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "dots3_note_text")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("indexed")
    for kind in KINDS:
        build(kind, "eager").save_pretrained(folder / kind)
    return {kind: folder / kind for kind in KINDS}


@pytest.mark.parametrize("kind", slow_unless(lambda kind: kind == "glm_moe_dsa", KINDS))
def test_a_step_of_the_trainer_is_that_of_transformers(
    workers: Workers, checkpoints: dict[str, Path], kind: str
) -> None:
    assert_step(workers.run(step, 3, checkpoints[kind], []), reference(checkpoints[kind]))


OPTIONS = {
    "selective": ["train.recompute=selective"],
    "full": ["train.recompute=full", "context.keep_kv=true"],
    "norms": ["train.recompute=norms", "context.two_level_exchange=true"],
}


@pytest.mark.parametrize("name", OPTIONS)
def test_settings_change_nothing(workers: Workers, checkpoints: dict[str, Path], name: str) -> None:
    folder = checkpoints["glm_moe_dsa"]
    assert_step(workers.run(step, 3, folder, OPTIONS[name]), reference(folder))


def test_adapters_are_not_on_indexers(workers: Workers, checkpoints: dict[str, Path]) -> None:
    """With B = 0 the loss is that of the checkpoint."""
    folder = checkpoints["deepseek_v32"]
    expected, *_ = reference(folder)
    for loss, gradients, _ in workers.run(step, 3, folder, ["lora.rank=4"]):
        assert loss == pytest.approx(expected, rel=1e-5)
        trained = {name for name, gradient in gradients.items() if gradient.any()}
        assert trained and all(".lora_B." in name for name in trained)
        assert not any(".indexer." in name and ".lora_" in name for name in gradients)


def test_a_run_saves_indexers_as_they_were(tmp_path: Path) -> None:
    settings = {"vocab_size": 300, "max_position_embeddings": 4096}
    build("deepseek_v32", "eager", **settings).save_pretrained(tmp_path / "model")
    byte_store(tmp_path, [500, 30, 300, 70])
    launched.run(
        "train",
        f"--data.store={tmp_path / 'store'}",
        f"--model.from_pretrained={tmp_path / 'model'}",
        f"--train.run_dir={tmp_path / 'run'}",
        f"--checkpoint.export={tmp_path / 'out'}",
        "--train.steps=2",
        "--batch.tokens_per_rank=512",
        "--batch.global_tokens=900",
        "--log.tensorboard=false",
        "--train.device=cpu",
        ranks=2,
    )
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert changed and not any(".indexer." in name for name in changed)
    assert {name for name in before if ".indexer." not in name} - changed <= {
        name for name in before if "e_score_correction_bias" in name
    }


def test_shared_choices_are_counted_once(checkpoints: dict[str, Path]) -> None:
    spec = spec_of(checkpoints["glm_moe_dsa"])
    assert [layer.lent_bytes for layer in spec.layers] == [4 * 8, 0, 4 * 8, 0]
    assert [layer.selection_bytes for layer in spec.layers] == [0, 0, 0, 0]
    spec = spec_of(checkpoints["deepseek_v32"])
    assert [layer.selection_bytes for layer in spec.layers] == [4 * 8, 4 * 8]
    windowed = spec_of(checkpoints["dots3_note_text"]).layers
    assert [layer.selection_bytes for layer in windowed] == [4 * 8, 0]
    plain = spec_of(checkpoints["dots3_note_text"]).layers[1].pair_values(15.0)
    assert plain == windowed[1].num_attention_heads * windowed[1].head_dim


def test_an_indexer_costs_its_scores(checkpoints: dict[str, Path]) -> None:
    spec = spec_of(checkpoints["deepseek_v32"])
    (layer, _) = spec.layers
    assert isinstance(layer, IndexedLayer)
    dense = 2 * layer.num_attention_heads * layer.head_dim
    # Four heads of 8 score every pair of tokens; up to 8 tokens they score none.
    assert layer.attention_flops(1000) == 1000**2 * (dense + 2 * 4 * 8)
    assert layer.attention_flops(8) == 8**2 * dense
    assert layer.pair_values() == dense / 2 + 4 * 8 / 3.5
    assert layer.pair_values(15.0) == 15 * layer.pair_values()
    # 8 values of an index key once, and 24 of a latent three times.
    work = work_of(spec, "float32")
    assert work.kv_bytes == 2 * 4 * 3 * (24 + 3)
    assert work.attention == 2 * layer.pair_values()


def spec_of(folder: Path) -> ModelSpec:
    config = load(None, [*SETTINGS, f"model.from_pretrained={folder}"], world_size=1)
    return config.model_source().spec
