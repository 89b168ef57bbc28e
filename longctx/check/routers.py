"""The loss of routers, that experts get as many tokens, as a gradient of its own."""

import sys
from typing import Any

import torch

from .contexts import Sequence
from .gathered import Record
from .reference import Reference
from .tensors import Tensors

NAME = "load_balancing_loss_func"
"""Of the function in the modules of transformers' models."""


def loss_of_routers(record: Record, reference: Reference) -> Tensors | None:
    """Returns the gradients of the sum of routers' losses over calls, documents apart; None for
    models without one, and calls that do not hold documents whole."""
    base: Any = reference.model
    if hasattr(base, "get_base_model"):
        base = base.get_base_model()
    function = getattr(sys.modules[type(base).__module__], NAME, None)
    chosen = getattr(reference.config, "num_experts_per_tok", None)
    if function is None or not chosen:
        return None
    model = reference.model
    model.zero_grad(set_to_none=True)
    for rank, call in dict.fromkeys((row.rank, row.call) for row in record.calls):
        of_layers = list[list[torch.Tensor]]()
        for document in _documents_of(record, rank, call):
            numbers = record.tokens.of(document)
            sequence = Sequence(tuple(numbers), tuple(range(len(numbers))))
            logits = reference.router_logits(sequence)
            if logits is None:
                return None
            of_layers.append(logits)
        if of_layers:
            joined = tuple(torch.cat(each) for each in zip(*of_layers, strict=True))
            function(joined, joined[0].shape[1], chosen).backward()
    return reference.taken().of


def _documents_of(record: Record, rank: int, call: int) -> list[int]:
    """Returns the documents with a token in a call."""
    rows = [row for row in record.calls if (row.rank, row.call) == (rank, call)]
    numbers = (number for row in rows for number in row.numbers if number >= 0)
    return sorted({record.tokens.document[number] for number in numbers})
