"""Finding: one fault of a step, in words."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

UNEXPLAINED = "the gradient is that of no known fault"


@dataclass(frozen=True)
class Finding:
    """One fault: its `kind`, always the same words, and what of the step shows it."""

    kind: str
    details: str = ""

    def __str__(self) -> str:
        if self.details:
            return f"{self.kind}: {self.details}"
        return self.kind


def suffixes(names: Iterable[str]) -> str:
    """Returns the names of parameters without the number of their layer."""
    found = Counter(
        ".".join(part for part in name.split(".")[-3:] if not part.isdigit()) for name in names
    )
    shown = [f"{name} ({count})" if count > 1 else name for name, count in found.items()]
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")
