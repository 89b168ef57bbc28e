"""Cost of a split: the hardware profile that a rank would have if the GPUs were split into tensor, pipeline and domain ranks.

A known profile describes a known model, unsplit, on one kind of GPU. From it come the seconds that a parameter, a head and a
byte take there, and from these the profile of any other model in any split, by which plans are then made and scored:

- linear: 6 operations a parameter and token, and 2 more for those that are computed anew in backward, which are a block's but
  for the last matrix of its MLP (torch stops once it has what was to be kept); of the slowest pipeline rank, divided by tp.
- tensor parallelism: 4 collectives a block in forward, 4 in backward and 3 in a repeated forward, each of which brings a rank
  (tp - 1)/tp of [tokens, hidden] in bfloat16 over the links inside a node. Nothing hides them. Those of embedding and head are
  left out.
- pipeline: every stage receives [tokens, hidden] / tp in forward and in backward. Nothing hides that either.
- attention and the bytes of K and V: by layers and heads of a rank.
- weights: where blocks gather them, twice in a micro-batch; where gradients are reduced at once, that as well (float32). What
  the linear work of a full micro-batch does not hide, at the profile's own overlap, is added to each micro-batch, beside the
  known launch time by layers. What is gathered and reduced once a step is added to the step and hidden by nothing. The time of
  the optimizer's own arithmetic is left out.
- a collective over several nodes uses the network cards of all its ranks in a node at once (rings of NCCL), so it is as fast as
  they are together, and no faster than the links inside.
"""

from dataclasses import dataclass, replace
from typing import Any

from longctx.errors import UserError
from longctx.model.presets import PRESETS, ModelShape
from longctx.planning.calibrate import kv_bytes_per_token
from longctx.planning.pipeline import Pipeline
from longctx.planning.profile import HardwareProfile
from longctx.training.memory import blocks_of_ranks
from longctx.training.utilisation import PEAK_FLOPS

BFLOAT16, FLOAT32 = 2, 4
REPEATED_ATTENTION = 4.5 / 3.5
"""Backward of attention takes 2.5 times its forward."""
COLLECTIVES = 4
"""Of tensor parallelism, in a block and a direction: before and after attention, before and after the MLP."""
LLAMA_3_VOCABULARY = 128256
GPUS = {"h100-nvlink-ib": ("H100", 80e9), "h200-nvlink-ib": ("H200", 141e9)}
"""Shipped profiles of the 8B model: their GPU and bytes of its memory, by the data sheet, a few percent less than it has."""


@dataclass(frozen=True)
class Machine:
    """GPUs that are known by the profile of one model on them, which is neither split nor recomputes.

    Attributes:
        profile: its constants.
        model: the model that it is the profile of, with its vocabulary.
        peak_flops_per_s: of one GPU, in bfloat16 and without sparsity.
        memory_bytes: of one GPU.
    """

    profile: HardwareProfile
    model: ModelShape
    peak_flops_per_s: float
    memory_bytes: int

    @classmethod
    def load(cls, name: str, peak_tflops: float | None = None, memory_gb: float | None = None) -> "Machine":
        """The machine of a profile of the 8B model, shipped or a file; of a file, peak and memory must be given."""
        peak, memory = 0.0, 0.0
        if name in GPUS:
            gpu, memory = GPUS[name]
            peak, _ = PEAK_FLOPS[gpu]
        peak = peak if peak_tflops is None else 1e12 * peak_tflops
        memory = memory if memory_gb is None else 1e9 * memory_gb
        if peak <= 0 or memory <= 0:
            known = " and ".join(GPUS)
            raise UserError(
                f"profile {name}: to split a model, the peak and the memory of a GPU must be known and > 0, as they are of "
                f"{known}: give --peak-tflops and --memory-gb"
            )
        model = PRESETS["8b"].model_copy(update={"vocab_size": LLAMA_3_VOCABULARY})
        return cls(HardwareProfile.load(name), model, peak, int(memory))


@dataclass(frozen=True)
class Split:
    """How GPUs share a model and its documents.

    Attributes:
        tensor: ranks that share every matrix.
        pipeline: ranks that share the layers, and their schedule.
        domain: ranks that share the documents and shard the weights.
        recompute, reshard_after, reduce_after, tokens_per_rank: the settings of those names.
    """

    tensor: int
    pipeline: Pipeline
    domain: int
    recompute: str
    reshard_after: str
    reduce_after: str
    tokens_per_rank: int

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline.ranks * self.domain

    @property
    def settings(self) -> dict[str, Any]:
        """What a run sets to be split this way."""
        return {
            "parallel.tensor_parallel_size": self.tensor,
            "parallel.pipeline_parallel_size": self.pipeline.ranks,
            "parallel.pipeline_chunks": self.pipeline.chunks,
            "parallel.pipeline_schedule": self.pipeline.schedule,
            "parallel.reshard_after": self.reshard_after,
            "parallel.reduce_after": self.reduce_after,
            "train.recompute": self.recompute,
            "train.dtype": "bfloat16",
            "batch.tokens_per_rank": self.tokens_per_rank,
            "context.max_remote_tokens": self.tokens_per_rank,
            "context.head_exchange": 1,
        }


def profile_of(machine: Machine, shape: ModelShape, split: Split) -> HardwareProfile:
    """Constants of the cost model for the slowest pipeline rank of a split. The split's tensor ranks must fit a node."""
    known, model, pipeline = machine.profile, machine.model, split.pipeline
    recompute = split.recompute
    layers, head = _slowest_rank(shape, pipeline, split.tokens_per_rank)
    share = layers / model.num_hidden_layers

    parameter_s = known.linear_s_per_token / model.multiplied_parameters
    in_blocks = layers * shape.block_parameters
    computed, collectives = float(in_blocks + head), 2 * COLLECTIVES
    if recompute != "none":
        computed += (in_blocks - layers * shape.hidden_size * shape.intermediate_size) / 3
        collectives += COLLECTIVES - 1
    hidden_bytes = shape.hidden_size * BFLOAT16
    received = layers * collectives * hidden_bytes * (split.tensor - 1) / split.tensor
    linear = parameter_s * computed / split.tensor + received / known.intra_node_bytes_per_s
    if pipeline.ranks > 1:
        messages = 2 * pipeline.chunks * hidden_bytes / split.tensor
        in_node = split.gpus <= known.ranks_per_node
        linear += messages / (known.intra_node_bytes_per_s if in_node else known.inter_node_bytes_per_s)

    heads = layers * shape.num_attention_heads * shape.head_dim / split.tensor
    known_heads = model.num_hidden_layers * model.num_attention_heads * model.head_dim
    attention = known.attention_s_per_token2 * heads / known_heads * (REPEATED_ATTENTION if recompute == "full" else 1.0)
    kv_heads = shape.num_key_value_heads // split.tensor
    kv_bytes = kv_bytes_per_token(layers, kv_heads, shape.head_dim, BFLOAT16, passes=4 if recompute == "full" else 3)

    weights = (in_blocks + head) / split.tensor
    gather, reduce = (_collective_s(known, split, number * weights) for number in (BFLOAT16, FLOAT32))
    by_blocks, at_once = split.reshard_after == "block", split.reduce_after == "micro_batch"
    in_micro_batch = 2 * gather * by_blocks + reduce * at_once
    unhidden = max(0.0, in_micro_batch - known.overlap * linear * split.tokens_per_rank)
    return replace(
        known,
        linear_s_per_token=linear,
        attention_s_per_token2=attention,
        kv_bytes_per_token=kv_bytes,
        ranks_per_node=max(1, known.ranks_per_node // split.tensor),
        latency_s=known.latency_s * share,
        launch_s=known.launch_s * share + unhidden,
        step_s=gather * (not by_blocks) + reduce * (not at_once),
    )


def _slowest_rank(shape: ModelShape, pipeline: Pipeline, tokens_per_rank: int) -> tuple[int, int]:
    """Blocks and parameters of the head on the pipeline rank with most work: the last one has the head."""
    *others, last = blocks_of_ranks(shape, pipeline, tokens_per_rank)
    block, head = shape.block_cost(keys=tokens_per_rank // 2), shape.vocabulary_parameters  # as stages are cut
    most = max(others, default=0)
    return (last, head) if last * block + head >= most * block else (most, 0)


def _collective_s(known: HardwareProfile, split: Split, size: float) -> float:
    """Seconds to gather or reduce that many bytes over the domain."""
    here = min(split.domain, max(1, known.ranks_per_node // split.tensor))
    speed = known.intra_node_bytes_per_s
    if here < split.domain:
        speed = min(speed, here * known.inter_node_bytes_per_s)
    return size * (split.domain - 1) / split.domain / speed
