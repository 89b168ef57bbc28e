"""What the output layer got and returned in a step, and what backward brought it: hidden state,
target and weight of every token without inference.

∂loss/∂logits of a token is w (softmax(logits) - e(y)) where the objective is cross-entropy: its
smallest entry, or with a negative weight its largest, tells the target y, the size the weight w,
and what is left whether it is that objective. The product of these slopes and the hidden states is
the gradient that backward gives the output layer: what the optimizer would get beside it is what
came after. A loss that is fused with the output layer shows none of that.
"""

import re
from collections.abc import Callable
from collections.abc import Sequence as Listed
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

Parts = dict[str, list[torch.Tensor]]
"""Outputs of the parts of layers by name, in the order in which they ran, one of each call [..,
width]."""
PART = re.compile(r"^\D*\.\d+(\.\w+)?$")
"""Names of parts: in a list of layers, a layer or one of its own modules."""


@dataclass
class Output:
    """One call of the output layer.

    Attributes:
        states: what it got [.., H].
        logits: what it returned [.., V].
        slopes: ∂loss/∂logits [.., V]; None before backward.
    """

    states: torch.Tensor
    logits: torch.Tensor
    slopes: torch.Tensor | None = None

    def add(self, slopes: torch.Tensor) -> None:
        """Takes what a backward brought."""
        slopes = slopes.detach().clone()
        self.slopes = slopes if self.slopes is None else self.slopes + slopes


def keep_parts(model: Any, kept: Parts) -> list[RemovableHandle]:
    """Has the outputs of embeddings and of all parts of layers kept, where gradients are wanted."""

    def keeper(name: str) -> Callable[..., None]:
        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, tuple):
                output = output[0]
            if torch.is_grad_enabled() and type(output) is torch.Tensor:
                kept.setdefault(name, []).append(output.detach().clone())

        return keep

    embeddings = model.get_input_embeddings()
    return [
        module.register_forward_hook(keeper(name))
        for name, module in model.named_modules()
        if module is embeddings or PART.search(name)
    ]


def of_tokens(parts: Parts, tokens: int) -> dict[str, torch.Tensor]:
    """Returns the outputs of parts that have one row for each token [tokens, width], in float32; of
    each two alike, as checkpointing runs parts again, the first."""
    found = {}
    for name, kept in parts.items():
        again = sum(output.shape[:-1].numel() for output in kept) == 2 * tokens
        outputs = kept[::2] if again else kept
        if outputs and sum(output.shape[:-1].numel() for output in outputs) == tokens:
            found[name] = torch.cat([output.flatten(0, -2) for output in outputs]).float().cpu()
    return found


class Looked(NamedTuple):
    """What a rank's calls of the output layer show, token by token in their order.

    Attributes:
        states: what it got [tokens, H].
        targets: the id with a loss, or another one where a token has no weight.
        weights: of its cross-entropy.
        left: what is left of ∂loss/∂logits without it, relative to all of it.
        beside: terms that some tokens' objectives have beside it, by their names.
        slopes: ∂loss/∂logits [tokens, V].
        parts: outputs of the parts of layers [tokens, width].
    """

    states: torch.Tensor
    targets: list[int]
    weights: list[float]
    left: list[float]
    beside: list[str]
    slopes: torch.Tensor
    parts: dict[str, torch.Tensor]


def look(
    outputs: Listed[Output], parts: Parts, *, tokens: int, config: Any, limit: float
) -> Looked | None:
    """Returns what outputs show; None where they are not those of all tokens in order, or tensors
    are not plain or not finite. `limit`: most that may be left of ∂loss/∂logits without
    cross-entropy."""
    if not outputs or any(not _is_plain(output) for output in outputs):
        return None
    states = torch.cat([output.states.flatten(0, -2) for output in outputs]).double().cpu()
    logits = torch.cat([output.logits.flatten(0, -2) for output in outputs]).double().cpu()
    slopes = torch.cat([_slopes_of(output).flatten(0, -2) for output in outputs]).double().cpu()
    finite = all(bool(each.isfinite().all()) for each in (states, logits, slopes))
    if len(states) != tokens or not finite:
        return None
    targets, weights, left, beside = cross_entropies(logits, slopes, config=config, limit=limit)
    return Looked(
        states,
        targets.tolist(),
        weights=weights.tolist(),
        left=left.tolist(),
        beside=beside,
        slopes=slopes,
        parts=of_tokens(parts, tokens),
    )


def _is_plain(output: Output) -> bool:
    """Returns whether states and logits are whole tensors of as many tokens."""
    both = (output.states, output.logits)
    return all(type(tensor) is torch.Tensor for tensor in both) and (
        output.states.shape[:-1] == output.logits.shape[:-1]
    )


def _slopes_of(output: Output) -> torch.Tensor:
    if output.slopes is None:
        return torch.zeros_like(output.logits)
    return output.slopes


def cross_entropies(
    logits: torch.Tensor, slopes: torch.Tensor, *, config: Any, limit: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[str]]:
    """Returns target, weight and what is left of each token [tokens], of what the output layer
    returned and ∂loss/∂ of that [tokens, V], and the names of terms that explain what is left."""
    given = logits.detach().requires_grad_()
    final = final_logits(given, config)
    (inner,) = torch.autograd.grad(final.sum(), given)  # each logit follows from its own output
    sizes = slopes.norm(dim=1)
    most = slopes.max(1)
    least = slopes.min(1)
    negative = most.values > -least.values
    targets = torch.where(negative, most.indices, least.indices)
    likely = torch.softmax(final.detach(), dim=1)
    columns = likely.clone()
    columns[range(len(columns)), targets] -= 1
    columns = columns * inner
    weights = (slopes * columns).sum(1) / (columns * columns).sum(1)
    left = (slopes - weights[:, None] * columns).norm(dim=1) / sizes.clamp_min(1e-300)
    smallest = 1e-9 * float(sizes.max())
    silent = sizes <= smallest
    weights = weights.masked_fill(silent, 0.0)
    left = left.masked_fill(silent, 0.0)
    off = ~(left <= limit)
    beside = _beside(
        slopes[off],
        columns[off],
        likely=likely[off],
        logits=final.detach()[off],
        limit=limit,
    )
    return targets, weights, left, beside


def _beside(
    slopes: torch.Tensor,
    columns: torch.Tensor,
    *,
    likely: torch.Tensor,
    logits: torch.Tensor,
    limit: float,
) -> list[str]:
    """Returns the names of terms each of which, beside cross-entropy, explains the slopes of all
    these tokens: several where logits are nearly alike."""
    if not len(slopes):
        return []
    entropy = -(likely * likely.clamp_min(1e-300).log()).sum(1, keepdim=True)
    residual = slopes - _projected(slopes, [columns])
    second = torch.zeros_like(slopes)
    second[range(len(slopes)), residual.abs().argmax(1)] = 1.0
    terms = {
        "label smoothing": likely - 1 / likely.shape[1],
        "a z-loss (the square of log-sum-exp)": likely * logits.logsumexp(1, keepdim=True),
        "entropy": likely * (likely.clamp_min(1e-300).log() + entropy),
        "the cross-entropy of a second id": likely - second,
    }
    sizes = slopes.norm(dim=1)
    found = []
    for name, term in terms.items():
        rest = (slopes - _projected(slopes, [columns, term])).norm(dim=1)
        if bool((rest <= limit * sizes).all()):
            found.append(name)
    return found


def _projected(slopes: torch.Tensor, columns: Listed[torch.Tensor]) -> torch.Tensor:
    """Returns the nearest sum of columns to the slopes of each token [tokens, V]."""
    basis = torch.stack(list(columns), dim=2)
    weights = torch.linalg.lstsq(basis, slopes[:, :, None], driver="gelsd").solution
    projected: torch.Tensor = (basis @ weights)[:, :, 0]
    return projected


CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Names in configs of what `final_logits` does; of no others."""


def final_logits(output: torch.Tensor, config: Any) -> torch.Tensor:
    """Returns logits as most models of transformers make them from what the output layer returns: a
    scale, then a cap."""
    scale = getattr(config, "logit_scale", None)
    if scale:
        output = output * scale
    divisor = getattr(config, "logits_scaling", None)
    if divisor:
        output = output / divisor
    cap = getattr(config, "final_logit_softcapping", None)
    if cap:
        output = cap * torch.tanh(output / cap)
    return output
