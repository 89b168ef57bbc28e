"""Measures a whole hardware profile, one group of constants at a time, and checks it against a real step."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import yaml

from longctx.config import Config
from longctx.errors import UserError
from longctx.model.presets import ModelShape
from longctx.parallel.mesh import Mesh
from longctx.planning.calibration.fit import kv_bytes_per_token
from longctx.planning.cost.hardware_profile import HardwareProfile
from longctx.planning.cost.scaling import query_share
from longctx.planning.planner import make_plan
from longctx.profiling.communication import Nodes, measure_links, measure_overlap
from longctx.profiling.computation import OutOfMemory, measure_attention, measure_linear, measure_step
from longctx.profiling.machine import describe_machine
from longctx.profiling.profiled_run import Measurement, ProfiledRun
from longctx.training.run_profile import read_described, work_of

LEAST_TOKENS = 64
SHORTEST_DOCUMENT = 16
CHECK_S = 5.0
"""Approximate maximum duration of the final check step, as a multiple of `longest_s`."""
WORTH_A_WARNING = 0.2
"""Relative error above which a warning is given."""


@dataclass(frozen=True)
class Source:
    """The source of a constant; `residual` is the relative error of its fit, or None if it was not measured."""

    how: str
    residual: float | None = None
    taken_over: bool = False


@dataclass(frozen=True)
class Measured:
    """A measured profile.

    Attributes:
        profile: the constants.
        about: one-line description of model and machine.
        sources: source of every constant, by name.
        run: machine and settings of the measurement.
        check: a step as predicted by the profile and as measured.
    """

    profile: HardwareProfile
    about: str
    sources: dict[str, Source]
    run: dict[str, Any]
    check: dict[str, Any]

    @property
    def warnings(self) -> list[str]:
        """Warnings about constants that should not be trusted."""
        found = [
            f"{name}: the fit is {source.residual:.0%} off its measurements; stop other load on the machine, or raise "
            "--longest or batch.tokens_per_rank"
            for name, source in self.sources.items()
            if source.residual is not None and source.residual > WORTH_A_WARNING
        ]
        if abs(self.check["error"]) > WORTH_A_WARNING:
            found.append(
                f"the predicted step time is {self.check['error']:+.0%} off: stop other load on the machine and measure again"
            )
        return found

    def to_yaml(self) -> str:
        """Returns the profile as YAML, as `HardwareProfile.load` reads it."""
        residuals = {name: _short(source.residual) for name, source in self.sources.items() if source.residual is not None}
        not_measured = {name: source.how for name, source in self.sources.items() if source.taken_over}
        measured = {**self.run, "relative_residual": residuals, "not_measured": not_measured, "check": self.check}
        content = {"about": self.about, **self.profile.to_dict(), "measured": measured}
        return yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)

    def to_json(self) -> dict[str, Any]:
        """Returns the content of the YAML file plus the source of every constant and the warnings."""
        how = {name: source.how for name, source in self.sources.items()}
        return {**yaml.safe_load(self.to_yaml()), "sources": how, "warnings": self.warnings}


def measure_profile(
    config: Config,
    mesh: Mesh,
    shape: ModelShape,
    *,
    base: str,
    local_rank: int,
    longest_s: float = 1.0,
    tell: Callable[[str], None] = lambda stage: None,
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
        tell: called with a description of each stage before it starts.

    Raises:
        UserError: for a token budget that is too small, nodes with different numbers of ranks, or too little memory.
    """
    tokens = config.batch.tokens_per_rank
    if tokens < LEAST_TOKENS:
        raise UserError(f"batch.tokens_per_rank is {tokens}: measuring needs at least {LEAST_TOKENS} tokens per rank")
    given, nodes = HardwareProfile.load(base), Nodes.find(mesh, local_rank)
    several_nodes = nodes.per_node < nodes.ranks
    # On one node the profile says how large nodes are, in ranks of its own tensor-parallel size.
    described = read_described(base)[1]
    gpus = given.ranks_per_node * (1 if described is None else described.tensor_parallel_size)
    per_node = nodes.per_node if several_nodes else max(nodes.per_node, gpus // mesh.tensor.size())
    tell("building the model")
    levels = 2 if config.context.two_level_exchange else 1
    profile = replace(given, ranks_per_node=per_node, exchange_levels=levels)
    profiled = ProfiledRun(config, mesh, shape, longest_s, profile)
    head_dim, passes = profiled.layer.head_dim, profiled.fetches + 1
    kv_bytes = kv_bytes_per_token(len(profiled.spec.layers), profiled.kv_heads, head_dim, profiled.dtype.itemsize, passes)
    profile = replace(profile, kv_bytes_per_token=kv_bytes)
    why = "one process" if nodes.ranks == 1 else "one node"
    if several_nodes and nodes.per_node == 1:
        why = "one rank per node"
    sources = {name: Source(f"{why}: taken from {base}", taken_over=True) for name in profile.to_dict()}
    sources["exchange_levels"] = Source("setting context.two_level_exchange")
    sources["kv_bytes_per_token"] = Source(f"model: layers × (K, V) × heads × size × {profiled.fetches + 1} passes")
    if several_nodes:
        sources["ranks_per_node"] = Source("launcher")

    def note(measurement: Measurement) -> None:
        nonlocal profile
        constants = {name: _short(value) for name, value in measurement.constants.items()}
        profile = replace(profile, **constants)
        sources.update(dict.fromkeys(constants, Source(measurement.how, measurement.residual)))

    tell("everything except attention")
    note(measure_linear(profiled))
    work = work_of(
        profiled.spec,
        config.dtype,
        recompute=config.train.recompute,
        keep_kv=bool(config.context.keep_kv),
        tensor=mesh.tensor.size(),
        expert=config.parallel.expert_parallel_size,
    )
    profile = replace(profile, query_share=_short(query_share(profile, work)), state_bytes=work.state_bytes)
    sources["state_bytes"] = Source("model: states of linear attention")
    sources["query_share"] = Source(
        "model: 2 of 3 products of the matrices to queries / all products, less tensor-parallel messages"
    )
    note(measure_step(profiled))
    tell("attention")
    for measurement in measure_attention(profiled):
        note(measurement)
    if nodes.ranks > 1:
        tell("exchange")
        for measurement in measure_links(profiled, nodes):
            note(measurement)
        tell("overlap of attention and exchange")
        note(measure_overlap(profiled, nodes, profile))
    tell("a step, to compare with its prediction")
    check = _check(profiled, profile)
    machine = describe_machine(mesh)
    run = {
        **machine,
        "ranks": nodes.ranks,
        "nodes": nodes.ranks // nodes.per_node,
        "device": mesh.device.type,
        "dtype": config.dtype,
        "recompute": config.train.recompute,
        "keep_kv": bool(config.context.keep_kv),
        "tensor_parallel_size": config.parallel.tensor_parallel_size,
        "expert_parallel_size": config.parallel.expert_parallel_size,
        "kernel": config.context.kernel,
        "tokens_per_rank": tokens,
        "max_remote_tokens": config.context.max_remote_tokens,
        "model": shape.model_dump(),
    }
    where = f"{machine['gpu'] or machine['cpu']}, {nodes.ranks} rank{'s' * (nodes.ranks > 1)}"
    about = f"Model of {shape.spec.parameters / 1e6:.1f}M parameters in {config.dtype} on {where}, by `longctx profile`."
    return Measured(profile, about, sources, run, check)


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
        raise OutOfMemory(f"a step with {budget} tokens per rank exceeds GPU memory: lower batch.tokens_per_rank")
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
