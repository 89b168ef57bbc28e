"""Adapters of experts stored as one parameter: equal to plain peft and transformers for every split; their file and merge."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from longctx.config import ConfigError, load
from longctx.model.lora import merge
from longctx.training.saved.export import export
from tests.lora_cases import (
    draw,
    gathered_losses,
    loaded_by_peft,
    make_checkpoint,
    reference,
    resumed,
    resuming_fails,
    run,
    run_with_checkpoints,
    settings_of,
)
from tests.memory_cases import peak_and_estimate
from tests.workers import Workers

BOTH = ["experts.gate_up_proj", "experts.down_proj"]
EXPERTS = [f"lora.target_parameters=[{', '.join(BOTH)}]", "lora.target_modules=[q_proj, v_proj]"]
SPLIT = "batch.tokens_per_rank=200"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {kind: make_checkpoint(folder, kind) for kind in ("mixtral", "gpt_oss", "llama")}


@pytest.mark.parametrize(
    ("kind", "ranks", "settings"),
    [
        ("mixtral", 1, ["batch.tokens_per_rank=300"]),
        ("mixtral", 2, [SPLIT, "parallel.shard_ranks=1", "parallel.reshard_after=step", "train.recompute=norms"]),
        ("mixtral", 3, [SPLIT, "train.recompute=full"]),
        ("gpt_oss", 2, [SPLIT, "train.recompute=norms"]),
        ("gpt_oss", 3, [SPLIT]),
    ],
)
def test_steps_are_those_of_peft(
    workers: Workers, shorts: Path, checkpoints: dict[str, Path], tmp_path: Path, kind: str, ranks: int, settings: list[str]
) -> None:
    settings = settings_of(checkpoints[kind], *EXPERTS, *settings)
    results = workers.run(run, ranks, shorts, tmp_path, settings)
    first = results[0]["first"]
    assert {name.partition(".mlp.")[2] for name in first if ".mlp." in name and "lora_A" in name} == {
        "experts.lora_A.default.weight",
        "experts.base_layer.lora_A.default.weight",
    }
    losses, last = reference(checkpoints[kind], shorts, settings, first, ["q_proj", "v_proj"], target_parameters=BOTH)
    assert gathered_losses(results) == pytest.approx(losses, rel=1e-5)
    assert ranks == 1 or all(result["split"] for result in results)
    for name, value in last.items():
        assert (results[0]["last"][name] - value).norm() / value.norm() < 1e-3, name
    assert all(result["frozen stays"] for result in results)


@pytest.mark.parametrize(
    ("kind", "targets"), [("mixtral", EXPERTS), ("gpt_oss", EXPERTS), ("gpt_oss", [EXPERTS[0], "lora.target_modules=[]"])]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peft_loads_the_adapter_and_merges_the_same(
    checkpoints: dict[str, Path], tmp_path: Path, kind: str, targets: list[str], dtype: str
) -> None:
    given = settings_of(checkpoints[kind], *targets, f"train.dtype={dtype}", "batch.tokens_per_rank=300")
    model = load(None, given).model_source().build()
    adapted = [weight.numel() for weight in model.layers[0].parameters() if weight.dim() == 3]
    assert model.spec.layers[0].adapted_experts == sum(adapted) > 0
    values = draw(model)
    loaded = loaded_by_peft(tmp_path, checkpoints[kind], model, values, dtype)
    merged, expected = merge(model, values), loaded.merge_and_unload()
    for name, weight in expected.named_parameters():
        if dtype == "float32" or weight.dim() < 3:
            assert torch.equal(merged[f"hf.{name}"], weight), name
        else:  # peft rounds the product before it adds it
            torch.testing.assert_close(merged[f"hf.{name}"], weight, rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_a_run_resumes_and_exports_what_it_trained(
    workers: Workers, shorts: Path, checkpoints: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    settings = settings_of(checkpoints[kind], *EXPERTS, SPLIT, "train.steps=2", "checkpoint.every=1")
    ended = workers.run(run_with_checkpoints, 2, shorts, tmp_path / "run", settings)[0]
    export(tmp_path / "run", tmp_path / "adapters")
    export(tmp_path / "run", tmp_path / "merged", merge=True)
    base = AutoModelForCausalLM.from_pretrained(checkpoints[kind], dtype=torch.float32)
    PeftModel.from_pretrained(base, tmp_path / "adapters").merge_and_unload().save_pretrained(tmp_path / "expected")
    merged, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "expected"))
    assert merged.keys() == expected.keys()
    assert all(torch.equal(merged[name], weight) for name, weight in expected.items())
    other = [*settings, "lora.target_parameters=[experts.down_proj]"]
    said = workers.run(resuming_fails, 2, shorts, tmp_path / "run", other)
    assert "lora.target_parameters is ['experts.down_proj'], was ['experts.gate_up_proj'" in said[0]
    (tmp_path / "run" / "checkpoints" / "step-000002").rename(tmp_path / "moved")
    for name, value in workers.run(resumed, 2, shorts, tmp_path / "run", settings)[0].items():
        assert torch.equal(value, ended[name]), name


def test_dora_of_experts_is_refused(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="peft has no DoRA of experts"):
        load(None, settings_of(checkpoints["mixtral"], *EXPERTS, "lora.dora=true", "batch.tokens_per_rank=300"))


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("llama", "experts.gate_up_proj", "LlamaForCausalLM has none"),
        ("mixtral", "w1", "MixtralForCausalLM has experts.down_proj, experts.gate_up_proj"),
        ("mixtral", "q_proj.weight", "q_proj.weight is not the name of experts"),
    ],
)
def test_other_names_are_refused(checkpoints: dict[str, Path], kind: str, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(None, settings_of(checkpoints[kind], f"lora.target_parameters=[{name}]", "batch.tokens_per_rank=300"))


def test_the_width_of_experts_is_that_of_all_chosen_ones(checkpoints: dict[str, Path]) -> None:
    """Mixtral's config has the width of an expert as that of its MLP, and each token goes to two experts."""
    given = ["lora.rank=null", "lora.alpha=null", "batch.tokens_per_rank=300"]
    mixtral, llama = (
        load(None, settings_of(checkpoints[kind], *given)).model_source().spec.layers[0] for kind in ("mixtral", "llama")
    )
    config = AutoModelForCausalLM.from_pretrained(checkpoints["mixtral"]).config
    assert mixtral.intermediate_size == config.num_experts_per_tok * config.intermediate_size
    assert config.num_experts_per_tok > 1 and llama.intermediate_size == config.intermediate_size


@pytest.mark.parametrize(
    ("ranks", "others"),
    [(1, ["train.recompute=none"]), (1, ["train.dtype=bfloat16"]), (2, ["train.recompute=full"])],
)
def test_the_memory_estimate_is_within_15_percent(
    workers: Workers, store: Path, tmp_path: Path, ranks: int, others: list[str]
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_local_experts": 8}
    checkpoint = make_checkpoint(tmp_path / "larger", "mixtral", **sizes)
    given = settings_of(checkpoint, f"batch.tokens_per_rank={2048 // ranks}", "batch.global_tokens=4096", *EXPERTS)
    given += ["data.max_length=2048", *others]
    measured, memory = peak_and_estimate(workers, store, tmp_path / "run", ranks, given)
    assert memory.total == pytest.approx(measured, rel=0.15), f"{memory}, measured {measured}"
