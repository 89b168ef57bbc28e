"""Finds operations of a training step that would make the host wait for a GPU, on a CPU.

Tensors count as a GPU's if they are parameters, come out of `copy_to`, or are computed from such
tensors.
"""

import itertools
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_iter

import longctx
from longctx.attention import host_to_device, operator, ulysses
from longctx.parallel.sharding import local_part
from longctx.parallel.timing import Spans
from tests.training_cases import optimizer_of_gpus, start

CODE = Path(longctx.__file__).parent
OPERATORS: dict[str, Any] = {
    "longctx::ring_attention_begin": operator.begin._init_fn,
    "longctx::ring_attention": operator.forward._init_fn,
    "longctx::ring_attention_finish": operator.finish._init_fn,
    "longctx::ring_attention_backward": operator.backward._init_fn,
    "longctx::gather_tokens": ulysses.gather_tokens._init_fn,
    "longctx::gather_heads": ulysses.gather_heads._init_fn,
}
"""Python functions of the custom operators, which are opaque to modes."""
DATA_DEPENDENT = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "unique",
    "_unique2",
    "equal",
    "is_nonzero",
    "bincount",
)
MADE = ("full", "zeros", "ones", "empty", "arange")
READS = ("cpu", "numpy", "tolist", "item", "__bool__", "__float__", "__int__", "__index__")


class HostWaits(TorchDispatchMode):
    """Collects "operation at file:line" in `found` for every wait."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.on_device: dict[int, torch.UntypedStorage] = {}
        """Storages by their number, kept so that no number is used again."""

    def mark(self, tensor: torch.Tensor) -> None:
        self.on_device[tensor.untyped_storage()._cdata] = tensor.untyped_storage()

    def has(self, value: Any) -> bool:
        if is_traceable_wrapper_subclass(value):
            return any(self.has(getattr(value, name)) for name in value.__tensor_flatten__()[0])
        return isinstance(value, torch.Tensor) and self.has_one(value)

    def has_one(self, tensor: torch.Tensor) -> bool:
        """Returns whether a plain tensor is the device's."""
        return tensor.untyped_storage()._cdata in self.on_device

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        new = tensor.clone()
        self.mark(new)
        return new

    def value(
        self,
        name: str,
        tensor: torch.Tensor,
        original: Callable[..., Any],
        *arguments: Any,
        **named: Any,
    ) -> Any:
        """Returns what the host reads from a tensor."""
        with _disable_current_modes():
            out = original(tensor, *arguments, **named)
            return out.clone() if name == "cpu" else out

    def note(self, operation: str) -> None:
        stack = traceback.extract_stack(sys._getframe(1))
        in_cpu_kernel = any(frame.filename.endswith("attention/kernels/cpu.py") for frame in stack)
        if in_cpu_kernel:  # which looks for NaN, and runs on no GPU
            return
        ours = [frame.name for frame in stack if Path(frame.filename).is_relative_to(CODE)]
        self.found.add(f"{operation} at {ours[-1] if ours else 'no place in longctx'}")

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name in OPERATORS:
            with self:  # a custom operator is opaque to modes
                return OPERATORS[name](*args, **kwargs)
        given = [value for value in tree_iter((args, kwargs)) if isinstance(value, torch.Tensor)]
        if any(map(is_traceable_wrapper_subclass, given)):
            return NotImplemented  # a DTensor, whose operations on local tensors come here next
        tainted = any(map(self.has, given))
        short = name.removeprefix("aten::")
        if tainted and (
            short in DATA_DEPENDENT
            or (short in ("index", "index_put", "index_put_") and _by_mask(args))
        ):
            self.note(short)
        out = func(*args, **kwargs)
        if tainted:
            named = {
                info.name: value for info, value in zip(func._schema.arguments, args, strict=False)
            } | kwargs
            written = [
                named[info.name]
                for info in func._schema.arguments
                if info.name in named and _is_written(info)
            ]
            for value in tree_iter((out, written)):
                if isinstance(value, torch.Tensor):
                    self.mark(value)
        return out

    @contextmanager
    def watching(self, parameters: Iterator[torch.Tensor]) -> Iterator[None]:
        """Watches the operations of the context, in the backward passes too."""
        for parameter in parameters:
            self.mark(parameter.to_local() if isinstance(parameter, DTensor) else parameter)
        patched: list[tuple[Any, str, Any]] = []

        def patch(owner: Any, name: str, new: Callable[..., Any]) -> None:
            patched.append((owner, name, getattr(owner, name)))
            setattr(owner, name, new)

        original = host_to_device.copy_to

        def copied(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
            if self.has(tensor) or device == "cpu":  # the settings' device is a torch.device
                return tensor
            return self.to_device(tensor)

        for module in list(sys.modules.values()):
            if getattr(module, "copy_to", None) is original:
                patch(module, "copy_to", copied)
        for name in READS:
            patch(torch.Tensor, name, self._read(name, getattr(torch.Tensor, name)))
        for name in MADE:
            patch(torch, name, self._made(getattr(torch, name)))
        patch(Spans, "seconds", self._timed(Spans.seconds))
        patch(torch.Tensor, "to", self._copy("to", torch.Tensor.to))
        for name in ("tensor", "as_tensor"):
            patch(torch, name, self._copy(name, getattr(torch, name)))
        try:
            with self:
                yield
        finally:
            for owner, name, old in reversed(patched):
                setattr(owner, name, old)

    def _read(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
            if not self.has(tensor):
                return original(tensor, *arguments, **named)
            self.note(name)
            return self.value(name, tensor, original, *arguments, **named)

        return read

    def _made(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Marks what is made on the device, by a kernel."""

        def make(*arguments: Any, **named: Any) -> Any:
            out = original(*arguments, **named)
            if isinstance(named.get("device"), torch.device) and not self.has(out):
                self.mark(out)
            return out

        return make

    def _timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Notes where times are read, which waits for a GPU."""

        def timed(spans: Spans) -> Any:
            self.note("clock")
            return original(spans)

        return timed

    def _copy(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Notes copies from pageable memory to the device: only `copy_to` pins it first."""

        def copy(source: Any, *arguments: Any, **named: Any) -> Any:
            device = _names_a_device(arguments, named)
            out = original(source, *arguments, **named)
            if device and not self.has(source):
                self.note(f"pageable copy by {name}")
                return self.to_device(out)
            return out

        return copy


def _names_a_device(arguments: tuple[Any, ...], named: dict[str, Any]) -> bool:
    return any(isinstance(value, torch.device) for value in (*arguments, *named.values()))


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _by_mask(args: tuple[Any, ...]) -> bool:
    """Whether a mask is the index; filling by a mask with one number of the host needs no wait."""
    masks = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return masks and not (len(args) > 2 and args[2].dim() == 0)


def waits_of_a_step(store: Path, run: Path, settings: list[str]) -> set[str]:
    """Returns the waits of the second step, as the first one makes what later ones reuse."""
    trainer = start(store, run, settings)
    with trainer.loader:
        trainer.step()
        watch = HostWaits()
        with watch.watching(itertools.chain(trainer.model.parameters(), trainer.model.buffers())):
            trainer.step()
    assert watch.on_device
    return watch.found


def waits_of_the_loop(store: Path, run: Path, settings: list[str]) -> tuple[set[str], set[str]]:
    """Returns the waits of a step in the training loop, with the optimizer of GPUs: from the end of
    backward to that of the optimizer, and after it."""
    with optimizer_of_gpus():
        trainer = start(store, run, [*settings, "train.steps=4", "checkpoint.every=null"])
    assert trainer.ahead
    watch, watching, marks = HostWaits(), ExitStack(), dict[str, set[str]]()
    backward, settle = trainer.runner.forward_backward, trainer._settle_due

    def ran(batch: Any) -> Any:
        losses = backward(batch)
        if batch.step == 3:
            everything = itertools.chain(trainer.model.parameters(), trainer.model.buffers())
            watching.enter_context(watch.watching(everything))
            for parameter in trainer.model.parameters():
                if parameter.grad is not None:
                    watch.mark(local_part(parameter.grad))
            watch.mark(losses)
            watch.mark(trainer._queued[0].sums._numbers._copy)
        return losses

    def settled() -> Any:
        if trainer.steps_done == 3:
            marks["between"] = set(watch.found)
            watch.found.clear()
        metrics = settle()
        if trainer.steps_done == 3:
            assert metrics is None and len(trainer._queued) == 1
            marks["later"] = set(watch.found)
            watching.close()
        return metrics

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.runner, "forward_backward", ran)
        patch.setattr(trainer, "_settle_due", settled)
        assert trainer.train()
    assert watch.on_device
    return marks["between"], marks["later"]


def waits_of_a_trainer(trainer: Any) -> set[str]:
    """Returns the waits between the ends of a trainer's first step and its second, those in longctx
    alone."""
    from transformers import TrainerCallback

    watch, watching = HostWaits(), ExitStack()

    class Watching(TrainerCallback):
        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            watching.close()
            if state.global_step == 1:
                weights = itertools.chain(trainer.model.parameters(), trainer.model.buffers())
                watching.enter_context(watch.watching(weights))

    trainer.add_callback(Watching())
    trainer.train()
    assert watch.on_device
    # The trainer's loop, which our `train` calls.
    own = ("at train_planned", "at no place in longctx")
    return {wait for wait in watch.found if not wait.endswith(own)}
