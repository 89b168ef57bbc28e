"""Functions that compiled blocks call as they are. Importing this imports PyTorch's compiler, which
takes a second."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def not_compiled(function: Function) -> Function:
    """Runs `function` as it is also in a compiled block: its index tensors and messages differ
    between micro-batches."""
    return cast("Function", torch.compiler.disable(function))
