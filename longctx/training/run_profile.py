"""Hardware profile of a run: the one in the settings or the default of the device, scaled to the
run's model and parallel sizes, with a printed line on the scaling.
"""

import math
import re
from dataclasses import replace

import torch

from longctx.attention.linear import fused
from longctx.config import Config
from longctx.parallel.device import choose_device
from longctx.parallel.environment import processes_per_node
from longctx.planning.cost.fixed import GATHERS, ShardedStates, with_fixed_costs
from longctx.planning.cost.spec import ModelSpec
from longctx.planning.cost.work import RankWork, work_of
from longctx.planning.hardware_profile import shipped_profiles
from longctx.training.described import (
    Described,
    RunProfile,
    read_described,
    scaled_to,
    unscaled,
    with_vocabulary,
)
from longctx.training.metrics import gpu_kind
from longctx.training.optimizer import OPTIMIZERS

UNKNOWN_GPU = "h100-nvlink-ib"
"""Profile of GPUs that no shipped profile is for."""
FLOAT8_TIME = 0.5
"""Time of products in float8, without what they move, relative to bfloat16, by the float8 runs in
bench/published_runs.csv (bench/published_fit.py)."""


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
        return unscaled(name, profile, *lines)
    spec = with_vocabulary(spec, described)
    work = work_of_run(config, spec, ranks, device.type)
    if config.train.float8 is not None:
        work = in_float8(work)
    if queries_first or config.context.ulysses_degree > 1:
        work = replace(work, queries=0.0)  # heads are swapped once the queries are there
    scaled = scaled_to(name, profile, described=described, work=work, what="this run", node=node)
    if described.from_data_sheets:
        states = states_of_run(config, spec, ranks, work)
        tokens = config.batch.tokens_per_rank
        scaled = replace(scaled, profile=with_fixed_costs(scaled.profile, work, states, tokens))
    if config.train.float8 is not None:
        lines.append(
            f"products in float8 are taken to take {FLOAT8_TIME:.0%} of the time of "
            f"{config.dtype}; what they multiply is cast by the rate of memory"
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
        float8=config.train.float8 is not None,
    )


def states_of_run(config: Config, spec: ModelSpec, ranks: int, work: RankWork) -> ShardedStates:
    """Returns what a rank of a run gathers, reduces and updates, beside its `work`."""
    return ShardedStates.of(
        spec,
        work,
        dtype=config.dtype,
        shards=config.parallel.shard_ranks or config.domain(ranks),
        pipeline_ranks=config.pipeline.ranks,
        gathers=GATHERS[config.parallel.reshard_after],
        reduces_each=config.parallel.reduce_after == "micro_batch",
    )


def in_float8(work: RankWork) -> RankWork:
    """Returns work whose products take `FLOAT8_TIME` of their time."""
    return replace(work, computed=FLOAT8_TIME * work.computed)


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
