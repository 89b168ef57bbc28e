"""Families of transformers models that the native decoder can run: translates configs to shapes,
and tensor names to ours.

Every field of a config is either translated, or known not to change the model's function, or at the
default of its class; otherwise the model is refused. Tensors are renamed, and fused ones are split
by rows: no value is computed, so that reading and writing a checkpoint keeps every bit.

Two features of transformers are left out: dropout, which is refused unless it is 0, and
`pad_token_id`, whose entry of the embedding gets no gradient in transformers.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from pydantic import ValidationError

from longctx.model.context_extension import ROPE_FIELDS, ntk_theta
from longctx.model.presets import EXPERT_OPTIONS, ModelShape, NoNativeModel
from longctx.model.rope_fields import rope_fields, rope_of

SIZES = (
    *(
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    ),
    *("rms_norm_eps", "tie_word_embeddings"),
)
"""Fields with the same names in configs and shapes."""
_HARMLESS = """
    architectures attn_implementation auto_map bos_token_id cache_implementation
    chunk_size_feed_forward dtype eos_token_id id2label initializer_range label2id
    max_position_embeddings max_window_layers model_type name_or_path output_attentions
    output_hidden_states pad_token_id pretraining_tp problem_type return_dict tokenizer_class
    torch_dtype transformers_version use_cache
"""
HARMLESS = frozenset(_HARMLESS.split())
"""Fields of configs that do not change what a model of these families computes; nor do fields that
begin with `_`."""
ACTIVATIONS = ("silu", "swish")
"""Names of the decoder's activation in configs."""
FUSED_ATTENTION = {
    "self_attn.qkv_proj.weight": tuple(f"self_attn.{part}_proj.weight" for part in "qkv")
}
FUSED_MLP = {"mlp.gate_up_proj.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight")}


@dataclass(frozen=True)
class ExpertNames:
    """Names of a mixture of experts in a family.

    Attributes:
        names: matrices of an expert, ours → theirs.
        sizes: config fields with the sizes of mixtures, ours → theirs.
        normalized: whether the scores of chosen experts always add up to 1.
        dense: config field with the list of layers that have a dense MLP; empty: none.
        ignored: further fields without effect here.
    """

    module: str
    names: Mapping[str, str]
    sizes: Mapping[str, str]
    normalized: bool = False
    dense: str = ""
    ignored: tuple[str, ...] = ("router_aux_loss_coef",)

    @property
    def fields(self) -> set[str]:
        return {*self.sizes.values(), *self.ignored, *([self.dense] if self.dense else [])}

    def shape(self, config: Any) -> dict[str, Any]:
        values = {ours: getattr(config, theirs) for ours, theirs in self.sizes.items()}
        values |= {"norm_topk_prob": True} if self.normalized else {}
        layers = sorted(getattr(config, self.dense) or ()) if self.dense else []
        if layers != list(range(len(layers))):
            raise NoNativeModel(
                f"{self.dense} is {layers}, and only the first layers may have dense MLPs"
            )
        return {**values, "first_dense_layers": len(layers)}

    def config(self, shape: ModelShape) -> dict[str, Any]:
        fields = {theirs: getattr(shape, ours) for ours, theirs in self.sizes.items()}
        fields |= (
            {self.sizes["moe_intermediate_size"]: shape.expert_width}
            if "moe_intermediate_size" in self.sizes
            else {}
        )
        return fields | ({self.dense: list(range(shape.first_dense_layers))} if self.dense else {})


@dataclass(frozen=True)
class Family:
    """A model type of transformers that the native decoder can run.

    Attributes:
        always: options that all its shapes have.
        windows: layers with a window: none, all, or those named in layer_types.
        experts: mixtures of experts; None: dense MLPs.
        ignored: further fields that have no effect, or repeat other fields.
        fused: tensors of a block that concatenate several of ours.
    """

    kind: str
    architecture: str
    always: Mapping[str, Any] = field(default_factory=dict)
    windows: Literal["none", "all", "named"] = "none"
    experts: ExpertNames | None = None
    ignored: tuple[str, ...] = ()
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def shape(self, config: Any) -> ModelShape:
        """Returns the shape of a config. Raises NoNativeModel for anything that the native decoder
        does not support."""
        values: dict[str, Any] = {name: getattr(config, name) for name in SIZES}
        values["head_dim"] = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        if config.hidden_act not in ACTIVATIONS:
            raise NoNativeModel(
                f"hidden_act is {config.hidden_act}, and only {', '.join(ACTIVATIONS)} are "
                "supported"
            )
        values |= {**self.always, **self._windows(config), **rope_of(config)}
        if self.experts is not None:
            values |= self.experts.shape(config)
        self._refuse_unknown(config)
        try:
            return canonical(ModelShape.model_validate(values))
        except ValidationError as error:
            raise NoNativeModel("; ".join(details["msg"] for details in error.errors())) from error

    def config(self, shape: ModelShape, longest: int, end: int | None) -> dict[str, Any]:
        """Returns a config for a shape, with the fields that the family has.

        `longest`: number of tokens of the longest document; `end`: id of the end-of-document token.
        """
        values: dict[str, Any] = {name: getattr(shape, name) for name in SIZES}
        values |= {
            "hidden_act": ACTIVATIONS[0],
            "head_dim": shape.head_dim,
            "max_position_embeddings": longest,
        }
        values |= {"bos_token_id": None, "eos_token_id": end, "pad_token_id": None}
        if shape.rope_scaling == "yarn":
            values["max_position_embeddings"] = round(
                shape.rope_original_length * shape.rope_factor
            )
        values["rope_parameters"] = rope_fields(shape)
        values |= self._window_fields(shape)
        if self.experts is not None:
            values |= self.experts.config(shape)
        return values

    def _windows(self, config: Any) -> dict[str, Any]:
        if self.windows == "none":
            return {}
        window = config.sliding_window
        count = config.num_hidden_layers
        if self.windows == "all" and window:
            kinds = ["sliding_attention"] * count
        else:
            kinds = ["full_attention"] * count
        if self.windows == "named":
            kinds = list(config.layer_types or kinds)
        strange = set(kinds) - {"full_attention", "sliding_attention"}
        if strange:
            raise NoNativeModel(
                f"layer_types has {', '.join(sorted(strange))}, which is not supported"
            )
        if "sliding_attention" not in kinds:
            return {}
        if window is None:
            raise NoNativeModel("layer_types has sliding_attention, but sliding_window is None")
        if "full_attention" not in kinds:
            return {"sliding_window": window}
        every = kinds.index("full_attention") + 1
        if kinds != [_kind_of_layer(layer, window, every) for layer in range(count)]:
            raise NoNativeModel(
                "layer_types has full_attention in layers other than every n-th, which is not "
                "supported"
            )
        return {"sliding_window": window, "full_attention_every": every}

    def _window_fields(self, shape: ModelShape) -> dict[str, Any]:
        if self.windows == "none":
            return {}
        window = shape.sliding_window
        fields: dict[str, Any] = (
            {} if window is None and self.windows == "named" else {"sliding_window": window}
        )
        if self.windows == "named":
            layers = range(shape.num_hidden_layers)
            fields["layer_types"] = [
                _kind_of_layer(layer, window, shape.full_attention_every) for layer in layers
            ]
        if "use_sliding_window" in self.ignored:
            fields["use_sliding_window"] = window is not None
        return fields

    def _refuse_unknown(self, config: Any) -> None:
        """Raises NoNativeModel for fields that are neither translated nor harmless, unless they
        have their default."""
        known = {*SIZES, *HARMLESS, *self.ignored, "head_dim", "hidden_act", "rope_parameters"}
        fields = {
            "sliding_window": self.windows != "none",
            "layer_types": self.windows == "named",
            "partial_rotary_factor": getattr(config, "partial_rotary_factor", None) in (None, 1.0),
        }
        known |= {name for name, is_known in fields.items() if is_known}
        known |= set() if self.experts is None else self.experts.fields
        defaults = type(config)().to_dict()
        missing = object()
        strange = {
            key: value
            for key, value in config.to_dict().items()
            if key not in known and not key.startswith("_") and value != defaults.get(key, missing)
        }
        if strange:
            listed = ", ".join(f"{key} {value!r}" for key, value in strange.items())
            raise NoNativeModel(f"config.json has {listed}, which is not supported")

    def parts(self, name: str) -> tuple[str, tuple[str, ...]]:
        """Returns the checkpoint's tensor that contains our parameter `name`, and all parameters in
        it, in row order."""
        block = re.match(r"layers\.\d+\.", name)
        if block is None:
            return (name if name.startswith("lm_head.") else f"model.{name}"), (name,)
        inside = name.removeprefix(block[0])
        for fused, ours in self.fused.items():
            if inside in ours:
                return f"model.{block[0]}{fused}", tuple(block[0] + part for part in ours)
        module, _, rest = inside.partition(".")
        if self.experts is not None and module == "moe":
            return f"model.{block[0]}{self.experts.module}.{rest}", (name,)
        return f"model.{name}", (name,)

    def pieces(self, name: str, experts: int) -> list[str]:
        """Returns the checkpoint's tensors, one per expert, that our parameter `name` concatenates;
        none for other ones."""
        match = re.fullmatch(r"(layers\.\d+)\.moe\.experts\.(\w+)", name)
        if match is None or self.experts is None:
            return []
        before = f"model.{match[1]}.{self.experts.module}.experts"
        after = f"{self.experts.names[match[2]]}.weight"
        return [f"{before}.{number}.{after}" for number in range(experts)]

    def tensors(
        self, weights: Mapping[str, torch.Tensor], experts: int = 0
    ) -> dict[str, torch.Tensor]:
        """Converts our parameters to the checkpoint's tensors; all parts of a fused tensor must be
        given.

        `experts` is the number of experts of a mixture.
        """
        made: dict[str, torch.Tensor] = {}
        for name, weight in weights.items():
            if pieces := self.pieces(name, experts):
                made |= zip(pieces, weight.chunk(len(pieces)), strict=True)
                continue
            theirs, parts = self.parts(name)
            if name == parts[0]:
                made[theirs] = (
                    torch.cat([weights[part] for part in parts]) if len(parts) > 1 else weight
                )
        return made


def _kind_of_layer(layer: int, window: int | None, every: int | None) -> str:
    full = window is None or (every is not None and (layer + 1) % every == 0)
    if full:
        return "full_attention"
    return "sliding_attention"


def canonical(shape: ModelShape) -> ModelShape:
    """Returns the canonical shape of the same model: options without effect are at their
    defaults."""
    values = shape.model_dump()
    defaults = {name: known.default for name, known in ModelShape.model_fields.items()}
    scaling = values["rope_scaling"]
    if scaling == "ntk":
        values["rope_theta"] = ntk_theta(shape.rope_theta, shape.rope_factor, shape.head_dim)
    if scaling == "ntk" or values["rope_factor"] == 1:
        values["rope_scaling"] = scaling = "none"
    used = set(ROPE_FIELDS.get(scaling, {}).values())
    unused = {ours for fields in ROPE_FIELDS.values() for ours in fields.values()} - used
    unused |= {"rope_factor"} if scaling == "none" else set()
    if not shape.num_experts:
        unused |= EXPERT_OPTIONS
    elif shape.moe_intermediate_size == shape.intermediate_size:
        unused.add("moe_intermediate_size")
    every = values["full_attention_every"]
    if every == 1:
        unused |= {"sliding_window", "full_attention_every"}
    if every is not None and every > shape.num_hidden_layers:
        unused.add("full_attention_every")
    return ModelShape.model_validate({**values, **{name: defaults[name] for name in unused}})
