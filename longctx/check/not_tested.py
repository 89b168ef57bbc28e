"""What a right verdict does not cover, as the probe cannot show it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from .contexts import Sequence
from .gathered import Record
from .reference import Reference
from .tolerances import FLOAT32, NAMES

CAPS = {
    "attn_logit_softcapping": "the cap of attention scores",
    "final_logit_softcapping": "the cap of logits",
}
"""Names of a config, and of modules that keep a copy, with what they are."""


def not_tested(record: Record, reference: Reference) -> dict[str, str]:
    """Returns what a fault of this step would not have shown, with the reason."""
    found = {}
    if record.ranks == 1:
        found["several processes"] = "this was one (--processes 2)"
    limits = record.tolerances
    if limits.states > FLOAT32.states:
        found[f"hidden states that are off by less than {limits.states:.1%}"] = (
            f"{NAMES[record.dtype]} rounds as much in this model"
        )
        found[f"scales that are off by less than {limits.weights:.1%}"] = (
            f"{NAMES[record.dtype]} rounds"
        )
    longest = max(record.tokens.probe.lengths[document] for document in record.documents)
    if reference.window is not None and reference.window >= longest:
        found[f"windows of {reference.window} tokens"] = (
            f"the longest document has {longest} (probe.model(.., sliding_window=16))"
        )
    for name, what in CAPS.items():
        cap = getattr(reference.config, name, None)
        if cap and not _changes(reference, record, without=name):
            found[f"{what} at {cap:g}"] = f"no number of this model is near it ({name}=..)"
    return found


def lines(everyones: list[Mapping[str, str]]) -> list[str]:
    """Returns a line for each thing that no probe could show."""
    if not everyones:
        return []
    first, *others = everyones
    return [
        f"not tested: {what}: {why}"
        for what, why in first.items()
        if all(what in other for other in others)
    ]


def _changes(reference: Reference, record: Record, without: str) -> bool:
    """Returns whether logits of the longest document change without an attribute of the config."""
    lengths = record.tokens.probe.lengths
    longest = max(record.documents, key=lambda document: lengths[document])
    numbers = record.tokens.of(longest)
    sequence = Sequence(tuple(numbers), tuple(range(len(numbers))))
    with torch.no_grad():
        as_it_is = reference.logits(sequence)
        with _set_to_none(reference, without):
            changed = reference.logits(sequence)
    difference = float((changed - as_it_is).norm())
    return not difference <= record.tolerances.states * float(as_it_is.norm())


@contextmanager
def _set_to_none(reference: Reference, name: str) -> Iterator[None]:
    """Sets an attribute of the config, and of all modules that have it, to None meanwhile."""
    holders: list[Any] = [reference.config, *reference.model.modules()]
    kept = [(each, getattr(each, name)) for each in holders if hasattr(each, name)]
    for each, _ in kept:
        setattr(each, name, None)
    try:
        yield
    finally:
        for each, value in kept:
            setattr(each, name, value)
