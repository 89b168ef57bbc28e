"""Scaling: converts a profile from one model or parallel layout to another on the same hardware.

- linear: 6 FLOP per parameter and token, plus 2 where backward recomputes it; plus the bytes that
  products and elementwise work read and write, at the rate of the device's memory: so narrow
  matrices reach less of the peak; plus messages that nothing hides: the collectives of tensor
  parallelism inside a node, tokens that travel to their experts and back, evenly spread, and the
  messages between pipeline ranks.
- attention: by layers × heads × head size, times 4.5 / 3.5 where backward recomputes it, twice that
  in both directions.
- K and V, states of linear attention: bytes are counted, not scaled. What scans of split documents
  take more, and what expands received latents: as linear.
- queries: seconds per token, by the parameters that compute queries while K and V travel.
- latency, and what each split document takes: by exchanges; launch: by layers; step: by
  parameters.

Efficiencies, bandwidths and overlap are not scaled.
"""

from dataclasses import replace

from longctx.planning.cost.work import RankWork
from longctx.planning.hardware_profile import NO_LIMIT, HardwareProfile, ProfileError


def scale(
    profile: HardwareProfile,
    known: RankWork,
    target: RankWork,
    processes_per_node: int | None = None,
) -> HardwareProfile:
    """Converts a profile of `known` work to `target` work. Tensor-parallel ranks must share a node.

    `processes_per_node` replaces the size of the profile's nodes. Tensor-parallel ranks are
    neighbors, so a node has that many ranks of the domain, divided by the tensor-parallel size.

    Raises ProfileError if the messages that are part of the linear time would take longer than all
    of it.
    """
    node = processes_per_node or profile.ranks_per_node * known.tensor
    profile = replace(profile, ranks_per_node=max(1, node // target.tensor))
    if known == target:
        return profile
    arithmetic = profile.linear_s_per_token - _moved_s(profile, known, node)
    if arithmetic <= 0:
        raise ProfileError(
            f"linear_s_per_token is {profile.linear_s_per_token:.3g} s, but the messages of "
            f"tensor_parallel_size {known.tensor} and memory traffic alone would take longer, so "
            "the profile cannot be scaled: measure one with the settings of the run (`longctx "
            "calibrate`)"
        )
    layers = target.layers / known.layers
    computed_s = arithmetic * (target.computed / known.computed)
    linear_s_per_token = computed_s + _moved_s(profile, target, node)
    queries = target.queries / known.queries if known.queries else 0.0
    return replace(
        profile,
        linear_s_per_token=linear_s_per_token,
        query_share=min(
            1.0, profile.query_share * queries * (profile.linear_s_per_token / linear_s_per_token)
        ),
        attention_s_per_token2=profile.attention_s_per_token2
        * (target.attention / known.attention),
        kv_bytes_per_token=target.kv_bytes,
        state_bytes=target.state_bytes,
        split_s_per_token=arithmetic * (target.split / known.computed),
        received_s_per_token=arithmetic * (target.received / known.computed),
        latency_s=profile.latency_s * (target.exchanges / known.exchanges),
        split_document_s=profile.split_document_s * (target.exchanges / known.exchanges),
        launch_s=profile.launch_s * layers,
        step_s=profile.step_s * (target.weights / known.weights),
    )


def query_share(profile: HardwareProfile, work: RankWork) -> float:
    """Returns the `query_share` of a profile of `work`, not in a pipeline, by arithmetic; the
    profile's own is not read."""
    moved_s = _moved_s(profile, work, work.gpus)
    return work.queries / work.computed * max(0.0, 1 - moved_s / profile.linear_s_per_token)


def _moved_s(profile: HardwareProfile, work: RankWork, node: int) -> float:
    """Returns the seconds per token in which a rank moves values: in its memory, and in messages
    that nothing hides."""
    traffic_s = sum(work.traffic) / profile.memory_bytes_per_s
    return traffic_s + _messages_s(profile, work, node)


def _messages_s(profile: HardwareProfile, work: RankWork, node: int) -> float:
    """Returns the seconds per token of messages that nothing hides, on nodes of `node` GPUs."""
    pipeline_bytes_per_s = (
        profile.intra_node_bytes_per_s if work.gpus <= node else profile.inter_node_bytes_per_s
    )
    outside = max(0, work.expert_ranks - node) / work.expert_ranks
    to_experts = (
        1 - outside
    ) / profile.intra_node_bytes_per_s + outside / profile.inter_node_bytes_per_s
    in_node = work.tensor_bytes / profile.intra_node_bytes_per_s
    return in_node + work.pipeline_bytes / pipeline_bytes_per_s + work.expert_bytes * to_experts


def arithmetic_said(
    profile: HardwareProfile, scaled: HardwareProfile, known: RankWork, target: RankWork
) -> str:
    """Describes the constants that `scale` changed, with factor and reason; empty if none
    changed in its first four digits."""
    layers, exchanges = target.layers / known.layers, target.exchanges / known.exchanges
    splits = " and splits" if profile.split_document_s else ""
    latency = f"latency{splits} and " if layers == exchanges else ""
    changes = (
        (
            "linear",
            scaled.linear_s_per_token / profile.linear_s_per_token,
            f"{known.computed / 1e6:,.4g}M → {target.computed / 1e6:,.4g}M parameters computed per "
            "token"
            + ", plus what memory moves" * (profile.memory_bytes_per_s < NO_LIMIT)
            + ", plus messages between ranks"
            * (target.tensor_bytes + target.pipeline_bytes + target.expert_bytes > 0),
        ),
        (
            "attention",
            target.attention / known.attention,
            f"layers × heads × head size {known.attention:,.6g} → {target.attention:,.6g}",
        ),
        (
            "K and V",
            target.kv_bytes / known.kv_bytes,
            f"{known.kv_bytes:,} → {target.kv_bytes:,} bytes per token",
        ),
        (f"{latency}launch", layers, f"{known.layers} → {target.layers} layers"),
        (
            f"latency{splits}",
            1 if latency else exchanges,
            f"{known.exchanges:.4g} → {target.exchanges:.4g} exchanges",
        ),
        (
            "step",
            target.weights / known.weights,
            f"{known.weights / 1e6:,.4g}M → {target.weights / 1e6:,.4g}M weights",
        ),
        (
            "share of queries",
            scaled.query_share / profile.query_share if profile.query_share else 1.0,
            f"{profile.query_share:.3g} → {scaled.query_share:.3g} of linear",
        ),
        (
            "ranks per node",
            scaled.ranks_per_node / profile.ranks_per_node,
            f"{profile.ranks_per_node} → {scaled.ranks_per_node}",
        ),
    )
    said = []
    for what, ratio, why in changes:
        factor = f"{ratio:.4g}"
        if factor != "1":  # else it is rounding
            said.append(f"{what} × {factor} ({why})")
    return "; ".join(said)
