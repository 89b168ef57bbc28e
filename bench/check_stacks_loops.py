"""Trainers that leave the model or the loop to others, for `bench.check_stacks`: NeMo Automodel,
torchtune, Lightning, accelerate.

What packs, masks, counts and accumulates is theirs; the few lines of a recipe around it are as in
the recipe that the docstring names.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from bench.check_stacks import Make, padded, ranks
from bench.check_stacks_rings import IGNORED, WINDOW, connect
from longctx.check import Probe, Step, record
from longctx.check.recording import Recorder, reference_of

LENGTH = 64
"""Of packed rows."""
Batch = dict[str, Any]


def add_up_over(parameters: Any, factor: float) -> None:
    """Sums the gradients of all ranks, if there are several, and multiplies them by a factor."""
    for weight in parameters:
        if ranks() > 1:
            dist.all_reduce(weight.grad)
        weight.grad *= factor


def of_all_ranks(number: int) -> int:
    """Returns the sum of a number over ranks."""
    total = torch.tensor(number)
    if ranks() > 1:
        dist.all_reduce(total)
    return int(total)


def parts(rows: Sequence[Any], probe: Probe) -> list[list[Any]]:
    """Returns a rank's rows of each micro-batch."""
    rank, everyone = connect()
    mine = list(rows[rank::everyone])
    size = -(-len(mine) // probe.micro_batches)
    return [mine[first : first + size] for first in range(0, len(mine), size)]


# --- NeMo Automodel


def automodel(attention: str, kind: str = "llama", **sizes: Any) -> Make:
    """Neat packing, as in recipes/llm/train_ft.py: labels are shifted before documents are
    packed."""

    def make(probe: Probe) -> Step:
        from nemo_automodel.components.datasets.llm.neat_packing import neat_pack_dataset
        from nemo_automodel.components.datasets.utils import neat_packed_collater
        from nemo_automodel.components.loss.masked_ce import MaskedCrossEntropy
        from nemo_automodel.components.models.common.packing import configure_packing

        model = probe.model(kind, **sizes)
        model.set_attn_implementation(attention)
        samples = [
            {"input_ids": row["input_ids"], "labels": [*row["labels"][1:], IGNORED]}
            for row in probe.rows
        ]
        packs = neat_pack_dataset(samples, split=None, pack_size=LENGTH, padding_idx=probe.pad)
        contract = configure_packing(attention, model=model)
        batches = [
            neat_packed_collater(rows, packing=contract) for rows in parts(list(packs), probe)
        ]
        mine = sum(int((batch["labels"] != IGNORED).sum()) for batch in batches)
        targets = of_all_ranks(mine)
        objective = MaskedCrossEntropy()
        with record(model) as seen:
            for batch in batches:
                labels = batch.pop("labels")
                batch.pop("_packed_seq_ids", None)
                logits = model(**batch, use_cache=False).logits
                objective(logits, labels, num_label_tokens=targets).backward()
            add_up_over(model.parameters(), 1.0)
            return seen.step()

    return make


AUTOMODEL: dict[str, Make] = {
    "NeMo Automodel, neat packing, SDPA, Llama": automodel("sdpa"),
    "NeMo Automodel, neat packing, SDPA, Mistral with windows": automodel(
        "sdpa", "mistral", sliding_window=WINDOW
    ),
    "NeMo Automodel, neat packing, SDPA, Gemma 3": automodel(
        "sdpa", "gemma3_text", sliding_window=WINDOW
    ),
    "NeMo Automodel, neat packing, eager, Llama": automodel("eager"),
}


# --- torchtune


def torchtune(pack: bool) -> Make:
    """recipes/full_finetune_single_device.py, and full_finetune_distributed.py on several ranks,
    with a Llama 3 of torchtune."""

    def make(probe: Probe) -> Step:
        from torchtune.data import padded_collate_packed, padded_collate_sft
        from torchtune.datasets import PackedDataset
        from torchtune.models.convert_weights import hf_to_tune, tune_to_hf
        from torchtune.models.llama3 import llama3
        from torchtune.modules.loss import CEWithChunkedOutputLoss
        from torchtune.training import scale_grads

        llama = probe.model("llama")
        config = llama.config
        heads = {"num_heads": config.num_attention_heads, "dim": config.hidden_size}
        heads["num_kv_heads"] = config.num_key_value_heads
        model = llama3(
            vocab_size=config.vocab_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            embed_dim=config.hidden_size,
            max_seq_len=4 * LENGTH,
            rope_base=config.rope_parameters["rope_theta"],
            intermediate_dim=config.intermediate_size,
            norm_eps=config.rms_norm_eps,
        )
        model.load_state_dict(hf_to_tune(llama.state_dict(), **heads))
        samples: Any = [{"tokens": row["input_ids"], "labels": row["labels"]} for row in probe.rows]
        collate: Callable[..., Batch] = padded_collate_sft
        if pack:
            samples = PackedDataset(samples, max_seq_len=LENGTH, padding_idx=probe.pad)
            collate = padded_collate_packed
        objective = CEWithChunkedOutputLoss()
        model.set_num_output_chunks(objective.num_output_chunks)
        calls = []
        counted = 0
        for rows in parts([samples[number] for number in range(len(samples))], probe):
            batch = collate(rows)
            labels = batch.pop("labels")
            targets = int((labels != objective.ignore_index).sum())
            counted += targets
            shifted = torch.hstack([labels[..., 1:], torch.full((len(labels), 1), IGNORED)])
            calls.append(batch["tokens"])
            (objective(model(**batch), shifted) * targets).backward()
        add_up_over(model.parameters(), 1.0)
        scale_grads(model, torch.tensor(1 / of_all_ranks(counted)))
        found = {name: weight.grad for name, weight in model.named_parameters()}
        return Step(reference_of(llama), tune_to_hf(found, **heads), calls)

    return make


TORCHTUNE: dict[str, Make] = {
    "torchtune, padded": torchtune(False),
    "torchtune, `PackedDataset`": torchtune(True),
}


# --- Lightning


def lightning() -> Make:
    """A LightningModule that returns the model's loss, `accumulate_grad_batches`, and DDP on several
    ranks."""

    def make(probe: Probe) -> Step:
        from lightning import LightningModule, Trainer
        from torch.utils.data import DataLoader

        model = probe.model("qwen3")

        class Module(LightningModule):  # type: ignore[misc]  # Lightning has no types here
            step: Step

            def __init__(self, seen: Recorder) -> None:
                super().__init__()
                self.model = model
                self.seen = seen

            def training_step(self, batch: Batch) -> torch.Tensor:
                loss: torch.Tensor = self.model(**batch, use_cache=False).loss
                return loss

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.SGD(self.model.parameters(), lr=0.0)

            def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
                self.step = self.seen.step()

        size = len(probe.rows) // probe.micro_batches // ranks()
        loader = DataLoader(probe.rows, size, collate_fn=padded()(probe))
        trainer = Trainer(
            max_steps=1,
            accumulate_grad_batches=probe.micro_batches,
            accelerator="cpu",
            devices=ranks(),
            strategy="ddp" if ranks() > 1 else "auto",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        with record(model) as seen:
            module = Module(seen)
            trainer.fit(module, loader)
        return module.step

    return make


LIGHTNING: dict[str, Make] = {"Lightning, the model's loss": lightning()}


# --- accelerate


def accelerate(over_all: bool) -> Make:
    """`accumulate` and `backward`: of the model's loss, or as its guide of gradient accumulation
    divides by the targets of all micro-batches and ranks."""

    def make(probe: Probe) -> Step:
        from accelerate import Accelerator
        from torch.nn.functional import cross_entropy
        from torch.utils.data import DataLoader

        accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=probe.micro_batches, mixed_precision="no"
        )
        plain = probe.model("qwen3")
        size = len(probe.rows) // probe.micro_batches // accelerator.num_processes
        with record(plain) as seen:
            loader = DataLoader(probe.rows, size, collate_fn=padded()(probe))
            model, loader = accelerator.prepare(plain, loader)
            mine = sum((batch["labels"][:, 1:] != IGNORED).sum() for batch in loader)
            targets = accelerator.gather(torch.as_tensor(mine)).sum()
            for batch in loader:
                with accelerator.accumulate(model):
                    output = model(**batch, use_cache=False)
                    loss = output.loss
                    if over_all:
                        logits = output.logits[:, :-1].flatten(0, 1)
                        labels = batch["labels"][:, 1:].flatten()
                        total = cross_entropy(logits, labels, reduction="sum")
                        factor = accelerator.num_processes * probe.micro_batches
                        loss = total * factor / targets
                    accelerator.backward(loss)
            return seen.step()

    return make


ACCELERATE: dict[str, Make] = {
    "accelerate, `backward` of the model's loss": accelerate(False),
    "accelerate, its guide's loss over all targets": accelerate(True),
}
