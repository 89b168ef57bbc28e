"""Hardware profile of a run: the one in the settings or the default of the device, scaled to the run's model and parallel
sizes, with a printed line on the scaling.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from longctx.config import Config
from longctx.errors import UserError
from longctx.model.presets import PRESETS, ModelShape
from longctx.model.spec import LayerSpec, ModelSpec, Recompute
from longctx.parallel.device import choose_device
from longctx.parallel.environment import processes_per_node
from longctx.parallel.mesh import Mesh
from longctx.parallel.pipeline import layers_of_ranks
from longctx.planning.calibration.fit import kv_bytes_per_token
from longctx.planning.cost.hardware_profile import HardwareProfile, ProfileError, read_profile
from longctx.planning.cost.pipeline import NO_PIPELINE, Pipeline
from longctx.planning.cost.scaling import RankWork, arithmetic_said, scale
from longctx.training.utilisation import gpu_kind
from longctx.units import format_count

ELEMENT_BYTES = {"bfloat16": 2, "float32": 4}
REPEATED_ATTENTION = 4.5 / 3.5
"""Attention operations with recomputation, relative to those without: backward takes 2.5 times the forward."""
COLLECTIVES = 4
"""Tensor parallel collectives per block and direction: before and after attention, before and after the MLP."""
SEGMENTS, STATE_BYTES = 2, 4
"""Segments of a document per rank, a head and a tail, and bytes per value of their states, which are float32."""


class Described(BaseModel):
    """Model and machine that a profile's constants describe: its section `describes`, or `measured` by `longctx profile`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: ModelShape
    dtype: Literal["bfloat16", "float32"]
    device: Literal["cpu", "cuda"]
    gpu: str | None = None
    cpu: str | None = None
    recompute: Recompute = "none"
    keep_kv: bool = False
    tensor_parallel_size: int = Field(1, ge=1)
    expert_parallel_size: int = Field(1, ge=1)

    @property
    def work(self) -> RankWork:
        return work_of(
            self.model.spec,
            self.dtype,
            recompute=self.recompute,
            keep_kv=self.keep_kv,
            tensor=self.tensor_parallel_size,
            expert=self.expert_parallel_size,
        )

    def __str__(self) -> str:
        split = f", tensor_parallel_size {self.tensor_parallel_size}" * (self.tensor_parallel_size > 1)
        split += f", expert_parallel_size {self.expert_parallel_size}" * (self.expert_parallel_size > 1)
        recompute = f", recompute {self.recompute}" * (self.recompute != "none")
        where = self.gpu or self.cpu or ("a GPU" if self.device == "cuda" else "a CPU")
        return f"{format_count(self.model.spec.parameters)} parameters in {self.dtype} on {where}{recompute}{split}"


def read_described(name_or_path: str) -> tuple[HardwareProfile, Described | None]:
    """Reads a profile and its description, None if it names no model. Raises ProfileError if they contradict each other."""
    path, values = read_profile(name_or_path)
    profile = HardwareProfile.from_dict(values, source=str(path))
    section = "describes" if "describes" in values else "measured"
    said = values.get(section)
    if section == "measured":
        said = {name: said[name] for name in Described.model_fields if name in said} if isinstance(said, dict) else {}
        if "model" not in said:
            return profile, None
    try:
        described = Described.model_validate(said)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise ProfileError(f"{path}: section `{section}` is invalid: {wrong}") from error
    if described.model.vocab_size is None:
        raise ProfileError(f"{path}: the model in `{section}` has no vocab_size, which linear_s_per_token depends on: add it")
    if profile.kv_bytes_per_token != described.work.kv_bytes:
        raise ProfileError(
            f"{path}: kv_bytes_per_token is {profile.kv_bytes_per_token:,}, but section `{section}` (model, dtype, recompute, "
            f"keep_kv, tensor_parallel_size; by default none, false, 1) implies {described.work.kv_bytes:,}: correct one of "
            "the two, or measure again"
        )
    return profile, described


def work_of(
    spec: ModelSpec,
    dtype: str,
    *,
    recompute: Recompute = "none",
    keep_kv: bool = False,
    tensor: int = 1,
    pipeline: Pipeline = NO_PIPELINE,
    tokens_per_rank: int = 1,
    gpus: int = 1,
    expert: int = 1,
) -> RankWork:
    """Returns the work per token of the slowest pipeline rank.

    `spec` must have a vocabulary; `tokens_per_rank` determines where stages are cut. Recomputation repeats all matrices of a
    block (mode mlp: only those of the MLP, norms: none), but never the last one of the MLP, as torch stops when all saved
    tensors are there. Tensor parallelism has 4 collectives per block in forward, 4 in backward and 3 in a recomputed forward,
    each with (tp - 1)/tp of [tokens, hidden] per rank; those of embedding and head are not counted. Every stage receives
    [tokens, hidden] / tp in forward and in backward. While K and V travel, queries are computed, also in a forward that is
    recomputed with attention; while their gradients return, so is the gradient of the queries' input. That of the weights does
    not count, as compiled blocks compute it later. Each token's row travels to all its experts and back, in forward, in
    backward and in a recomputed forward. Attention windows are not counted: plans assume full attention. Raises ProfileError if
    tp does not divide the KV heads.
    """
    for layer in spec.layers:
        if layer.num_key_value_heads % tensor:
            raise ProfileError(f"tensor_parallel_size is {tensor}, which does not divide {layer.num_key_value_heads} KV heads")
    layers, head = _slowest_rank(spec, pipeline, tokens_per_rank)
    in_blocks = sum(layer.matrix_parameters for layer in layers)
    computed, collectives = float(in_blocks + head), 2 * COLLECTIVES
    last = sum(layer.hidden_size * layer.intermediate_size for layer in layers)
    if recompute != "none":
        computed += {"norms": 0, "mlp": 2 * last}.get(recompute, in_blocks - last) / 3
        collectives += COLLECTIVES - 1
    if spec.adapted:  # frozen weights have no gradients, which take a third of the operations
        computed -= (in_blocks + head) / 3
    element, again = ELEMENT_BYTES[dtype], recompute == "full"
    hidden_bytes, passes = spec.hidden_size * element, 3 + again - keep_kv
    attending = [layer for layer in layers if layer.attends]
    heads = sum(layer.num_attention_heads * layer.head_dim for layer in attending) / tensor
    experts, expert_ranks = sum(layer.expert_parameters for layer in layers), expert * tensor
    idle = sum(layer.idle_parameters for layer in layers)
    sent_rows = (4 + 2 * (recompute != "none")) * sum(layer.experts_per_token for layer in layers)
    return RankWork(
        layers=len(layers),
        weights=(in_blocks + idle + head - experts + experts / expert) / tensor,
        computed=computed / tensor,
        # Profiles need positive constants, also for models without softmax attention.
        attention=max(1.0, heads * (REPEATED_ATTENTION if again else 1.0) * (1 if spec.causal else 2)),
        kv_bytes=max(
            1,
            sum(
                kv_bytes_per_token(1, layer.num_key_value_heads // tensor, layer.head_dim, element, passes)
                for layer in attending
            ),
        ),
        tensor=tensor,
        tensor_bytes=len(layers) * collectives * hidden_bytes * (tensor - 1) / tensor,
        pipeline_bytes=2 * pipeline.chunks * hidden_bytes / tensor if pipeline.ranks > 1 else 0.0,
        gpus=gpus if pipeline.ranks > 1 else 1,
        queries=sum(layer.query_parameters for layer in layers) * (2 + again) / 3 / tensor,
        expert_weights=experts / expert_ranks,
        expert_ranks=expert_ranks if experts else 1,
        expert_bytes=sent_rows * hidden_bytes * (expert_ranks - 1) / expert_ranks / tensor,
        state_bytes=SEGMENTS * STATE_BYTES * sum(layer.state_size for layer in layers) * (2 + (recompute != "none")),
    )


def _slowest_rank(spec: ModelSpec, pipeline: Pipeline, tokens_per_rank: int) -> tuple[list[LayerSpec], int]:
    """Returns the blocks, and the parameters of the head, of the pipeline rank with most work; the last rank has the head."""
    ranks = [[spec.layers[number] for number in held] for held in layers_of_ranks(spec, pipeline, tokens_per_rank)]
    work = [sum(layer.multiplications(tokens_per_rank // 2) for layer in held) for held in ranks]  # as in `split_layers`
    work[-1] += spec.head_parameters
    if work[-1] == max(work):
        return ranks[-1], spec.head_parameters
    return ranks[work.index(max(work))], 0


@dataclass(frozen=True)
class RunProfile:
    """The profile of a run and its name, with `lines` to print on its scaling and on reasons to doubt it."""

    name: str
    profile: HardwareProfile
    lines: tuple[str, ...]

    def agreed(self, mesh: Mesh) -> HardwareProfile:
        """Returns the profile; on nodes with different numbers of ranks, with the largest number that divides all of them.

        Collective: raises ProfilesDiffer on every rank unless all ranks have the same profile.
        """
        gathered = mesh.gather_objects((self.name, self.profile))
        node = math.gcd(*(profile.ranks_per_node for _, profile in gathered))
        gathered = [(name, replace(profile, ranks_per_node=node)) for name, profile in gathered]
        others = [rank for rank, (_, profile) in enumerate(gathered) if profile != gathered[0][1]]
        if others:
            raise ProfilesDiffer(
                f"ranks have different profiles: rank 0 has {gathered[0][0]}, ranks {others} have {gathered[others[0]][0]}, or "
                "another file of that name: set context.profile, and use the same file on all nodes"
            )
        return replace(self.profile, ranks_per_node=node)


class ProfilesDiffer(UserError):
    """Raised on all ranks if ranks have different profiles, which would give different plans."""


def run_profile(config: Config, ranks: int, vocab_size: int | None = None) -> RunProfile:
    """Returns the profile of a run on `ranks` processes, for the device of this process.

    If a launcher started them on several nodes, the size of nodes is the real one, whatever the profile says. `vocab_size` is
    the size of the store's tokenizer; without it and model.vocab_size, that of the profile's model is used.
    """
    device, gpu = choose_device(config.train.device, 0).type, None
    if device == "cuda" and torch.cuda.is_available():
        gpu = torch.cuda.get_device_name()
    name = config.context.profile or default_profile(device, gpu)
    profile, described = read_described(name)
    profile = replace(profile, exchange_levels=2 if config.context.two_level_exchange else 1)
    tensor = config.parallel.tensor_parallel_size
    known = profile.ranks_per_node * (tensor if described is None else described.tensor_parallel_size)
    started = processes_per_node(ranks)
    differs = f"nodes have {started} processes each, not {known} as in profile {name}: plan and exchange follow the nodes"
    lines = [differs] * (started not in (None, known))
    # In a pipeline a domain may begin or end inside a node: then its nodes are the parts that are all of one domain.
    node = None if started is None else math.gcd(started, ranks // config.pipeline.ranks)
    if described is None:
        profile = profile if node is None else replace(profile, ranks_per_node=max(1, node // tensor))
        return RunProfile(name, profile, (f"profile {name} names no model: used unscaled for this run", *lines))
    wanted = work_of(
        _with_vocabulary(config.model_source(vocab_size).spec, described),
        config.dtype,
        recompute=config.train.recompute,
        keep_kv=bool(config.context.keep_kv),
        tensor=tensor,
        pipeline=config.pipeline,
        tokens_per_rank=config.batch.tokens_per_rank,
        gpus=ranks,
        expert=config.parallel.expert_parallel_size,
    )
    if config.context.ulysses_degree not in (1, "auto"):
        wanted = replace(wanted, queries=0.0)  # heads are swapped once the queries are there
    found = _scaled(name, profile, described, wanted, "this run", node)
    return replace(found, lines=(*found.lines, *lines, *_doubts(name, described, device, gpu, config.dtype)))


def preset_profile(
    name: str, preset: str | None = None, pipeline: Pipeline = NO_PIPELINE, domain: int = 1, tokens_per_rank: int = 1
) -> RunProfile:
    """Returns the profile for planning without a run, scaled to a preset (None: the profile's own model)."""
    profile, described = read_described(name)
    if described is None:
        return RunProfile(name, profile, (f"profile {name} names no model: used unscaled",))
    spec = _with_vocabulary((described.model if preset is None else PRESETS[preset]).spec, described)
    if pipeline.stages > len(spec.layers):
        raise UserError(
            f"the pipeline has {pipeline.stages} stages, but {preset or 'the model of ' + name} has only {len(spec.layers)} "
            "layers: use fewer pipeline ranks or chunks, or another --model"
        )
    wanted = work_of(
        spec,
        described.dtype,
        recompute=described.recompute,
        keep_kv=described.keep_kv,
        tensor=described.tensor_parallel_size,
        pipeline=pipeline,
        tokens_per_rank=tokens_per_rank,
        gpus=domain * pipeline.ranks * described.tensor_parallel_size,
        expert=described.expert_parallel_size,
    )
    what = (preset or "its model") + " in a pipeline" * (pipeline.ranks > 1)
    found = _scaled(name, profile, described, wanted, what)
    return found if found.profile == profile else replace(found, name=f"{name}, scaled to {what}")


def default_profile(device: str, gpu: str | None) -> str:
    """Returns the name of the default profile for a device type, and for the name `gpu` of a GPU if known."""
    if device != "cuda":
        return "cpu-2core"
    kind = gpu_kind(gpu or "") or ""
    return "h200-nvlink-ib" if kind.startswith("H200") else "h100-nvlink-ib"


def _with_vocabulary(spec: ModelSpec, described: Described) -> ModelSpec:
    return spec if spec.vocab_size is not None else replace(spec, vocab_size=described.model.vocab_size)


def _scaled(
    name: str, profile: HardwareProfile, described: Described, wanted: RankWork, what: str, node: int | None = None
) -> RunProfile:
    try:
        scaled = scale(profile, described.work, wanted, node)
    except ProfileError as error:
        raise ProfileError(f"profile {name}: {error}") from None
    said = arithmetic_said(profile, scaled, described.work, wanted)
    done = f"scaled to {what}: {said}" if said else f"used unscaled for {what}"
    return RunProfile(name, scaled, (f"profile {name} ({described}): {done}",))


def _doubts(name: str, described: Described, device: str, gpu: str | None, dtype: str) -> list[str]:
    """Returns warnings if predicted times may be far off, as speeds are not scaled to other devices or dtypes."""
    doubts, fix = [], "speeds are not scaled, so predicted times are unreliable: measure a profile with `longctx profile`"
    if described.device != device:
        doubts.append(f"profile {name} is for {described.device}, but this run is on {device}")
    elif described.gpu and gpu and (gpu_kind(described.gpu) or described.gpu) != (gpu_kind(gpu) or gpu):
        doubts.append(f"profile {name} is for {described.gpu}, but this run is on {gpu}")
    if described.dtype != dtype:
        doubts.append(f"profile {name} is for {described.dtype}, but this run computes in {dtype}")
    return [f"warning: {doubt}; {fix}" for doubt in doubts]
