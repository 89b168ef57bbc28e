"""Checkpoints of transformers in the trainer: read, packed, split over ranks and sharded, against
transformers alone."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from longctx.attention import Mask, RingAttention, ring_pass
from longctx.attention.ulysses import HeadSwap
from longctx.cli import main
from longctx.config import load
from longctx.hf import attention as hf_attention
from longctx.hf.lora_options import Lora
from longctx.hf.source import adapted, pretrained
from longctx.model.checkpoint_files import PretrainedError, not_finite
from longctx.model.compilation import compile_blocks
from longctx.planning.layout import Layout, Placement
from longctx.training.saved import checkpoint
from tests.export_cases import untouched
from tests.huggingface_cases import build_model
from tests.marks import slow_unless
from tests.pretrained_cases import (
    SETTINGS,
    largest_error,
    make_batch,
    make_trainer,
    reference,
    step,
)
from tests.training_cases import make_store, whole
from tests.workers import Workers

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("llama", "gemma2", "mixtral", "gpt2", "phi", "cohere", "deepseek_v3", "gpt_oss")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    for kind in KINDS:
        build_model(kind, "eager").save_pretrained(folder / kind)
    return {kind: folder / kind for kind in KINDS}


@pytest.mark.slow
def test_blocks_compile_once_for_all_layers_of_a_kind(tmp_path: Path) -> None:
    """With a window or without, and once more for the first layer, whose number 0 is a constant for
    torch."""
    torch._dynamo.reset()
    build_model("gemma2", "eager", num_hidden_layers=4).save_pretrained(tmp_path)
    model = load(None, [*SETTINGS, f"model.from_pretrained={tmp_path}"]).model_source().build()
    model.finish(torch.device("cpu"), torch.float32)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compile_blocks(model, backend=counter)
    breaks = torch._dynamo.utils.counters["graph_break"]
    breaks.clear()
    for length in (40, 30, 77):
        layout = Layout.of((Placement(0, 0, 1),), (length,), 0, 0)

        def make(
            scale: float | None, softcap: float, window: int | None, layout: Layout = layout
        ) -> RingAttention:
            return RingAttention(layout, scale=scale, softcap=softcap, mask=Mask(window=window))

        attention, places = model.attention(make), torch.arange(length)
        model(places % 16, places, attention).sum().backward()
    assert not breaks and len(counter.graphs) <= 3


def step_on_blackwell(
    folder: Path,
) -> tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A step where torch's grouped product must not be used, as its gradients are wrong for experts
    without tokens."""
    with (
        mock.patch.object(hf_attention, "leaves_gradients", return_value=True),
        mock.patch.object(F, "grouped_mm", None),
    ):
        return step(folder, [])


def test_experts_run_one_after_the_other_on_blackwell(
    workers: Workers, checkpoints: dict[str, Path]
) -> None:
    loss, gradients, _ = reference(checkpoints["mixtral"])
    ((found_loss, found_gradients, _),) = workers.run(step_on_blackwell, 1, checkpoints["mixtral"])
    assert found_loss == pytest.approx(loss, rel=1e-5)
    assert largest_error(found_gradients, gradients) < 1e-4


def make_untied(kind: str, folder: Path) -> Path:
    """Writes a checkpoint whose config ties the head to the embedding, and whose file has another
    head."""
    model = build_model(kind, "eager", tie_word_embeddings=True)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    (head,) = (name for name in model._tied_weights_keys if name.endswith("weight"))
    other = torch.randn_like(model.get_output_embeddings().weight)
    save_file({**tensors, head: other}, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    "kind", slow_unless(lambda kind: kind == "gpt2", ["llama", "gpt2", "cohere", "gemma3_text"])
)
def test_a_head_that_differs_from_the_embedding_is_not_tied(
    workers: Workers, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the config says, as in transformers; also with adapters, in the native decoder, and
    in exports."""
    folder = make_untied(kind, tmp_path / kind)
    loss, gradients, state = reference(folder)
    head = next(
        name
        for name in state
        if name in transformers.AutoModelForCausalLM.from_pretrained(folder)._tied_weights_keys
    )
    split = kind == "llama"  # which the native decoder has
    for settings in [[], ["lora.rank=2"], *([["model.implementation=native"]] if split else [])]:
        (found_loss, found_gradients, found_state), _ = workers.run(step, 2, folder, settings)
        assert found_loss == pytest.approx(loss, rel=1e-5), settings
        if not settings:
            assert largest_error(found_gradients, gradients) < 1e-4
            assert torch.equal(found_state[head], state[head])
    (tmp_path / "source").mkdir()
    store = make_store(tmp_path / "source")
    ways = {
        "whole": [],
        "tensor": ["parallel.tensor_parallel_size=2"],
        "pipeline": ["parallel.pipeline_parallel_size=2"],
    }
    for way, settings in ways.items() if split else [("whole", [])]:
        workers.run(untouched, 2, store, [folder], tmp_path / way, settings)
        assert main(["export", str(tmp_path / way / kind), str(tmp_path / way / "out")]) == 0
        exported = load_file(tmp_path / way / "out" / "model.safetensors")
        assert all(torch.equal(exported[name], value) for name, value in state.items())
        assert not transformers.AutoConfig.from_pretrained(
            tmp_path / way / "out"
        ).tie_word_embeddings
    capsys.readouterr()


def test_weights_of_which_only_some_are_tied_are_refused(tmp_path: Path) -> None:
    """Transformers would untie the head of such a decoder, and still tie its bias."""
    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    model = transformers.BertLMHeadModel(transformers.BertConfig(**sizes, is_decoder=True))
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["cls.predictions.decoder.weight"] = (
        tensors["bert.embeddings.word_embeddings.weight"] + 1
    )
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        PretrainedError,
        match=r"has other values for only some \(cls\.predictions\.decoder\.weight\)",
    ):
        pretrained(str(tmp_path), (), "auto", False)


ULYSSES = ["context.ulysses_degree=2"]


def work_of_a_step(folder: Path, settings: list[str]) -> Counter[str]:
    """Counts how often this rank runs, in a step's passes through the first block, a projection of
    attention and one of the MLP, attention itself, and swaps of heads."""
    trainer = make_trainer(folder, settings)
    block, done = trainer.model.layers[0], Counter[str]()
    block.self_attn.q_proj.register_forward_hook(lambda *_: done.update(["projection"]))
    block.mlp.gate_proj.register_forward_hook(lambda *_: done.update(["mlp"]))
    run, attend = HeadSwap.run, ring_pass.RingPass.__init__

    def swapped(self: HeadSwap, *arguments: Any) -> Any:
        done["swap"] += arguments[-1] == 0
        return run(self, *arguments)

    def attended(self: Any, ring: Any, layer: int, **named: Any) -> None:
        done["attention"] += (layer, named["name"]) == (0, "forward")
        attend(self, ring, layer, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HeadSwap, "run", swapped)
        patch.setattr(ring_pass.RingPass, "__init__", attended)
        batch = make_batch(dist.get_world_size(), dist.get_rank())
        trainer.runner.forward_backward(batch)
    return done


def works(folder: Path, settings: list[list[str]]) -> list[Counter[str]]:
    return [work_of_a_step(folder, each) for each in settings]


def test_settings_take_effect_on_the_blocks_of_transformers(
    workers: Workers, checkpoints: dict[str, Path]
) -> None:
    """Otherwise equal results would prove nothing."""

    settings = (
        [],
        *(
            ["train." + each]
            for each in ("recompute=full", "recompute=selective", "mlp_tile_tokens=7")
        ),
        ULYSSES,
    )
    by_rank = workers.run(works, 2, checkpoints["llama"], settings)
    plain, full, selective, tiled, swapped = (
        sum(done, Counter()) for done in zip(*by_rank, strict=True)
    )
    assert plain["projection"] == plain["mlp"] == plain["attention"] > 0 == plain["swap"]
    twice = {"projection": 2 * plain["projection"], "mlp": 2 * plain["mlp"]}
    assert full == {**twice, "attention": 2 * plain["attention"]}
    assert selective == {**twice, "attention": plain["attention"]}
    assert tiled["mlp"] > 4 * plain["mlp"] and tiled["projection"] == plain["projection"]
    assert swapped["swap"] > 0


def exact_families() -> list[str]:
    """Families that docs/families.md calls exact, except those that AutoModel cannot load alone or
    that are refused here."""
    rows = (
        line.split(" | ")
        for line in (ROOT / "docs" / "families.md").read_text("utf-8").splitlines()
    )
    exact = [row[0].removeprefix("| ") for row in rows if len(row) > 2 and row[2] == "exact"]
    return [kind for kind in exact if kind not in ("emu3", "mllama", "longcat_flash")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", exact_families())
def test_every_exact_family_trains_from_its_checkpoint(
    workers: Workers, tmp_path: Path, kind: str
) -> None:
    from tests.family_cases import _build_plain

    _build_plain(kind).save_pretrained(tmp_path)
    loss, gradients, state = reference(tmp_path)
    for found_loss, found_gradients, found_state in workers.run(step, 2, tmp_path, []):
        assert not [
            name for name, value in state.items() if not torch.equal(found_state[name], value)
        ]
        assert found_loss == pytest.approx(loss, rel=1e-5)
        assert largest_error(found_gradients, gradients) < 1e-4


def trained_weights(folder: Path) -> tuple[bool, dict[str, float]]:
    """Returns whether the optimizer has the shards, and by how much a step changes every weight."""
    trainer = make_trainer(folder, [])
    sharded = all(
        isinstance(weight, DTensor)
        for group in trainer.optimizer.param_groups
        for weight in group["params"]
    )
    before = {name: whole(weight).clone() for name, weight in trainer.model.named_parameters()}
    trainer.step(make_batch(dist.get_world_size(), dist.get_rank()))
    return sharded, {
        name: float((whole(weight) - before[name]).abs().max())
        for name, weight in trainer.model.named_parameters()
    }


def test_every_weight_is_trained(workers: Workers, checkpoints: dict[str, Path]) -> None:
    """Also weights outside the blocks, which the check of the model gathers before the optimizer is
    made."""
    for sharded, moved in workers.run(trained_weights, 2, checkpoints["llama"]):
        assert sharded and min(moved.values()) > 0, moved


def settings_of_a_run(folder: Path) -> list[str]:
    """Returns the settings of a run with a new checkpoint and a new store."""
    build_model("llama", "eager", vocab_size=260).save_pretrained(folder / "model")
    settings = [
        *SETTINGS,
        f"model.from_pretrained={folder / 'model'}",
        f"data.store={make_store(folder, (250,))}",
    ]
    settings += [
        "batch.global_tokens=1000",
        f"train.run_dir={folder / 'run'}",
        "log.tensorboard=false",
    ]
    return [f"--{setting}" for setting in settings]


def test_tensors_without_a_place_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As transformers does on loading; buffers that it recomputes are not reported."""
    settings = settings_of_a_run(tmp_path)
    file = tmp_path / "model" / "model.safetensors"
    others = {
        "model.layers.2.eh_proj.weight": torch.ones(2, 2),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    save_file({**load_file(file), **others}, file, metadata={"format": "pt"})
    assert main(["train", *settings, "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert (
        "the model does not use 1 tensor of this checkpoint, and exports will lack them: "
        "model.layers.2.eh_proj.weight\n" in told
    )
    assert "transformers' own code runs it" in told


@pytest.mark.parametrize("rank", [None, 2])
def test_a_run_whose_checkpoint_is_gone_says_how_to_go_on(
    tmp_path: Path, rank: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """And resumes with an export, as the run's checkpoints have all weights; adapters alone are not
    enough."""
    settings, run, out = settings_of_a_run(tmp_path), tmp_path / "run", tmp_path / "out"
    settings += [f"--lora.rank={rank}"] * (rank is not None)
    assert main(["train", *settings, "--train.steps=2"]) == 0
    shutil.rmtree(tmp_path / "model")
    assert main(["train", *settings, "--train.steps=3", "--resume"]) == 2
    told = capsys.readouterr().err
    assert f"there is no folder {tmp_path / 'model'}" in told
    assert main(["export", str(run), str(out)]) == (0 if rank is None else 2)
    if rank is not None:
        assert (
            "contain only the adapters" in told and "the base weights in" in capsys.readouterr().err
        )
        return
    assert f"longctx export {run} OUT, then --model.from_pretrained OUT" in told
    assert (
        main(["train", *settings, "--train.steps=3", "--resume", f"--model.from_pretrained={out}"])
        == 0
    )
    assert "from step 2;" in capsys.readouterr().out and checkpoint.steps(run)[-1] == 3


@pytest.mark.parametrize("way", ["transformers", "native", "adapters"])
def test_weights_of_another_shape_are_told(tmp_path: Path, way: str) -> None:
    """Transformers would draw others in their place."""
    build_model("llama", "eager").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    config["intermediate_size"] += 16
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    told = r"does not fit its config.json: .*_proj.weight has shape \(\d+, \d+\), not \(\d+, \d+\)"
    with pytest.raises(PretrainedError, match=told):
        read_all(source_of(tmp_path, way).build())


def source_of(folder: Path, way: str) -> Any:
    """The source of a model from a checkpoint in one of three ways."""
    if way == "adapters":
        return adapted(str(folder), (), Lora(2, 2.0), "float32")
    return pretrained(str(folder), (), way, False)


def read_all(model: Any) -> None:
    for name, parameter in model.named_parameters():
        model.initial_value(name, parameter, 0)


@pytest.mark.parametrize("way", ["transformers", "native", "adapters"])
@pytest.mark.parametrize(
    ("value", "dtype"),
    [(torch.nan, torch.bfloat16), (torch.inf, torch.float32), (-torch.inf, torch.float16)],
)
def test_nan_and_infinity_of_a_checkpoint_are_told_when_it_is_read(
    tmp_path: Path, way: str, value: float, dtype: torch.dtype
) -> None:
    """Before any check of the model's code, which would take them for something else."""
    model = build_model("llama", "eager").to(dtype)
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.up_proj.weight")[3, 5] = value
    model.save_pretrained(tmp_path)
    built = source_of(tmp_path, way).build()
    told = (
        r"layers.1.mlp.up_proj.weight has 1 of 1,536 numbers that are NaN or infinite \(the "
        r"first at \[3, 5\]\)"
    )
    with pytest.raises(PretrainedError, match=told):
        read_all(built)


def test_8_bit_numbers_of_a_checkpoint_are_looked_at_too() -> None:
    numbers = torch.tensor([[1.0, torch.nan], [2.0, 3.0]])
    assert (
        not_finite(numbers.to(torch.float8_e4m3fn))
        == "1 of 4 numbers that are NaN or infinite (the first at [0, 1])"
    )
    assert not not_finite(torch.tensor([255], dtype=torch.uint8)) and not not_finite(
        torch.tensor(1.0)
    )
    assert not_finite(torch.tensor(torch.inf, dtype=torch.float64)).startswith("1 of 1 numbers")
