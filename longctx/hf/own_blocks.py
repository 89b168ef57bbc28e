"""Memory of a block that transformers' own code runs: its norms and its MLP run once on fake
tensors, as no formula is right for all families."""

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from longctx.hf.linear import linear_layers
from longctx.hf.live import Live
from longctx.model.experts import stacks_experts
from longctx.planning.cost.spec import OwnBlock

TOKENS = 2**20
"""So many that gradients of weights are small beside."""
MODELS = "transformers.", "transformers_modules."
"""Where classes of blocks are defined, below those that sharding makes of them."""
NORM = "Norm"
"""Part of the names of classes of norms."""
NORM_OF_QUERIES = re.compile(r"(^|\.)(q|query)_(layer)?norm$")
NORM_OF_KEYS = re.compile(r"(^|\.)(k|key)_(layer)?norm$")
"""Names of modules that normalize the heads of queries, and of keys."""


@dataclass(frozen=True)
class Traced:
    """Bytes per token of a module beside its weights: what it keeps for backward, and what its
    backward has at its peak beside that and the gradient of its output."""

    kept: float
    gradients: float


@dataclass(frozen=True)
class BlockCode:
    """The code of a model's largest block.

    The block itself may be sharded, quantized or have adapters: a new one of its class, which is
    traced, has not.

    Attributes:
        kind: its class.
        config: a copy of that of the model's text, of which `sizes` say the same.
        layer: its number.
        experts: implementation of experts.
        composes_norms: whether norms are simple operations, each of which keeps its result.
    """

    kind: type[nn.Module]
    config: Any = field(compare=False, repr=False)
    sizes: str
    layer: int
    experts: str | None
    composes_norms: bool

    @classmethod
    def of(cls, blocks: Sequence[nn.Module], config: Any) -> "BlockCode | None":
        """Returns the code of the largest of these blocks; None if it is not of transformers."""
        sizes = [sum(weight.numel() for weight in block.parameters()) for block in blocks]
        layer = sizes.index(max(sizes))
        for kind in type(blocks[layer]).__mro__:
            if kind.__module__.startswith(MODELS):
                return cls(
                    kind,
                    copy.copy(config),
                    sizes=repr(config.to_dict()),
                    layer=layer,
                    experts=getattr(config, "_experts_implementation", None),
                    composes_norms=_composes_norms(blocks[layer]),
                )
        return None

    def bytes_per_token(self, dtype: str, *, frozen: bool) -> OwnBlock | None:
        return _traced(self, dtype, frozen=frozen)


def _composes_norms(block: nn.Module) -> bool:
    return not any(isinstance(module, nn.LayerNorm | nn.RMSNorm) for module in block.modules())


@cache
def _traced(code: BlockCode, dtype: str, *, frozen: bool) -> OwnBlock | None:
    """Returns what a block keeps; None if its parts are not norms, attention and one MLP that take
    hidden states alone."""
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode())
        stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast("cpu", enabled=False))
        stack.enter_context(_default_dtype(dtype))
        try:
            return _traced_block(code, dtype, frozen=frozen)
        except Exception:  # of any model's code; the ledger has a formula too
            return None


@contextmanager
def _default_dtype(name: str) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, name))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _traced_block(code: BlockCode, dtype: str, *, frozen: bool) -> OwnBlock | None:
    config = code.config
    new = code.kind(copy.copy(config), code.layer)
    if dtype != "bfloat16" and any(map(stacks_experts, new.parameters())):
        return None  # products of groups are of bfloat16
    for weight in new.parameters():
        # Matrices have adapters; norms and stacked experts have none.
        weight.requires_grad_(weight.dim() == 2 or not frozen)
    linear = linear_layers(new)
    norms = 0.0
    heads = None
    rest = []
    for child in new.children():
        if _is_norm(child):
            norms += trace(child, config.hidden_size, of_input=True).kept
        elif child in linear:
            continue  # is measured whole: `linear_costs`
        elif "Attention" in type(child).__name__:
            heads = _of_norms_inside(child, config)
        elif any(True for _ in child.parameters()):
            rest.append(child)
    (mlp,) = rest
    traced = trace(mlp, config.hidden_size, of_input=False)
    return OwnBlock(norms, heads, mlp=traced.kept, gradients=traced.gradients)


def _is_norm(module: nn.Module) -> bool:
    return NORM in type(module).__name__


def _of_norms_inside(attention: nn.Module, config: Any) -> float:
    """Returns the bytes per token that norms of heads and latents keep."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kept = 0.0
    for name, module in attention.named_children():
        if not _is_norm(module):
            continue
        width = sum(weight.numel() for weight in module.parameters())
        copies = 1
        if width == head_dim and NORM_OF_QUERIES.search(name):
            copies = heads
        if width == head_dim and NORM_OF_KEYS.search(name):
            copies = kv_heads
        kept += copies * trace(module, width, of_input=True).kept
    return kept


def trace(module: nn.Module, width: int, *, of_input: bool) -> Traced:
    """Runs a module on `TOKENS` fake tokens of `width` values, forward and backward. `of_input`:
    whether its input counts if it keeps it."""
    live = Live()
    for weight in module.parameters():
        live.add(weight)
    given = torch.empty(1, TOKENS, width, requires_grad=True)
    live.add(given)
    beside = live.now
    with live:
        # A copy is counted as long as something keeps it.
        out = module(given * 1) if of_input else module(given)
        if isinstance(out, tuple):
            out = out[0]
        gradient = torch.empty_like(out)
        beside += out.nbytes + gradient.nbytes
        kept = live.now - beside
        live.peak = live.now
        torch.autograd.backward(out, gradient)
    gradients = live.peak - beside - kept
    return Traced(kept / TOKENS, gradients / TOKENS)
