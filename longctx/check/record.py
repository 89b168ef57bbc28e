"""Records of one optimizer step on every rank: weights before it, gradients before the optimizer,
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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from .errors import CheckError
from .largest import largest
from .looked import Looked, Output, Parts, keep_parts, look
from .probe import END, PAD, Tokens

Tensors = dict[str, torch.Tensor]
FEWEST_NEIGHBOURS = 16
"""Fewest pairs of neighbouring tokens that tell whether a step was made on a probe."""


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


@dataclass
class Recorder:
    """What a model was called with since `record`."""

    model: Any
    reference: nn.Module
    calls: list[torch.Tensor] = field(default_factory=list)
    positions: list[torch.Tensor | None] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    parts: Parts = field(default_factory=dict)

    def step(
        self,
        loss: float | None = None,
        grad_norm: float | None = None,
        rows: Sequence[torch.Tensor] = (),
        model: Any = None,
    ) -> Step:
        """Returns the step with the gradients that there are now, of `model` if the recorded one
        was replaced by it.

        Collective if parameters are sharded (DTensor).
        """
        named = (model or self.model).named_parameters()
        gradients = {
            plain_name(name): whole(weight.grad)
            for name, weight in named
            if weight.grad is not None
        }
        return Step(
            self.reference,
            gradients,
            calls=self.calls,
            loss=loss,
            grad_norm=grad_norm,
            rows=rows,
            positions=self.positions,
            outputs=self.outputs,
            parts={plain_name(name): outputs for name, outputs in self.parts.items()},
        )


@contextmanager
def record(model: Any) -> Iterator[Recorder]:
    """Records the calls of a model and its weights at the beginning; raises CheckError for what no
    reference can repeat."""
    seen = Recorder(model, reference_of(model))

    def see(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        ids = inputs[0] if inputs else named["input"]
        if torch.is_autocast_enabled(ids.device.type):
            raise CheckError(
                "the model runs under autocast: rounding would hide faults below 1 %; switch mixed "
                "precision off"
            )
        if torch.is_grad_enabled():
            seen.calls.append(whole(ids).cpu())

    def place(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        positions = named.get("position_ids")
        if torch.is_grad_enabled():
            seen.positions.append(
                positions.cpu() if positions is not None and positions.dim() <= 2 else None
            )

    def keep(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], logits: Any) -> None:
        if torch.is_grad_enabled() and logits.requires_grad:
            states = inputs[0] if inputs else named["input"]
            output = Output(states.detach().clone(), logits.detach().clone())
            seen.outputs.append(output)
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


def reference_of(model: Any) -> nn.Module:
    """Returns a copy of the model that runs as plain transformers do, in float64 on the CPU, with
    eager attention.

    Raises CheckError for dropout, other dtypes than float32, and models that are no causal LM of
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
    dtypes = {
        str(weight.dtype).removeprefix("torch.")
        for weight in model.parameters()
        if weight.is_floating_point()
    }
    if dtypes - {"float32", "float64"}:
        raise CheckError(
            f"weights are {', '.join(sorted(dtypes))}: rounding would hide faults below 1 %; make "
            "them float32"
        )
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


def plain_name(name: str) -> str:
    """Returns the name of a parameter without what wrappers add."""
    for added in ("module.", "_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module."):
        name = name.replace(added, "") if added != "module." else name.removeprefix(added)
    return name


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy, gathered if the tensor is a DTensor (collective then)."""
    full = getattr(tensor, "full_tensor", None)
    return (full() if full is not None else tensor).detach().clone()


class Row(NamedTuple):
    """A row of token ids: their numbers in the probe, its rank, its call on it, and positions if
    the call was given some."""

    ids: list[int]
    numbers: list[int]
    rank: int
    call: int
    positions: list[int]


@dataclass
class Record:
    """A step of all ranks on a probe's tokens: the same everywhere.

    Attributes:
        gradients: float64, mean of the ranks'.
        apart: names of parameters whose gradients differ between ranks, with the largest difference
            relative to the mean.
        calls: rows of all calls.
        rows: rows of batches before they were split over ranks, if `batched`; else those of calls.
        loss, norm: as a rank logged them.
        looked: what the output layer of each rank shows; None where it does not on all.
    """

    tokens: Tokens
    reference: nn.Module
    ranks: int
    gradients: Tensors
    apart: dict[str, float]
    calls: list[Row]
    rows: list[Row]
    batched: bool
    loss: float | None
    norm: float | None
    looked: list[Looked] | None = None

    @property
    def documents(self) -> list[int]:
        """Documents with a token in a call."""
        return sorted(
            {
                self.tokens.document[number]
                for row in self.calls
                for number in row.numbers
                if number >= 0
            }
        )


def gather(step: Step, tokens: Tokens) -> Record:
    """Returns the steps of all ranks as one. Collective if there is a process group.

    Raises CheckError, on all ranks, for calls on other ids than the probe's.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    calls = _called(step, tokens, rank)
    batches = [row for call, ids in enumerate(step.rows) for row in _rows(tokens, rank, call, ids)]
    gradients = {name: value.double().cpu() for name, value in step.gradients.items()}
    count = sum(ids.numel() for ids in step.calls)
    config = getattr(step.reference, "config", None)
    looked = look(step.outputs, step.parts, tokens=count, config=config)
    mine = (gradients, calls, batches, step.loss, step.grad_norm, looked)
    everyones = _of_all_ranks(mine)
    of_ranks, all_calls, all_batches, losses, norms, all_looked = zip(*everyones, strict=True)
    called = [row for rows in all_calls for row in rows]
    _require_ids_of_the_probe(called, tokens)
    used = {token for row in called for token in row.ids}
    batched = [row for rows in all_batches for row in rows if set(row.ids) & used]
    mean, apart = _mean(of_ranks)
    return Record(
        tokens,
        step.reference,
        ranks=len(of_ranks),
        gradients=mean,
        apart=apart,
        calls=called,
        rows=batched or called,
        batched=bool(batched),
        loss=_first(losses),
        norm=_first(norms),
        looked=None if None in all_looked else list(all_looked),
    )


def _of_all_ranks(mine: Any) -> list[Any]:
    """Returns an object of every rank. Collective if there is a process group."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine]
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    return everyones


def _called(step: Step, tokens: Tokens, rank: int) -> list[Row]:
    """Returns the rows of all calls of a rank's step."""
    if len(step.positions) == len(step.calls):
        positions = step.positions
    else:
        positions = [None] * len(step.calls)
    return [
        row
        for call, (ids, at) in enumerate(zip(step.calls, positions, strict=True))
        for row in _rows(tokens, rank, call=call, ids=ids, positions=at)
    ]


def _first(values: Sequence[float | None]) -> float | None:
    """Returns the first number that a rank has."""
    return next((value for value in values if value is not None), None)


def _require_ids_of_the_probe(rows: Sequence[Row], tokens: Tokens) -> None:
    """Raises CheckError for ids that the probe does not have, and for its ids in an order that no
    split of its documents has: such a step was made on other data."""
    known = {PAD, END, *tokens.ids}
    unknown = sorted({token for row in rows for token in row.ids if token not in known})
    if unknown:
        raise CheckError(
            f"id {unknown[0]} was in a call of the model ({len(unknown)} such ids), which the "
            "probe does not have: train on `probe.rows`, and pad with `probe.pad`"
        )
    neighbours = 0
    ordered = 0
    for row in rows:
        for number, after in pairwise(row.numbers):
            if number < 0 or after < 0:
                continue
            neighbours += 1
            ordered += after > number and tokens.document[after] == tokens.document[number]
    if neighbours >= FEWEST_NEIGHBOURS and ordered < neighbours / 4:
        raise CheckError(
            f"of {neighbours} neighbouring tokens only {ordered} are of one document of the probe "
            "and in its order: train on `probe.rows`, not on other data"
        )


def _rows(
    tokens: Tokens, rank: int, call: int, ids: torch.Tensor, positions: torch.Tensor | None = None
) -> Iterator[Row]:
    """Yields the rows of [rows, tokens] or [tokens]. Positions of another length belong to ids that
    the model splits itself."""
    rows = ids.reshape(-1, ids.shape[-1]).tolist()
    at: list[list[int]] = [[] for _ in rows]
    if positions is not None and positions.shape[-1] == ids.shape[-1]:
        at = positions.expand(ids.shape).reshape(-1, ids.shape[-1]).tolist()
    for row, places in zip(rows, at, strict=True):
        yield Row(row, tokens.numbers(row), rank=rank, call=call, positions=places)


def _mean(of_ranks: Sequence[Tensors]) -> tuple[Tensors, dict[str, float]]:
    """Returns the mean gradients of ranks, and how far those that differ are apart, relative to the
    mean."""
    mean = Tensors()
    apart = dict[str, float]()
    for name in dict.fromkeys(name for gradients in of_ranks for name in gradients):
        found = [gradients.get(name) for gradients in of_ranks]
        mean[name] = torch.stack([each for each in found if each is not None]).sum(0) / len(found)
        if not mean[name].isfinite().all():  # which the verdict says of the mean
            continue
        most = largest(
            float((mean[name] if each is None else each - mean[name]).norm()) for each in found
        )
        if not most <= 1e-5 * float(mean[name].norm()):
            apart[name] = most / max(float(mean[name].norm()), 1e-30)
    return mean, apart
