"""Log-probabilities of the targets of documents, each document apart."""

from typing import Any

import torch

from .probe import Tokens


def logits_of(model: Any, tokens: Tokens, document: int) -> torch.Tensor:
    """Returns the logits of a causal LM of transformers for a document [tokens, V]."""
    ids = torch.tensor([tokens.probe.documents[document]])
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return logits.double()


def of_targets(tokens: Tokens, document: int, *, logits: torch.Tensor) -> torch.Tensor:
    """Returns the log-probabilities [targets] of a document's targets by logits [tokens, V]."""
    ids = tokens.probe.documents[document]
    targets = [at for at in range(1, len(ids)) if tokens.probe.trained(document, at)]
    logarithms = torch.log_softmax(logits, dim=1)
    before = [at - 1 for at in targets]
    return logarithms[before, [ids[at] for at in targets]]
