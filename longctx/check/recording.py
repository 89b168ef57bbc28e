"""Recorder of one optimizer step on one rank: weights before it, gradients before the optimizer,
token ids of every call, log.

# A model of transformers, or its PEFT model, before anything wraps it.
with record(model) as seen:
    ...                                      # forward and backward of all micro-batches
    step = seen.step(loss=.., grad_norm=..)  # before clipping, or with a limit out of reach
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from .aim import Aim
from .errors import CheckError
from .looked import Output, Parts, keep_parts, plain_name
from .tensors import Tensors, gradients_of, whole
from .tolerances import NAMES, OF, coarsest
from .watched import Asked, Update, Watch

NEAR_ROW = 0.01
"""Share of an embedding's length by which what a model was called with may differ from it."""


@dataclass
class Step:
    """One optimizer step of one rank, as a trainer made it.

    Attributes:
        reference: a causal LM of transformers, or a PEFT model, with the weights from before the
            step and `eager` attention.
        gradients: of its parameters, by their names in it, before clipping and before the
            optimizer.
        calls: token ids of every call of the model, in order: [rows, tokens] or [tokens].
        loss, grad_norm: as the trainer logged them; None if it did not.
        rows: token ids of batches before they were split over ranks; without, rows are those of
            calls.
        positions: of every call, if it was given some, as the calls or [tokens].
        outputs: every call of the output layer; without, what it got and what backward brought it
            are inferred from its gradient.
        parts: outputs of the parts of layers, to tell the first that is wrong.
        dtype: the coarsest in which weights, hidden states or logits were kept.
        changed_at: number of the first call with other weights than the call before it; 0: none.
        not_finite_in: words for the first part of a layer that is not finite; "": none.
        updates: of the optimizers that are watched.
        aim: how much each prediction should count; without, all targets alike.
        before: gradients that parameters had before the step; none of zeros.
        first_sums: sums of whole parameters at the first call, by name.
    """

    reference: nn.Module
    gradients: Tensors
    calls: Sequence[torch.Tensor]
    loss: float | None = None
    grad_norm: float | None = None
    rows: Sequence[torch.Tensor] = ()
    positions: Sequence[torch.Tensor | None] = ()
    outputs: Sequence[Output] = ()
    parts: Parts = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    changed_at: int = 0
    not_finite_in: str = ""
    updates: Sequence[Update] = ()
    aim: Aim = field(default_factory=Aim)
    before: Tensors = field(default_factory=dict)
    first_sums: dict[str, float] = field(default_factory=dict)


@dataclass
class Recorder:
    """What a model was called with since `record`, and the dtypes that it computed in."""

    model: Any
    reference: nn.Module
    dtypes: set[torch.dtype]
    before: Tensors
    sums: list[list[float]] = field(default_factory=list)
    first_sums: dict[str, float] = field(default_factory=dict)
    calls: list[torch.Tensor] = field(default_factory=list)
    positions: list[torch.Tensor | None] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    parts: Parts = field(default_factory=dict)
    watches: list[Watch] = field(default_factory=list)

    def watch(
        self,
        optimizer: Any,
        *,
        lr: float | None = None,
        weight_decay: float | None = None,
        max_norm: float | None = None,
        model: Any = None,
    ) -> None:
        """Has what an optimizer does until the end of `record` judged, too; call it before the
        optimizer steps. Settings are those that you mean, `max_norm` the limit of gradients' norm;
        `model`: as of `step`.

        Raises CheckError for what is no optimizer of torch.
        """
        asked = Asked(lr, weight_decay, max_norm=max_norm)
        self.watches.append(Watch(optimizer, model or self.model, asked))

    def step(
        self,
        loss: float | None = None,
        grad_norm: float | None = None,
        rows: Sequence[torch.Tensor] = (),
        model: Any = None,
        aim: Aim | None = None,
    ) -> Step:
        """Returns the step with the gradients that there are now, of `model` if the recorded one
        was replaced by it; `aim`: by default the mean of all targets.

        Collective if parameters are sharded (DTensor).
        """
        pairs = enumerate(pairwise(self.sums), start=1)
        not_finite = (
            name
            for name, outputs in self.parts.items()
            if not all(output.isfinite().all() for output in outputs)
        )
        return Step(
            self.reference,
            gradients_of(model or self.model),
            calls=self.calls,
            loss=loss,
            grad_norm=grad_norm,
            rows=rows,
            positions=self.positions,
            outputs=self.outputs,
            parts=self.parts,
            dtype=coarsest(self.dtypes),
            changed_at=next((at for at, (one, next_one) in pairs if one != next_one), 0),
            not_finite_in=next(not_finite, ""),
            updates=[each.update for each in self.watches],
            aim=aim or Aim(),
            before=self.before,
            first_sums=self.first_sums,
        )


@contextmanager
def record(model: Any) -> Iterator[Recorder]:
    """Records the calls of a model and its weights at the beginning; raises CheckError for what no
    reference can repeat."""
    reference = reference_of(model)
    before = {name: each for name, each in gradients_of(model).items() if each.any()}
    seen = Recorder(model, reference, dtypes=_dtypes_of(model), before=before)

    def see(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        ids = inputs[0] if inputs else named["input"]
        if not seen.first_sums:
            seen.first_sums = _sums_of_all(model, reference)
        if torch.is_autocast_enabled(ids.device.type):
            seen.dtypes.add(torch.get_autocast_dtype(ids.device.type))
        if torch.is_grad_enabled():
            seen.calls.append(whole(ids).cpu())
            seen.sums.append(_sums(model))

    def place(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        positions = named.get("position_ids")
        embedded = named.get("inputs_embeds")
        if torch.is_grad_enabled():
            if embedded is not None and len(seen.calls) == len(seen.positions):
                seen.calls.append(_ids_of(embedded, model))
                seen.sums.append(_sums(model))
            seen.positions.append(
                positions.cpu() if positions is not None and positions.dim() <= 2 else None
            )

    def keep(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], logits: Any) -> None:
        if torch.is_grad_enabled() and logits.requires_grad:
            states = inputs[0] if inputs else named["input"]
            output = Output(states.detach().clone(), logits.detach().clone())
            seen.outputs.append(output)
            seen.dtypes |= {states.dtype, logits.dtype} & OF.keys()
            logits.register_hook(output.add)

    hooks = [model.get_input_embeddings().register_forward_pre_hook(see, with_kwargs=True)]
    hooks.append(model.register_forward_pre_hook(place, with_kwargs=True))
    hooks.append(model.get_output_embeddings().register_forward_hook(keep, with_kwargs=True))
    hooks += keep_parts(model, seen.parts)
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
        for watch in seen.watches:
            watch.remove()


def _ids_of(embedded: torch.Tensor, model: Any) -> torch.Tensor:
    """Returns the ids whose embeddings [rows, tokens, width] a model was called with. Raises
    CheckError for what is no row of its embedding."""
    embeddings = model.get_input_embeddings()
    with torch.no_grad():
        everyones = embeddings(torch.arange(embeddings.weight.shape[0], device=embedded.device))
        rows = embedded.detach().flatten(0, -2).float()
        distances = torch.cdist(rows, everyones.float())
    least, ids = distances.min(1)
    if not bool((least <= NEAR_ROW * rows.norm(dim=1)).all()):
        raise CheckError(
            "the model was called with inputs_embeds that are no rows of its embedding: call it "
            "with input_ids"
        )
    return ids.reshape(embedded.shape[:-1]).cpu()


def _sums_of_all(model: Any, reference: nn.Module) -> dict[str, float]:
    """Returns the sums of all parameters that are whole, as the reference's are, by plain names."""
    shapes = {name: weight.shape for name, weight in reference.named_parameters()}
    found = dict[str, float]()
    for name, weight in model.named_parameters():
        is_whole = type(weight) is nn.Parameter and weight.shape == shapes.get(plain_name(name))
        if is_whole:
            found[plain_name(name)] = float(weight.detach().double().sum())
    return found


def _sums(model: Any) -> list[float]:
    """Returns the sums of the first and the last matrix of a model, which tell whether weights
    changed; none of sharded ones."""
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    weights = (layer.weight.detach() for layer in layers)
    return [
        float(weight.double().sum())
        for weight in weights
        if type(weight) in (torch.Tensor, nn.Parameter)
    ]


def reference_of(model: Any) -> nn.Module:
    """Returns a copy of the model that runs as plain transformers do, in float64 on the CPU, with
    eager attention.

    Raises CheckError for dropout, dtypes without tolerances, and models that are no causal LM of
    transformers.
    """
    from transformers import AutoModelForCausalLM

    if noisy := [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Dropout) and module.p > 0
    ]:
        raise CheckError(
            f"{noisy[0]} drops at random ({len(noisy)} modules): set dropout to 0 in model and "
            "adapters"
        )
    config = getattr(model, "config", None)
    if any(
        value
        for name, value in vars(config or {}).items()
        if "dropout" in name and isinstance(value, float)
    ):
        raise CheckError("the model's config has a dropout above 0: set it to 0")
    if getattr(config, "output_router_logits", False):
        raise CheckError(
            "the loss of routers is another objective: set output_router_logits to False"
        )
    _dtypes_of(model)
    # Adapters that transformers' own add_adapter puts into a model leave it what it is.
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    try:
        plain: Any = AutoModelForCausalLM.from_config(
            copy.deepcopy(base.config), attn_implementation="eager", dtype=torch.float32
        )
        if hasattr(plain, "set_experts_implementation"):
            plain.set_experts_implementation("eager")
    except (ValueError, AttributeError) as error:
        raise CheckError(
            f"{type(base).__name__} is no causal LM that transformers run alone: {error}"
        ) from error
    plain = _with_adapters_of(model, plain)
    missing = plain.load_state_dict(
        {plain_name(name): whole(value) for name, value in model.state_dict().items()}, strict=False
    )
    if missing.missing_keys:
        raise CheckError(
            f"the model lacks {', '.join(missing.missing_keys[:3])}, which its config describes"
        )
    trained = {
        plain_name(name) for name, weight in model.named_parameters() if weight.requires_grad
    }
    for name, weight in plain.named_parameters():
        weight.requires_grad_(name in trained)
    reference: nn.Module = plain.double().eval()
    return reference


def _dtypes_of(model: Any) -> set[torch.dtype]:
    """Returns the dtypes of a model's weights. Raises CheckError for one without tolerances."""
    dtypes = {weight.dtype for weight in model.parameters() if weight.is_floating_point()}
    unknown = dtypes - OF.keys()
    if unknown:
        raise CheckError(
            f"weights are {', '.join(sorted(map(str, unknown)))}, for which check-step has no "
            f"tolerances: make them {', '.join(NAMES.values())}"
        )
    return dtypes


def _with_adapters_of(model: Any, plain: Any) -> Any:
    """Returns a plain model with new adapters in the places of those of a model."""
    configs = getattr(model, "peft_config", None)
    if not configs:
        return plain
    if hasattr(model, "get_base_model"):
        from peft import get_peft_model

        return get_peft_model(plain, configs["default"])
    for name, config in configs.items():
        plain.add_adapter(copy.deepcopy(config), adapter_name=name)
    plain.set_adapter(model.active_adapters())
    return plain
