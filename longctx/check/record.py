"""Records of one optimizer step on every rank: weights before it, gradients before the optimizer, token ids of every call, log.

with record(model) as seen:                  # of transformers, or its PEFT model, before anything wraps it
    ...                                      # forward and backward of all micro-batches
    step = seen.step(loss=.., grad_norm=..)  # before clipping, or with a limit out of reach
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from longctx.errors import UserError

Tensors = dict[str, torch.Tensor]


class CheckError(UserError):
    """A step that cannot be judged: exit status 3."""


@dataclass
class Step:
    """One optimizer step of one rank, as a trainer made it.

    Attributes:
        reference: a causal LM of transformers, or a PEFT model, with the weights from before the step and `eager` attention.
        gradients: of its parameters, by their names in it, before clipping and before the optimizer.
        calls: token ids of every call of the model, in order: [rows, tokens] or [tokens].
        loss, grad_norm: as the trainer logged them; None if it did not.
        rows: token ids of batches before they were split over ranks; without, rows are those of calls.
    """

    reference: nn.Module
    gradients: Tensors
    calls: Sequence[torch.Tensor]
    loss: float | None = None
    grad_norm: float | None = None
    rows: Sequence[torch.Tensor] = ()


@dataclass
class Recorder:
    """What a model was called with since `record`."""

    model: Any
    reference: nn.Module
    calls: list[torch.Tensor] = field(default_factory=list)

    def step(
        self, loss: float | None = None, grad_norm: float | None = None, rows: Sequence[torch.Tensor] = (), model: Any = None
    ) -> Step:
        """Returns the step with the gradients that there are now, of `model` if the recorded one was replaced by it.

        Collective if parameters are sharded (DTensor).
        """
        named = (model or self.model).named_parameters()
        gradients = {plain_name(name): whole(weight.grad) for name, weight in named if weight.grad is not None}
        return Step(self.reference, gradients, self.calls, loss, grad_norm, rows)


@contextmanager
def record(model: Any) -> Iterator[Recorder]:
    """Records the calls of a model and its weights at the beginning; raises CheckError for what no reference can repeat."""
    seen = Recorder(model, reference_of(model))

    def look(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        ids = inputs[0] if inputs else named["input"]
        if torch.is_grad_enabled():
            seen.calls.append(whole(ids).cpu())

    hook = model.get_input_embeddings().register_forward_pre_hook(look, with_kwargs=True)
    try:
        yield seen
    finally:
        hook.remove()


def reference_of(model: Any) -> nn.Module:
    """Returns a copy of the model that runs as plain transformers do, in float64 on the CPU, with eager attention.

    Raises CheckError for dropout, other dtypes than float32, and models that are no causal LM of transformers.
    """
    from transformers import AutoModelForCausalLM

    if noisy := [name for name, module in model.named_modules() if isinstance(module, nn.Dropout) and module.p > 0]:
        raise CheckError(f"{noisy[0]} drops at random ({len(noisy)} modules): set dropout to 0 in model and adapters")
    config = getattr(model, "config", None)
    if any(value for name, value in vars(config or {}).items() if "dropout" in name and isinstance(value, float)):
        raise CheckError("the model's config has a dropout above 0: set it to 0")
    dtypes = {str(weight.dtype).removeprefix("torch.") for weight in model.parameters() if weight.is_floating_point()}
    if dtypes - {"float32", "float64"}:
        raise CheckError(f"weights are {', '.join(sorted(dtypes))}: rounding would hide faults below 1 %; make them float32")
    adapters = getattr(model, "peft_config", None)
    base = model.get_base_model() if adapters else model
    try:
        plain: Any = AutoModelForCausalLM.from_config(
            copy.deepcopy(base.config), attn_implementation="eager", dtype=torch.float32
        )
        if hasattr(plain, "set_experts_implementation"):
            plain.set_experts_implementation("eager")
    except (ValueError, AttributeError) as error:
        raise CheckError(f"{type(base).__name__} is no causal LM that transformers run alone: {error}") from error
    if adapters:
        from peft import get_peft_model

        plain = get_peft_model(plain, adapters["default"])
    missing = plain.load_state_dict(
        {plain_name(name): whole(value) for name, value in model.state_dict().items()}, strict=False
    )
    if missing.missing_keys:
        raise CheckError(f"the model lacks {', '.join(missing.missing_keys[:3])}, which its config describes")
    trained = {plain_name(name) for name, weight in model.named_parameters() if weight.requires_grad}
    for name, weight in plain.named_parameters():
        weight.requires_grad_(name in trained)
    reference: nn.Module = plain.double().eval()
    return reference


def plain_name(name: str) -> str:
    """Returns the name of a parameter without what wrappers add."""
    for added in ("module.", "_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module."):
        name = name.replace(added, "") if added != "module." else name.removeprefix(added)
    return name


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy, gathered if the tensor is a DTensor (collective then)."""
    full = getattr(tensor, "full_tensor", None)
    return (full() if full is not None else tensor).detach().clone()


@dataclass
class Call:
    """One call of the model: its rank, its number on it, and token ids by row."""

    rank: int
    number: int
    rows: list[list[int]]


@dataclass
class Record:
    """A step of all ranks: the same everywhere.

    Attributes:
        gradients: float64, mean of the ranks'.
        apart: names of parameters whose gradients differ between ranks, with the largest difference relative to the mean.
        of_ranks: gradients of every rank.
        calls: of all ranks.
        rows: token ids of batches before they were split, if `batched`, or of calls.
        ranks: number of ranks.
        losses, norms: as every rank logged them.
    """

    reference: nn.Module
    gradients: Tensors
    apart: dict[str, float]
    of_ranks: list[Tensors]
    calls: list[Call]
    rows: list[list[int]]
    batched: bool
    losses: list[float | None]
    norms: list[float | None]

    @property
    def ranks(self) -> int:
        return len(self.of_ranks)


def gather(step: Step) -> Record:
    """Returns the steps of all ranks as one. Collective if there is a process group."""
    calls = [(call if call.dim() == 2 else call[None]).tolist() for call in step.calls]
    rows = [row for batch in step.rows for row in (batch if batch.dim() == 2 else batch[None]).tolist()]
    mine = ({name: value.double().cpu() for name, value in step.gradients.items()}, calls, rows, step.loss, step.grad_norm)
    everyones: list[Any] = [mine]
    if dist.is_initialized() and dist.get_world_size() > 1:
        everyones = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, mine)
    of_ranks, all_calls, all_rows, losses, norms = map(list, zip(*everyones, strict=True))
    mean: Tensors = {}
    for name in dict.fromkeys(name for gradients in of_ranks for name in gradients):
        found = [gradients[name] for gradients in of_ranks if name in gradients]
        mean[name] = torch.stack(found).sum(0) / len(of_ranks)
    apart = {}
    for name, value in mean.items():
        most = max(float((gradients.get(name, 0 * value) - value).norm()) for gradients in of_ranks)
        if most > 1e-5 * float(value.norm()):
            apart[name] = most / max(float(value.norm()), 1e-30)
    called = [Call(rank, number, rows) for rank, calls in enumerate(all_calls) for number, rows in enumerate(calls)]
    used = {token for call in called for row in call.rows for token in row}
    batches = [row for rows in all_rows for row in rows if set(row) & used]
    batched = bool(batches)
    batches = batches or [row for call in called for row in call.rows]
    return Record(step.reference, mean, apart, of_ranks, called, batches, batched, losses, norms)
