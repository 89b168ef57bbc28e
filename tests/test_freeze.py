"""Frozen parameters: the others are trained as by torch alone for every split, and frozen ones stay as they are, bit by bit."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from longctx.config import ConfigError, load
from longctx.errors import UserError
from longctx.memory.loads import Load
from longctx.memory.model import RankMemory
from longctx.planning.cost.work import work_of
from longctx.training.checks import changes_of_optimizer
from longctx.training.metrics import model_flops
from longctx.training.saved.export import export
from tests.lora_cases import make_checkpoint, plain_loop, settings_of
from tests.optimizer_cases import bytes_of_state
from tests.training_cases import SMALL, start
from tests.workers import Workers

STEPS = 5
PREFIX, MIXED, ENDS = ["embed_tokens", r"layers\.0\."], ["q_proj", "norm", "mlp|moe", "lm_head"], ["embed_tokens|lm_head"]
FIRST, LAST = [r"embed_tokens|layers\.[01]\."], [r"layers\.2\.", r"(^|model\.)norm\.", "lm_head"]
RATE = "optimizer.eps=1e-5"
NO_LORA = ["lora.rank=null", "lora.alpha=null", "optimizer.weight_decay=0.0", "batch.tokens_per_rank=200", RATE]
EXPERTS = ["model.num_experts=4", "model.num_experts_per_tok=2"]
WHOLE = "batch.tokens_per_rank=300"
TENSOR, PIPELINE = "parallel.tensor_parallel_size=2", "parallel.pipeline_parallel_size=2"
CASES: dict[str, tuple[str, int, list[str], list[str]]] = {
    "1 rank": ("llama", 1, [WHOLE], MIXED),
    "2 ranks, a block": ("llama", 2, [], PREFIX),
    "3 ranks, recomputed": ("llama", 3, ["train.recompute=full", "parallel.reshard_after=step"], PREFIX),
    "2 ranks, reduced at once": ("llama", 2, ["parallel.reduce_after=micro_batch"], MIXED),
    "replicas": ("llama", 2, ["parallel.shard_ranks=1"], MIXED),
    "tied": ("tied", 2, [], ENDS),
    "tensor": ("llama", 2, [TENSOR, WHOLE], MIXED),
    "tensor, tied": ("tied", 2, [TENSOR, WHOLE], ENDS),
    "pipeline, first stage": ("llama", 2, [PIPELINE, WHOLE], FIRST),
    "pipeline, last stage": ("llama", 2, [PIPELINE, WHOLE], LAST),
    "pipeline, tied": ("tied", 2, [PIPELINE, WHOLE], ENDS),
    "experts": ("mixtral", 2, ["parallel.expert_parallel_size=2"], ["experts", "embed_tokens", r"layers\.0\."]),
    "all but experts": ("mixtral", 2, ["parallel.expert_parallel_size=2"], ["attn", "norm", "gate.weight", "embed", "lm_head"]),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, tied = (tmp_path_factory.mktemp(name) for name in ("checkpoints", "tied"))
    found = {kind: make_checkpoint(folder, kind) for kind in ("llama", "mixtral")}
    return {**found, "tied": make_checkpoint(tied, "llama", tie_word_embeddings=True)}


def frozen_settings(checkpoint: Path, patterns: list[str], *others: str) -> list[str]:
    return settings_of(checkpoint, *NO_LORA, freeze(patterns), *others)


def freeze(patterns: list[str]) -> str:
    return "train.freeze=[" + ", ".join(f"'{pattern}'" for pattern in patterns) + "]"


def run(store: Path, folder: Path, settings: list[str], resume: bool = False, last: int = STEPS) -> dict[str, Any]:
    """Returns on each rank losses, weights by names of the checkpoint, and names of parameters with optimizer state."""
    trainer = start(store, folder, settings, resume=resume)
    with trainer.loader:
        losses = [trainer.step().loss for _ in range(trainer.steps_done, last)]
    trainer.save()
    weights = {name: weight.clone() for name, weight in trainer.weights()}
    kept = {name for name, weight in trainer.model.named_parameters() if weight in trainer.optimizer.state}
    gradients = [weight for weight in trainer.model.parameters() if not weight.requires_grad and weight.grad is not None]
    return {"losses": losses, "weights": weights, "kept": kept, "gradients": len(gradients)}


def alone(checkpoint: Path, store: Path, settings: list[str], patterns: list[str], out: Path) -> tuple[list[float], Any]:
    """Returns losses and weights of one process with plain transformers and torch."""
    config = load(None, [*SMALL, *settings, f"data.store={store}"])
    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager", dtype=torch.float32).eval()
    for name, weight in model.named_parameters():
        weight.requires_grad_(not any(re.search(pattern, name) for pattern in patterns))
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    losses = plain_loop(model, trained, config, store, STEPS)
    model.save_pretrained(out)
    return losses, load_file(out / "model.safetensors")


@pytest.mark.parametrize("case", CASES)
def test_the_others_are_trained_as_by_torch_alone(
    workers: Workers, shorts: Path, checkpoints: dict[str, Path], tmp_path: Path, case: str
) -> None:
    kind, ranks, others, patterns = CASES[case]
    settings = frozen_settings(checkpoints[kind], patterns, *others)
    results = workers.run(run, ranks, shorts, tmp_path / "run", settings)
    losses, expected = alone(checkpoints[kind], shorts, settings, patterns, tmp_path / "alone")
    before = load_file(checkpoints[kind] / "model.safetensors")
    changed = {name for name, weight in expected.items() if not torch.equal(weight, before[name])}
    assert changed and changed < before.keys()
    for result in results:
        assert result["losses"] == pytest.approx(losses, rel=1e-5)
        assert result["weights"].keys() == before.keys() and not result["gradients"]
        assert not any(re.search(pattern, name) for name in result["kept"] for pattern in patterns)
        for name, weight in result["weights"].items():
            if name in changed:
                torch.testing.assert_close(weight, expected[name], rtol=2e-4, atol=2e-4)
            else:
                assert torch.equal(weight, before[name]), name
    export(tmp_path / "run", tmp_path / "exported")
    for name, weight in load_file(tmp_path / "exported" / "model.safetensors").items():
        assert torch.equal(weight, results[0]["weights"][name]), name


@pytest.mark.parametrize(
    ("others", "ranks"),
    [
        ([PIPELINE, WHOLE], 2),
        ([PIPELINE, WHOLE, "optimizer.name=muon"], 2),
        (["optimizer.name=muon"], 3),
        (["optimizer.name=adamw-8bit"], 2),
    ],
)
def test_a_run_resumes_bit_by_bit(
    workers: Workers, shorts: Path, checkpoints: dict[str, Path], tmp_path: Path, others: list[str], ranks: int
) -> None:
    """With a stage of a pipeline that has nothing to train, Muon, and an average of the trained weights."""
    settings = frozen_settings(checkpoints["llama"], FIRST, *others)
    whole = workers.run(run, ranks, shorts, tmp_path / "whole", settings)
    workers.run(run, ranks, shorts, tmp_path / "run", settings, False, 2)
    again = workers.run(run, ranks, shorts, tmp_path / "run", settings, True)
    assert again[0]["losses"] == whole[0]["losses"][2:]
    assert [result["kept"] for result in again] == [result["kept"] for result in whole]
    for name, weight in whole[0]["weights"].items():
        assert torch.equal(again[0]["weights"][name], weight), name


@pytest.mark.parametrize(
    ("others", "patterns"),
    [
        ([], ["embed", r"layers\.0\.", "k_proj"]),
        (["optimizer.name=muon"], ["q_proj", "norm"]),
        (EXPERTS, ["experts", "embed"]),
        (EXPERTS, ["experts.*down", "q_proj"]),
        (["model.tie_word_embeddings=false"], ["lm_head"]),
    ],
)
def test_the_optimizer_and_the_estimate_count_what_is_trained(
    workers: Workers, shorts: Path, tmp_path: Path, others: list[str], patterns: list[str]
) -> None:
    settings = [*others, "data.max_length=200", "batch.tokens_per_rank=400", "batch.global_tokens=400"]
    frozen = freeze(patterns)
    actual, expected = workers.run(bytes_of_state, 1, shorts, tmp_path, [*settings, frozen])[0]
    assert actual == expected
    everything, trained = (load(None, [*SMALL, *settings, *more]) for more in ([], [frozen]))
    spec, sizes = everything.model_source(257).spec, trained.model_source(257).spec
    model = trained.model_source(257).build()
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    assert sizes.trained_parameters == sum(map(torch.numel, weights.values())) < spec.trained_parameters == spec.parameters
    memory = RankMemory(sizes, trained, 1, Load(400, 0, 0, 0, 0, 1), False, 0)
    assert memory.fixed.optimizer == expected and memory.weights.trained == sizes.trained_parameters
    assert memory.fixed.parameters == 4 * spec.parameters
    if not sizes.tie_word_embeddings:
        weights.pop("embed_tokens.weight", None)
    used = [weight.numel() / (2 if "experts" in name else 1) for name, weight in weights.items() if weight.dim() > 1]
    without = spec.multiplied_parameters - sum(used)
    assert model_flops(spec, [100]) - model_flops(sizes, [100]) == 2 * 100 * without
    assert work_of(spec, "float32").computed - work_of(sizes, "float32").computed == pytest.approx(without / 3)


@pytest.mark.parametrize(
    ("freeze", "message"),
    [
        ("['(']", r"train.freeze[\s\S]*\( is not a regular expression"),
        ("[embed, wte]", "wte matches no parameter: names are such as embed_tokens.weight"),
        ("[embed, layers, norm]", "all parameters match"),
        ("[]", "train.freeze"),
    ],
)
def test_patterns_are_checked_before_anything_starts(freeze: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(None, [f"train.freeze={freeze}"])


def test_a_run_does_not_go_on_with_other_frozen_parameters(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(load(None, ["train.freeze=[embed]"]).to_yaml())
    assert changes_of_optimizer(load(None, ["train.freeze=[embed]"]), tmp_path, resumes=True) == []
    with pytest.raises(UserError, match=r"train.freeze is null, but checkpoints of .* \[embed\]: set it to that"):
        changes_of_optimizer(load(None, []), tmp_path, resumes=False)
