"""Ring attention for models of `transformers`.

    model = AutoModelForCausalLM.from_pretrained(name)
    prepare(model)
    micro_batches, targets = pack_documents(plan, rank, documents)
    for batch in micro_batches:
        model(**model_inputs(model, batch, targets)).loss.backward()

The layout is passed as a keyword argument of the model, like the sequence lengths of flash-attn. So
each micro-batch keeps its own layout, even with several in flight, and when activation
checkpointing recomputes a layer in backward, where a context manager around forward would have
ended (and where a GPU uses another thread).

No mask is ever built. Anything that the layout cannot express raises an error, and `prepare`
rejects models in which tokens interact outside attention: docs/families.md lists the models of
transformers that are exact.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import FrameType
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist

from longctx.arguments import checked, flag, kind, only, or_none, whole
from longctx.attention.host_to_device import copy_to
from longctx.attention.kernels.grouped_product import leaves_gradients
from longctx.attention.linear.recurrence import Recurrence
from longctx.attention.masks import Mask
from longctx.attention.ring import RULES, RingAttention
from longctx.attention.ulysses import HybridAttention
from longctx.attention.uncompiled import not_compiled
from longctx.errors import install
from longctx.hf.exactness import (
    LINEAR_TYPES,
    HuggingFaceError,
    Kind,
    check_config,
    check_length,
    check_model,
    refuse_arguments,
    replaced,
)
from longctx.hf.indexed import INDEXED_TYPE, Selection, indexers, replace_indexers, restore_indexers
from longctx.hf.latents import latents_of, send_keys, send_latents
from longctx.hf.linear import linear_layers, replace_linear, restore_linear
from longctx.hf.masks import (
    BidirectionalMask,
    CausalMask,
    describe_either_mask,
    describe_mask,
    one_window,
)
from longctx.hf.seq2seq import ROLES, ByRole, attend_by_role, attention_inputs, check_seq2seq
from longctx.planning.layout import CrossLayout, Layout, Span

Make = Callable[[float | None, float, int | None, torch.device], RingAttention | HybridAttention]
"""Builds attention from scale, softcap, window and device."""
CPU = torch.device("cpu")
NAME = "longctx"
IN_BOTH_DIRECTIONS = "longctx_in_both_directions"
"""Name of the attention of encoders, whose tokens see earlier and later ones."""
BY_ROLE = "longctx_by_role"
"""Name of the attention of encoder-decoders."""
_PREPARED: WeakSet[torch.nn.Module] = WeakSet()
_HOOKS: WeakKeyDictionary[torch.nn.Module, tuple[Any, Any]] = WeakKeyDictionary()


class PackedTokens(Protocol):
    """A rank's share of a micro-batch, such as `longctx.data.packing.MicroBatch`; tensors are int64
    [tokens]."""

    @property
    def layout(self) -> Layout: ...
    @property
    def tokens(self) -> torch.Tensor: ...
    @property
    def labels(self) -> torch.Tensor: ...
    @property
    def positions(self) -> torch.Tensor: ...


@checked(HuggingFaceError, causal=flag, head=flag)
def prepare(model: Any, *, causal: bool = True, head: bool = True) -> None:
    """Replaces the attention of a causal language model of transformers with ring attention, and
    checks that this is exact.

    The model may also be an encoder-decoder such as T5Gemma, whose micro-batches come from
    `pack_seq2seq`. With `causal` False it must be an encoder, with or without a head for masked
    tokens. Its own loss is not used: compute yours from its logits, or from its hidden states. With
    `head` False a causal model, too, may be one that returns hidden states.

    Call it after loading the weights, before or after sharding, before wrappers such as DDP, and on
    every rank, because the model runs on a few tokens. Raises HuggingFaceError, and leaves the
    model unchanged, if documents would see each other, if the loss would depend on how they are
    split, or if transformers is missing or too old.
    """
    before = replace_attention(model, causal)
    try:
        if is_seq2seq(model):
            check_seq2seq(model)
        else:
            check_model(model, first_position(model), causal=causal, head=head)
    except HuggingFaceError:
        model.set_attn_implementation(before)
        restore_layers(model)
        raise
    _PREPARED.add(model)


def replace_attention(model: Any, causal: bool = True) -> str:
    """Does the first half of `prepare`, which needs no weights. Returns the name of the previous
    attention."""
    _register()
    name = type(model).__name__
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "set_attn_implementation"):
        raise HuggingFaceError(
            f"{name} is not a model of transformers: prepare the model that from_pretrained "
            "returned"
        )
    before: str = config._attn_implementation
    _check_configs(model)
    implementation = NAME if causal else IN_BOTH_DIRECTIONS
    if causal and getattr(config, "is_encoder_decoder", False):
        implementation = BY_ROLE
    model.set_attn_implementation(implementation)
    if hasattr(config, "vision_config"):  # every image attends to itself alone, on one rank
        model.set_attn_implementation({"vision_config": "sdpa"})
    if config._attn_implementation != implementation:
        model.set_attn_implementation(before)
        raise HuggingFaceError(
            f"{name} computes attention itself, not through transformers' attention interface, so "
            "its attention cannot be replaced: use another model"
        )
    replace_layers(model)
    base = model.base_model
    if base not in _HOOKS:
        begin = base.register_forward_pre_hook(_begin_forward, with_kwargs=True)
        _HOOKS[base] = (
            begin,
            base.register_forward_hook(_end_forward, with_kwargs=True, always_call=True),
        )
    if leaves_gradients():
        # One expert after the other; for good, as plain training needs it too.
        model.set_experts_implementation("eager")
    return before


def replace_layers(model: Any) -> None:
    """Lets layers other than softmax attention of whole keys and values use the layout."""
    replace_linear(model)
    replace_indexers(model)
    send_latents(model)


def restore_layers(model: Any) -> None:
    """Undoes `replace_layers`."""
    restore_linear(model)
    restore_indexers(model)
    send_keys(model)


def _register() -> None:
    """Registers ring attention with transformers by name."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise HuggingFaceError(
            f"transformers cannot be imported ({error}): install a version with "
            f"AttentionMaskInterface, {install('huggingface')}"
        ) from error
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, describe_mask)
    AttentionInterface.register(IN_BOTH_DIRECTIONS, partial(attend, causal=False))
    AttentionMaskInterface.register(IN_BOTH_DIRECTIONS, partial(describe_mask, causal=False))
    AttentionInterface.register(BY_ROLE, partial(attend_by_role, attend))
    AttentionMaskInterface.register(BY_ROLE, describe_either_mask)


def is_causal(model: Any) -> bool:
    """Returns whether a model with replaced attention sees only earlier tokens."""
    return bool(model.config._attn_implementation != IN_BOTH_DIRECTIONS)


def is_seq2seq(model: Any) -> bool:
    """Returns whether a model with replaced attention is an encoder-decoder."""
    return bool(model.config._attn_implementation == BY_ROLE)


def first_position(model: Any) -> int:
    """Returns the position id of a document's first token: 0, but encoders with embeddings like
    RoBERTa's leave the ids up to that of padding free."""
    if is_causal(model):
        return 0
    names = "create_position_ids_from_inputs_embeds", "position_embeddings"
    counting = (
        module for module in model.modules() if all(hasattr(module, name) for name in names)
    )
    return next((int(module.padding_idx) + 1 for module in counting), 0)


def _check_configs(model: Any) -> None:
    types = list(LINEAR_TYPES) if linear_layers(model) else []
    if indexers(model):
        types.append(INDEXED_TYPE)
    for config in {
        id(config): config for config in (model.config, *configs_of_parts(model))
    }.values():
        check_config(config, types)


def configs_of_parts(model: Any) -> list[Any]:
    """Returns the config of a model's text, or of an encoder-decoder's encoder and decoder."""
    if not getattr(model.config, "is_encoder_decoder", False):
        return [model.config.get_text_config()]
    return [
        getattr(part, "config", model.config) for part in (model.get_encoder(), model.get_decoder())
    ]


def _is_batch(value: Any) -> str:
    """The rule of a rank's share of a micro-batch."""
    names = ("layout", "tokens", "labels", "positions")
    if all(hasattr(value, name) for name in names):
        return ""
    return (
        "must be a MicroBatch, such as pack_documents returns: a list of them is one for each "
        "micro-batch"
    )


@checked(
    HuggingFaceError,
    model=kind("a model of transformers, or a wrapper around it", torch.nn.Module),
    batch=_is_batch,
    target_tokens=or_none(whole(least=0)),
    **only("kernel", "keep_kv", "deterministic", "ranks_per_node", of=RULES),
    blocks=or_none(kind("a mapping of documents to spans, see Mask", Mapping)),
    device=kind("a torch.device or its name", torch.device, str),
)
def model_inputs(
    model: torch.nn.Module,
    batch: PackedTokens,
    target_tokens: int | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    kernel: str = "auto",
    keep_kv: bool = False,
    deterministic: bool = False,
    ranks_per_node: int | None = None,
    across: dist.ProcessGroup | None = None,
    blocks: Mapping[int, Sequence[Span]] | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """Returns the keyword arguments of a model for one micro-batch.

    Every rank must run the model on every micro-batch, in the same order. A rank without tokens
    gets one padding token.

    Args:
        model: a model passed to `prepare`, or a wrapper around it.
        batch: this rank's share, from `pack_documents` or the `Loader` of longctx.data.
        target_tokens: number of targets of the whole step, over all ranks. The model's `loss` is
            then the sum over this rank's targets divided by it: sum gradients over micro-batches
            and ranks, do not average them. None: the model gets no labels and computes no loss; use
            `batch.labels`, which are already shifted. Must be None for encoders.
        group, kernel, keep_kv, deterministic, ranks_per_node, across: see `ring_attention` and
            `RingAttention`.
        blocks: spans of documents whose tokens also see the later ones of their span, as those of
            an image; see `Mask`.
        device: device of the model.

    Raises:
        HuggingFaceError: for a model that is not prepared, documents that are too long for its
            RoPE, or weights of rows with the model's own loss.
    """
    source = getattr(batch, "source", None)
    prepared = _check_call(
        model, [batch.layout] if source is None else [source.layout, batch.layout]
    )
    causal = is_causal(prepared)
    if target_tokens is not None and not causal:
        raise HuggingFaceError(
            f"target_tokens is {target_tokens}, but {type(prepared).__name__} is an encoder, "
            "whose own loss is a mean over the tokens of one rank: leave it out, and compute the "
            "loss from the model's output and batch.labels"
        )
    options: dict[str, Any] = {
        "group": group,
        "kernel": kernel,
        "keep_kv": keep_kv,
        "deterministic": deterministic,
    }
    options |= {"ranks_per_node": ranks_per_node, "across": across}
    tokens, positions = (copy_to(row(tensor), device) for tensor in (batch.tokens, batch.positions))
    if source is None:
        inputs: dict[str, Any] = {
            "input_ids": tokens,
            "position_ids": positions + first_position(prepared),
            "use_cache": False,
        }
        inputs["ring_attention"] = _rings(
            batch.layout, Mask(causal=causal, blocks=blocks or {}), options
        )
    else:
        read = (copy_to(row(tensor), device) for tensor in (source.tokens, source.positions))
        inputs = attention_inputs(tokens, positions, *read)
        masks = {
            role: Mask(causal=role == "decoder", hidden=source.hidden if role == "decoder" else {})
            for role in ROLES
        }
        layouts = {role: source.layout_of(role, batch.layout) for role in ROLES}
        inputs["ring_attention"] = ByRole(
            {role: _rings(layouts[role], masks[role], options) for role in ROLES}
        )
    if target_tokens is not None:
        inputs |= _labels(batch, target_tokens, device)
    return inputs


def _labels(batch: PackedTokens, target_tokens: int, device: torch.device | str) -> dict[str, Any]:
    """Returns what makes a model compute its loss, from `shift_labels`. Raises HuggingFaceError for
    weights of rows."""
    weights = getattr(batch, "weights", None)
    if weights is not None and bool((weights[batch.labels != -100] != 1).any()):
        raise HuggingFaceError(
            "rows of the batch have weights other than 1, as merged sequences share their loss, "
            "but the model's own loss has none: leave target_tokens out, and compute the loss "
            "from its output, batch.labels and batch.weights"
        )
    labels = copy_to(row(batch.labels, -100), device)
    return {"labels": labels, "shift_labels": labels, "num_items_in_batch": max(1, target_tokens)}


def row(tensor: torch.Tensor, filler: int = 0) -> torch.Tensor:
    """Returns [.., 1, tokens] of [.., tokens], with one padding token if there are none, which
    models cannot reshape."""
    return torch.nn.functional.pad(tensor, (0, int(not tensor.shape[-1])), value=filler).unsqueeze(
        -2
    )


def _rings(layout: Layout | CrossLayout, mask: Mask, options: Mapping[str, Any]) -> "Rings":
    """`mask` is that of layers without a window."""

    def make(
        scale: float | None, softcap: float, window: int | None, device: torch.device
    ) -> RingAttention:
        return RingAttention(
            layout,
            mask=replace(mask, window=window),
            scale=scale,
            softcap=softcap,
            device=device,
            **options,
        )

    return Rings(make)


def _check_call(model: torch.nn.Module, layouts: Sequence[Layout]) -> Any:
    """Returns the prepared model inside `model`. Raises HuggingFaceError if there is none, or if it
    is not exact any more.

    `layouts` are those of the source and of the target, or for models other than encoder-decoders
    of the documents.
    """
    prepared: Any = next((module for module in model.modules() if module in _PREPARED), None)
    if prepared is None:
        raise HuggingFaceError(
            f"{type(model).__name__} is not prepared for packed documents: call prepare(model) "
            "first"
        )
    name = type(prepared).__name__
    configs = configs_of_parts(prepared)
    for config in configs:
        if config._attn_implementation not in (NAME, IN_BOTH_DIRECTIONS, BY_ROLE):
            raise HuggingFaceError(
                f"the attention of {name} was changed to {config._attn_implementation!r}, which "
                "would mix packed documents: call prepare(model) again"
            )
    _check_configs(prepared)
    if len(configs) != len(layouts):
        raise HuggingFaceError(
            f"{name} is an encoder-decoder, but the batch has no source: make it with pack_seq2seq"
            if len(layouts) == 1
            else f"{name} is no encoder-decoder, but the batch has a source: make it with "
            "pack_documents"
        )
    for config, layout in zip(configs, layouts, strict=True):
        check_length(config, max((shard.longest for shard in layout.shards), default=0))
    return prepared


class Rings:
    """The attention of one micro-batch, built once per kind of layer (scale, softcap and window)
    and device.

    `make` builds attention for `kinds` on `device` immediately, and for other kinds when a layer
    first requests them.
    """

    def __init__(self, make: Make, kinds: Iterable[Kind] = (), device: torch.device = CPU) -> None:
        self.make = make
        self._made: dict[
            tuple[float | None, float, int | None, torch.device], RingAttention | HybridAttention
        ] = {}
        for scale, softcap, window in kinds:
            self._made[scale, softcap, window, device] = make(scale, softcap, window, device)
        self._recurrence: Recurrence | None = None

    @not_compiled
    def recurrence(self, device: torch.device) -> Recurrence:
        """Returns the recurrence for linear layers."""
        if self._recurrence is None:
            attention = next(iter(self._made.values()), None) or self.of(None, 0.0, None, device)
            ring = attention.plain if isinstance(attention, HybridAttention) else attention
            assert isinstance(attention.layout, Layout)  # decoders without encoder
            self._recurrence = Recurrence(
                attention.layout, group=ring.group, exchange=ring.exchange
            )
        return self._recurrence

    def of(
        self, scale: float | None, softcap: float, window: int | None, device: torch.device
    ) -> RingAttention | HybridAttention:
        """Returns the attention for layers of this kind on this device."""
        kind = scale, softcap, window, device
        if kind not in self._made:
            self._made[kind] = self.make(scale, softcap, window, device)
        return self._made[kind]

    @property
    def last(self) -> str:
        """Layer and pass that this rank entered last, per kind; for error messages."""
        made = [*self._made.values(), *([] if self._recurrence is None else [self._recurrence])]
        return ", ".join(each.last for each in made)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: CausalMask | BidirectionalMask | None = None,
    *,
    causal: bool = True,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    indices: Selection | None = None,
    ring_attention: Rings | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Computes attention for transformers, which calls this function in every layer.

    Takes query [1, heads, tokens, head_dim], and key and value [1, kv_heads, tokens, ..]; returns
    ([1, tokens, heads, v_head_dim], None). `s_aux` [heads] are the learned sink logits of gpt-oss;
    `indices` stand for the keys that an indexer selects.
    Encoders have `causal` False. Raises HuggingFaceError for arguments that would change the result
    and are not supported.
    """
    if ring_attention is None:
        raise HuggingFaceError(
            "attention 'longctx' was called without a layout: call the model as "
            "model(**model_inputs(model, batch, ..)), see longctx.hf.attention. If this error "
            "comes from prepare(model), the model does not pass keyword arguments to its "
            "attention and is not supported"
        )
    name = type(module).__name__
    if (getattr(module, "is_causal", True) if is_causal is None else is_causal) != causal:
        raise HuggingFaceError(
            f"{name} is not causal: only causal language models are supported, and encoders with "
            "prepare(model, causal=False)"
            if causal
            else f"{name} is causal, or does not say that it is not (is_causal=False): encoders "
            "are supported only if tokens see earlier and later ones in all layers"
        )
    if query.shape[0] != 1:
        raise HuggingFaceError(
            f"input_ids has batch size {query.shape[0]}: pack all documents into one row of tokens"
        )
    if dropout:
        raise HuggingFaceError(
            f"{name} uses attention dropout {dropout}: set attention_dropout to 0 in its config"
        )
    refuse_arguments(name, others)
    window = one_window(attention_mask, sliding_window, causal)
    attention = ring_attention.of(scaling, softcap or 0.0, window, query.device)
    layer = getattr(module, "layer_idx", None)
    if indices is not None and isinstance(attention, HybridAttention):
        raise HuggingFaceError(
            f"{name} has an indexer that selects keys for all heads together, so heads cannot be "
            "swapped for tokens: use no Ulysses (context.ulysses_degree 1)"
        )
    # [1, heads, tokens, dim] → [tokens, heads, dim]
    q, k, v = (tensor[0].transpose(0, 1) for tensor in _autocast(query, key, value))
    latents = latents_of(module, key, value, k.dtype)
    if indices is None:
        out = attention(q, k, v, layer, sink_logits=s_aux, compressed=latents)
    else:
        out = indices.attend(attention, q, k, v, layer=layer, sink_logits=s_aux, latents=latents)
    return out.unsqueeze(0), None


def _autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Casts as autocast does for torch's attention functions: RoPE in float32 leaves q and k in a
    wider dtype than v."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors)


def packing_from_layout(during: FrameType | None = None) -> AbstractContextManager[None]:
    """Keeps transformers from deriving packed sequences from positions, for which the host would
    wait for a GPU.

    With `during`, only while this frame is on the stack: torch calls no hook after a forward that
    Ctrl-C ends, and other models would go on without packed sequences.
    """
    module = import_module("transformers.masking_utils")
    own = module.find_packed_sequence_indices
    always = during is None
    frames = [] if during is None else [during]
    del during  # or the function below would keep it

    def found(position_ids: torch.Tensor) -> Any:
        by_layout = always or (bool(frames) and _is_on_stack(frames[0]))
        if by_layout:
            return None
        frames.clear()  # which would keep what the interrupted forward held
        return own(position_ids)

    return replaced(module, "find_packed_sequence_indices", found)


def _is_on_stack(frame: FrameType) -> bool:
    """Returns whether a call is still under way in this thread."""
    current: FrameType | None = sys._getframe()
    while current is not None and current is not frame:
        current = current.f_back
    return current is frame


_UNDER_WAY: list[AbstractContextManager[None]] = []
"""`packing_from_layout` of every forward that is given a layout: a hook enters it, and another
leaves it."""


def remove_hooks(model: Any) -> None:
    """Removes the hooks of a prepared model, with which it would be pickled; `packing_from_layout`
    is the caller's then."""
    for hook in _HOOKS.pop(model.base_model, ()):
        hook.remove()


def _begin_forward(
    model: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
) -> None:
    if named.get("ring_attention") is not None and not torch.compiler.is_compiling():
        _UNDER_WAY.append(packing_from_layout(during=sys._getframe(1)))
        _UNDER_WAY[-1].__enter__()


def _end_forward(
    model: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], output: Any
) -> None:
    if named.get("ring_attention") is not None and not torch.compiler.is_compiling():
        _UNDER_WAY.pop().__exit__(None, None, None)
