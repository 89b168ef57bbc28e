"""Steps on checkpoints whose vocabulary is extended, over several ranks, and the same in plain
transformers."""

from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel

from longctx.config import load
from longctx.data.packing import StepBatch, pack_documents
from longctx.hf.model import OURS
from longctx.model.pretrained_decoder import PretrainedDecoder
from longctx.parallel.mesh import make_groups
from longctx.training.build import sizes_of_groups
from longctx.training.trainer import Trainer
from tests.data_cases import placed_plan
from tests.huggingface_cases import LENGTHS, SIZE, make_documents, unpacked
from tests.native_cases import everyones
from tests.pretrained_cases import PLACEMENTS_OF, SETTINGS, Step
from tests.training_cases import whole

OLD, ENTRIES = SIZE["vocab_size"], SIZE["vocab_size"] + 3


def documents() -> list[torch.Tensor]:
    """Every seventh token is a new one."""
    made = make_documents()
    for document in made:
        document[::7] = OLD + document[::7] % (ENTRIES - OLD)
    return made


def resized(folder: Path) -> PreTrainedModel:
    """The checkpoint, extended by transformers, with the mean of the old rows in the new ones."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    model.resize_token_embeddings(ENTRIES, mean_resizing=False)
    with torch.no_grad():
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            module.weight[OLD:] = module.weight[:OLD].mean(0)
    return model.eval()


def reference(folder: Path) -> Step:
    """Loss, gradients and weights of one process."""
    model = resized(folder)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    loss, gradients = unpacked(model, documents())
    return loss, dict(zip(dict(model.named_parameters()), gradients, strict=True)), weights


def step(folder: Path, settings: list[str]) -> Step:
    """The same on each rank of the trainer."""
    given = [
        *SETTINGS,
        f"model.from_pretrained={folder}",
        "model.new_tokens=[<a>, <b>, <c>]",
        *settings,
    ]
    config = load(None, given, world_size=dist.get_world_size())
    mesh = make_groups(torch.device("cpu"), timeout_s=60.0, **sizes_of_groups(config))
    trainer = Trainer.of(config, mesh, config.model_source(ENTRIES))
    weights = _everyones(
        trainer, {name: whole(weight).clone() for name, weight in trainer.model.named_parameters()}
    )
    plan = placed_plan(LENGTHS, mesh.ranks, PLACEMENTS_OF[mesh.ranks])
    micro_batches, targets = pack_documents(
        plan, mesh.rank, documents(), pad_to_multiple_of=mesh.tensor.size()
    )
    batch = StepBatch(
        1, plan, tuple(map(str, range(len(LENGTHS)))), sum(LENGTHS), targets, tuple(micro_batches)
    )
    losses = trainer.runner.forward_backward(batch)
    loss = float(mesh.gather([float(losses.double().sum()) if mesh.counts else 0.0]).sum())
    return (
        loss,
        _everyones(
            trainer, {name: whole(each.grad) for name, each in trainer.model.named_parameters()}
        ),
        weights,
    )


def _everyones(trainer: Trainer, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors of all ranks by the names of transformers."""
    if isinstance(trainer.model, PretrainedDecoder):
        return everyones(trainer.model, tensors)
    return {name.removeprefix(OURS): tensor for name, tensor in tensors.items()}
