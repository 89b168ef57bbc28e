"""A variant of the reference: attributes of its modules that have other values meanwhile."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


class Setting(NamedTuple):
    """An attribute of an object, and its value in a variant."""

    owner: Any
    name: str
    value: Any


class Variant(NamedTuple):
    """A kind of fault, what it would be in words, the settings that make it, and whether it rounds,
    which turns out otherwise in a few elements."""

    kind: str
    details: str
    settings: list[Setting]
    rounds: bool = False

    @contextmanager
    def done(self) -> Iterator[None]:
        """Has the reference compute it meanwhile."""
        kept = [getattr(each.owner, each.name) for each in self.settings]
        for each in self.settings:
            setattr(each.owner, each.name, each.value)
        try:
            yield
        finally:
            for each, value in zip(self.settings, kept, strict=True):
                setattr(each.owner, each.name, value)
