"""Weights leave a trainer as an export writes them, bit by bit, however the model is split; no rank ever holds two groups."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from longctx.model.checkpoint_files import CheckpointFiles
from longctx.model.presets import NoNativeModel
from longctx.training import live_weights
from longctx.training.objectives.loss import log_probabilities
from longctx.training.saved.export import export
from longctx.training.trainer import Trainer
from tests.huggingface_cases import build_model
from tests.lora_cases import settings_of
from tests.marks import slow_unless
from tests.training_cases import start
from tests.workers import Workers

LORA = ["lora.rank=4", "lora.alpha=12"]
TENSOR, PIPELINE = "parallel.tensor_parallel_size=2", "parallel.pipeline_parallel_size=2"
CHUNKS = ["model.num_hidden_layers=4", "parallel.pipeline_chunks=2"]
CASES: dict[str, tuple[int, list[str], str | None]] = {
    "new, alone": (1, [], None),
    "new, three ranks": (3, ["model.tie_word_embeddings=false"], None),
    "new, tensor": (2, [TENSOR, "model.qkv_bias=true"], None),
    "new, pipeline, tied": (2, [PIPELINE, *CHUNKS], None),
    "new, pipeline": (2, [PIPELINE], None),
    "new, experts": (2, ["model.num_experts=4", "parallel.expert_parallel_size=2"], None),
    "new, tensor, pipeline": (4, [TENSOR, PIPELINE], None),
    "qwen3, native": (2, [TENSOR], "qwen3"),
    "phi3, native": (2, [PIPELINE], "phi3"),
    "mixtral, native": (2, ["parallel.expert_parallel_size=2"], "mixtral"),
    "gpt2": (2, [], "gpt2"),
    "mixtral": (2, [], "mixtral"),
    "deepseek_v3": (1, [], "deepseek_v3"),
    "llama, LoRA": (2, [*LORA, "train.dtype=bfloat16"], "llama"),
    "gpt2, LoRA": (3, [*LORA, "lora.target_modules=[c_attn]"], "gpt2"),
}
SLOW = ("new, alone", "phi3, native", "mixtral, native", "mixtral")


def held() -> dict[int, int]:
    """Bytes of all memory that tensors of this process hold, by its address."""
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter) and not each.is_meta]
    return {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}


def peak_bytes(trainer: Trainer) -> int:
    """The greatest number of bytes that tensors hold while the weights are iterated over, beside what they held before."""
    gc.collect()
    original, before, peaks = live_weights._whole, held(), list[int]()

    def note() -> None:
        peaks.append(sum(size for address, size in held().items() if address not in before))

    def watched(*given: Any) -> torch.Tensor:
        whole = original(*given)
        note()
        return whole

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live_weights, "_whole", watched)
        for _ in trainer.weights():
            note()
    return max(peaks)


def trained(store: Path, run: Path, settings: list[str]) -> dict[str, Any]:
    """On each rank, after two steps: sums of the weights, which rank 0 writes to a folder, and bytes."""
    trainer = start(store, run, ["train.steps=2", *settings])
    with trainer.loader:
        trainer.step()
        trainer.step()
        trainer.save()
        trainer.passes.look(next(trainer.loader), log_probabilities)  # which leaves parameters gathered
    names = trainer.weights()  # parameters are shards from now on
    sizes = {name: 4 * value.numel() for name, value in trainer.model.state_dict().items()}
    largest = max(sum(sizes[name] for name in group) for group in trainer.model.groups())
    kept = dict(names)
    sums = {name: float(tensor.double().sum()) for name, tensor in kept.items()}
    if dist.get_rank() == 0:
        (run / "live").mkdir()
        save_file(kept, run / "live" / "model.safetensors", metadata={"format": "pt"})
    half = {name: (tensor.dtype, tensor.double().sum()) for name, tensor in trainer.weights(torch.bfloat16)}
    assert half.keys() == kept.keys() and {dtype for dtype, _ in half.values()} == {torch.bfloat16}
    peak = peak_bytes(trainer)
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in kept.values()), "some are parts of others"
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.to_local().zero_()
    assert sums == {name: float(tensor.double().sum()) for name, tensor in kept.items()}, "they have changed with the model"
    return {"sums": sums, "peak": peak, "largest": largest, "all": sum(sizes.values())}


def contents(folder: Path) -> dict[str, torch.Tensor]:
    files = CheckpointFiles.open(str(folder))
    return {name: files.read(name) for name in files.files}


def settings_from(case: str, folder: Path) -> tuple[int, list[str]]:
    """Ranks and settings of a case; writes its checkpoint, in bfloat16."""
    ranks, settings, kind = CASES[case]
    if kind is None:
        return ranks, settings
    build_model(kind, "eager", vocab_size=260, eos_token_id=1, bos_token_id=None).to(torch.bfloat16).save_pretrained(folder)
    if kind == "deepseek_v3":  # transformers reads and writes a part of it in float32
        AutoModelForCausalLM.from_pretrained(folder, dtype="auto").save_pretrained(folder)
    from_checkpoint = [each for each in settings_of(folder) if not each.startswith("lora.")]
    return ranks, [*from_checkpoint, *settings]


@pytest.mark.parametrize("case", slow_unless(lambda case: case not in SLOW, CASES))
def test_live_weights_are_those_of_an_export(workers: Workers, store: Path, tmp_path: Path, case: str) -> None:
    ranks, settings = settings_from(case, tmp_path / "source")
    results: Any = workers.run(trained, ranks, store, tmp_path / "run", settings)
    export(tmp_path / "run", tmp_path / "out", merge="LoRA" in case)
    live = tmp_path / "run" / "live"
    (live / "config.json").write_bytes((tmp_path / "out" / "config.json").read_bytes())
    theirs, ours = contents(tmp_path / "out"), contents(live)
    assert {name: tensor.dtype for name, tensor in ours.items()} == {name: tensor.dtype for name, tensor in theirs.items()}
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    for of_rank in results:
        assert of_rank["sums"] == results[0]["sums"], "a rank has other tensors"
        assert of_rank["largest"] <= of_rank["peak"] <= 2.5 * of_rank["largest"], of_rank
    logits = []
    for folder in (live, tmp_path / "out"):
        model, report = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
        assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
        logits.append(model.eval()(torch.arange(40)[None]).logits)
    assert torch.equal(*logits)


def test_no_rank_ever_has_the_whole_model(workers: Workers, store: Path, tmp_path: Path) -> None:
    for number, split in enumerate(([], [PIPELINE])):
        for of_rank in workers.run(trained, 2, store, tmp_path / f"{number}", ["model.num_hidden_layers=12", *split]):
            assert of_rank["peak"] < of_rank["all"] / 2, of_rank


def refused(store: Path, run: Path, settings: list[str]) -> None:
    trainer = start(store, run, settings)
    trainer.loader.close()
    with pytest.raises(NoNativeModel, match="no supported family of transformers"):
        trainer.weights()


def test_a_model_that_transformers_lacks_is_refused_before_the_first_tensor(
    workers: Workers, store: Path, tmp_path: Path
) -> None:
    workers.run(refused, 2, store, tmp_path / "run", ["model.qkv_bias=true", "model.qk_norm=true", PIPELINE])
