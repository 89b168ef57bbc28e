"""RoPE in configs of transformers, to and from the options of shapes."""

import math
from collections.abc import Mapping
from typing import Any

from longctx.model.context_extension import ROPE_FIELDS
from longctx.model.presets import ModelShape, NoNativeModel

WITHOUT_EFFECT = {theirs for fields in ROPE_FIELDS.values() for theirs in fields} | {"factor", "attention_factor"}
"""Fields that have no effect in RoPE of another type."""


def rope_of(config: Any, *, local: bool, partial: bool, windows: bool) -> dict[str, Any]:
    """Returns the options of a shape for the RoPE of a config.

    `local`: whether layers with a window have their own RoPE; `partial`: whether it may rotate a part of a head; `windows`:
    whether there are layers with a window. Raises NoNativeModel for RoPE that the native decoder does not have.
    """
    parameters = dict(config.rope_parameters or {})
    if not local:
        return _options(config, parameters, partial)
    options = _options(config, parameters.pop("full_attention"), partial)
    local_fields = dict(parameters.pop("sliding_attention"))
    if parameters:
        raise NoNativeModel(f"rope_parameters has {', '.join(sorted(parameters))}, which is not supported")
    if not windows:
        return options
    kind, theta = local_fields.pop("rope_type", "default"), local_fields.pop("rope_theta")
    if kind != "default" or local_fields:
        raise NoNativeModel(
            f"rope_parameters of sliding_attention has type {kind} with {sorted(local_fields)}, and only default is supported"
        )
    return {**options, "rope_local_theta": theta}


def _options(config: Any, parameters: Mapping[str, Any], partial: bool) -> dict[str, Any]:
    fields = dict(parameters)
    older_kind = fields.pop("type", "default")
    kind, share = fields.pop("rope_type", older_kind), fields.pop("partial_rotary_factor", None) or 1.0
    options: dict[str, Any] = {"rope_theta": fields.pop("rope_theta"), "partial_rotary_factor": share}
    if share != 1.0 and not partial:
        raise NoNativeModel(f"rope_parameters has partial_rotary_factor {share}, which {config.model_type} does not use")
    if kind not in ("default", "linear", "yarn", "llama3"):
        raise NoNativeModel(f"rope_parameters has type {kind}, and only default, linear, yarn and llama3 are supported")
    if kind != "default":
        names = ROPE_FIELDS.get(kind, {})
        options |= {"rope_scaling": kind, "rope_factor": fields.pop("factor", None)}
        options |= {ours: fields.pop(theirs) for theirs, ours in names.items() if fields.get(theirs) is not None}
        if options["rope_factor"] is None or (names and "rope_original_length" not in options):
            raise NoNativeModel(f"rope_parameters of type {kind} lacks factor or original_max_position_embeddings")
        if kind == "yarn":
            _check_yarn(fields, options["rope_factor"])
    unknown = {key: value for key, value in fields.items() if value is not None and key not in WITHOUT_EFFECT}
    if unknown:
        raise NoNativeModel(f"rope_parameters has {unknown}, which is not supported")
    return options


def _check_yarn(fields: dict[str, Any], factor: float) -> None:
    """Removes optional YaRN fields; raises NoNativeModel for values other than those of `Rope`."""
    magnitude, scales = fields.pop("attention_factor", None), [fields.pop(name, None) for name in ("mscale", "mscale_all_dim")]
    if magnitude is None and all(scales):
        raise NoNativeModel(f"rope_parameters has mscale {scales[0]} and mscale_all_dim {scales[1]}, which is not supported")
    if magnitude is not None and not math.isclose(magnitude, 0.1 * math.log(factor) + 1, rel_tol=1e-6):
        raise NoNativeModel(f"rope_parameters has attention_factor {magnitude}, and only 0.1 ln factor + 1 is supported")
    if fields.pop("truncate", True) is False:
        raise NoNativeModel("rope_parameters has truncate False, which is not supported")


def rope_fields(shape: ModelShape, *, local: bool, partial: bool) -> dict[str, Any]:
    """Returns `rope_parameters` of a config for a shape; the arguments are those of `rope_of`."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": shape.rope_theta}
    if shape.rope_scaling != "none":
        rope |= {"rope_type": shape.rope_scaling, "factor": shape.rope_factor}
        rope |= {theirs: getattr(shape, ours) for theirs, ours in ROPE_FIELDS.get(shape.rope_scaling, {}).items()}
    if partial:
        rope["partial_rotary_factor"] = shape.partial_rotary_factor
    if not local:
        return rope
    of_windows = {"rope_type": "default", "rope_theta": shape.rope_local_theta or shape.rope_theta}
    return {"full_attention": rope, "sliding_attention": of_windows}
