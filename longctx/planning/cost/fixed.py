"""Fixed costs: what sharded weights, their gradients and AdamW take per micro-batch and per step,
whatever the number of documents.

All-gathers and reductions run beside the products of a full micro-batch; what takes longer than
these is not hidden. The first block's weights are gathered before anything runs. Where experts are
not split over ranks, their products wait until the CPU knows how many rows each expert has, so
nothing is queued ahead and no gather is hidden.
"""

from dataclasses import dataclass, replace

from longctx.planning.cost.spec import ModelSpec
from longctx.planning.cost.work import ELEMENT_BYTES, RankWork
from longctx.planning.hardware_profile import HardwareProfile

FLOAT32 = 4
GATHERS = {"block": 2, "micro_batch": 1, "step": 0}
"""How often a micro-batch gathers all weights, by `parallel.reshard_after`."""
UPDATE_BYTES = 40
"""Bytes of memory that AdamW and clipping read and write per parameter, all in float32: the weight
and two moments are read and written, the gradient is read twice, and scaled (read and written)."""


@dataclass(frozen=True)
class ShardedStates:
    """Weights, gradients and optimizer states of a rank.

    Attributes:
        shards: number of ranks that weights are sharded over.
        gathers: how often a micro-batch gathers all weights.
        element_bytes: bytes of a gathered weight.
        reduces_each: whether every micro-batch reduces gradients; False: each step does.
        trained: number of parameters with gradients, on all ranks that share them.
        waits: whether the products of experts wait for the CPU.
    """

    shards: int
    gathers: int
    element_bytes: int
    reduces_each: bool
    trained: float
    waits: bool

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        work: RankWork,
        *,
        dtype: str,
        shards: int,
        pipeline_ranks: int,
        gathers: int,
        reduces_each: bool,
    ) -> "ShardedStates":
        """Returns the states of a rank that does `work`, for a model whose weights are gathered in
        `dtype`."""
        split = work.tensor * pipeline_ranks
        return cls(
            shards=shards,
            gathers=gathers,
            element_bytes=ELEMENT_BYTES[dtype],
            reduces_each=reduces_each,
            trained=spec.trained_parameters / split,
            waits=spec.experts > 0 and work.expert_ranks == 1,
        )

    def gathered(self, work: RankWork) -> float:
        """Returns the numbers that a rank receives from others to have all its weights once."""
        same_experts = max(1, self.shards * work.tensor // work.expert_ranks)
        shared = work.weights - work.expert_weights
        from_others = 1 - 1 / self.shards
        experts_from_others = 1 - 1 / same_experts
        return shared * from_others + work.expert_weights * experts_from_others


def with_fixed_costs(
    profile: HardwareProfile, work: RankWork, states: ShardedStates, tokens_per_rank: int
) -> HardwareProfile:
    """Returns a profile whose launch and step also have what sharded states take."""
    products_s = 0.0
    if not states.waits:
        products_s = tokens_per_rank * profile.linear_s_per_token
    rate = _gather_rate(profile, states.shards)
    numbers = states.gathered(work)
    all_weights_s = states.element_bytes * numbers / rate
    reduced = FLOAT32 * min(numbers, states.trained)
    reduction_s = reduced / rate
    in_micro_batch_s = states.gathers * all_weights_s
    in_step_s = 0.0
    if states.reduces_each:
        in_micro_batch_s += reduction_s
    else:
        in_step_s = max(0.0, reduction_s - products_s)
    launch_s = max(0.0, in_micro_batch_s - products_s)
    if states.gathers:
        launch_s += all_weights_s / max(1, work.layers)
    update_s = UPDATE_BYTES * states.trained / states.shards / profile.memory_bytes_per_s
    return replace(
        profile,
        launch_s=profile.launch_s + launch_s,
        step_s=profile.step_s + update_s + in_step_s,
    )


def _gather_rate(profile: HardwareProfile, shards: int) -> float:
    """Returns the bytes per second that a rank receives of a gather: over several nodes, all links
    of its node bring each value once, and the node passes it on."""
    if shards <= profile.ranks_per_node:
        return profile.intra_node_bytes_per_s
    network = profile.inter_node_bytes_per_s * profile.ranks_per_node
    return min(profile.intra_node_bytes_per_s, network)
