"""A Trainer of Lightning 2.6: longctx check-step FILE --processes 2."""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from longctx.check import Probe, Step, record
from longctx.check.loop import padded_batches, place, targets_of
from longctx.check.recording import Recorder


class Module(LightningModule):
    # PUT YOURS HERE: your module, with `on_before_optimizer_step` as it is here.

    def __init__(self, model: Any, scale: float, seen: Recorder) -> None:
        super().__init__()
        self.model = model
        self.scale = scale
        self.seen = seen

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        labels = batch.pop("labels")
        logits = self.model(**batch, use_cache=False).logits
        losses = cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
        )
        return losses * self.scale

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.step = self.seen.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make(probe: Probe) -> Step:
    _, ranks = place()

    # PUT YOURS HERE: a small model of your type, as transformers call it, such as "gemma3_text".
    model = probe.model("llama")

    # PUT YOURS HERE: the micro-batches of this rank, from `probe.rows`, with your collator.
    batches = padded_batches(probe)

    # Lightning takes the mean over ranks, and that over micro-batches.
    scale = ranks * probe.micro_batches / targets_of(batches)
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        use_distributed_sampler=False,
        max_steps=1,
        accumulate_grad_batches=probe.micro_batches,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with record(model) as seen:  # before anything wraps the model
        module = Module(model, scale, seen)
        trainer.fit(module, DataLoader(batches, batch_size=None))
    return module.step
