"""Copies of a device's numbers to the host, on a stand-in for a GPU that works when the host waits
for it, and not before."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from longctx.parallel.device_to_host import Arriving


class OnDevice(torch.Tensor):
    """A tensor that counts as a GPU's."""

    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl


class Device(TorchDispatchMode):
    """A GPU with one stream: it does nothing before the host waits for it.

    Attributes:
        queue: work that it has been given.
        waits: how often the host waited while it gave it work.
    """

    def __init__(self) -> None:
        super().__init__()
        self.queue: list[Callable[[], Any]] = []
        self.waits = 0
        self.pinned: list[torch.UntypedStorage] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        is_pinned = kwargs.pop("pin_memory", False)
        if func is torch.ops.aten.copy_.default:
            self.copy(*args, **kwargs)
            return args[0]
        out = func(*args, **kwargs)
        if is_pinned:
            self.pinned.append(out.fill_(float("nan")).untyped_storage())
        return out

    def copy(self, into: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> None:
        """Copies to the host. Without pinned memory CUDA waits for all work, whatever is asked
        for."""
        self.queue.append(lambda: into.data.copy_(source))
        numbers = [storage._cdata for storage in self.pinned]
        if not non_blocking or into.untyped_storage()._cdata not in numbers:
            self.waits += 1
            self.work(len(self.queue))

    def work(self, until: int) -> None:
        with _disable_current_modes():
            for number in range(until):
                each = self.queue[number]
                self.queue[number] = int  # which does nothing
                each()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    device = Device()

    class Event:
        def __init__(self) -> None:
            self.until = 0  # an event that was not recorded is over

        def record(self, stream: Any) -> None:
            assert stream is device
            self.until = len(device.queue)

        def synchronize(self) -> None:
            device.work(self.until)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda of: device)
    with device:
        yield device


def test_the_host_waits_when_it_reads_and_not_for_later_work(device: Device) -> None:
    values = torch.zeros(3, dtype=torch.float64)
    on_device = values.as_subclass(OnDevice)
    device.queue.append(lambda: values.fill_(7.0))
    arriving = Arriving(on_device)
    assert device.waits == 0 and not values.any(), "nothing has run yet"
    later = []
    device.queue.append(lambda: later.append(values.fill_(9.0)))
    assert arriving.read().tolist() == [7.0] * 3
    assert not later
    device.work(len(device.queue))
    assert arriving.read().tolist() == [7.0] * 3, "a copy, also once there is later work"
    assert device.waits == 0


def test_numbers_of_a_cpu_are_there(device: Device) -> None:
    values = torch.arange(3)
    assert Arriving(values).read().tolist() == [0, 1, 2]
    assert device.queue == [] and device.waits == 0
