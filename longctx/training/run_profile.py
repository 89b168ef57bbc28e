"""Hardware profile of a run: the one in the settings or the default of the device, scaled to the
run's model and parallel sizes, with a printed line on the scaling.
"""

import math
import re
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from longctx.attention.linear import fused
from longctx.config import Config
from longctx.config.settings import ModelSection
from longctx.errors import UserError
from longctx.model.presets import ModelShape
from longctx.parallel.device import choose_device
from longctx.parallel.environment import processes_per_node
from longctx.parallel.mesh import gather_objects
from longctx.planning.cost.fixed import ShardedStates, with_fixed_costs
from longctx.planning.cost.scaling import arithmetic_said, scale
from longctx.planning.cost.spec import ModelSpec, Recompute
from longctx.planning.cost.work import ELEMENT_BYTES, RankWork, work_of
from longctx.planning.hardware_profile import (
    HardwareProfile,
    ProfileError,
    read_profile,
    shipped_profiles,
)
from longctx.planning.pipeline import NO_PIPELINE, Pipeline
from longctx.training.metrics import gpu_kind
from longctx.training.optimizer import OPTIMIZERS
from longctx.units import format_count

UNKNOWN_GPU = "h100-nvlink-ib"
"""Profile of GPUs that no shipped profile is for."""
FLOAT8_TIME = 0.5
"""Time of products in float8, without what they move, relative to bfloat16, by the float8 runs in
bench/published_runs.csv (bench/published_fit.py)."""


GATHERS = {"block": 2, "micro_batch": 1, "step": 0}
"""How often a micro-batch gathers all weights, by `parallel.reshard_after`."""


class Described(BaseModel):
    """Model and machine that a profile's constants describe: its section `describes`, or `measured`
    by `longctx calibrate`.

    `memory_gb` is the memory of the GPU by its data sheet; with `from_data_sheets` nothing was
    measured, and launch and step have nothing of sharded weights. `compiled`: whether blocks were.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: ModelShape
    dtype: Literal["bfloat16", "float32"]
    device: Literal["cpu", "cuda"]
    gpu: str | None = None
    memory_gb: float | None = Field(None, gt=0)
    from_data_sheets: bool = False
    cpu: str | None = None
    recompute: Recompute = "none"
    keep_kv: bool = False
    tensor_parallel_size: int = Field(1, ge=1)
    expert_parallel_size: int = Field(1, ge=1)
    optimizer: str = "adamw"
    compiled: bool = True

    @property
    def work(self) -> RankWork:
        return self.work_of(self.model.spec)

    def work_of(self, spec: ModelSpec, **of_run: Any) -> RankWork:
        """Returns the work of a model with the settings described."""
        return work_of(
            spec,
            self.dtype,
            recompute=self.recompute,
            keep_kv=self.keep_kv,
            tensor=self.tensor_parallel_size,
            expert=self.expert_parallel_size,
            compiled=self.compiled,
            **of_run,
        )

    def __str__(self) -> str:
        split = f", tensor_parallel_size {self.tensor_parallel_size}" * (
            self.tensor_parallel_size > 1
        )
        split += f", expert_parallel_size {self.expert_parallel_size}" * (
            self.expert_parallel_size > 1
        )
        recompute = f", recompute {self.recompute}" * (self.recompute != "none")
        where = self.gpu or self.cpu or ("a GPU" if self.device == "cuda" else "a CPU")
        source = ", from data sheets, not measured" * self.from_data_sheets
        return (
            f"{format_count(self.model.spec.parameters)} parameters in {self.dtype} on "
            f"{where}{recompute}{split}{source}"
        )


def read_described(name_or_path: str) -> tuple[HardwareProfile, Described | None]:
    """Reads a profile and its description, None if it names no model. Raises ProfileError if they
    contradict each other."""
    path, values = read_profile(name_or_path)
    profile = HardwareProfile.from_dict(values, source=str(path))
    section = "describes" if "describes" in values else "measured"
    content = values.get(section)
    if section == "measured":
        if isinstance(content, dict):
            content = {name: content[name] for name in Described.model_fields if name in content}
        else:
            content = {}
        if "model" not in content:
            return profile, None
    try:
        described = Described.model_validate(content)
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()
        )
        raise ProfileError(f"{path}: section `{section}` is invalid: {wrong}") from error
    if described.model.vocab_size is None:
        raise ProfileError(
            f"{path}: the model in `{section}` has no vocab_size, which linear_s_per_token depends "
            "on: add it"
        )
    if profile.kv_bytes_per_token != described.work.kv_bytes:
        raise ProfileError(
            f"{path}: kv_bytes_per_token is {profile.kv_bytes_per_token:,}, but section "
            f"`{section}` (model, dtype, recompute, keep_kv, tensor_parallel_size; by default "
            f"none, false, 1) implies {described.work.kv_bytes:,}: correct one of the two, or "
            "measure again"
        )
    return profile, described


@dataclass(frozen=True)
class RunProfile:
    """The profile of a run and its name, with `lines` to print on its scaling and on reasons to
    doubt it."""

    name: str
    profile: HardwareProfile
    lines: tuple[str, ...]

    def agreed(self, group: dist.ProcessGroup) -> HardwareProfile:
        """Returns the profile; on nodes with different numbers of ranks, with the largest number
        that divides all of them.

        Collective in a gloo group of all ranks: raises ProfilesDiffer on every rank unless all have
        the same profile.
        """
        gathered = gather_objects((self.name, self.profile), group)
        node = math.gcd(*(profile.ranks_per_node for _, profile in gathered))
        gathered = [(name, replace(profile, ranks_per_node=node)) for name, profile in gathered]
        others = [rank for rank, (_, profile) in enumerate(gathered) if profile != gathered[0][1]]
        if others:
            raise ProfilesDiffer(
                f"ranks have different profiles: rank 0 has {gathered[0][0]}, ranks {others} have "
                f"{gathered[others[0]][0]}, or another file of that name: set context.profile "
                "(profile inside a trainer), and use the same file on all nodes"
            )
        return replace(self.profile, ranks_per_node=node)


class ProfilesDiffer(UserError):
    """Raised on all ranks if ranks have different profiles, which would give different plans."""


def run_profile(config: Config, ranks: int, vocab_size: int | None = None) -> RunProfile:
    """Returns the profile of a run on `ranks` processes, for the device of this process.

    `vocab_size` is the size of the store's tokenizer; without it and model.vocab_size, that of the
    profile's model is used.
    """
    return scaled_profile(config, config.model_source(vocab_size).spec, ranks)


def scaled_profile(
    config: Config, spec: ModelSpec, ranks: int, *, queries_first: bool = False
) -> RunProfile:
    """Returns the profile of a model on `ranks` processes, for the device of this process.

    If a launcher started them on several nodes, the size of nodes is the real one, whatever the
    profile says. With `queries_first`, as in transformers' own code, no query is computed while K
    and V travel.
    """
    (device, gpu), asked, tensor = (
        own_device(config),
        config.context.profile,
        config.parallel.tensor_parallel_size,
    )
    name = asked or default_profile(device.type, gpu)
    profile, described = read_described(name)
    profile = replace(profile, exchange_levels=2 if config.context.two_level_exchange else 1)
    if queries_first:
        profile = replace(profile, query_share=0.0)
    known = profile.ranks_per_node * (
        tensor if described is None else described.tensor_parallel_size
    )
    started = processes_per_node(ranks)
    differs = (
        f"nodes have {started} processes each, not {known} as in profile {name}: plan and "
        "exchange follow the nodes"
    )
    lines = [differs] * (started not in (None, known))
    # In a pipeline a domain may begin or end inside a node: then its nodes are the parts that are
    # all of one domain.
    node = None if started is None else math.gcd(started, ranks // config.pipeline.ranks)
    if described is None:
        if node is not None:
            profile = replace(profile, ranks_per_node=max(1, node // tensor))
        return _unscaled(name, profile, *lines)
    spec = _with_vocabulary(spec, described)
    work = work_of_run(config, spec, ranks, device.type)
    if config.train.float8 is not None:
        work = in_float8(work)
    if queries_first or config.context.ulysses_degree > 1:
        work = replace(work, queries=0.0)  # heads are swapped once the queries are there
    scaled = _scaled(name, profile, described=described, work=work, what="this run", node=node)
    if described.from_data_sheets:
        states = states_of_run(config, spec, ranks, work)
        tokens = config.batch.tokens_per_rank
        scaled = replace(scaled, profile=with_fixed_costs(scaled.profile, work, states, tokens))
    if config.train.float8 is not None:
        lines.append(
            f"products in float8 are taken to take {FLOAT8_TIME:.0%} of the time of "
            f"{config.dtype}, and to move as many bytes"
        )
    optimizer = config.optimizer.name
    operations, numbers = OPTIMIZERS[optimizer].step_work(spec, ranks)
    if operations and optimizer != described.optimizer:
        # Three passes of one product and one sum.
        s_per_operation = scaled.profile.linear_s_per_token / (6 * work.computed)
        updates_s = (
            operations * s_per_operation + 4 * numbers / scaled.profile.inter_node_bytes_per_s
        )
        scaled = replace(
            scaled, profile=replace(scaled.profile, step_s=scaled.profile.step_s + updates_s)
        )
        lines.append(
            f"updates by {optimizer} take {updates_s:.3g} s of a step, by the speed of the model's "
            "products"
        )
    doubts = _doubts(
        name, described, device=device.type, gpu=gpu, dtype=config.dtype, default=asked is None
    )
    return replace(scaled, lines=(*scaled.lines, *lines, *doubts))


def work_of_run(config: Config, spec: ModelSpec, ranks: int, device: str) -> RankWork:
    """Returns the work of a rank of a run on `ranks` devices of this type."""
    return work_of(
        spec,
        config.dtype,
        recompute=config.train.recompute,
        keep_kv=bool(config.context.keep_kv),
        tensor=config.parallel.tensor_parallel_size,
        pipeline=config.pipeline,
        tokens_per_rank=config.batch.tokens_per_rank,
        gpus=ranks,
        expert=config.parallel.expert_parallel_size,
        fused=fused.run_in(getattr(torch, config.dtype), device),
        compiled=config.compiles(device, spec),
    )


def states_of_run(config: Config, spec: ModelSpec, ranks: int, work: RankWork) -> ShardedStates:
    """Returns what a rank of a run gathers, reduces and updates, beside its `work`."""
    split = work.tensor * config.pipeline.ranks
    return ShardedStates(
        shards=config.parallel.shard_ranks or config.domain(ranks),
        gathers=GATHERS[config.parallel.reshard_after],
        element_bytes=ELEMENT_BYTES[config.dtype],
        reduces_each=config.parallel.reduce_after == "micro_batch",
        trained=spec.trained_parameters / split,
        waits=any(layer.experts for layer in spec.layers) and work.expert_ranks == 1,
    )


def in_float8(work: RankWork) -> RankWork:
    """Returns work whose products take `FLOAT8_TIME` of their time, and move as many bytes."""
    return replace(work, computed=FLOAT8_TIME * work.computed)


def preset_profile(
    name: str,
    preset: str | None = None,
    pipeline: Pipeline = NO_PIPELINE,
    domain: int = 1,
    tokens_per_rank: int = 1,
) -> RunProfile:
    """Returns the profile for planning without a run, scaled to a preset (None: the profile's own
    model)."""
    profile, described = read_described(name)
    if described is None:
        return _unscaled(name, profile)
    spec = _with_vocabulary(
        (described.model if preset is None else ModelSection(preset=preset).sizes()).spec, described
    )
    if pipeline.stages > len(spec.layers):
        raise UserError(
            f"the pipeline has {pipeline.stages} stages, but {preset or 'the model of ' + name} "
            f"has only {len(spec.layers)} layers: use fewer pipeline ranks or chunks, or another "
            "--model"
        )
    gpus = domain * pipeline.ranks * described.tensor_parallel_size
    work = described.work_of(spec, pipeline=pipeline, tokens_per_rank=tokens_per_rank, gpus=gpus)
    what = (preset or "its model") + " in a pipeline" * (pipeline.ranks > 1)
    scaled = _scaled(name, profile, described=described, work=work, what=what)
    if scaled.profile == profile:
        return scaled
    return replace(scaled, name=f"{name}, scaled to {what}")


def own_device(config: Config) -> tuple[torch.device, str | None]:
    """Returns the device of this process, and the name of its GPU; None without one, or if none is
    here."""
    device = choose_device(config.train.device, 0)
    return (
        device,
        torch.cuda.get_device_name()
        if device.type == "cuda" and torch.cuda.is_available()
        else None,
    )


def default_profile(device: str, gpu: str | None) -> str:
    """Returns the name of the default profile for a device type, and for the name `gpu` of a GPU if
    known.

    That of a GPU is the shipped one whose GPU is in the name, the longest if several are;
    `UNKNOWN_GPU` if none is.
    """
    if device != "cuda":
        return "cpu-2core"
    described = {name: read_described(name)[1] for name in shipped_profiles()}
    kinds = {each.gpu: name for name, each in described.items() if each is not None and each.gpu}
    named = [kind for kind in kinds if re.search(rf"\b{kind}\b", gpu or "")]
    if named:
        return kinds[max(named, key=len)]
    return UNKNOWN_GPU


def _with_vocabulary(spec: ModelSpec, described: Described) -> ModelSpec:
    if spec.vocab_size is not None:
        return spec
    return replace(spec, vocab_size=described.model.vocab_size)


def _unscaled(name: str, profile: HardwareProfile, *lines: str) -> RunProfile:
    return RunProfile(name, profile, (f"profile {name} names no model: used unscaled", *lines))


def _scaled(
    name: str,
    profile: HardwareProfile,
    described: Described,
    work: RankWork,
    what: str,
    node: int | None = None,
) -> RunProfile:
    try:
        scaled = scale(profile, described.work, work, node)
    except ProfileError as error:
        raise ProfileError(f"profile {name}: {error}") from None
    arithmetic = arithmetic_said(profile, scaled, described.work, work)
    done = f"scaled to {what}: {arithmetic}" if arithmetic else f"used unscaled for {what}"
    return RunProfile(name, scaled, (f"profile {name} ({described}): {done}",))


def _doubts(
    name: str, described: Described, device: str, gpu: str | None, dtype: str, default: bool
) -> list[str]:
    """Returns warnings if predicted times may be far off, as speeds are not scaled to other devices
    or dtypes."""
    doubts = []
    fix = (
        "speeds are not scaled, so predicted times are unreliable: measure a profile with `longctx "
        "calibrate`"
    )
    if described.device != device:
        doubts.append(f"profile {name} is for {described.device}, but this run is on {device}")
    elif (
        described.gpu
        and gpu
        and (gpu_kind(described.gpu) or described.gpu) != (gpu_kind(gpu) or gpu)
    ):
        unknown = (
            f"no shipped profile is for {gpu}: {name}, which is for {described.gpu}, is used "
            "instead"
        )
        doubts.append(
            unknown
            if default
            else f"profile {name} is for {described.gpu}, but this run is on {gpu}"
        )
    if described.dtype != dtype:
        doubts.append(f"profile {name} is for {described.dtype}, but this run computes in {dtype}")
    return [f"warning: {doubt}; {fix}" for doubt in doubts]
