"""The families of transformers that the native decoder can run, and those that have models of a
shape."""

from typing import Any

from longctx.model.presets import ModelShape, NoNativeModel
from longctx.model.translation import FUSED_ATTENTION, FUSED_MLP, ExpertNames, Family, canonical

QWEN: dict[str, Any] = {"windows": "named", "ignored": ("use_sliding_window",)}
QWEN_WINDOWS: dict[str, Any] = {"windows": "all", "ignored": ("use_sliding_window",)}
MIXTRAL = ExpertNames(
    "block_sparse_moe",
    {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
    {"num_experts": "num_local_experts", "num_experts_per_tok": "num_experts_per_tok"},
    normalized=True,
)
QWEN_MOE = ExpertNames(
    "mlp",
    {name: name for name in ("gate_proj", "up_proj", "down_proj")},
    {
        "num_experts": "num_local_experts",
        "num_experts_per_tok": "num_experts_per_tok",
        "norm_topk_prob": "norm_topk_prob",
        "moe_intermediate_size": "moe_intermediate_size",
    },
    dense="mlp_only_layers",
)
FAMILIES = {
    family.kind: family
    for family in (
        Family("llama", "LlamaForCausalLM"),
        Family("mistral", "MistralForCausalLM", windows="all"),
        Family("qwen2", "Qwen2ForCausalLM", {"qkv_bias": True}, **QWEN),
        Family("qwen3", "Qwen3ForCausalLM", {"qk_norm": True}, **QWEN),
        Family(
            "phi3",
            "Phi3ForCausalLM",
            windows="all",
            ignored=("original_max_position_embeddings",),
            fused=FUSED_ATTENTION | FUSED_MLP,
        ),
        Family("mixtral", "MixtralForCausalLM", windows="all", experts=MIXTRAL),
        Family(
            "qwen3_moe", "Qwen3MoeForCausalLM", {"qk_norm": True}, experts=QWEN_MOE, **QWEN_WINDOWS
        ),
    )
}


def family_of(config: Any) -> Family:
    """Returns the family of a config. Raises NoNativeModel if there is none."""
    if config.model_type not in FAMILIES:
        raise NoNativeModel(
            f"model_type is {config.model_type}, and only {', '.join(FAMILIES)} are supported"
        )
    return FAMILIES[config.model_type]


def expressed(shape: ModelShape, longest: int, end: int | None = None) -> tuple[Family, Any]:
    """Returns a family that has models of this shape, and their config.

    `longest`: number of tokens of the longest document; `end`: id of the end-of-document token.
    Raises NoNativeModel naming the options that the nearest family lacks.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    asked = canonical(shape)
    candidates: dict[str, list[str]] = {}
    for family in FAMILIES.values():
        try:
            config = AutoConfig.for_model(family.kind, **family.config(asked, longest, end))
            possible = family.shape(config)
        except (NoNativeModel, StrictDataclassError, ValueError, TypeError):
            continue  # its config cannot express the shape
        different = [
            name
            for name in ModelShape.model_fields
            if getattr(asked, name) != getattr(possible, name)
        ]
        if not different:
            return family, config
        candidates[family.kind] = [f"{name} {getattr(asked, name)!r}" for name in different]
    nearest = min(candidates, key=lambda kind: len(candidates[kind]), default=None)
    why = "" if nearest is None else f" ({nearest} lacks {', '.join(candidates[nearest])})"
    raise NoNativeModel(
        f"no supported family of transformers has models of this shape{why}: use one of "
        f"{', '.join(FAMILIES)}"
    )
