"""Explains why a value that was read cannot be a setting."""

import difflib
import re
from typing import Any

from pydantic_core import ErrorDetails

from longctx.config.names import FIELDS, MAPPINGS, split_name, suggestion
from longctx.config.problems import Problem, yaml_text
from longctx.config.removed import REMOVED, scaling_of_kind
from longctx.paths import PathError

_BY_ONE_CALL = "by longctx.trainers.dynamic_context_parallel: docs/trainers.md"
ELSEWHERE = {
    "dpo": f"preference tuning runs inside TRL's DPOTrainer, {_BY_ONE_CALL}",
    "policy": f"policy gradients run inside TRL's GRPOTrainer or RLOOTrainer, {_BY_ONE_CALL}",
    "masked": f"masked tokens are learnt inside transformers.Trainer, {_BY_ONE_CALL}",
    "images": f"images and videos are read inside Trainer and SFTTrainer, {_BY_ONE_CALL}",
    "encoder": "encoders run inside transformers.Trainer, encoder-decoders inside Seq2SeqTrainer, "
    f"{_BY_ONE_CALL}",
    "train.freeze": "freeze parameters by requires_grad_(False) inside Trainer or SFTTrainer, "
    f"{_BY_ONE_CALL}",
    "lora.dora": f"DoRA is peft's, inside Trainer or SFTTrainer, {_BY_ONE_CALL}",
    "lora.target_parameters": "adapters of stacked experts are peft's, inside Trainer or "
    f"SFTTrainer, {_BY_ONE_CALL}",
    "lora.dropout": "its random numbers, and so the loss, would depend on how documents are split: "
    "omit it",
    "data.rollouts": "policy gradients run inside TRL's GRPOTrainer or RLOOTrainer, "
    f"{_BY_ONE_CALL}",
}
"""Sections and settings that people look for → where their job runs."""


def explain(details: ErrorDetails) -> Problem:
    """Returns the problem of a value that pydantic refuses."""
    parts = [str(part) for part in details["loc"]]
    parts = [part for part in parts if not part.startswith("<")]  # tags of kinds
    name, inside = split_name(parts)
    value = details["input"]
    if details["type"] == "extra_forbidden":
        return _unknown(name, inside, value)
    if name not in FIELDS:
        fix = f"write {name}: {{key: value}}"
        return Problem(name, value, "a section must be a mapping of settings", fix)
    if name in MAPPINGS:
        return _no_mapping(name, value)
    return _invalid(name, inside, details)


def _unknown(name: str, inside: list[str], value: Any) -> Problem:
    """Returns the problem of a name that no section, setting or key has."""
    section, _, key = name.partition(".")
    if inside:
        *path, last = inside
        where = f" (at {'.'.join(path)})" if path else ""
        fix = f"see `longctx config {section}`: {FIELDS[name].description}"
        return Problem(name, value, f"unknown key {last}{where}", fix)
    if name in REMOVED:
        return Problem(name, value, "this setting is gone", REMOVED[name].fix(value))
    elsewhere = ELSEWHERE.get(name) or ELSEWHERE.get(section)
    if elsewhere is not None:
        return Problem(name, value, "not a part of longctx train", elsewhere)
    if (key or section).isdecimal():
        fix = "if it is a row of context.bins, indent it further than `bins:`; otherwise remove it"
        return Problem(name, value, "a number is not the name of a setting", fix)
    if name.rpartition(".")[0] in MAPPINGS:
        return Problem(name, value, "unknown key", suggestion(name))
    return Problem(name, value, "unknown setting", suggestion(name))


def _no_mapping(name: str, value: Any) -> Problem:
    """Returns the problem of a setting that has keys of its own, where the value is no mapping."""
    fix = f"the default is {{}} ({FIELDS[name].description})"
    if name == "model.rope_scaling" and isinstance(value, str):
        fix = f"set {name} to {yaml_text(scaling_of_kind(value))}"
    return Problem(name, value, "must be a mapping", fix)


def _invalid(name: str, inside: list[str], details: ErrorDetails) -> Problem:
    """Returns the problem of a value of the wrong type, or out of bounds."""
    value = details["input"]
    context = details.get("ctx", {})
    error = context.get("error")
    if isinstance(error, PathError):
        return Problem(name, value, error.rule, error.way_out)
    if details["type"] == "path_type":
        rule = "must be a path"
    else:
        rule = details["msg"].replace("Input should", "must")
    if inside:
        rule += f" (at {'.'.join(inside)})"
    field = FIELDS[name]
    fix = f"the default is {yaml_text(field.default)} ({field.description})"
    choices = re.findall(r"'([^']*)'", context.get("expected", ""))
    near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.5)
    if near:
        fix = f"did you mean {near[0]}? {fix}"
    return Problem(name, value, rule, fix)
