"""Activation checkpointing: backward recomputes activations instead of keeping them."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from longctx.attention import OPERATORS, keeping
from longctx.attention.keeping import KeptProducts
from longctx.attention.products import KEPT
from longctx.errors import UserError
from longctx.model.experts import Experts, Router
from longctx.model.protocol import Model
from longctx.parallel.offload import Offload, from_host
from longctx.planning.cost.spec import RECOMPUTE_MODES

PRODUCTS = [
    getattr(torch.ops.aten, name).default
    for name in ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm")
    if hasattr(torch.ops.aten, name)
]
"""Matrix products as autograd's operators, whatever module or library calls them."""
OF_EXPERTS = [
    getattr(torch.ops.aten, name).default
    for name in ("bmm", "_grouped_mm")
    if hasattr(torch.ops.aten, name)
]
"""Products of all experts at once, to which transformers adds biases in place: what was kept would
have them twice."""
BEGIN = torch.ops.longctx.ring_attention_begin.default
PRODUCTS_OF: dict[str, KeptProducts] = {
    "norms": "all",
    "mlp": "around attention",
    "selective": "none",
}
"""Products that a mode of recomputation keeps."""
NARROW = 8
"""Products that widen their input by more than this factor, as adapters do, are recomputed: they
cost little for their size."""


def apply_recompute(
    model: Model, mode: str, *, mlp_tile_tokens: int | None = None, offload: Offload | None = None
) -> None:
    """Applies activation checkpointing to every block, in place, before the block is sharded.

    Modes: none keeps all activations. Of the others, all keep the block's input; all but full keep
    the outputs of attention, so that attention and its exchange run once. norms also keeps the
    outputs of all matrices, and recomputes cheap operations only: norms, RoPE, activation
    functions. mlp keeps the outputs of the matrices around attention, and recomputes those of the
    MLP. selective recomputes all matrices, full also attention. Gradients are the same, bit by bit.
    With `mlp_tile_tokens`, the MLP processes that number of tokens at a time and is recomputed tile
    by tile, in every mode. With `offload`, inputs of recomputed blocks are kept in host memory, and
    in mode selective what is kept of attention too.

    Raises ValueError for another mode, and UserError if `mlp_tile_tokens` is set but a block has no
    module `mlp`.
    """
    if mode not in RECOMPUTE_MODES:
        raise ValueError(f"recompute is {mode!r}: must be one of {', '.join(RECOMPUTE_MODES)}")
    if mode == "norms" and mlp_tile_tokens is not None:
        mode = "mlp"  # tiles recompute the MLP anyway
    for block in model.layers:
        # Experts compute in turns themselves.
        if mlp_tile_tokens is not None and not hasattr(block, "moe"):
            mlp = getattr(block, "mlp", None)
            if not isinstance(mlp, nn.Module):
                raise UserError(
                    f"train.mlp_tile_tokens is {mlp_tile_tokens}, but {type(block).__name__} has "
                    "no module `mlp` to tile: remove it"
                )
            mlp.forward = _in_tiles(_recomputed(mlp.forward, NOTHING), mlp_tile_tokens)
        if mode == "none":
            continue
        place = keeping.ON_DEVICE
        if offload is not None:
            offload.outputs = mode == "selective"
            if offload.outputs:
                place = keeping.Place(put=offload.keep, get=from_host)
        forward = _recomputed(block.forward, _contexts_of(block, mode, place))
        if offload is not None:
            forward = partial(offload, forward)
        block.forward = forward


@dataclass(frozen=True)
class Contexts:
    """Functions that return the contexts of a forward and of its recomputation, without and with
    torch.compile; None: nothing is kept."""

    eager: Callable[[], Any]
    compiled: Callable[[], Any] | None


NOTHING = Contexts(keeping.nothing, None)


def _contexts_of(block: nn.Module, mode: str, place: keeping.Place) -> Contexts:
    """Returns the contexts of a block, which keep what `mode` says."""
    if mode == "full":
        return NOTHING
    has_biases = any(getattr(module, "has_bias", False) is True for module in block.modules())
    compiled = partial(_contexts, mode, has_biases)
    products = PRODUCTS_OF[mode]
    if products == "none" or _keep_products(block):
        return Contexts(partial(keeping.contexts, place, products), compiled)
    # Torch's mode sees all operations, which takes the host longer than the block.
    return Contexts(compiled, compiled)


def _keep_products(block: nn.Module) -> bool:
    """Lets the layers of a block keep the outputs of their products. Returns False, and changes
    nothing, if the block has weights of several axes that others than these layers use: matrices of
    other layers, or convolutions, whose layers have products without weights too."""
    linear = list[nn.Linear]()
    experts = list[Router | Experts]()
    for module in block.modules():
        if isinstance(module, (Router, Experts)):
            experts.append(module)
            continue
        has_own_forward = "forward" in vars(module)
        if type(module) is nn.Linear and not has_own_forward:
            linear.append(module)
            continue
        for weight in module.parameters(recurse=False):
            if weight.dim() > 1:
                return False
    for each in experts:
        each.products = KEPT
    for layer in linear:
        is_narrow = layer.in_features * NARROW < layer.out_features
        if not is_narrow:
            vars(layer)["forward"] = _kept(layer)
    return True


def _kept(layer: nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return KEPT.linear(x, layer.weight, layer.bias)

    return forward


def _recomputed(
    forward: Callable[..., torch.Tensor], contexts: Contexts
) -> Callable[..., torch.Tensor]:
    """Returns a function that keeps the input of `forward`, and what the contexts keep."""
    eager = contexts.eager
    compiled = contexts.compiled

    def recomputed(
        *arguments: Any, **named: Any
    ) -> torch.Tensor:  # a function, as torch.compile skips the frame of a partial of `checkpoint`
        how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        if not torch.compiler.is_compiling():
            how["context_fn"] = eager
        elif compiled is not None:
            how["context_fn"] = compiled
        out: torch.Tensor = checkpoint(forward, *arguments, **how, **named)
        return out

    return recomputed


def _contexts(mode: str, expert_biases: bool = False) -> Any:
    """Returns the contexts of one block's forward and recomputation, which keep what `mode`
    says."""
    if mode == "selective":
        return create_selective_checkpoint_contexts(OPERATORS)
    since_attention: dict[bool, int] = {}
    """Matrix products since attention, counted separately for recomputation, as torch < 2.13 calls
    the policy there too."""

    def keeps(recomputing: bool, operator: Any, arguments: tuple[Any, ...]) -> bool:
        if operator in OPERATORS:
            if operator is not BEGIN:  # which comes before the queries are computed
                since_attention[recomputing] = 0
            return True
        if operator not in PRODUCTS or (expert_biases and operator in OF_EXPERTS):
            return False
        left, right = [
            each for each in arguments if isinstance(each, torch.Tensor) and each.dim() > 1
        ][:2]
        if left.shape[-1] * NARROW < right.shape[-1]:
            return False
        count = since_attention.get(recomputing)
        if count is None:  # queries, keys and values
            return True
        since_attention[recomputing] = count + 1
        # The first product after attention is its output matrix, others are the MLP.
        return mode == "norms" or count == 0

    def policy(context: Any, operator: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
        kept = keeps(context.is_recompute, operator, arguments)
        if kept:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def unseen(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Hides a hook from selective recomputation, which would count its operations and find others
    in backward.

    Needed for modules inside a block that FSDP shards on their own: it gathers weights in forward,
    but earlier in backward.
    """

    def hidden(*arguments: Any, **named: Any) -> Any:
        seen = isinstance(
            _get_current_dispatch_mode(), (_CachingTorchDispatchMode, _CachedTorchDispatchMode)
        )
        with _pop_mode_temporarily() if seen else nullcontext():
            return hook(*arguments, **named)

    return hidden


def _in_tiles(
    forward: Callable[..., torch.Tensor], tokens: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    # A function, as torch.compile would compile a partial again for every layer.
    def tiled(x: torch.Tensor) -> torch.Tensor:
        tiles = [forward(tile) for tile in x.split(tokens, dim=-2)]
        # As experts of gpt-oss, with the scores of their router.
        if not isinstance(tiles[0], torch.Tensor):
            raise UserError(
                f"train.mlp_tile_tokens is {tokens}, but MLPs of this model return more than a "
                "tensor: omit it"
            )
        return torch.cat(tiles, dim=-2)

    return tiled
