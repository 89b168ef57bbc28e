"""Reference: hidden states, and gradients of single predictions, by plain transformers in float64.

A step's gradient is the sum over predictions t of w(t) · ∂loss(t): right is w(t) = 1/N for the N targets of the step, and 0 for
all else. On the matrix of the output layer W [V, H], whose input is h(t) [H], ∂loss(t) = (softmax(W h(t)) - e(y(t))) h(t)ᵀ,
which depends on the forward pass alone. So least squares on it give every w(t), and the residual says whether the trainer had
these h(t): its context. With both, the gradients of all other parameters follow; where they differ, the backward pass is wrong.
Without a gradient of its own (tied embeddings, adapters) the output layer has no such matrix, and all gradients are
fitted at once: then forward and backward are not told apart.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Several
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from longctx.check.contexts import Sequence
from longctx.check.record import CheckError, Tensors

Target = int | None
"""Token id that a place predicts; None: none."""


class Columns(NamedTuple):
    """∂loss of single predictions, each of rank one: on the output layer, or on all trained parameters as one column."""

    left: torch.Tensor
    """∂loss/∂(W h) [T, V], or gradients [T, P]."""
    right: torch.Tensor
    """h [T, H], or ones [T, 1]."""

    def gram(self) -> torch.Tensor:
        """Returns all products of two [T, T]."""
        return (self.left @ self.left.T) * (self.right @ self.right.T)

    def project(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns the products with a gradient [V, H] or [P, 1]: [T]."""
        return ((self.left @ gradient) * self.right).sum(1)

    def sum(self, weights: torch.Tensor) -> torch.Tensor:
        """Returns their weighted sum: a gradient."""
        return (self.left * weights[:, None]).T @ self.right


class Reference:
    """A causal LM of transformers that runs sequences as contexts want them."""

    def __init__(self, model: Any, trained: Several[str]) -> None:
        """`trained` are names of parameters that have a gradient in the step."""
        self.model, self.config = model, model.config
        self.head = model.get_output_embeddings()
        named = dict(model.named_parameters())
        if unknown := set(trained) - named.keys():
            raise CheckError(f"the reference has no parameter {min(unknown)}: name gradients as {next(iter(named))}")
        self.named = {name: named[name] for name in trained}
        own = [name for name, weight in self.named.items() if weight is self.head.weight]
        embedding = model.get_input_embeddings().weight
        self.output = own[0] if own and self.head.weight is not embedding else None
        self.matrix = self._matrix()
        layer_types = getattr(self.config, "layer_types", None) or ()
        self.masked = not any("linear" in kind or "mamba" in kind for kind in layer_types)
        window = getattr(self.config, "sliding_window", None)
        self.window: int | None = window if getattr(self.config, "use_sliding_window", True) else None
        try:
            self._run(Sequence((0, 1), (0, 1)), (0, 1))
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise CheckError(f"transformers cannot run {type(model).__name__} with a mask and positions: {error}") from error

    def _matrix(self) -> torch.Tensor | None:
        """Returns W [V, H], if the output layer has a gradient of its own, and logits are W h and nothing more."""
        changes = ("final_logit_softcapping", "logit_scale", "logits_scaling")
        if self.output is None or self.head.bias is not None or any(getattr(self.config, name, None) for name in changes):
            return None
        matrix: torch.Tensor = self.head.weight.detach()
        return matrix

    def _mask(self, sequence: Sequence) -> Any:
        """Returns what eager attention adds to scores [1, 1, queries, keys], by kind of layer where there are several."""
        if not self.masked:
            return None
        place = torch.arange(len(sequence.numbers))
        distance = place[:, None] - place[None, :]
        least = {"both": -len(place), "next": -1}.get(sequence.sight, 0)
        visible = {"full_attention": distance >= least}
        if sequence.sight == "no padding":
            visible["full_attention"] &= torch.tensor(sequence.numbers)[None, :] >= 0
        near = distance < (self.window or len(place))
        visible["sliding_attention"] = visible["full_attention"] & (near if sequence.sight != "no window" else True)
        masks = {kind: (~seen).double()[None, None] * -1e30 for kind, seen in visible.items()}
        if getattr(self.config, "layer_types", None) and self.window is not None:
            return masks
        return masks["sliding_attention"]

    def _run(self, sequence: Sequence, ids: Several[int]) -> torch.Tensor:
        """Returns logits [tokens, V]."""
        positions = torch.tensor([sequence.positions])
        inputs = {"input_ids": torch.tensor([ids]), "position_ids": positions, "attention_mask": self._mask(sequence)}
        logits: torch.Tensor = self.model(**inputs, use_cache=False).logits[0]
        return logits

    def states(self, sequence: Sequence, ids: Several[int]) -> torch.Tensor:
        """Returns what the output layer gets [tokens, H]."""
        return self._cut(sequence, ids)[1]

    def _cut(self, sequence: Sequence, ids: Several[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns logits, what the output layer gets [tokens, H], and what it returns [1, tokens, V], where gradients end."""
        kept: list[torch.Tensor] = []

        def cut(_: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
            kept.extend((inputs[0].detach()[0], output.detach().requires_grad_()))
            return kept[1]

        hook = self.head.register_forward_hook(cut)
        try:
            return self._run(sequence, ids), kept[0], kept[1]
        finally:
            hook.remove()

    def columns(self, sequence: Sequence, ids: Several[int], targets: Several[Several[Target]]) -> Columns:
        """Returns a column for each target that is not None: of `targets`, lists of one target per token, one after another."""
        weights, at_output = list(self.named.values()), self._cut(sequence, ids) if self.output else None
        logits = at_output[0] if at_output else self._run(sequence, ids)
        left, right = list[torch.Tensor](), list[torch.Tensor]()
        for each in targets:
            losses, chosen = self._loss(logits, each), [at for at, target in enumerate(each) if target is not None]
            if at_output:
                (slope,) = torch.autograd.grad(losses.sum(), at_output[2], retain_graph=True)
                left.append(slope[0][chosen])
                right.append(at_output[1][chosen])
                continue
            for loss in losses:
                found = torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True)
                left.append(torch.cat([_flat(slope, weight) for slope, weight in zip(found, weights, strict=True)])[None])
                right.append(torch.ones(1, 1, dtype=torch.float64))
        return Columns(torch.cat(left), torch.cat(right))

    def of(self, gradients: Tensors) -> torch.Tensor:
        """Returns what `columns` explain: the gradient of the output layer, or all gradients in one column."""
        if self.output:
            return gradients[self.output]
        return torch.cat([_flat(gradients.get(name), weight) for name, weight in self.named.items()])[:, None]

    def losses(self, sequence: Sequence, ids: Several[int], targets: Several[Target]) -> torch.Tensor:
        """Returns the cross-entropy of each target that is not None, without gradients."""
        with torch.no_grad():
            return self._loss(self._run(sequence, ids), targets)

    def gradients(self, terms: Iterable[tuple[Any, torch.Tensor]]) -> tuple[float, Tensors]:
        """Returns loss and gradients of all trained parameters, for terms of a fit with weights of their predictions."""
        self.model.zero_grad(set_to_none=True)
        total = 0.0
        for term, weights in terms:
            logits = self._run(term.sequence, term.ids)
            (loss := (torch.cat([self._loss(logits, each) for each in term.targets]) * weights).sum()).backward()
            total += float(loss.detach())
        found = {name: torch.zeros_like(w) if w.grad is None else w.grad.clone() for name, w in self.named.items()}
        self.model.zero_grad(set_to_none=True)
        return total, found

    @staticmethod
    def _loss(logits: torch.Tensor, targets: Several[Target]) -> torch.Tensor:
        chosen = torch.tensor([at for at, target in enumerate(targets) if target is not None], dtype=torch.int64)
        wanted = torch.tensor([target for target in targets if target is not None], dtype=torch.int64)
        return F.cross_entropy(logits[chosen], wanted, reduction="none")


def _flat(slope: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
    return torch.zeros(weight.numel(), dtype=torch.float64) if slope is None else slope.flatten().double()
