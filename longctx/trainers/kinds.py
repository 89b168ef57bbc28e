"""Kinds of trainers, by what their loss needs. A new trainer of TRL is added to KINDS."""

from typing import Any, Literal

from longctx.hf.vision import is_vision

Kind = Literal["steps", "sequences", "rows"]
"""The loss is a sum over tokens, so whole steps are planned; or it needs values of whole sequences, by TRL's fused head, or
outputs of whole rows, so every call of the model is planned."""
KINDS: dict[str, Kind] = {
    "SFTTrainer": "steps",
    "DPOTrainer": "sequences",
    "GRPOTrainer": "sequences",
    "RLOOTrainer": "sequences",
    "KTOTrainer": "sequences",
    "RewardTrainer": "rows",
}
"""Trainers of TRL. `transformers.Trainer` is of "steps", or of "rows" if its loss is another head's or its own."""
OTHER_HEADS = ("Classification", "ForQuestionAnswering", "ForMultipleChoice", "ForPreTraining", "ForNextSentencePrediction")
"""Ends of the names of models whose loss is not one of the next token, or of masked ones."""
LOSS = ("compute_loss", "training_step")
"""Methods of a subclass that are called for every micro-batch."""


def kind_of(trainer: Any, own_loss_is_a_token_sum: bool) -> Kind:
    """Returns the kind of a trainer; of one that is not supported, "steps"."""
    if name := trainer_of_trl(trainer):
        return KINDS.get(name, "steps")
    model = prepared_part(trainer, trainer.model)
    if model.config.is_encoder_decoder or is_vision(model):
        return "steps"
    own = not own_loss_is_a_token_sum and any(is_own(trainer, name) for name in LOSS)
    other = type(model).__name__.endswith(OTHER_HEADS) or model.base_model is model
    return "rows" if own or other or trainer.compute_loss_func is not None else "steps"


def has_loss_of_head(trainer: Any) -> bool:
    """Returns whether a loss is the mean that a head of transformers takes over the labels of a batch."""
    head = type(prepared_part(trainer, trainer.model)).__name__
    own = is_own(trainer, "compute_loss") or trainer.compute_loss_func is not None or trainer_of_trl(trainer)
    return head.endswith(OTHER_HEADS) and not own


def trainer_of_trl(trainer: Any) -> str | None:
    """Returns the name of the trainer of TRL that a trainer is or extends; None for others."""
    of_trl = (kind.__name__ for kind in type(trainer).__mro__ if kind.__module__.startswith("trl."))
    return next((name for name in of_trl if not name.startswith("_")), None)


def prepared_part(trainer: Any, model: Any) -> Any:
    """Returns the model of transformers inside a model of the trainer and its adapters."""
    inner = trainer.accelerator.unwrap_model(model)
    return inner.get_base_model() if hasattr(inner, "peft_config") else inner


def is_own(trainer: Any, name: str) -> bool:
    method = getattr(trainer, name, None)
    return method is not None and getattr(method, "__module__", "").split(".")[0] not in ("transformers", "trl")
