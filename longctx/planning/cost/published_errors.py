"""Published errors: how far predictions of published runs were off, by kind of run.

Each source of runs was predicted by constants that the others set. `python -m bench.published`
writes the table; docs/evidence/others.md has the runs.
"""

from typing import Literal, NamedTuple

from longctx.planning.cost.spec import ModelSpec


class Errors(NamedTuple):
    """Errors of `runs` runs, relative to what was predicted: `more` is how much more a run needed
    in the median; `half` and `most` are what half, and nine of ten, were within."""

    runs: int
    more: float
    half: float
    most: float


# Begin of the table.
TIME: dict[str, Errors] = {
    "of all weights": Errors(131, more=0.01, half=0.08, most=0.19),
    "with experts": Errors(9, more=0.06, half=0.07, most=0.32),
    "in float8": Errors(33, more=0.00, half=0.05, most=0.18),
    "with adapters": Errors(19, more=0.00, half=0.05, most=0.19),
}
MEMORY: dict[str, Errors] = {
    "of all weights": Errors(38, more=0.07, half=0.07, most=0.18),
    "with experts": Errors(5, more=0.01, half=0.03, most=0.06),
    "in float8": Errors(9, more=0.18, half=0.18, most=0.22),
    "with adapters": Errors(17, more=0.08, half=0.08, most=0.15),
}
# End of the table.


def kind_of(spec: ModelSpec, *, float8: bool) -> str:
    """Returns the kind of a run of a model, in words that follow "published runs"."""
    if float8:
        return "in float8"
    if spec.adapted:
        return "with adapters"
    if any(layer.expert_rows for layer in spec.layers):
        return "with experts"
    return "of all weights"


def said(what: Literal["time", "memory"], kind: str) -> str:
    """Says how far predictions of time or memory were off for published runs of this kind."""
    errors = {"time": TIME, "memory": MEMORY}[what][kind]
    direction = "more"
    if errors.more < 0:
        direction = "less"
    return (
        f"{what} of {errors.runs} published runs {kind}: {abs(errors.more):.0%} {direction} than "
        f"predicted in the median, within {errors.half:.0%} in half, {errors.most:.0%} in nine of "
        "ten"
    )
