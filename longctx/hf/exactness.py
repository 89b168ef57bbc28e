"""Checks that a model of `transformers` is exact with packed and split documents, by running it,
not by a list of names.

Ring attention is exact if only attention mixes tokens, and if only position_ids tell a token its
place. So the check runs the model on a few tokens that each attend to themselves alone: the
attention inputs and logits of every token may then depend only on that token and its position, and
on nothing else in the row.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial
from torch.nn import functional as F

from longctx.attention.expansion import Compressed
from longctx.attention.linear.recurrence import Recurrence
from longctx.errors import UserError
from longctx.model.checkpoint_files import not_finite

LAYER_TYPES = ("full_attention", "sliding_attention")
"""Layer types that work on packed documents; others (convolutions, linear attention, ..) would mix
documents."""
LINEAR_LAYERS = (
    "BailingHybridDeltaAttention",
    "BambaMixer",
    "FalconH1Mixer",
    "GraniteMoeHybridMambaLayer",
    "KimiLinearDeltaAttention",
    "Mamba2Mixer",
    "NemotronHMamba2Mixer",
    "OlmoHybridGatedDeltaNet",
    "Qwen3NextGatedDeltaNet",
    "Qwen3_5GatedDeltaNet",
    "Qwen3_5MoeGatedDeltaNet",
    "Zamba2MambaMixer",
)
"""Classes of the linear layers that are supported. The tests compare a model of each with its own
code."""
LINEAR_TYPES = ("linear_attention", "hybrid", "mlp", "moe")
"""Layer types of models whose linear layers are supported."""
ORIGINAL_LENGTH = "original_max_position_embeddings"
TOKENS = 16
REPLACED = [0, 3, 6, 10, 11, 15]
"""Rows that are replaced, with NaN embeddings; their neighbours on both sides must not change."""
HARMLESS = {
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
"""Keyword arguments that reach attention and linear layers and do not affect them."""
OF_ALL_RANKS = object()
"""Value of `output_router_logits` for a caller that computes the loss of routers over all ranks."""
Kind = tuple[float | None, float, int | None]
"""Scale, softcap and window of a layer's attention."""
TARGETS = 1000
"""Divisor of the loss; differs from the number of labels, to detect models that count the
labels."""


class HuggingFaceError(UserError):
    """A model, or an argument of a model, that ring attention does not support exactly."""


def refuse_arguments(name: str, arguments: Mapping[str, Any]) -> None:
    """Raises HuggingFaceError for keyword arguments of a layer that could change its result."""
    unset = None, False, OF_ALL_RANKS
    refused = [
        key
        for key, value in arguments.items()
        if key not in HARMLESS and not any(value is each for each in unset)
    ]
    if refused:
        raise HuggingFaceError(
            f"{name} passes {', '.join(refused)} to its attention, which 'longctx' does not "
            "support: leave the argument out when you call the model; if the model adds it "
            "itself, the model is not supported"
        )


def check_config(config: Any, types: Iterable[str] = ()) -> None:
    """Raises HuggingFaceError for settings with which packed or split documents would train
    differently.

    `types` of layers are supported in this model beside LAYER_TYPES.
    """
    known = {*LAYER_TYPES, *types}
    unknown = sorted({str(kind) for kind in getattr(config, "layer_types", None) or ()} - known)
    if unknown:
        raise HuggingFaceError(
            f"the model has layers of type {', '.join(unknown)}, which would mix packed documents "
            f"and miss tokens on other ranks: only {' and '.join(LAYER_TYPES)} layers are "
            f"supported, and linear layers of the classes {', '.join(LINEAR_LAYERS)}"
        )
    if getattr(config, "output_router_logits", False):
        raise HuggingFaceError(
            "output_router_logits is set in the model's config: the auxiliary loss of a mixture "
            "of experts counts the tokens of one rank and micro-batch, so it would depend on how "
            "documents are split. Set it to False (longctx train has balance.document_loss "
            "instead, which does not)"
        )
    for name in ("layerdrop", "decoder_layerdrop"):
        if getattr(config, name, 0):
            raise HuggingFaceError(
                f"{name} is {getattr(config, name)} in the model's config: each rank would drop "
                "different layers. Set it to 0"
            )


def longest_exact(config: Any) -> tuple[int, str] | None:
    """Returns the longest document in tokens that RoPE treats the same on all ranks, and the RoPE
    type; None if unlimited.

    `dynamic` and `longrope` choose frequencies by the longest position in the input, which differs
    between ranks. Up to this length the frequencies are constant. With a fixed `alpha` (HunYuan),
    `dynamic` is always constant.
    """
    limits: list[tuple[int, str]] = []
    for rope in _ropes(config):
        kind = str(rope.get("rope_type", rope.get("type")))
        if kind == "longrope":
            original = (
                rope.get(ORIGINAL_LENGTH)
                or getattr(config, ORIGINAL_LENGTH, None)
                or config.max_position_embeddings
            )
            limits.append((original, kind))
        elif "dynamic" in kind and not rope.get("alpha"):
            limits.append((config.max_position_embeddings, kind))
    return min(limits, default=None)


def check_length(config: Any, longest: int) -> None:
    """Raises HuggingFaceError if documents of `longest` tokens would get different RoPE frequencies
    on different ranks."""
    limit = longest_exact(config)
    if limit is not None and longest > limit[0]:
        raise HuggingFaceError(
            f"a document has {longest} tokens, but RoPE of type {limit[1]} changes its "
            f"frequencies for inputs of more than {limit[0]} tokens, and ranks have inputs of "
            f"different lengths: split documents to at most {limit[0]} tokens, or set another "
            "rope_type, such as yarn, in the model's config"
        )


def _ropes(config: Any) -> list[dict[str, Any]]:
    """Returns all sets of RoPE parameters; some models have one per layer type. `rope_scaling` is
    the older name."""
    ropes = [getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")]
    inside = [
        value
        for rope in ropes
        if isinstance(rope, dict)
        for value in rope.values()
        if isinstance(value, dict)
    ]
    return [rope for rope in ropes if isinstance(rope, dict)] + inside


def check_model(
    model: Any, first_position: int = 0, *, causal: bool = True, head: bool = True
) -> None:
    """Raises HuggingFaceError unless only attention mixes tokens and the loss is the sum over the
    given labels.

    Positions count from `first_position`. The loss of an encoder, if not `causal`, is not checked,
    as it is not used; a model without `head` has none. Runs the model five times on 16 tokens
    without gradients; on every rank if the model is sharded.
    """
    probe = Probe(
        model,
        model,
        dtype=next(model.get_input_embeddings().parameters()).dtype,
        causal=causal,
        first_position=first_position,
    )
    probe.head = head
    check_finite(model)
    with torch.no_grad(), evaluating(model):
        logits = check_rows(probe)
        if causal and head:
            check_loss(probe, logits)


def check_packed(
    model: Any, forward: Callable[..., Any], dtype: torch.dtype, *, causal: bool = True
) -> frozenset[Kind]:
    """Does the checks of `check_model` except that of the loss, calling `forward`, which computes
    in `dtype`.

    Returns the kinds of attention of the model's layers.
    """
    probe = Probe(model, forward, dtype, causal)
    with torch.no_grad(), evaluating(model):
        check_rows(probe)
    return frozenset(probe.kinds)


def check_rows(probe: "Probe") -> torch.Tensor:
    """Raises HuggingFaceError unless only attention mixes tokens; returns the logits of tokens that
    attend to themselves."""
    name = probe.name
    ids = probe.tokens()
    places = torch.arange(TOKENS)
    alone = probe.rows(ids, places)
    if len(alone) == 1:
        raise HuggingFaceError(
            f"{name} never calls transformers' attention interface, so documents in one row would "
            "see each other: use a model that computes attention through the interface in all "
            "layers"
        )
    if not all(bool(rows.isfinite().all()) for rows in alone):
        raise HuggingFaceError(
            f"{name} computes NaN or infinity for ordinary tokens, so its loss would be NaN: its "
            "weights have such numbers, or are too large for the dtype that it computes in; load "
            "another checkpoint, or compute in bfloat16 or float32"
        )
    others = ids.clone()
    positions = places.clone()
    others[REPLACED], positions[REPLACED] = probe.others(), 0
    replaced = probe.rows(others, positions, poisoned=True)
    kept = [row for row in range(TOKENS) if row not in REPLACED]
    if probe.differ([rows[kept] for rows in alone], [rows[kept] for rows in replaced]):
        raise HuggingFaceError(
            f"{name} mixes tokens outside transformers' attention interface (its own attention, a "
            "convolution, a recurrence, ..), so documents in one row would see each other: this "
            "model is not supported"
        )
    same = probe.rows(ids[:1].expand(TOKENS), torch.full((TOKENS,), 5))
    if probe.differ(same, [rows[:1].expand_as(rows) for rows in same]):
        raise HuggingFaceError(
            f"{name} derives positions from the index of a token in the row, not from "
            "position_ids, which differ in packed documents: this model is not supported"
        )
    if probe.differ(alone, probe.rows(ids, None)):
        raise HuggingFaceError(
            f"{name} does not count positions as 0, 1, 2, .. without position_ids, so packed "
            "documents would get other positions than unpacked ones: this model is not supported"
        )
    return alone[-1]


def check_finite(model: Any) -> None:
    """Raises HuggingFaceError if a parameter has NaN or infinity. All ranks call it; of sharded
    ones all see the same.

    Quantized ones of other libraries are left to the rows that the model computes.
    """
    for name, parameter in model.named_parameters():
        tensor = parameter.detach()
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        found = not_finite(local) if type(local) in (torch.Tensor, torch.nn.Parameter) else ""
        if isinstance(tensor, DTensor):
            mine = torch.tensor(float(bool(found)))
            anywhere = DTensor.from_local(
                mine, tensor.device_mesh, [Partial()] * tensor.device_mesh.ndim, run_check=False
            )
            damaged = bool(anywhere.full_tensor())
            found = found or "some on another rank" * damaged
        if found:
            raise HuggingFaceError(
                f"{type(model).__name__} has NaN or infinity: {name} has {found}, and the loss "
                "would be NaN; load the checkpoint again, or one that was saved before the loss "
                "of its run was NaN"
            )


def check_loss(probe: "Probe", logits: torch.Tensor) -> None:
    """Raises HuggingFaceError unless the loss is the sum over the given labels; `logits` are those
    of the probe's tokens."""
    name = probe.name
    ids = probe.tokens()
    labels = (7 * ids + 3) % logits.shape[1]
    labels[::5] = -100
    arguments = {
        "labels": labels.unsqueeze(0),
        "shift_labels": labels.unsqueeze(0),
        "num_items_in_batch": TARGETS,
    }
    loss = probe.forward(ids, torch.arange(TOKENS), **arguments).loss
    expected = F.cross_entropy(logits.float(), labels, reduction="sum", ignore_index=-100) / TARGETS
    if loss is None or not torch.allclose(
        loss.float(), expected, rtol=1e-3 if probe.tolerance < 0.01 else 1e-2, atol=0
    ):
        if loss is None:
            computed = "no loss"
        else:
            computed = f"{float(loss):.3g} instead of {float(expected):.3g}"
        raise HuggingFaceError(
            f"{name} does not compute its loss as the sum over shift_labels divided by "
            f"num_items_in_batch ({computed}), so the loss would depend on how documents are "
            "split: this model is not supported"
        )


def run_checked(call: Callable[..., Any], name: str, **arguments: Any) -> Any:
    """Returns the output of the model `name`. Turns any exception into a HuggingFaceError."""
    try:
        return call(**arguments)
    except UserError:
        raise
    except (
        Exception
    ) as error:  # models may raise anything for inputs that they were not written for
        text = " ".join(str(error).split())[:160]
        raise HuggingFaceError(
            f"{name} does not run on packed tokens with attention 'longctx' "
            f"({type(error).__name__}: {text}): it needs a mask, a cache or inputs that are not "
            "available here, so it is not supported"
        ) from error


class Probe:
    """Runs a model on tokens that each attend only to themselves, by calling `forward`, which
    computes in `dtype`."""

    wanted = "a causal language model"
    head = True

    def __init__(
        self,
        model: Any,
        forward: Callable[..., Any],
        dtype: torch.dtype,
        causal: bool = True,
        first_position: int = 0,
    ) -> None:
        self.causal = causal
        self.first_position = first_position
        self.model = model
        self.call = forward
        self.name = type(model).__name__
        if any(parameter.is_meta for parameter in model.parameters()):
            raise HuggingFaceError(
                f"{self.name} has no weights, as it is on the meta device: load them first"
            )
        self.embeddings = {model.get_input_embeddings()}
        if getattr(model.config, "is_encoder_decoder", False):
            self.embeddings.add(model.get_decoder().get_input_embeddings())
        self.entries = min(entries_of(embedding) for embedding in self.embeddings)
        self.device = next(model.get_input_embeddings().parameters()).device
        # Rounding may differ between rows, and in 16 bits may route a token to other experts.
        self.tolerance = 1e-3 if dtype in (torch.float32, torch.float64) else 0.1
        self.kinds: set[Kind] = set()

    def tokens(self) -> torch.Tensor:
        """Returns distinct token ids [TOKENS] without special ones, such as image tokens."""
        config = self.model.config.get_text_config()
        special = self._special()
        ordinary = [token for token in range(min(config.vocab_size, 4096)) if token not in special]
        return torch.tensor(ordinary, device=self.device)[
            torch.linspace(0, len(ordinary) - 1, TOKENS).long()
        ]

    def others(self) -> torch.Tensor:
        """Returns the tokens of rows that are replaced, int64 [len(REPLACED)]: for encoders also
        special ones.

        Some encoders (ESM) scale all embeddings by the share of mask tokens in the row.
        """
        special = [] if self.causal else sorted(self._special())[: len(REPLACED)]
        ordinary = [int(self.tokens()[1])] * (len(REPLACED) - len(special))
        return torch.tensor(special + ordinary, device=self.device)

    def _special(self) -> set[int]:
        config = self.model.config.get_text_config()
        ids = (*_token_ids(config.to_dict()), *_token_ids(self.model.config.to_dict()))
        return {token for token in ids if 0 <= token < self.entries}

    def forward(self, ids: torch.Tensor, positions: torch.Tensor | None, **arguments: Any) -> Any:
        """Returns the model's output for tokens and positions [tokens]."""
        if positions is not None:
            arguments["position_ids"] = positions.to(self.device).unsqueeze(0) + self.first_position
        inputs = {"input_ids": ids.unsqueeze(0), "use_cache": False, "ring_attention": Alone()}
        return run_checked(self.call, self.name, **inputs | arguments)

    def rows(
        self, ids: torch.Tensor, positions: torch.Tensor | None, poisoned: bool = False
    ) -> list[torch.Tensor]:
        """Returns the inputs of each attention call and finally the logits, per token: tensors
        [TOKENS, ..].

        `poisoned` sets the embeddings of REPLACED to NaN, which even a weight of zero does not
        hide.
        """
        alone = Alone()
        handles = [
            embedding.register_forward_hook(_poison) for embedding in self.embeddings if poisoned
        ]
        try:
            output = self.forward(ids, positions, ring_attention=alone)
        finally:
            for handle in handles:
                handle.remove()
        again = [found for found, _ in alone.expanded]
        once = [found for _, found in alone.expanded]
        if not poisoned and self.differ(again, once):
            raise HuggingFaceError(
                f"{self.name} expands the latents of a token to other keys and values beside "
                "other tokens, so those of split documents cannot be sent to other ranks: this "
                "model is not supported"
            )
        logits = getattr(output, "logits", None)
        if not (self.causal and self.head):
            if getattr(output, "pooler_output", None) is not None:
                raise HuggingFaceError(
                    f"{self.name} pools the first row only, not the first token of every "
                    "document: load it with add_pooling_layer=False, and pool its hidden states "
                    "by document, as examples/encoder_heads.py does"
                )
            if logits is None and hasattr(output, "last_hidden_state"):
                logits = output.last_hidden_state
        if logits is None or logits.shape[:2] != (1, TOKENS):
            expected = self.wanted if self.causal else "an encoder, or its model for masked tokens"
            raise HuggingFaceError(
                f"{self.name} does not return logits for every token: use {expected}"
            )
        self.kinds |= alone.kinds
        return [*alone.seen, logits[0]]

    def differ(self, some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
        return len(some) != len(others) or any(
            # A NaN differs.
            not bool(((one - other).norm(dim=1) <= self.tolerance * one.norm(dim=1) + 1e-12).all())
            for one, other in zip(
                (rows.float() for rows in some), (rows.float() for rows in others), strict=True
            )
        )


class Alone:
    """Replaces `Rings`: every token attends only to itself.

    Records the attention inputs in `seen`, the kinds of attention in `kinds`, and in `expanded`
    keys and values that are expanded in another order of tokens, with those that the layer
    computed.
    """

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []
        self.expanded: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.kinds: set[Kind] = set()

    def of_role(self, _: str) -> "Alone":
        """Returns itself: tokens of an encoder-decoder's target also attend to the source's token
        in the same row."""
        return self

    def recurrence(self, _: torch.device) -> "_AloneRecurrence":
        return _AloneRecurrence(self.seen)

    def of(
        self, scale: float | None, softcap: float, window: int | None, _: torch.device
    ) -> "Alone":
        self.kinds.add((scale, softcap, window))
        return self

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *_: Any,
        compressed: Compressed | None = None,
        **__: Any,
    ) -> torch.Tensor:
        self.seen.append(torch.cat([tensor.flatten(1) for tensor in (q, k, v)], dim=1))
        if compressed is not None:
            expanded = compressed.expansion.expand(
                compressed.first.flip(0), compressed.second.flip(0)
            )
            both = expanded, (k.flip(0), v.flip(0))
            again, once = (
                torch.cat([tensor.flatten(1) for tensor in keys], dim=1) for keys in both
            )
            self.expanded.append((again, once))
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)


class _AloneRecurrence(Recurrence):
    """A recurrence in which every token is a document; records its inputs in `seen`."""

    def __init__(self, seen: list[torch.Tensor]) -> None:
        super().__init__(None)
        self.seen = seen

    def convolve(self, x: torch.Tensor, *others: Any) -> torch.Tensor:
        self.seen.append(x)
        return super().convolve(x, *others)

    def attend(self, *arguments: Any) -> torch.Tensor:
        self.seen.append(torch.cat([x.flatten(1) for x in arguments[:5] if x is not None], dim=1))
        return super().attend(*arguments)


def entries_of(embedding: torch.nn.Module) -> int:
    """Returns the number of tokens of an embedding, also of one that adapters wrap. Raises
    HuggingFaceError."""
    for part in embedding.modules():
        entries = getattr(part, "num_embeddings", None)
        if isinstance(entries, int):
            return entries
    raise HuggingFaceError(
        f"the embedding of tokens is a {type(embedding).__name__}, in which no part has "
        "num_embeddings: use torch.nn.Embedding, or a subclass"
    )


def _poison(_module: torch.nn.Module, _inputs: Any, embedded: torch.Tensor) -> torch.Tensor:
    embedded = embedded.clone()
    embedded[:, REPLACED] = torch.nan
    return embedded


def _token_ids(values: dict[str, Any]) -> Iterator[int]:
    for name, value in values.items():
        if name.endswith(("token_id", "token_index")):
            yield from (
                token
                for token in (value if isinstance(value, list) else [value])
                if isinstance(token, int)
            )


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Sets evaluation mode, but not for linear layers: on CPUs those of bitsandbytes pack their
    weights in it, for good."""
    before = {module: module.training for module in model.modules()}
    for module in before:
        module.training = isinstance(module, torch.nn.Linear)
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an attribute, which gets back the value of the object's own, or none."""
    own = {name: vars(owner)[name]} if name in vars(owner) else {}
    vars(owner)[name] = value
    try:
        yield
    finally:
        vars(owner).pop(name, None)
        vars(owner).update(own)
