"""Torch on a CPU that takes CUDA for present, as far as fake tensors need it: streams and events
that do nothing."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch


class Stream:
    """A stream in which nothing runs."""

    device = torch.device("cuda", 0)

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> "Event":
        return Event()


class Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Any) -> float:
        return 1.0


@contextmanager
def fake_cuda() -> Iterator[None]:
    """Lets the trainer use streams, events and one device of CUDA within the context."""
    replaced: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "stream": lambda stream: nullcontext(),
        "current_stream": lambda device=None: Stream(),
        "synchronize": lambda device=None: None,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
    }
    generator = torch.Generator()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch, "Generator", return_value=generator))
        stack.enter_context(mock.patch.object(torch.Tensor, "record_stream", return_value=None))
        stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor))
        stack.enter_context(mock.patch.object(torch.Tensor, "is_pinned", return_value=True))
        for name, value in replaced.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        yield
