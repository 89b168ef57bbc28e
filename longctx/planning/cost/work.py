"""Work: the layers of every pipeline rank, and what a rank computes and sends for each token."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from longctx.planning.cost.spec import LayerSpec, ModelSpec, Scan
from longctx.planning.cost.traffic import NO_TRAFFIC, Traffic, traffic_of
from longctx.planning.hardware_profile import ProfileError
from longctx.planning.pipeline import NO_PIPELINE, Pipeline

ELEMENT_BYTES = {"bfloat16": 2, "float32": 4}
REPEATED_ATTENTION = 4.5 / 3.5
"""Attention operations with recomputation, relative to those without: backward takes 2.5 times the
forward."""
COLLECTIVES = 4
"""Tensor parallel collectives per block and direction: before and after attention, before and after
the MLP."""
SEGMENTS, STATE_BYTES = 2, 4
"""Segments of a document per rank, a head and a tail, and bytes per value of their states, which
are float32."""
FLOAT32 = {"bfloat16": 15, "float32": 1}
"""Time of an operation in float32, in which linear attention scans, relative to the dtype of the
matrices. Data sheets of A100, H100 and H200 say 15 to 16, without TF32."""
LINEAR_EXCHANGES = 2
"""Exchanges of linear attention per pass: the rows before a convolution, and states."""


@dataclass(frozen=True)
class RankWork:
    """Computation and messages per rank; in a pipeline those of the rank with the most work.

    Attributes:
        layers: number of blocks.
        weights: number of parameters of all matrices, including experts that a token does not use.
        computed: parameters that every token is multiplied with, plus a third of those that
            backward recomputes. Scans of linear attention count as the parameters that take as
            long.
        attention: layers × heads × head size, times 4.5 / 3.5 if backward recomputes attention;
            twice that if it is not causal.
        kv_bytes: bytes of K and V exchanged per token, over all layers and passes.
        tensor: tensor-parallel size.
        tensor_bytes: bytes received per token in tensor-parallel collectives.
        pipeline_bytes: bytes sent per token between pipeline ranks.
        gpus: number of GPUs of the whole run if it is a pipeline, else 1.
        queries: part of `computed` that runs while K and V, or their gradients, travel.
        expert_weights: part of `weights` in experts, which are gathered over the ranks with the
            same experts.
        expert_ranks: number of ranks that hold each expert once.
        expert_bytes: bytes received per token that travels to experts of other ranks, and back.
        state_bytes: bytes of states that a rank receives from another of a ring, over all layers
            and passes.
        split: parameters that tokens of documents on several ranks are multiplied with beside, as
            `computed`.
        received: parameters that tokens from other ranks are multiplied with, as `computed`: they
            expand latents.
        exchanges: number of layers that exchange K and V, and of linear attention by how often they
            exchange.
        traffic: bytes of device memory read and written per token, beside attention.
    """

    layers: int
    weights: float
    computed: float
    attention: float
    kv_bytes: int
    tensor: int = 1
    tensor_bytes: float = 0.0
    pipeline_bytes: float = 0.0
    gpus: int = 1
    queries: float = 0.0
    expert_weights: float = 0.0
    expert_ranks: int = 1
    expert_bytes: float = 0.0
    state_bytes: float = 0.0
    split: float = 0.0
    received: float = 0.0
    exchanges: float = 0.0
    traffic: Traffic = NO_TRAFFIC


def work_of(
    spec: ModelSpec,
    dtype: str,
    *,
    recompute: str = "none",
    keep_kv: bool = False,
    tensor: int = 1,
    pipeline: Pipeline = NO_PIPELINE,
    tokens_per_rank: int = 1,
    gpus: int = 1,
    expert: int = 1,
    fused: bool = False,
    compiled: bool = True,
    float8: bool = False,
) -> RankWork:
    """Returns the work per token of the slowest pipeline rank.

    `spec` must have a vocabulary; `tokens_per_rank` determines where stages are cut. Every stage
    receives [tokens, hidden] / tp in forward and in backward. Queries are computed while K and V
    travel, also in recomputed forwards; the gradient of their input while those of K and V return;
    the gradient of their weights later, in compiled blocks. Windows count as full attention. With
    an encoder, a token is half one of a source and half one of a target, and attention is the
    decoder's (`ModelSpec.parts`). With `fused`, kernels scan delta rules in `dtype`; with `float8`,
    products of blocks cast what they multiply. Raises ProfileError if tp does not divide KV heads.
    """
    _check_kv_heads(spec, tensor)
    layers, head = _slowest_rank(spec, pipeline, tokens_per_rank)
    element_bytes = ELEMENT_BYTES[dtype]
    hidden_bytes = spec.hidden_size * element_bytes
    again = recompute == "full"
    passes = 3 + again - keep_kv
    share = 2 if spec.encoder_layers else 1  # of what every token of an encoder-decoder counts for

    experts = sum(layer.expert_parameters for layer in layers)
    expert_ranks = expert * tensor
    queries = _query_parameters(layers)

    attending = [layer for layer in layers if layer.attends]
    decoder = attending[spec.encoder_layers :]
    sent = _sent(attending, tensor)
    if spec.encoder_layers:
        sent += _sent(decoder, tensor)  # cross-attention
    kv_bytes = kv_bytes_per_token(sent, element_bytes, passes)
    # Backward expands again; frozen weights have no gradient.
    expansions = 4 + again - spec.adapted

    linear = [layer.scan for layer in layers if layer.scan is not None]
    linear_passes = 2 + (recompute != "none")
    scanned, split = _scanned(linear, dtype, recompute, fused=fused)
    computed = _computed(spec, layers, head, recompute) + scanned
    traffic = traffic_of(
        spec,
        layers,
        has_head=head > 0,
        element_bytes=element_bytes,
        recompute=recompute,
        tensor=tensor,
        compiled=compiled,
        float8=float8,
    )
    return RankWork(
        layers=len(layers),
        weights=(_parameters(layers) + head - experts + experts / expert) / tensor,
        computed=computed / tensor / share,
        attention=_attention(spec, decoder, dtype, again=again, tensor=tensor),
        kv_bytes=max(1, kv_bytes // share),
        tensor=tensor,
        tensor_bytes=_tensor_bytes(len(layers), hidden_bytes, recompute, tensor),
        pipeline_bytes=_pipeline_bytes(pipeline, hidden_bytes, tensor),
        gpus=gpus if pipeline.ranks > 1 else 1,
        queries=queries * (2 + again) / 3 / tensor,
        expert_weights=experts / expert_ranks,
        expert_ranks=expert_ranks if experts else 1,
        expert_bytes=_expert_bytes(layers, hidden_bytes, recompute, expert_ranks) / tensor,
        state_bytes=_state_bytes(linear) * linear_passes,
        split=split / tensor,
        received=_latent_parameters(attending) * expansions / 3 / tensor,
        exchanges=len(attending) + len(linear) * LINEAR_EXCHANGES * linear_passes / passes,
        traffic=traffic.over(share),
    )


def _parameters(layers: Sequence[LayerSpec]) -> int:
    """Returns the parameters of all matrices, also of experts that a token does not use."""
    return sum(layer.matrix_parameters + layer.idle_parameters for layer in layers)


def _query_parameters(layers: Sequence[LayerSpec]) -> int:
    """Returns the parameters that compute queries while K and V travel."""
    return sum(layer.query_parameters for layer in layers)


def _latent_parameters(layers: Sequence[LayerSpec]) -> int:
    """Returns the parameters that compute K and V of latents."""
    return sum(layer.latent.parameters for layer in layers)


def _state_bytes(scans: Sequence[Scan]) -> int:
    """Returns the bytes of all states that segments of a document send."""
    return SEGMENTS * STATE_BYTES * sum(scan.state_size for scan in scans)


def _sent(layers: Sequence[LayerSpec], tensor: int) -> int:
    """Returns the values per token that these layers send."""
    return sum(layer.sent_values(tensor) for layer in layers)


def _check_kv_heads(spec: ModelSpec, tensor: int) -> None:
    for layer in spec.layers:
        if layer.num_key_value_heads % tensor:
            raise ProfileError(
                f"tensor_parallel_size is {tensor}, which does not divide "
                f"{layer.num_key_value_heads} KV heads"
            )


def _slowest_rank(
    spec: ModelSpec, pipeline: Pipeline, tokens_per_rank: int
) -> tuple[list[LayerSpec], int]:
    """Returns the blocks, and the parameters of the head, of the pipeline rank with most work; the
    last rank has the head."""
    ranks = layers_of_ranks(spec, pipeline, tokens_per_rank)
    keys = tokens_per_rank // 2  # as in `split_layers`
    costs = [layer.multiplications(keys) for layer in spec.layers]
    work = [sum(map(costs.__getitem__, held)) for held in ranks]
    work[-1] += spec.vocabulary_parameters
    last = len(ranks) - 1
    slowest = last if work[last] == max(work) else work.index(max(work))
    layers = [spec.layers[number] for number in ranks[slowest]]
    return layers, spec.vocabulary_parameters if slowest == last else 0


def _attention(
    spec: ModelSpec,
    layers: Sequence[LayerSpec],
    dtype: str,
    *,
    again: bool,
    tensor: int,
) -> float:
    """Returns `RankWork.attention` of these blocks; at least 1, as profiles need positive
    constants, also for models without softmax attention."""
    heads = sum(layer.pair_values(FLOAT32[dtype]) for layer in layers) / tensor
    repeated = REPEATED_ATTENTION if again else 1.0
    directions = 1 if spec.causal else 2
    return max(1.0, heads * repeated * directions)


def _computed(spec: ModelSpec, layers: Sequence[LayerSpec], head: int, recompute: str) -> float:
    """Returns the parameters that a token is multiplied with, plus a third of those that backward
    recomputes.

    Recomputation repeats all matrices of a block (mode mlp: only those of the MLP, norms: none),
    but never the last one of the MLP, as torch stops when all saved tensors are there. Frozen
    weights have no gradients, a third of the operations.
    """
    in_blocks = sum(layer.matrix_parameters for layer in layers)
    last = sum(layer.hidden_size * layer.intermediate_size for layer in layers)
    repeated = {"none": 0, "norms": 0, "mlp": 2 * last}.get(recompute, in_blocks - last)
    frozen = in_blocks + head if spec.adapted else 0
    return in_blocks + head + repeated / 3 - frozen / 3


def _scanned(
    scans: Sequence[Scan], dtype: str, recompute: str, *, fused: bool
) -> tuple[float, float]:
    """Returns the parameters that take as long as all scans, and as what they take more for split
    documents."""
    forwards = 2 if recompute in ("selective", "full") else 1
    whole = split = 0.0
    for scan in scans:
        in_dtype = fused and scan.delta_rule
        slower = 1 if in_dtype else FLOAT32[dtype]
        whole += slower * (scan.flops.forward * forwards + scan.flops.backward) / 6
        split += slower * (scan.split_flops.forward * forwards + scan.split_flops.backward) / 6
    return whole, split


def _pipeline_bytes(pipeline: Pipeline, hidden_bytes: int, tensor: int) -> float:
    """Returns the bytes that a rank sends per token to the next and to the previous rank of the
    pipeline."""
    if pipeline.ranks == 1:
        return 0.0
    return 2 * pipeline.chunks * hidden_bytes / tensor


def _tensor_bytes(layers: int, hidden_bytes: int, recompute: str, tensor: int) -> float:
    """Returns the bytes that a rank receives per token in collectives of blocks; those of embedding
    and head are not counted.

    A block has 4 in forward, 4 in backward and 3 in a recomputed forward, each with (tp - 1)/tp of
    [tokens, hidden].
    """
    collectives = 2 * COLLECTIVES + (COLLECTIVES - 1 if recompute != "none" else 0)
    return layers * collectives * hidden_bytes * (tensor - 1) / tensor


def _expert_bytes(
    layers: Sequence[LayerSpec], hidden_bytes: int, recompute: str, expert_ranks: int
) -> float:
    """Returns the bytes that tensor-parallel ranks receive per token from and for experts of other
    ranks.

    A token's row travels to all its experts and back, in forward, in backward and in a recomputed
    forward.
    """
    rows = (4 + 2 * (recompute != "none")) * sum(layer.experts_per_token for layer in layers)
    return rows * hidden_bytes * (expert_ranks - 1) / expert_ranks


def kv_bytes_per_token(values: int, element_bytes: int, passes: int = 3) -> int:
    """Returns the bytes of a token's `values` in all passes: fetched forward, fetched and returned
    in backward.

    Ranks at the ends of a ring move this many bytes: index 0 fetches all rows of its peers and
    returns all their gradients; the last index sends all its rows and receives all their gradients.
    Ranks in between move less (three quarters on average), but a pass takes as long as its slowest
    rank. `passes` is 4 if attention is recomputed, and one less if K and V are kept for backward.
    Gradients travel in the dtype of K and V.
    """
    return values * element_bytes * passes


def split_layers(spec: ModelSpec, stages: int, keys: int) -> list[range]:
    """Returns the layers of every stage, consecutive and at least one: first the slowest stage is
    minimal, then costs are even.

    Costs are multiplications per token: of a block with attention to `keys` tokens, and of the head
    after the last block. The embedding before the first block copies a row, which costs as much as
    the row has values.
    """
    costs = [layer.multiplications(keys) for layer in spec.layers]
    costs[0] += spec.hidden_size
    costs[-1] += spec.vocabulary_parameters
    slowest, _ = _best_split(costs, stages, max)

    def add(before: float, cost: float) -> float:
        return before + cost**2 if cost <= slowest else math.inf

    _, ends = _best_split(costs, stages, add)
    return [range(start, stop) for start, stop in itertools.pairwise((0, *ends))]


@cache
def layers_of_ranks(
    spec: ModelSpec, pipeline: Pipeline, tokens_per_rank: int
) -> tuple[tuple[int, ...], ...]:
    """Returns the layers of every rank of a pipeline, over all stages of the rank."""
    splits = split_layers(spec, pipeline.stages, keys=tokens_per_rank // 2)
    held = [splits[rank :: pipeline.ranks] for rank in range(pipeline.ranks)]
    return tuple(tuple(itertools.chain.from_iterable(parts)) for parts in held)


def _best_split(
    costs: list[int], stages: int, add: Callable[[float, int], float]
) -> tuple[float, tuple[int, ...]]:
    """Returns the smallest value of a split, and the ends of its stages; `add` returns the value
    with one more stage."""
    up_to = [0, *itertools.accumulate(costs)]
    # By number of layers; each iteration adds a stage.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0, ())}
    for stage in range(1, stages + 1):
        shorter, best = best, {}
        for stop in range(stage, len(costs) - stages + stage + 1):
            best[stop] = min(
                (add(value, up_to[stop] - up_to[start]), (*ends, stop))
                for start, (value, ends) in shorter.items()
                if start < stop
            )
    return best[len(costs)]
