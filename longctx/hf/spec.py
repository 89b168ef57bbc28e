"""Sizes of models of transformers, from their parameters and the many names of their configs."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from longctx.hf.indexed import indexed_layers, indexers
from longctx.hf.latents import has_latents, used_parts
from longctx.hf.linear import has_delta_rule, linear_layers, state_size
from longctx.hf.linear_costs import LinearCosts, linear_costs
from longctx.hf.own_blocks import NORM_OF_KEYS, NORM_OF_QUERIES, BlockCode
from longctx.model.experts import stacks_experts
from longctx.planning.cost.spec import NO_LATENT, Latent, LayerSpec, Matrix, ModelSpec, Role, Scan

WITHOUT_ATTENTION = ("linear_attention", "mlp", "moe")
"""Types of layers of models with linear attention that have no softmax attention."""
LORA = ".lora_"
"""Part of the names of LoRA's matrices, which `longctx.hf.lora` adds to the sizes."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
EXPERT_WIDTHS = ("moe_intermediate_size", "expert_ffn_hidden_size")
WIDTHS = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff")
"""Names in configs of the number of experts, the experts per token, the width of an expert, and the
width of an MLP."""


def spec_of(hf: Any, blocks: Iterable[nn.Module], causal: bool = True) -> ModelSpec:
    """Returns the sizes of a model, from its parameters and its config."""
    config = hf.config.get_text_config()
    blocks = list(blocks)
    # Layers may have other sizes than the config.
    by_layer = getattr(config, "per_layer_config", ())
    layers = tuple(map(_layer_spec, itertools.chain(by_layer, itertools.repeat(config)), blocks))
    windows = _windows(config)
    if not causal:  # the window of an encoder's config leaves out the token itself
        windows = [None if window is None else window + 1 for window in windows]
    if len(windows) == len(layers):
        layers = tuple(
            replace(layer, window=window) for layer, window in zip(layers, windows, strict=True)
        )
    if linear_layers(hf):
        kinds = getattr(config, "layer_types", None) or ()
        layers = tuple(
            replace(layer, attends=kind not in WITHOUT_ATTENTION)
            for layer, kind in zip(layers, kinds, strict=True)
        )
    if indexers(hf):
        layers = indexed_layers(layers, blocks)
    embedding = hf.get_input_embeddings().weight
    head = hf.get_output_embeddings()
    return ModelSpec(
        layers=layers,
        hidden_size=config.hidden_size,
        vocab_size=embedding.shape[0],
        tie_word_embeddings=head is not None and head.weight is embedding,
        attention_softcap=getattr(config, "attn_logit_softcapping", None) or 0.0,
        causal=causal,
        own=BlockCode.of(blocks, config),
    )


def spec_of_seq2seq(hf: Any) -> ModelSpec:
    """Returns the sizes of an encoder-decoder: blocks of the encoder, then of the decoder."""
    encoder = hf.get_encoder()
    decoder = hf.get_decoder()
    # Leaves out the token itself.
    windows = [None if window is None else window + 1 for window in _windows(encoder.config)]
    read = []
    written = []
    for block, window in zip(encoder.layers, windows, strict=True):
        read.append(replace(_layer_spec(encoder.config, block), window=window))
    for block, window in zip(decoder.layers, _windows(decoder.config), strict=True):
        layer = _layer_spec(decoder.config, block)
        keys = layer.num_key_value_heads * layer.head_dim, encoder.config.hidden_size
        written.append(replace(layer, window=window, matrices=_of_source(layer.matrices, keys)))
    embedding = decoder.get_input_embeddings().weight
    head = hf.get_output_embeddings()
    spec = ModelSpec(
        layers=(*read, *written),
        hidden_size=decoder.config.hidden_size,
        vocab_size=embedding.shape[0],
        tie_word_embeddings=head is not None and head.weight is embedding,
        attention_softcap=getattr(decoder.config, "attn_logit_softcapping", None) or 0.0,
        encoder_layers=len(read),
        own=BlockCode.of(decoder.layers, decoder.config),
    )
    whole = sum(parameter.numel() for parameter in hf.parameters())
    # The encoder's embedding and last norm.
    return replace(spec, encoder_root_parameters=whole - spec.parameters)


def _layer_spec(config: Any, block: nn.Module) -> LayerSpec:
    """Returns the sizes of a block; experts that a token does not use count as parameters, not as
    operations."""
    experts, chosen = (_first(config, names) or 1 for names in (EXPERTS, CHOSEN))
    parameters = [weight for name, weight in block.named_parameters() if LORA not in name]
    # The latter of models that have only linear attention.
    heads = _first(config, ("num_attention_heads", "num_heads"))
    assert heads is not None
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None)
    # Latent attention: every head has its own keys, of another size than values.
    if getattr(config, "kv_lora_rank", None):
        kv_heads = heads
        head_dim = (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim) // 2
    head_dim = head_dim or config.hidden_size // heads
    width = _first(config, WIDTHS) or 4 * config.hidden_size
    if any(map(stacks_experts, block.parameters())):  # blocks without experts may come first
        width = (_first(config, EXPERT_WIDTHS) or width) * chosen
    linear = linear_layers(block)
    scans = [
        _scan(each, linear_costs(each, kind, config.hidden_size)) for each, kind in linear.items()
    ]
    return LayerSpec(
        hidden_size=config.hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=width,
        matrices=tuple(
            _matrix(weight, experts, chosen) for weight in parameters if weight.dim() > 1
        ),
        vectors=sum(weight.numel() for weight in parameters if weight.dim() == 1),
        attention_norms=_norms_of_heads(block, heads, kv_heads) * head_dim,
        scan=scans[0] if scans else None,
        latent=next(
            (_latent(config, layer) for layer in block.modules() if has_latents(layer)), NO_LATENT
        ),
    )


def _norms_of_heads(block: nn.Module, heads: int, kv_heads: int) -> int:
    """Returns how many heads of queries and keys are normalized."""
    names = [name for name, _ in block.named_modules()]
    of_queries = sum(NORM_OF_QUERIES.search(name) is not None for name in names)
    of_keys = sum(NORM_OF_KEYS.search(name) is not None for name in names)
    return of_queries * heads + of_keys * kv_heads


def _matrix(weight: torch.Tensor, experts: int, chosen: int) -> Matrix:
    """Returns a weight as a matrix, or as the matrices of stacked experts; if there are fewer than
    the router has, all tokens use them."""
    if not stacks_experts(weight):
        return matrix_of(weight)
    count, rows, columns = weight.shape
    return Matrix(rows, columns, count, count if count < experts else count * chosen // experts)


def matrix_of(weight: torch.Tensor, role: Role = "own") -> Matrix:
    """Returns a weight as one matrix; scalars and vectors too, and what a sharded model left here
    no value of."""
    rows = weight.shape[0] if weight.dim() else 1
    return Matrix(rows, weight.numel() // max(1, rows), role=role)


def _of_source(matrices: Sequence[Matrix], keys: tuple[int, int]) -> tuple[Matrix, ...]:
    """Gives the K and V matrices [keys, width of the encoder] of a decoder's cross-attention their
    role, by their size."""
    found = [
        number for number, matrix in enumerate(matrices) if (matrix.rows, matrix.columns) == keys
    ][-2:]
    return tuple(
        replace(matrix, role="source") if number in found else matrix
        for number, matrix in enumerate(matrices)
    )


def _latent(config: Any, layer: nn.Module) -> Latent:
    parameters = sum(
        parameter.numel() for part in used_parts(layer) for parameter in part.parameters()
    )
    key_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    return Latent(
        config.kv_lora_rank + config.qk_rope_head_dim, parameters, key_dim, config.v_head_dim
    )


def _scan(layer: nn.Module, costs: LinearCosts) -> Scan:
    return Scan(
        state_size(layer),
        costs.scan,
        split_flops=costs.split,
        delta_rule=has_delta_rule(layer),
        kept=costs.kept,
        working=costs.working,
    )


def _first(config: Any, names: Iterable[str]) -> int | None:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), None)


def _windows(config: Any) -> list[int | None]:
    """Returns the attention window of every layer, from the config; None: no window."""
    count = config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    kinds = (
        getattr(config, "layer_types", None)
        or ["sliding_attention" if window else "full_attention"] * count
    )
    return [window if kind == "sliding_attention" else None for kind in kinds]
