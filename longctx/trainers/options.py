"""Options of `dynamic_context_parallel` by name, as files, the environment and other tools give
them."""

import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from longctx.arguments import said
from longctx.errors import UserError
from longctx.trainers.dynamic import dynamic_context_parallel

OPTIONS = tuple(inspect.signature(dynamic_context_parallel).parameters)[1:]
"""Arguments of `dynamic_context_parallel` beside the trainer."""


class OptionError(UserError):
    """What is no option of `dynamic_context_parallel`."""


def check_names(values: Any, source: str) -> dict[str, Any]:
    """Returns options that a source gives. Raises OptionError for what is no mapping, or has names
    that `dynamic_context_parallel` does not know."""
    if not isinstance(values, Mapping):
        raise OptionError(
            f"{source} is {said(values)}: must be a mapping, such as `tokens_per_rank: 16384`"
        )
    for name in values:
        if name not in OPTIONS:
            close = get_close_matches(str(name), OPTIONS, n=1)
            way = f"did you mean {close[0]}?" if close else f"use {', '.join(OPTIONS)}"
            raise OptionError(f"{source} has {name!r}, which is no option: {way}")
    return dict(values)
