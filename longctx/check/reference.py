"""Reference: hidden states, and gradients of single predictions, by plain transformers in float64.

A step's gradient is the sum over predictions t of w(t) · ∂loss(t): right is w(t) = 1/N for the N
targets of the step, and 0 for all else. On the matrix of the output layer W [V, H], whose input is
h(t) [H], ∂loss(t) = (softmax(W h(t)) - e(y(t))) h(t)ᵀ, which depends on the forward pass alone. So
least squares on it give every w(t), and the residual says whether the trainer had these h(t): its
context. With both, the gradients of all other parameters follow; where they differ, the backward
pass is wrong. Without a gradient of its own (tied embeddings, adapters) the output layer has no
such matrix, and all gradients are fitted at once: then forward and backward are not told apart.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, cast

import torch
from torch.nn import functional as F

from .contexts import Sequence
from .errors import CheckError
from .gathered import Record
from .looked import Parts, keep_parts, of_tokens
from .objectives import CHANGES, final_logits
from .split_softmax import Errors, right_errors
from .tensors import Tensors

LAST = "input of the output layer"
"""Words for the last part, whose hidden states are wrong in any case."""


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
        self.errors: Errors = right_errors
        """What a loss sends back to logits."""
        self.order = list(named)
        """Names of all parameters in the order of the model."""
        self.named = {name: named[name] for name in record.gradients}
        _require_shapes(record.gradients, self.named)
        self.missing = {
            name: weight
            for name, weight in named.items()
            if weight.requires_grad and name not in record.gradients
        }
        """Parameters that were trained when the step began, and have no gradient on any rank."""
        own = [name for name, weight in self.named.items() if weight is self.head.weight]
        is_tied = self.head.weight is self.model.get_input_embeddings().weight
        if own and not is_tied:
            self.output: str | None = own[0]
        else:
            self.output = None
        fitted = dict(self.named)
        if own and is_tied and len(self.named) > 1:
            del fitted[own[0]]
        self.fitted = fitted
        """Parameters whose gradients are fitted at once without one of the output layer: all but a
        tied one, of which a share may be missing."""
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
        self._positions: tuple[int, ...] = ()
        for module in self.model.modules():
            if hasattr(module, "build_alibi_tensor"):  # BLOOM's, of a mask of two dimensions
                build = partial(type(module).build_alibi_tensor, module)
                module.build_alibi_tensor = partial(self._alibi, build)
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

    def _alibi(
        self, build: Callable[..., torch.Tensor], _: Any, heads: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Returns what is added to scores for the positions of the sequence that is run
        [heads, 1, keys]."""
        by_one = build(torch.ones(1, 2), heads, dtype=dtype)[..., 1:]
        return by_one * torch.tensor(self._positions, dtype=dtype)

    def id_of(self, number: int) -> int:
        if number >= 0:
            return self.tokens.ids[number]
        return self.tokens.probe.pad

    def logits(self, sequence: Sequence) -> torch.Tensor:
        """Returns logits [tokens, V]."""
        logits: torch.Tensor = self.model(**self._inputs(sequence)).logits[0]
        return logits

    def _inputs(self, sequence: Sequence) -> dict[str, Any]:
        ids = torch.tensor([[self.id_of(number) for number in sequence.numbers]])
        self._positions = sequence.positions
        return {
            "input_ids": ids,
            "position_ids": torch.tensor([sequence.positions]),
            "attention_mask": self._mask(sequence),
            "use_cache": False,
        }

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
        two = Sequence((0, 1), (0, 1))
        with torch.no_grad():
            logits = self.logits(two)
            expected = final_logits(self.output_of(two), self.config)
        return not float((logits - expected).norm()) <= 1e-9 * float(logits.norm())

    def states(self, sequence: Sequence) -> torch.Tensor:
        """Returns what the output layer gets [tokens, H]."""
        with torch.no_grad():
            return self._around_output(sequence)[0]

    def parts(self, sequence: Sequence) -> dict[str, torch.Tensor]:
        """Returns inputs and outputs of the parts of layers [tokens, width], in the order in which
        they ran, and at last what the output layer gets."""
        kept = Parts()
        last = list[torch.Tensor]()
        hooks = keep_parts(self.model, kept)
        keeper = self.head.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0]))
        hooks.append(keeper)
        try:
            self.logits(sequence)
        finally:
            for hook in hooks:
                hook.remove()
        return of_tokens(kept, len(sequence.numbers)) | {LAST: last[0][0].detach()}

    def router_logits(self, sequence: Sequence) -> list[torch.Tensor] | None:
        """Returns what routers return of each layer [tokens, experts]; None without routers that
        transformers know of."""
        model = self.model
        if hasattr(model, "get_base_model"):
            model = model.get_base_model()
        # Not the whole model, which would compute the loss with a mask of four dimensions.
        output = model.base_model(**self._inputs(sequence), output_router_logits=True)
        of_layers = getattr(output, "router_logits", None)
        if not of_layers:
            return None
        return [each.flatten(0, -2) for each in of_layers]

    def losses(self, sequence: Sequence, predictions: Iterable[Prediction]) -> torch.Tensor:
        """Returns the cross-entropy of each prediction of a sequence."""
        places, targets = zip(*((each.place, each.target) for each in predictions), strict=True)
        logits = self.logits(sequence)[list(places)].double()
        return F.cross_entropy(logits, torch.tensor(targets), reduction="none")

    def columns(self, predictions: Iterable[Prediction]) -> Columns:
        """Returns a column for each prediction."""
        left = list[torch.Tensor]()
        right = list[torch.Tensor]()
        for sequence, chosen in _by_sequence(predictions):
            if self.output is None:
                for loss in self.losses(sequence, chosen):
                    found = torch.autograd.grad(
                        loss, list(self.fitted.values()), retain_graph=True, allow_unused=True
                    )
                    left.append(self._flat(dict(zip(self.fitted, found, strict=True))).T)
                    right.append(torch.ones(1, 1, dtype=torch.float64))
                continue
            own = self._columns_of_output(sequence, chosen)
            left.append(own.left)
            right.append(own.right)
        none = torch.zeros(0, 1, dtype=torch.float64)
        if left:
            return Columns(torch.cat(left), torch.cat(right))
        return Columns(none, none)

    def _columns_of_output(self, sequence: Sequence, chosen: list[Prediction]) -> Columns:
        """Returns a column of the output layer for each prediction of a sequence."""
        logits, slopes, states = self._at_output(sequence)
        places = [each.place for each in chosen]
        targets = torch.tensor([each.target for each in chosen])
        errors = self.errors(torch.softmax(logits[places], -1), targets)
        return Columns(errors * slopes[places], states[places])

    def of(self, gradients: Tensors) -> torch.Tensor:
        """Returns what `columns` explain: the gradient of the output layer, or all gradients in one
        column."""
        if self.output is None:
            return self._flat(gradients)
        return gradients[self.output]

    def _flat(self, gradients: Mapping[str, torch.Tensor | None]) -> torch.Tensor:
        """Returns gradients in one column [P, 1]."""
        each = ((gradients.get(name), weight) for name, weight in self.fitted.items())
        return torch.cat(
            [
                torch.zeros_like(weight).flatten() if slope is None else slope.flatten()
                for slope, weight in each
            ]
        )[:, None]

    def loss(self, weights: Mapping[Prediction, float]) -> float:
        """Returns the loss of predictions with these weights."""
        total = 0.0
        with torch.no_grad():
            for sequence, chosen in _by_sequence(weights):
                total += float(self._weighted_loss(sequence, chosen, weights))
        return total

    def gradients(self, weights: Mapping[Prediction, float]) -> "Gradients":
        """Returns gradients for predictions with these weights."""
        self.model.zero_grad(set_to_none=True)
        for sequence, chosen in _by_sequence(weights):
            self._weighted_loss(sequence, chosen, weights).backward()
        return self.taken()

    def slopes_of(self, weights: Mapping[Prediction, float]) -> dict[Sequence, torch.Tensor]:
        """Returns ∂loss/∂ of what the output layer returns, for the tokens of each sequence
        [tokens, V], for predictions with these weights."""
        found = dict[Sequence, torch.Tensor]()
        for sequence, chosen in _by_sequence(weights):
            columns = self._columns_of_output(sequence, chosen).left
            slopes = found.setdefault(
                sequence, torch.zeros(len(sequence.numbers), columns.shape[1], dtype=torch.float64)
            )
            for each, column in zip(chosen, columns, strict=True):
                slopes[each.place] += weights[each] * column
        return found

    def gradients_of(self, slopes: Mapping[Sequence, torch.Tensor]) -> "Gradients":
        """Returns gradients for ∂loss/∂ of what the output layer returns, for the tokens of each
        sequence [tokens, V]."""
        self.model.zero_grad(set_to_none=True)
        for sequence, each in slopes.items():
            self.output_of(sequence).backward(each)
        return self.taken()

    def _weighted_loss(
        self,
        sequence: Sequence,
        chosen: list[Prediction],
        weights: Mapping[Prediction, float],
    ) -> torch.Tensor:
        given = torch.tensor([weights[each] for each in chosen], dtype=torch.float64)
        return (self.losses(sequence, chosen) * given).sum()

    def output_of(self, sequence: Sequence) -> torch.Tensor:
        """Returns what the output layer returns [tokens, V]."""
        return self._around_output(sequence)[1]

    def _around_output(self, sequence: Sequence) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what the output layer gets [tokens, H], and returns [tokens, V]."""
        kept: list[torch.Tensor] = []

        def keep(_: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
            kept.extend((inputs[0][0], output[0]))

        hook = self.head.register_forward_hook(keep)
        try:
            self.logits(sequence)
        finally:
            hook.remove()
        return kept[0], kept[1]

    def taken(self) -> "Gradients":
        """Returns the gradients that the model has, and leaves none."""
        found = {
            name: torch.zeros_like(w) if w.grad is None else w.grad.double()
            for name, w in self.named.items()
        }
        missing = [name for name, weight in self.missing.items() if weight.grad is not None]
        self.model.zero_grad(set_to_none=True)
        return Gradients(found, missing)


class Gradients(NamedTuple):
    """Gradients of all parameters that have one in the step, and names of the `missing` ones that
    would have one."""

    of: Tensors
    missing: list[str]


def _by_sequence(predictions: Iterable[Prediction]) -> Iterator[tuple[Sequence, list[Prediction]]]:
    """Yields predictions of one sequence at a time, in their order."""
    for sequence, chosen in groupby(predictions, key=lambda each: each.sequence):
        yield sequence, list(chosen)
