"""Small configs: a model of few and small layers that keeps what is special in a user's one."""

import copy
import math
from typing import Any

HEAD = 8
"""Width of a head."""
SIZES = {
    "hidden_size": 32,
    "n_embd": 32,
    "intermediate_size": 48,
    "n_inner": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "intermediate_size_mlp": 48,
    "head_dim": HEAD,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": HEAD,
    "qk_nope_head_dim": HEAD,
    "qk_head_dim": 2 * HEAD,
    "v_head_dim": HEAD,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
"""Upper limits of what a config has."""
FEWEST_LAYERS = 2
MOST_HEADS = 4
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
}
COUNTS = ("num_hidden_layers", "n_layer")
HEADS = ("num_attention_heads", "n_head")
OF_LAYERS = ("layer_types", "no_rope_layers", "mlp_layer_types", "moe_layers")
"""Lists with an entry for each layer."""


def shrunk(config: Any) -> Any:
    """Returns a small copy of the config of a text model, or of the text part of another one:
    kinds of layers, windows, caps, RoPE, epsilons, biases, multipliers and tied matrices stay."""
    small = copy.deepcopy(config.get_text_config())
    layers = _layers(small)
    for name in OF_LAYERS:
        entries = getattr(small, name, None)
        if isinstance(entries, list | tuple) and len(entries) >= layers:
            setattr(small, name, list(entries)[:layers])
    for name in COUNTS:
        _set(small, name, layers)
    for name, limit in (SIZES | EXPERTS).items():
        value = getattr(small, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > limit:
            _set(small, name, limit)
    _shrink_heads(small, config.get_text_config())
    _shrink_rope(small, _rotated(small))
    return small


def _set(config: Any, name: str, value: Any) -> None:
    """Sets an attribute that a config has under this name, not one that it calls otherwise."""
    if name in vars(config):
        setattr(config, name, value)


def _layers(config: Any) -> int:
    """Returns the fewest first layers that have all kinds of them."""
    count = next(int(getattr(config, name)) for name in COUNTS if getattr(config, name, None))
    kinds = getattr(config, "layer_types", None) or ["one"] * count
    needed = max(kinds.index(kind) for kind in set(kinds)) + 1
    dense = getattr(config, "first_k_dense_replace", None)
    if dense:
        needed = max(needed, FEWEST_LAYERS)
    return min(count, max(needed, FEWEST_LAYERS))


def _shrink_heads(small: Any, given: Any) -> None:
    """Sets heads of queries and keys in the ratio that they had, as near as few heads can be."""
    for name in HEADS:
        heads = getattr(given, name, None)
        if not heads or name not in vars(small):
            continue
        of_keys = getattr(given, "num_key_value_heads", None) or heads
        group = max(1, heads // of_keys)
        count = min(heads, MOST_HEADS)
        setattr(small, name, count)
        if "num_key_value_heads" in vars(small):
            small.num_key_value_heads = max(1, count // min(group, count))


def _rotated(config: Any) -> int:
    """Returns how many entries of a head RoPE turns."""
    partial = getattr(config, "partial_rotary_factor", None)
    parameters = getattr(config, "rope_parameters", None) or {}
    factor = partial or parameters.get("partial_rotary_factor") or 1.0
    head = getattr(config, "qk_rope_head_dim", None) or getattr(config, "head_dim", None) or HEAD
    return int(head * factor)


def _shrink_rope(config: Any, rotated: int) -> None:
    """Takes as many factors of LongRoPE as there are frequencies left, spread over all."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layers = [each for each in parameters.values() if isinstance(each, dict)]
    for each in by_layers or [parameters]:
        for name in ("short_factor", "long_factor"):
            factors = each.get(name)
            if factors and len(factors) != rotated // 2:
                step = len(factors) / (rotated // 2)
                each[name] = [factors[math.floor(at * step)] for at in range(rotated // 2)]
        sections = each.get("mrope_section")
        if sections:
            each["mrope_section"] = [rotated // 2, 0, 0]
