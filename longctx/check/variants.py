"""Variants: what models of public trainers computed otherwise, done to the reference, to see which
one explains a wrong part of a layer."""

import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from .changes import ROUNDED
from .reference import Reference
from .split_variants import KINDS as SPLIT
from .split_variants import split_variants
from .variant import Setting, Variant

EPSILON = "norms have another epsilon"
ROTARY = "positions are encoded otherwise"
ADAPTERS = "adapters have another scale"
EXPERTS = "experts are chosen or weighed otherwise"
ACTIVATION = "another activation function is computed"
WINDOW = "sliding windows have another width"
CAPS = "scores of attention are capped otherwise"
WEIGHTS = "a part computes with other weights"
MULTIPLIER = "a multiplier of the config is ignored"
NO_NORM = "a norm is left out"
KINDS = (
    *(EPSILON, ROTARY, ADAPTERS, EXPERTS, ACTIVATION, WINDOW, CAPS, WEIGHTS, MULTIPLIER, NO_NORM),
    *SPLIT,
)

EPSILONS = (0.0, 1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
NAMES_OF_EPSILON = ("variance_epsilon", "eps", "epsilon")
CAP = "attn_logit_softcapping"
NUMBER = re.compile(r"\d+")
APPLY_ROTARY = "apply_rotary_pos_emb"
"""Of the function in the modules of transformers' models."""


def variants(reference: Reference, part: str, *, ranks: int) -> list[Variant]:
    """Returns all variants that change something in a model; some of them in one part alone, some
    only where there are several ranks."""
    named = [*reference.model.named_modules()]
    modules = [module for _, module in named]
    every = [
        *_epsilons(modules),
        *_epsilons([module for name, module in named if name == part]),
        *_rotary(modules, reference.config),
        *_neighbours(reference.model, reference.config),
        *_ones_of_norms(modules),
        *_gates(modules),
        *_weights_of_experts(modules),
        *_biases_of_experts(modules),
        *(variant for count in range(2, ranks + 1) for variant in split_variants(modules, count)),
        *_adapters(modules),
        *_experts(modules),
        *_activations(modules),
        *_windows(reference),
        *_caps(modules),
        *_multipliers(modules),
        *_weights(reference.model, part),
        *_without_norms(named, part),
    ]
    return [variant for variant in every if variant.settings]


def scales(modules: list[Any], factor: float) -> Variant:
    """Returns the variant in which the updates of LoRA's layers are multiplied by a factor."""
    settings = list[Setting]()
    for module in modules:
        scaled = {name: factor * value for name, value in module.scaling.items()}
        settings.append(Setting(module, "scaling", scaled))
    return Variant(ADAPTERS, f"{factor:.4g} times", settings)


def _neighbours(model: Any, config: Any) -> Iterator[Variant]:
    """Yields that RoPE turns pairs of neighbours, where models turn the halves of heads; or the
    other way round."""
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    owner = sys.modules[type(model).__module__]
    turned = getattr(owner, APPLY_ROTARY, None)
    if turned is None:
        return
    by_neighbours = Setting(owner, APPLY_ROTARY, partial(_turned_otherwise, turned, back=False))
    by_halves = Setting(owner, APPLY_ROTARY, partial(_turned_otherwise, turned, back=True))
    yield Variant(ROTARY, "RoPE turns pairs of neighbours, and not of halves", [by_neighbours])
    yield Variant(ROTARY, "RoPE turns pairs of halves, and not of neighbours", [by_halves])


def _turned_otherwise(
    turned: Callable[..., Any],
    queries: torch.Tensor,
    keys: torch.Tensor,
    *others: Any,
    back: bool,
    **named: Any,
) -> Any:
    """Returns queries and keys [.., d] of which other pairs of entries are turned."""
    width = queries.shape[-1]
    order = torch.cat([torch.arange(0, width, 2), torch.arange(1, width, 2)])
    if back:
        order = order.argsort()
    return turned(queries[..., order], keys[..., order], *others, **named)


def _ones_of_norms(modules: list[Any]) -> Iterator[Variant]:
    """Yields that norms multiply by their weight where they should by 1 + weight, or the other way
    round."""
    of_weight = list[Setting]()
    of_one_more = list[Setting]()
    for module in modules:
        weight = getattr(module, "weight", None)
        if "rmsnorm" not in type(module).__name__.lower() or weight is None:
            continue
        if _adds_one(module):
            of_weight.append(Setting(weight, "data", weight.data - 1))
        else:
            of_one_more.append(Setting(weight, "data", weight.data + 1))
    yield Variant(WEIGHTS, "norms multiply by their weight, and not by 1 + weight", of_weight)
    yield Variant(WEIGHTS, "norms multiply by 1 + weight, and not by their weight", of_one_more)


def _adds_one(norm: Any) -> bool:
    """Returns whether a norm multiplies by 1 + weight."""
    weight = norm.weight
    kept = weight.data
    weight.data = torch.zeros_like(kept)
    try:
        with torch.no_grad():
            return bool(norm(torch.ones(1, len(kept), dtype=kept.dtype)).any())
    finally:
        weight.data = kept


def _gates(modules: list[Any]) -> Iterator[Variant]:
    """Yields that the activation is of the up projection and not of the gate."""
    settings = list[Setting]()
    for module in modules:
        gate = getattr(module, "gate_proj", None)
        up = getattr(module, "up_proj", None)
        if gate is not None and up is not None:
            settings += [Setting(module, "gate_proj", up), Setting(module, "up_proj", gate)]
        both = getattr(module, "gate_up_proj", None)
        weight = getattr(both, "weight", both)
        if isinstance(weight, torch.Tensor):
            dim = weight.dim() - 2
            halves = weight.data.chunk(2, dim=dim)
            settings.append(Setting(weight, "data", torch.cat(halves[::-1], dim=dim)))
    yield Variant(ACTIVATION, "that of the up projection, and not of the gate", settings)


def _weights_of_experts(modules: list[Any]) -> Iterator[Variant]:
    """Yields that the weights of a token's experts are computed otherwise from routers' logits."""
    routers = [module for module in modules if isinstance(getattr(module, "top_k", None), int)]
    for words, (weighed, rounds) in WEIGHED.items():
        settings = list[Setting]()
        for router in routers:
            forward = partial(_routed_otherwise, router.forward, weighed)
            settings.append(Setting(router, "forward", forward))
        yield Variant(EXPERTS, words, settings, rounds)


Weighed = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _routed_otherwise(forward: Callable[..., Any], weighed: Weighed, *inputs: Any) -> Any:
    """Returns what a router returns, logits, weights and experts, with other weights."""
    returned = forward(*inputs)
    if not isinstance(returned, tuple) or len(returned) != 3:
        return returned
    logits, weights, experts = returned
    if weights.shape != experts.shape:
        return returned
    return logits, weighed(logits, weights, experts), experts


def _by_sigmoid(logits: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    chosen = logits.sigmoid().gather(-1, experts)
    return chosen / chosen.sum(-1, keepdim=True)


def _by_plain_sigmoid(
    logits: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
) -> torch.Tensor:
    return logits.sigmoid().gather(-1, experts)


def _by_softmax_of_all(
    logits: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
) -> torch.Tensor:
    return logits.softmax(-1).gather(-1, experts)


def _alike(logits: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(weights) / weights.shape[-1]


def _swapped(logits: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    return weights.flip(-1)


def _rounded_weights(
    logits: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
) -> torch.Tensor:
    return _as_bfloat16(weights)


WEIGHED: dict[str, tuple[Weighed, bool]] = {
    "weights of experts are of sigmoids that sum to 1, not of a softmax": (_by_sigmoid, False),
    "weights of experts are of sigmoids, not of a softmax": (_by_plain_sigmoid, False),
    "weights of experts are of a softmax over all, and do not sum to 1": (
        _by_softmax_of_all,
        False,
    ),
    "all experts of a token have the same weight": (_alike, False),
    "a token's experts have each other's weights": (_swapped, False),
    "weights of experts are rounded to bfloat16": (_rounded_weights, True),
}
"""Other weights of a token's experts, and whether they are rounded."""


def _biases_of_experts(modules: list[Any]) -> Iterator[Variant]:
    """Yields that the last biases of a token's experts are added in full."""
    settings = list[Setting]()
    for module in modules:
        if isinstance(getattr(module, "down_proj_bias", None), torch.Tensor):
            forward = partial(_with_full_biases, module, module.forward)
            settings.append(Setting(module, "forward", forward))
    words = "the last biases of experts are added in full, not by the router's weights"
    yield Variant(EXPERTS, words, settings)


def _with_full_biases(
    module: Any,
    forward: Callable[..., torch.Tensor],
    hidden: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    returned = forward(hidden, experts, weights)
    lacking = (1 - weights)[..., None] * module.down_proj_bias[experts]
    whole: torch.Tensor = returned + lacking.sum(-2).reshape(returned.shape)
    return whole


def _epsilons(modules: list[Any]) -> Iterator[Variant]:
    for value in EPSILONS:
        settings = [
            Setting(module, name, value)
            for module in modules
            for name in NAMES_OF_EPSILON
            if "norm" in type(module).__name__.lower()
            and _number(module, name) not in (None, value)
        ]
        yield Variant(EPSILON, f"{value:g}", settings)


def _multipliers(modules: list[Any]) -> Iterator[Variant]:
    """Yields variants without a multiplier of the config, as Granite has."""
    found = {
        name
        for module in modules
        for name, value in vars(module).items()
        if name.endswith("multiplier") and isinstance(value, float) and value != 1.0
    }
    for name in sorted(found):
        holders = [module for module in modules if getattr(module, name, 1.0) != 1.0]
        settings = [Setting(module, name, 1.0) for module in holders]
        yield Variant(MULTIPLIER, f"{name} of {getattr(holders[0], name):g}", settings)


def _without_norms(named: list[tuple[str, Any]], part: str) -> Iterator[Variant]:
    """Yields variants without one of the norms inside a part."""
    for name, module in named:
        if name.startswith(f"{part}.") and "norm" in type(module).__name__.lower():
            yield Variant(NO_NORM, name, [Setting(module, "forward", _identity)])


def _identity(states: torch.Tensor) -> torch.Tensor:
    return states


def _weights(model: Any, name: str) -> Iterator[Variant]:
    """Yields variants of the weights of a part: rounded, or those of other layers."""
    own = dict(model.named_modules()).get(name)
    if own is None:
        return
    for dtype, words in ROUNDED.items():
        rounded = [
            Setting(weight, "data", weight.data.to(dtype).to(weight.dtype))
            for weight in own.parameters()
        ]
        yield Variant(WEIGHTS, f"rounded to {words}", rounded)
    for other, module in model.named_modules():
        if other != name and NUMBER.sub("", other) == NUMBER.sub("", name):
            theirs = dict(module.named_parameters())
            settings = [
                Setting(weight, "data", theirs[key].data)
                for key, weight in own.named_parameters()
                if key in theirs and theirs[key].shape == weight.shape
            ]
            yield Variant(WEIGHTS, f"those of {other}", settings)
    for key, module in own.named_modules():
        if isinstance(getattr(module, "scaling", None), dict):
            off = [Setting(module, "scaling", dict.fromkeys(module.scaling, 0.0))]
            yield Variant(ADAPTERS, f"that of {key} is left out", off)


def _number(module: Any, name: str) -> float | None:
    value = getattr(module, name, None)
    return value if isinstance(value, float) else None


def _rotary(modules: list[Any], config: Any) -> Iterator[Variant]:
    """Yields variants of the frequencies of RoPE."""
    frequencies = [
        (module, name, value)
        for module in modules
        for name, value in module.named_buffers(recurse=False)
        if name.endswith("inv_freq") and "original" not in name
    ]

    def all_of(change: Callable[[torch.Tensor], torch.Tensor]) -> list[Setting]:
        return [Setting(module, name, change(value)) for module, name, value in frequencies]

    yield Variant(ROTARY, "without RoPE", all_of(torch.zeros_like))
    yield Variant(ROTARY, "RoPE turns backwards", all_of(torch.neg))
    yield Variant(
        ROTARY,
        "frequencies of RoPE are rounded to bfloat16",
        all_of(_as_bfloat16),
    )
    yield Variant(
        ROTARY,
        "sines and cosines of RoPE are rounded to bfloat16",
        [
            Setting(module, "forward", _rounding(module.forward))
            for module in {id(module): module for module, _, _ in frequencies}.values()
        ],
    )
    for share, words in ((1, "all"), (2, "half of")):
        settings = list[Setting]()
        for module, name, value in frequencies:
            count = _width_of_heads(config) // share // 2
            if count != len(value):
                like = value.new_zeros(count)
                settings.append(Setting(module, name, _plain_frequencies(like, _theta(config))))
        yield Variant(ROTARY, f"RoPE turns {words} dimensions of heads", settings)
    factors = [
        Setting(module, "attention_scaling", 1.0)
        for module, _, _ in frequencies
        if getattr(module, "attention_scaling", 1.0) != 1.0
    ]
    for theta in dict.fromkeys((_theta(config), 1e4, 5e5, 1e6)):
        settings = all_of(partial(_plain_frequencies, theta=theta))
        changed = any(
            not torch.equal(each.value, getattr(each.owner, each.name)) for each in settings
        )
        words = f"RoPE has a theta of {theta:,.0f} and no scaling"
        if changed or factors:
            yield Variant(ROTARY, words, settings + factors)


def _width_of_heads(config: Any) -> int:
    width = getattr(config, "head_dim", None)
    if width:
        return int(width)
    return int(config.hidden_size) // int(config.num_attention_heads)


def _as_bfloat16(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.bfloat16).to(value.dtype)


def _rounding(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a forward of RoPE whose results are rounded to bfloat16."""

    def rounded(*inputs: Any, **named: Any) -> Any:
        return tuple(_as_bfloat16(each) for each in forward(*inputs, **named))

    return rounded


def _theta(config: Any) -> float:
    parameters = getattr(config, "rope_parameters", None) or {}
    return float(parameters.get("rope_theta") or getattr(config, "rope_theta", None) or 1e4)


def _plain_frequencies(like: torch.Tensor, theta: float) -> torch.Tensor:
    exponents = torch.arange(len(like), dtype=like.dtype) / len(like)
    return 1.0 / theta**exponents


def _adapters(modules: list[Any]) -> Iterator[Variant]:
    """Yields variants of how LoRA's updates are multiplied, alpha / r by default."""
    layers = [module for module in modules if isinstance(getattr(module, "scaling", None), dict)]
    layers = [module for module in layers if getattr(module, "lora_alpha", None)]

    def all_of(scale: Callable[[float, int], float]) -> list[Setting]:
        found = []
        for module in layers:
            scales = {
                name: scale(module.lora_alpha[name], module.r[name]) for name in module.scaling
            }
            if scales != module.scaling:
                found.append(Setting(module, "scaling", scales))
        return found

    yield Variant(ADAPTERS, "they are left out", all_of(lambda alpha, r: 0.0))
    yield Variant(ADAPTERS, "alpha, and not alpha / r", all_of(lambda alpha, r: alpha))
    yield Variant(ADAPTERS, "1, and not alpha / r", all_of(lambda alpha, r: 1.0))
    yield Variant(ADAPTERS, "alpha / √r", all_of(lambda alpha, r: alpha / r**0.5))
    yield Variant(ADAPTERS, "alpha / r", all_of(lambda alpha, r: alpha / r))


def _experts(modules: list[Any]) -> Iterator[Variant]:
    routers = [module for module in modules if isinstance(getattr(module, "top_k", None), int)]
    normalizing = [
        each for each in modules if isinstance(getattr(each, "norm_topk_prob", None), bool)
    ]
    for more in (-1, 1):
        settings = [
            Setting(module, "top_k", module.top_k + more)
            for module in routers
            if 1 <= module.top_k + more <= getattr(module, "num_experts", module.top_k)
        ]
        words = f"{routers[0].top_k + more} for each token" if routers else ""
        yield Variant(EXPERTS, words, settings)
    changed = [Setting(each, "norm_topk_prob", not each.norm_topk_prob) for each in normalizing]
    words = "weights of the chosen ones are normalized, or are not, against the config"
    yield Variant(EXPERTS, words, changed)


def _activations(modules: list[Any]) -> Iterator[Variant]:
    from transformers.activations import ACT2FN

    own = [
        module for module in modules if isinstance(getattr(module, "act_fn", None), torch.nn.Module)
    ]
    for name in ("silu", "gelu", "gelu_pytorch_tanh", "relu"):
        settings = [
            Setting(module, "act_fn", ACT2FN[name])
            for module in own
            if type(module.act_fn) is not type(ACT2FN[name])
        ]
        yield Variant(ACTIVATION, name, settings)


def _windows(reference: Reference) -> Iterator[Variant]:
    window = reference.window
    if window is None:
        return
    for width in (window - 1, window + 1, window // 2, 2 * window):
        words = f"{width} tokens, and not {window}"
        yield Variant(WINDOW, words, [Setting(reference, "window", width)])


def _caps(modules: list[Any]) -> Iterator[Variant]:
    settings = [Setting(module, CAP, None) for module in modules if getattr(module, CAP, None)]
    yield Variant(CAPS, "not at all", settings)
