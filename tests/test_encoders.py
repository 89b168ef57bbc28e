"""Encoders of transformers in the trainer: masked tokens, packed, split over ranks and sharded, against transformers alone."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

from longctx.attention import Mask
from longctx.attention.huggingface import HuggingFaceError, model_inputs
from longctx.attention.huggingface import prepare as prepare_model
from longctx.cli import main
from longctx.config import ConfigError, load
from longctx.data.corpus import open_corpus
from longctx.data.prepare import prepare
from longctx.model.checkpoint_files import PretrainedError
from longctx.model.source import pretrained
from longctx.parallel.mesh import make_groups
from longctx.planning.cost.work import work_of
from longctx.training.assembly import assemble
from longctx.training.metrics import model_flops
from longctx.training.objectives.objective import token_mean
from longctx.training.run import Run
from tests.encoder_cases import KINDS, MASKED, build_encoder, make_batch, reference, save_checkpoint, step
from tests.huggingface_cases import build_model
from tests.marks import slow_unless
from tests.pretrained_cases import assert_step, make_trainer
from tests.training_cases import CPU, SMALL
from tests.workers import Workers


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("encoders")
    for kind in KINDS:
        build_encoder(kind).save_pretrained(folder / kind)
    return {kind: folder / kind for kind in KINDS}


@pytest.mark.parametrize(("kind", "ranks"), slow_unless(lambda _, ranks: ranks == 3, product(KINDS, (1, 2, 3))))
def test_a_step_is_that_of_transformers(workers: Workers, checkpoints: dict[str, Path], kind: str, ranks: int) -> None:
    """Degrees 1 to 3, lengths from 1 token."""
    assert_step(workers.run(step, ranks, checkpoints[kind], []), reference(checkpoints[kind]))


OPTIONS = {
    "recompute": ["train.recompute=full", "parallel.reshard_after=step"],
    "recompute, attention kept": ["train.recompute=selective", "parallel.reduce_after=micro_batch"],
    "exchange in stages": ["context.max_remote_tokens=8", "context.keep_kv=true", "parallel.shard_ranks=1"],
    "Ulysses": ["context.ulysses_degree=2"],
}


@pytest.mark.parametrize(("kind", "name"), slow_unless(lambda kind, _: kind == "modernbert", product(KINDS, OPTIONS)))
def test_settings_change_nothing(workers: Workers, checkpoints: dict[str, Path], kind: str, name: str) -> None:
    assert_step(workers.run(step, 2, checkpoints[kind], OPTIONS[name]), reference(checkpoints[kind]))


def step_with_other_masks(folder: Path, masks: dict[str, Any]) -> float:
    """Returns the loss of a step if attention has other masks than the model's."""
    trainer = make_trainer(folder, MASKED)
    made = trainer.model.attention
    trainer.model.attention = lambda make: made(  # type: ignore[method-assign]
        lambda scale, softcap, window: replaced(make(scale, softcap, window), window)
    )

    def replaced(attention: Any, window: int | None) -> Any:
        return type(attention)(attention.layout, mask=Mask(**{"causal": False, "window": window, **masks}))

    batch = make_batch(dist.get_world_size(), dist.get_rank())
    return float(trainer.passes.forward_backward(batch, token_mean(batch)).sum())


@pytest.mark.parametrize("masks", [{"causal": True}, {"window": None}, {"window": 8}])
def test_the_masks_matter(workers: Workers, checkpoints: dict[str, Path], masks: dict[str, Any]) -> None:
    """Otherwise equal results would prove nothing: ModernBERT's windows are of 9 tokens on each side, itself included."""
    loss, _, _ = reference(checkpoints["modernbert"])
    (same,) = workers.run(step_with_other_masks, 1, checkpoints["modernbert"], {})
    (other,) = workers.run(step_with_other_masks, 1, checkpoints["modernbert"], masks)
    assert same == pytest.approx(loss, rel=1e-5) and abs(other / loss - 1) > 1e-4


@pytest.fixture(scope="module", params=slow_unless(lambda kind: kind == "bert", KINDS))
def ready(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """Returns a kind, its checkpoint with a tokenizer, and a store of documents from 3 to 1,502 tokens."""
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "texts").mkdir()
    text = Path(pytest.__file__).read_text("utf-8") * 20
    for number, length in enumerate((1500, 700, 300, 120, 50, 20, 8, 1) * 2):
        (folder / "texts" / f"{number}.txt").write_text(text[97 * number :][:length].ljust(length, "."), "utf-8")
    checkpoint = save_checkpoint(folder / "model", request.param)
    prepare(open_corpus(str(folder / "texts")), folder / "store", tokenizer=str(checkpoint))
    return request.param, checkpoint, folder / "store"


def settings_of(checkpoint: Path, store: Path, run: Path) -> list[str]:
    small = [setting for setting in SMALL if not setting.startswith(("model.", "data."))]
    given = [f"model.from_pretrained={checkpoint}", f"data.store={store}", f"train.run_dir={run}"]
    return [*small, *given, *MASKED, "batch.global_tokens=2500", "data.held_out=0.15", "eval.every=3", "train.steps=5"]


def run_and_validate(checkpoint: Path, store: Path, run: Path, settings: list[str]) -> list[tuple[float, float, int]]:
    """Returns loss and gradient norm of some steps, and the validation loss and its tokens after them."""
    config = load(None, [*settings_of(checkpoint, store, run), *settings], world_size=dist.get_world_size())
    run.mkdir(parents=True, exist_ok=True)
    trainer = assemble(Run.open(config), make_groups(CPU, timeout_s=30))
    with trainer.loader:
        found = [(metrics.loss, metrics.grad_norm, metrics.target_tokens) for metrics in (trainer.step() for _ in range(4))]
        twice = [trainer.validator.validate() for _ in range(2)]
    assert twice[0].validation_loss == twice[1].validation_loss
    return [*found, (twice[0].validation_loss, 1.0, twice[0].validation_tokens)]


def test_the_split_does_not_change_a_run(workers: Workers, ready: tuple[str, Path, Path], tmp_path: Path) -> None:
    """Over more than one epoch: masks are the same for any ranks and plan, and so is the validation, also for another seed."""
    _, checkpoint, store = ready
    alone = workers.run(run_and_validate, 1, checkpoint, store, tmp_path / "1", ["batch.tokens_per_rank=3000"])[0]
    for found in workers.run(run_and_validate, 3, checkpoint, store, tmp_path / "3", ["batch.tokens_per_rank=520"]):
        assert [tokens for *_, tokens in found] == [tokens for *_, tokens in alone]
        assert [loss for loss, *_ in found] == pytest.approx([loss for loss, *_ in alone], rel=1e-5)
        assert [norm for _, norm, _ in found] == pytest.approx([norm for _, norm, _ in alone], rel=1e-4)
    assert 0.2 < alone[0][2] / 2500 < 0.6


def test_a_run_from_prepare_to_export(
    ready: tuple[str, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, checkpoint, store = ready
    run, out = tmp_path / "run", tmp_path / "out"
    settings = [f"--{each}" for each in settings_of(checkpoint, store, run)] + ["--batch.tokens_per_rank=2000"]
    assert main(["train", *settings, "--train.steps=2", "--checkpoint.every=1"]) == 0
    assert main(["train", *settings, "--resume", "--train.steps=3", f"--checkpoint.export={out}"]) == 0
    told = capsys.readouterr().out
    model = transformers.AutoModelForMaskedLM.from_pretrained(out)
    assert f"exported to {out}: {type(model).__name__}" in told and f"AutoModelForMaskedLM.from_pretrained('{out}')" in told
    assert type(model) is type(transformers.AutoModelForMaskedLM.from_pretrained(checkpoint))
    assert transformers.AutoTokenizer.from_pretrained(out).mask_token == "[MASK]"
    before = transformers.AutoModelForMaskedLM.from_pretrained(checkpoint).state_dict()
    assert all(not torch.equal(value, before[name]) for name, value in model.state_dict().items() if value.dim() > 1)
    assert main(["eval", str(run), "--json"]) == 0
    assert main(["eval", str(out), "--store", str(store), "--masked.share=0.15", "--batch.tokens_per_rank=2000"]) == 0
    assert "position of the masked token" in capsys.readouterr().out
    causal = [setting for setting in settings if not setting.startswith("--masked")]
    for command, message in (
        (["train", *causal, "--resume"], "set masked.share to train it on masked tokens"),
        (["generate", str(out), "--prompt", "a"], "predicts masked tokens and cannot continue a text"),
        (["eval", str(run), "--needle"], "--needle is for causal models"),
        (["eval", str(out), "--store", str(store)], "set masked.share to train it on masked tokens"),
        (["train", *settings, "--masked.token=<hole>", f"--train.run_dir={tmp_path / 'other'}"], "none of <hole> is in"),
    ):
        assert main(command) == 2
        assert message in capsys.readouterr().err
    assert kind in KINDS


def test_finetune_prepares_an_encoder(
    ready: tuple[str, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, checkpoint, store = ready
    given = ["finetune", str(checkpoint), str(store.parent / "texts"), "--out", str(tmp_path / "run"), "--processes", "1"]
    assert main([*given, "--prepare-only", "--masked.share=0.3", "--masked.token=<hole>"]) == 2
    assert "none of <hole> is in the vocabulary: name its mask token" in capsys.readouterr().err
    assert main([*given, "--prepare-only", "--masked.share=0.3"]) == 0
    assert "share: 0.3" in (tmp_path / "run" / "finetune.yaml").read_text("utf-8")
    assert main(["train", str(tmp_path / "run" / "finetune.yaml"), "--train.steps=1"]) == 0
    assert "AutoModelForMaskedLM.from_pretrained(" in capsys.readouterr().out


def step_with_adapters(folder: Path) -> list[float]:
    """Returns losses of two steps of LoRA on rank 0's share of the same batch, whose second shows the first's gradients."""
    trainer = make_trainer(folder, [*MASKED, "lora.rank=4", "optimizer.learning_rate=0.01"])
    batch = make_batch(dist.get_world_size(), dist.get_rank())
    found = [trainer.step(replace(batch, step=number)).loss for number in (1, 2, 3)]
    trained = {name.rpartition(".lora_")[1] for name, weight in trainer.model.named_parameters() if weight.requires_grad}
    assert trained == {".lora_"}
    return found


@pytest.mark.parametrize("kind", slow_unless(lambda kind: kind == "modernbert", KINDS))
def test_adapters_of_an_encoder(workers: Workers, checkpoints: dict[str, Path], kind: str) -> None:
    (alone,) = workers.run(step_with_adapters, 1, checkpoints[kind])
    assert alone[0] == pytest.approx(reference(checkpoints[kind])[0], rel=1e-5)
    assert alone[2] < alone[0]
    for found in workers.run(step_with_adapters, 3, checkpoints[kind]):
        assert found == pytest.approx(alone, rel=1e-5)


def test_other_models_are_refused(tmp_path: Path) -> None:
    build_model("llama", "eager").save_pretrained(tmp_path / "llama")
    build_encoder("bert", is_decoder=True).save_pretrained(tmp_path / "decoder")
    bart = transformers.BartConfig(vocab_size=64, d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16)
    transformers.BartForConditionalGeneration(bart).save_pretrained(tmp_path / "bart")
    build_encoder("bert").save_pretrained(tmp_path / "bert")
    like = "encoders like BERT, RoBERTa and ModernBERT; for a causal language model omit masked.share"
    for kind, message in (
        ("llama", rf"cannot build a model for masked tokens .* AutoModelForMaskedLM; masked tokens are predicted by {like}"),
        ("decoder", rf"BertForMaskedLM is causal \(is_decoder is set in its config\): masked tokens are predicted by {like}"),
        ("bart", f"BartForConditionalGeneration has an encoder and a decoder, .*{like}"),
    ):
        with pytest.raises(PretrainedError, match=message):
            _ = pretrained(str(tmp_path / kind), (), "auto", False, True).spec
    with pytest.raises(PretrainedError, match=r"BertLMHeadModel is an encoder, whose tokens see later ones.*set masked\.share"):
        _ = pretrained(str(tmp_path / "bert"), (), "auto", False).spec


def test_too_long_documents_are_refused(checkpoints: dict[str, Path]) -> None:
    """RoBERTa's first positions belong to padding."""
    for kind, longest in (("bert", 128), ("roberta", 126)):
        source = pretrained(str(checkpoints[kind]), (), "auto", False, True)
        source.check_length(longest)
        with pytest.raises(PretrainedError, match=f"has only {longest} position embeddings"):
            source.check_length(longest + 1)
    pretrained(str(checkpoints["modernbert"]), (), "auto", False, True).check_length(100_000)


def test_shares_of_masks_are_at_most_one_together() -> None:
    with pytest.raises(ConfigError, match="must be at most 1 together"):
        load(None, ["masked.share=0.3", "masked.random=0.7", "masked.kept=0.4"])


def test_attention_in_both_directions_costs_twice(checkpoints: dict[str, Path]) -> None:
    settings = [f"model.from_pretrained={checkpoints['bert']}", *MASKED]
    config = load(None, settings, world_size=1)
    spec = config.model_source().spec
    causal = replace(spec, causal=True)
    matrices = 6 * spec.multiplied_parameters * 500
    assert model_flops(spec, [500]) - matrices == 2 * (model_flops(causal, [500]) - matrices)
    pairs = 500 * 500  # every query and key: 2 operations for the score, 2 for the value, times 3 with backward
    assert model_flops(spec, [500]) - matrices == 12 * pairs * sum(x.num_attention_heads * x.head_dim for x in spec.layers)
    assert work_of(spec, "float32").attention == 2 * work_of(causal, "float32").attention
    windows = {layer.window for layer in pretrained(str(checkpoints["modernbert"]), (), "auto", False, True).spec.layers}
    assert windows == {None, 9}


def test_own_loops_prepare_encoders_only_as_such(checkpoints: dict[str, Path]) -> None:
    bert = build_encoder("bert")
    with pytest.raises(HuggingFaceError, match="uses a mask of bidirectional_mask_function"):
        prepare_model(bert)
    with pytest.raises(HuggingFaceError, match="uses a mask of causal_mask_function: encoders are supported only with"):
        prepare_model(build_model("llama", "eager"), causal=False)
    with pytest.raises(HuggingFaceError, match=r"pools the first row only.*add_pooling_layer=False"):
        prepare_model(bert.bert.__class__(bert.config), causal=False)
    prepare_model(bert, causal=False)
    batch = make_batch(1, 0).micro_batches[0]
    with pytest.raises(HuggingFaceError, match="target_tokens is 7, but BertForMaskedLM is an encoder, whose own loss"):
        model_inputs(bert, batch, 7)
    bert.set_attn_implementation("longctx")  # as if it were causal
    with pytest.raises(HuggingFaceError, match="uses a mask of bidirectional_mask_function"):
        bert(**model_inputs(bert, batch))
