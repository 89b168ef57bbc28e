"""RoPE in configs of transformers, to and from the options of shapes."""

import math
from typing import Any

from longctx.model.context_extension import ROPE_FIELDS
from longctx.model.presets import ModelShape, NoNativeModel

WITHOUT_EFFECT = {theirs for fields in ROPE_FIELDS.values() for theirs in fields} | {
    "factor",
    "attention_factor",
}
"""Fields that have no effect in RoPE of another type."""


def rope_of(config: Any) -> dict[str, Any]:
    """Returns the options of a shape for the RoPE of a config. Raises NoNativeModel for RoPE that
    the decoder does not have."""
    fields = dict(config.rope_parameters or {})
    older_kind = fields.pop("type", "default")
    kind = fields.pop("rope_type", older_kind)
    share = fields.pop("partial_rotary_factor", None) or 1.0
    options: dict[str, Any] = {"rope_theta": fields.pop("rope_theta")}
    if share != 1.0:
        raise NoNativeModel(
            f"rope_parameters has partial_rotary_factor {share}, and only whole heads are supported"
        )
    if kind not in ("default", "linear", "yarn", "llama3"):
        raise NoNativeModel(
            f"rope_parameters has type {kind}, and only default, linear, yarn and llama3 are "
            "supported"
        )
    if kind != "default":
        names = ROPE_FIELDS.get(kind, {})
        options |= {"rope_scaling": kind, "rope_factor": fields.pop("factor", None)}
        options |= {
            ours: fields.pop(theirs)
            for theirs, ours in names.items()
            if fields.get(theirs) is not None
        }
        if options["rope_factor"] is None or (names and "rope_original_length" not in options):
            raise NoNativeModel(
                f"rope_parameters of type {kind} lacks factor or original_max_position_embeddings"
            )
        if kind == "yarn":
            _check_yarn(fields, options["rope_factor"])
    unknown = {
        key: value
        for key, value in fields.items()
        if value is not None and key not in WITHOUT_EFFECT
    }
    if unknown:
        raise NoNativeModel(f"rope_parameters has {unknown}, which is not supported")
    return options


def _check_yarn(fields: dict[str, Any], factor: float) -> None:
    """Removes optional YaRN fields; raises NoNativeModel for values other than those of `Rope`."""
    magnitude = fields.pop("attention_factor", None)
    scales = [fields.pop(name, None) for name in ("mscale", "mscale_all_dim")]
    if magnitude is None and all(scales):
        raise NoNativeModel(
            f"rope_parameters has mscale {scales[0]} and mscale_all_dim {scales[1]}, which is not "
            "supported"
        )
    if magnitude is not None and not math.isclose(
        magnitude, 0.1 * math.log(factor) + 1, rel_tol=1e-6
    ):
        raise NoNativeModel(
            f"rope_parameters has attention_factor {magnitude}, and only 0.1 ln factor + 1 is "
            "supported"
        )
    if fields.pop("truncate", True) is False:
        raise NoNativeModel("rope_parameters has truncate False, which is not supported")


def rope_fields(shape: ModelShape) -> dict[str, Any]:
    """Returns `rope_parameters` of a config for a shape."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": shape.rope_theta}
    if shape.rope_scaling != "none":
        rope |= {"rope_type": shape.rope_scaling, "factor": shape.rope_factor}
        rope |= {
            theirs: getattr(shape, ours)
            for theirs, ours in ROPE_FIELDS.get(shape.rope_scaling, {}).items()
        }
    return rope
