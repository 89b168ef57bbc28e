"""Cost of a split: the hardware profile that a rank would have if the GPUs were split into tensor, pipeline and domain ranks.

A known profile describes a known model, unsplit, on one kind of GPU. `longctx.planning.cost.scaling` carries it over to any
other model in any split, by which plans are then made and scored. What it leaves to this module are the weights and gradients
that collectives over the domain bring, as these are known here:

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
from longctx.model.spec import ModelSpec
from longctx.planning.cost.hardware_profile import HardwareProfile
from longctx.planning.cost.pipeline import Pipeline
from longctx.planning.cost.scaling import scale
from longctx.training.run_profile import read_described, work_of
from longctx.training.utilisation import PEAK_FLOPS

BFLOAT16, FLOAT32 = 2, 4
DTYPE = "bfloat16"
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
        """The machine of a profile, shipped or a file that may name its model; of a file, peak and memory must be given."""
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
        profile, described = read_described(name)
        if described is None:
            model = PRESETS["8b"].model_copy(update={"vocab_size": LLAMA_3_VOCABULARY})
        else:
            if described.dtype != DTYPE:
                raise UserError(
                    f"profile {name} is of {described.dtype}, and splits are those of runs in {DTYPE}: measure one with "
                    f"--train.dtype {DTYPE}"
                )
            model = described.model
            profile = scale(profile, described.work, work_of(model.spec, DTYPE))
        return cls(profile, model, peak, int(memory))


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
            "train.dtype": DTYPE,
            "batch.tokens_per_rank": self.tokens_per_rank,
            "context.max_remote_tokens": self.tokens_per_rank,
            "context.ulysses_degree": 1,
        }


def profile_of(machine: Machine, spec: ModelSpec, split: Split) -> HardwareProfile:
    """Constants of the cost model for the slowest pipeline rank of a split. The split's tensor ranks must fit a node.

    launch_s = that of the rank's layers + max(0, 2 · gather + reduce - overlap · linear_s_per_token · tokens_per_rank), where
    blocks gather and micro-batches reduce; what is done once a step is step_s.
    """
    work = work_of(
        spec,
        DTYPE,
        recompute=split.recompute,
        tensor=split.tensor,
        pipeline=split.pipeline,
        tokens_per_rank=split.tokens_per_rank,
        gpus=split.gpus,
    )
    known = machine.profile
    scaled = scale(known, work_of(machine.model.spec, DTYPE), work)
    gather, reduce = (_collective_s(known, split, number * work.weights) for number in (BFLOAT16, FLOAT32))
    in_micro_batch, in_step = 0.0, 0.0
    if split.reshard_after == "block":
        in_micro_batch += 2 * gather
    else:
        in_step += gather
    if split.reduce_after == "micro_batch":
        in_micro_batch += reduce
    else:
        in_step += reduce
    hidden = known.overlap * scaled.linear_s_per_token * split.tokens_per_rank
    return replace(scaled, launch_s=scaled.launch_s + max(0.0, in_micro_batch - hidden), step_s=in_step)


def _collective_s(known: HardwareProfile, split: Split, size: float) -> float:
    """Seconds to gather or reduce that many bytes over the domain."""
    here = min(split.domain, max(1, known.ranks_per_node // split.tensor))
    speed = known.intra_node_bytes_per_s
    if here < split.domain:
        speed = min(speed, here * known.inter_node_bytes_per_s)
    return size * (split.domain - 1) / split.domain / speed
