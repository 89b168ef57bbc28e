"""Arguments: what callers give to the public functions is checked once, at the door, by a rule for
each argument.

    @checked(PlanError, ranks=whole(least=1), degree=or_none(whole(least=1)))
    def make_plan(lengths, *, ranks, degree=None): ...

A rule returns what a value must be, if it is not. So no caller meets an AttributeError or a
ZeroDivisionError from inside, and nothing is cast in silence: True is no number, 1.5 is no number
of tokens, and 0.5 is no token.
"""

import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from longctx.errors import UserError, shortened

P = ParamSpec("P")
R = TypeVar("R")
Rule = Callable[[Any], str]
"""Returns what a value must be; nothing if it is."""
LARGEST_ID = (1 << 31) - 1
"""No vocabulary has more entries."""
LISTED = 8
"""Lists of more elements are described by their number."""


class ArgumentError(UserError):
    """An argument of another type, range or shape than the function takes."""


def checked(
    error: type[UserError] = ArgumentError, **rules: Rule
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function check these arguments before it runs. An argument that is left out has its
    default, which is right."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        assert rules.keys() <= signature.parameters.keys(), (function, rules)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            check_arguments(error, rules, signature.bind(*args, **kwargs).arguments)
            return function(*args, **kwargs)

        return call

    return decorate


def check_arguments(
    error: type[UserError], rules: Mapping[str, Rule], given: Mapping[str, Any]
) -> None:
    """Raises an error that names the value and the rule of the first argument that breaks one."""
    for name, rule in rules.items():
        if name in given and (required := rule(given[name])):
            raise error(f"{name} is {said(given[name])}: {required}")


def only(*names: str, of: Mapping[str, Rule]) -> dict[str, Rule]:
    """Returns the rules of these arguments."""
    return {name: of[name] for name in names}


def said(value: Any) -> str:
    """Returns a value in words, without the numbers of an array."""
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and len(shape):
        return (
            f"a {type(value).__name__} of shape {list(shape)} and "
            f"{getattr(value, 'dtype', 'no')} dtype"
        )
    is_long = isinstance(value, list | tuple | Mapping) and len(value) > LISTED
    if is_long:
        return f"a {type(value).__name__} of {len(value):,} elements"
    return shortened(repr(value), 80)


def is_whole(value: Any, least: int | None = None, most: int | None = None) -> bool:
    """Returns whether a value is a whole number in a range. A bool is none, though Python takes it
    for one."""
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return is_integer and (least is None or value >= least) and (most is None or value <= most)


def is_number(value: Any) -> bool:
    """Returns whether a value is a finite real number. A bool is none."""
    is_real = isinstance(value, numbers.Real | np.number) and not isinstance(value, bool | np.bool_)
    return is_real and math.isfinite(value)


def whole(least: int, most: int | None = None) -> Rule:
    """Returns the rule of a whole number from `least` to `most`."""
    span = f"≥ {least:,}" if most is None else f"from {least:,} to {most:,}"
    return lambda value: "" if is_whole(value, least, most) else f"must be a whole number {span}"


def real(least: float | None = None) -> Rule:
    """Returns the rule of a finite number of at least `least`."""
    span = "" if least is None else f" ≥ {least:g}"

    def rule(value: Any) -> str:
        fits = is_number(value) and (least is None or value >= least)
        if fits:
            return ""
        return f"must be a finite number{span}"

    return rule


def flag(value: Any) -> str:
    """The rule of an argument that is true or false."""
    if isinstance(value, bool | np.bool_):
        return ""
    return "must be True or False"


def kind(what: str, *kinds: type) -> Rule:
    """The rule of an argument that is of one of these types; `what` says where one comes from."""
    return lambda value: "" if isinstance(value, kinds) else f"must be {what}"


def callable_(value: Any) -> str:
    """The rule of an argument that is called."""
    if callable(value):
        return ""
    return "must be a function"


def anything(_: Any) -> str:
    """The rule of what is checked elsewhere."""
    return ""


def a_path(value: Any) -> str:
    """The rule of an argument that names a file or folder."""
    if isinstance(value, str | Path):
        return ""
    return "must be a path, as str or pathlib.Path"


def row_of(what: str) -> Rule:
    """The rule of a list, tuple or array of one axis, whatever its elements are."""

    def check(values: Any) -> str:
        is_array = hasattr(values, "__len__") and len(getattr(values, "shape", ())) == 1
        is_row = is_array or (isinstance(values, Sequence) and not isinstance(values, str | bytes))
        if is_row:
            return ""
        return f"must be a list of {what}"

    return check


def tuple_of(what: str, rule: Rule) -> Rule:
    """The rule of a tuple, with the rule of its elements."""
    elements = sequence_of(what, rule)
    return lambda values: (
        elements(values) if isinstance(values, tuple) else f"must be a tuple of {what}"
    )


def list_of(what: str, rule: Rule) -> Rule:
    """The rule of a list or tuple, and no array, with the rule of its elements."""
    elements = sequence_of(what, rule)
    return lambda values: (
        elements(values) if isinstance(values, list | tuple) else f"must be a list of {what}"
    )


def sequence_of(what: str, rule: Rule) -> Rule:
    """The rule of a list, tuple or array of one axis, with the rule of its elements."""
    row = row_of(what)

    def check(values: Any) -> str:
        if required := row(values):
            return required
        for index, value in enumerate(values.tolist() if hasattr(values, "tolist") else values):
            if required := rule(value):
                return (
                    f"must be a list of {what}, but element {index} is {said(value)}, which "
                    f"{required}"
                )
        return ""

    return check


def mapping_of(what: str, rule: Rule, *, keys: Rule) -> Rule:
    """The rule of a mapping, by the rules of its keys and of its values."""

    def check(values: Any) -> str:
        if not isinstance(values, Mapping):
            return f"must be a mapping of {what}"
        for key, value in values.items():
            if required := keys(key):
                return f"must be a mapping of {what}, but has the key {said(key)}, which {required}"
            if required := rule(value):
                return (
                    f"must be a mapping of {what}, but of {key!r} it has {said(value)}, which "
                    f"{required}"
                )
        return ""

    return check


def or_none(rule: Rule) -> Rule:
    """The rule of an argument that may be None."""

    def check(value: Any) -> str:
        required = "" if value is None else rule(value)
        if required:
            return f"{required}, or None"
        return ""

    return check


def token_ids(
    name: str, documents: Iterable[Any], error: type[UserError], *, ignored: int | None = None
) -> list[npt.NDArray[np.int64]]:
    """Returns the token ids of documents as int64 [tokens] each. Raises the error for anything but
    whole numbers in range.

    `ignored` is the only negative number that there may be, in labels.
    """
    is_scalar = getattr(documents, "ndim", 1) == 0
    if (
        isinstance(documents, str | bytes | Mapping)
        or is_scalar
        or not isinstance(documents, Iterable)
    ):
        raise error(
            f"{name} is {said(documents)}: must be a list of documents, each a list or array of "
            "token ids"
        )
    return [
        _ids(f"{name}[{index}]", document, error, ignored)
        for index, document in enumerate(documents)
    ]


def _ids(
    name: str, document: Any, error: type[UserError], ignored: int | None
) -> npt.NDArray[np.int64]:
    allowed = f"whole numbers from 0 to {LARGEST_ID:,}" + (
        f", or {ignored}" if ignored is not None else ""
    )
    try:
        array = np.asarray(document.detach().cpu() if hasattr(document, "detach") else document)
    except (ValueError, TypeError, RuntimeError) as problem:
        raise error(
            f"{name} is {said(document)}: must be one axis of token ids ({problem})"
        ) from problem
    if array.ndim != 1:
        raise error(f"{name} has shape {list(array.shape)}: must have one axis of token ids")
    if not array.size:
        return array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise error(
            f"{name} has {array.dtype} dtype, such as {said(array[0])}: token ids and labels must "
            f"be {allowed}"
        )
    wrong = (array < 0) | (array > LARGEST_ID)
    if ignored is not None:
        wrong &= array != ignored
    if wrong.any():
        place = int(wrong.argmax())
        raise error(f"{name} has {array[place]} at {place}: token ids and labels must be {allowed}")
    return array.astype(np.int64)
