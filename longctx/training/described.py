"""Profiles with the model and machine that they describe, scaled to another model.

Without torch: plans without a run need nothing else of a profile.
"""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from longctx.config.settings import ModelSection
from longctx.errors import UserError
from longctx.model.presets import ModelShape
from longctx.planning.cost.fixed import GATHERS, ShardedStates, with_fixed_costs
from longctx.planning.cost.scaling import arithmetic_said, scale
from longctx.planning.cost.spec import ModelSpec, Recompute
from longctx.planning.cost.work import RankWork, work_of
from longctx.planning.hardware_profile import HardwareProfile, ProfileError, read_profile
from longctx.planning.pipeline import NO_PIPELINE, Pipeline
from longctx.units import format_count

if TYPE_CHECKING:
    import torch.distributed as dist


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
        """Returns the work of a model with the settings described; blocks of another model are
        compiled if they are by default."""
        compiled = self.compiled
        if spec != self.model.spec:
            compiled = compiled and spec.compiled_by_default
        return work_of(
            spec,
            self.dtype,
            recompute=self.recompute,
            keep_kv=self.keep_kv,
            tensor=self.tensor_parallel_size,
            expert=self.expert_parallel_size,
            compiled=compiled,
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

    def agreed(self, group: "dist.ProcessGroup") -> HardwareProfile:
        """Returns the profile; on nodes with different numbers of ranks, with the largest number
        that divides all of them, and the longest launch and step.

        Collective in a gloo group of all ranks: raises ProfilesDiffer on every rank unless all have
        the same profile.
        """
        from longctx.parallel.mesh import gather_objects  # and torch, which plans do not need

        gathered = gather_objects((self.name, self.profile), group)
        sizes = [profile.ranks_per_node for _, profile in gathered]
        same: dict[str, Any] = {"ranks_per_node": math.gcd(*sizes)}
        if len(set(sizes)) > 1:  # gathers take longer on smaller nodes
            same["launch_s"] = max(profile.launch_s for _, profile in gathered)
            same["step_s"] = max(profile.step_s for _, profile in gathered)
        gathered = [(name, replace(profile, **same)) for name, profile in gathered]
        others = [rank for rank, (_, profile) in enumerate(gathered) if profile != gathered[0][1]]
        if others:
            raise ProfilesDiffer(
                f"ranks have different profiles: rank 0 has {gathered[0][0]}, ranks {others} have "
                f"{gathered[others[0]][0]}, or another file of that name: set context.profile "
                "(profile inside a trainer), and use the same file on all nodes"
            )
        return replace(self.profile, **same)


class ProfilesDiffer(UserError):
    """Raised on all ranks if ranks have different profiles, which would give different plans."""


def preset_profile(name: str, preset: str | None = None) -> RunProfile:
    """Returns the profile for planning without a run, scaled to a preset (None: the profile's own
    model), without what sharded weights take."""
    profile, described = read_described(name)
    if described is None:
        return unscaled(name, profile)
    work = described.work_of(_preset_spec(described, preset))
    what = preset or "its model"
    return _named_as_scaled(name, profile, described=described, work=work, what=what)


def sharded_preset_profile(
    name: str,
    preset: str | None,
    *,
    domain: int,
    tokens_per_rank: int,
    pipeline: Pipeline = NO_PIPELINE,
    reshard_after: str = "block",
) -> RunProfile:
    """Returns `preset_profile` with what gathers and updates take where weights are sharded over
    the `domain` ranks, and in a pipeline scaled to its slowest rank; after a `step` they are
    resharded where ranks keep them all.

    A profile that was measured has what gathers and updates took there.
    """
    profile, described = read_described(name)
    if described is None:
        return unscaled(name, profile)
    spec = _preset_spec(described, preset)
    if pipeline.stages > len(spec.layers):
        raise UserError(
            f"the pipeline has {pipeline.stages} stages, but {preset or 'the model of ' + name} "
            f"has only {len(spec.layers)} layers: use fewer pipeline ranks or chunks, or another "
            "--model"
        )
    work = described.work_of(
        spec,
        pipeline=pipeline,
        tokens_per_rank=tokens_per_rank,
        gpus=domain * pipeline.ranks * described.tensor_parallel_size,
    )
    what = preset or "its model"
    if pipeline.ranks > 1:
        what += " in a pipeline"
    scaled = _named_as_scaled(name, profile, described=described, work=work, what=what)
    if not described.from_data_sheets:
        return scaled
    states = ShardedStates.of(
        spec,
        work,
        dtype=described.dtype,
        shards=domain,
        pipeline_ranks=pipeline.ranks,
        gathers=GATHERS[reshard_after],
        reduces_each=False,
    )
    with_states = with_fixed_costs(scaled.profile, work, states, tokens_per_rank)
    return replace(scaled, profile=with_states)


def _preset_spec(described: Described, preset: str | None) -> ModelSpec:
    """Returns the sizes of a preset, or of the model that a profile describes."""
    shape = described.model
    if preset is not None:
        shape = ModelSection(preset=preset).sizes()
    return with_vocabulary(shape.spec, described)


def _named_as_scaled(
    name: str, profile: HardwareProfile, described: Described, work: RankWork, what: str
) -> RunProfile:
    scaled = scaled_to(name, profile, described=described, work=work, what=what)
    if scaled.profile == profile:
        return scaled
    return replace(scaled, name=f"{name}, scaled to {what}")


def with_vocabulary(spec: ModelSpec, described: Described) -> ModelSpec:
    if spec.vocab_size is not None:
        return spec
    return replace(spec, vocab_size=described.model.vocab_size)


def unscaled(name: str, profile: HardwareProfile, *lines: str) -> RunProfile:
    return RunProfile(name, profile, (f"profile {name} names no model: used unscaled", *lines))


def scaled_to(
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
