"""Ring attention for models of `transformers`.

    model = AutoModelForCausalLM.from_pretrained(name)
    prepare(model)
    micro_batches, targets = pack_documents(plan, rank, documents)
    for batch in micro_batches:
        model(**model_inputs(model, batch, targets)).loss.backward()

The layout is passed as a keyword argument of the model, like the sequence lengths of flash-attn. So each micro-batch keeps its
own layout, even with several in flight, and when activation checkpointing recomputes a layer in backward, where a context
manager around forward would have ended (and where a GPU uses another thread).

No mask is ever built. Anything that the layout cannot express raises an error, and `prepare` rejects models in which tokens
interact outside attention: docs/families.md lists the models of transformers that are exact.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist

from longctx.attention.huggingface_check import HuggingFaceError, Kind, check_config, check_model, longest_exact
from longctx.attention.masks import Mask
from longctx.attention.ring import RingAttention
from longctx.attention.ulysses import HybridAttention
from longctx.planning.layout import Layout

Make = Callable[[float | None, float, int | None, torch.device], RingAttention | HybridAttention]
"""Builds attention from scale, softcap, window and device."""
CPU = torch.device("cpu")
NAME = "longctx"
_PREPARED: WeakSet[torch.nn.Module] = WeakSet()
_HARMLESS = {
    "position_ids",  # already in q and k
    "cache_position",
    "use_cache",
    "deterministic",
    "output_hidden_states",
    "return_dict",
    "logits_to_keep",
    "num_items_in_batch",
    "labels",
    "shift_labels",
}
"""Keyword arguments that reach the attention function and do not affect it."""


class PackedTokens(Protocol):
    """A rank's share of a micro-batch, such as `longctx.data.packing.MicroBatch`; tensors are int64 [tokens]."""

    @property
    def layout(self) -> Layout: ...
    @property
    def tokens(self) -> torch.Tensor: ...
    @property
    def labels(self) -> torch.Tensor: ...
    @property
    def positions(self) -> torch.Tensor: ...


def prepare(model: Any) -> None:
    """Replaces the attention of a causal language model of transformers with ring attention, and checks that this is exact.

    Call it after loading the weights, before or after sharding, before wrappers such as DDP, and on every rank, because the
    model runs on a few tokens. Raises HuggingFaceError, and leaves the model unchanged, if documents would see each other, if
    the loss would depend on how they are split, or if transformers is missing or too old.
    """
    before = replace_attention(model)
    try:
        check_model(model)
    except HuggingFaceError:
        model.set_attn_implementation(before)
        raise
    _PREPARED.add(model)


def replace_attention(model: Any) -> str:
    """Does the first half of `prepare`, which needs no weights. Returns the name of the previous attention."""
    _register()
    name, config = type(model).__name__, getattr(model, "config", None)
    if config is None or not hasattr(model, "set_attn_implementation"):
        raise HuggingFaceError(f"{name} is not a model of transformers: prepare the model that from_pretrained returned")
    before: str = config._attn_implementation
    _check_configs(model)
    model.set_attn_implementation(NAME)
    if config._attn_implementation != NAME:
        model.set_attn_implementation(before)
        raise HuggingFaceError(
            f"{name} computes attention itself, not through transformers' attention interface, so its attention cannot be "
            "replaced: use another model"
        )
    return before


def _register() -> None:
    """Registers ring attention with transformers by name."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise HuggingFaceError(
            f"transformers cannot be imported ({error}): install a version with AttentionMaskInterface, "
            "pip install 'longctx[huggingface]'"
        ) from error
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, describe_mask)


def _check_configs(model: Any) -> None:
    for config in {id(config): config for config in (model.config, model.config.get_text_config())}.values():
        check_config(config)


def model_inputs(
    model: torch.nn.Module,
    batch: PackedTokens,
    target_tokens: int | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    kernel: str = "auto",
    keep_kv: bool = False,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """Returns the keyword arguments of a model for one micro-batch.

    Every rank must run the model on every micro-batch, in the same order. A rank without tokens gets one padding token.

    Args:
        model: a model passed to `prepare`, or a wrapper around it.
        batch: this rank's share, from `pack_documents` or the `Loader` of longctx.data.
        target_tokens: number of targets of the whole step, over all ranks. The model's `loss` is then the sum over this rank's
            targets divided by it: sum gradients over micro-batches and ranks, do not average them. None: the model gets no
            labels and computes no loss; use `batch.labels`, which are already shifted.
        group, kernel, keep_kv: see `ring_attention`.
        device: device of the model.

    Raises:
        HuggingFaceError: for a model that is not prepared, or documents that are too long for its RoPE.
    """
    _check_call(model, batch.layout)
    # Models cannot reshape empty inputs: a rank without tokens gets one padding token.
    missing = int(not len(batch.tokens))
    tokens, labels, positions = (
        torch.nn.functional.pad(tensor, (0, missing), value=filler).to(device).unsqueeze(0)
        for tensor, filler in ((batch.tokens, 0), (batch.labels, -100), (batch.positions, 0))
    )

    def make(scale: float | None, softcap: float, window: int | None, device: torch.device) -> RingAttention:
        return RingAttention(
            batch.layout,
            group=group,
            mask=Mask(window=window),
            scale=scale,
            softcap=softcap,
            kernel=kernel,
            keep_kv=keep_kv,
            device=device,
        )

    inputs = {
        "input_ids": tokens,
        "position_ids": positions,
        "use_cache": False,
        "ring_attention": Rings(make),
    }
    if target_tokens is not None:
        # `labels` makes the model compute a loss; it computes the loss from `shift_labels`.
        inputs |= {"labels": labels, "shift_labels": labels, "num_items_in_batch": max(1, target_tokens)}
    return inputs


def _check_call(model: torch.nn.Module, layout: Layout) -> None:
    prepared: Any = next((module for module in model.modules() if module in _PREPARED), None)
    if prepared is None:
        raise HuggingFaceError(f"{type(model).__name__} is not prepared for packed documents: call prepare(model) first")
    config = prepared.config.get_text_config()
    if config._attn_implementation != NAME:
        raise HuggingFaceError(
            f"the attention of {type(prepared).__name__} was changed to {config._attn_implementation!r}, which would mix "
            "packed documents: call prepare(model) again"
        )
    _check_configs(prepared)
    check_length(config, max((shard.length for shard in layout.shards), default=0))


def check_length(config: Any, longest: int) -> None:
    """Raises HuggingFaceError if documents of `longest` tokens would get different RoPE frequencies on different ranks."""
    limit = longest_exact(config)
    if limit is not None and longest > limit[0]:
        raise HuggingFaceError(
            f"a document has {longest} tokens, but RoPE of type {limit[1]} changes its frequencies for inputs of more than "
            f"{limit[0]} tokens, and ranks have inputs of different lengths: split documents to at most {limit[0]} tokens, or "
            "set another rope_type, such as yarn, in the model's config"
        )


class Rings:
    """The attention of one micro-batch, built once per kind of layer (scale, softcap and window) and device.

    `make` builds attention for `kinds` on `device` immediately, and for other kinds when a layer first requests them.
    """

    def __init__(self, make: Make, kinds: Iterable[Kind] = (), device: torch.device = CPU) -> None:
        self.make, self._made = make, {(*kind, device): make(*kind, device) for kind in kinds}

    def of(
        self, scale: float | None, softcap: float, window: int | None, device: torch.device
    ) -> RingAttention | HybridAttention:
        """Returns the attention for layers of this kind on this device."""
        kind = scale, softcap, window, device
        if kind not in self._made:
            self._made[kind] = self.make(*kind)
        return self._made[kind]

    @property
    def last(self) -> str:
        """Layer and pass that this rank entered last, per kind; for error messages."""
        return ", ".join(attention.last for attention in self._made.values())


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: "CausalMask | None" = None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    ring_attention: Rings | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Computes attention for transformers, which calls this function in every layer.

    Takes query [1, heads, tokens, head_dim], and key and value [1, kv_heads, tokens, ..]; returns ([1, tokens, heads,
    v_head_dim], None). `s_aux` [heads] are the learned sink logits of gpt-oss. Raises HuggingFaceError for arguments that would
    change the result and are not supported.
    """
    if ring_attention is None:
        raise HuggingFaceError(
            "attention 'longctx' was called without a layout: call the model as model(**model_inputs(model, batch, ..)), see "
            "longctx.attention.huggingface. If this error comes from prepare(model), the model does not pass keyword arguments "
            "to its attention and is not supported"
        )
    name = type(module).__name__
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise HuggingFaceError(f"{name} is not causal: only causal language models are supported")
    if query.shape[0] != 1:
        raise HuggingFaceError(f"input_ids has batch size {query.shape[0]}: pack all documents into one row of tokens")
    if dropout:
        raise HuggingFaceError(f"{name} uses attention dropout {dropout}: set attention_dropout to 0 in its config")
    refused = [key for key, value in others.items() if key not in _HARMLESS and value is not None and value is not False]
    if refused:
        raise HuggingFaceError(
            f"{name} passes {', '.join(refused)} to its attention, which 'longctx' does not support: leave the argument out "
            "when you call the model; if the model adds it itself, the model is not supported"
        )
    window = _one_window(attention_mask, sliding_window)
    attention = ring_attention.of(scaling, softcap or 0.0, window, query.device)
    # [1, heads, tokens, dim] → [tokens, heads, dim]
    q, k, v = (tensor[0].transpose(0, 1) for tensor in _autocast(query, key, value))
    return attention(q, k, v, getattr(module, "layer_idx", None), sink_logits=s_aux).unsqueeze(0), None


def _autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Casts as autocast does for torch's attention functions: RoPE in float32 leaves q and k in a wider dtype than v."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors)


@dataclass(frozen=True)
class CausalMask:
    """Stands in for a dense mask. As it is not a tensor, models that compute attention themselves fail.

    Every query sees the last `window` keys up to itself, or all earlier keys if `window` is None.
    """

    window: int | None = None


def describe_mask(*, mask_function: Callable[..., Any], attention_mask: torch.Tensor | None = None, **_: Any) -> CausalMask:
    """Describes the mask without building it; transformers calls this function before the first layer.

    Raises HuggingFaceError for padding, and for masks that are neither causal nor a causal window.
    """
    if attention_mask is not None and not bool(attention_mask.all()):
        raise HuggingFaceError("attention_mask hides tokens: leave it out, as packed documents have no padding between them")
    parts = list(_parts(mask_function))
    windows = [inside["sliding_window"] for name, inside in parts if name == "sliding_window_overlay"]
    # transformers derives packed sequences from jumps in the positions; the layout already has the exact boundaries.
    known = {"causal_mask_function", "sliding_window_overlay", "packed_sequence_mask_function"}
    names = {name for name, _ in parts}
    if not {"causal_mask_function"} <= names <= known:
        raise HuggingFaceError(
            f"the model uses a mask of {', '.join(sorted(names))}: 'longctx' supports only causal attention, with or without "
            "a sliding window"
        )
    return CausalMask(min(windows, default=None))


@contextmanager
def packing_from_layout() -> Iterator[None]:
    """Keeps transformers from deriving packed sequences from positions, for which the host would wait for a GPU."""
    masks: Any = import_module("transformers.masking_utils")
    derive = masks.find_packed_sequence_indices
    masks.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = derive


def _parts(mask_function: Callable[..., Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the intersected mask functions of `transformers.masking_utils`: their names and closure variables."""
    name = mask_function.__qualname__.split(".")[0]
    cells = getattr(mask_function, "__closure__", None) or ()
    inside = dict(zip(mask_function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))
    if name == "and_masks":
        for part in inside["mask_functions"]:
            yield from _parts(part)
    elif name == "remap_positions_for_packed_sequence":
        yield from _parts(inside["mask_function"])
    else:
        yield name, inside


def _one_window(attention_mask: CausalMask | torch.Tensor | None, sliding_window: int | None) -> int | None:
    """Returns the sliding window of mask and argument, which must agree; some models pass only one of them."""
    if attention_mask is None:
        return sliding_window
    if not isinstance(attention_mask, CausalMask):
        raise HuggingFaceError("a dense attention mask was given: leave attention_mask out, as the layout defines visibility")
    if sliding_window not in (None, attention_mask.window):
        raise HuggingFaceError(
            f"the layer has a sliding window of {sliding_window}, but its mask has a window of {attention_mask.window}: make "
            "them equal"
        )
    return attention_mask.window
