"""A case: a loop that makes one optimizer step, and what is truly wrong with it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from longctx.check import Probe, Step

IGNORED = -100
LENGTHS = (1, 2, 33, 5, 21, 3, 26, 12)
SHORT = Probe("short", lengths=LENGTHS)
STEPS = Probe("short, three micro-batches", lengths=LENGTHS, micro_batches=3)
PROMPTS = Probe("short, prompts", lengths=LENGTHS, prompt=0.4)
ENDS = Probe("short, padding is the end of texts", lengths=LENGTHS, ends=True, pad=1)
LONG = Probe("few documents", lengths=(31, 60))
ALONE = Probe("each document alone", lengths=LENGTHS, micro_batches=len(LENGTHS))
USUAL = (SHORT, STEPS)

Row = dict[str, list[int]]
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A loop of somebody's, right or wrong.

    Attributes:
        make: returns the step of a loop on a probe.
        model: returns the model that the loop trains, before anything is done to it.
        source: where such a fault was reported, or "own".
        fault: what is truly wrong, in plain words; "" if nothing is.
        processes: how many the loop needs.
        probes: what it is checked on.
        only_logged: whether the gradients are right, and only what is logged is not.
        rounds: whether a right loop rounds more than float32 does.
        second: whether it is of the second set, which another examiner has written.
    """

    name: str
    make: Callable[[Probe], Step]
    model: Callable[[Probe], Any]
    source: str = "own"
    fault: str = ""
    processes: int = 1
    probes: tuple[Probe, ...] = USUAL
    only_logged: bool = False
    rounds: bool = False
    second: bool = False


class Precision:
    """The dtype of weights that models are cast to before they are recorded."""

    dtype: torch.dtype = torch.float32


def cast(model: Any) -> Any:
    """Returns the model with weights of the dtype that is asked for."""
    return model.to(Precision.dtype)


def true_gradients(model: Any, rows: Iterable[Row]) -> dict[str, torch.Tensor]:
    """Returns gradients of the mean loss over all targets, of one document at a time."""
    documents = list(rows)
    targets = sum(int((torch.tensor(row["labels"][1:]) != IGNORED).sum()) for row in documents)
    model.zero_grad()
    for row in documents:
        ids = torch.tensor([row["input_ids"]])
        labels = torch.tensor(row["labels"])
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        loss = cross_entropy(logits, labels[1:], ignore_index=IGNORED, reduction="sum")
        (loss / targets).backward()
    return {
        name: weight.grad.detach().clone()
        for name, weight in model.named_parameters()
        if weight.grad is not None
    }


def distance(ours: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Returns how far gradients are from right ones, relative to the norm of these; infinity if
    some are missing or no numbers."""
    squares = 0.0
    whole = 0.0
    for name, true in right.items():
        whole += float(true.double().square().sum())
        gradient = ours.get(name)
        if gradient is None:
            squares += float(true.double().square().sum())
            continue
        difference = gradient.detach().double() - true.double()
        squares += float(difference.square().sum())
    relative = (squares / whole) ** 0.5
    return relative if relative < float("inf") else float("inf")
