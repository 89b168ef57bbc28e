"""Scaling: the constants of one model on some hardware, carried over to another model or split on the same hardware.

- linear: 6 operations a parameter and token, and 2 more for those that are computed anew in backward; then what nothing hides:
  the collectives of tensor parallelism inside a node, and the messages of a pipeline.
- attention: by layers × heads × head size, and where backward repeats it, by 4.5 / 3.5.
- K and V: their bytes are counted, not scaled.
- latency and launch: by layers; step: by parameters.

Speeds are not scaled: efficiencies, bandwidths and overlap stay, although larger matrices reach more of a device's peak.
"""

from dataclasses import dataclass, replace

from longctx.planning.cost.hardware_profile import HardwareProfile, ProfileError


@dataclass(frozen=True)
class RankWork:
    """What a rank computes and sends; in a pipeline the rank with most work.

    Attributes:
        layers: blocks.
        weights: parameters by which every token is multiplied.
        computed: the same, with a third of each that is computed anew.
        attention: layers × heads × head size, times 4.5 / 3.5 if computed anew.
        kv_bytes: of K and V that a token exchanges, in all layers and passes.
        tensor: ranks that share every matrix.
        tensor_bytes: that their collectives bring for a token.
        pipeline_bytes: that pipeline ranks send for a token.
        gpus: of the whole run if it is a pipeline; else 1.
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


def scale(profile: HardwareProfile, known: RankWork, wanted: RankWork) -> HardwareProfile:
    """The profile of `known` work as that of the `wanted` one. The tensor ranks must fit a node.

    Raises ProfileError if nothing of the linear time would be left without the messages that are known to be in it.
    """
    if known == wanted:
        return profile
    arithmetic = profile.linear_s_per_token - _messages_s(profile, known, known)
    if arithmetic <= 0:
        raise ProfileError(
            f"linear_s_per_token is {profile.linear_s_per_token:.3g} s, and the messages of its tensor_parallel_size "
            f"{known.tensor} alone would take longer, so it cannot be scaled: measure one with the settings of the run "
            "(`longctx profile`)"
        )
    layers = wanted.layers / known.layers
    return replace(
        profile,
        linear_s_per_token=arithmetic * (wanted.computed / known.computed) + _messages_s(profile, known, wanted),
        attention_s_per_token2=profile.attention_s_per_token2 * (wanted.attention / known.attention),
        kv_bytes_per_token=wanted.kv_bytes,
        ranks_per_node=max(1, profile.ranks_per_node * known.tensor // wanted.tensor),
        latency_s=profile.latency_s * layers,
        launch_s=profile.launch_s * layers,
        step_s=profile.step_s * (wanted.weights / known.weights),
    )


def _messages_s(profile: HardwareProfile, known: RankWork, work: RankWork) -> float:
    """Seconds of a token's messages that nothing hides."""
    in_node = work.gpus <= profile.ranks_per_node * known.tensor
    pipeline_bytes_per_s = profile.intra_node_bytes_per_s if in_node else profile.inter_node_bytes_per_s
    return work.tensor_bytes / profile.intra_node_bytes_per_s + work.pipeline_bytes / pipeline_bytes_per_s


def arithmetic_said(profile: HardwareProfile, scaled: HardwareProfile, known: RankWork, wanted: RankWork) -> str:
    """What `scale` changed, by which factor and why; empty if nothing."""
    changes = (
        (
            "linear",
            scaled.linear_s_per_token / profile.linear_s_per_token,
            f"{known.computed / 1e6:,.4g}M → {wanted.computed / 1e6:,.4g}M parameters computed for a token"
            + ", and messages between its ranks" * (_messages_s(profile, known, wanted) > 0),
        ),
        (
            "attention",
            wanted.attention / known.attention,
            f"layers × heads × head size {known.attention:,.6g} → {wanted.attention:,.6g}",
        ),
        ("K and V", wanted.kv_bytes / known.kv_bytes, f"{known.kv_bytes:,} → {wanted.kv_bytes:,} bytes a token"),
        ("latency and launch", wanted.layers / known.layers, f"{known.layers} → {wanted.layers} layers"),
        ("step", wanted.weights / known.weights, f"{known.weights / 1e6:,.4g}M → {wanted.weights / 1e6:,.4g}M weights"),
        (
            "ranks of a node",
            scaled.ranks_per_node / profile.ranks_per_node,
            f"{profile.ranks_per_node} → {scaled.ranks_per_node}",
        ),
    )
    return "; ".join(f"{what} × {ratio:.4g} ({why})" for what, ratio, why in changes if ratio != 1)
