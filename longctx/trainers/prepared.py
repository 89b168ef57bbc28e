"""Models of a trainer: prepared, but plain where they are called without a layout, copied or
pickled.

So `generate`, evaluations in callbacks, averages of weights and reference models are as without
longctx.
"""

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from longctx.hf.attention import (
    packing_from_layout,
    prepare,
    remove_hooks,
    replace_layers,
    restore_layers,
)
from longctx.hf.exactness import HuggingFaceError
from longctx.trainers.kinds import is_encoder
from longctx.trainers.refusals import TrainerError

BEFORE = "_attention_before"


@contextlib.contextmanager
def prepared(model: Any) -> Iterator[None]:
    """Prepares a model; without a layout it keeps its own attention. Raises TrainerError."""
    before = attention_of(model)
    try:
        prepare(model, causal=not is_encoder(model), head=model.base_model is not model)
    except HuggingFaceError as error:
        raise TrainerError(str(error)) from error
    remove_hooks(model)

    def plain(own: Callable[..., Any], this: Any, *arguments: Any, **named: Any) -> Any:
        ring = attention_of(this)
        if named.get("ring_attention") is not None:
            with packing_from_layout():
                return own(this, *arguments, **named)
        if ring == before:
            return own(this, *arguments, **named)
        this.set_attn_implementation(before)
        restore_layers(this)
        try:
            return own(this, *arguments, **named)
        finally:
            this.set_attn_implementation(ring)
            replace_layers(this)

    with contextlib.ExitStack() as undo:
        undo.callback(model.set_attn_implementation, before)
        undo.callback(restore_layers, model)
        undo.callback(vars(model).pop, BEFORE, None)
        vars(model)[BEFORE] = _Before(model.config, before)
        for name in ("forward", "generate"):
            if hasattr(model, name):  # encoders generate nothing
                undo.enter_context(replaced_method(model, name, plain))
        yield


@contextlib.contextmanager
def replaced_method(model: Any, name: str, ours: Callable[..., Any]) -> Iterator[None]:
    """Makes `ours` a method of a model, which gets the model's own function, the model and the
    arguments.

    A copy of the model keeps the own one, called with itself. What others have wrapped around the
    method meanwhile, as accelerate does for autocast, stays, and calls the own one.
    """
    hidden = vars(model).get(name)
    bound = getattr(model, name)
    known = weakref.ref(model)
    calls = [ours]
    # accelerate's is bound inside.
    own = getattr(bound, "__func__", lambda _, *arguments, **named: bound(*arguments, **named))

    # Trainers and `generate` look at the signature; it is pickled by name.
    @functools.wraps(getattr(type(model), name))
    def method(this: Any, *arguments: Any, **named: Any) -> Any:
        if this is known():
            if calls:
                return calls[0](own, this, *arguments, **named)
            return own(this, *arguments, **named)
        # TRL's function, without its head, calls the model that the head was added to.
        copied = own if named.get("fused_lm_head") else getattr(type(this), name)
        return copied(this, *arguments, **named)

    vars(model)[name] = put = types.MethodType(method, model)
    try:
        yield
    finally:
        calls.clear()
        if vars(model).get(name) is put:
            del vars(model)[name]
            if hidden is not None:
                vars(model)[name] = hidden


def attention_of(model: Any) -> dict[str, str]:
    """Returns the names of the attention of a model and of its parts, as transformers sets them: a
    tower has its own."""
    names = {"": model.config._attn_implementation}
    for name in model.config.sub_configs:
        part = getattr(model.config, name, None)
        if part is not None:
            names[name] = part._attn_implementation
    return names


class _Before(NamedTuple):
    """The attention of a config before: a copy of the config, or a pickled one, gets it back."""

    config: Any
    attention: dict[str, str]

    def __reduce__(self) -> tuple[Any, ...]:
        return setattr, (self.config, "_attn_implementation", self.attention)
