"""Objectives of checkpoints of transformers: the class that builds a model for next or masked tokens, and whether it fits."""

from typing import Any

from longctx.model.checkpoint_files import CheckpointFiles, PretrainedError
from longctx.model.vision import VISION_FAMILIES

ENCODERS = (
    "masked tokens are predicted by encoders like BERT, RoBERTa and ModernBERT; for a causal language model omit masked.share"
)


def auto_class(files: CheckpointFiles) -> tuple[Any, str]:
    """Returns the class of transformers that builds the model of a checkpoint, and what it builds."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

    if files.masked:
        return AutoModelForMaskedLM, "a model for masked tokens"
    if files.seq2seq:
        return AutoModelForSeq2SeqLM, "an encoder-decoder"
    if files.config.model_type in VISION_FAMILIES:
        return AutoModelForImageTextToText, "a vision-language model"
    return AutoModelForCausalLM, "a causal language model"


def other_objective(files: CheckpointFiles) -> str:
    """Returns the end of a sentence on a checkpoint that cannot be built, if it is one for the other objective; else ""."""
    from transformers.models.auto import modeling_auto

    kind: str = files.config.model_type
    if files.masked:
        return f"; {ENCODERS}" if kind in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else ""
    if kind in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES and kind not in VISION_FAMILIES:
        return f"; it reads images, and of such models only {', '.join(VISION_FAMILIES)} are supported"
    encoder = kind in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return "; it is an encoder: set masked.share to train it on masked tokens" if encoder else ""


def check_direction(model: Any, files: CheckpointFiles) -> None:
    """Raises PretrainedError for an encoder that is to predict next tokens, and for other models that are to predict masked.

    Layers that do not say their direction are left to the check of the model with its weights.
    """
    name, flags = type(model).__name__, {getattr(module, "is_causal", None) for module in model.modules()} - {None}
    if files.masked and model.config.is_encoder_decoder:
        raise PretrainedError(f"{name} has an encoder and a decoder, of which only one could be trained: {ENCODERS}")
    if files.seq2seq or flags != {files.masked}:
        return
    if files.masked:
        raise PretrainedError(f"{name} is causal (is_decoder is set in its config): {ENCODERS}")
    raise PretrainedError(
        f"{name} is an encoder, whose tokens see later ones, so it cannot predict next tokens: set masked.share to train it on "
        "masked tokens"
    )
