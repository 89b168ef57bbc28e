"""Measures a whole hardware profile, one group of constants at a time, and checks it against a real step."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import yaml

from longctx.calibration.communication import Nodes, measure_links, measure_overlap
from longctx.calibration.computation import measure_attention, measure_linear, measure_step
from longctx.calibration.machine import describe_machine
from longctx.calibration.profiled_run import Measurement, ProfiledRun
from longctx.config import Config
from longctx.errors import UserError
from longctx.model.presets import ModelShape
from longctx.parallel.mesh import Mesh
from longctx.planning.cost.scaling import query_share
from longctx.planning.cost.work import RankWork
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.planners.planner import make_plan
from longctx.training.run_profile import Described, read_described

LEAST_TOKENS = 64
SHORTEST_DOCUMENT = 16
CHECK_S = 5.0
"""Approximate maximum duration of the final check step, as a multiple of `longest_s`."""
WORTH_A_WARNING = 0.2
"""Relative error above which a warning is given."""


@dataclass(frozen=True)
class Measured:
    """A measured profile.

    Attributes:
        profile: the constants.
        about: one-line description of model and machine.
        sources: measurement of every constant, by name; constants without one are those of the base profile.
        base: why constants are those of the base profile, and its name.
        run: machine and settings of the measurement.
        check: a step as predicted by the profile and as measured.
    """

    profile: HardwareProfile
    about: str
    sources: dict[str, Measurement]
    base: str
    run: dict[str, Any]
    check: dict[str, Any]

    @property
    def how(self) -> dict[str, str]:
        """Description of the source of every constant."""
        return {name: self.sources[name].how if name in self.sources else self.base for name in self.profile.to_dict()}

    @property
    def warnings(self) -> list[str]:
        """Warnings about constants that should not be trusted."""
        warnings = [
            f"{name}: the fit is {source.residual:.0%} off its measurements; stop other load on the machine, or raise "
            "--longest or batch.tokens_per_rank"
            for name, source in self.sources.items()
            if source.residual is not None and source.residual > WORTH_A_WARNING
        ]
        if abs(self.check["error"]) > WORTH_A_WARNING:
            warnings.append(
                f"the predicted step time is {self.check['error']:+.0%} off: stop other load on the machine and measure again"
            )
        return warnings

    def to_yaml(self) -> str:
        """Returns the profile as YAML, as `HardwareProfile.load` reads it."""
        residuals = {name: _short(source.residual) for name, source in self.sources.items() if source.residual is not None}
        not_measured = dict.fromkeys(self.profile.to_dict().keys() - self.sources.keys(), self.base)
        measured = {**self.run, "relative_residual": residuals, "not_measured": not_measured, "check": self.check}
        content = {"about": self.about, **self.profile.to_dict(), "measured": measured}
        return yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)

    def to_json(self) -> dict[str, Any]:
        """Returns the content of the YAML file plus the source of every constant and the warnings."""
        return {**yaml.safe_load(self.to_yaml()), "sources": self.how, "warnings": self.warnings}


def measure_profile(
    config: Config,
    mesh: Mesh,
    shape: ModelShape,
    *,
    base: str,
    local_rank: int,
    longest_s: float = 1.0,
    tell: Callable[[str], None] = lambda part: None,
) -> Measured:
    """Measures all constants that this machine and number of ranks allow; the others come from the profile named `base`.

    All ranks of the mesh must call it, and get the same profile.

    Args:
        config: settings of the run that the profile is for; its data is not read.
        mesh: process groups of the run.
        shape: the model, including the size of its vocabulary.
        base: name or path of the profile for constants that cannot be measured.
        local_rank: this process's rank on its node.
        longest_s: approximate time of one measurement in seconds; also limits the longest segments.
        tell: called with a description of each part before it starts.

    Raises:
        UserError: for a token budget that is too small, nodes with different numbers of ranks, or too little memory.
    """
    tokens = config.batch.tokens_per_rank
    if tokens < LEAST_TOKENS:
        raise UserError(f"batch.tokens_per_rank is {tokens}: measuring needs at least {LEAST_TOKENS} tokens per rank")
    nodes, machine = Nodes.find(mesh, local_rank), describe_machine(mesh)
    described = _describe(config, mesh, shape, machine)
    tell("building the model")
    profiled = ProfiledRun(config, mesh, shape, longest_s, _with_nodes(base, nodes, mesh, config))
    constants = _measure(profiled, described.work, nodes, tell)
    tell("a step, to compare with its prediction")
    why = "one process" if nodes.ranks == 1 else "one node" if nodes.per_node > 1 else "one rank per node"
    return Measured(
        profile=constants.profile,
        about=f"{described}, {nodes.ranks} rank{'s' * (nodes.ranks > 1)}, by `longctx calibrate`.",
        sources=constants.sources,
        base=f"{why}: taken from {base}",
        run={
            **machine,
            "ranks": nodes.ranks,
            "nodes": nodes.ranks // nodes.per_node,
            "kernel": config.context.kernel,
            "tokens_per_rank": tokens,
            "max_remote_tokens": config.context.max_remote_tokens,
            **described.model_dump(),
        },
        check=_check(profiled, constants.profile),
    )


class _Constants:
    """A profile in the making: `add` replaces constants of the base profile by measured ones, and notes their sources."""

    def __init__(self, profile: HardwareProfile) -> None:
        self.profile = profile
        self.sources: dict[str, Measurement] = {}

    def add(self, *measurements: Measurement) -> None:
        for measurement in measurements:
            values = measurement.constants
            if measurement.residual is not None:
                values = {name: _short(value) for name, value in values.items()}
            self.profile = replace(self.profile, **values)
            self.sources |= dict.fromkeys(values, measurement)


def _measure(profiled: ProfiledRun, work: RankWork, nodes: Nodes, tell: Callable[[str], None]) -> _Constants:
    """Returns the constants that model, settings and launcher give, and those that can be measured."""
    constants = _Constants(profiled.no_plan.profile)
    constants.add(
        Measurement({"exchange_levels": constants.profile.exchange_levels}, "setting context.two_level_exchange"),
        Measurement({"kv_bytes_per_token": work.kv_bytes}, "model: layers × (K, V) × heads × size × passes"),
        Measurement({"state_bytes": 0.0, "split_s_per_token": 0.0}, "model: no linear attention in the native decoder"),
    )
    if nodes.per_node < nodes.ranks:
        constants.add(Measurement({"ranks_per_node": constants.profile.ranks_per_node}, "launcher"))
    tell("everything except attention")
    constants.add(measure_linear(profiled))
    share = _short(query_share(constants.profile, work))
    constants.add(Measurement({"query_share": share}, "model: 2 of 3 products of the matrices to queries / all products"))
    constants.add(measure_step(profiled))
    tell("attention")
    constants.add(*measure_attention(profiled))
    if nodes.ranks > 1:
        tell("exchange")
        constants.add(*measure_links(profiled, nodes))
        tell("overlap of attention and exchange")
        constants.add(measure_overlap(profiled, nodes, constants.profile))
    return constants


def _with_nodes(base: str, nodes: Nodes, mesh: Mesh, config: Config) -> HardwareProfile:
    """Returns the base profile with the ranks per node and exchange levels of this run.

    On one node the profile says how large nodes are, in ranks of its own tensor-parallel size.
    """
    profile, described = read_described(base)
    per_node = nodes.per_node
    if per_node == nodes.ranks:
        gpus = profile.ranks_per_node * (1 if described is None else described.tensor_parallel_size)
        per_node = max(per_node, gpus // mesh.tensor.size())
    return replace(profile, ranks_per_node=per_node, exchange_levels=2 if config.context.two_level_exchange else 1)


def _describe(config: Config, mesh: Mesh, shape: ModelShape, machine: Mapping[str, Any]) -> Described:
    """Returns the model and settings that the constants are for."""
    return Described.model_validate(
        {
            "model": shape,
            "dtype": config.dtype,
            "device": mesh.device.type,
            "gpu": machine["gpu"],
            "cpu": machine["cpu"],
            "recompute": config.train.recompute,
            "keep_kv": bool(config.context.keep_kv),
            "tensor_parallel_size": config.parallel.tensor_parallel_size,
            "expert_parallel_size": config.parallel.expert_parallel_size,
            "optimizer": config.optimizer.name,
        }
    )


def _check(profiled: ProfiledRun, profile: HardwareProfile) -> dict[str, Any]:
    """Predicts and measures a step of documents of halving lengths; returns the comparison as plain data.

    The longest document has half of the step's tokens, unless attention was measured only up to a shorter length.
    """
    context, budget = profiled.config.context, profiled.config.batch.tokens_per_rank
    tokens, measured = profiled.mesh.ranks * budget, profile.attention_efficiency[-1][0]
    while True:
        lengths = _halving(tokens, min(tokens // 2, measured * max(1, profiled.mesh.ranks // 2)))
        plan = make_plan(
            lengths,
            ranks=profiled.mesh.ranks,
            tokens_per_rank=budget,
            profile=profile,
            max_remote_tokens=context.max_remote_tokens,
        )
        if (
            plan.makespan_s <= max(CHECK_S * profiled.longest_s, 3 * (profile.launch_s + profile.step_s))
            or tokens <= LEAST_TOKENS
        ):
            break
        tokens //= 2
    seconds = profiled.time(profiled.step(profiled.planned(plan)))[0].seconds
    if not math.isfinite(seconds):
        raise UserError(f"a step with {budget} tokens per rank exceeds GPU memory: lower batch.tokens_per_rank")
    return {
        "documents": len(lengths),
        "longest": max(lengths),
        "tokens": sum(lengths),
        "micro_batches": len(plan.micro_batches),
        "degrees": plan.degrees,
        "predicted_s": _short(plan.makespan_s),
        "measured_s": _short(seconds),
        "error": _short(plan.makespan_s / seconds - 1),
    }


def _halving(tokens: int, longest: int) -> list[int]:
    lengths, length = [], longest
    while tokens:
        lengths.append(min(length, tokens))
        tokens -= lengths[-1]
        length = length // 2 if length >= 2 * SHORTEST_DOCUMENT else longest
    return lengths


def _short(value: Any) -> Any:
    """Rounds floats to four significant digits, the precision of the measurements."""
    if isinstance(value, tuple):
        return tuple(_short(item) for item in value)
    return float(f"{value:.4g}") if isinstance(value, float) else value
