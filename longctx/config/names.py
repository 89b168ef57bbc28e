"""Names of settings, and those that somebody who writes another name has probably meant."""

import difflib
from collections.abc import Iterator

from pydantic.fields import FieldInfo

from longctx.config.run import SECTIONS
from longctx.config.settings import Keyed

SETTINGS: dict[str, FieldInfo] = {
    f"{section}.{key}": setting
    for section, kind in SECTIONS.items()
    for key, setting in kind.model_fields.items()
}
"""All settings by dotted name."""
MAPPINGS: dict[str, type[Keyed]] = {
    name: setting.annotation
    for name, setting in SETTINGS.items()
    if isinstance(setting.annotation, type) and issubclass(setting.annotation, Keyed)
}
"""Settings that are mappings, such as model.rope_scaling, with the class of their keys."""


def _fields() -> Iterator[tuple[str, FieldInfo]]:
    """Yields every setting, and behind a mapping its keys, by dotted name."""
    for name, setting in SETTINGS.items():
        yield name, setting
        if name in MAPPINGS:
            for key, field in MAPPINGS[name].model_fields.items():
                yield f"{name}.{key}", field


FIELDS = dict(_fields())
"""All settings, and the keys of mappings, such as model.rope_scaling.factor, by dotted name."""
ALIASES = {
    other: ours
    for ours, others in {
        "optimizer.learning_rate": "lr",
        "train.dtype: bfloat16": "bf16 fp16 mixed_precision",
        "train.recompute": "gradient_checkpointing activation_checkpointing",
        "batch.tokens_per_rank": "micro_batch_size per_device_train_batch_size",
        "batch.global_tokens": "batch_size global_batch_size train_batch_size "
        "gradient_accumulation_steps",
        "data.max_length": "seq_len seq_length sequence_len max_seq_length max_seq_len",
        "train.epochs": "num_epochs num_train_epochs",
        "checkpoint.every": "save_steps save_interval",
        "lora.rank": "r lora_r lora_rank",
        "context.degree": "cp_size context_parallel_size",
    }.items()
    for other in others.split()
}
"""Names in other programs → our settings."""


def split_name(parts: list[str]) -> tuple[str, list[str]]:
    """Splits the path to a value into the dotted name of its section, setting or key of a mapping,
    and the path inside that."""
    depth = 2
    if ".".join(parts[:2]) in MAPPINGS:
        depth = 3
    return ".".join(parts[:depth]), parts[depth:]


def setting_of(name: str) -> str | None:
    """Returns the setting with this name in some section, the key with this name of a mapping, or
    the setting that is called so in another program; None if there is none."""
    for known in FIELDS:
        if known.rpartition(".")[2] == name:
            return known
    return ALIASES.get(name)


def suggestion(name: str) -> str:
    """Suggests the section, setting or key that was probably meant by an unknown dotted name,
    otherwise lists the valid ones."""
    path, _, last = name.rpartition(".")
    if home := setting_of(last):
        return f"did you mean {home}?"
    section = name.partition(".")[0]
    if section not in SECTIONS:
        near = difflib.get_close_matches(section, SECTIONS, n=1)
        if near:
            return f"did you mean section {near[0]}?"
        return f"sections are {', '.join(SECTIONS)}"
    siblings = [known for known in FIELDS if known.rpartition(".")[0] == path]
    keys = [known.rpartition(".")[2] for known in siblings]
    near = difflib.get_close_matches(last, keys, n=1)
    if near:
        return f"did you mean {path}.{near[0]}?"
    if path in MAPPINGS:
        return f"keys of {path} are {', '.join(keys)}"
    near = difflib.get_close_matches(name, FIELDS, n=1)
    if near:
        return f"did you mean {near[0]}?"
    return f"section {section} has {', '.join(keys)}"
