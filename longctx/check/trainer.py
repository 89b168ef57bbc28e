"""Trainer adapter: one optimizer step of a transformers.Trainer, or of a class that inherits from
it, as a `Step`."""

import tempfile
from typing import Any

import torch
from transformers import PrinterCallback, TrainerCallback
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from .aim import Aim
from .errors import CheckError
from .preference import Preference
from .probe import Probe
from .recording import Recorder, Step, record
from .tensors import whole
from .watched import is_watchable

OUT_OF_REACH = 1e30
"""Limit of the gradient norm, so that nothing is clipped and the norm is logged."""


class _Look(TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
    """Takes the step of a trainer: before it clips by accelerate, or else before the optimizer."""

    def __init__(self, seen: Recorder, accelerator: Any, asked: dict[str, float | None]) -> None:
        """`asked`: settings of the optimizer."""
        self.seen = seen
        self.step: Step | None = None
        self._asked = asked
        self._accelerator = accelerator
        self._clip = accelerator.clip_grad_norm_
        self._model: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._model = given["model"]
        if self._accelerator.scaler is not None:
            return  # gradients are scaled until accelerate clips them
        if is_watchable(given["optimizer"]):
            self.seen.watch(given["optimizer"], model=self._model, **self._asked)
            self._accelerator.clip_grad_norm_ = self._clip_as_asked

    def _clip_as_asked(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clips gradients to the limit that the user has in place of the one out of reach."""
        if max_norm != OUT_OF_REACH:
            return self._clip(parameters, max_norm, norm_type)
        self.step = self.seen.step(model=self._model)
        return self._clip(parameters, self._asked["max_norm"] or OUT_OF_REACH, norm_type)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.step is None:
            self.step = self.seen.step(model=given["model"])


def step_of(trainer: Any, probe: Probe, aim: Aim | None = None) -> Step:
    """Trains one step, without saving or evaluating; `aim`: what it should make more likely, where
    the trainer does not tell. Raises CheckError for what would make it another objective, or
    noise."""
    _refuse(trainer)
    args = trainer.args
    asked = _asked(trainer)
    if aim is None:
        aim = _aim_of(trainer)
    rows = list[torch.Tensor]()
    args.max_steps = 1
    args.logging_steps = 1
    args.logging_strategy = IntervalStrategy.STEPS
    args.save_strategy = SaveStrategy.NO
    args.eval_strategy = IntervalStrategy.NO
    args.max_grad_norm = OUT_OF_REACH
    args.report_to = []
    args.dataloader_num_workers = 0
    args.dataloader_prefetch_factor = None
    args.dataloader_persistent_workers = False
    collate = trainer.data_collator

    def collated(features: Any) -> Any:
        batch = collate(features)
        if "input_ids" in batch:  # else it is made later, as from what a model samples
            rows.append(whole(batch["input_ids"]).cpu())
        return batch

    trainer.data_collator = collated
    model = trainer.accelerator.unwrap_model(trainer.model)
    with record(model) as seen:
        trainer.remove_callback(PrinterCallback)
        look = _Look(seen, trainer.accelerator, asked)
        trainer.add_callback(look)
        trainer.train()
    if look.step is None:
        raise CheckError(f"probe {probe.name!r}: the trainer made no optimizer step")
    logged = {
        name: value
        for entry in reversed(trainer.state.log_history)
        for name, value in entry.items()
    }
    look.step.loss = logged.get("loss")
    look.step.grad_norm = logged.get("grad_norm")
    look.step.rows = rows
    look.step.aim = aim
    return look.step


def _aim_of(trainer: Any) -> Aim:
    """Returns what a trainer's step should make more likely. Raises CheckError for objectives of
    TRL's DPOTrainer without weights of pairs, and for policies, whose advantages are the user's."""
    names = {each.__name__ for each in type(trainer).__mro__}
    policies = names & {"GRPOTrainer", "RLOOTrainer"}
    if policies:
        how = f"return {__name__}.step_of(trainer, probe, Policy(..))"
        raise CheckError(f"{policies.pop()} does not tell its advantages: {how}")
    if "DPOTrainer" not in names:
        return Aim()
    others = {
        "loss_type is not sigmoid": trainer.loss_types != ["sigmoid"],
        "label_smoothing is set": trainer.label_smoothing,
        "f_divergence_type is not reverse_kl": trainer.f_divergence_type != "reverse_kl",
        "ld_alpha is set": trainer.ld_alpha is not None,
        "use_weighting is set": trainer.use_weighting,
        "an adapter is the reference": "ref" in getattr(trainer.model, "peft_config", {}),
    }
    found = [words for words, value in others.items() if value]
    if found:
        raise CheckError("; ".join(found) + ": pairs are judged by the sigmoid loss alone")
    reference = trainer.ref_model
    if reference is not None:
        reference = trainer.accelerator.unwrap_model(reference)
    return Preference(trainer.beta, reference)


def _asked(trainer: Any) -> dict[str, float | None]:
    """Returns the settings that the optimizer should have by the trainer's arguments."""
    args = trainer.args
    asked: dict[str, float | None] = {"max_norm": args.max_grad_norm or None}
    if trainer.optimizer is None:  # else it is the user's own
        asked |= {"lr": args.learning_rate, "weight_decay": args.weight_decay}
    return asked


def _refuse(trainer: Any) -> None:
    args = trainer.args
    refused = {
        "label_smoothing_factor is above 0": args.label_smoothing_factor,
        "neftune_noise_alpha is set": args.neftune_noise_alpha,
        "compute_loss_func is set: another objective": trainer.compute_loss_func,
        "DeepSpeed keeps gradients where no hook sees them": trainer.is_deepspeed_enabled,
    }
    if found := [words for words, value in refused.items() if value]:
        raise CheckError("; ".join(found) + ": switch it off for the check")


def arguments(**given: Any) -> dict[str, Any]:
    """Returns arguments of TrainingArguments, or of a config of TRL, for one small step on a CPU;
    `given` ones come first."""
    one_step = {
        "output_dir": tempfile.mkdtemp(),
        "max_steps": 1,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    quiet = {"report_to": [], "disable_tqdm": True}
    return one_step | quiet | {"use_cpu": True, "bf16": False, "learning_rate": 1e-3} | given
