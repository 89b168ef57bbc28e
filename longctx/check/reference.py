"""Reference: hidden states, and gradients of single predictions, by plain transformers in float64.

A step's gradient is the sum over predictions t of w(t) · ∂loss(t): right is w(t) = 1/N for the N
targets of the step, and 0 for all else. On the matrix of the output layer W [V, H], whose input is
h(t) [H], ∂loss(t) = (softmax(W h(t)) - e(y(t))) h(t)ᵀ, which depends on the forward pass alone. So
least squares on it give every w(t), and the residual says whether the trainer had these h(t): its
context. With both, the gradients of all other parameters follow; where they differ, the backward
pass is wrong. Without a gradient of its own (tied embeddings, adapters) the output layer has no
such matrix, and all gradients are fitted at once: then forward and backward are not told apart.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any, NamedTuple, cast

import torch
from torch.nn import functional as F

from .contexts import Sequence
from .errors import CheckError
from .looked import CHANGES, Parts, final_logits, keep_parts, of_tokens
from .record import Record, Tensors


class Prediction(NamedTuple):
    """The id that a place of a sequence predicts."""

    sequence: Sequence
    place: int
    target: int

    @property
    def number(self) -> int:
        """Number of the token at the place; -1: padding."""
        return self.sequence.numbers[self.place]


class Columns(NamedTuple):
    """∂loss of single predictions, each of rank one: on the output layer, or on all trained
    parameters as one column."""

    left: torch.Tensor
    """∂loss/∂(W h) [T, V], or gradients [T, P]."""
    right: torch.Tensor
    """h [T, H], or ones [T, 1]."""

    def sum(self, weights: torch.Tensor) -> torch.Tensor:
        """Returns their weighted sum: a gradient [V, H] or [P, 1]."""
        return (self.left * weights[:, None]).T @ self.right

    def solve(self, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what least squares leave of a gradient, and the weights of the columns."""
        if not len(self.left):
            return wanted, torch.zeros(0, dtype=torch.float64)
        gram = (self.left @ self.left.T) * (self.right @ self.right.T)
        scale = gram.diagonal().sqrt().clamp_min(1e-300)
        gram = gram / scale[:, None] / scale[None, :]
        projected = ((self.left @ wanted) * self.right).sum(1) / scale
        lower, failed = torch.linalg.cholesky_ex(gram)
        # Two columns that are alike: they share the weight.
        if failed or float(lower.diagonal().min()) < 1e-5:
            values, vectors = torch.linalg.eigh(gram)
            kept = ~(values <= 1e-11 * values[-1])
            weights = (vectors[:, kept] / values[kept]) @ (vectors[:, kept].T @ projected) / scale
        else:
            weights = torch.cholesky_solve(projected[:, None], lower)[:, 0] / scale
        return wanted - self.sum(weights), weights


def _require_shapes(gradients: Mapping[str, torch.Tensor], named: Mapping[str, Any]) -> None:
    """Raises CheckError for a gradient that has another shape than its parameter."""
    for name, weight in named.items():
        shape = list(gradients[name].shape)
        if shape != list(weight.shape):
            raise CheckError(
                f"the gradient of {name} is {shape}, and the parameter of the reference "
                f"{list(weight.shape)}: gather it, or turn it"
            )


class Reference:
    """The model of a record, which runs sequences as contexts want them."""

    def __init__(self, record: Record) -> None:
        self.tokens = record.tokens
        self.model = cast(Any, record.reference)
        self.config = self.model.config
        self.head = self.model.get_output_embeddings()
        named = dict(self.model.named_parameters())
        if unknown := record.gradients.keys() - named.keys():
            raise CheckError(
                f"the reference has no parameter {min(unknown)}: name gradients as "
                f"{next(iter(named))}"
            )
        self.named = {name: named[name] for name in record.gradients}
        _require_shapes(record.gradients, self.named)
        self.missing = {
            name: weight
            for name, weight in named.items()
            if weight.requires_grad and name not in record.gradients
        }
        """Parameters that were trained when the step began, and have no gradient on any rank."""
        own = [name for name, weight in self.named.items() if weight is self.head.weight]
        if own and self.head.weight is not self.model.get_input_embeddings().weight:
            self.output: str | None = own[0]
        else:
            self.output = None
        plain = (
            self.output
            and self.head.bias is None
            and not any(getattr(self.config, name, None) for name in CHANGES)
        )
        self.matrix: torch.Tensor | None = self.head.weight.detach() if plain else None
        """W [V, H], if the output layer has a gradient of its own, and logits are W h and nothing
        more."""
        window = getattr(self.config, "sliding_window", None)
        self.window: int | None = (
            window if getattr(self.config, "use_sliding_window", True) else None
        )
        try:
            self.logits(Sequence((0, 1), (0, 1)))
        except (RuntimeError, ValueError, TypeError, IndexError, KeyError) as error:
            raise CheckError(
                f"transformers cannot run {type(self.model).__name__} with a mask and positions: "
                f"{error}"
            ) from error

    def _mask(self, sequence: Sequence) -> Any:
        """Returns what eager attention adds to scores [1, 1, queries, keys], by kind of layer where
        there are several."""
        layer_types = getattr(self.config, "layer_types", None) or ()
        if any("linear" in kind or "mamba" in kind for kind in layer_types):
            return None
        place = torch.arange(len(sequence.numbers))
        distance = place[:, None] - place[None, :]
        seen = distance >= {"both": -len(place), "next": -1}.get(sequence.sight, 0)
        if sequence.sight == "no padding":
            seen &= torch.tensor(sequence.numbers)[None, :] >= 0
        if self.window is None or sequence.sight == "no window":
            near = seen
        else:
            near = seen & (distance < self.window)
        full, sliding = ((~visible).double()[None, None] * -1e30 for visible in (seen, near))
        if layer_types and self.window is not None:
            return {"full_attention": full, "sliding_attention": sliding}
        return sliding

    def id_of(self, number: int) -> int:
        if number >= 0:
            return self.tokens.ids[number]
        return self.tokens.probe.pad

    def logits(self, sequence: Sequence) -> torch.Tensor:
        """Returns logits [tokens, V]."""
        ids = torch.tensor([[self.id_of(number) for number in sequence.numbers]])
        inputs = {"input_ids": ids, "position_ids": torch.tensor([sequence.positions])}
        logits: torch.Tensor = self.model(
            **inputs, attention_mask=self._mask(sequence), use_cache=False
        ).logits[0]
        return logits

    def _at_output(self, sequence: Sequence) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns logits, their slopes by what the output layer returns [tokens, V], and what that
        gets [tokens, H]."""
        kept: list[torch.Tensor] = []

        def cut(_: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
            kept.extend((inputs[0].detach()[0], output.detach().requires_grad_()))
            return kept[1]

        hook = self.head.register_forward_hook(cut)
        try:
            logits = self.logits(sequence)
        finally:
            hook.remove()
        (slopes,) = torch.autograd.grad(logits.sum(), kept[1])
        return logits.detach(), slopes[0], kept[0]

    def changes_logits_otherwise(self) -> bool:
        """Returns whether logits are not what `final_logits` makes of the output layer's: then its
        slopes cannot be compared with those of cross-entropy."""
        kept: list[torch.Tensor] = []
        hook = self.head.register_forward_hook(lambda _, inputs, output: kept.append(output))
        try:
            with torch.no_grad():
                logits = self.logits(Sequence((0, 1), (0, 1)))
        finally:
            hook.remove()
        expected = final_logits(kept[0][0], self.config)
        return not float((logits - expected).norm()) <= 1e-9 * float(logits.norm())

    def states(self, sequence: Sequence) -> torch.Tensor:
        """Returns what the output layer gets [tokens, H]."""
        return self._at_output(sequence)[2]

    def parts(self, sequence: Sequence) -> dict[str, torch.Tensor]:
        """Returns outputs of the parts of layers [tokens, width], in the order in which they
        ran."""
        kept = Parts()
        hooks = keep_parts(self.model, kept)
        try:
            self.logits(sequence)
        finally:
            for hook in hooks:
                hook.remove()
        return of_tokens(kept, len(sequence.numbers))

    def losses(self, sequence: Sequence, predictions: Iterable[Prediction]) -> torch.Tensor:
        """Returns the cross-entropy of each prediction of a sequence."""
        places, targets = zip(*((each.place, each.target) for each in predictions), strict=True)
        return F.cross_entropy(
            self.logits(sequence)[list(places)], torch.tensor(targets), reduction="none"
        )

    def columns(self, predictions: Iterable[Prediction]) -> Columns:
        """Returns a column for each prediction."""
        left = list[torch.Tensor]()
        right = list[torch.Tensor]()
        for sequence, chosen in _by_sequence(predictions):
            if self.output is None:
                for loss in self.losses(sequence, chosen):
                    found = torch.autograd.grad(
                        loss, list(self.named.values()), retain_graph=True, allow_unused=True
                    )
                    left.append(self._flat(dict(zip(self.named, found, strict=True))).T)
                    right.append(torch.ones(1, 1, dtype=torch.float64))
                continue
            logits, slopes, states = self._at_output(sequence)
            places = [each.place for each in chosen]
            errors = torch.softmax(logits[places], -1)
            errors[range(len(chosen)), [each.target for each in chosen]] -= 1
            left.append(errors * slopes[places])
            right.append(states[places])
        none = torch.zeros(0, 1, dtype=torch.float64)
        if left:
            return Columns(torch.cat(left), torch.cat(right))
        return Columns(none, none)

    def of(self, gradients: Tensors) -> torch.Tensor:
        """Returns what `columns` explain: the gradient of the output layer, or all gradients in one
        column."""
        if self.output is None:
            return self._flat(gradients)
        return gradients[self.output]

    def _flat(self, gradients: Mapping[str, torch.Tensor | None]) -> torch.Tensor:
        """Returns gradients in one column [P, 1]."""
        each = ((gradients.get(name), weight) for name, weight in self.named.items())
        return torch.cat(
            [
                torch.zeros_like(weight).flatten() if slope is None else slope.flatten()
                for slope, weight in each
            ]
        )[:, None]

    def gradients(self, weights: Mapping[Prediction, float]) -> tuple[float, Tensors, list[str]]:
        """Returns loss and gradients of all parameters that have one in the step, for predictions
        with these weights, and the names of the `missing` ones that would have one."""
        self.model.zero_grad(set_to_none=True)
        total = 0.0
        for sequence, chosen in _by_sequence(weights):
            given = torch.tensor([weights[each] for each in chosen], dtype=torch.float64)
            (loss := (self.losses(sequence, chosen) * given).sum()).backward()
            total += float(loss.detach())
        found = {
            name: torch.zeros_like(w) if w.grad is None else w.grad.clone()
            for name, w in self.named.items()
        }
        missing = [name for name, weight in self.missing.items() if weight.grad is not None]
        self.model.zero_grad(set_to_none=True)
        return total, found, missing


def _by_sequence(predictions: Iterable[Prediction]) -> Iterator[tuple[Sequence, list[Prediction]]]:
    """Yields predictions of one sequence at a time, in their order."""
    for sequence, chosen in groupby(predictions, key=lambda each: each.sequence):
        yield sequence, list(chosen)
