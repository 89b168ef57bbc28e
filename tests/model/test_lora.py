"""LoRA: equal to plain peft and transformers for every split over ranks; contents of checkpoints;
loading by peft."""

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from torch.distributed.checkpoint.filesystem import FileSystemReader
from transformers import AutoModelForCausalLM

from longctx.cli import main
from longctx.config import ConfigError, load
from longctx.hf.lora import merge, with_adapters, write_adapter
from longctx.hf.model import OURS
from longctx.hf.spec import spec_of
from longctx.planning.cost.work import work_of
from longctx.training.metrics import model_flops
from tests.huggingface_cases import build_model
from tests.lora_cases import (
    draw,
    gathered_losses,
    loaded_by_peft,
    make_checkpoint,
    resumed,
    resuming_fails,
    run,
    run_compiled,
    run_with_checkpoints,
    settings_of,
)
from tests.memory_cases import peak_and_estimate
from tests.training_cases import SMALL
from tests.workers import Workers

KINDS = ("llama", "mixtral", "gpt2")
MODES = {
    "auto": ["context.mode=auto", "batch.tokens_per_rank=200"],
    "degree 1": ["context.mode=static", "context.degree=1", "batch.tokens_per_rank=300"],
}
"""In the first, a rank holds fewer tokens than the longest document has, so that some documents are
split."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {kind: make_checkpoint(folder, kind) for kind in KINDS}


def test_sizes_count_adapters_once() -> None:
    """Also of a model to which peft has added them, as inside trainers."""
    hf = build_model("llama", "eager")
    plain = spec_of(hf, hf.model.layers)
    inject_adapter_in_model(LoraConfig(r=4, target_modules="all-linear"), hf)
    found = with_adapters(spec_of(hf, hf.model.layers), hf.model.layers, hf)
    assert found.parameters == sum(weight.numel() for weight in hf.parameters())
    assert found.trained_parameters == sum(
        weight.numel() for weight in hf.parameters() if weight.requires_grad
    )
    assert [layer.matrix_parameters for layer in found.layers] == [
        layer.matrix_parameters for layer in plain.layers
    ]
    assert {layer.adapter_width for layer in found.layers} == {7 * 4}


@pytest.mark.slow
def test_other_adapters_or_another_base_are_refused_on_resume(
    workers: Workers, shorts: Path, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    settings = settings_of(
        checkpoints["llama"], *MODES["degree 1"], "train.steps=1", "checkpoint.every=1"
    )
    workers.run(run_with_checkpoints, 1, shorts, tmp_path / "run", settings)
    metadata = (
        FileSystemReader(tmp_path / "run" / "checkpoints" / "step-000001")
        .read_metadata()
        .state_dict_metadata
    )
    assert all("lora_" in name for name in metadata if name.startswith("model."))
    other = tmp_path / "other"
    shutil.copytree(checkpoints["llama"], other)
    model = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.add_(1e-3)
    model.save_pretrained(other)
    moved = tmp_path / "moved"
    shutil.copytree(checkpoints["llama"], moved)
    for change, message in (
        (["lora.rank=8"], "lora.rank is 8, was 4"),
        (["lora.alpha=6"], "lora.alpha is 6.0, was 12.5"),
        (["lora.base=int8"], "lora.base is 'int8', was None"),
        (
            ["lora.target_modules=[q_proj]"],
            r"lora.target_modules is \['q_proj'\], was 'all-linear'",
        ),
        (["lora.rank=null", "lora.alpha=null"], "it has LoRA adapters: set lora.rank to 4"),
        (
            [f"model.from_pretrained={other}"],
            f"the weights of {other} differ from those of {checkpoints['llama']}",
        ),
    ):
        said = workers.run(resuming_fails, 1, shorts, tmp_path / "run", [*settings, *change])
        assert re.search(message, said[0]), said[0]
    elsewhere = [*settings, f"model.from_pretrained={moved}", "train.steps=2", "checkpoint.every=2"]
    assert workers.run(resumed, 1, shorts, tmp_path / "run", elsewhere)
    full = [*settings, "lora.rank=null", "lora.alpha=null"]
    workers.run(run_with_checkpoints, 1, shorts, tmp_path / "full", full)
    assert (
        "it was trained without LoRA"
        in workers.run(resuming_fails, 1, shorts, tmp_path / "full", settings)[0]
    )


@pytest.mark.slow
@pytest.mark.parametrize("base", ["null", "nf4"])
def test_compiled_blocks_have_no_breaks_and_are_not_compiled_again(
    workers: Workers, shorts: Path, checkpoints: dict[str, Path], tmp_path: Path, base: str
) -> None:
    settings = settings_of(checkpoints["llama"], *MODES["degree 1"], f"lora.base={base}")
    plain = workers.run(run, 1, shorts, tmp_path / "plain", settings, 2)[0]["losses"]
    ((losses, graphs, breaks),) = workers.run(
        run_compiled, 1, shorts, tmp_path / "compiled", settings, 2
    )
    assert losses == pytest.approx(plain, rel=1e-6)
    assert (graphs, breaks) == (2, 0), (
        "one for the first block, whose input needs no gradient, and one for all others"
    )


def test_the_frozen_base_is_bfloat16_and_adapters_float32(
    workers: Workers, shorts: Path, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    settings = settings_of(checkpoints["llama"], *MODES["auto"])
    plain = workers.run(run, 2, shorts, tmp_path / "plain", settings, 2)
    results = workers.run(
        run, 2, shorts, tmp_path / "bfloat16", [*settings, "train.dtype=bfloat16"], 2
    )
    assert gathered_losses(results) == pytest.approx(gathered_losses(plain), rel=0.02)
    for result in results:
        assert result["dtypes"] == ({"torch.bfloat16"}, {"torch.float32"})
        assert result["frozen stays"]
        assert result["moments"] == 2 * sum(value.numel() for value in result["last"].values())


@pytest.mark.parametrize(
    ("kind", "targets", "tied"),
    [
        ("llama", "all-linear", False),
        ("llama", "[q_proj, layers.1.mlp.up_proj]", True),
        ("mixtral", "all-linear", False),
        ("gpt2", "all-linear", True),
        ("deepseek_v3", "all-linear", False),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peft_loads_the_adapter_and_merges_the_same(
    tmp_path: Path, kind: str, targets: str, tied: bool, dtype: str
) -> None:
    checkpoint = make_checkpoint(tmp_path, kind, tie_word_embeddings=tied)
    given = settings_of(
        checkpoint,
        f"lora.target_modules={targets}",
        f"train.dtype={dtype}",
        "batch.tokens_per_rank=300",
    )
    model = load(None, given).model_source().build()
    values = draw(model)
    loaded = loaded_by_peft(tmp_path / "adapter", checkpoint, model, values, dtype)
    ids = torch.arange(20)[None]
    plain, adapted = (
        base_logits(checkpoint, dtype, ids),
        loaded(input_ids=ids, use_cache=False).logits,
    )
    assert (plain - adapted).abs().max() > 0.05
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(values[name])
    model.finish(torch.device("cpu"), getattr(torch, dtype))
    model.hf.set_attn_implementation("eager")
    ours = model.hf(input_ids=ids, use_cache=False).logits
    assert torch.equal(ours, adapted)
    merged = merge(model, values)
    expected = loaded.merge_and_unload()
    assert {name.removeprefix("hf.") for name in merged} == dict(expected.named_parameters()).keys()
    for name, weight in expected.named_parameters():
        assert torch.equal(merged[f"hf.{name}"], weight), name


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_adapters_begin_as_those_of_peft(checkpoints: dict[str, Path], kind: str) -> None:
    """A of every layer is drawn anew, as far from 0 as peft's own; B is 0."""
    ours = load(None, settings_of(checkpoints[kind])).model_source().build()
    plain = AutoModelForCausalLM.from_pretrained(checkpoints[kind])
    theirs = {
        f"{OURS}{name}": weight
        for name, weight in get_peft_model(
            plain, ours.peft_config()
        ).base_model.model.named_parameters()
    }
    sums = set()
    for name, weight in ours.named_parameters():
        if not weight.requires_grad:
            continue
        value, expected = ours.initial_value(name, weight.detach(), 3), theirs[name].detach()
        assert value.abs().max() == pytest.approx(float(expected.abs().max()), rel=0.15), name
        assert torch.equal(value, ours.initial_value(name, weight.detach(), 3))
        assert value.any() == name.endswith("lora_A.default.weight")
        sums.add(float(value.sum()))
    assert len(sums) == 1 + sum(name.endswith("lora_A.default.weight") for name in theirs)


def base_logits(checkpoint: Path, dtype: str, ids: torch.Tensor) -> torch.Tensor:
    base = AutoModelForCausalLM.from_pretrained(
        checkpoint, attn_implementation="eager", dtype=getattr(torch, dtype)
    )
    logits: torch.Tensor = base(input_ids=ids, use_cache=False).logits
    return logits


def test_incomplete_adapters_are_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    model = (
        load(None, settings_of(checkpoints["llama"], "batch.tokens_per_rank=300"))
        .model_source()
        .build()
    )
    values = draw(model)
    missing = "hf.model.layers.0.mlp.up_proj.lora_B.default.weight"
    some = {name: value for name, value in values.items() if name != missing}
    with pytest.raises(
        ValueError,
        match=r"1 of 42 adapter weights are missing: model\.layers\.0\.mlp\.up_proj\.lora_B",
    ):
        write_adapter(tmp_path, model, some)
    with pytest.raises(ValueError, match=f"is given without {missing}"):
        merge(model, some)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (
            "llama",
            ["lora.target_modules=[wq]"],
            "no layer is called wq: .*the linear layers down_proj, gate_proj, k_proj, o_proj",
        ),
        ("llama", ["lora.target_modules=[q_proj, lm_head]"], "lm_head is the output head"),
        (
            "llama",
            ["lora.target_modules=[embed_tokens]"],
            "embed_tokens is a Embedding, which is not a linear layer",
        ),
        (
            "mixtral",
            ["lora.target_modules=[experts]"],
            "experts is a MixtralExperts, which is not a linear layer",
        ),
        ("llama", ["lora.dropout=0.1"], "would depend on how documents are split: omit it"),
    ],
)
def test_what_cannot_be_is_refused(
    checkpoints: dict[str, Path], kind: str, settings: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        load(None, settings_of(checkpoints[kind], "batch.tokens_per_rank=300", *settings))
    assert len(
        re.findall(message, str(raised.value))
    ) == 1 and "replace that checkpoint" not in str(raised.value)


def test_without_peft_the_settings_are_refused(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match="this setting needs peft, which is not installed"):
        # Of no other test.
        load(None, settings_of(checkpoints["llama"], "batch.tokens_per_rank=300", "lora.rank=7"))


def test_peft_takes_some_names_for_experts(tmp_path: Path) -> None:
    """Deepseek's first block is dense: its gate_proj is a linear layer, which peft 0.21 looks for
    among the experts."""
    checkpoint = make_checkpoint(tmp_path, "deepseek_v3")
    linear = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
    with torch.device("meta"):
        model = (
            load(None, settings_of(checkpoint, "batch.tokens_per_rank=300")).model_source().build()
        )
    assert {name.rpartition(".")[2] for name in model.adapted} >= linear
    trained = {
        name.rpartition(".lora_")[0]
        for name, weight in model.named_parameters()
        if weight.requires_grad
    }
    assert trained == {f"hf.{name}" for name in model.adapted}


def test_the_first_line_counts_what_is_trained(
    shorts: Path, checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [
        *SMALL,
        *settings_of(checkpoints["mixtral"], *MODES["degree 1"]),
        f"data.store={shorts}",
    ]
    given = [
        f"--{setting}"
        for setting in [*settings, f"train.run_dir={tmp_path / 'run'}", "train.steps=2"]
    ]
    assert main(["train", *given]) == 0
    model = AutoModelForCausalLM.from_pretrained(checkpoints["mixtral"])
    trained = 3 * 4 * (32 + 32 + 32 + 16 + 32 + 16 + 32 + 32)
    everything = trained + sum(weight.numel() for weight in model.parameters())
    assert (
        f"{trained:,} of {everything:,} parameters trained (LoRA of rank 4)"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("ranks", "others"),
    [
        (1, ["train.recompute=none"]),
        (1, ["train.dtype=bfloat16"]),
        (2, ["context.mode=auto"]),
    ],
)
@pytest.mark.slow
def test_the_memory_estimate_is_within_10_percent(
    workers: Workers, store: Path, tmp_path: Path, ranks: int, others: list[str]
) -> None:
    """Frozen weights are counted without gradients and optimizer state, which would be three
    quarters of the total."""
    sizes = {"hidden_size": 128, "intermediate_size": 384, "head_dim": 32}
    checkpoint = make_checkpoint(tmp_path / "larger", "llama", **sizes)
    given = settings_of(
        checkpoint, f"batch.tokens_per_rank={2048 // ranks}", "batch.global_tokens=4096", *others
    )
    given.append("data.max_length=2048")
    measured, memory = peak_and_estimate(workers, store, tmp_path / "run", ranks, given)
    assert memory.total == pytest.approx(measured, rel=0.1), f"{memory}, measured {measured}"


def test_operations_of_frozen_weights_are_counted_without_their_gradients(
    checkpoints: dict[str, Path],
) -> None:
    sources = [
        load(
            None, settings_of(checkpoints["llama"], "batch.tokens_per_rank=300", *others)
        ).model_source()
        for others in ([], ["lora.rank=null", "lora.alpha=null"])
    ]
    adapted, full = (source.spec for source in sources)
    assert adapted.trained_parameters == adapted.parameters - full.parameters > 0
    assert full.trained_parameters == full.parameters
    of_adapters, of_matrices = (
        6 * 100 * adapted.trained_parameters,
        2 * 100 * full.multiplied_parameters,
    )
    assert model_flops(adapted, [100]) == model_flops(full, [100]) + of_adapters - of_matrices
    works = [work_of(spec, "float32") for spec in (adapted, full)]
    assert works[0].computed == pytest.approx(2 / 3 * works[1].computed)


@pytest.mark.parametrize(
    ("more", "rate"),
    [
        ([], 2e-4),
        (["optimizer.learning_rate=0.001"], 1e-3),
        (["lora.rank=null"], 3e-4),
    ],
)
def test_adapters_have_a_learning_rate_of_their_own(
    checkpoints: dict[str, Path], more: list[str], rate: float
) -> None:
    config = load(None, [f"model.from_pretrained={checkpoints['llama']}", "lora.rank=4", *more])
    assert config.optimizer.learning_rate == rate
