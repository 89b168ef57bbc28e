"""Cost of a split: the hardware profile of a rank if the GPUs are split into tensor, pipeline and
domain ranks.

A known profile describes one model, unsplit, on one kind of GPU. `longctx.planning.cost.scaling`
scales it to other models and splits. This module adds the collectives of weights and gradients over
the domain:

- If blocks gather weights, twice per micro-batch; if micro-batches reduce gradients (float32), once
  per micro-batch. The part not hidden by the linear work of a full micro-batch, at the profile's
  overlap, is added to the launch time of every micro-batch; work on queries does not count, as it
  hides K and V. Collectives once per step are added to the step, and not hidden. The optimizer's
  own time is not counted.
- A collective over several nodes uses the network cards of all its ranks in a node (NCCL rings):
  its bandwidth is their sum, at most that of the links inside the node.
"""

from dataclasses import dataclass, replace
from typing import Any

from longctx.errors import UserError
from longctx.model.presets import PRESETS, ModelShape
from longctx.planning.cost.scaling import scale
from longctx.planning.cost.spec import ModelSpec, Recompute
from longctx.planning.cost.work import RankWork, work_of
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.pipeline import Pipeline
from longctx.training.described import read_described
from longctx.training.metrics import peak_flops

BFLOAT16, FLOAT32 = 2, 4
DTYPE = "bfloat16"
LLAMA_3_VOCABULARY = 128256


@dataclass(frozen=True)
class Machine:
    """GPUs described by the profile of one model, without splits and recomputation.

    Attributes:
        profile: hardware profile of that model.
        model: the model, with its vocabulary.
        peak_flops_per_s: peak dense bfloat16 FLOP/s of one GPU.
        memory_bytes: memory of one GPU.
    """

    profile: HardwareProfile
    model: ModelShape
    peak_flops_per_s: float
    memory_bytes: int

    @classmethod
    def load(
        cls, name: str, peak_tflops: float | None = None, memory_gb: float | None = None
    ) -> "Machine":
        """Loads the machine of a profile; `peak_tflops` and `memory_gb` replace, or add, those of
        its GPU.

        Raises UserError if peak FLOP/s or memory are not known, or the profile is not for bfloat16.
        """
        profile, described = read_described(name)
        known = (
            (peak_flops(described.gpu or "", DTYPE), described.memory_gb)
            if described is not None
            else (None, None)
        )
        peak = known[0] or 0.0 if peak_tflops is None else 1e12 * peak_tflops
        memory = 1e9 * (known[1] or 0.0 if memory_gb is None else memory_gb)
        if peak <= 0 or memory <= 0:
            raise UserError(
                f"profile {name}: peak TFLOP/s and memory of a GPU must be known and above 0, as "
                "for the shipped profiles of GPUs: give --peak-tflops and --memory-gb"
            )
        if described is None:
            model = PRESETS["llama-3.1-8b"].model_copy(update={"vocab_size": LLAMA_3_VOCABULARY})
        else:
            if described.dtype != DTYPE:
                raise UserError(
                    f"profile {name} is for {described.dtype}, but splits are for runs in "
                    f"{DTYPE}: measure a profile with --train.dtype {DTYPE}"
                )
            model = described.model
            profile = scale(profile, described.work, work_of(model.spec, DTYPE))
        return cls(profile, model, peak, int(memory))


@dataclass(frozen=True)
class Split:
    """A split of GPUs over a model and its documents.

    Attributes:
        tensor: tensor parallel size.
        pipeline: pipeline parallel size and chunks.
        domain: number of ranks that documents and weight shards are split over.
        expert: expert parallel size; 1 without experts.
        recompute, reshard_after, reduce_after, tokens_per_rank: the settings of those names.
    """

    tensor: int
    pipeline: Pipeline
    domain: int
    recompute: Recompute
    reshard_after: str
    reduce_after: str
    tokens_per_rank: int
    expert: int = 1

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline.ranks * self.domain

    @property
    def max_remote_tokens(self) -> int:
        """Remote tokens of an exchange round: small beside the weights, but large enough that
        rounds cost little."""
        return 4 * self.tokens_per_rank

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of a run with this split."""
        return {
            "parallel.tensor_parallel_size": self.tensor,
            "parallel.pipeline_parallel_size": self.pipeline.ranks,
            "parallel.pipeline_chunks": self.pipeline.chunks,
            "parallel.expert_parallel_size": self.expert,
            "parallel.reshard_after": self.reshard_after,
            "parallel.reduce_after": self.reduce_after,
            "train.recompute": self.recompute,
            "train.dtype": DTYPE,
            "batch.tokens_per_rank": self.tokens_per_rank,
            "context.max_remote_tokens": self.max_remote_tokens,
            "context.ulysses_degree": 1,
        }


def profile_of(machine: Machine, spec: ModelSpec, split: Split) -> HardwareProfile:
    """Returns the profile of the slowest pipeline rank of a split. Tensor ranks must fit in a node.

    launch_s = launch time of the rank's layers + max(0, 2 · gather + reduce - hidden) if blocks
    gather and micro-batches reduce, where hidden = overlap · (1 - query_share) · linear_s_per_token
    · tokens_per_rank. Collectives once per step are in step_s instead.
    """
    work = work_of(
        spec,
        DTYPE,
        recompute=split.recompute,
        tensor=split.tensor,
        pipeline=split.pipeline,
        tokens_per_rank=split.tokens_per_rank,
        gpus=split.gpus,
        expert=split.expert,
    )
    known = machine.profile
    scaled = scale(known, work_of(machine.model.spec, DTYPE), work)
    gather, reduce = (_collectives_s(known, split, work, number) for number in (BFLOAT16, FLOAT32))
    in_micro_batch, in_step = 0.0, 0.0
    if split.reshard_after == "block":
        in_micro_batch += 2 * gather
    else:
        in_step += gather
    if split.reduce_after == "micro_batch":
        in_micro_batch += reduce
    else:
        in_step += reduce
    hidden = (
        scaled.overlap
        * (1 - scaled.query_share)
        * scaled.linear_s_per_token
        * split.tokens_per_rank
    )
    return replace(
        scaled, launch_s=scaled.launch_s + max(0.0, in_micro_batch - hidden), step_s=in_step
    )


def _collectives_s(known: HardwareProfile, split: Split, work: RankWork, number: int) -> float:
    """Returns the seconds to gather or reduce a rank's weights, of `number` bytes each."""
    everyones = number * (work.weights - work.expert_weights)
    of_experts = _collective_s(known, split, number * work.expert_weights, stride=split.expert)
    return _collective_s(known, split, everyones) + of_experts


def _collective_s(known: HardwareProfile, split: Split, size: float, stride: int = 1) -> float:
    """Returns the seconds to gather or reduce `size` bytes over every `stride`-th rank of the
    domain."""
    ranks = split.domain // stride
    in_node = min(ranks, max(1, known.ranks_per_node // split.tensor // stride))
    speed = known.intra_node_bytes_per_s
    if in_node < ranks:
        speed = min(speed, in_node * known.inter_node_bytes_per_s)
    return size * (ranks - 1) / ranks / speed
